"""A list of presets (and extra flags) x seeds over the visible GPUs, one process each (or --per_device N); one table with intervals at the end.

    python tools/ablate.py qwen2.5/none qwen2.5/ets qwen2.5/prs --seeds 42 43
    python tools/ablate.py "qwen2.5/none" "qwen2.5/none --fault state_reset" --seeds 42 43 -- --rounds 20 --eval_limit 50
    python tools/ablate.py tiny/none tiny/ets --out runs/ablate -- --rounds 2,2         # on a CPU: one after the other

An arm is a preset with flags of its own, quoted; what follows `--` goes to every run. Runs are folders under --out, named
after arm and seed; the same command again continues those that were interrupted and skips the finished ones.
"""
import argparse
import collections
import glob
import json
import os
import re
import shlex
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from reward import summary

TOLD = re.compile(r"step \d+:|after |ALARM|error")      # lines of a run's log that are shown while it runs


def last_evaluation(out):
    """{split: records} of a run's last evaluation and the number of its alarms, or None if it is not finished."""
    found, path = {"alarms": 0}, os.path.join(out, "metrics.jsonl")
    if not os.path.exists(os.path.join(out, "model", "config.json")) or not os.path.exists(path):
        return None
    for line in open(path, encoding="utf-8"):
        line = json.loads(line)
        if line["kind"] == "eval":
            found[line["split"]] = glob.glob(os.path.join(out, "eval", f"{line['name'].replace(' ', '-')}.{line['split']}.*.jsonl"))
        found["alarms"] += line.get("event") == "alarm"
    return {k: v if k == "alarms" else [json.loads(line) for file in v for line in open(file, encoding="utf-8")] for k, v in found.items()}


def news(log, at):
    """(lines of a log from byte `at` on that are worth showing, where to go on)."""
    with open(log, "rb") as f:
        f.seek(at)
        whole = f.read().rpartition(b"\n")[0]
    lines = whole.decode(errors="replace").replace("\r", "\n").splitlines()
    return [line.rstrip()[:150] for line in lines if TOLD.match(line)], at + len(whole)


def run_all(jobs, devices):
    """jobs: [(name, command, log path)]; as many processes on a device as it is named in `devices`. Returns {name: exit code}."""
    waiting, running, codes = collections.deque(jobs), {}, {}
    while waiting or running:
        for place, device in enumerate(devices):
            if place not in running and waiting:
                name, command, log = waiting.popleft()
                env = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
                running[place] = [name, subprocess.Popen(command, cwd=ROOT, env=env, stdout=open(log, "w"), stderr=subprocess.STDOUT), log, 0]
                print(f"{name} on {'the CPU' if device is None else 'GPU ' + device}: {log}", flush=True)
        time.sleep(1)
        for place, (name, process, log, at) in list(running.items()):
            ended = process.poll() is not None
            lines, running[place][3] = news(log, at)
            for line in lines:
                print(f"{name}: {line}", flush=True)
            if ended:
                codes[name] = process.returncode
                print(f"{name}: {'done' if not process.returncode else f'failed with exit code {process.returncode}'}", flush=True)
                del running[place]
    return codes


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [d for d in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if d]
    import torch
    return [str(k) for k in range(torch.cuda.device_count())]


def main():
    own, common = (sys.argv[1:], [])
    if "--" in own:
        own, common = own[: own.index("--")], own[own.index("--") + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", help="preset, or 'preset --flag value'")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--out", default="runs/ablate")
    parser.add_argument("--per_device", type=int, default=1, help="runs side by side on one device: a small model leaves a large GPU idle half of the time")
    args = parser.parse_args(own)
    names = [re.sub(r"[^\w.]+", "-", arm).strip("-") for arm in args.arms]
    if len(set(names)) < len(names) or len(set(args.seeds)) < len(args.seeds):
        parser.error("two arms, or two seeds, are the same")
    if args.per_device < 1 or min(args.seeds) < 0:
        parser.error("--per_device is at least 1, a seed at least 0")
    try:
        os.makedirs(args.out, exist_ok=True)
        flags = [flag.partition("=")[0] for words in (*map(shlex.split, args.arms), common) for flag in words]
        presets = [shlex.split(arm)[0] for arm in args.arms]
    except (OSError, ValueError, IndexError) as e:
        parser.error(f"{type(e).__name__}: {e}")
    if taken := {"--seed", "--out", "--preset"} & set(flags):
        parser.error(f"{min(taken)} belongs to ablate.py itself: --seeds, --out, and the arms' presets")
    if unknown := [p for p in presets if not re.fullmatch(r"(qwen2\.5|qwen3|tiny)/(none|sft|ops|hint|ets|prs)", p)]:
        parser.error(f"{unknown[0]!r} is no preset: FAMILY/SIGNAL, as in tiny/ets (interleave.py --help)")
    jobs = []
    for arm, name in zip(args.arms, names):
        preset, *flags = shlex.split(arm)
        for seed in args.seeds:
            out = os.path.join(os.path.abspath(args.out), f"{name}-seed{seed}")
            if last_evaluation(out) is None:
                command = [sys.executable, "interleave.py", "--preset", preset, *flags, "--seed", str(seed), "--out", out, *common]
                jobs.append((f"{name}-seed{seed}", command, out + ".log"))
    codes = run_all(jobs, (visible_gpus() or [None]) * args.per_device)
    print(f"\n{'arm':40} {'seeds':>5} {'alarmed':>7} {'train tasks':>28} {'held-out tasks':>28}")
    for arm, name in zip(args.arms, names):
        found = [x for seed in args.seeds if (x := last_evaluation(os.path.join(args.out, f"{name}-seed{seed}")))]
        cells = []
        for split in ("train", "test"):
            k, n, _, lo, hi = summary([r for x in found for r in x[split]])["all official"]
            cells.append(f"{k}/{n} = {100 * k / max(n, 1):.1f} % [{100 * lo:.1f}, {100 * hi:.1f}]" if n else "not run")
        print(f"{arm:40} {len(found):>5} {sum(x['alarms'] > 0 for x in found):>7} {cells[0]:>28} {cells[1]:>28}")
    print("Intervals: 95 %, over tasks (reward.interval), the seeds' episodes of a task together: they tell nothing about other seeds.")
    sys.exit(1 if any(codes.values()) else 0)


if __name__ == "__main__":
    main()
