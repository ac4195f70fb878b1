"""BFCL multi-turn as an environment: messages in, messages out, real simulators, state kept for the whole trajectory.

Tasks, tool documents and simulators are those of bfcl-eval 2026.3.23; nothing of the model's text is ever evaluated.
Names are looked up in a list, arguments are JSON. Different from the paper's released code and from upstream's runner:
1. State lives until the episode ends (the released code rebuilds the simulators at each user turn while its reward
   keeps the state; `wipe_each_turn=True` turns that fault back on for what the policy sees).
2. No eval() (https://github.com/mlcommons/endpoints/issues/391), no module globals that two samples of a task share.
3. A withheld function (miss_func) can't run before its turn: answered like an unknown name, noted in `refused`.
4. Copies where the simulators share objects: mutable default arguments
   (https://github.com/NVIDIA-NeMo/RL/pull/1207), long_context's card and booking tables, global math precision.
5. Bounds against hanging calls, see the constants. No ground truth comes near them.
As upstream: 20 tool steps a user turn, a message without a call ends the user turn, `excluded_function` is ignored,
withheld documents arrive in a user message (upstream's prompting mode), so a later prompt only ever extends an earlier.

    pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0
    python env_bfcl.py                              # counts, and a replay of all 800 ground truths
    python env_bfcl.py --task multi_turn_base_0     # one ground truth as the dialogue that a model would have
"""
import argparse
import ast
import copy
import dataclasses
import decimal
import functools
import hashlib
import inspect
import json
import random
import re
import time
from pathlib import Path

try:
    import bfcl_eval
    import mpmath
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.gorilla_file_system import Directory, GorillaFileSystem
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.math_api import MathAPI
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.message_api import MessageAPI
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.posting_api import TwitterAPI
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.ticket_api import TicketAPI
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.trading_bot import TradingBot
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.travel_booking import TravelAPI
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.vehicle_control import VehicleControlAPI
except ImportError as e:
    raise ImportError(f"{e}. Install the tasks with: "
                      "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0") from None

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")  # the same 200 tasks, seen four ways
SPLITS = ("train", "test", "all")
BLOCKS = {"files": range(50), "vehicle": range(50, 100), "trading": range(100, 150), "travel": range(150, 200)}  # domain -> indices
MAX_CALLS = 64             # calls of one message that are executed; the rest is answered as not executed
MAX_CALL_CHARS = 100_000   # a longer <tool_call> block is malformed
MAX_DEPTH = 32             # nesting of a call's arguments; deeper is malformed
MAX_ERROR_CHARS = 200      # of a decode error that is sent back (a bad call must not inflate the next prompt)
MAX_RESULT_CHARS = 200_000  # of one result; a safety bound, the observation cut in tokens is rollout.py's
MAX_PRECISION = 200        # digits in the math functions: logarithm(precision=200000) takes 33 s
MAX_POWER_BITS = 20_000    # power(9, 3000000) takes seconds; more than 4,300 digits can't be printed anyway
MAX_TREE_NODES, MAX_TREE_CHARS = 20_000, 2_000_000  # what find and du may walk: copies of copies grow as 2**n

UNCLOSED = "unclosed <tool_call>"
BAD_CALL = 'Error: invalid tool call. Send one JSON object {"name": ..., "arguments": {...}} in each <tool_call> block.'
THINK_END = "</think>"

SIMULATORS = {  # class -> its document file
    GorillaFileSystem: "gorilla_file_system", MathAPI: "math_api", MessageAPI: "message_api", TwitterAPI: "posting_api",
    TicketAPI: "ticket_api", TradingBot: "trading_bot", TravelAPI: "travel_booking",
    VehicleControlAPI: "vehicle_control"}
CLASSES = {cls.__name__: cls for cls in SIMULATORS}
OWNER = {name: cls.__name__ for cls in SIMULATORS for name, f in vars(cls).items()  # no name occurs in two classes
         if inspect.isfunction(f) and not name.startswith("_")}
SIGNATURES = {name: inspect.signature(getattr(CLASSES[owner], name)) for name, owner in OWNER.items()}

SHA256 = {  # first half of each; the data and so the scores differ between releases: V3 to V4 changed half of the tasks
    "BFCL_v4_multi_turn_base.json": "1a21a995d06fd6f20ba55de7bced30ef",
    "possible_answer/BFCL_v4_multi_turn_base.json": "1fee67823b317571649177dd89d63969",
    "BFCL_v4_multi_turn_miss_func.json": "87d28ce10e37d864b72de85d5732eef2",
    "possible_answer/BFCL_v4_multi_turn_miss_func.json": "69e679b806d1c871b05393a4b95583bb",
    "BFCL_v4_multi_turn_miss_param.json": "f0c66dda3795f5f53e3e1c0cc8ba0246",
    "possible_answer/BFCL_v4_multi_turn_miss_param.json": "59c442901779e2c31c33abcd566d032e",
    "BFCL_v4_multi_turn_long_context.json": "78c3268c5cc8e97c0f4ec6c811b3b9a2",
    "possible_answer/BFCL_v4_multi_turn_long_context.json": "e82aa0e839c39d23c64a05834f7ae024",
    "multi_turn_func_doc/gorilla_file_system.json": "c4c1b741c71e2a17c97a5dc9c4a91d89",
    "multi_turn_func_doc/math_api.json": "83fa31708c89442bdcf12ac4dfbe3be8",
    "multi_turn_func_doc/message_api.json": "4d58ea933a5d2b280d7a52366617fb47",
    "multi_turn_func_doc/posting_api.json": "87f9fc404a06e4107d7c366f1399c596",
    "multi_turn_func_doc/ticket_api.json": "31324e0380782664fe82ba05bd235178",
    "multi_turn_func_doc/trading_bot.json": "1a7933fd8f0cb8fbec38aeae05cb8c24",
    "multi_turn_func_doc/travel_booking.json": "f17b950c13adddf41d0848077df58788",
    "multi_turn_func_doc/vehicle_control.json": "0c8a66292844874ef7b168f343bc394d"}


# ---------------------------------------------------------------------------------------------------------------------
# Calls: text <-> (name, arguments)

@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call. Treat the arguments as read-only."""
    name: str
    arguments: dict


def render_call(call):
    r"""The text of a call, as Qwen's chat template writes it; parse_calls reads it back unchanged.

    >>> print(render_call(Call("ls", {"a": True})))
    <tool_call>
    {"name": "ls", "arguments": {"a": true}}
    </tool_call>
    """
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    # A tag inside a string argument would end the block (or the message); in JSON "<" only occurs in strings.
    body = re.sub(r"<(?=/?(?:tool_call|tool_response|think)>|\|)", r"\\u003c", body)
    return f"<tool_call>\n{body}\n</tool_call>"


def parse_calls(text):
    """The calls in a message and what is wrong with its other blocks: (list[Call], list[str]). Never raises.

    Only what follows the last </think> counts. A call is a complete <tool_call>...</tool_call> block that holds one
    JSON object with a name and an arguments object. A last block without its end is no block: it adds the error
    UNCLOSED, and the environment takes it as plain text (as upstream and the paper's code do). Errors say what the
    parser met, never the text itself.

    >>> parse_calls('<tool_call>{"name": "pwd", "arguments": {}}</tool_call><tool_call>{"name"</tool_call>')
    ([Call(name='pwd', arguments={})], ["Expecting ':' delimiter: line 1 column 8 (char 7)"])
    """
    text = text.rpartition(THINK_END)[2]
    calls, errors, position = [], [], 0
    while (start := text.find("<tool_call>", position)) >= 0:
        start += len("<tool_call>")
        end = text.find("</tool_call>", start)
        if end < 0:
            errors.append(UNCLOSED)
            break
        position = end + len("</tool_call>")
        try:
            if end - start > MAX_CALL_CHARS:
                raise ValueError(f"longer than {MAX_CALL_CHARS} characters")
            calls.append(_decode(text[start:end].strip()))
        except RecursionError:
            errors.append(f"nested deeper than {MAX_DEPTH} levels")
        except ValueError as e:  # JSONDecodeError is one; its message holds a position, not the text
            errors.append(str(e)[:MAX_ERROR_CHARS])
    return calls, errors


def _decode(body):
    found = json.loads(body, parse_constant=_refuse_constant)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    if not isinstance(found.get("name"), str) or not found["name"]:
        raise ValueError("no function name")
    if not isinstance(found.get("arguments"), dict):
        raise ValueError("arguments are not a JSON object")
    _check_value([found["name"], found["arguments"]], -1)
    return Call(found["name"], found["arguments"])


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def _check_value(value, depth):
    """Refuses what json.loads lets through and later code would trip over."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("a lone surrogate is not text")  # tokenizers raise on it
    elif isinstance(value, float):
        if value in (float("inf"), float("-inf")):  # 1e999
            raise ValueError("a number is too large")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_value(key, depth + 1)
            _check_value(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_value(item, depth + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks

@dataclasses.dataclass(eq=False)
class Task:
    """One BFCL entry. Everything in it is shared between the copies of a task: read-only."""
    id: str                              # multi_turn_base_0
    index: int                           # 0..199: the same user story in each category
    category: str                        # one of CATEGORIES
    turns: list[list[dict]]              # messages of each user turn; [] where withheld functions are handed back
    tools: list[dict]                    # documents of all functions, the withheld ones included
    held_out: dict[int, list[str]]       # turn -> names that are unknown before it
    ground_truth: list[list[Call]]       # calls of each user turn; [] where nothing is to be called
    initial_config: dict = dataclasses.field(repr=False)   # class -> scenario
    involved_classes: list[str] = dataclasses.field(repr=False)
    long_context: bool = False           # simulators add filler: long files, many bookings

    @property
    def names(self):
        """All function names of the task, as upstream's checker allows them."""
        return {doc["name"] for doc in self.tools}

    @functools.cached_property
    def untouched(self):
        """{class name: simulator in the initial state}, for make_simulators to copy: loading a scenario takes as long again."""
        simulators = {}
        for name in self.involved_classes:
            simulator = CLASSES[name]()
            if name != "MathAPI":  # stateless
                simulator._load_scenario(copy.deepcopy(self.initial_config.get(name, {})), long_context=self.long_context)
            # long_context puts module-level dicts of cards and bookings into the state without a copy: one booking would
            # change the balance that every later environment sees.
            simulators[name] = copy.deepcopy(simulator)
        return simulators


def load_tasks(split="train", categories=("base", "miss_func", "miss_param"), seed=42, *, short_docs=False,
               skip_defective=False):
    """The tasks of a split, category by category, by rising index.

    The split is by index, since the categories are the same 200 stories: a split by id would leak. As in the paper,
    the first 100 of the shuffled indices train. `short_docs` drops each document's "response" part.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: choose one of {', '.join(SPLITS)}")
    categories = [categories] if isinstance(categories, str) else list(dict.fromkeys(categories))
    for category in categories:
        if category not in CATEGORIES:
            raise ValueError(f"category {category!r}: choose from {', '.join(CATEGORIES)}")
    order = list(range(200))
    random.Random(seed).shuffle(order)
    wanted = set({"train": order[:100], "test": order[100:], "all": order}[split])
    tasks = [task for category in categories for task in _load_category(category, short_docs) if task.index in wanted]
    if skip_defective:
        from reward import DEFECTIVE  # reward.py builds on this file
        tasks = [task for task in tasks if (task.category, task.index) not in DEFECTIVE]
    return tasks


@functools.cache
def _load_category(category, short_docs):
    questions = _read_data(f"BFCL_v4_multi_turn_{category}.json")
    answers = _read_data(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
    tasks = []
    for question, answer in zip(questions, answers, strict=True):
        assert question["id"] == answer["id"], f"{question['id']} does not match {answer['id']}"
        held_out = {int(turn): names for turn, names in question.get("missed_function", {}).items()}
        turns = [[{"role": m["role"], "content": m["content"]} for m in turn] for turn in question["question"]]
        # https://github.com/ShishirPatil/gorilla/pull/1177: an entry once had more answers than questions
        assert len(turns) == len(answer["ground_truth"])
        assert all(len(messages) == (turn not in held_out) for turn, messages in enumerate(turns))
        docs = [doc for name in question["involved_classes"] for doc in _read_data(
            f"multi_turn_func_doc/{SIMULATORS[CLASSES[name]]}.json")]
        if short_docs:
            docs = [{key: value for key, value in doc.items() if key != "response"} for doc in docs]
        tasks.append(Task(
            id=question["id"], index=int(question["id"].rsplit("_", 1)[1]), category=category, turns=turns, tools=docs,
            held_out=held_out, ground_truth=[[_parse_python_call(c) for c in turn] for turn in answer["ground_truth"]],
            initial_config=question["initial_config"], involved_classes=question["involved_classes"],
            long_context=category == "long_context"))
    return tasks


@functools.cache
def _read_data(name):
    raw = (Path(bfcl_eval.__file__).parent / "data" / name).read_bytes()
    if hashlib.sha256(raw).hexdigest()[:32] != SHA256[name]:
        raise ValueError(f"{name} is not the file of bfcl-eval 2026.3.23: "
                         "pip install --force-reinstall --no-deps bfcl-eval==2026.3.23")
    return [json.loads(line) for line in raw.decode("utf-8").splitlines() if line.strip()]


def _parse_python_call(source):
    """A ground truth call such as "mv('a', destination='b')". 160 of them use positional arguments."""
    node = ast.parse(source, mode="eval").body
    # by the code's order of parameters: the document of purchase_insurance has another
    positional = [name for name in SIGNATURES[node.func.id].parameters if name != "self"]
    arguments = {name: ast.literal_eval(value) for name, value in zip(positional, node.args)}
    arguments.update({keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords})
    return Call(node.func.id, arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts: the very bytes that upstream sends to a local Qwen function-calling model

@functools.lru_cache(maxsize=1000)
def system_prompt(task):
    """The content of the system message: the documents of all functions that aren't withheld, in Qwen's own wording."""
    withheld = {name for names in task.held_out.values() for name in names}
    return tools_prompt([{**doc, "description": doc["description"] + " Note that the provided function is in Python 3 syntax."}
                         for doc in task.tools if doc["name"] not in withheld])


def tools_prompt(docs):
    """Qwen's own wording around tool documents, one JSON a line."""
    return ("# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
            + "".join(f"\n{json.dumps(doc)}" for doc in docs) +
            "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


def user_messages(task, turn):
    """The messages that open a user turn. Documents handed back come without the Python 3 sentence, as upstream."""
    if turn not in task.held_out:
        return [dict(message) for message in task.turns[turn]]
    docs = {doc["name"]: doc for doc in task.tools}
    functions = [docs[name] for name in task.held_out[turn]]
    content = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions)
    return [{"role": "user", "content": content}]


def tool_message(results):
    """Results as Qwen's template shows consecutive tool messages: one user message."""
    return {"role": "user", "content": "\n".join(f"<tool_response>\n{r}\n</tool_response>" for r in results)}


# ---------------------------------------------------------------------------------------------------------------------
# Simulators

def make_simulators(task):
    """Fresh simulators in the task's initial state: {class name: object}."""
    # A generator's state are 625 numbers that cannot change: deepcopy would look at each of them, two thirds of its time.
    generators = lambda simulator: {id(g): copy.copy(g) for g in vars(simulator).values() if isinstance(g, random.Random)}
    return {name: copy.deepcopy(simulator, generators(simulator)) for name, simulator in task.untouched.items()}


def execute(simulators, call, allowed):
    """Runs one call and returns its result as upstream's text. What the simulator raises becomes text as well."""
    if call.name not in allowed or OWNER.get(call.name) not in simulators:
        return f"Error during execution: name '{call.name[:64]}' is not defined"
    simulator = simulators[OWNER[call.name]]
    precision = mpmath.mp.dps  # process-wide, and logarithm leaves it changed; decimal's is the thread's
    try:
        with decimal.localcontext():
            _check_cost(simulator, call)
            arguments = copy.deepcopy(call.arguments)
            for name, parameter in SIGNATURES[call.name].parameters.items():
                if isinstance(parameter.default, (list, dict)):
                    # post_tweet(mentions=[]) keeps its default list in the tweet, and mention() appends to it
                    arguments.setdefault(name, copy.copy(parameter.default))
            result = getattr(simulator, call.name)(**arguments)
            return _result_text(result)[:MAX_RESULT_CHARS]  # at once: it may be live state, and mpf prints with mp.dps
    except Exception as e:  # noqa: BLE001 - the simulators raise anything
        return f"Error during execution: {e}"[:MAX_RESULT_CHARS]
    finally:
        mpmath.mp.dps = precision


def _result_text(result):
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except Exception:  # noqa: BLE001 - Decimal, mpf
            return str(result)
    return str(result)


def _check_cost(simulator, call):
    """Raises before a call that would run for seconds or for ever."""
    if call.name in ("logarithm", "square_root", "round_number"):
        for name in ("precision", "decimal_places"):
            try:
                costly = abs(int(call.arguments.get(name, 0))) > MAX_PRECISION
            except (TypeError, ValueError, OverflowError):
                costly = False  # the function itself objects
            if costly:
                raise ValueError(f"{name} is limited to {MAX_PRECISION}")
        if any(isinstance(value, str) and len(value) > 32 for value in call.arguments.values()):
            raise ValueError("a number is too long")  # mpmath reads strings: "1e999..." with 4,000 nines never ends
    elif call.name == "power":
        base, exponent = call.arguments.get("base"), call.arguments.get("exponent")
        whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
        if whole and base.bit_length() * exponent > MAX_POWER_BITS:
            raise ValueError("the result is too large")
    elif call.name in ("find", "du") and not tree_fits(simulator):
        raise RecursionError("the directory tree is too large")


def tree_fits(file_system):
    """Whether a walk of all directories ends soon: cp of a directory into itself is a cycle, copies of copies 2**n."""
    nodes = characters = 0
    stack = [(file_system.root, 0), (file_system._current_dir, 0)]
    while stack:
        directory, length = stack.pop()
        for name, item in directory.contents.items():
            nodes, path = nodes + 1, length + len(str(name)) + 1
            characters += path + len(str(getattr(item, "content", "")))     # du encodes what each file holds
            if nodes > MAX_TREE_NODES or characters > MAX_TREE_CHARS:
                return False
            if isinstance(item, Directory):
                stack.append((item, path))
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The environment

class BFCLEnv:
    """One episode of one task. `finish` is None while it runs, then "done", "length" or "max_steps"."""

    def __init__(self, task, decode_feedback="none", max_steps_per_turn=20, *, wipe_each_turn=False, hint=""):
        if decode_feedback not in ("none", "short", "error"):
            raise ValueError(f"decode_feedback {decode_feedback!r}: choose one of none, short, error")
        self.task, self.decode_feedback, self.max_steps_per_turn = task, decode_feedback, max_steps_per_turn
        self.wipe_each_turn, self.hint = wipe_each_turn, hint   # hint: text at the end of the system message
        self.names = task.names
        self._clear()

    @functools.cached_property
    def simulators(self):
        """Made at the first call that needs them: half of a rollout's environment time was making them."""
        return make_simulators(self.task)

    def reset(self):
        """Starts over; returns [system message, first user message]."""
        self._clear()
        system = system_prompt(self.task) + (f"\n\n{self.hint}" if self.hint else "")
        return [{"role": "system", "content": system}, *user_messages(self.task, 0)]

    def _clear(self):
        vars(self).pop("simulators", None)
        self.calls_per_turn = [[]]   # one list for each user turn reached
        self.refused = []            # withheld functions called too early
        self.feedback_count = {}     # malformed, unclosed, held_out, unknown, not_executed -> how often
        self.finish = None
        self.steps = 0               # tool steps in this user turn

    def step(self, text, finish_reason="stop"):
        """Takes a message of the model; returns the new messages, or None when the episode is over."""
        assert self.finish is None, "the episode is over: reset() first"
        if finish_reason == "length":  # cut: what is complete in it isn't what the model meant to send
            return self._end("length")
        calls, errors = parse_calls(text)
        malformed = [error for error in errors if error != UNCLOSED]
        self._count("malformed", len(malformed))
        self._count("unclosed", len(errors) - len(malformed))
        if not calls and (not malformed or self.decode_feedback == "none"):
            return self._next_turn()
        results = [self._run(call) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            self._count("not_executed", len(calls) - MAX_CALLS)
            results.append(f"Error: {len(calls) - MAX_CALLS} calls not executed, at most {MAX_CALLS} in one message")
        if self.decode_feedback == "short":
            results += [BAD_CALL] * min(len(errors), MAX_CALLS)
        elif self.decode_feedback == "error":
            results += [f"Error: invalid tool call: {error}"[:MAX_ERROR_CHARS] for error in errors[:MAX_CALLS]]
        self.steps += 1
        if self.steps > self.max_steps_per_turn:  # upstream executes this step too, then stops
            return self._end("max_steps")
        return [tool_message(results)]

    def close(self):
        self.simulators = {}

    def _run(self, call):
        turn = len(self.calls_per_turn) - 1
        withheld = {name for t, names in self.task.held_out.items() if t > turn for name in names}
        if call.name in withheld:
            self.refused.append(call)
            self._count("held_out")
        else:
            self.calls_per_turn[-1].append(call)
            self._count("unknown", call.name not in self.names)
        return execute(self.simulators, call, self.names - withheld)

    def _next_turn(self):
        if len(self.calls_per_turn) == len(self.task.turns):
            return self._end("done")
        self.calls_per_turn.append([])
        self.steps = 0
        if self.wipe_each_turn:
            vars(self).pop("simulators", None)
        return user_messages(self.task, len(self.calls_per_turn) - 1)

    def _end(self, finish):
        self.finish = finish
        self.close()

    def _count(self, kind, n=1):
        if n:
            self.feedback_count[kind] = self.feedback_count.get(kind, 0) + int(n)


def ground_truth_dialogue(task):
    """The messages of a task that is solved by its ground truth, one call a message; for looking at."""
    env = BFCLEnv(task, max_steps_per_turn=100)  # two long_context tasks have a turn of 34 calls
    messages = env.reset()
    for calls in task.ground_truth:
        for text in [render_call(call) for call in calls] + ["(closing message)"]:
            messages += [{"role": "assistant", "content": text}, *(env.step(text) or [])]
    return messages


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="print this task's ground truth as a dialogue")
    parser.add_argument("--short_docs", action="store_true", help='drop the "response" part of the tool documents')
    parser.add_argument("--full", action="store_true", help="with --task: do not cut long messages")
    args = parser.parse_args()
    tasks = load_tasks("all", CATEGORIES, short_docs=args.short_docs)
    if args.task:
        task = next((task for task in tasks if task.id == args.task), None)
        if task is None:
            parser.error(f"no task {args.task!r}; ids are multi_turn_{{{','.join(CATEGORIES)}}}_0 to _199")
        for message in ground_truth_dialogue(task):
            content = message["content"]
            cut = content if args.full or len(content) < 1500 else f"{content[:700]}\n[...]\n{content[-700:]}"
            print(f"--- {message['role']} ({len(content)} characters)\n{cut}")
        return
    train = {task.index for task in load_tasks("train")}
    print("category       train  test  turns  calls  raised  prompt chars  ms/task")
    for category in CATEGORIES:
        some = [task for task in tasks if task.category == category]
        start = time.perf_counter()
        dialogues = [ground_truth_dialogue(task) for task in some]
        seconds = time.perf_counter() - start
        texts = [m["content"] for dialogue in dialogues for m in dialogue if m["role"] == "user"]
        print(f"{category:<14}{sum(t.index in train for t in some):>6}{sum(t.index not in train for t in some):>6}"
              f"{sum(len(t.turns) for t in some):>7}{sum(len(c) for t in some for c in t.ground_truth):>7}"
              f"{sum('<tool_response>' in text and 'Error during execution' in text for text in texts):>8}"
              f"{sum(len(d[0]['content']) for d in dialogues) / len(some):>14,.0f}{1000 * seconds / len(some):>9.2f}")


if __name__ == "__main__":
    main()
