"""Out of distribution: checkpoints under call formats and tasks that they were not trained on. One command, one table.

    python tools/ood.py runs/qwen2.5-ets/model runs/qwen2.5-none/model          # the rows; OUT/ood.txt and OUT/ood.json
    python tools/ood.py runs/x/model --holdout travel       # x was trained with --holdout travel: that block is content OOD
    python tools/ood.py runs/tiny-ets/model --limit 2 --short_docs --engine hf --max_action 160     # a look, on a CPU

Columns: in-distribution (multi-turn test tasks, Qwen's format), format OOD (the same tasks in three other formats), content
OOD (bfcl-eval's single-turn sets, Qwen's format), both, and irrelevance (no function fits: a model that never calls earns
100 % there, so it is a column of its own). Greedy. The same command goes on where it was killed.

What to know about the numbers:
 1. A format is its own prompt and its own parser; tasks, state, scoring and tool results are env_bfcl's. A message is read
    strictly in the format that was asked for, with any text around the calls; a call in Qwen's format is then no call
    (`qwen_calls` counts such episodes). A list with one bad call is bad as a whole. Nothing is evaluated.
 2. A message without a readable call ends the user turn, as upstream: decode_feedback is "none" in every cell.
 3. Single-turn sets are judged by bfcl-eval's ast_checker: one message, nothing is executed.
 4. Irrelevance: right is a finished message without a call, whole or broken. Upstream gives credit to broken and cut
    calls too; they are counted as `undecodable`, so upstream's number is at most the sum of both.
 5. Intervals: reward.interval's over tasks; categories and formats are the same tasks.
"""
import argparse
import ast
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import types
import warnings
from pathlib import Path
from xml.sax.saxutils import unescape

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from rollout import check_numbers, find_model, load_tokenizer, make_engine, rollout, trajectory_record, weight_files     # before torch
import env_bfcl
import reward as rw
from env_bfcl import BLOCKS, CATEGORIES, MAX_CALL_CHARS, MAX_DEPTH, THINK_END, UNCLOSED, BFCLEnv, Call, Task, parse_calls, render_call

# ast_checker asks a table that imports every vendor's client for one thing: whether dots in names were replaced. Not here.
sys.modules["bfcl_eval.constants.model_config"] = types.SimpleNamespace(
    MODEL_CONFIG_MAPPING={"ours": types.SimpleNamespace(underscore_to_dot=False)})
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

SETS = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
CALL_SETS = SETS[:-1]       # where something is to be called
env_bfcl.SHA256.update({
    "BFCL_v4_simple_python.json": "82dd63ba502eb2520c6b5d1d9a5c4b59", "possible_answer/BFCL_v4_simple_python.json": "90cd5bc653690ee8e459b5b3f3fc9458",
    "BFCL_v4_multiple.json": "aef168155ebd74b7ac2401198b201343", "possible_answer/BFCL_v4_multiple.json": "244e00ce9395df948bcafc7bee64e8f9",
    "BFCL_v4_parallel.json": "19f51a82eff42e5d62541aa500115a05", "possible_answer/BFCL_v4_parallel.json": "8a6aa19c1adddc6a5a2f7e40f9dbf30c",
    "BFCL_v4_parallel_multiple.json": "8863ea8433239f55c5f016154cf08308", "possible_answer/BFCL_v4_parallel_multiple.json": "5ebf24f458c1f16300c05505d83d6f0a",
    "BFCL_v4_irrelevance.json": "2b6ed4c2e992cdcf5f1678a701851f94"})

# --- ALGO: formats ----------------------------------------------------------------------------------------------------

PROMPT = """\
You help a user and can call functions for it. These are the functions, one JSON description per line:

{docs}

{how}

One message may hold several calls. Their results come in the next message, in the same order. If there is nothing to call, answer in plain text."""

HOW = {
    "python": "Call functions with a Python list of calls. Name every argument; values are Python literals. Example:\n"
              "[first_function(count=2, names=['a', 'b']), second_function(deep=True)]",
    "xml": "Call a function with a <call> element that has one <arg> element per argument. Text stands there as it is (but &lt; for < and &amp; for &), "
           "any other value as JSON. Example:\n"
           '<call name="first_function"><arg name="count">2</arg><arg name="names">["a", "b"]</arg></call>\n'
           '<call name="second_function"><arg name="deep">true</arg></call>',
    "json": "Call functions with a JSON list that has one object per call, without any tags. Example:\n"
            '[{"name": "first_function", "arguments": {"count": 2, "names": ["a", "b"]}}, {"name": "second_function", "arguments": {"deep": true}}]',
}
_OPENER = {"python": re.compile(r"\[\s*[A-Za-z_][\w.]{0,200}\s*\("), "xml": re.compile(r"<call\s"), "json": re.compile(r"\[\s*\{")}
_STRING_OR_BRACKET = re.compile(r'"(?:\\.?|[^"\\])*(?:"|\Z)' r"|'(?:\\.?|[^'\\])*(?:'|\Z)" r"|[\[\](){}]", re.DOTALL)    # a string without an end: to the end
_XML_CALL = re.compile(r'<call\s+name="([^"<>]{1,300})"\s*(?:/>|>(.*?)</call>)', re.DOTALL)
_XML_ARG = re.compile(r'\s*<arg\s+name="([^"<>]{1,300})"\s*>(.*?)</arg>\s*', re.DOTALL)
_QUOTES = {"&quot;": '"', "&apos;": "'"}


def parse(form, text, docs=()):
    """The calls of a message in format `form`: (list[Call], list[str] errors). Never raises; reads at most MAX_CALL_CHARS, in
    linear time. `docs` are the tools' documents: XML values are typed by them.

    >>> parse("python", "Let me see. [ls(a=True), cd(folder='x')]<|im_end|>")
    ([Call(name='ls', arguments={'a': True}), Call(name='cd', arguments={'folder': 'x'})], [])
    >>> parse("xml", '<call name="cd"><arg name="folder">a &amp; b</arg></call><call name="pwd"/>')[0]
    [Call(name='cd', arguments={'folder': 'a & b'}), Call(name='pwd', arguments={})]
    >>> parse("json", '[{"name": "ls", "arguments": {}}]'), parse("json", '[{"name": "ls", "arg')
    (([Call(name='ls', arguments={})], []), ([], ['unclosed <tool_call>']))
    """
    text = text.rpartition(THINK_END)[2][:MAX_CALL_CHARS]
    calls, errors, end = [], [], 0
    while opened := _OPENER[form].search(text, end):
        start = opened.start()
        end = list_end(text, start) if form != "xml" else (m := _XML_CALL.match(text, start)) and m.end()
        if not end:
            errors.append(UNCLOSED)
            break
        try:
            calls += [checked(name, arguments) for name, arguments in DECODE[form](text[start:end], docs)]
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as e:     # the last two: ast.parse of 10,000 minus signs
            errors.append(f"{type(e).__name__}: {e}"[:200])
    return calls, errors


def list_end(text, start):
    """Where the list that opens at `start` ends; 0 if it does not, or nests too deep. Brackets in strings do not count."""
    depth = 0
    for m in _STRING_OR_BRACKET.finditer(text, start):
        depth += (m[0] in "([{") - (m[0] in ")]}")
        if depth == 0 or depth > MAX_DEPTH:
            return 0 if depth else m.end()
    return 0


def checked(name, arguments):
    """The Call, under env_bfcl's own rules for values (JSON types, depth, no NaN); ValueError or TypeError if it breaks them."""
    calls, errors = parse_calls(render_call(Call(name, arguments)))
    if errors:
        raise ValueError(errors[0])
    return calls[0]


def decode_python(source, docs):
    with warnings.catch_warnings():     # "\d" in a string
        warnings.simplefilter("ignore")
        body = ast.parse(source, mode="eval").body
    for node in body.elts if isinstance(body, ast.List) else [None]:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            raise ValueError("not a list of calls with named arguments")
        name = ast.unparse(node.func)       # math.factorial is an attribute
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise ValueError("not a function name")
        yield name, {k.arg: ast.literal_eval(k.value) for k in node.keywords}


def decode_json(source, docs):
    for item in json.loads(source):
        yield (item.get("name"), item.get("arguments")) if isinstance(item, dict) else (None, None)


def decode_xml(source, docs):
    name, body = _XML_CALL.fullmatch(source).groups()
    name, body, arguments, at = unescape(name, _QUOTES), (body or "").strip(), {}, 0
    kinds = {p: spec.get("type") for doc in docs if doc["name"] == name for p, spec in doc["parameters"]["properties"].items()}
    while at < len(body):
        arg = _XML_ARG.match(body, at)
        if not arg:
            raise ValueError("not an <arg> element")
        key, value, at = unescape(arg[1], _QUOTES), unescape(arg[2], _QUOTES), arg.end()
        if kinds.get(key) != "string":
            with contextlib.suppress(ValueError):       # else it is text; where that is wrong, a checker objects
                value = json.loads(value)
        arguments[key] = value
    yield name, arguments


DECODE = {"python": decode_python, "xml": decode_xml, "json": decode_json}
FORMATS = ("qwen", *DECODE)


class FormatEnv(BFCLEnv):
    """BFCLEnv in another call format: only the system message and the reading of the model's messages differ."""

    def __init__(self, task, form):
        self.form = form
        super().__init__(task)

    def reset(self):
        system, *rest = super().reset()
        if self.form != "qwen":
            docs = system["content"].split("\n<tools>\n")[1].split("\n</tools>\n")[0]
            system["content"] = PROMPT.format(docs=docs, how=HOW[self.form])
        return [system, *rest]

    def step(self, text, finish_reason="stop"):
        if self.form != "qwen" and finish_reason != "length":
            calls, errors = parse(self.form, text, self.task.tools)
            text = "\n".join([*map(render_call, calls), *("<tool_call>" + "</tool_call>" * (e != UNCLOSED) for e in errors)])
        messages = super().step(text, finish_reason)
        over = self.finish is None and isinstance(self.task, SingleTask)      # the calls are all that is asked for
        return self._end("done") if over else messages


# --- single-turn tasks ------------------------------------------------------------------------------------------------

@dataclasses.dataclass(eq=False)
class SingleTask(Task):
    """A row of a single-turn set as a Task without simulators: one user message, then one message of the model."""
    answers: list = None        # of each call {name: {parameter: [possible values]}}; None: no call is right


def load_single(name):
    answers = {a["id"]: a["ground_truth"] for a in env_bfcl._read_data(f"possible_answer/BFCL_v4_{name}.json")} if name in CALL_SETS else {}
    return [SingleTask(id=row["id"], index=k, category=name, turns=row["question"], tools=row["function"], held_out={}, ground_truth=[[]],
                       initial_config={}, involved_classes=[], answers=answers[row["id"]] if answers else None)
            for k, row in enumerate(env_bfcl._read_data(f"BFCL_v4_{name}.json"))]


def score_single(task, calls, undecodable=False):
    """Whether the calls of the one message are right. Never raises."""
    if task.answers is None:
        return not calls and not undecodable
    try:
        return bool(ast_checker(task.tools, [{c.name: c.arguments} for c in calls], task.answers, Language.PYTHON, task.category, "ours")["valid"])
    except Exception:  # noqa: BLE001 - the checker indexes and iterates what the model sent
        return False


# --- episodes ---------------------------------------------------------------------------------------------------------

def undecodable(r):
    """Whether a message was cut, or broken in the format asked for."""
    return r["finish"] == "length" or bool(r["feedback"].get("malformed") or r["feedback"].get("unclosed"))


def finished(path):
    """{task id: record} of the episodes in a file, without a half-written last line and without infrastructure failures."""
    with open(path, "ab+") as f:
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)
        f.seek(0)
        return {r["task_id"]: r for r in map(json.loads, f) if not r["infra_error"]}


def play(engine, tokenizer, tasks, form, path, **settings):
    """Greedy episodes of `tasks` in format `form`, appended to `path` as they end; caps as rollout.evaluate's."""
    tasks = sorted(tasks, key=env_bfcl.system_prompt)       # the same tools one after the other: read once
    engine.temperature, engine.seed = 0.0, 0
    with open(path, "a", encoding="utf-8") as out:
        def keep(i, t):
            record = trajectory_record(t, tasks[i], prompt=False) | {"format": form}
            if isinstance(tasks[i], SingleTask) and not t.infra_error:
                right = float(score_single(tasks[i], t.calls[0], undecodable(record)))
                record["reward"] = dataclasses.asdict(rw.Reward(right, right))
            out.write(json.dumps(record) + "\n")
            out.flush()

        rollout(engine, tokenizer, [FormatEnv(t, form) for t in tasks], on_finish=keep, max_response=16384, max_observation=4096, **settings)


def evaluate_checkpoint(args, checkpoint, path, tokenizer, tasks):
    """All records of one checkpoint; plays what is missing. `tasks`: {kind: [Task]}; a file for each kind and format."""
    out = os.path.join(args.out, re.sub(r"[^\w.]+", "-", os.path.normpath(checkpoint)).strip("-"))
    os.makedirs(out, exist_ok=True)
    flags = {"model": path, "files": weight_files(path), "short_docs": args.short_docs, "think": args.think,
             "max_action": args.max_action, "prompts": hashlib.sha256(repr((PROMPT, HOW)).encode()).hexdigest()[:16]}
    if os.path.exists(os.path.join(out, "flags.json")) and json.load(open(os.path.join(out, "flags.json"))) != flags:
        raise ValueError(f"{out} holds episodes of other flags or other weights: give another --out")
    json.dump(flags, open(os.path.join(out, "flags.json"), "w"), indent=1)
    engine, records = None, []
    for form, (kind, some) in itertools.product(FORMATS, tasks.items()):
        file = os.path.join(out, f"{form}.{kind}.jsonl")
        done = finished(file)
        if todo := [t for t in some if t.id not in done]:
            engine = engine or make_engine(args.engine, path, tokenizer, kv_gib=args.kv_gib, max_model_len=8192 + 16384)
            play(engine, tokenizer, todo, form, file, think=args.think, max_action=args.max_action, desc=f"{form} {kind}")
            done = finished(file)
        records += [done[t.id] for t in some if t.id in done]
    if engine:
        engine.close()
    return records


# --- the table --------------------------------------------------------------------------------------------------------

def rate(records, score="official"):
    """(successes, n, rate, lo, hi) as reward.summary's; the interval by point 5 of the docstring."""
    by_task = collections.defaultdict(list)
    for r in records:
        by_task[r["task_id"] if r["category"] in SETS else r["index"]].append(float(r["finish"] == "done" and r["reward"][score] == 1))
    k, n = int(sum(map(sum, by_task.values()))), len(records)
    return k, n, k / max(n, 1), *rw.interval(by_task)


def tabulate(records, holdout=""):
    """{"columns": {name: rate}, "cells": {format/set: rates and counts}, "summary": {format: reward.summary}} of one checkpoint."""
    def pick(forms, categories, held_out=False):
        return [r for r in records if r["format"] in forms and r["category"] in categories
                and (r["category"] in SETS or (r["index"] in BLOCKS.get(holdout, ())) == held_out)]

    columns, cells = {}, {}
    for name, forms in (("", FORMATS[:1]), ("format", FORMATS[1:])):
        columns[f"{name} OOD" if name else "in-distribution"] = rate(pick(forms, CATEGORIES))
        columns[f"{name} + content OOD" if name else "content OOD"] = rate(pick(forms, CALL_SETS))
        columns[f"irrelevance, {name} OOD" if name else "irrelevance"] = rate(pick(forms, SETS[-1:]))
        if holdout:
            columns[f"{name} + {holdout} OOD" if name else f"{holdout} OOD"] = rate(pick(forms, CATEGORIES, True))
    for form in FORMATS:
        for category, held_out in [(c, h) for h in (False, True)[: 1 + bool(holdout)] for c in CATEGORIES] + [(c, False) for c in SETS]:
            here = pick([form], [category], held_out)
            cells[f"{form} {category}" + held_out * f" ({holdout})"] = {
                "official": rate(here), "strict": rate(here, "strict"), "undecodable": sum(map(undecodable, here)),
                "qwen_calls": sum(form != "qwen" and any("<tool_call>" in text for text in r["texts"]) for r in here)}
    summaries = {form: rw.summary([r for r in records if r["format"] == form and r["category"] in CATEGORIES]) for form in FORMATS}
    return {"columns": columns, "cells": cells, "summary": summaries}


def table_text(rows, details=False):
    """rows: {checkpoint: tabulate's}. One line each; with `details` a line per cell, too."""
    text = lambda k, n, p, lo, hi: f"{100 * p:.1f} % [{100 * lo:.1f}, {100 * hi:.1f}] {k}/{n}" if n else "-"
    width = max(map(len, rows))
    lines = ["".join([" " * width] + [f"{name:>32}" for name in next(iter(rows.values()))["columns"]])]
    lines += ["".join([f"{row:{width}}"] + [f"{text(*c):>32}" for c in t["columns"].values()]) for row, t in rows.items()]
    for row, t in rows.items() if details else ():
        lines.append(f"\n{row}\n{'':38}{'official':>32}{'strict':>8}{'undecodable':>13}{'qwen_calls':>12}")
        lines += [f"{name:38}{text(*c['official']):>32}{c['strict'][0]:>8}{c['undecodable']:>13}{c['qwen_calls']:>12}" for name, c in t["cells"].items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="Hugging Face directories, .gguf files or hub ids: the rows")
    parser.add_argument("--out", default="runs/ood", help="folder of the tables and the episodes")
    parser.add_argument("--limit", type=int, default=0, help="only the first N tasks of each set (and of the held-out block)")
    parser.add_argument("--engine", default="auto", choices=("auto", "vllm", "hf"))
    parser.add_argument("--short_docs", action="store_true", help="tool docs without their 'response' part, as in training with it")
    parser.add_argument("--holdout", default="", choices=("", *BLOCKS), help="the domain block that training left out")
    parser.add_argument("--think", action="store_true", help="let a hybrid model think (Qwen3)")
    parser.add_argument("--max_action", type=int, default=2048, help="tokens per message")
    parser.add_argument("--kv_gib", type=float, default=16.0, help="GiB of keys and values in vLLM")
    args = parser.parse_args()
    try:
        check_numbers(args, "max_action kv_gib")
    except ValueError as e:
        parser.error(str(e))
    tasks = {"multi_turn": env_bfcl.load_tasks("test", CATEGORIES, short_docs=args.short_docs), "single_turn": [t for s in SETS for t in load_single(s)]}
    if args.limit:
        key, count = lambda t: (t.category, t.index in BLOCKS.get(args.holdout, ()) and t.category in CATEGORIES), collections.Counter()
        tasks = {kind: [t for t in some if (count.update([key(t)]) or count[key(t)] <= args.limit)] for kind, some in tasks.items()}
    rows = {}
    try:
        models = [(c, path := find_model(c, args.out), load_tokenizer(path)) for c in dict.fromkeys(args.checkpoints)]     # all, before long work
        for checkpoint, path, tokenizer in models:
            rows[checkpoint] = tabulate(evaluate_checkpoint(args, checkpoint, path, tokenizer, tasks), args.holdout)
            Path(args.out, "ood.json").write_text(json.dumps({"holdout": args.holdout, "limit": args.limit, "rows": rows}, indent=1), encoding="utf-8")
            Path(args.out, "ood.txt").write_text(table_text(rows, details=True) + "\n", encoding="utf-8")
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    print(f"{table_text(rows)}\n{args.out}/ood.txt has a line for each set and format, {args.out}/ood.json everything")


if __name__ == "__main__":
    main()
