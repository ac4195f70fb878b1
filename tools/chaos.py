"""Kill a run, lie to its environment, fill its disk: in the end the numbers are those of a run that had a quiet life.

 kill  a small CPU run of interleave.py (SFT, GRPO, ETS, GRPO; HFEngine) twice undisturbed, then stopped by SIGKILL at random
       moments, some in a checkpoint's write, and continued until it is done. Every metric but the times, every trajectory, the
       weights, OUT/best and Adam's moments must be the same bit for bit. Some stops are Ctrl-C: one line, exit code 1.
 fuzz  hostile messages through BFCLEnv.step, reward.score and reward.structure, and every simulator method with extreme
       arguments. No exception, no step of more than BOUND seconds of CPU time, nothing opened, imported or executed (Python's
       audit hook listens), nothing seen by other environments, no growth of memory.
 disk  the disk (a small tmpfs; without the right to mount one, a limit on the file size) is full at different points of a run:
       it stops with one line, its last checkpoint is whole, and it ends as if nothing had happened.

    python tools/chaos.py kill --kills 30           # half an hour; --short: a smaller run, undisturbed only once
    python tools/chaos.py fuzz --messages 20000
    python tools/chaos.py disk
"""
import argparse
import collections
import contextlib
import gc
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

os.environ.update(GOMP_SPINCOUNT="0", OMP_NUM_THREADS="1", PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import psutil
import env_bfcl
import reward

BOUND = 5.0     # seconds of CPU time that one step, score or structure may take
RUN = ("--preset tiny/ets --engine hf --categories miss_param --train_tasks 2 --prompts 2 --mini_batch 1 --n 4 --rounds 6,5 --sft_start 24 "
       "--sft_lr 2e-2 --sft_stop_accuracy 0 --sft_dialogues 1 --ets_epochs 2 --failed_window 2 --lr 1e-3 --kl_coef 0.01 --reward per_turn "
       "--max_action 32 --max_response 400 --save_every 1 --eval_limit 2 --eval_samples 2 --eval_categories miss_param").split()
SHORT = "--rounds 2,1 --sft_start 16 --n 3 --eval_limit 1 --eval_samples 1".split()
BARS = {"evaluate": "evaluation", "rollout": "rollout", "update": "update", "sft start": "SFT step", "ets 1": "SFT step"}


# --- kill and disk: a run as a process --------------------------------------------------------------------------------

class Life:
    """One process of the run in `out`, from its start to its end, whoever ends it."""

    def __init__(self, args, out):
        self.out, self.started = out, time.time()
        self.log = f"{args.out}/{os.path.relpath(out, args.out).replace('/', '-')}.log"      # not on the disk that is full
        command = [sys.executable, "interleave.py", *RUN, *(SHORT if args.short else []), "--model", args.model, "--out", out]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=open(self.log, "wb"), stderr=subprocess.STDOUT)

    def shown(self):
        return open(self.log, encoding="utf-8", errors="replace").read()

    def saving(self):
        """Checkpoints that this process is writing; one that it has found half-written is older than it."""
        with contextlib.suppress(FileNotFoundError):
            return [e.name for e in os.scandir(self.out) if re.fullmatch(r"ckpt-\d+\.tmp", e.name) and e.stat().st_ctime > self.started]
        return []

    def wait_for(self, moment, times, limit=600):
        """Until the moment has come `times` times, or for `limit` seconds; False if the process ends before."""
        seen = set()
        while self.process.poll() is None:
            seen.update(self.saving() if moment == "checkpoint" else ())
            shown = re.findall(rf"{moment}[a-z ]*: +0(?:%|it)", self.shown())       # a bar shows itself at 0 when its work begins
            if max(len(seen), len(shown)) >= times or time.time() - self.started > limit:
                return True
            time.sleep(0.002)
        return False

    def stop(self, how):
        """Send the signal; returns what the process was at, "" if it had ended."""
        self.process.send_signal(how)
        if self.process.wait() == 0:
            return ""
        bars = re.findall(rf"({'|'.join(BARS)})[a-z ]*:", self.shown())
        return "checkpoint" if self.saving() else BARS[bars[-1]] if bars else "start-up"

    def ended(self, word=""):
        """The last line of a program that has ended by itself. With `word`: it says that, the exit code is 1, there is no traceback."""
        code, shown = self.process.wait(), self.shown()
        line = [x for x in re.split(r"[\r\n]+", shown) if x.strip()][-1]
        assert code == bool(word) and word in line and "Traceback" not in shown and "Exception ignored" not in shown, f"{self.out}: exit code {code}\n{shown[-3000:]}"
        return line.replace(os.path.dirname(self.out), "...")


def same_end(a, b):
    """Compare two finished runs: counts of what was compared, AssertionError at the first difference."""
    read = lambda out, name: open(f"{out}/{name}", "rb").read()
    x, y = ([{k: v for k, v in json.loads(line).items() if not k.startswith("time/") and k != "out"} for line in open(f"{out}/metrics.jsonl")] for out in (a, b))
    for k, (one, other) in enumerate(zip(x, y, strict=True)):
        assert one == other, f"line {k + 1} of metrics.jsonl: { {n: (one.get(n), other.get(n)) for n in one | other if one.get(n) != other.get(n)} }"
    files = [f"{d}/model.safetensors" for d in ("model", "best") if os.path.exists(f"{a}/{d}")] + [f"rollouts/{f}" for f in sorted(os.listdir(f"{a}/rollouts"))]
    files.append(max(n for n in os.listdir(a) if n.startswith("ckpt-")) + "/optimizer.safetensors")
    for name in files:
        assert read(a, name) == read(b, name), f"{name} differs"
    for name in sorted(os.listdir(f"{a}/eval")):    # without logp: a continued evaluation has other batches, and so another seventh digit
        one, other = (sorted((r["task_id"], r["sample"], r["ids"], str(r["calls"])) for r in map(json.loads, open(f"{out}/eval/{name}"))) for out in (a, b))
        assert one == other, f"eval/{name} differs"
    return {"metrics_lines": len(x), "files_equal": len(files), "updates": sum(line.get("updates", 0) for line in x)}


def quiet_run(args, name="quiet"):
    life = Life(args, f"{args.out}/{name}")
    life.ended()
    return life.out


def kill(args):
    rng, killed, ctrl_c, runs, start = random.Random(args.seed), collections.Counter(), collections.Counter(), [], time.time()
    quiet = quiet_run(args)
    seconds = time.time() - start
    if not args.short:
        same_end(quiet, quiet_run(args, "again"))
    while killed.total() < args.kills:
        out, lives, code = f"{args.out}/killed{len(runs)}", 0, None
        while code != 0:
            life, lives = Life(args, out), lives + 1
            moment, times, limit = rng.choice(["checkpoint", "checkpoint", "evaluate", "rollout", "update"]), rng.randint(1, 4), rng.uniform(0.3, 1.5) * seconds
            if killed.total() < args.kills and life.wait_for(moment, times, limit):
                time.sleep(rng.uniform(0, 0.02 if moment == "checkpoint" else 0.5))
                gentle = rng.random() < 0.3 and re.search("evaluate|rollout", life.shown())     # before, the line is another one
                if at := life.stop(signal.SIGINT if gentle else signal.SIGKILL):
                    (ctrl_c if gentle else killed)[at] += 1
                    gentle and life.ended("interrupted: the same command continues from")
                    print(f"run {len(runs)}, life {lives}: {'Ctrl-C' if gentle else 'SIGKILL'} in {at}", flush=True)
            code = life.process.wait()
            assert code in (0, 1, -signal.SIGKILL), life.shown()[-3000:]
        runs.append(same_end(quiet, out) | {"lives": lives})
    return {"kills": killed.total(), "killed_in": dict(killed), "ctrl_c": ctrl_c.total(), "ctrl_c_in": dict(ctrl_c),
            "undisturbed_seconds": round(seconds, 1), "undisturbed_twice_equal": not args.short, "runs_equal_to_undisturbed": runs}


def disk(args):
    """`left`: how many bytes are still free, or a file may hold, from then on."""
    quiet, stops = None if args.short else quiet_run(args), []
    for left in (0,) if args.short else (0, 100_000, 700_000, 1_200_000):
        place = f"{args.out}/disk{left}"
        os.makedirs(place)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], capture_output=True).returncode == 0
        try:
            life = Life(args, f"{place}/run")
            assert life.wait_for("rollout", 2), life.shown()[-3000:]
            if mounted:
                with open(f"{place}/ballast", "wb", 0) as f:
                    f.write(bytes(max(shutil.disk_usage(place).free - left, 0)))
            else:
                left = min(200_000 + left, 900_000)     # the log must fit below, Adam's moments must not
                resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE, (left, left))
            stops.append({"left": left, "how": "tmpfs" if mounted else "RLIMIT_FSIZE", "line": life.ended("error: cannot write to")})
            print(stops[-1]["line"], flush=True)
            mounted and os.remove(f"{place}/ballast")
            life = Life(args, life.out)
            if args.short:
                assert life.wait_for("rollout", 1) and life.stop(signal.SIGINT)
            life.ended("interrupted: the same command continues from" if args.short else "")
            stops[-1] |= same_end(quiet, life.out) if quiet else {}
            assert "continuing" in life.shown() and "damaged" not in life.shown(), life.shown()[-3000:]
        finally:
            life.process.kill()
            life.process.wait()
            mounted and subprocess.run(["umount", place], check=True)
    return {"stops": stops}


# --- fuzz: hostile messages -------------------------------------------------------------------------------------------

EXTREME = [None, True, 0, -1, 2**63, -10**300, 10**4000, 1e308, -1e-320, 0.1, "", "a", "/", "../" * 40, "x" * 3000, "x" * 90_000, "\n" * 9000, "\x00\u2028",
           "\u00e9\U0001f600" * 99, "NaN", "1e9", "9" * 4000, "document", "<|im_end|>", "</tool_call>", "__import__('os').system('false')", "{}", [], {}, [[[]]],
           [None] * 1000, [10**4000] * 9, [1e308] * 999, list(range(5000)), ["x" * 999] * 50, {"self": {"__class__": [1]}}, json.loads("[" * 29 + "]" * 29)]
NAMES = ["__init__", "__class__", "__dict__", "_load_scenario", "ls.__globals__", "os.system", "eval", "root", "", "ls ", "LS", "x" * 9999, "\u00e9",
         "__import__('os').system('false')"]
BAD = ['{"name": "ls", "arguments": {"a": ' + x + "}}" for x in ("", "NaN", "-Infinity", "1e999", "9" * 5000, '{"\\udfff": 1}', '"' + "x" * 99_000 + '"')] + [
    '{"name": "echo", "arguments": {"content": "\\ud800"}}', '{"name": "ls", "arguments": []}', '{"name": "ls", "arguments": null}', '{"name": ["ls"], "arguments": {}}',
    '{"name": "ls", "name": "rm", "arguments": {}}', "null", "[]", "7", '"ls"',
    "[" * 50_000, '{"a":' * 15_000 + "1" + "}" * 15_000, '{"name": "ls", "arguments": {', "", "\x00", "\ud800", "ls()", "<tool_call>" * 3000]
SOUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "{", "}", '"', "\\", "\n",
        '{"name": "ls", "arguments": {}}', "\ud800", "\x00"]
LS = f"<tool_call>{SOUP[-3]}</tool_call>"
HUGE = [LS * 5000, "<tool_call>" * 900_000, "<tool_call></tool_call>" * 100_000, "</think>" * 900_000, " " * 10**7, "<|" * 4_000_000,
        '<tool_call>{"name": "echo", "arguments": {"content": "' + "x" * 10**7 + '"}}</tool_call>']


def hostile(rng, names, signatures, render):
    """A message of a model that wants to hurt."""
    def block():
        name = rng.choice(names) if rng.random() < 0.8 else rng.choice([*NAMES, *signatures])
        arguments = {p: rng.choice(EXTREME) for p in signatures.get(name, ["a"]) if p != "self" and rng.random() < 0.9}
        return render(name, arguments | ({rng.choice(["extra", "self", "args"]): 1} if rng.random() < 0.1 else {}))
    one, kind = block(), rng.random()
    at = rng.randrange(len(one) + 1)
    text = (one if kind < 0.4 else one + "".join(block() for _ in range(rng.choice([1, 5, 70]))) if kind < 0.5 else one[:at] if kind < 0.6 else
            one[:at] + rng.choice(SOUP) + one[at:] if kind < 0.7 else f"<tool_call>{rng.choice(BAD)}</tool_call>" + one * rng.randrange(2) if kind < 0.85 else
            "".join(rng.choices(SOUP, k=rng.randrange(60))) if kind < 0.95 else rng.choice(["", " ", "Done.", "I think that " * 500]) if kind < 0.99 else rng.choice(HUGE))
    return text + rng.choice(["<|im_end|>"] * 3 + ["", "<|endoftext|>"])


def fuzz(args):
    rng, tasks, seen, slowest, heard, listening = random.Random(args.seed), env_bfcl.load_tasks("all", env_bfcl.CATEGORIES), collections.Counter(), {}, [], []
    sys.addaudithook(lambda event, _: heard.append(event) if listening and event.split(".")[0] in (
        "open", "exec", "compile", "import", "os", "subprocess", "socket", "shutil", "pickle", "ctypes", "marshal") else None)

    def timed(what, function, *values):
        start = time.process_time()
        listening.append(1)
        result = function(*values)
        listening.clear()
        slowest[what] = max(slowest.get(what, 0), round(time.process_time() - start, 2))
        assert slowest[what] < BOUND and not heard, (what, slowest[what], heard, str(values)[:500])
        return result

    def checked(simulators, call, allowed, execute=env_bfcl.execute):
        result = execute(simulators, call, allowed)
        assert call.name in allowed or result == f"Error during execution: name '{call.name[:64]}' is not defined", call
        return result

    def say(env, text, reason="stop"):
        messages = timed("step", env.step, text, reason)
        assert (messages is None) == (env.finish is not None)
        assert all(m["role"] == "user" and m["content"].encode("utf-8") is not None for m in messages or [])
        assert timed("structure", reward.structure, text, reason) in ("call", "response", "polluted", "collapsed")
        seen["messages"] += 1

    def world():    # what every other task sees
        return [(reward.score(t, t.ground_truth), env_bfcl.system_prompt(t)) for t in tasks], [
            [env_bfcl.execute(s, call, t.names) for turn in t.ground_truth for call in turn] for t in tasks[::9] for s in [env_bfcl.make_simulators(t)]]
    render = lambda name, arguments: env_bfcl.render_call(env_bfcl.Call(name, arguments))
    signatures = {name: [p for p in s.parameters if p != "self"] for name, s in env_bfcl.SIGNATURES.items()}
    before, methods = world(), list(env_bfcl.OWNER.items())
    env_bfcl.execute, memory = checked, []
    for name, owner in rng.sample(methods, 9) if args.short else methods:   # each parameter with each extreme value, then all of them together
        env = env_bfcl.BFCLEnv(next(t for t in tasks if owner in t.involved_classes and not any(name in n for n in t.held_out.values())))
        for some in [[p] for p in signatures[name]] + [signatures[name]]:
            for k in range(0, len(EXTREME), 13):
                say(env, "".join(render(name, {p: v if p in some else rng.choice(EXTREME) for p in signatures[name]}) for v in EXTREME[k: k + 13]))
                env.steps = 0
        seen["methods"] += 1
    methods_said = seen["messages"]
    while seen["messages"] < args.messages:
        task = rng.choice(tasks)
        env, bystander = env_bfcl.BFCLEnv(task, rng.choice(["none", "short", "error"])), env_bfcl.BFCLEnv(task)
        quiet, names = reward._public(bystander.simulators), sorted(task.names)
        while env.finish is None:
            say(env, hostile(rng, names, signatures, render), "length" if rng.random() < 0.02 else "stop")
        result = timed("score", reward.score, task, env.calls_per_turn)
        assert result.error in (None, "turns") and len(result.per_turn) == len(task.turns) and result.official >= result.strict, result
        timed("first_difference", reward.first_difference, task, env.calls_per_turn)
        assert not reward._changed(quiet, bystander.simulators), f"{task.id}: another environment of the task has changed"
        assert sum(c.name not in task.names for calls in env.calls_per_turn for c in calls) == env.feedback_count.get("unknown", 0)
        seen.update({"episodes": 1, f"finish {env.finish}": 1, "calls": sum(map(len, env.calls_per_turn)), **env.feedback_count})
        if seen["messages"] > methods_said + len(memory) * (args.messages - methods_said) / 5:
            gc.collect()
            memory.append(round(psutil.Process().memory_info().rss / 2**20))
    env_bfcl.execute = checked.__defaults__[0]
    assert world() == before, "other tasks are no longer what they were"
    assert memory[-1] - memory[len(memory) // 3] < 64, f"memory grows: {memory} MiB"
    assert min(seen[kind] for kind in ("finish done", "finish length", "malformed", "unclosed", "unknown")) > 10, seen
    return {**seen, "slowest_cpu_seconds": slowest, "bound_cpu_seconds": BOUND, "rss_mib": memory, "other_tasks_unchanged": len(tasks)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "fuzz", "disk"])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="of kill and disk; default: a tiny one is made")
    parser.add_argument("--out", help="folder of the runs; default: a temporary one, deleted at the end")
    parser.add_argument("--short", action="store_true", help="a smaller run for the tests; writes no result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        args.out, start = os.path.abspath(args.out or temporary), time.time()
        os.makedirs(args.out, exist_ok=True)
        if args.what != "fuzz" and not args.model:
            args.model = f"{args.out}/tiny_model"
            subprocess.run([sys.executable, "tools/tiny_model.py", args.model, "--hidden", "64", "--layers", "1", "--vocab", "1024"], cwd=ROOT, check=True)
        count = {"kill": f" --kills {args.kills}", "fuzz": f" --messages {args.messages}", "disk": ""}[args.what]
        result = {"command": f"python tools/chaos.py {args.what}{count} --seed {args.seed}",
                  "machine": f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}",
                  **{"kill": kill, "fuzz": fuzz, "disk": disk}[args.what](args), "minutes": round((time.time() - start) / 60, 1)}
    if not args.short:
        json.dump(result, open(f"{ROOT}/results/chaos_{args.what}.json", "w"), indent=1)
    print("\n".join(f"{k:26} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
