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
import dataclasses
import json
import math
import os
import random
import sys
from dataclasses import dataclass, field

from rollout import Trajectory, chat_glue, find_model, load_tokenizer, parse_flags, print_trajectory, rollout     # before torch
from tqdm import tqdm

import env_bfcl
import grpo
from env_bfcl import BFCLEnv, render_call

DONE = "I have completed this request."
NO_FUNCTION = "I cannot do this: none of the available functions fits. Please provide the function that is needed."
NO_PARAMETER = "I cannot do this yet: a required parameter is missing. Please provide it."


@dataclass
class SFTConfig:
    model: str = field(default="", metadata={"help": "a Hugging Face directory, a .gguf file or a hub id"})
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
    stop_accuracy: float = field(default=0.0, metadata={"help": "stop once a whole epoch's token accuracy reaches this; 0 = never"})
    group_by_tools: bool = field(default=False, metadata={"help": "fill steps with dialogues of the same tools: fewer tokens, other batches"})
    tokens_per_row: int = field(default=32768, metadata={"help": "tokens of one packed forward"})
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
        self.end = glue.tokenizer.eos_token_id

    def add(self, request_id, ids, max_tokens):
        said = self.glue.encode(self.left[request_id].pop(0)) + [self.end]
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
    return rollout(engine, tokenizer, [BFCLEnv(t, decode_feedback="error") for t in tasks], groups=list(range(len(tasks))), max_generations=100,
                   max_prompt=max_length, max_response=max_length, max_action=max_length, think=think)


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
    rank, world = learner.accelerator.process_index, learner.accelerator.num_processes
    rows = grpo.pack(batch[rank::world], config.tokens_per_row)
    count = grpo.across_ranks(learner, {"tokens": sum(len(r.trained) for r in rows)})["tokens"]
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    sums = {"nll": 0.0, "right": 0.0, "read": sum(len(r.ids) for r in rows)}
    with learner.autocast():
        for row in rows:
            logp, _, right, _ = grpo.packed_logprobs(learner.model, row, watch=[])      # [K]
            loss = -logp.sum() / count      # each trained token of the step weighs the same, whatever the rows and ranks
            loss.backward()
            sums["nll"] += float(-logp.detach().sum())
            sums["right"] += float(right.sum())
    norm, stepped = grpo.optimizer_step(learner, 1.0, [t.task_id for t in batch])
    sums = grpo.across_ranks(learner, sums)
    return {"loss": sums["nll"] / count, "token_accuracy": sums["right"] / count, "trained_tokens": int(count),
            "read_tokens": int(sums["read"]), "grad_norm": norm, "lr": lr, "updates_skipped": int(not stepped)}


def sft_phase(learner, trajectories, config, start=0, desc="sft"):
    """Yield (step, metrics, last) for every step from `start` on; `last` is True on the final one.

    Stops early once an epoch's mean token accuracy reaches `config.stop_accuracy`: what has been memorised to the last
    token leaves RL nothing, since every sample of a group is then the same."""
    fit = [t for t in trajectories if len(t.ids) <= config.max_length and any(t.mask)]
    if len(fit) < len(trajectories):
        tqdm.write(f"{len(trajectories) - len(fit)} of {len(trajectories)} dialogues are longer than {config.max_length} tokens: left out")
    per_epoch = len(batches(fit, config, 0)) if fit else 0
    total = (config.steps or config.epochs * per_epoch) if fit else 0
    recent = []
    bar = tqdm(total=total, initial=start, desc=desc, leave=False, disable=not learner.accelerator.is_main_process, dynamic_ncols=True)
    for step in range(start, total):
        batch = batches(fit, config, step // per_epoch)[step % per_epoch]
        metrics = sft_step(learner, batch, cosine_lr(config, step, total), config)
        recent = (recent + [metrics["token_accuracy"]])[-per_epoch:]
        learnt = config.stop_accuracy and len(recent) == per_epoch and sum(recent) / per_epoch >= config.stop_accuracy
        bar.update()
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['token_accuracy']:.3f}")
        yield step, metrics, bool(learnt or step == total - 1)
        if learnt:
            break
    bar.close()


def main():
    config = parse_flags(SFTConfig, description=__doc__.split("\n")[0])
    try:
        path = find_model(config.model, config.out)
        tokenizer = load_tokenizer(path)
        tasks = grpo.train_tasks(config)
        dialogues = demonstrate(tokenizer, tasks[: config.show or None], think=config.think)
        if config.show:
            for t in dialogues:
                print_trajectory(t, tokenizer)
            return
        learner = grpo.make_learner(path)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    grpo.set_optimizer(learner, config.lr, betas=(0.9, 0.95))
    os.makedirs(config.out, exist_ok=True)
    with open(os.path.join(config.out, "metrics.jsonl"), "w") as log:
        log.write(json.dumps({"kind": "config", **dataclasses.asdict(config)}) + "\n")
        for step, metrics, last in sft_phase(learner, dialogues, config):
            log.write(json.dumps({"kind": "sft", "phase": 0, "step": 0, "sft_step": step, **metrics}) + "\n")
            log.flush()
    if learner.accelerator.is_main_process:
        learner.model.save_pretrained(os.path.join(config.out, "model"))
        tokenizer.save_pretrained(os.path.join(config.out, "model"))
        print(f"loss {metrics['loss']:.4f}, token accuracy {metrics['token_accuracy']:.3f}; wrote {config.out}/model")


if __name__ == "__main__":
    main()
