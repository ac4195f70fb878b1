"""The experiment: which signal, which schedule. Alternates GRPO (grpo.py) and SFT (sft.py), evaluates, saves, resumes.

A run is a list of phases; a phase is a number of steps of one kind:
    sft      SFT on the ground truth of all training tasks (or on --sft_data)
    rl       GRPO; with the signal ops one place of each group is the ground truth's, with hint some samples see a hint
    ets      SFT on the ground truth of the tasks that failed in the last steps of the RL round before it
    prs      ets, and reflections on failed trajectories of those steps

Deviations from the paper:
 1. One process and one program runs the whole schedule; the released scripts are resume points edited by hand.
 2. "Failed" means that all samples failed, as the paper says (--failed any: its code).
 3. Nothing is chosen on the test split. Evaluations are made at the start and after each phase, on train and test tasks.

    python interleave.py --preset qwen2.5/ets                    # a row of the paper's table: none sft ops hint ets prs
    python interleave.py --preset qwen2.5/none --fault end_token state_reset    # with faults of the released code
    python interleave.py --preset qwen2.5/ets --rounds 4,4,4 --prompts 20       # a short look
    python interleave.py --preset tiny/ets                       # on a CPU (run.sh makes the tiny model)
    python interleave.py --preset qwen2.5/ets --out runs/qwen2.5-ets            # again: goes on where it stopped
"""
import os
import signal as signals
import sys

if __name__ == "__main__":
    # While the imports below run there is nothing to save, and an exception would come out of the middle of some package.
    signals.signal(signals.SIGINT, lambda *args: (os.write(2, b"\ninterrupted before the first step\n"), os._exit(1)))
    if "PYTHONHASHSEED" not in os.environ:      # three simulator methods print sets: else their order, and so what the policy
        os.environ["PYTHONHASHSEED"] = "0"      # reads, changes from process to process
        signals.pthread_sigmask(signals.SIG_BLOCK, {signals.SIGINT})    # Ctrl-C waits until the new process is here again
        os.execv(sys.executable, sys.orig_argv)
    signals.pthread_sigmask(signals.SIG_UNBLOCK, {signals.SIGINT})

import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import json
import re
import shutil
import subprocess
import traceback
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, field

from rollout import (chat_glue, evaluate, find_model, load_tokenizer, load_trajectories, make_engine, parse_flags,    # before torch
                     save_trajectories, summary)
import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import env_bfcl
import grpo
import sft
from grpo import GRPOConfig

FAMILIES = {    # the settings of a model family: the paper's, and one that a CPU finishes in minutes
    "qwen2.5": dict(model="Qwen/Qwen2.5-1.5B-Instruct", rounds="50,100,150"),
    "qwen3": dict(model="Qwen/Qwen3-1.7B", rounds="50,50,100"),
    "tiny": dict(model="runs/tiny_model", rounds="6,6", categories="base", train_tasks=6, short_docs=True, prompts=6, n=8, tokens_per_row=8192, mini_batch=6,
                 lr=2e-5, warmup=1, rl_warmup=1, sft_start=150, sft_lr=4e-3, ets_lr=3e-3, sft_stop_accuracy=0.999, ets_epochs=30, failed="any", failed_window=3,
                 max_action=160, max_response=2048, save_every=3, kv_gib=1.0, eval_limit=50, eval_categories="base", eval_samples=8),
}
SIGNALS = {     # signal -> its schedules; the first is the paper's
    "none": ("rl",), "sft": ("sft_then_rl", "sft_only"), "ops": ("sync",), "hint": ("sync",), "ets": ("interleave", "adaptive"),
    "prs": ("interleave", "adaptive"),
}
FAULTS = {      # what the released code does, to be switched on one at a time
    "end_token": "an end token that nobody sampled is added after a message cut by length, and trained; the message counts as complete",
    "state_reset": "the simulators that the policy sees start over at each user turn; the reward's do not",
    "no_think_context": "the empty think block is in the context for sampling, not for training",
    "hint_context": "the hint ends with a literal end token, which closes the system message early",
    "retokenize": "training sees the decoded and encoded text instead of the sampled ids",
}


@dataclass
class Config(GRPOConfig):
    preset: str = field(default="", metadata={"help": "family/signal, e.g. qwen2.5/ets: sets the defaults of the other flags"})
    out: str = field(default="", metadata={"help": "the run's folder; default runs/<preset>"})
    fresh: bool = field(default=False, metadata={"help": "delete the run in OUT and start over (else it is continued)"})
    signal: str = field(default="ets", metadata={"help": "none, sft, ops, hint, ets or prs"})
    schedule: str = field(default="", metadata={"help": "rl, sft_then_rl, sft_only, sync, interleave, adaptive; default: the signal's"})
    fault: list[str] = field(default_factory=list, metadata={"help": f"switch on faults of the released code: {', '.join(FAULTS)}"})
    hinted: int = field(default=2, metadata={"help": "samples of a group that see a hint (signal hint)"})
    teacher: str = field(default="", metadata={"help": "URL of an OpenAI-compatible server that writes the reflections (signal prs)"})
    teacher_model: str = field(default="", metadata={"help": "its model's name"})
    sft_data: str = field(default="", metadata={"help": "chats for the phase sft instead of the ground truth (jsonl)"})
    rounds: str = field(default="50,100,150", metadata={"help": "GRPO steps of each round, comma-separated"})
    rl_warmup: int = field(default=5, metadata={"help": "warm-up steps of the rounds after an SFT phase"})
    sft_start: int = field(default=0, metadata={"help": "SFT steps before anything else (for a start that cannot call tools)"})
    sft_epochs: int = field(default=3, metadata={"help": "epochs of the signal sft"})
    sft_lr: float = field(default=1e-5, metadata={"help": "peak rate of SFT before RL"})
    sft_dialogues: int = field(default=13, metadata={"help": "dialogues per SFT step (13: about the paper's 128 rows)"})
    sft_stop_accuracy: float = field(default=0.0, metadata={"help": "SFT before RL stops at this token accuracy; 0 = never"})
    ets_epochs: int = field(default=2, metadata={"help": "epochs of an SFT phase between rounds"})
    ets_lr: float = field(default=1e-5, metadata={"help": "its peak rate"})
    failed: str = field(default="all", metadata={"help": "a task failed if all (paper) or any (its code) of its samples failed"})
    failed_window: int = field(default=10, metadata={"help": "over this many last steps of the round"})
    optimizer: str = field(default="reset", metadata={"help": "Adam's moments at a phase border: reset (paper) or keep"})
    data_order: str = field(default="reset", metadata={"help": "each round starts the task order anew (reset, paper) or goes on (keep)"})
    init_tags: bool = field(default=False, metadata={"help": "give untrained <tool_call> rows of the embedding a start (Coder weights)"})
    reference: str = field(default="reset", metadata={"help": "KL reference: reset to each round's start (paper), or keep the first"})
    stop_on_collapse: bool = field(default=False, metadata={"help": "end the run when the alarm fires (for sweeps)"})
    save_every: int = field(default=10, metadata={"help": "steps between checkpoints; the last two are kept"})
    eval_limit: int = field(default=0, metadata={"help": "evaluate on at most N tasks of each category; 0 = all"})
    eval_samples: int = field(default=0, metadata={"help": "train tasks: N samples each at the training temperature; 0 = once, greedy"})
    eval_categories: str = field(default="base,miss_func,miss_param,long_context", metadata={"help": "of the test tasks"})


BEST_WINDOW = 5     # OUT/best: the weights after the BEST_WINDOW steps of one round with the highest mean train reward
BETAS = {True: (0.9, 0.999), False: (0.9, 0.95)}    # of RL, of SFT
HARMLESS = {"fresh", "report_to", "save_every", "kv_gib", "sleep", "checkpointing", "tokens_per_row", "fsdp", "offload_optimizer"}   # may differ when a run is resumed


@dataclass
class Phase:
    name: str       # "rl 1"
    kind: str       # sft | rl | ets
    steps: int      # GRPO steps; SFT phases count their own


def read_config():
    """Flags over preset over defaults; ValueError with one line for what does not fit together."""
    at = next((i for i, a in reversed(list(enumerate(sys.argv))) if a == "--preset" or a.startswith("--preset=")), None)     # the last, as argparse
    preset = "" if at is None else sys.argv[at].partition("=")[2] or (sys.argv[at + 1] if at + 1 < len(sys.argv) else "")
    defaults = {}
    if preset:
        family, _, signal = preset.partition("/")
        if family not in FAMILIES or signal not in SIGNALS:
            raise ValueError(f"--preset is one of {', '.join(f'{f}/{s}' for f in FAMILIES for s in SIGNALS)}, not {preset!r}")
        defaults = FAMILIES[family] | {"signal": signal, "out": os.path.join("runs", preset.replace("/", "-"))}
    config = parse_flags(Config, description=__doc__.split("\n")[0], defaults=defaults)
    if config.signal not in SIGNALS:
        raise ValueError(f"--signal is one of {', '.join(SIGNALS)}, not {config.signal!r}")
    config.schedule = config.schedule or SIGNALS[config.signal][0]
    if config.schedule not in SIGNALS[config.signal]:
        raise ValueError(f"--signal {config.signal} goes with --schedule {' or '.join(SIGNALS[config.signal])}, not {config.schedule!r}")
    for name, legal in (("failed", ("all", "any")), *((n, ("reset", "keep")) for n in ("optimizer", "reference", "data_order"))):
        if getattr(config, name) not in legal:
            raise ValueError(f"--{name} is {' or '.join(legal)}, not {getattr(config, name)!r}")
    if not all(r.strip().isdecimal() for r in config.rounds.split(",")):
        raise ValueError(f"--rounds is a list of step numbers such as 50,100,150, not {config.rounds!r}")
    for fault in config.fault:
        if fault not in FAULTS:
            raise ValueError(f"--fault is one of {', '.join(FAULTS)}, not {fault!r}")
    if "hint_context" in config.fault and config.signal != "hint":
        raise ValueError("--fault hint_context needs --signal hint")
    if config.signal == "prs" and config.save_rollouts == "none":
        raise ValueError("--signal prs reads the failed trajectories that are saved: it does not go with --save_rollouts none")
    if bool(config.teacher) != bool(config.teacher_model):
        raise ValueError("--teacher URL and --teacher_model NAME go together")
    if config.teacher:
        check_teacher(config)
    if config.stop_on_collapse and config.schedule == "adaptive":
        raise ValueError("--stop_on_collapse ends the run at an alarm, --schedule adaptive mends it: one of them")
    if config.hint_correction and config.signal != "hint" or config.ops_weight != "plain" and config.signal != "ops":
        raise ValueError(f"--{'hint_correction' if config.hint_correction else 'ops_weight'} does nothing with --signal {config.signal}")
    if config.sft_data:
        sft.read_chats(config.sft_data)
    if config.sft_stop_accuracy > 1:
        raise ValueError(f"--sft_stop_accuracy is a share, at most 1, not {config.sft_stop_accuracy}")
    if config.signal == "hint" and not 0 < config.hinted <= config.n:
        raise ValueError(f"--hinted must lie between 1 and --n {config.n}")
    if config.load_rollouts or config.steps != GRPOConfig.steps:
        raise ValueError(f"--{'load_rollouts' if config.load_rollouts else 'steps'} belongs to python grpo.py; here --rounds says how many steps")
    if not config.model:
        raise ValueError("give --model DIR or a --preset")
    config.out = os.path.normpath(config.out or os.path.join("runs", config.signal))
    grpo.check_config(config)
    return config


def check_teacher(config):
    """The teacher is asked after a whole round of RL: ValueError now if nobody would answer."""
    if config.signal != "prs":
        raise ValueError(f"--teacher writes reflections, which --signal {config.signal} has none of: use prs")
    try:
        urllib.request.urlopen(config.teacher.rstrip("/") + "/models", timeout=20).close()
    except urllib.error.HTTPError:
        pass        # somebody is there; not each server lists its models to everybody
    except (OSError, ValueError) as e:
        raise ValueError(f"--teacher {config.teacher}: no server answers there ({e}); an OpenAI-compatible URL is like http://localhost:8000/v1") from None


def plan(config):
    """The run's phases, from its flags alone."""
    rounds = [int(r) for r in config.rounds.split(",")]
    phases = [Phase("sft start", "sft", config.sft_start)] if config.sft_start else []
    if config.signal == "sft":
        phases.append(Phase("sft", "sft", 0))
    if config.schedule == "sft_only":
        return phases
    if config.schedule != "interleave":
        rounds = [sum(rounds)]
    for k, steps in enumerate(rounds, 1):
        phases.append(Phase(f"rl {k}", "rl", steps))
        if config.schedule == "interleave" and k < len(rounds):     # none after the last round
            phases.append(Phase(f"{config.signal} {k}", config.signal, 0))
    return phases


# --- ALGO: the collapse alarm ---------------------------------------------------------------------------------------------

ALARMS = {      # metric -> (the healthy window it is compared with, the smallest spread that is taken for real)
    "unhealthy": ("start", 0.02),                       # share of polluted and collapsed messages
    "control/first/<|im_end|>": ("start", 0.01),        # probability of ending a message before it has begun
    "control/after_open/<|im_end|>": ("start", 0.01),   # ... of ending it inside a call
    "finish/length": ("start", 0.02),
    "structure/malformed": ("start", 0.02),
    "structure/repeated": ("start", 0.02),              # messages that say what the one before said
    "kl": ("recent", 0.02),                             # grows in a healthy run too: only a jump counts
    "entropy": ("recent", 0.05),
}


def alarm(history):
    """Why the run looks like it is collapsing, or "". `history`: {metric: value} of this round's steps, oldest first.

    A metric fires if it lies above a limit in both of the last two steps. The limit is 5 robust standard deviations (1.4826 x
    the median absolute deviation, at least the metric's smallest spread) above the median of its healthy window: the round's
    first 10 steps ("start"), or the 20 steps before the last two ("recent"); so not before a round's 12th step. What breaks
    faster would be its own healthy window, so a "start" metric also fires against the round's first step, which no update
    preceded: 5 smallest spreads or 8 binomial standard deviations of that one share above it (8: the messages of a group are
    alike. results/LOG.md has the runs by which it was chosen). The reward is not looked at: it falls last."""
    for metric, (window, least) in ALARMS.items():
        values = [h[metric] for h in history if metric in h]
        limits = []
        if len(values) >= 12:
            healthy = sorted(values[:10] if window == "start" else values[-22:-2])
            middle = healthy[len(healthy) // 2]
            spread = 1.4826 * sorted(abs(v - middle) for v in healthy)[len(healthy) // 2]
            limits.append((middle + 5 * max(spread, least), middle))
        if len(values) >= 3 and window == "start" and metric in history[0]:
            share = min(max(values[0], least), 1.0)
            count = history[0]["n"] * (1 if metric == "finish/length" else history[0]["messages"])      # of episodes, of messages
            limits.append((values[0] + max(5 * least, 8 * (share * (1 - share) / max(count, 1)) ** 0.5), values[0]))
        for limit, healthy in limits:
            if min(values[-2:]) > limit:
                return f"{metric} {values[-1]:.3g} > {limit:.3g} (healthy: {healthy:.3g})"
    return ""


def on_alarm(run, phase, why):
    """Write the event. With --schedule adaptive: back to the last healthy weights, an SFT phase, then the rest of the round; with
    --stop_on_collapse the plan ends here: what is left is the evaluation of the collapsed weights and the report."""
    state = run.state
    run.write(kind="event", event="alarm", phase=state["phase"], step=state["step"], why=why)
    tqdm.write(f"ALARM at step {state['step']}: {why}")
    if run.config.stop_on_collapse:
        state["plan"][state["phase"]:] = [[phase.name, "rl", state["step_in_phase"]]]
        run.write(kind="event", event="stopped", phase=state["phase"], step=state["step"], why=why)
        return
    if run.config.schedule != "adaptive":
        return
    # Weights of step k played step k's episodes, and those of the last two steps rang.
    back = [h for h in state["healthy"] if h[0] < state["step"] - 2] or state["healthy"][:1]
    while back and (bad := damaged(back[-1][1])[0]):
        tqdm.write(f"{back.pop()[1]} is damaged ({bad}): not used")
    if back:
        load_weights(run.learner, back[-1][1])
        grpo.push(run.learner, run.engine)
    run.write(kind="event", event="rollback", phase=state["phase"], step=state["step"], to=back[-1][0] if back else None)
    done, k = state["step_in_phase"], state["phase"]
    rounds = sum(p[1] == "rl" for p in state["plan"][: k + 1])
    state["plan"][k: k + 1] = [[phase.name, "rl", done], [f"{run.config.signal} {rounds}", run.config.signal, 0]] + (
        [[f"rl {rounds + 1}", "rl", phase.steps - done]] if phase.steps > done else [])


def remember_healthy(run):
    """Weights to go back to, saved while nothing looks wrong; the last two are kept."""
    state, path = run.state, os.path.join(run.config.out, f"healthy-{run.state['step']:06d}")
    weights = grpo.full_weights(run.learner)
    if run.main:
        save_model(run, path, weights)
    state["healthy"] = [h for h in state["healthy"] if h[1] != path][-1:] + [[state["step"], path]]


# --- ALGO: what an SFT phase between rounds trains on ---------------------------------------------------------------------

def failed_tasks(outcomes, rule):
    """outcomes: [{task_id: [successes, samples]}] of the last steps -> ids that failed, sorted. `all`: no sample of any of
    these steps succeeded; `any`: some sample failed."""
    won, played = collections.Counter(), collections.Counter()
    for step in outcomes:
        for task_id, (k, n) in step.items():
            won[task_id] += k
            played[task_id] += n
    return sorted(i for i in played if (won[i] == 0 if rule == "all" else won[i] < played[i]))


def phase_dialogues(run, phase):
    """The trajectories that an SFT phase trains on, and counts for the log."""
    config, tasks = run.config, run.tasks
    if phase.kind == "sft":
        if config.sft_data and phase.name == "sft":
            chats = sft.read_chats(config.sft_data)
            return [sft.encode_chat(run.tokenizer, c, f"{config.sft_data}:{k}", think=config.think) for k, c in enumerate(chats, 1)], {}
        return sft.demonstrate(run.tokenizer, tasks, think=config.think), {}
    ids = set(failed_tasks(run.outcomes[-config.failed_window:], config.failed))
    dialogues = sft.demonstrate(run.tokenizer, [t for t in tasks if t.id in ids], think=config.think)
    counts = {"failed_tasks": len(ids)}
    if phase.kind == "prs":
        teacher = functools.partial(sft.teacher_reflections, url=config.teacher, name=config.teacher_model,
                                    cache=os.path.join(config.out, "teacher")) if config.teacher else None
        reflections, lost = sft.reflect(run.tokenizer, failures(run), think=config.think, teacher=teacher)
        dialogues += reflections
        counts |= {"reflections": len(reflections), "reflections_lost": lost}
    return dialogues, counts


def failures(run):
    """(task, trajectory) of one failed sample per task and step of the window, from the saved ones: a resumed run sees the same."""
    by_id, found = {t.id: t for t in run.tasks}, {}
    first = max(run.state["step"] - min(run.config.failed_window, len(run.outcomes)), 0)
    for step in range(first, run.state["step"]):
        for path in sorted(glob.glob(os.path.join(grpo.rollouts_folder(run.config), f"{step:06d}.*.jsonl"))):
            for t in load_trajectories(path):
                if t.source == "policy" and t.reward and not (t.finish == "done" and t.reward.official):
                    found.setdefault((step, t.task_id), (by_id[t.task_id], t))
    return list(found.values())


# --- ALGO: synchronous signals and faults ---------------------------------------------------------------------------------

def make_signal(run):
    """The run's grpo.Signal: what its groups hold beside the policy's own samples, and what is damaged on purpose."""
    config, tokenizer, faults = run.config, run.tokenizer, tuple(run.config.fault)
    signal = grpo.Signal(faults=faults)
    if config.signal == "ops":      # 7 + 1: the ground truth is played in the live environment and scored like the others
        signal.demo = lambda task: sft.demonstrate(tokenizer, [task], think=config.think)[0]
    if config.signal == "hint":     # 2 + 6
        closer = "\nAnswer in the required format." + (tokenizer.eos_token if "hint_context" in faults else "")
        signal.hint = lambda task, k: sft.hint(task) + closer if k < config.hinted else ""
    if "no_think_context" in faults or "retokenize" in faults:
        signal.fault = lambda t: damage(t, tokenizer, config.think, faults)
    return signal


def damage(t, tokenizer, think, faults):
    """Rebuild a trajectory as the released code's trainer sees it. The engine's log-probabilities stay with their tokens as
    long as the ids do; re-tokenised ones get 0, so the agreement metric shows the fault."""
    glue = chat_glue(tokenizer, think)
    pieces, k = [], 0       # [ids, mask, logp] of each run of equal mask
    while k < len(t.ids):
        end = next((j for j in range(k, len(t.ids)) if t.mask[j] != t.mask[k]), len(t.ids))
        pieces.append([t.ids[k:end], t.mask[k], t.logp[k:end]])
        k = end
    for piece, after in zip(pieces, pieces[1:] + [None]):
        ids, sampled, logp = piece
        if "no_think_context" in faults and not sampled and after and glue.think_block and ids[-len(glue.think_block):] == glue.think_block:
            piece[0], piece[2] = ids[: -len(glue.think_block)], logp[: -len(glue.think_block)]
        if "retokenize" in faults and sampled:
            text = tokenizer.decode([i for i in ids if i not in glue.stop])
            new = tokenizer(text, add_special_tokens=False).input_ids + [i for i in ids[-1:] if i in glue.stop]
            if new != ids:
                piece[0], piece[2] = new, [0.0] * len(new)
    t.prompt_len = len(pieces[0][0])
    t.ids = [i for ids, _, _ in pieces for i in ids]
    t.mask = [m for ids, m, _ in pieces for _ in ids]
    t.logp = [x for _, _, logp in pieces for x in logp]


def sft_settings(config, phase):
    first = phase.kind == "sft"
    return sft.SFTConfig(seed=config.seed, epochs=config.sft_epochs if first else config.ets_epochs, steps=phase.steps,
                         lr=config.sft_lr if first else config.ets_lr, warmup_ratio=0.1 if first else 0.3, dialogues=config.sft_dialogues,
                         stop_accuracy=config.sft_stop_accuracy if first else 0.0, tokens_per_row=config.tokens_per_row)


# --- the run ----------------------------------------------------------------------------------------------------------

@dataclass
class Run:
    config: Config
    tasks: list             # that it trains on
    test_tasks: list
    tokenizer: object
    engine: object
    learner: grpo.Learner
    state: dict             # phase, step_in_phase, step (GRPO steps so far), saves: what a resumed run needs to know
    outcomes: list          # one {task_id: [successes, samples]} per GRPO step of the current round
    log: object = None      # metrics.jsonl; None on the other ranks, like
    lock: object = None     # OUT/lock, kept open to keep others out

    @property
    def main(self):
        return self.learner.accelerator.is_main_process

    def write(self, **line):
        """Append a line to metrics.jsonl."""
        if self.main:
            self.log.write(json.dumps(line) + "\n")
            self.log.flush()
        if line["kind"] == "config":
            return
        # A tracker's step is the line: SFT steps and evaluations between two GRPO steps must not share one, wandb would drop all but the last.
        self.state["ticks"] = self.state.get("ticks", 0) + 1
        if self.config.report_to:
            line |= {f"{line['split']}/{name}": rate for name, (_, _, rate, _, _) in line.get("table", {}).items()} | {line.get("event"): 1}
            self.learner.accelerator.log({f"{line['kind']}/{k}": v for k, v in line.items() if k and isinstance(v, (int, float))}, step=self.state["ticks"])


def evaluate_now(run, name):
    """Greedy episodes on the train and the test tasks -> eval lines in metrics.jsonl."""
    rank, world = run.learner.accelerator.process_index, run.learner.accelerator.num_processes
    run.learner.model.eval()
    for split, tasks in (("train", run.tasks), ("test", run.test_tasks)):
        os.makedirs(os.path.join(run.config.out, "eval"), exist_ok=True)
        path = os.path.join(run.config.out, "eval", f"{name.replace(' ', '-')}.{split}.{rank}.jsonl")
        sampled = dict(samples=run.config.eval_samples, temperature=run.config.temperature) if split == "train" and run.config.eval_samples else {}
        records = evaluate(run.engine, run.tokenizer, tasks[rank::world], path, seed=run.config.seed, **sampled, think=run.config.think, max_action=run.config.max_action,
                           decode_feedback=run.config.decode_feedback, desc=f"evaluate {split}" if run.main else None)
        table = summary(gather_object(records))
        run.write(kind="eval", phase=run.state["phase"], step=run.state["step"], name=name, split=split, table=table)
        k, n, rate, lo, hi = table["all official"]
        if run.main:
            tqdm.write(f"after {name}: {split} {k}/{n} = {100 * rate:.1f} % [{100 * lo:.1f}, {100 * hi:.1f}]")
    run.learner.model.train()


def run_sft(run, phase):
    """An SFT phase from its `step_in_phase` on."""
    dialogues, counts = phase_dialogues(run, phase)
    if not dialogues:
        run.write(kind="event", event="skipped", phase=run.state["phase"], name=phase.name, step=run.state["step"], why="no task failed")
        return
    for step, metrics, last in sft.sft_phase(run.learner, dialogues, sft_settings(run.config, phase), run.state["step_in_phase"],
                                             run.state["recent"], desc=phase.name):
        run.write(kind="sft", phase=run.state["phase"], step=run.state["step"], sft_step=step, dialogues=len(dialogues), **counts, **metrics)
        run.state["step_in_phase"] = step + 1
        if (step + 1) % run.config.save_every == 0 and not last:
            save_checkpoint(run)
    if run.main:
        tqdm.write(f"{phase.name}: {step + 1} steps on {len(dialogues)} dialogues, loss {metrics['loss']:.4f}, token accuracy {metrics['token_accuracy']:.3f}")
    grpo.push(run.learner, run.engine)


def run_rl(run, phase):
    """A round of GRPO from its `step_in_phase` on."""
    config, state = run.config, run.state
    config = dataclasses.replace(config, warmup=config.warmup if phase.name == "rl 1" else config.rl_warmup)
    by_id, signal = {t.id: t for t in run.tasks}, make_signal(run)
    grpo.push(run.learner, run.engine)      # drops what evaluations have left in its caches: a resumed round has none either
    bar = tqdm(total=phase.steps, initial=state["step_in_phase"], desc=phase.name, disable=not run.main, dynamic_ncols=True)
    while state["step_in_phase"] < phase.steps:
        batch = [run.tasks[i] for i in grpo.task_order(len(run.tasks), config.prompts, state["step" if config.data_order == "keep" else "step_in_phase"], config.seed)]
        metrics, trajectories = grpo.grpo_step(run.learner, run.engine, run.tokenizer, batch, state["step"], state["step_in_phase"], config, signal)
        outcome = collections.defaultdict(lambda: [0, 0])
        for task_id, won in gather_object([(t.task_id, int(t.finish == "done" and t.reward.official == 1)) for t in trajectories
                                          if not t.infra_error and t.source == "policy"]):
            outcome[task_id][0] += won
            outcome[task_id][1] += 1
        run.outcomes.append(dict(outcome))
        if folder := grpo.rollouts_folder(config):
            save_trajectories(os.path.join(folder, f"{state['step']:06d}.{run.learner.accelerator.process_index}.jsonl"),
                              trajectories, [by_id[t.task_id] for t in trajectories])
        run.write(kind="grpo", phase=state["phase"], step=state["step"], **metrics, outcomes=outcome)
        if run.main:
            tqdm.write(grpo.step_line(state["step"], metrics))
        state["step"] += 1
        state["step_in_phase"] += 1
        bar.update()
        state["rewards"] = (state.get("rewards", []) + [metrics["reward"]])[-BEST_WINDOW:]
        state["history"].append({k: v for k, v in (metrics | {"unhealthy": metrics["structure/polluted"] + metrics["structure/collapsed"]}).items()
                                 if k in ALARMS or k in ("n", "messages")})
        if why := alarm(state["history"]):
            on_alarm(run, phase, why)
            state["history"].clear()
            if config.stop_on_collapse or config.schedule == "adaptive":
                break
        elif config.schedule == "adaptive" and state["step_in_phase"] % max(config.save_every, 3) == 0:      # of two, one is old enough
            remember_healthy(run)
        if state["step_in_phase"] % config.save_every == 0 and state["step_in_phase"] < phase.steps:
            save_checkpoint(run)
    bar.close()


def begin_phase(run, phase):
    """What the paper renews at a phase border: the optimizer, the KL reference, the window of failures."""
    config, first = run.config, run.learner.optimizer is None
    if first or config.optimizer == "reset":
        grpo.set_optimizer(run.learner, config.lr, BETAS[phase.kind == "rl"], config.weight_decay)    # the rate is set at each step
    if phase.kind == "rl":
        run.outcomes.clear()
        run.state |= {"history": [], "rewards": []}
        if config.schedule == "adaptive":
            remember_healthy(run)
        if config.kl_coef and (config.reference == "reset" or not run.state["reference"]):
            path = os.path.join(config.out, f"reference-{run.state['phase']}")
            weights = grpo.full_weights(run.learner)
            if run.main:
                save_model(run, path, weights)
            run.state["reference"] = path
            run.learner.accelerator.wait_for_everyone()
            grpo.set_reference(run.learner, path)
    run.write(kind="event", event="phase", phase=run.state["phase"], name=phase.name, step=run.state["step"])


def train(run):
    """Run the plan from the state on. Each border is saved twice: before its evaluation and after it."""
    if run.state["phase"] == 0 and run.state["step_in_phase"] == 0:
        evaluate_now(run, "start")
    while run.state["phase"] < len(run.state["plan"]):      # an alarm may add to it
        phase = Phase(*run.state["plan"][run.state["phase"]])
        if not run.state["evaluating"]:
            if run.state["step_in_phase"] == 0:
                begin_phase(run, phase)
            (run_rl if phase.kind == "rl" else run_sft)(run, phase)
            run.state["evaluating"] = True
            if run.main:    # an evaluation of other weights, if this phase is played again from an older checkpoint
                for old in glob.glob(os.path.join(run.config.out, "eval", f"{phase.name.replace(' ', '-')}.*")):
                    os.remove(old)
            save_checkpoint(run)
        evaluate_now(run, phase.name)
        run.state |= {"phase": run.state["phase"] + 1, "step_in_phase": 0, "evaluating": False, "recent": []}
        save_state(run)


# --- PLUMBING: checkpoints -----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C waits until the block has finished."""
    caught, before = [], signals.signal(signals.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signals.signal(signals.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def save_model(run, path, weights):
    """The weights (grpo.full_weights) as a Hugging Face directory with the tokenizer, in place of what `path` held."""
    shutil.rmtree(path + ".tmp", ignore_errors=True)
    run.learner.model.save_pretrained(path + ".tmp", state_dict=weights)
    run.tokenizer.save_pretrained(path + ".tmp")
    files = {name: _checksum(os.path.join(path + ".tmp", name), sync=True) for name in sorted(os.listdir(path + ".tmp"))}
    write_json(os.path.join(path + ".tmp", "checksums.json"), {"files": files})
    shutil.rmtree(path, ignore_errors=True)
    os.replace(path + ".tmp", path)


def save_checkpoint(run):
    """OUT/ckpt-NNNNNN: a Hugging Face directory (fp32 safetensors, tokenizer) + optimizer.safetensors + state.json, which is
    written last and holds every file's size and crc32. Written under a temporary name, fsynced, renamed; the last two are
    kept. OUT/best is the one with the highest mean train reward (BEST_WINDOW), weights only."""
    weights = grpo.full_weights(run.learner)
    tensors = grpo.collect(run.learner, ((f"{name}/{k}", v.contiguous()) for name, p in run.learner.model.named_parameters()
                                         for k, v in (run.learner.optimizer.state.get(p) or {}).items()))
    if run.main:
        with uninterrupted():
            _save_checkpoint(run, weights, tensors)
    run.learner.accelerator.wait_for_everyone()


def _save_checkpoint(run, weights, tensors):
    state, out = run.state, run.config.out
    state["saves"] += 1
    path = os.path.join(out, f"ckpt-{state['saves']:06d}")
    tmp = path + ".tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    run.learner.model.save_pretrained(tmp, state_dict=weights)
    run.tokenizer.save_pretrained(tmp)
    rewards = state.get("rewards", [])
    if len(rewards) == BEST_WINDOW and sum(rewards) / BEST_WINDOW > state.get("best", -1.0):
        state["best"] = sum(rewards) / BEST_WINDOW
        run.write(kind="event", event="best", phase=state["phase"], step=state["step"], reward=state["best"])
        save_model(run, os.path.join(out, "best"), weights)      # before the checkpoint: killed in between, this step is played again
    save_file(tensors, os.path.join(tmp, "optimizer.safetensors"))
    os.fsync(run.log.fileno())
    files = {f: _checksum(os.path.join(tmp, f), sync=True) for f in sorted(os.listdir(tmp))}
    write_state(run, tmp, files)
    os.replace(tmp, path)
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    for old in checkpoints(out)[:-2]:
        shutil.rmtree(old)
    states = [json.load(open(os.path.join(c, "state.json"))) for c in checkpoints(out)]
    named = {s["reference"] for s in states} | {path for s in states for _, path in s["healthy"]}
    for old in glob.glob(os.path.join(out, "reference-*")) + glob.glob(os.path.join(out, "healthy-*")):
        if old not in named:
            shutil.rmtree(old)


def write_state(run, path, files):
    state = {**run.state, "flags": dataclasses.asdict(run.config), "metrics_bytes": run.log.tell(), "outcomes": run.outcomes, "skipped": run.learner.skipped, "files": files}
    write_json(os.path.join(path, "state.json.tmp"), state)
    os.replace(os.path.join(path, "state.json.tmp"), os.path.join(path, "state.json"))


def save_state(run):
    """After an evaluation: no weight has moved since the last checkpoint, so only its state.json is replaced."""
    if run.main:
        with uninterrupted():
            os.fsync(run.log.fileno())
            path = checkpoints(run.config.out)[-1]
            write_state(run, path, json.load(open(os.path.join(path, "state.json")))["files"])
    run.learner.accelerator.wait_for_everyone()


def write_json(path, what, **how):
    with open(path, "w") as f:
        json.dump(what, f, **how)
        f.flush()
        os.fsync(f.fileno())


def _checksum(path, sync=False):
    size = crc = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            size, crc = size + len(block), zlib.crc32(block, crc)
        if sync:
            os.fsync(f.fileno())
    return [size, crc]


def damaged(path, noted="checksums.json"):
    """(the first file in `path` that is not as it was written, or "", what the file `noted` holds)."""
    try:
        held = json.load(open(os.path.join(path, noted)))
        return next((f for f, sums in held["files"].items() if _checksum(os.path.join(path, f)) != sums), ""), held
    except (OSError, ValueError, KeyError) as e:
        return str(e), None


def checkpoints(out):
    """Paths of the finished checkpoints, oldest first."""
    names = sorted(n for n in os.listdir(out) if re.fullmatch(r"ckpt-\d{6}", n)) if os.path.isdir(out) else []
    return [os.path.join(out, n) for n in names]


def find_checkpoint(out):
    """(path, state) of the newest intact checkpoint, or (None, None); says which ones are damaged and puts them aside."""
    for path in reversed(checkpoints(out)):
        bad, state = damaged(path, "state.json")
        if not bad:
            return path, state
        tqdm.write(f"{path} is damaged ({bad}): using the one before it")
        shutil.rmtree(path + ".damaged", ignore_errors=True)
        os.replace(path, path + ".damaged")
    return None, None


def load_weights(learner, path):
    """ValueError for the weights of another model. A tied head is in the file once, in the model twice."""
    own, held = learner.model.state_dict(), load_file(os.path.join(path, "model.safetensors"))
    bad = [k for k in own.keys() | held.keys() if k in own and k in held and own[k].shape != held[k].shape or k not in own
           or k not in held and not (k == "lm_head.weight" and learner.model.config.tie_word_embeddings)]
    if bad:
        raise ValueError(f"{path} holds the weights of another model ({min(bad)} differs): has --model been replaced?")
    learner.model.load_state_dict({k: grpo.like(v, own[k]) for k, v in held.items()}, strict=False)


def load_optimizer(learner, path):
    tensors = load_file(os.path.join(path, "optimizer.safetensors"))
    for name, p in learner.model.named_parameters():
        state = {k: tensors[f"{name}/{k}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{k}" in tensors}
        if state:
            learner.optimizer.state[p] = {k: v if k == "step" and not learner.optimizer.param_groups[0]["fused"] else
                                          (v if k == "step" else grpo.like(v, p)).to(p.device) for k, v in state.items()}


# What a run leaves in OUT: all that --fresh may delete. config.json and lock stay: the one is replaced, the other is held.
WRITTEN = re.compile(r"(ckpt-\d{6}|reference-\d+|healthy-\d{6}|best|model)(\.tmp|\.damaged)?|rollouts|eval|teacher|multi_step_tool_rl|metrics\.jsonl|"
                     r"report\.html|(overview|reward|structure|control|kl_entropy|categories|times|health)\.png")


def claim_out(config):
    """Refuse an OUT that is no run, was started with other flags, or is another process's; changes nothing that is there. Returns
    the lock, which lasts as long as the returned file: the kernel drops it with the process, however that ends."""
    out, path, flags = config.out, os.path.join(config.out, "config.json"), dataclasses.asdict(config)
    if os.path.exists(out) and not os.path.isdir(out):
        raise ValueError(f"{out} is a file: give another --out")
    try:
        before = json.load(open(path)) if os.path.exists(path) else {}
    except ValueError as e:
        raise ValueError(f"{path} cannot be read ({e}): put it back, or give another --out") from None
    if os.path.isdir(out) and set(os.listdir(out)) - {"config.json.tmp", "lock"} and "signal" not in before:    # a model has a config.json, too
        raise ValueError(f"{out} is not empty and not a run: give another --out")
    if config.fresh and os.path.realpath(config.model).startswith(os.path.realpath(out) + os.sep):
        raise ValueError(f"--fresh would delete the model {config.model}: give another --out")
    for k in flags if before and not config.fresh else ():
        if k not in HARMLESS | {"out"} and before.get(k, flags[k]) != flags[k]:
            raise ValueError(f"{out} was started with --{k} {before[k]}, now it is {flags[k]}: use the same flags, another --out, or --fresh")
    if config.save_rollouts and (config.fresh or not before):
        grpo.check_rollouts_folder(config)
    os.makedirs(out, exist_ok=True)
    lock = open(os.path.join(out, "lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is running in {out}") from None
    return lock


def prepare_out(config):
    """Delete the old run if it shall be fresh, note the flags; returns (checkpoint path, state) to go on from, or (None, None)."""
    out, path = config.out, os.path.join(config.out, "config.json")
    for name in sorted(os.listdir(out)) if config.fresh else ():
        if WRITTEN.fullmatch(name):
            old = os.path.join(out, name)
            shutil.rmtree(old) if os.path.isdir(old) and not os.path.islink(old) else os.remove(old)
    write_json(path + ".tmp", dataclasses.asdict(config), indent=1)
    os.replace(path + ".tmp", path)
    found = find_checkpoint(out)
    if not found[0] and (lost := glob.glob(os.path.join(out, "ckpt-*.damaged"))):
        raise ValueError(f"no checkpoint in {out} is whole ({len(lost)} damaged): --fresh starts over")
    return found


def prepare(config):
    """Everything before the first step: data, model, engine, state."""
    tasks = grpo.train_tasks(config)
    test = env_bfcl.load_tasks("test", tuple(config.eval_categories.split(",")), short_docs=config.short_docs)
    test = [t for c in dict.fromkeys(config.eval_categories.split(",")) for t in [t for t in test if t.category == c][: config.eval_limit or None]]
    if config.prompts > len(tasks):
        raise ValueError(f"--prompts {config.prompts} is more than the {len(tasks)} training tasks")
    base = find_model(config.model, os.path.dirname(config.out) or ".")
    tokenizer = load_tokenizer(base)
    if "no_think_context" in config.fault and not chat_glue(tokenizer, config.think).think_block:
        raise ValueError("--fault no_think_context: this model's chat template gives no empty think block")
    first = int(os.environ.get("RANK", 0)) == 0
    lock = claim_out(config) if first else None
    learner = grpo.make_learner(base, tokenizer, config.checkpointing, config.compile, config.report_to, config.out, config.fsdp, config.offload_optimizer)
    if first:       # only now does --fresh delete: whatever could be wrong with the flags, the data or the model would have shown
        path, state = prepare_out(config)
    if config.report_to:
        learner.accelerator.init_trackers("multi_step_tool_rl", {k: str(v) for k, v in dataclasses.asdict(config).items()})
    sft.check_tags(learner.model, tokenizer, config.init_tags)
    learner.accelerator.wait_for_everyone()     # the main process has removed what is damaged
    if not learner.accelerator.is_main_process:
        path, state = find_checkpoint(config.out)
    engine = make_engine(config.engine, base, tokenizer, kv_gib=config.kv_gib, sleep=config.sleep, seed=config.seed,
                         max_model_len=config.max_prompt + max(config.max_response, 16384))       # evaluations have 16,384
    grpo.check_memory(learner, engine, config)
    state = state or {"plan": [dataclasses.astuple(p) for p in plan(config)], "phase": 0, "step_in_phase": 0, "step": 0, "saves": 0,
                      "reference": "", "evaluating": False, "recent": [], "history": [], "healthy": [], "metrics_bytes": 0}
    outcomes, learner.skipped = state.pop("outcomes", []), state.pop("skipped", 0)
    state.pop("files", None)
    for k, v in state.pop("flags", {}).items():     # metrics.jsonl would be cut to another run's length
        if k not in HARMLESS | {"out"} and getattr(config, k, v) != v:
            raise ValueError(f"{path} is a checkpoint of another run (--{k} {v}): take it away")
    here = lambda old: old and os.path.join(config.out, os.path.basename(old))      # the run may have been moved
    state |= {"reference": here(state["reference"]), "healthy": [[step, here(old)] for step, old in state["healthy"]]}
    run = Run(config, tasks, test, tokenizer, engine, learner, state, outcomes, lock=lock)
    if path:
        load_weights(learner, path)
        kind = state["plan"][min(state["phase"], len(state["plan"]) - 1)][1]
        grpo.set_optimizer(learner, config.lr, BETAS[kind == "rl"], config.weight_decay)
        load_optimizer(learner, path)
        if state["reference"] and config.kl_coef:
            if bad := damaged(state["reference"])[0]:
                raise ValueError(f"the KL reference {state['reference']} is damaged ({bad}): put it back, or --fresh")
            grpo.set_reference(learner, state["reference"])
    if run.main:
        metrics = os.path.join(config.out, "metrics.jsonl")
        with open(metrics, "ab") as f:      # steps after the checkpoint are played again: their lines go
            if f.tell() < state["metrics_bytes"]:
                raise ValueError(f"{metrics} is shorter than it was at {path}: put it back, or --fresh")
            f.truncate(state["metrics_bytes"])
        run.log = open(metrics, "a", encoding="utf-8")
        run.log.seek(0, os.SEEK_END)
        for fault in config.fault:
            tqdm.write(f"FAULT ON: {fault}: {FAULTS[fault]}")
        if not path:
            run.write(kind="config", **dataclasses.asdict(config))
        else:
            left = f"phase {state['phase'] + 1} of {len(state['plan'])}, GRPO step {state['step']}" if state["phase"] < len(state["plan"]) else "finished already"
            tqdm.write(f"continuing {path}: {left}")
    grpo.push(learner, engine)
    return run


def report(run, weights):
    """The table at the end, the model as a Hugging Face directory, a figure."""
    out, rows = run.config.out, collections.defaultdict(dict)
    for line in open(os.path.join(out, "metrics.jsonl"), encoding="utf-8"):
        line = json.loads(line)
        if line["kind"] == "eval":
            rows[line["name"]][line["split"]] = line["table"]["all official"]
    print(f"\n{'success after':14} {'train tasks':>34} {'held-out tasks':>34}")
    for name, splits in rows.items():
        cells = [f"{k}/{n} = {100 * r:.1f} % [{100 * lo:.1f}, {100 * hi:.1f}]" for k, n, r, lo, hi in (splits[s] for s in ("train", "test"))]
        print(f"{name:14} {cells[0]:>34} {cells[1]:>34}")
    model = os.path.join(out, "model")
    save_model(run, model, weights)
    plot = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools", "plot.py")
    plotted = subprocess.run([sys.executable, plot, out], capture_output=True, text=True)
    print(f"\ncheckpoint    {model}\nmetrics       {out}/metrics.jsonl\ntrajectories  {grpo.rollouts_folder(run.config) or 'not saved'}, {out}/eval/")
    print(f"figure        {out}/overview.png, report {out}/report.html" if not plotted.returncode else f"no figure: {plotted.stderr[-300:]}")


def main():
    try:
        config = read_config()
        run = prepare(config)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted before the first step")
    again = lambda: f"the same command continues from {(checkpoints(config.out) or ['the start'])[-1]}"
    try:
        train(run)
        weights = grpo.full_weights(run.learner)
        if run.main:
            report(run, weights)
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted: {again()}")
    except Exception as e:
        with contextlib.suppress(OSError):
            run.main and run.log.close()     # what is left in its buffer would raise once more at the exit
        full = getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
        if full or isinstance(e, (OSError, SafetensorError)) and "I/O error" in str(e):
            sys.exit(f"\nerror: cannot write to {config.out} ({e}): make room, then {again()}")
        traceback.print_exc()
        memory = f"lower --tokens_per_row (now {config.tokens_per_row}) or --kv_gib, then " * isinstance(e, torch.OutOfMemoryError)
        sys.exit(f"\nerror: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}: {memory}{again()}")
    for tracker in run.learner.accelerator.trackers:    # they write what they hold; end_training() would also take vLLM's process group away
        tracker.finish()
    run.engine.close()


if __name__ == "__main__":
    signals.signal(signals.SIGINT, signals.default_int_handler)
    main()
