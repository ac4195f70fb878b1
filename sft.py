"""SFT on dialogues: ground truth -> the same ids and mask as a rollout -> the same packed forward.

A dialogue is made by playing a task with an engine that recites the ground truth, so its ids come from the very function
that makes RL's. The calls are the benchmark's own (parsed with ast, executed in the live simulators), one per assistant
message; each user turn ends with a short fixed message, an empty one with a refusal.

Deviations from the paper:
 1. The paper explodes a dialogue into one row per assistant message, with the history as its prompt. Under causal attention
    one pass over the dialogue with every assistant message trained is the same objective: a token mean over the rows
    (test_smoke.py shows the equal gradient), 12 to 22 times fewer tokens read. A step of 128 rows is a step of 13 dialogues.
 2. The paper has an LLM write the calls and the closing messages; its calls are not checked against the ground truth.
 3. The released code leaves Qwen3's empty think block out of the SFT context only; here it is in every context, untrained.

    python sft.py --model DIR --out runs/sft --epochs 3 --lr 1e-5
    python sft.py --model DIR --show 2              # look at two dialogues with their trained tokens marked, train nothing
"""
import ast
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rollout import (Trajectory, chat_glue, check_numbers, find_model, load_tokenizer, observation_ids, parse_flags, print_trajectory,   # before torch
                     prompt_ids, rollout)
import torch
import torch.nn.functional as F
from tqdm import tqdm

import env_bfcl
import grpo
import reward as rw
from env_bfcl import BFCLEnv, Call, parse_calls, render_call

DONE = "I have completed this request."
NO_FUNCTION = "I cannot do this: none of the available functions fits. Please provide the function that is needed."
NO_PARAMETER = "I cannot do this yet: a required parameter is missing. Please provide it."


@dataclass
class SFTConfig:
    model: str = field(default="", metadata={"help": "a Hugging Face directory, a .gguf file or a hub id"})
    sft_data: str = field(default="", metadata={"help": "train on this file of chats instead (OpenAI's or ToolACE's form)"})
    out: str = field(default="runs/sft", metadata={"help": "folder of metrics.jsonl and the model"})
    seed: int = field(default=42, metadata={"help": "order of the dialogues"})
    categories: str = field(default="base,miss_func,miss_param", metadata={"help": "training categories, comma-separated"})
    train_tasks: int = field(default=0, metadata={"help": "only the N tasks with the shortest prompts; 0 = all"})
    short_docs: bool = field(default=False, metadata={"help": "tool docs without their 'response' part"})
    skip_defective: bool = field(default=False, metadata={"help": "leave out the tasks whose ground truth cannot be met"})
    think: bool = field(default=False, metadata={"help": "no empty think block before the messages of a hybrid model"})
    epochs: int = field(default=3, metadata={"help": "passes over the dialogues"})
    steps: int = field(default=0, metadata={"help": "optimizer steps in all; 0 = as the epochs give"})
    lr: float = field(default=1e-5, metadata={"help": "peak learning rate; cosine to 0"})
    warmup_ratio: float = field(default=0.1, metadata={"help": "share of the steps with a rising rate"})
    dialogues: int = field(default=13, metadata={"help": "dialogues a step (13 are about the paper's 128 rows)"})
    max_length: int = field(default=8192, metadata={"help": "tokens; longer dialogues are left out and counted"})
    stop_accuracy: float = field(default=0.0, metadata={"help": "stop once the last steps' token accuracy reaches this; 0 = never"})
    group_by_tools: bool = field(default=False, metadata={"help": "fill steps with dialogues of the same tools: fewer tokens, other batches"})
    tokens_per_row: int = field(default=32768, metadata={"help": "tokens of one packed forward"})
    fsdp: bool = field(default=False, metadata={"help": "several GPUs share weights, gradients and Adam's moments (FSDP2)"})
    offload_optimizer: bool = field(default=False, metadata={"help": "they lie in the host's memory, also with one GPU; implies --fsdp"})
    init_tags: bool = field(default=False, metadata={"help": "give untrained <tool_call> rows of the embedding a start (Coder weights)"})
    show: int = field(default=0, metadata={"help": "print the first N dialogues and stop"})


# --- dialogues --------------------------------------------------------------------------------------------------------

def assistant_texts(task):
    """What a faithful assistant says, message by message: one call each, then a short message that ends the user turn."""
    texts = []
    for turn, calls in enumerate(task.ground_truth):
        texts += [render_call(call) for call in calls]
        if calls or task.category not in ("miss_func", "miss_param"):
            texts.append(DONE)
        else:
            texts.append(NO_FUNCTION if task.category == "miss_func" else NO_PARAMETER)
    return texts


class Reciter:
    """An engine that says what it is told: texts[i] are the messages of trajectory i."""

    def __init__(self, glue, texts):
        self.glue, self.left, self.ready = glue, [list(t) for t in texts], []

    def add(self, request_id, ids, max_tokens):
        said = self.glue.encode(self.left[request_id].pop(0)) + [self.glue.end]
        self.ready.append((request_id, said, [0.0] * len(said), "stop"))

    def step(self):
        ready, self.ready = self.ready, []
        return ready

    def load_weights(self, named):
        pass

    def close(self):
        pass


def demonstrate(tokenizer, tasks, texts=None, *, think=False, max_length=16384):
    """Play `tasks` in the live environment with `texts` (default: the ground truth) -> list[Trajectory], as a rollout's.

    mask is 1 on every assistant message and its end token; logp is 0 there, since nobody sampled them."""
    texts = [assistant_texts(t) for t in tasks] if texts is None else texts
    engine = Reciter(chat_glue(tokenizer, think), texts)
    trajectories = rollout(engine, tokenizer, [BFCLEnv(t, decode_feedback="error") for t in tasks], groups=list(range(len(tasks))),
                           max_generations=100, max_prompt=max_length, max_response=max_length, max_action=max_length, think=think)
    for t in trajectories:
        t.source = "demo"
    return trajectories


# --- hints and reflections: from the ground truth and the checker's first difference, "rule-made" wherever results are shown ---

def hint(task):
    """A text for the end of the system message: which calls each user turn needs. No tags, no special tokens in it."""
    lines = ["Hints for this conversation (you may ignore them):"]
    for turn, calls in enumerate(task.ground_truth, 1):
        steps = [f"{c.name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in c.arguments.items())})" for c in calls]
        lines.append(f"User turn {turn}: " + ("call " + ", then ".join(steps) + "." if steps else "no call; say what is missing."))
    return re.sub(r"<\|.*?\|>|</?[a-z_]+>", "", "\n".join(lines))


def check_calls(task, text):
    """Why the tool calls in `text` are not valid for the task's tools, or "" if they are (and there is at least one)."""
    calls, errors = parse_calls(text)
    if errors or not calls:
        return errors[0] if errors else "no complete <tool_call> block"
    docs = {doc["name"]: doc["parameters"] for doc in task.tools}
    for call in calls:
        if call.name not in docs:
            return f"there is no function {call.name[:64]!r}"
        extra = sorted(set(call.arguments) - set(docs[call.name]["properties"]))
        missing = sorted(set(docs[call.name]["required"]) - set(call.arguments))
        if extra or missing:
            return f"{call.name}: {'unknown' if extra else 'missing'} parameter {(extra or missing)[0]!r}"
    return ""


def failed_turn(task, calls):
    """(turn, what the checker says) of the first turn that went wrong."""
    difference = rw.first_difference(task, calls)
    turn = min(difference.get("turn", 0), len(task.ground_truth) - 1)
    return turn, difference.get("text", "the episode did not end by itself")


def reflection_request(task, trajectory):
    """The user message that asks for a reflection: the failed episode, turn by turn, as calls."""
    lines = ["Review this failed attempt at a conversation with tools. Name the root cause, the evidence, one fix, similar scenarios and one "
             "similar but different scenario, each with the right tool call.", ""]
    for turn, calls in enumerate(trajectory.calls):
        said = " ".join(m["content"] for m in env_bfcl.user_messages(task, turn))[:600]
        lines += [f"User turn {turn + 1}: {said}", *(f"Assistant called: {json.dumps({'name': c.name, 'arguments': c.arguments})[:300]}" for c in calls)]
        lines += [] if calls else ["Assistant called nothing."]
    return "\n".join(lines + [f"The episode ended with: {trajectory.finish}."])


def rule_made_reflection(task, trajectory):
    """The default author of PRS's reflections: deterministic, its calls are the benchmark's own. The form is the paper's."""
    turn, why = failed_turn(task, trajectory.calls)
    right = task.ground_truth[turn]
    did = trajectory.calls[turn] if turn < len(trajectory.calls) else []
    pool = [c for calls in task.ground_truth[turn:] + task.ground_truth[:turn] for c in calls]
    names = lambda calls: ", ".join(c.name for c in calls) or "nothing"
    scenarios = ["a needed value is not in the last message but in an earlier result", "two functions look alike", "a result does not look as expected",
                 "the request has several steps"]
    lines = ["Core error analysis", f"Root cause: in user turn {turn + 1} {why}.", f"Evidence: the attempt called {names(did)}.",
             f"Evidence: the request needs {names(right)}.", "Fix: " + ("make exactly these calls, in this order." if right else "call nothing and say what is missing.")]
    lines += [render_call(c) for c in right]
    lines += ["Similar scenarios"]
    for k, when in enumerate(scenarios[: max(3, min(4, len(pool)))]):
        call = pool[k % len(pool)]
        lines += [f"{k + 1}. When {when}: call {call.name} with values from the conversation.", render_call(call)]
    other = pool[-1]
    lines += ["Similar but different", f"If the user had only asked for what {other.name} does, that one call is enough.", render_call(other),
              "Accept the answer if every call is a complete block and the state after the turn is what the user asked for."]
    return "\n".join(lines)


def teacher_reflections(requests, url, name, cache, workers=8):
    """Ask an OpenAI-compatible server for reflections: [text or None]. `requests`: [(task, trajectory)]. Answers are kept under
    `cache`, so a resumed run asks nothing twice; one without valid calls is asked for once more, then counted as None."""
    from openai import OpenAI      # comes with vLLM
    client, lost = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=2, timeout=120), []
    os.makedirs(cache, exist_ok=True)

    def ask(request):
        task, trajectory = request
        truth = "\n".join(f"User turn {k}: " + " ".join(map(render_call, calls)) for k, calls in enumerate(task.ground_truth, 1))
        messages = [{"role": "system", "content": env_bfcl.system_prompt(task)},
                    {"role": "user", "content": reflection_request(task, trajectory) + f"\n\nThe right calls, for your eyes only:\n{truth}"}]
        path = os.path.join(cache, hashlib.sha256(json.dumps([name, messages]).encode()).hexdigest()[:32] + ".json")
        if os.path.exists(path):
            return json.load(open(path))
        for _ in range(2 if len(lost) < 8 else 0):      # a dead server is not waited for by each of hundreds of failures
            try:        # the server may be anything: an answer that is none must not end the run
                text = client.chat.completions.create(model=name, messages=messages, temperature=0.7, max_tokens=4096).choices[0].message.content or ""
                text = text.rpartition("</think>")[2].strip()
                text.encode()       # half a surrogate pair is no text
            except Exception as e:
                tqdm.write(f"teacher: {type(e).__name__}: {str(e)[:200]}")
                lost.append(e)
                return None
            lost.clear()
            if len(text) < 50_000 and not check_calls(task, text):
                with open(path + ".tmp", "w") as f:
                    json.dump(text, f)
                os.replace(path + ".tmp", path)
                return text
        return None

    with ThreadPoolExecutor(workers) as pool:
        return list(tqdm(pool.map(ask, requests), total=len(requests), desc="teacher", leave=False))


def reflect(tokenizer, failures, *, think=False, teacher=None):
    """Failed episodes [(task, Trajectory)] -> (one-message dialogues [Trajectory], number of teacher calls that failed)."""
    texts = teacher(failures) if teacher else [rule_made_reflection(task, t) for task, t in failures]
    glue, out = chat_glue(tokenizer, think), []
    for (task, failure), text in zip(failures, texts):
        if text is None:
            continue
        t = Trajectory(f"{task.id}/reflection", source="demo")
        t.extend(prompt_ids(glue, [{"content": env_bfcl.system_prompt(task)}, {"content": reflection_request(task, failure)}]))
        t.prompt_len = len(t.ids)
        said = glue.encode(text) + [glue.end]
        t.extend(said, [0.0] * len(said))
        out.append(t)
    return out, texts.count(None)


# --- other people's dialogues (--sft_data) ----------------------------------------------------------------------------

def read_chats(path):
    """A jsonl or json file of chats with tools -> [[message]], roles system, user, assistant, in this project's wording.

    Two forms: OpenAI's ({"messages", "tools"}; tool_calls become `<tool_call>` blocks, tool messages `<tool_response>`) and
    ToolACE's ({"system", "conversations": [{"from", "value"}]}; its `[name(k='v')]` calls are read with ast, never
    evaluated). ValueError names the first line that does not fit."""
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
        lines = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")      # splitlines() would cut at U+2028, too
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: {e}") from None
    chats = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            record = json.loads(line) if isinstance(line, str) else line
            chat = _toolace_chat(record) if "conversations" in record else _openai_chat(record)
            while chat and chat[-1]["role"] != "assistant":     # nothing to learn there
                chat.pop()
            if [m["role"] for m in chat] != ["system"] + ["user", "assistant"] * (len(chat) // 2) or len(chat) < 3:
                raise ValueError("roles must be user and assistant (or tool) in turn, with an answer")
            for m in chat:
                m["content"].encode()       # AttributeError: no text; UnicodeEncodeError: half a surrogate pair
                if m["role"] == "assistant" and (errors := env_bfcl.parse_calls(m["content"])[1]):
                    raise ValueError(f"a call in the wrong form: {errors[0]}")
            chats.append(chat)
        except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError) as e:
            raise ValueError(f"{path}, line {number}: {type(e).__name__}: {str(e)[:160]}") from None
    if not chats:
        raise ValueError(f"{path} holds no chats")
    return chats


def _tools_text(docs):
    return env_bfcl.tools_prompt([d.get("function", d) for d in docs])


def _openai_chat(record):
    messages = [{"role": "system", "content": _tools_text(record.get("tools") or [])}]
    for m in record["messages"]:
        content = m.get("content") or ""
        if isinstance(content, list):       # OpenAI's parts
            content = "".join(part["text"] for part in content)
        if m["role"] == "system":
            messages[0]["content"] = f"{content}\n\n{messages[0]['content']}"
        elif m["role"] == "assistant":
            calls = [c["function"] for c in m.get("tool_calls") or []]
            arguments = [json.loads(c["arguments"]) if isinstance(c["arguments"], str) else c["arguments"] for c in calls]
            messages.append({"role": "assistant", "content": "\n".join([content] * bool(content) + [render_call(Call(c["name"], a)) for c, a in zip(calls, arguments)])})
        elif m["role"] == "tool" and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n<tool_response>\n{content}\n</tool_response>"
        elif m["role"] in ("user", "tool"):
            messages.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>" if m["role"] == "tool" else content})
        else:
            raise ValueError(f"role {m['role']!r}")
    return messages


def _toolace_chat(record):
    start = record["system"].index("[{")        # its list of functions, after a text about another call format
    docs, _ = json.JSONDecoder().raw_decode(record["system"][start:])
    docs = [d | {"name": re.sub(r"\W+", "_", d["name"].strip())} for d in docs]     # as in the calls
    messages = [{"role": "system", "content": _tools_text(docs)}]
    for m in record["conversations"]:
        who, value = m["from"], m["value"]
        if who == "assistant" and value.lstrip().startswith("["):
            value = "\n".join(map(render_call, _python_calls(value)))
        messages.append({"role": "assistant" if who == "assistant" else "user",
                         "content": f"<tool_response>\n{value}\n</tool_response>" if who == "tool" else value})
    return messages


def _python_calls(text):
    """[Get Weather(city='Rome')] -> calls; names with spaces or dots become one word."""
    text = re.sub(r"([\w.][\w .\-/]*)\(", lambda m: re.sub(r"\W+", "_", m[1].strip()) + "(", text.strip())
    calls = ast.parse(text, mode="eval").body.elts
    return [Call(c.func.id, {k.arg: ast.literal_eval(k.value) for k in c.keywords}) for c in calls]


def encode_chat(tokenizer, messages, name, *, think=False):
    """[system, user, assistant, user, ..., assistant] (see read_chats) -> Trajectory with the same glue as a rollout; mask 1 on
    assistant messages."""
    glue, t = chat_glue(tokenizer, think), Trajectory(name, source="demo")
    t.extend(prompt_ids(glue, messages[:2]))
    t.prompt_len = len(t.ids)
    for k, m in enumerate(messages[2:]):
        if m["role"] == "assistant":
            said = glue.encode(m["content"]) + [glue.end]
            t.extend(said, [0.0] * len(said))
        else:
            t.extend(observation_ids(glue, [m], max_observation=8192))
    return t


def check_tags(model, tokenizer, init=False):
    """Say so when the rows of the tool tags equal a row that was never trained (Qwen2.5-Coder): such a model cannot emit them
    and small learning rates do not get it there. `init` sets them to the mean of the rows of the tag's words, mean norm."""
    with torch.no_grad():
        rows = grpo.whole(model.get_input_embeddings().weight)
        if len(rows) <= len(tokenizer):
            return
        unused, norm = rows[len(tokenizer)], rows[: len(tokenizer)].norm(dim=1).mean()
        for tag in ("<tool_call>", "</tool_call>"):
            i = tokenizer.convert_tokens_to_ids(tag)
            if i is None or F.cosine_similarity(rows[i], unused, dim=0) < 0.999:
                continue
            tqdm.write(f"the embedding row of {tag} was never trained" + (": initialised" if init else ": SFT needs --init_tags to get anywhere"))
            if init:
                pieces = tokenizer(tag.replace("_", " "), add_special_tokens=False).input_ids
                for p in {id(p): p for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}.values():
                    weight = grpo.whole(p)
                    mean = weight[pieces].mean(0)
                    weight[i] = mean * norm / mean.norm()
                    p.copy_(grpo.like(weight, p))       # for a sharded one; else it is itself


# --- ALGO: batches, schedule, one step ------------------------------------------------------------------------------------

def batches(trajectories, config, epoch):
    """Split an epoch into steps of about `config.dialogues` (all within one of each other); a pure function of its arguments."""
    order = list(range(len(trajectories)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    if config.group_by_tools:
        key = lambda i: tuple(trajectories[i].ids[: trajectories[i].prompt_len])
        order.sort(key=key)
    steps = max(round(len(order) / config.dialogues), 1)
    cuts = [round(k * len(order) / steps) for k in range(steps + 1)]
    out = [[trajectories[i] for i in order[a:b]] for a, b in zip(cuts, cuts[1:])]
    if config.group_by_tools:
        random.Random(f"{config.seed}/{epoch}/steps").shuffle(out)
    return out


def cosine_lr(config, step, total):
    """Linear warm-up over `warmup_ratio` of the steps, then a cosine to 0."""
    warmup = config.warmup_ratio * total
    if step < warmup:
        return config.lr * (step + 1) / math.ceil(warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def sft_step(learner, batch, lr, config):
    """One optimizer step on the mean negative log-probability of the batch's trained tokens. Returns its metrics."""
    mine = grpo.share(learner, batch, config.tokens_per_row) if learner.accelerator.num_processes > 1 else range(len(batch))
    rows = grpo.pack([batch[i] for i in mine], config.tokens_per_row)
    count = grpo.across_ranks(learner, {"tokens": sum(len(r.trained) for r in rows)})["tokens"]
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    sums = {"nll": 0.0, "right": 0.0, "read": sum(len(r.ids) for r in rows)}
    with learner.autocast():
        for row in grpo.even(learner, rows):
            logp, _, right, _ = grpo.packed_logprobs(learner.model, row, watch=[])      # [K]
            loss = -logp.sum() / count      # each trained token of the step weighs the same, whatever the rows and ranks
            loss.backward()
            sums["nll"] += float(-logp.detach().sum())
            sums["right"] += float(right.sum())
    norm, stepped = grpo.optimizer_step(learner, 1.0, [t.task_id for t in batch])
    sums = grpo.across_ranks(learner, sums)
    return {"loss": sums["nll"] / count, "token_accuracy": sums["right"] / count, "trained_tokens": int(count),
            "read_tokens": int(sums["read"]), "grad_norm": norm, "lr": lr, "updates_skipped": int(not stepped)}


def sft_phase(learner, trajectories, config, start=0, recent=None, desc="sft"):
    """Yield (step, metrics, last) for every step from `start` on; `last` is True on the final one.

    Stops early once the mean token accuracy of an epoch, and of at least 10 steps, reaches `config.stop_accuracy`: what has
    been memorised to the last token leaves RL nothing, since every sample of a group is then the same. `recent` is the list
    of those accuracies; a resumed phase hands in the one it had."""
    fit = [t for t in trajectories if len(t.ids) <= config.max_length and any(t.mask)]
    if len(fit) < len(trajectories):
        tqdm.write(f"{len(trajectories) - len(fit)} of {len(trajectories)} dialogues are longer than {config.max_length} tokens: left out")
    per_epoch = len(batches(fit, config, 0)) if fit else 0
    total = (config.steps or config.epochs * per_epoch) if fit else 0
    recent, window = [] if recent is None else recent, max(per_epoch, 10)
    bar = tqdm(total=total, initial=start, desc=desc, leave=False, disable=not learner.accelerator.is_main_process, dynamic_ncols=True)
    for step in range(start, total):
        batch = batches(fit, config, step // per_epoch)[step % per_epoch]
        metrics = sft_step(learner, batch, cosine_lr(config, step, total), config)
        recent.append(metrics["token_accuracy"])
        del recent[:-window]
        learnt = config.stop_accuracy and len(recent) == window and sum(recent) / window >= config.stop_accuracy
        bar.update()
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['token_accuracy']:.3f}")
        yield step, metrics, bool(learnt or step == total - 1)
        if learnt:
            break
    bar.close()


def main():
    config = parse_flags(SFTConfig, description=__doc__.split("\n")[0])
    try:
        check_numbers(config, "dialogues tokens_per_row max_length" + " epochs" * (not config.steps))
        if max(config.warmup_ratio, config.stop_accuracy) > 1:
            raise ValueError("--warmup_ratio and --stop_accuracy are shares, at most 1")
        path = find_model(config.model, config.out)
        tokenizer = load_tokenizer(path)
        tasks = grpo.train_tasks(config)
        if config.sft_data:
            chats = read_chats(config.sft_data)
            dialogues = [encode_chat(tokenizer, c, f"{config.sft_data}:{k}", think=config.think) for k, c in enumerate(chats, 1)][: config.show or None]
        else:
            dialogues = demonstrate(tokenizer, tasks[: config.show or None], think=config.think)
        if config.show:
            for t in dialogues:
                print_trajectory(t, tokenizer)
            return
        if not any(len(t.ids) <= config.max_length for t in dialogues):
            raise ValueError(f"all {len(dialogues)} dialogues are longer than --max_length {config.max_length} tokens")
        grpo.check_out(config.out)
        learner = grpo.make_learner(path, tokenizer, fsdp=config.fsdp, offload=config.offload_optimizer)
        check_tags(learner.model, tokenizer, config.init_tags)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    grpo.set_optimizer(learner, config.lr, betas=(0.9, 0.95))
    with open(os.path.join(config.out, "metrics.jsonl"), "w") as log:
        log.write(json.dumps({"kind": "config", **dataclasses.asdict(config)}) + "\n")
        for step, metrics, last in sft_phase(learner, dialogues, config):
            log.write(json.dumps({"kind": "sft", "phase": 0, "step": 0, "sft_step": step, **metrics}) + "\n")
            log.flush()
    weights = grpo.full_weights(learner)
    if learner.accelerator.is_main_process:
        learner.model.save_pretrained(os.path.join(config.out, "model"), state_dict=weights)
        tokenizer.save_pretrained(os.path.join(config.out, "model"))
        print(f"loss {metrics['loss']:.4f}, token accuracy {metrics['token_accuracy']:.3f}; wrote {config.out}/model")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: nothing but metrics.jsonl is kept; interleave.py --schedule sft_only goes on where it was")
