"""Figures and a report of runs: metrics.jsonl and saved trajectories -> PNG files and one report.html that needs no server.

 1. Runs that differ in their seed only (or share a --label) are one curve: the mean of those that have the step, and
    a band from min to max. Runs of equal flags and equal seed differ in something else, such as the code: a curve each.
 2. A key that a step lacks is a gap. So is all that the update measures in a step whose groups were all flat: the zeros
    in its line are sums over no token.
 3. SFT phases have no RL step of their own: a green bar between two steps, where lines break. Evaluations have panels of their own.
 4. Text of trajectories is hostile. It reaches the page as JSON without '<' and is shown with textContent only; the
    page's policy forbids any script but its own (by hash) and any connection.

    python tools/plot.py runs/tiny-ets                                      # -> runs/tiny-ets/*.png and report.html
    python tools/plot.py runs/a runs/b --out runs/compare --label none ets  # overlaid; --smooth 5: lines are means, points stay
    python tools/plot.py runs/seed1 runs/seed2 runs/seed3                   # a band -> runs/compare
    python tools/plot.py runs/a runs/b --ood runs/ood/ood.json              # with the table of tools/ood.py
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
import textwrap
from types import SimpleNamespace

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer    # transformers' decode goes through it, and imports for seconds

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from reward import structure

# Okabe and Ito's colours: told apart by colour-blind readers. Healthy is blue, unhealthy is orange and red.
BLUE, SKY, ORANGE, RED, GREEN, PINK = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7"
COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY, "black", "grey")
STATES = {"structure/call": BLUE, "structure/response": SKY, "structure/polluted": ORANGE, "structure/collapsed": RED}
TIMES = {"time/rollout_s": BLUE, "time/update_s": ORANGE, "time/push_s": PINK}
CONTROL = {"<tool_call>": BLUE, "</tool_call>": SKY, "<|im_end|>": RED, '{"': GREEN, "<think>": PINK}
SLOTS = {"first": "First token of a message", "after_open": "After <tool_call>", "close": "After a call's closing brace", "end": "End of a response"}
BELOW = " (< 1e-6)"      # of a line that a log axis has no place for
OF_UPDATE = ("kl", "entropy", "engine_gap", "clip_share", "ratio", "pg_", "grad_norm", "control/")
NOT_AN_ABLATION = ("seed", "out", "fresh", "report_to", "save_every", "kv_gib", "sleep", "checkpointing", "tokens_per_row", "save_rollouts")
plt.rcParams.update({
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left",
    "axes.grid": True, "grid.color": "#eeeeee", "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8,
    "savefig.dpi": 120, "text.parse_math": False})      # a run's name may hold a $


# --- reading ----------------------------------------------------------------------------------------------------------

def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_line(line):
    """A JSON object, or {} for anything else (such as the last line of a run that is still being written)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def number(value):
    """A finite number, or nan."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan


def read_run(folder):
    """A run as a namespace: steps {step: line}, evals {(step, its number at this step): (name, {split: line})}, config, events,
    phases, alarms."""
    if not os.path.isfile(path := os.path.join(folder, "metrics.jsonl")):
        fail(f"{folder} has no metrics.jsonl: not a run" if os.path.isdir(folder) else f"no such directory: {folder}")
    name = os.path.basename(os.path.abspath(folder))
    run = SimpleNamespace(folder=folder, name=name, config={}, steps={}, evals={}, events=[])
    evals, at = collections.defaultdict(dict), collections.Counter()
    for line in map(parse_line, open(path, encoding="utf-8", errors="replace")):
        kind, step = line.pop("kind", None), number(line.get("step"))
        if kind == "config":
            run.config = run.config or line
        elif kind == "event":
            run.events.append(line)
        elif kind == "grpo" and step >= 0:      # a step that was played again after a roll-back counts once
            flat = line.get("trained_tokens") == 0
            run.steps[int(step)] = {k: v for k, v in line.items() if not (flat and k.startswith(OF_UPDATE))}
        elif kind == "eval" and step >= 0 and isinstance(line.get("table"), dict):
            line["table"] = {k: e for k, e in line["table"].items() if isinstance(e, list) and len(e) == 5}
            evals[str(line.get("phase")), str(line.get("name"))][str(line.get("split"))] = line
    for (_, name), splits in evals.items():     # after an RL round: number 0; after an SFT phase at the same step: 1
        step = int(next(iter(splits.values()))["step"])
        run.evals[step, at[step]] = name, splits
        at[step] += 1
    if not (run.steps or run.evals):
        fail(f"{folder} has nothing to plot yet: no RL step and no evaluation in its metrics.jsonl")
    of = lambda event: [(str(e.get("name")), number(e["step"])) for e in run.events
                        if e.get("event") == event and number(e.get("step")) >= 0]
    run.phases, run.alarms = list(dict.fromkeys(of("phase"))), [step - 1 for _, step in of("alarm")]     # the step that rang is over
    return run


def group_runs(runs, labels, smooth=1):
    """Runs -> curves [namespace(label, runs, colour, smooth)]. Runs with one label, or that differ in the seed only, are seeds."""
    flags = [json.dumps({a: b for a, b in run.config.items() if a not in NOT_AN_ABLATION}, sort_keys=True) for run in runs]
    seeds, groups = collections.defaultdict(list), collections.defaultdict(list)
    for run, same in zip(runs, flags):
        seeds[same].append(run.config.get("seed"))
    for k, (run, same) in enumerate(zip(runs, flags)):      # if a seed occurs twice, nothing says which runs belong together
        groups[labels[k] if labels else same if len(set(seeds[same])) == len(seeds[same]) else k].append(run)
    shared = lambda g: len(g) > 1 and re.sub(r"\W*(seed\d*)?\W*$", "", os.path.commonprefix([run.name for run in g])) or g[0].name
    names = [(key if labels else shared(g)) + (f" ({len(g)} seeds)" if len(g) > 1 else "") for key, g in groups.items()]
    return [SimpleNamespace(label=n, runs=g, colour=c, smooth=smooth) for n, g, c in zip(names, groups.values(), COLOURS * len(runs))]


def series(group, key):
    """(steps [S], values [R, S]), masked where a run lacks the step or the key. "a+b" is the sum of two."""
    steps = [s for run in group.runs for s in run.steps] or [0]
    x = np.arange(min(steps), max(steps) + 1)
    return x, np.ma.masked_invalid([[sum(number(run.steps.get(s, {}).get(k)) for k in key.split("+")) for s in x] for run in group.runs])


def evaluations(group, key, split):
    """(places as in run.evals, points [N, 3]: rate, low, high). One run: the evaluation's interval; seeds: the mean,
    and from the lowest end of their intervals to the highest. They share the tasks, so that pooled counts would seem too certain."""
    found = collections.defaultdict(list)
    for run in group.runs:
        for place, (_, splits) in run.evals.items():
            if split in splits and key in splits[split]["table"]:
                found[place].append([number(v) for v in splits[split]["table"][key][2:]])
    rows = [(np.mean(f, 0)[0], np.min(f), np.max(f)) for f in found.values()]
    return list(found), np.array(rows).reshape(-1, 3)


# --- panels: each draws on `ax` and returns whether there was something to draw -----------------------------------------

def dress(ax, groups, title, ylabel):
    """Title, labels, phases and alarms of a panel over RL steps, with room for their names at the top."""
    steps = [s for g in groups for s in series(g, "")[0]]
    plan, alarms = groups[0].runs[0].phases, sorted((s, g.colour) for g in groups for run in g.runs for s in run.alarms)
    if not all(g.runs[0].phases == plan for g in groups):
        plan = []       # one picture has no place for several plans; the lines break at their borders
    low, high, a, b = min(steps), max(steps), *ax.get_ylim()
    em, room = 0.02 * (high - low + 1), 0.24 if plan or alarms else 0.03
    if share := ylabel.startswith(("share", "mean probability")):
        b = b if ax.dataLim.y1 > 0 else 1       # all zero: not an axis from -0.05 to 0.05
        a, b = (1e-6, 1) if ax.get_yscale() == "log" else (-0.03 * b, b)
        ax.minorticks_off()
    ax.set(title=title, ylabel=ylabel, xlabel="RL step", xlim=(low - 0.8 - em, high + 0.8 + em),
           ylim=(a, b * (b / a) ** room if ax.get_yscale() == "log" else b + room * (b - a)))
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if share:
        ax.set_yticks([t for t in ax.get_yticks() if max(a, 0) <= t < 1.01])
    note = dict(transform=ax.get_xaxis_transform(), va="top", fontsize=7)
    rounds = [p for p in plan if p[0].startswith("rl")]
    for k, ((name, start), end) in enumerate(zip(rounds, [s for _, s in rounds[1:]] + [high + 1])):
        ax.axvspan(start - 0.5, end - 0.5, color="#f3f3f3" if k % 2 else "white", lw=0, zorder=0)
        ax.text((start + end - 1) / 2, 0.99, name, ha="center", color="#777777", **note)
    for name, start in [p for p in plan if p not in rounds]:
        ax.axvline(start - 0.5, lw=4, alpha=0.4, color=GREEN, zorder=1)
        ax.text(start - 0.5 + em, 0.99, name, rotation=90, color=GREEN, **note)
    named = []
    for step, colour in alarms:
        ax.axvline(step, ls=(0, (2, 2)), lw=1.2, color="black" if len(groups) == 1 else colour)
        if all(abs(step - other) > 2 * em for other in named):      # seeds ring beside one another
            ax.text(step - em / 4, 0.99, "alarm", rotation=90, ha="right", **note)
            named.append(step)


def smoothed(y, n):
    """The mean of up to n steps around each, as many before as after it: else a slope bends at its ends. Gaps stay gaps."""
    y = y.filled(np.nan)
    windows = [y[i - h: i + h + 1] for i in range(len(y)) for h in [min(n // 2, i, len(y) - 1 - i)]]
    return [np.nanmean(w + w[::-1]) / 2 if np.isfinite(w[len(w) // 2]) else np.nan for w in windows]     # a step counts with its mirror image


def draw_line(ax, group, key, label, colour, style="-", log=False):
    """A line per RL round: the reference, the optimizer and the weights change between them. Smoothed, it leaves the points where they are."""
    x, values = series(group, key)
    mean, low, high = values.mean(0), values.min(0), values.max(0)
    if log:     # rounding noise and exact zeros have no place on a log axis
        mean = np.ma.masked_less(mean, 1e-6)
        low = np.ma.array(np.ma.maximum(low, 1e-6), mask=np.ma.getmaskarray(mean))      # and no band where there is no line
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        ax.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if ax.get_ylim()[1] < 10 * ax.get_ylim()[0] else "")
    borders = sorted({int(s - x[0]) for run in group.runs for _, s in run.phases if x[0] < s <= x[-1]})
    for piece in map(slice, [0, *borders], [*borders, len(x)]) if mean.count() else ():
        dots = dict(marker=".", ms=4 if len(x) < 60 else 2, color=colour)
        if group.smooth > 1:
            ax.plot(x[piece], mean[piece], ls="", alpha=0.4, **dots)
            dots["marker"] = ""
        ax.plot(x[piece], smoothed(mean[piece], group.smooth), style, lw=1.5 if len(x) < 60 else 0.9, label=None if piece.start else label, **dots)
        if len(group.runs) > 1:
            ax.fill_between(x[piece], low[piece], high[piece], color=colour, alpha=0.18, lw=0)
    if values.count() and not mean.count():
        ax.plot([], [], style, color=colour, label=label and label + BELOW)
    return values.count() > 0


def panel_stack(ax, group, colours, title, ylabel):
    """Stacked areas with steps as wide as they are: a single step is visible, a missing one is a gap."""
    x = series(group, "")[0]
    parts = np.array([series(group, key)[1].mean(0).filled(np.nan) for key in colours])     # [K, S]
    tops = np.cumsum(np.vstack([0 * parts.sum(0), parts]), 0)                               # [K + 1, S]
    edges = np.stack([x - 0.5, x + 0.5], 1).ravel()                                         # [2 S]
    for (key, colour), low, high in zip(colours.items(), tops.repeat(2, 1), tops.repeat(2, 1)[1:]):
        ax.fill_between(edges, low, high, color=colour, lw=0, label=key.split("/")[1].removesuffix("_s"))
    dress(ax, [group], title, ylabel)
    ax.set_ylim(0)
    return not np.isnan(parts).all()


def panel_lines(ax, groups, lines, title, ylabel, log=False):
    """`lines`: {key: (label, colour, style)}. Several groups are told apart by their own label and colour: only the first key is drawn."""
    if len(groups) > 1:
        drawn = [draw_line(ax, g, next(iter(lines)), g.label, g.colour, log=log) for g in groups]
    else:
        drawn = [draw_line(ax, groups[0], key, *line, log=log) for key, line in lines.items()]
    if not any(len(line.get_xdata()) for line in ax.lines):
        ax.set_ylim(1e-6, 1)
        ax.text(0.5, 0.5, "nothing above 1e-6", ha="center", color="#777777", transform=ax.transAxes)
    dress(ax, groups, title, ylabel)
    return any(drawn)


def panel_category(ax, groups, category, splits):
    """Success at each evaluation: filled points are test tasks, hollow ones train tasks (sampled if the run has --eval_samples)."""
    plans = [{place: name for run in g.runs for place, (name, _) in run.evals.items()} for g in groups]
    order, top = sorted(set().union(*plans)), 0
    text = [plans[0][place] if all(p == plans[0] for p in plans) else f"step {place[0]}" + ", SFT" * (place[1] > 0) for place in order]
    how = {s: "sampled" if s == "train" and groups[0].runs[0].config.get("eval_samples") else "greedy" for s in splits}
    curves = [(g, s) for g in groups for s in splits]
    for k, (g, split) in enumerate(curves):
        places, points = evaluations(g, f"{category} official", split)
        y, low, high = points.T
        x = [order.index(place) + 0.7 * ((k + 0.5) / len(curves) - 0.5) for place in places]
        ax.errorbar(x, y, np.maximum([y - low, high - y], 0), fmt="o", ms=4.5, lw=1.2, capsize=2, color=g.colour,
                    mfc=g.colour if split == "test" else "white", label=f"{split}, {how[split]}" if len(groups) == 1 else g.label)
        top = max(top, *high, 0)
    top = max(top, 0.1) if top else 1
    for k in range(0, len(order), 2):
        ax.axvspan(k - 0.5, k + 0.5, color="#f3f3f3", lw=0, zorder=0)
    ax.set(title=f"Success: {category}" + (f", {splits[0]} tasks, {how[splits[0]]}" if len(splits) == 1 else ""), ylabel="share of episodes",
           ylim=(-0.03 * top, 1.05 * top), xlim=(-0.6, len(order) - 0.4))
    ax.set_xticks(range(len(order)), text, rotation=45, ha="right", rotation_mode="anchor")
    ax.grid(axis="x", visible=False)
    return bool(order)


def draw_figure(panels, columns, caption, own_keys):
    """`panels`: [(function, *arguments)]. The caption is a line above them. One key for all of them below the figure, or one below each."""
    fig, keys = plt.figure(figsize=(4.3, 3.2), layout="constrained"), {}
    for draw, *args in panels:
        if not draw(ax := fig.add_subplot(), *args):
            ax.remove()
    columns = min(columns, max(len(fig.axes), 1))
    grid = fig.add_gridspec(max(math.ceil(len(fig.axes) / columns), 1), columns)
    fig.set_size_inches(7 if columns == 1 else 4.3 * columns, (3.6 if own_keys else 3.2) * grid.nrows)
    for k, ax in enumerate(fig.axes):
        ax.set_subplotspec(grid[divmod(k, columns)])
        handles, labels = ax.get_legend_handles_labels()
        keys |= {label: h for h, label in zip(handles, labels) if label not in keys}
        if own_keys and len(labels) > 1:
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17 if ax.get_xlabel() else -0.3), columnspacing=0.9, handlelength=1.3,
                      ncols=3 if BELOW in "".join(labels) else 4)
    fig.suptitle(textwrap.fill(caption, int(15 * fig.get_figwidth())), x=0.01, ha="left", fontsize=8, color="#666666")
    keys = {textwrap.fill(label, 80): h for label, h in keys.items() if not (BELOW in label and label.removesuffix(BELOW) in keys)}     # another panel's
    if len(keys) > 1 and not own_keys:
        fig.legend(keys.values(), keys, loc="outside lower center", ncols=max(int(14 * fig.get_figwidth() / (max(map(len, keys)) + 6)), 1))
    return fig


def make_figures(groups, out):
    """Write the PNG files; returns {name: (bytes, caption)}. A figure whose data no run has is left out."""
    one, seeds = len(groups) == 1, any(len(g.runs) > 1 for g in groups)
    bars = "Bars: 95 % intervals" + (", of seeds from the lowest end to the highest" if seeds else "") + ". Hollow: train tasks."
    drawn = (f"Lines: means of {n} steps. " if (n := groups[0].smooth) > 1 else "") + ("Bands: from the lowest to the highest seed. " if seeds else "")
    rates = dict.fromkeys(key.removesuffix(" official") for g in groups for run in g.runs for _, splits in run.evals.values()
                          for line in splits.values() for key in line["table"] if key.endswith(" official"))
    title = lambda text, g: text if one else f"{text}\n{textwrap.fill(g.label.replace(' seeds)', chr(160) + 'seeds)'), 37)}"
    lines = lambda keys, *texts: (panel_lines, groups, {keys: (None, BLUE)} if isinstance(keys, str) else keys, *texts)
    split = lambda key: {key: ("all tokens", BLUE), key.split("_")[0] + "_control": ("control tokens", RED), key.split("_")[0] + "_rest": ("the rest", ORANGE)}
    official, strict = {"success/official": ("official", BLUE)}, {"success/strict": ("strict", ORANGE, ":")}
    reward = [lines(official | strict, "Success of rollouts", "share of episodes"), lines(strict, "Success of rollouts, strict", "share of episodes")][: 1 if one else 2]
    success = lambda category: [(panel_category, groups, category, splits) for splits in ([("train", "test")] if one else [("test",), ("train",)])]
    won = [s for s in ("test", "train") if any(evaluations(g, "all official", s)[1][:, 0].any() for g in groups)]
    overview = success("all")[won == ["train"] and not one]     # zeros of every run on the held-out tasks tell nothing
    kl = lines(split("kl"), "KL to the reference", "nats per token", True)
    gradient = lines(split("pg_loss"), "Policy-gradient loss", "per token")
    entropy = lines("entropy", "Entropy", "nats per token")
    health = [lines(key, text, "share of " + of) for key, text, of in (
        ("structure/cut", "Cut by length", "messages"), ("structure/malformed", "Malformed calls", "messages"), ("structure/repeated", "Repeats", "messages"))]
    states = [(panel_stack, g, STATES, title("Messages", g), "share of messages") for g in groups]
    times = [(panel_stack, g, TIMES, title("Time of a step", g), "seconds") for g in groups]
    control = [(panel_lines, [g], {f"control/{slot}/{k}": (k, colour) for k, colour in CONTROL.items()}, title(text, g), "mean probability", True)
               for g in groups for slot, text in SLOTS.items()]
    early = [states[0], control[0]] if one else [
        lines("structure/polluted+structure/collapsed", "Unhealthy messages: polluted or collapsed", "share of messages"),
        lines("control/first/<|im_end|>", "<|im_end|> as first token", "mean probability", True)]
    plan = {    # file: (panels, columns, caption)
        "overview": ([reward[0], *early, kl, entropy, overview], 3, f"{drawn}{bars} {'Dotted: strict. ' * one}Green: SFT. Dashed: alarm."),
        "reward": (reward + success("all"), 2, f"Training rollouts are sampled. {drawn}{bars}"),
        "structure": (states, 3, "Every message of every rollout is in one of four states; blue is healthy." + " Means of the seeds." * seeds),
        "control": (control, 2 if one else 4, f"{drawn}Probability of control tokens where the protocol is decided; what is below 1e-6 is not drawn."),
        "kl_entropy": ([kl, gradient, entropy], 3, f"{drawn}Steps whose groups were all flat have no update and no value."),
        "health": (health, 3, f"{drawn}What the alarm looks at beside structure, control tokens, KL and entropy."),
        "categories": ([p for c in rates for p in success(c)], 3 if one else 2, bars),
        "times": (times, 3, "Wall time of each RL step." + " Means of the seeds." * seeds),
    }
    figures = {}
    for name, (panels, columns, caption) in plan.items():
        fig = draw_figure(panels, columns, caption, own_keys=one and name in ("overview", "control"))    # whose panels have no key in common
        if fig.axes:
            fig.savefig(path := os.path.join(out, f"{name}.png"))
            figures[name] = open(path, "rb").read(), caption
        plt.close(fig)
    return figures


# --- trajectories -----------------------------------------------------------------------------------------------------

def find_tokenizer(run, folder):
    saved = sorted(glob.glob(f"{glob.escape(run.folder)}/ckpt-*[0-9]"))
    for place in [folder] if folder else [f"{run.folder}/model", *saved[::-1], str(run.config.get("model"))]:
        if os.path.isfile(path := os.path.join(place, "tokenizer.json")):
            return Tokenizer.from_file(path)
    if folder:
        fail(f"no tokenizer.json in {folder}")


def evenly(items, n):
    """At most n of the items, the first and the last among them."""
    return items if len(items) <= n else [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def find_rollouts(run):
    """Files of the trajectories of the run's steps, from the folder that its config names; notes why there are none."""
    named = run.config.get("save_rollouts")     # as grpo.rollouts_folder; older runs have a bool
    folder = named if named and isinstance(named, str) else os.path.join(run.folder, "rollouts")
    paths = sorted(glob.glob(f"{glob.escape(folder)}/*.jsonl"))
    run.note = "" if paths or not run.steps else "it ran with --save_rollouts none" if named == "none" else f"there are none in {folder}"
    return paths


def sample_records(run, most):
    """Yield at most `most` records, spread over the steps (an alarm's is among them) and the evaluations."""
    sources = collections.defaultdict(list)
    for path in find_rollouts(run) + sorted(glob.glob(f"{glob.escape(run.folder)}/eval/*.jsonl"), key=os.path.getmtime):
        name, *split = os.path.basename(path).split(".")
        sources[f"step {int(name)}" if name.isdigit() else f"after {name}, {split[0]}"].append(path)
    wanted = evenly(list(sources), 30) + [f"step {s:g}" for s in run.alarms]
    chosen = evenly([where for where in sources if where in wanted], most)
    for where in chosen:
        records, prompt = [], []
        for place, line in [(f"{os.path.basename(p)}:{i}", line) for p in sources[where]
                            for i, line in enumerate(open(p, encoding="utf-8", errors="replace"), 1)]:
            if record := parse_line(line):
                prompt = record.get("prompt_ids") or prompt     # a group's prompt is saved with its first trajectory
                records.append((record, prompt, {"where": f"{run.name}, {where}", "key": f"{run.name}/{place}"}))
        each = max(most // len(chosen), 1)
        starts = evenly(range(0, len(records), 2), max(each // 2, 1))       # neighbours: two samples of one task
        for record, prompt, more in [r for k in starts for r in records[k: k + 2]][:each]:
            yield shorten(record, prompt[-300:]) | more | {"of": len(records)}


def shorten(r, tail):
    """A record of rollout.save_trajectories as the page wants it: the prompt's tail, then spans of equal mask."""
    ids, mask = tail + [int(i) for i in r["ids"]], [0] * len(tail) + r["mask"]
    logp = [0.0] * len(tail) + [round(number(v), 3) for v in r["logp"]]
    spans = [{"start": i, "sampled": int(m)} for i, m in enumerate(mask) if not i or m != mask[i - 1]]
    for n, (span, text) in enumerate(zip([s for s in spans if s["sampled"]], r["texts"])):
        span |= {"text": text, "turn": r["turns"][n], "state": structure(text, "length" if n in r.get("cut", []) else "stop")}
    return {"task": r["task_id"], "finish": r["finish"], "reward": r["reward"], "error": r["infra_error"],
            "prompt": r["prompt_len"], "ids": ids, "logp": [None if math.isnan(v) else v for v in logp], "spans": spans}


# --- the page ---------------------------------------------------------------------------------------------------------

SCRIPT = r"""
const page = id => document.getElementById(id), data = JSON.parse(page("data").textContent);
const chosen = () => data.records.find(r => "#" + encodeURIComponent(r.key) === location.hash);
const share = r => `${data.records.filter(other => other.where === r.where).length} of ${r.of} of ${r.where}`;
const score = r => r.reward ? `official ${r.reward.official}, strict ${r.reward.strict}` : "no score";
function add(parent, tag, text, kind) {     // whatever the text is, it only ever becomes a text node
  const e = parent.appendChild(document.createElement(tag));
  e.textContent = text;
  e.className = kind || "";
  return e;
}
function show(r) {
  const box = page("trajectory"), vocab = data.vocab[r.run], known = Object.keys(vocab).length;
  page("which").value = r.key;
  box.replaceChildren();
  const turns = r.reward ? r.reward.per_turn.map((ok, t) => `${t + 1}${ok ? "\u2713" : "\u2717"}`).join(" ") : "none";
  add(box, "b", `${r.task}: ${score(r)}, per turn ${turns}, finish ${r.finish}`);
  add(box, "div", `${r.key}, one of ${share(r)}` + (r.reward && r.reward.error ? `, scoring: ${r.reward.error}` : ""), "role");
  if (r.error) add(box, "pre", r.error, "bad");
  let turn;
  r.spans.forEach((s, n) => {
    const following = r.spans[n + 1], ids = r.ids.slice(s.start, following && following.start);
    const next = s.sampled ? s : following, glue = ids.map(i => vocab[i]).join("");
    if (next && next.turn !== undefined && next.turn !== turn) add(box, "h4", `user turn ${(turn = next.turn) + 1}`);
    const role = s.sampled ? "assistant " : !n ? `prompt, the last ${ids.length} of ${r.prompt} tokens` :
      glue.includes("<tool_response>") ? "tool result" : "context";
    const block = add(box, "div", "", s.sampled ? "message" : "glue"), title = add(block, "div", role, "role");
    if (s.state) add(title, "span", s.state, "state " + s.state);
    if (s.sampled && !known) add(block, "div", s.text);
    ids.forEach((id, i) => {
      const logp = r.logp[s.start + i], p = Math.exp(logp);
      const t = add(block, "span", vocab[id] || (known ? `\u27e8${id}\u27e9` : "\u25aa"), s.sampled ? "token" : "");
      t.title = `id ${id}, ` + (!s.sampled ? "mask 0" : logp === null ? "no logp" : `logp ${logp}, p ${p.toFixed(3)}`);
      if (s.sampled) t.style.backgroundColor = `rgba(230, 159, 0, ${(0.9 * (1 - p)).toFixed(3)})`;
    });
  });
}
for (const where of new Set(data.records.map(r => r.where))) {
  const group = add(page("which"), "optgroup", "");
  const those = data.records.filter(r => r.where === where);
  group.label = share(those[0]);
  for (const r of those)
    add(group, "option", `${where}: ${r.task}, line ${r.key.split(":").pop()}: ${score(r)}, ${r.finish}`).value = r.key;
}
page("which").onchange = e => location.hash = encodeURIComponent(e.target.value);
onhashchange = () => chosen() && show(chosen());
data.records.length ? show(chosen() || data.records[0]) : add(page("trajectory"), "p", "No trajectories.");
"""
CSS = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100% } figure { margin: 1.5em 0 } .role { color: #666; font: 13px/1.6 system-ui, sans-serif }
table { border-collapse: collapse; font-size: 13px } td { overflow-wrap: anywhere } h4 { margin: 1em 0 0 } select { font: inherit }
td, th { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid #eee; vertical-align: top } .bad { color: #b33a00 }
.message, .glue { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; padding: 4px 10px }
.message, .glue { margin: 4px 0; border-left: 3px solid #ddd } .message { border-color: #0072B2 } .glue { color: #777 }
.token { border-bottom: 1.5px solid #0072B2 } .state { color: white; background: #0072B2; padding: 0 6px; border-radius: 3px }
.polluted { background: #a86f00 } .collapsed { background: #b33a00 }
"""
LEGEND = "A sample, spread over the steps (--max_trajectories): the list says how many of each step's are here. " \
         "Blue underline: sampled (mask 1). Grey: context (mask 0). More orange: less probable. Point at a token for its id and logp."


def table(head, rows):
    """An HTML table; every cell is escaped here."""
    cell = lambda tag, v: f"<{tag}{' class=bad' if v == 'FAIL' else ''}>{html.escape(str(v))}</{tag}>"
    lines = [("th", head)] + [("td", row) for row in rows]
    return "<table>" + "".join(f"<tr>{''.join(cell(tag, v) for v in row)}</tr>" for tag, row in lines) + "</table>"


def rate_text(entry):
    return "{}/{} = {:.1f} % [{:.1f}, {:.1f}]".format(*entry[:2], *(100 * number(v) for v in entry[2:]))


def ood_table(path):
    """The columns of a tools/ood.py table."""
    try:
        rows = json.load(open(path, encoding="utf-8"))["rows"]
        return table(["checkpoint", *next(iter(rows.values()))["columns"]],
                     [[name, *(rate_text(c) if c[1] else "" for c in r["columns"].values())] for name, r in rows.items()])
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        fail(f"{path} is not a table of tools/ood.py")


def write_report(path, title, runs, figures, data, ood, note):
    rates = collections.defaultdict(dict)
    for at, splits in [((run.name, name), e) for run in runs for name, e in run.evals.values()]:
        for split, key, entry in [(s, *e) for s, line in splits.items() for e in line["table"].items()]:
            category, _, score = key.partition(" ")
            rates[(*at, split, category)][score] = rate_text(entry)
    scores = dict.fromkeys(score for row in rates.values() for score in row)
    rates = [[*at, *(row.get(score, "") for score in scores)] for at, row in rates.items()]
    checks = [(run.name, s, name, f"{number(c.get('value')):.4g}", "PASS" if c.get("pass") else "FAIL") for run in runs
              for s, line in run.steps.items() for name, c in line.get("checklist", {}).items()]
    rest = lambda e: ", ".join(f"{k} {v}" for k, v in e.items() if k not in ("event", "step"))
    events = [(run.name, e.get("step"), e.get("event"), rest(e)) for run in runs for e in run.events]
    flags = [[k, *(run.config.get(k, "") for run in runs)] for k in dict.fromkeys(k for run in runs for k in run.config)]
    flags.sort(key=lambda row: len(set(map(str, row[1:]))) == 1)        # what differs comes first
    pictures = [f'<figure><img alt="{name}: {html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></figure>'
                for name, (png, caption) in figures.items()]
    data = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")     # no '</script>', no '<!--'
    own = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    viewer = f'<p>{html.escape(note)}</p><p class="role">{LEGEND}</p><select id="which"></select><div id="trajectory"></div>'
    sections = {"Evaluations": table(["run", "after", "tasks", "category", *scores], rates), "Out of distribution": ood,
                "Trajectories": viewer, "Figures": "".join(pictures[1:]),
                "Checklist of each round's first step": table(["run", "RL step", "check", "value", ""], checks),
                "Events": table(["run", "RL step", "event", ""], events),
                "Flags": table(["flag", *(run.name for run in runs)], flags)}
    with open(path, "w", encoding="utf-8", errors="replace") as f:
        f.write('<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
                f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
                f"<title>{html.escape(title)}</title><style>{CSS}</style><h1>{html.escape(title)}</h1>" + "".join(pictures[:1])
                + "".join(f"<h2>{name}</h2>{body}" for name, body in sections.items() if body)
                + f'<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script></html>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", help="folder to write; default: RUN_DIR, or 'compare' beside the first of several")
    parser.add_argument("--label", nargs="+", help="one name per run; runs with the same name are seeds")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json; default: the run's own")
    parser.add_argument("--max_trajectories", type=int, default=200, help="in the report")
    parser.add_argument("--ood", metavar="JSON", help="a table of tools/ood.py, for the report")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="lines are means over N steps; the points stay where they are")
    args = parser.parse_args()
    if args.label and len(args.label) != len(args.runs):
        fail(f"{len(args.label)} labels for {len(args.runs)} runs: give one for each")
    runs = [read_run(folder) for folder in args.runs]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = run.folder
    groups, data = group_runs(runs, args.label, args.smooth), {"records": [], "vocab": []}
    ood = ood_table(args.ood) if args.ood else ""
    for k, run in enumerate(runs):
        tokenizer = find_tokenizer(run, args.tokenizer)
        records = [r | {"run": k} for r in sample_records(run, args.max_trajectories // len(runs))]
        ids = sorted({i for r in records for i in r["ids"]}) if tokenizer else []
        data["records"] += records
        data["vocab"].append({i: tokenizer.decode([i], skip_special_tokens=False) for i in ids})
    bare = [run for run in runs if run.note]
    note = "".join(f"{run.name}: no trajectories of its RL steps: {run.note}" for run in bare) if len(bare) < 2 else textwrap.shorten(
        f"no trajectories of the RL steps of {len(bare)} of {len(runs)} runs: {', '.join(run.name for run in bare)}", 120)
    beside = os.path.join(os.path.dirname(os.path.abspath(args.runs[0])), "compare")
    out = args.out or (args.runs[0] if len(runs) == 1 else beside)
    try:
        os.makedirs(out, exist_ok=True)
        figures = make_figures(groups, out)
        write_report(os.path.join(out, "report.html"), ", ".join(g.label for g in groups), runs, figures, data, ood, note)
    except OSError as e:
        fail(f"cannot write to {out}: {e}")
    if note:
        print(note)
    print(f"wrote {', '.join(f'{name}.png' for name in figures)}, report.html to {out} ({len(data['records'])} trajectories)")


if __name__ == "__main__":
    main()
