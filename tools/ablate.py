"""A list of presets (and extra flags) x seeds over the visible GPUs, one process each (or --per_device N); one table with intervals at the end.

    python tools/ablate.py qwen2.5/none qwen2.5/ets qwen2.5/prs --seeds 42 43
    python tools/ablate.py "qwen2.5/none" "qwen2.5/none --fault state_reset" --seeds 42 43 -- --rounds 20 --eval_limit 50
    python tools/ablate.py tiny/none tiny/ets --out runs/ablate -- --rounds 2,2         # on a CPU: one after the other

An arm is a preset with flags of its own, quoted; what follows `--` goes to every run. Runs are folders under --out, named
after arm and seed; the same command again continues those that were interrupted and skips the finished ones.
"""
import argparse
import collections
import json
import os
import re
import shlex
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from reward import wilson


def last_table(out):
    """{split: (successes, n)} of a run's last evaluation and the number of its alarms, or None if it is not finished."""
    tables, path = {"alarms": 0}, os.path.join(out, "metrics.jsonl")
    if not os.path.exists(os.path.join(out, "model", "config.json")) or not os.path.exists(path):
        return None
    for line in open(path, encoding="utf-8"):
        line = json.loads(line)
        if line["kind"] == "eval":
            tables[line["split"]] = line["table"]["all official"][:2]
        tables["alarms"] += line.get("event") == "alarm"
    return tables


def run_all(jobs, devices):
    """jobs: [(name, command, log path)]; as many processes on a device as it is named in `devices`. Returns {name: exit code}."""
    waiting, running, codes = collections.deque(jobs), {}, {}
    while waiting or running:
        for place, device in enumerate(devices):
            if place not in running and waiting:
                name, command, log = waiting.popleft()
                env = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
                running[place] = name, subprocess.Popen(command, cwd=ROOT, env=env, stdout=open(log, "w"), stderr=subprocess.STDOUT)
                print(f"{name} on {'the CPU' if device is None else 'GPU ' + device}: {log}", flush=True)
        time.sleep(1)
        for place, (name, process) in list(running.items()):
            if process.poll() is not None:
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
    if len(set(names)) < len(names):
        parser.error("two arms are the same")
    os.makedirs(args.out, exist_ok=True)
    jobs = []
    for arm, name in zip(args.arms, names):
        preset, *flags = shlex.split(arm)
        for seed in args.seeds:
            out = os.path.join(os.path.abspath(args.out), f"{name}-seed{seed}")
            if last_table(out) is None:
                command = [sys.executable, "interleave.py", "--preset", preset, *flags, "--seed", str(seed), "--out", out, *common]
                jobs.append((f"{name}-seed{seed}", command, out + ".log"))
    codes = run_all(jobs, (visible_gpus() or [None]) * args.per_device)
    print(f"\n{'arm':40} {'seeds':>5} {'alarmed':>7} {'train tasks':>28} {'held-out tasks':>28}")
    for arm, name in zip(args.arms, names):
        tables = [t for seed in args.seeds if (t := last_table(os.path.join(args.out, f"{name}-seed{seed}")))]
        cells = []
        for split in ("train", "test"):
            k, n = (sum(t[split][j] for t in tables) for j in (0, 1))
            lo, hi = wilson(k, n)
            cells.append(f"{k}/{n} = {100 * k / max(n, 1):.1f} % [{100 * lo:.1f}, {100 * hi:.1f}]" if n else "not run")
        print(f"{arm:40} {len(tables):>5} {sum(t['alarms'] > 0 for t in tables):>7} {cells[0]:>28} {cells[1]:>28}")
    print("Intervals: Wilson over all episodes of all seeds, as if they were independent; a task's episodes are not quite.")
    sys.exit(1 if any(codes.values()) else 0)


if __name__ == "__main__":
    main()
