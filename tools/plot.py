"""Figures and a report of runs: metrics.jsonl and rollouts/ -> PNG files and one report.html that needs no server.

Nobody imports this. The report holds the figures, the evaluations, the step-0 checklists, the events, the flags, and a
viewer of trajectories that shows every token, whether it was trained, and how probable it was.

 1. Runs that differ in their seed only (or have the same --label) are one curve: mean, and a band from min to max.
 2. A key that a step lacks is a gap. So is all that the update measures in a step whose groups were all flat: the zeros
    in its line are sums over no token.
 3. SFT phases have no RL step of their own: a green bar between two steps, evaluations before and after it at its sides.
 4. Text of trajectories is hostile. It reaches the page as JSON without '<' and is shown with textContent only; the
    page's policy forbids any script but its own (by hash) and any connection.

    python tools/plot.py runs/tiny-ets                                      # -> runs/tiny-ets/*.png and report.html
    python tools/plot.py runs/a runs/b --out runs/compare --label none ets  # overlaid
    python tools/plot.py runs/ets-seed1 runs/ets-seed2 runs/ets-seed3       # seeds as a band, -> runs/compare
"""
import argparse
import base64
import collections
import glob
import hashlib
import html
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reward import structure

# Okabe and Ito's colours: told apart by colour-blind readers. Healthy is blue, unhealthy is orange and red.
BLUE, SKY, ORANGE, RED, GREEN, PINK, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#777777"
STATES = {"call": BLUE, "response": SKY, "polluted": ORANGE, "collapsed": RED}
CONTROL = {"<tool_call>": BLUE, "</tool_call>": SKY, "<|im_end|>": RED, '{"': GREEN, "<think>": PINK}
TIMES = {"engine": BLUE, "environment, reward": GREEN, "rest of rollout": SKY, "update": ORANGE, "weight push": PINK}
OF_UPDATE = ("kl", "entropy", "engine_gap", "clip_share", "ratio", "pg_loss", "grad_norm")
NOT_AN_ABLATION = {"seed", "out", "fresh", "save_every", "kv_gib", "sleep", "checkpointing", "save_rollouts", "kind"}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left",
         "axes.grid": True, "grid.color": "#eeeeee", "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 130,
         "text.parse_math": False, "figure.constrained_layout.use": True}


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# --- reading ----------------------------------------------------------------------------------------------------------

def parse_line(line):
    """A JSON object, or None for anything else (such as the last line of a run that is still being written)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value):
    """A finite number, or nan."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan


def read_run(folder):
    """One run directory as a namespace: config, steps {step: line}, sft, evals {(phase, name): {split: line}}, events."""
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.isfile(path):
        fail(f"no such directory: {folder}" if not os.path.isdir(folder) else f"{folder} is not a run: it has no metrics.jsonl")
    run = SimpleNamespace(folder=folder, config={}, steps={}, sft=[], evals=collections.defaultdict(dict), events=[])
    for line in filter(None, map(parse_line, open(path, encoding="utf-8", errors="replace"))):
        kind = line.get("kind")
        if kind == "config":
            run.config = run.config or {k: v for k, v in line.items() if k != "kind"}
        elif kind == "grpo" and type(line.get("step")) is int:
            run.steps[line["step"]] = derive(line)      # a step that was played again after a roll-back counts once
        elif kind == "sft":
            run.sft.append(line)
        elif kind == "eval" and isinstance(line.get("table"), dict) and not math.isnan(number(line.get("step"))):
            run.evals[str(line.get("phase")), str(line.get("name"))][str(line.get("split"))] = line
        elif kind == "event":
            run.events.append(line)
    if not (run.steps or run.sft or run.evals):
        fail(f"{folder} has nothing to plot yet: no step and no evaluation in its metrics.jsonl")
    starts = {(e.get("phase"), str(e.get("name")), number(e.get("step"))) for e in run.events if e.get("event") == "phase"}
    run.phases = [(name, step) for _, name, step in sorted(starts, key=lambda p: (p[2], str(p[0]))) if not math.isnan(step)]
    run.alarms = [number(e.get("step")) for e in run.events if e.get("event") == "alarm"]
    return run


def derive(line):
    """A grpo line with what was not measured taken out, and the sums that the figures want put in."""
    if line.get("trained_tokens") == 0:
        line = {k: v for k, v in line.items() if k not in OF_UPDATE and not k.startswith("control/")}
    line = line | {"unhealthy": number(line.get("structure/polluted")) + number(line.get("structure/collapsed"))}
    engine, env, reward, rollout, update, push = (np.nan_to_num(number(line.get(f"time/{k}_s")))
                                                  for k in ("engine", "env", "reward", "rollout", "update", "push"))
    parts = zip(TIMES, (engine, env + reward, max(rollout - engine - env - reward, 0), update, push))
    return line | {f"times/{k}": float(v) for k, v in parts if any(k.startswith("time/") for k in line)}


def group_runs(runs, labels):
    """Runs -> curves: [namespace(label, runs, colour)]. Runs with one label, or that differ in the seed only, are seeds."""
    names = [os.path.basename(os.path.normpath(r.folder)) for r in runs]
    names = [r.folder if names.count(n) > 1 else n for r, n in zip(runs, names)]
    groups = {}
    for k, run in enumerate(runs):
        flags = json.dumps({a: b for a, b in run.config.items() if a not in NOT_AN_ABLATION}, sort_keys=True)
        run.name = names[k]
        groups.setdefault(labels[k] if labels else flags if run.config else names[k], []).append(run)
    colours = [BLUE, RED, GREEN, PINK, ORANGE, SKY, "#000000", GREY]
    return [SimpleNamespace(label=(key if labels else members[0].name) + (f" ({len(members)} seeds)" if len(members) > 1 else ""),
                            runs=members, colour=colours[k % len(colours)]) for k, (key, members) in enumerate(groups.items())]


def series(group, key):
    """(steps [S], values [R, S]): one row per run of the group, nan where a run lacks the step or the key."""
    steps = [s for run in group.runs for s in run.steps]
    x = np.arange(min(steps), max(steps) + 1) if steps else np.zeros(0)
    return x, np.array([[number(run.steps.get(s, {}).get(key)) for s in x] for run in group.runs]).reshape(len(group.runs), len(x))


def over_seeds(values):
    """values [R, S] -> (mean, low, high) [S]; nan only where no run has a value."""
    some, here = ~np.isnan(values).all(0), ~np.isnan(values)
    out = np.full((3, values.shape[1]), np.nan)
    out[0, some] = np.where(here, values, 0).sum(0)[some] / here.sum(0)[some]
    out[1, some], out[2, some] = np.where(here, values, np.inf).min(0)[some], np.where(here, values, -np.inf).max(0)[some]
    return out


def evaluations(group, key, split):
    """[(name, step, rate, low, high)] in order. One run: the evaluation's own interval; seeds: mean, min and max."""
    out = []
    for at in dict.fromkeys(at for run in group.runs for at in run.evals):
        lines = [run.evals[at][split] for run in group.runs if split in run.evals.get(at, {})]
        found = [(line["step"], *map(number, line["table"][key][2:5])) for line in lines if is_entry(line["table"].get(key))]
        if found:
            step, rate, low, high = np.array(found).T
            out.append((at[1], step[0], rate.mean(), *((low[0], high[0]) if len(found) == 1 else (rate.min(), rate.max()))))
    return out


def is_entry(value):
    return isinstance(value, list) and len(value) == 5 and not math.isnan(number(value[2]))


# --- panels -----------------------------------------------------------------------------------------------------------

def dress(ax, groups, title, ylabel, names=True):
    """Title, labels, phases and alarms of a panel over RL steps."""
    steps = [s for g in groups for run in g.runs for s in run.steps] or [0]
    ax.set(title=title, ylabel=ylabel, xlabel="RL step", xlim=(min(steps) - 0.9, max(steps) + 0.9))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_axisbelow(True)
    plans = [g.runs[0].phases for g in groups]
    for g, phases in zip(groups, plans):
        shared = all(p == phases for p in plans)
        if shared and g is not groups[0]:
            continue
        rounds = [p for p in phases if p[0].startswith("rl")]
        for k, (name, start) in enumerate(rounds if shared else []):
            end = rounds[k + 1][1] if k + 1 < len(rounds) else max(steps) + 1
            if k % 2:
                ax.axvspan(start - 0.5, end - 0.5, color="#f4f4f4", lw=0, zorder=0)
            if names:
                ax.text((start + end) / 2 - 0.5, 0.99, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=7, color=GREY)
        for name, start in (p for p in phases if not p[0].startswith("rl")):
            ax.axvline(start - 0.5, lw=4, alpha=0.35, color=GREEN if shared else g.colour, zorder=1)
            if names and shared:
                ax.annotate(name, (start - 0.5, 0.99), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                            rotation=90, ha="left", va="top", fontsize=7, color=GREEN)
    for g in groups:
        for k, step in enumerate(s for run in g.runs for s in run.alarms):
            ax.axvline(step, ls=(0, (2, 2)), lw=1.2, color=RED if len(groups) == 1 else g.colour)
            if names and not k:
                ax.annotate("alarm", (step, 0.01), (2, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                            rotation=90, ha="left", va="bottom", fontsize=7, color=RED if len(groups) == 1 else g.colour)


def legend(ax, columns=4):
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, columnspacing=1.2, handlelength=1.6)


def draw_line(ax, group, key, label, colour, style="-", log=False):
    x, values = series(group, key)
    if np.isnan(values).all():
        return
    if log:
        values = np.where(values > 0, values, np.nan)      # an exact 0 is "nothing there": no place on a log axis
        ax.set_yscale("log")
    mean, low, high = over_seeds(values)
    ax.plot(x, mean, style, color=colour, lw=1.5, marker=".", ms=5 if len(x) < 60 else 2, label=label)
    if len(group.runs) > 1:
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def panel_reward(ax, groups, scores, split="test"):
    """Success of the training rollouts as lines, greedy evaluations on held-out tasks as points with intervals."""
    for score in scores:
        for g in groups:
            colour = {"official": BLUE, "strict": ORANGE}[score] if len(scores) > 1 else g.colour
            name = score if len(groups) == 1 else g.label if score == scores[0] else None
            draw_line(ax, g, f"success/{score}", f"{name}, rollouts" if len(groups) == 1 else name, colour)
            points = evaluations(g, f"all {score}", split)
            if points:
                steps = [s for run in g.runs for s in run.steps] or [0]
                side = 0.25 + 0.008 * (max(steps) - min(steps))
                x = [s - 0.5 + side * (1 if n != "start" and not n.startswith("rl") else -1) for n, s, *_ in points]
                y, low, high = np.array([p[2:] for p in points]).T
                ax.errorbar(x, y, [np.maximum(y - low, 0), np.maximum(high - y, 0)], fmt="o", ms=5, lw=1.2, capsize=2.5, color=colour, mec="white",
                            label=f"{score}, {split} tasks" if len(groups) == 1 else None, zorder=3)
    dress(ax, groups, "Success" + ("" if len(scores) > 1 else f", {scores[0]} (points: {split} tasks)"), "share of episodes")
    ax.set_ylim(-0.02, 1.12)
    legend(ax, 2)


def panel_stack(ax, group, prefix, colours, title, ylabel):
    """Stacked areas with steps as wide as they are: a single step is visible, a missing one is a gap."""
    x = series(group, "")[0]
    parts = np.array([over_seeds(series(group, prefix + name)[1])[0] for name in colours])     # [names, S]
    parts = np.where(np.isnan(parts).all(0), np.nan, np.nan_to_num(parts))
    tops = np.cumsum(np.vstack([0 * x, parts]), 0)                                             # [names + 1, S]
    tops = np.hstack([tops, tops[:, -1:]])
    for k, (name, colour) in enumerate(colours.items()):
        ax.fill_between(np.append(x, x[-1:] + 1) - 0.5, tops[k] + 0 * tops[-1], tops[k + 1], step="post", color=colour, lw=0, label=name)
    dress(ax, [group], title, ylabel, names=False)
    ax.set_ylim(0, 1 if prefix == "structure/" else None)
    legend(ax, 4 if len(colours) < 5 else 3)


def panel_control(ax, group, slot, title):
    for name, colour in CONTROL.items():
        draw_line(ax, group, f"control/{slot}/{name}", name, colour, log=True)
    dress(ax, [group], title, "mean probability")
    ax.set_ylim(max(min(ax.get_ylim()[0], 0.1), 1e-6) if ax.get_yscale() == "log" else None, 3)
    legend(ax, 3)


def panel_metric(ax, groups, key, title, ylabel, log=False):
    for g in groups:
        draw_line(ax, g, key, g.label if len(groups) > 1 else None, g.colour, log=log)
    dress(ax, groups, title, ylabel)
    legend(ax, 2)


def panel_category(ax, groups, category):
    """Success at each evaluation: filled points are test tasks, hollow ones train tasks."""
    names = list(dict.fromkeys(at[1] for g in groups for run in g.runs for at in run.evals))
    width = 0.6 / (2 * len(groups))
    for k, g in enumerate(groups):
        for j, split in enumerate(("train", "test")):
            points = evaluations(g, f"{category} official", split)
            if points:
                y, low, high = np.array([p[2:] for p in points]).T
                x = [names.index(p[0]) + (2 * k + j - len(groups) + 0.5) * width for p in points]
                ax.errorbar(x, y, [np.maximum(y - low, 0), np.maximum(high - y, 0)], fmt="o", ms=4.5, lw=1.2, capsize=2, color=g.colour,
                            mfc=g.colour if split == "test" else "white", label=split if len(groups) == 1 else f"{g.label}, {split}")
    ax.set(title=category, ylim=(-0.03, 1.03), xlim=(-0.6, len(names) - 0.4), ylabel="success (official)", xlabel="evaluation after")
    ax.set_xticks(range(len(names)), names, rotation=30 if len(names) > 4 else 0, ha="right" if len(names) > 4 else "center")
    ax.grid(axis="x", visible=False)


# --- figures ----------------------------------------------------------------------------------------------------------

def grid(rows, columns, width=4.6, height=3.3):
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)


def make_figures(groups):
    """{name: (figure, caption)}; a figure whose data no run has is left out."""
    have = {k for g in groups for run in g.runs for line in run.steps.values() for k, v in line.items() if not math.isnan(number(v))}
    categories = list(dict.fromkeys(key[: -len(" official")] for g in groups for run in g.runs for lines in run.evals.values()
                                    for line in lines.values() for key, e in line["table"].items() if key.endswith(" official") and is_entry(e)))
    several, out = len(groups) > 1, {}
    suffix = lambda g: f": {g.label}" if several else ""
    bars = "min to max over seeds" if any(len(g.runs) > 1 for g in groups) else "95 % intervals"
    if any(k.startswith("success/") for k in have):
        fig, axes = grid(1, 2 if several else 1, 4.6 if several else 7)
        for ax, scores in zip(axes[0], (["official"], ["strict"]) if several else (["official", "strict"],)):
            panel_reward(ax, groups, scores)
        out["reward"] = fig, f"Lines: sampled training rollouts. Points: greedy evaluation on held-out tasks, {bars}."
    if any(k.startswith("structure/") for k in have):
        fig, axes = grid(1, len(groups), 4.6 if several else 7)
        for ax, g in zip(axes[0], groups):
            panel_stack(ax, g, "structure/", STATES, "Structure of messages" + suffix(g), "share of messages")
        out["structure"] = fig, "Every message of every rollout is in one of four states. Blue is healthy."
    if any(k.startswith("control/") for k in have):
        fig, axes = grid(len(groups), 2)
        for row, g in zip(axes, groups):
            panel_control(row[0], g, "first", "First token of a message" + suffix(g))
            panel_control(row[1], g, "after_open", "After <tool_call>\\n" + suffix(g))
        out["control"] = fig, "Probability of control tokens where the protocol is decided, log scale. An exact 0 is a gap."
    metrics = [("kl", "KL to the reference", "nats per token", True), ("entropy", "Entropy", "nats per token", False),
               ("engine_gap", "|engine - trainer| log-probability", "nats per token", True), ("grad_norm", "Gradient norm before clipping", "norm", False)]
    if metrics := [m for m in metrics if m[0] in have]:
        fig, axes = grid((len(metrics) + 1) // 2, 2)
        for ax, m in zip(axes.flat, metrics):
            panel_metric(ax, groups, *m)
        [ax.set_axis_off() for ax in axes.flat[len(metrics):]]
        out["kl_entropy"] = fig, "Steps whose groups were all flat have no update and no value."
    if categories:
        fig, axes = grid(1, len(categories), max(2.6, 9.2 / len(categories)), 3.4)
        for ax, category in zip(axes[0], categories):
            panel_category(ax, groups, category)
            ax.set_ylabel(ax.get_ylabel() if ax is axes[0][0] else "")
        fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        out["categories"] = fig, f"Greedy evaluations, {bars}. Hollow: tasks that were trained on."
    if any(k.startswith("times/") for k in have):
        fig, axes = grid(1, len(groups), 4.6 if several else 7)
        for ax, g in zip(axes[0], groups):
            panel_stack(ax, g, "times/", TIMES, "Time of a step" + suffix(g), "seconds")
        out["times"] = fig, "Wall time of each RL step."
    if any(run.sft for g in groups for run in g.runs):
        fig, axes = grid(1, 2)
        for ax, (key, ylabel) in zip(axes[0], (("loss", "nats per token"), ("token_accuracy", "share of trained tokens"))):
            for g in groups:
                n = max(len(run.sft) for run in g.runs)
                values = np.array([[number(line.get(key)) for line in run.sft] + [math.nan] * (n - len(run.sft)) for run in g.runs])
                mean, low, high = over_seeds(values.reshape(len(g.runs), n))
                ax.plot(mean, color=g.colour, lw=1.5, marker=".", ms=2, label=g.label if several else None)
                ax.fill_between(range(n), low, high, color=g.colour, alpha=0.18, lw=0)
                for k in range(1, len(g.runs[0].sft)):
                    if g.runs[0].sft[k].get("phase") != g.runs[0].sft[k - 1].get("phase"):
                        ax.axvline(k - 0.5, lw=1, ls=":", color=g.colour if several else GREY)
            ax.set(title=f"SFT: {key.replace('_', ' ')}", ylabel=ylabel, xlabel="SFT step, all phases (dotted: a new phase)")
            legend(ax, 2)
        out["sft"] = fig, "All SFT phases of a run, one after the other."
    if have:
        fig, axes = grid(2, 3, 4.3, 3.2)
        panel_reward(axes[0, 0], groups, ["official"] if several else ["official", "strict"])
        if several:
            panel_metric(axes[0, 1], groups, "unhealthy", "Polluted or collapsed messages", "share of messages")
            panel_metric(axes[0, 2], groups, "control/first/<|im_end|>", "P(<|im_end|>) at message start", "mean probability", True)
        else:
            panel_stack(axes[0, 1], groups[0], "structure/", STATES, "Structure of messages", "share of messages")
            panel_control(axes[0, 2], groups[0], "first", "First token of a message")
        panel_metric(axes[1, 0], groups, *metrics[0]) if metrics else axes[1, 0].set_axis_off()
        panel_metric(axes[1, 1], groups, *metrics[1]) if len(metrics) > 1 else axes[1, 1].set_axis_off()
        panel_category(axes[1, 2], groups, "all") if "all" in categories else axes[1, 2].set_axis_off()
        legend(axes[1, 2], 2)
        axes[1, 2].set_title("Greedy evaluation, all categories")
        out = {"overview": (fig, f"Points: {bars}. Green bars: SFT phases. Dashed: alarms.")} | out
    return out


# --- trajectories -----------------------------------------------------------------------------------------------------

def evenly(items, n):
    """At most n of the items, the first and the last among them."""
    return items if len(items) <= n else [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def find_tokenizer(run, folder):
    """The tokenizers library's reader of tokenizer.json: transformers' decode goes through it, and its import is slow."""
    checkpoints = sorted(p for p in glob.glob(os.path.join(glob.escape(run.folder), "ckpt-*")) if not p.endswith(".tmp"))
    for place in [folder] if folder else [os.path.join(run.folder, "model"), *checkpoints[::-1], str(run.config.get("model", ""))]:
        if os.path.isfile(path := os.path.join(place, "tokenizer.json")):
            return Tokenizer.from_file(path)
    if folder:
        fail(f"no tokenizer.json in {folder}")


def sample_trajectories(run, k, tokenizer, most, tail=300):
    """(records for the page, {id: text}): at most `most`, spread over the steps, alarms included, and the evaluations."""
    sources = collections.defaultdict(list)
    for path in sorted(glob.glob(os.path.join(glob.escape(run.folder), "rollouts", "*.jsonl"))):
        if step := re.match(r"\d+", os.path.basename(path)):
            sources[int(step[0])].append(path)
    steps = sorted(set(evenly(sorted(sources), min(20, most))) | {int(s) for s in run.alarms if s in sources})
    chosen = [(f"step {s}", sources[s]) for s in steps]
    for path in sorted(glob.glob(os.path.join(glob.escape(run.folder), "eval", "*.jsonl")), key=os.path.getmtime):
        chosen.append(("after " + ", ".join(os.path.basename(path).split(".")[:2]), [path]))
    chosen, records, used = evenly(chosen, most), [], set()
    for where, paths in chosen:
        lines = [(f"{os.path.basename(p)}:{i}", line) for p in paths for i, line in enumerate(open(p, encoding="utf-8", errors="replace"), 1)]
        pairs = evenly(range(0, len(lines), 2), max(most // len(chosen) // 2, 1))      # neighbours: two samples of one task
        for place, line in [lines[i + j] for i in pairs for j in (0, 1) if i + j < len(lines)][: max(most // len(chosen), 1)]:
            record = parse_line(line)
            if record and isinstance(record.get("ids"), list):
                records.append(shorten(record, tail) | {"run": k, "where": f"{run.name}, {where}", "key": f"{run.name}/{place}"})
                used.update(records[-1]["ids"])
    return records, {i: tokenizer.decode([i], skip_special_tokens=False) for i in sorted(used)} if tokenizer else {}


def shorten(r, tail):
    """A record of rollout.trajectory_record as the page shows it: the prompt's tail, and spans of equal mask."""
    cut = max(r["prompt_len"] - tail, 0)
    ids, mask, logp = ([int(i) for i in r["ids"][cut:]], r["mask"][cut:], [number(v) for v in r["logp"][cut:]])
    spans, texts = [], list(r.get("texts") or [])
    for i in range(len(ids)):
        if not i or mask[i] != mask[i - 1]:
            spans.append({"start": i, "sampled": int(mask[i])})
    for n, span in enumerate(s for s in spans if s["sampled"]):
        text = texts[n] if n < len(texts) else ""
        span |= {"text": text, "turn": (r.get("turns") or [None] * (n + 1))[n: n + 1],
                 "state": structure(text, "length" if r.get("finish") == "length" and n == len(texts) - 1 else "stop")}
    return {"task": str(r.get("task_id")), "finish": r.get("finish"), "reward": r.get("reward"), "error": r.get("infra_error"), "cut": cut,
            "ids": ids, "logp": [None if math.isnan(v) else round(v, 3) if m else 0 for v, m in zip(logp, mask)], "spans": spans}


# --- the page ---------------------------------------------------------------------------------------------------------

SCRIPT = r"""
const data = JSON.parse(document.getElementById("data").textContent), page = id => document.getElementById(id);
function add(parent, tag, text, kind) {             // text only ever becomes a text node
  const e = parent.appendChild(document.createElement(tag));
  if (text !== undefined) e.textContent = text;
  if (kind) e.className = kind;
  return e;
}
const place = r => "#" + encodeURIComponent(r.key), success = r => r.reward ? `official ${r.reward.official}, strict ${r.reward.strict}` : "no score";
function list(where) {
  page("which").replaceChildren();
  data.records.forEach((r, i) => { if (r.where === where)
    add(page("which"), "option", `${r.task} (${r.key.split(":").pop()}): ${success(r)}, ${r.finish}`).value = i; });
}
function show(r) {
  const box = page("trajectory"), vocab = data.vocab[r.run];
  page("where").value = r.where; list(r.where); page("which").value = data.records.indexOf(r);
  box.replaceChildren();
  const turns = r.reward ? r.reward.per_turn.map((ok, t) => `${t + 1} ${ok ? "\u2713" : "\u2717"}`).join("  ") : "";
  add(box, "p", `${r.task} \u00b7 ${success(r)} \u00b7 per turn: ${turns || "none"} \u00b7 finish: ${r.finish}`, "head");
  add(box, "p", `${r.key}` + (r.reward && r.reward.error ? ` \u00b7 scoring: ${r.reward.error}` : ""), "small");
  if (r.error) add(box, "pre", r.error, "bad");
  let turn = null;
  r.spans.forEach((s, n) => {
    const end = n + 1 < r.spans.length ? r.spans[n + 1].start : r.ids.length, next = s.sampled ? s : r.spans[n + 1];
    if (next && next.turn && next.turn.length && next.turn[0] !== turn) { turn = next.turn[0]; add(box, "h4", `user turn ${turn + 1}`); }
    const glue = r.ids.slice(s.start, end).map(i => vocab[i] || "").join("");
    const role = s.sampled ? "assistant" : n === 0 ? `prompt, its last ${end - s.start} of ${end - s.start + r.cut} tokens` :
      glue.includes("<tool_response>") ? "tool result" : "context";
    const block = add(box, "div", undefined, s.sampled ? "message" : "glue"), title = add(block, "div", role + " ", "role");
    if (s.sampled) add(title, "span", s.state, "state " + s.state);
    if (s.sampled && !Object.keys(vocab).length) add(block, "div", s.text);
    for (let i = s.start; i < end; i++) {
      const t = add(block, "span", vocab[r.ids[i]] || (Object.keys(vocab).length ? `\u27e8${r.ids[i]}\u27e9` : "\u25aa"), s.sampled ? "token" : undefined);
      const p = Math.exp(r.logp[i]);
      t.title = `id ${r.ids[i]}, ` + (!s.sampled ? "not sampled: mask 0" : r.logp[i] === null ? "no log-probability" : `logp ${r.logp[i]}, p ${p.toFixed(3)}`);
      if (s.sampled) t.style.backgroundColor = `rgba(230, 159, 0, ${(0.9 * (1 - p)).toFixed(3)})`;
    }
  });
}
[...new Set(data.records.map(r => r.where))].forEach(w => add(page("where"), "option", w).value = w);
const chosen = () => data.records.find(r => place(r) === location.hash);
page("where").onchange = () => location.hash = place(data.records.find(r => r.where === page("where").value));
page("which").onchange = () => location.hash = place(data.records[page("which").value]);
onhashchange = () => { if (chosen()) show(chosen()); };
if (data.records.length) show(chosen() || data.records[0]);
else add(page("trajectory"), "p", "No rollouts were saved.");
"""

STYLESHEET = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100% } figure { margin: 1.5em 0 } figcaption, .small, .role { color: #666; font-size: 13px }
table { border-collapse: collapse; font-size: 13px } td, th { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid #eee; vertical-align: top }
td { overflow-wrap: anywhere } .bad { color: #b33a00; font-weight: 600 } select { max-width: 100%; font: inherit; margin: 2px 6px 2px 0 }
.message, .glue { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; padding: 4px 10px; margin: 4px 0 }
.glue { color: #777; border-left: 3px solid #ddd } .message { border-left: 3px solid #0072B2 } .token { border-bottom: 1.5px solid #0072B2 }
.role { font-family: system-ui, sans-serif } .state { color: white; padding: 0 6px; border-radius: 3px } .head { font-weight: 600 } h4 { margin: 1em 0 0 }
.call { background: #0072B2 } .response { background: #2b87b8 } .polluted { background: #a86f00 } .collapsed { background: #b33a00 }
"""


def table(head, rows):
    """An HTML table; every cell is escaped here."""
    cell = lambda tag, value: f"<{tag}{' class=bad' if value == 'FAIL' else ''}>{html.escape(str(value))}</{tag}>"
    return "<table>" + "".join("<tr>" + "".join(cell(tag, v) for v in row) + "</tr>"
                               for tag, row in [("th", head)] + [("td", row) for row in rows]) + "</table>"


def evaluation_table(runs):
    scores, rows = {}, collections.defaultdict(dict)
    for run in runs:
        for (_, name), splits in run.evals.items():
            for split, line in splits.items():
                for key, entry in line["table"].items():
                    if is_entry(entry):
                        category, _, score = key.partition(" ")
                        scores[score] = k, n, rate, low, high = entry
                        rows[run.name, name, split, category][score] = f"{k}/{n} = {100 * rate:.1f} % [{100 * number(low):.1f}, {100 * number(high):.1f}]"
    return table(["run", "after", "tasks", "category", *scores], [[*at, *(row.get(s, "") for s in scores)] for at, row in rows.items()])


def write_report(path, groups, figures, records, vocab):
    runs = [run for g in groups for run in g.runs]
    checks = [(run.name, s, name, f"{number(c.get('value')):.4g}", "PASS" if c.get("pass") else "FAIL") for run in runs for s, line in run.steps.items()
              if isinstance(line.get("checklist"), dict) for name, c in line["checklist"].items() if isinstance(c, dict)]
    events = [(run.name, e.get("step", ""), e.get("event", ""), " ".join(f"{k}={v}" for k, v in e.items() if k not in ("kind", "event", "step")))
              for run in runs for e in run.events]
    keys = list(dict.fromkeys(k for run in runs for k in run.config))
    flags = [[k, *(run.config.get(k, "") for run in runs)] for k in keys]
    flags.sort(key=lambda row: len(set(map(str, row[1:]))) == 1)        # what differs comes first
    section = lambda title, body: f"<h2>{title}</h2>{body}"
    pictures = {name: f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}"><figcaption>{html.escape(caption)}'
                      "</figcaption></figure>" for name, (png, caption) in figures.items()}
    embedded = json.dumps({"records": records, "vocab": vocab}, separators=(",", ":"), allow_nan=False)
    for character in "<>&":     # '</script>' or '<!--' within a string would end or change the element
        embedded = embedded.replace(character, f"\\u{ord(character):04x}")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; " \
             f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
    title = html.escape(", ".join(g.label for g in groups))
    with open(path, "w", encoding="utf-8", errors="replace") as f:
        f.write(f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
                f"<title>{title}</title><style>{STYLESHEET}</style></head><body><h1>{title}</h1>" + pictures.pop("overview", "")
                + section("Evaluations", evaluation_table(runs)) + section("Trajectories",
                "<p class=small>Blue underline: sampled and trained (mask 1). Grey: context (mask 0). The more orange, the less probable was the token; "
                'point at it for its id and log-probability.</p><select id="where"></select><select id="which"></select><div id="trajectory"></div>')
                + section("Figures", "".join(pictures.values()))
                + section("Checklist of each round's first step", table(["run", "step", "check", "value", ""], checks))
                + section("Events", table(["run", "RL step", "event", ""], events)) + section("Flags", table(["flag", *(r.name for r in runs)], flags))
                + f'<script type="application/json" id="data">{embedded}</script><script>{SCRIPT}</script></body></html>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", help="folder to write; default: RUN_DIR, or 'compare' beside several of them")
    parser.add_argument("--label", nargs="+", help="one name per run; runs with the same name are seeds")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json; default: RUN_DIR/model, RUN_DIR/ckpt-*, the run's --model")
    parser.add_argument("--max_trajectories", type=int, default=200, help="in the report")
    args = parser.parse_args()
    if args.label and len(args.label) != len(args.runs):
        fail(f"{len(args.label)} labels for {len(args.runs)} runs: give one for each")
    runs = [read_run(folder) for folder in args.runs]
    groups = group_runs(runs, args.label)
    records, vocab = [], []
    for k, run in enumerate(runs):
        more, texts = sample_trajectories(run, k, find_tokenizer(run, args.tokenizer), max(args.max_trajectories // len(runs), 0))
        records, vocab = records + more, vocab + [texts]
    out = args.out or (args.runs[0] if len(runs) == 1 else os.path.join(os.path.dirname(os.path.normpath(args.runs[0])), "compare"))
    plt.rcParams.update(STYLE)
    figures = {}
    try:
        os.makedirs(out, exist_ok=True)
        for name, (fig, caption) in make_figures(groups).items():
            fig.savefig(path := os.path.join(out, f"{name}.png"), metadata={"Software": None})
            figures[name] = open(path, "rb").read(), caption
        write_report(os.path.join(out, "report.html"), groups, figures, records, vocab)
    except OSError as e:
        fail(f"cannot write to {out}: {e}")
    print(f"wrote {', '.join(f'{name}.png' for name in figures)} and report.html to {out} ({len(records)} trajectories)")


if __name__ == "__main__":
    main()
