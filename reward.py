"""From a trajectory to numbers: official and strict score, per-turn results, the structure of a message, intervals.

Different from the paper's code and from upstream's runner:
1. official: upstream's own state and response checkers on the same calls, but executed without eval() and with the
   ground truth side computed once per task. The verdict equals upstream's multi_turn_checker (test_smoke.py).
2. strict: the official check never looks at a turn in which nothing is to be called. A policy that does the work early
   and reads something in the next turn passes 200 of 200 miss_func and miss_param tasks; strict gives it 0.
3. per_turn: all-or-nothing scoring punishes correct later turns (https://github.com/ShishirPatil/gorilla/issues/920).
4. DEFECTIVE: ground truths that no faithful model can match (https://github.com/ShishirPatil/gorilla/issues/1367).
5. structure: the paper's four states of a message. Its detector was not released; the rules here are ours.

    python reward.py                          # scores all 800 ground truths, and the early-call trick
"""
import collections
import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
import time

import numpy as np
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

from env_bfcl import CATEGORIES, Call, execute, load_tasks, make_simulators, parse_calls, tree_fits


def _in(index, *categories):
    return {(category, index) for category in categories or CATEGORIES}


DEFECTIVE = frozenset().union(  # (category, index)
    _in(4),      # the tweet's words are sorted, but sort() sorts lines
    _in(18),     # a newline of diff's result is missing
    _in(30),     # quotes are missing from text that is to be copied "exactly as it is"
    _in(187),    # a ticket's free-text description is compared
    _in(188),    # a log-in must be tried with a password that is never given
    _in(176, "base"),                                        # the user says 2026, the ground truth 2023
    _in(143, "miss_func", "miss_param", "long_context"),     # "$10000." for "$10000.00."
    _in(172, "miss_func", "miss_param", "long_context"),     # the user says 08/2026, the ground truth 08/2025
    _in(180, "miss_param"),                                  # a ticket description that is never given
    _in(41, "long_context"), _in(43, "long_context"),        # "verbatim" text with a space that the file doesn't have
    _in(49, "miss_func"))                                    # needs tail two turns before it is handed back
DOUBTFUL = frozenset().union(
    _in(171), _in(184),                                      # a final period that the quoted text doesn't have
    _in(33, "miss_func"), _in(133, "miss_func"))             # what is withheld isn't needed: acting early is right


@dataclasses.dataclass(frozen=True)
class Reward:
    """What a trajectory has earned. per_turn has one entry for each turn of the ground truth."""
    official: float = 0.0
    strict: float = 0.0
    per_turn: list = dataclasses.field(default_factory=list)
    error: str | None = None     # "turns": not all user turns were reached; otherwise an exception in scoring


# --- ALGO: from verdicts to the number that trains -------------------------------------------------------------------

def training_reward(reward, finish, kind="official"):
    """The scalar for the advantage: 0 unless the episode ended by itself.

    Upstream scores a model that was stopped for too many steps in its last turn as if nothing had happened; here it
    earns nothing.
    """
    if kind not in ("official", "strict", "per_turn"):
        raise ValueError(f"reward {kind!r}: choose one of official, strict, per_turn")
    if reward is None or finish != "done":
        return 0.0
    if kind == "per_turn":
        return sum(reward.per_turn) / max(len(reward.per_turn), 1)
    return getattr(reward, kind)


def score(task, calls_per_turn):
    """Scores the calls of each user turn. Never raises."""
    try:
        differences, meddled = _judge(task, calls_per_turn)
        turns = len(task.ground_truth)
        # A turn without ground truth counts as passed if it was reached and no call in it changed the state.
        per_turn = [t < len(calls_per_turn) and t not in differences and t not in meddled for t in range(turns)]
        complete = len(calls_per_turn) == turns
        official = complete and not differences
        return Reward(float(official), float(official and not meddled), per_turn, None if complete else "turns")
    except Exception as e:  # noqa: BLE001 - one trajectory must not end a run; the caller sees and counts the error
        return Reward(per_turn=[False] * len(task.ground_truth), error=f"{type(e).__name__}: {e}"[:200])


def first_difference(task, calls_per_turn):
    """The first turn that fails the official check: {"turn", "kind", "text"}, or {} if none does.

    kind is "no_call", "state", "response" or "turns" (fewer or more user turns than the task has).
    """
    differences, _ = _judge(task, calls_per_turn)
    if differences:
        turn, (kind, text) = min(differences.items())
        return {"turn": turn, "kind": kind, "text": text}
    turns, reached = len(task.ground_truth), len(calls_per_turn)
    if reached != turns:
        return {"turn": min(reached, turns), "kind": "turns", "text": f"{reached} user turns instead of {turns}"}
    return {}


def _judge(task, calls_per_turn):
    """({turn: (kind, text)} of the failing turns, {empty turns in which a call changed the state})."""
    simulators, names = make_simulators(task), task.names
    results, differences, meddled = [], {}, set()  # results: of all turns so far
    for turn, (calls, (expected, state)) in enumerate(zip(calls_per_turn, _ground_truth(task))):
        if not task.ground_truth[turn]:
            before = _public(simulators)
            for call in calls:
                results.append(execute(simulators, call, names))
                if turn not in meddled and _changed(before, simulators):
                    meddled.add(turn)
            continue
        results += [execute(simulators, call, names) for call in calls]
        if not calls:
            differences[turn] = ("no_call", f"no call; expected {len(task.ground_truth[turn])}")
        elif not (found := state_checker(simulators, state))["valid"]:
            differences[turn] = ("state", _describe(found["details"]["differences"]))
        elif not (found := response_checker(results, expected, turn))["valid"]:
            missing = found["details"]["missing_items"]
            differences[turn] = ("response", f"{len(missing)} expected results are missing, first {missing[0][:200]}")
    return differences, meddled


_ground_truth_cache = {}  # task id -> (ground truth, short for: [(results of the turn, simulators after it)])


def _ground_truth(task):
    cached = _ground_truth_cache.get(task.id)
    if cached is None or cached[0] is not task.ground_truth:
        simulators, turns = make_simulators(task), []
        for calls in task.ground_truth:
            results = [execute(simulators, call, task.names) for call in calls]
            turns.append((results, copy.deepcopy(simulators) if calls else None))
        if len(_ground_truth_cache) >= 1000:  # all 800 tasks take 30 MB
            _ground_truth_cache.clear()
        cached = _ground_truth_cache[task.id] = (task.ground_truth, turns)
    return cached[1]


def _public(simulators):
    """A copy of all public attributes; None for directories that are too deep to copy."""
    try:
        return {name: copy.deepcopy({key: value for key, value in vars(simulator).items() if not key.startswith("_")})
                for name, simulator in simulators.items()}
    except RecursionError:
        return None


def _changed(before, simulators):
    """Whether a public attribute differs. Directories too deep or too large to compare count as changed."""
    if before is None or "GorillaFileSystem" in simulators and not tree_fits(simulators["GorillaFileSystem"]):
        return True
    try:
        return any(getattr(simulators[name], key) != value for name, attributes in before.items()
                   for key, value in attributes.items())
    except RecursionError:
        return True


def _describe(differences):
    """Attribute names, and the two values where they are short; never a whole state (trees may be cyclic)."""
    parts = []
    for key, sides in differences.items():
        found, expected = sides["model"], sides["ground_truth"]
        plain = all(isinstance(value, (str, float, type(None))) or isinstance(value, int) and abs(value) < 1e18
                    for value in (found, expected))
        parts.append(f"{key} is {str(found)[:80]!r}, expected {str(expected)[:80]!r}" if plain else f"{key} differs")
    return "; ".join(parts)[:400]


# --- structure of a message ------------------------------------------------------------------------------------------

_TAGS = re.compile(r"</?tool_call>|</?tool_response>|</?tools>|</?think>|<\|[a-z_]{1,32}\|>")
_BLOCK = re.compile(r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>", re.DOTALL)
_END = re.compile(r"<\|(?:im_end|endoftext)\|>$")


def structure(text, finish_reason="stop"):
    """The paper's state of one message: "call", "response", "polluted" or "collapsed". First rule that holds:

    A thinking block at the start is set aside: up to the last </think>, if there is no other tag in it but one <think>
    at its start (which is missing where the chat template has written it). Then one end token at the end is.

    1. collapsed: nothing is left but tool-call tags, end tokens and white space.
    >>> structure("<tool_call><|im_end|>"), structure("<|im_end|>"), structure("<think>\\n\\n</think>\\n\\n<|im_end|>")
    ('collapsed', 'collapsed', 'collapsed')

    2. polluted: cut by length (a message without an end is not healthy, however it looks).
    >>> structure("I will now move the", "length")
    'polluted'

    3. call: at least one complete <tool_call> block, each with valid JSON (a name and an arguments object; whether the
    function and its parameters exist isn't judged), and no tag or control token anywhere else. Plain text may stand
    before, between or after the blocks.
    >>> structure('<tool_call>\\n{"name": "ls", "arguments": {}}\\n</tool_call><|im_end|>')
    'call'

    4. response: some text and no tag or control token at all.
    >>> structure("Done.<|im_end|>")
    'response'

    5. polluted: everything else. A missing or extra tag, bad JSON, an end token inside a call, a second end token,
    <think> inserted later, a <tool_response> of the model's own.
    >>> structure('<tool_call>\\n{"name": "ls", <|im_end|>'), structure("Done.</tool_call><|im_end|>")
    ('polluted', 'polluted')
    """
    head, think_end, body = text.rpartition("</think>")
    tags = _TAGS.findall(head)
    if think_end and (not tags or tags == ["<think>"] and head.lstrip().startswith("<think>")):
        text = body
    text = _END.sub("", text.rstrip())
    if not re.sub(r"</?tool_call>|<\|im_end\|>|<\|endoftext\|>|\s", "", text):
        return "collapsed"
    if finish_reason == "length":
        return "polluted"
    calls, errors = parse_calls(text)
    if errors or _TAGS.search(_BLOCK.sub("", text)) or any(len(_TAGS.findall(b)) > 2 for b in _BLOCK.findall(text)):
        return "polluted"
    return "call" if calls else "response"


# --- the protocol: control tokens and the places where they decide ------------------------------------------------------

SLOTS = ("first", "after_open", "close", "end")


class Watch(dict):
    """name -> id of the control tokens that are single tokens in this vocabulary; `decode`: ids -> text."""
    decode = None


def watch_ids(tokenizer):
    names = ["<tool_call>", "</tool_call>", "<|im_end|>", '{"', "<think>"]
    ids = {n: tokenizer(n, add_special_tokens=False).input_ids for n in names}
    watch = Watch({n: i[0] for n, i in ids.items() if len(i) == 1})
    watch.decode = tokenizer.decode
    return watch


def protocol_slots(trained, trajectories, watch):
    """For each trained token [(trajectory, position)] a list of four bools, in the order of SLOTS: the "first" token of a
    message; "after_open": what follows `<tool_call>` and white space; "close": what follows a call's closing brace (and white
    space); "end": where a message without a call ended.

    What was sampled *at* the first three has no say in what they are: a policy that ends its message there is seen."""
    cached = functools.cache(lambda i: _slots_of(trajectories[i], watch))
    return [[p in places for places in cached(i)] for i, p in trained]


def _slots_of(t, watch):
    """The positions of each slot in one trajectory: four sets."""
    first, after_open, close, end = slots = [set() for _ in SLOTS]
    opening, stop = watch.get("<tool_call>"), watch.get("<|im_end|>")
    for p in (p for p, m in enumerate(t.mask) if m):
        if not t.mask[p - 1]:
            first.add(p)
            inside, whole, called = 0, False, False      # where the open call's content starts, whether its object is complete
        token = t.ids[p]
        if inside and p == inside + 1 and watch.decode(t.ids[inside:p]).isspace():
            after_open.add(p)
        if whole and not watch.decode([token]).isspace():
            close.add(p)
            inside, whole = 0, False
        if token == opening:
            inside, called = p + 1, True
        elif token == stop and not called:
            end.add(p)
        elif inside and not whole and watch.decode([token]).rstrip().endswith("}"):
            with contextlib.suppress(ValueError, RecursionError):
                whole = isinstance(json.loads(watch.decode(t.ids[inside: p + 1])), dict)
    return slots


# --- intervals -------------------------------------------------------------------------------------------------------

def wilson(successes, n):
    """95 % interval of a proportion of independent outcomes; of several outcomes a task see interval.

    >>> tuple(round(x, 3) for x in wilson(8, 10))
    (0.49, 0.943)
    """
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959964, successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def bootstrap(values_by_index, seed=0, n=2000):
    """95 % interval of the mean over all values, resampling task indices.

    The four categories are the same 200 stories: their results are not independent, so whole indices are drawn.
    """
    if not values_by_index:
        return math.nan, math.nan
    sums, counts = np.array([(sum(values), len(values)) for values in values_by_index.values()], dtype=float).T
    draws = np.random.default_rng(seed).integers(len(sums), size=(n, len(sums)))  # [n, indices]
    low, high = np.percentile(sums[draws].sum(1) / counts[draws].sum(1), [2.5, 97.5])
    return float(low), float(high)


def interval(by_task):
    """95 % interval of the mean over all outcomes, {task: [0 or 1, ...]}: Wilson where each task occurs once, else a bootstrap over
    the tasks, but no narrower than Wilson over all outcomes: of six tasks that happen to agree a bootstrap knows nothing. Equal
    outcomes have no spread at all: then Wilson, over tasks, since the outcomes of one are not independent."""
    wins = [w for outcomes in by_task.values() for w in outcomes]
    if len(wins) == len(by_task) or len(set(wins)) < 2:
        return wilson(sum(wins) * len(by_task) / max(len(wins), 1), len(by_task))
    (low, high), (least, most) = bootstrap(by_task), wilson(sum(wins), len(wins))
    return min(low, least), max(high, most)


# --- many episodes ---------------------------------------------------------------------------------------

def count(trajectories, kind):
    """Sums over the policy's own samples (demonstrations and hinted samples would flatter the curve): rewards, how episodes
    ended, structure of the messages, what the environment had to say. Infrastructure failures are only counted."""
    c = collections.Counter()
    for t in trajectories:
        if t.infra_error or t.source != "policy":
            c["infra"] += bool(t.infra_error)
            c["hinted"] += t.source == "hint"
            c["hinted_success"] += t.source == "hint" and bool(t.reward) and training_reward(t.reward, t.finish)
            continue
        c["n"] += 1
        c["reward"] += training_reward(t.reward, t.finish, kind)
        for other in ("official", "strict", "per_turn"):
            c[f"success/{other}"] += training_reward(t.reward, t.finish, other)
        c[f"finish/{t.finish}"] += 1
        c["response_tokens"] += len(t.ids) - t.prompt_len
        c["sampled_tokens"] += sum(t.mask)
        c["refused_calls"] += t.refused
        c["calls"] += sum(map(len, t.calls))
        for what, k in t.feedback.items():
            c[f"feedback/{what}"] += k
        for k, text in enumerate(t.texts):
            c["messages"] += 1
            c["structure/repeated"] += k > 0 and text == t.texts[k - 1]
            c["structure/malformed"] += bool(parse_calls(text)[1])
            c["structure/cut"] += k in t.cut
            state = structure(text, "length" if k in t.cut else "stop")
            c[f"structure/{state}"] += 1
            c[f"turn {min(t.turns[k], 6)}/{state}"] += 1     # by user turn; the last one holds all later ones too
    return c


def summary(records):
    """Success of evaluation records: {name: (successes, n, rate, lo, hi)}, `name` = category, 'all', and both without the
    defective ground truths. A task is its index: the categories are the same 200 tasks seen four ways. Infrastructure failures are
    not counted in n."""
    table = {}
    for score in ("official", "strict"):
        for clean in (False, True):
            rows = [r for r in records if not r["infra_error"] and not (clean and (r["category"], r["index"]) in DEFECTIVE)]
            for category in sorted({r["category"] for r in rows}) + ["all"]:
                here = [r for r in rows if category in ("all", r["category"])]
                by_index = collections.defaultdict(list)
                for r in here:
                    by_index[r["index"]].append(float(r["finish"] == "done" and r["reward"][score] == 1))
                k, n = int(sum(map(sum, by_index.values()))), len(here)
                table[f"{category} {score}{' without defective' if clean else ''}"] = k, n, k / max(n, 1), *interval(by_index)
    return table


def format_table(table):
    """summary()'s table as text."""
    return "\n".join(f"{name:38} {k:4d}/{n:<4d} {100 * rate:5.1f} %  [{100 * lo:.1f}, {100 * hi:.1f}]"
                     for name, (k, n, rate, lo, hi) in table.items())


def main():
    print("category      official strict  early trick: official strict  ms/score")
    for category in CATEGORIES:
        tasks = load_tasks("all", [category])
        start = time.perf_counter()
        rewards = [score(task, task.ground_truth) for task in tasks]
        milliseconds = 1000 * (time.perf_counter() - start) / len(tasks)
        tricks = [score(task, early_calls(task)) for task in tasks if [] in task.ground_truth[:-1]]
        print(f"{category:<14}{sum(r.official for r in rewards):>8.0f}{sum(r.strict for r in rewards):>7.0f}"
              f"{sum(r.official for r in tricks):>14.0f} of {len(tricks):<4}{sum(r.strict for r in tricks):>5.0f}"
              f"{milliseconds:>12.2f}")


def early_calls(task):
    """The trick of point 2: in the turn that asks for nothing, make the next turn's calls; then only read."""
    calls = [list(turn) for turn in task.ground_truth]
    empty = calls.index([])
    read = next(Call(doc["name"], {}) for doc in task.tools if not doc["parameters"]["required"]
                and doc["name"].startswith(("get_", "pwd", "ls", "view_", "list_")))
    calls[empty], calls[empty + 1] = calls[empty + 1], [read]
    return calls


if __name__ == "__main__":
    main()
