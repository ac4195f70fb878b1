"""GRPO on multi-turn trajectories: group advantages, shared-prefix packed forward, loss, update.

The algorithm (paper, section 2 of its recipe), in the order of the code:
 1. play n episodes of each of `prompts` tasks (rollout.py) and score them (reward.py)
 2. advantage = (reward - group mean) / group std, one number per trajectory                      group_advantages
 3. form mini-batches of whole groups, drop the groups whose rewards are all equal                update
 4. pack what is left into rows that share prompts, log-probabilities at trained positions only   pack, packed_logprobs
 5. clipped ratio with dual clip + k3 KL to the reference, mean over trained tokens               policy_loss
 6. AdamW on fp32 weights; push the weights to the engine

Deviations from the paper:
 1. A group of equal rewards is dropped before the forward and leaves the denominator; the paper keeps its KL term.
 2. The loss of a mini-batch is divided by its trained tokens, whatever the rows and ranks; the released code re-weights
    micro-batches by their number of sequences, so that its gradient depends on how the batch was cut.
 3. Old log-probabilities are taken at the ids that were sampled (see rollout.py), not at re-tokenised text.
 4. A trajectory lost to an infrastructure failure is left out of its group instead of counting as a failure.

    python grpo.py --model DIR --steps 10 --prompts 8 --n 8 --mini_batch 8      # GRPO alone; interleave.py is the experiment
    python grpo.py --model DIR --load_rollouts runs/X/rollouts --reward strict  # the same update on saved trajectories
"""
import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import importlib.util
import itertools
import json
import math
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field

# Before torch: it sets what OpenMP and vLLM read when they are imported.
from rollout import (chat_glue, check_numbers, find_model, load_model, load_tokenizer, load_trajectories, make_engine,
                     parse_flags, rollout, save_trajectories, strip_hint, weight_sums)
import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import env_bfcl
import reward as rw
from env_bfcl import BFCLEnv
from reward import SLOTS, protocol_slots, watch_ids

HEAD_CHUNK = 1024       # trained positions whose [chunk, vocabulary] logits exist at a time
MIN_SHARED = 64         # a common prefix shorter than this is not worth a segment of its own


@dataclass
class GRPOConfig:
    model: str = field(default="", metadata={"help": "a Hugging Face directory, a .gguf file or a hub id"})
    out: str = field(default="runs/grpo", metadata={"help": "folder of metrics.jsonl, checkpoints, trajectories"})
    seed: int = field(default=42, metadata={"help": "seed of sampling, task order and shuffles (not of the data split)"})
    # the batch
    steps: int = field(default=300, metadata={"help": "GRPO steps (python grpo.py only; interleave.py has --rounds)"})
    prompts: int = field(default=60, metadata={"help": "tasks a step"})
    n: int = field(default=8, metadata={"help": "episodes per task"})
    mini_batch: int = field(default=20, metadata={"help": "tasks per update"})
    categories: str = field(default="base,miss_func,miss_param", metadata={"help": "training categories, comma-separated"})
    train_tasks: int = field(default=0, metadata={"help": "train on the N tasks with the shortest prompts only; 0 = all"})
    skip_defective: bool = field(default=False, metadata={"help": "leave out the tasks whose ground truth cannot be met"})
    holdout: str = field(default="", metadata={"help": "leave a domain block out of training: files (0-49), vehicle (50-99), trading (100-149), travel (150-199)"})
    short_docs: bool = field(default=False, metadata={"help": "tool docs without their 'response' part"})
    # the objective
    reward: str = field(default="official", metadata={"help": "official (0/1), strict (0/1), per_turn (share of turns)"})
    lr: float = field(default=1e-6, metadata={"help": "learning rate after the warm-up, constant"})
    warmup: int = field(default=10, metadata={"help": "steps of linear warm-up"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's"})
    clip_norm: float = field(default=1.0, metadata={"help": "gradient norm"})
    clip_low: float = field(default=0.2, metadata={"help": "the ratio is clipped below 1 - this"})
    clip_high: float = field(default=0.2, metadata={"help": "the ratio is clipped above 1 + this"})
    dual_clip: float = field(default=3.0, metadata={"help": "a negative advantage counts at most this many times"})
    kl_coef: float = field(default=1e-4, metadata={"help": "weight of the k3 KL to the reference; 0 = no reference"})
    ops_weight: str = field(default="plain", metadata={"help": "loss of demonstrations in a group: plain (paper) or luffy, p/(p+0.1)"})
    hint_correction: bool = field(default=False, metadata={"help": "weigh hinted samples by p(without hint)/p(with it), at most 2"})
    tis: float = field(default=0.0, metadata={"help": "cap of the trainer/engine importance weight per token; 0 = off"})
    # sampling
    temperature: float = field(default=1.0, metadata={"help": "of sampling, and of the log-probabilities in the loss"})
    top_p: float = field(default=1.0, metadata={"help": "must be 1: the loss needs the distribution that was sampled"})
    think: bool = field(default=False, metadata={"help": "let a hybrid model (Qwen3) think"})
    decode_feedback: str = field(default="error", metadata={"help": "answer to an undecodable call: none, short or error"})
    max_prompt: int = field(default=8192, metadata={"help": "tokens"})
    max_response: int = field(default=8192, metadata={"help": "tokens of a whole trajectory after its prompt"})
    max_action: int = field(default=2048, metadata={"help": "tokens of one message"})
    max_observation: int = field(default=1024, metadata={"help": "tokens of one answer of the environment"})
    max_generations: int = field(default=30, metadata={"help": "messages per trajectory"})
    # the machine
    engine: str = field(default="auto", metadata={"help": "vllm, hf or auto"})
    kv_gib: float = field(default=16.0, metadata={"help": "GiB of keys and values in vLLM"})
    sleep: bool = field(default=False, metadata={"help": "vLLM gives its memory back during the update (small cards)"})
    tokens_per_row: int = field(default=32768, metadata={"help": "tokens of one packed forward: less memory, more rows"})
    fsdp: bool = field(default=False, metadata={"help": "several GPUs share weights, gradients and Adam's moments (FSDP2) instead of holding all of them each"})
    offload_optimizer: bool = field(default=False, metadata={"help": "fp32 weights, gradients and Adam's moments in the host's memory, also with one GPU (24 GB cards); implies --fsdp"})
    compile: bool = field(default=False, metadata={"help": "compile MLPs and norms (a minute at the start)"})
    checkpointing: str = field(default="full", metadata={"help": "the backward recomputes full layers, their mlp (more memory, faster) or none (most memory)"})
    load_rollouts: str = field(default="", metadata={"help": "python grpo.py only: train on the files of this folder, without an engine"})
    report_to: str = field(default="", metadata={"help": "interleave.py: also log to tensorboard, wandb or trackio (through accelerate)"})
    save_rollouts: str = field(default="", metadata={"help": "folder of each step's trajectories; default OUT/rollouts; none = do not write them"})


# --- ALGO: advantages and loss ----------------------------------------------------------------------------------------

def group_advantages(rewards):
    """rewards [G, n] -> (reward - mean) / (std + 1e-6) of each row, unbiased std; exact zeros for a row of equal rewards.

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.], [.3, .3, .3, .3]]).double()).round(decimals=3).tolist()
    [[0.866, -0.866, -0.866, 0.866], [0.0, 0.0, 0.0, 0.0]]
    """
    if rewards.shape[1] < 2:
        return torch.zeros_like(rewards)
    adv = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)     # [G, n]
    # Equal floats have a std of rounding error, and dividing by it makes noise of size 1 (tiny-grpo's fault).
    flat = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True) < 1e-6                 # [G, 1]
    return adv.masked_fill(flat, 0.0)


def policy_loss(logp, old_logp, adv, ref_logp=None, *, clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl_coef=1e-4, weight=None,
                shaped=None, control=None):
    """The loss of some trained tokens, summed: (scalar, dict of detached sums). All inputs are [K].

    PPO's clipped ratio, dual clip (arXiv 1912.09729) and the k3 estimator of KL(policy || reference)
    (joschu.net/blog/kl-approx.html) with verl's clamps, as in the paper. `weight` [K] multiplies the policy term (importance weights). Where `shaped` [K] is
    True the ratio is LUFFY's p / (p + 0.1) (arXiv 2504.14945), without a clip: tokens that nobody sampled. `control` [K] marks
    the control tokens, whose share of the sums is reported."""
    # ALGO
    ratio = torch.exp((logp - old_logp).clamp(-20, 20))                             # [K]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)                              # [K]
    if shaped is not None:
        p = logp.exp()
        ratio, clipped = (torch.where(shaped, p / (p + 0.1), x) for x in (ratio, clipped))
    loss = torch.maximum(-adv * ratio, -adv * clipped)                              # [K]
    loss = torch.where(adv < 0, torch.minimum(loss, -adv * dual_clip), loss)        # [K]
    if weight is not None:
        loss = loss * weight
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        d = (ref_logp - logp).clamp(-20, 20)
        kl = (d.exp() - d - 1).clamp(max=10)                                        # [K]
    total = (loss + kl_coef * kl).sum()
    control = torch.zeros_like(logp, dtype=torch.bool) if control is None else control
    off = ((ratio > 1 + clip_high) & (adv > 0)) | ((ratio < 1 - clip_low) & (adv < 0))
    return total, {"pg": loss.detach().sum(), "kl": kl.detach().sum(), "clipped": off.sum(), "ratio": ratio.detach().sum(),
                   "pg_control": loss.detach()[control].sum(), "kl_control": kl.detach()[control].sum(), "control_tokens": control.sum()}


# --- packing: a row is a forest of prompts and the trajectories that continue them --------------------------------------

@dataclass
class Row:
    """One packed forward. A segment attends to the segments on its path (its ancestors) and causally to itself."""
    ids: torch.Tensor           # [T]
    positions: torch.Tensor     # [T] each segment's continue its parent's
    segments: list              # [(start, end, path)], path = ((start, end), ...) of its ancestors, root first
    trained: list               # K pairs (trajectory, position in its ids)
    source: torch.Tensor        # [K] the place in the row whose hidden state predicts that token
    target: torch.Tensor        # [K] that token
    calls: list = None          # on CUDA: tree_calls of the segments

    def to(self, device):
        calls = tree_calls(self.segments, device) if device.type == "cuda" else None
        return dataclasses.replace(self, calls=calls, **{k: getattr(self, k).to(device) for k in ("ids", "positions", "source", "target")})


def _common(a, b):
    """Length of the common prefix of two id sequences."""
    lo, hi = 0, min(len(a), len(b))
    while lo < hi:      # bisection over slice comparisons: C speed
        mid = (lo + hi + 1) // 2
        lo, hi = (mid, hi) if a[lo:mid] == b[lo:mid] else (lo, mid - 1)
    return lo


def pack(trajectories, tokens_per_row=32768):
    """Trajectories -> rows of at most `tokens_per_row` tokens (a longer single one gets a row of its own).

    Prompts that begin alike (the tools' docs) and trajectories with the same prompt (a group) share those tokens, so a row
    of one group costs one prompt and n continuations. What follows the last trained token is left out. Any object with
    ids, mask and prompt_len will do; those without a trained token are skipped.

    >>> from types import SimpleNamespace as T
    >>> row, = pack([T(ids=[1, 2, 3, 4], mask=[0, 0, 1, 1], prompt_len=2), T(ids=[1, 2, 5], mask=[0, 0, 1], prompt_len=2)])
    >>> row.ids.tolist(), row.positions.tolist(), row.trained, row.source.tolist(), row.target.tolist()
    ([1, 2, 3], [0, 1, 2], [(0, 2), (0, 3), (1, 2)], [1, 2, 1], [3, 4, 5])
    """
    members, rows, room, last = [], [], 0, None
    order = sorted((i for i, t in enumerate(trajectories) if any(t.mask)), key=lambda i: trajectories[i].ids[: trajectories[i].prompt_len])
    for i in order:
        t = trajectories[i]
        prompt = t.ids[: t.prompt_len]
        new = len(t.ids) - (_common(last, prompt) if members else 0)     # sorted: no earlier one shares more than the last
        if members and new > room:
            rows.append(_build_row(trajectories, members))
            members, new = [], len(t.ids)
        if not members:
            room = tokens_per_row
        members.append(i)
        room -= new
        last = prompt
    return rows + ([_build_row(trajectories, members)] if members else [])


def _build_row(trajectories, members):
    ids, positions, segments, trained, source, target = [], [], [], [], [], []

    def add(tokens, path, first):
        """Append a segment below `path` whose first token has position `first`; returns the path of its children."""
        if not tokens:
            return path
        start = len(ids)
        ids.extend(tokens)
        positions.extend(range(first, first + len(tokens)))
        segments.append((start, len(ids), path))
        return path + ((start, len(ids)),)

    def grow(prompts, start, path):
        """Place sorted, distinct prompts [(prompt, members)] that are equal up to `start` and lie below `path`."""
        shared = _common(prompts[0][0], prompts[-1][0])
        if len(prompts) > 1:
            if shared - start >= MIN_SHARED:
                path, start = add(prompts[0][0][start:shared], path, start), shared
            # Parts share MIN_SHARED more tokens or are single, so the recursion ends.
            for _, part in itertools.groupby(prompts, key=lambda p: p[0][start: start + MIN_SHARED]):
                grow(list(part), start, path)
            return
        (prompt, here), = prompts
        path = add(prompt[start:], path, start)
        for i in here:
            t, p0 = trajectories[i], trajectories[i].prompt_len
            where = [p for p, m in enumerate(t.mask) if m]
            body = add(t.ids[p0: where[-1]], path, p0)     # the last trained token is predicted, never read
            for p in where:
                trained.append((i, p))
                source.append(path[-1][1] - 1 if p == p0 else body[-1][0] + p - 1 - p0)
                target.append(t.ids[p])

    by_prompt = {}
    for i in members:
        by_prompt.setdefault(tuple(trajectories[i].ids[: trajectories[i].prompt_len]), []).append(i)
    grow(sorted(by_prompt.items()), 0, ())
    tensor = lambda x: torch.tensor(x, dtype=torch.long)
    return Row(tensor(ids), tensor(positions), segments, trained, tensor(source), tensor(target))


# --- attention of a row -----------------------------------------------------------------------------------------------
# CPU: one SDPA call per segment. CUDA: in the row's order (a node, then all that descends from it) the descendants of a node
# are one contiguous stretch. So a row needs one causal call over the segments themselves and per depth one call without a
# mask, in which all descendants of a node are ONE long query sequence and the node's tokens its keys. Keys are read in place;
# the partial softmaxes are merged by their log-sum-exp.

@torch.compiler.disable     # the row is an opaque object to the compiled parts: they do not depend on its shape
def _tree_attention(module, query, key, value, attention_mask, scaling=None, row=None, **kwargs):
    """query [1, H, T, D], key and value [1, Hkv, T, D] of a packed row -> [1, T, H, D]."""
    query, key = query.to(value.dtype), key.to(value.dtype)     # autocast leaves the rotary embedding's results in fp32
    if query.is_cuda and query.dtype != torch.float32:
        return TreeAttention.apply(*(x[0].transpose(0, 1) for x in (query, key, value)), row.calls, scaling)[None], None
    out = []
    for start, end, path in row.segments:       # one call per segment: half the time of one call with a T x T mask
        k, v = (torch.cat([x[:, :, a:b] for a, b in path + ((start, end),)], 2) for x in (key, value))
        mask = torch.ones(end - start, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - (end - start)) if path else None
        out.append(F.scaled_dot_product_attention(query[:, :, start:end], k, v, mask, is_causal=not path, scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2), None


def tree_calls(segments, device):
    """A row's segments -> its kernel calls [(queries, keys, cu_q, cu_k, max_q, max_k, causal)]; queries and keys are a slice or
    an index. The first call is every segment with itself; then, per depth, all descendants of each node with that node."""
    last, depths = {}, {}
    for _, end, path in segments:
        last |= dict.fromkeys(path, end)        # in the row's order: the last one stays
    for start, end, path in segments:
        if (start, end) in last:
            depths.setdefault(len(path), []).append((end, last[start, end], start, end))

    def call(ranges, causal):       # ranges: [(first query, end, first key, end)]
        where, cu, longest = [], [], []
        for a, b in ((0, 1), (2, 3)):
            lengths = [r[b] - r[a] for r in ranges]
            where.append(slice(ranges[0][a], ranges[0][b]) if len(ranges) == 1 else torch.cat([torch.arange(r[a], r[b]) for r in ranges]).to(device))
            cu.append(torch.tensor([0] + lengths).cumsum(0).to(device, torch.int32))
            longest.append(max(lengths))
        # at least 2: with one query per sequence the kernel swaps heads and queries, and lse comes in another shape
        return *where, *cu, max(longest[0], 2), longest[1], causal

    own = (slice(None), slice(None), *call([(s, e, s, e) for s, e, _ in segments], True)[2:])
    return [own] + [call(ranges, False) for _, ranges in sorted(depths.items())]


class TreeAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]; `calls` from tree_calls.

    Not autograd through varlen_attn(return_aux=...): its backward drops the gradient of lse without a word (torch 2.11, 2.13).
    Nor is it needed: flash backward computes P = exp(S - lse) and dS = P (dP - rowsum(dO O)), so given the MERGED output and
    lse each partial call returns its exact share of dQ and the exact dK, dV of its keys."""

    @staticmethod
    def forward(ctx, q, k, v, calls, scale):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        flash, _ = _kernels()
        out, lse = flash(q, k, v, *calls[0][2:], scale)                     # [T, H, D], [H, T]
        for i, j, *how in calls[1:]:
            part, part_lse = flash(q[i], k[j], v[j], *how, scale)
            old = lse[:, i]
            new = torch.logaddexp(old, part_lse)                            # [H, n]
            weight = lambda x: (x - new).exp().T[:, :, None]                # [n, H, 1]
            out[i] = (out[i] * weight(old) + part * weight(part_lse)).to(out.dtype)
            lse[:, i] = new
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grad, (_, flash_backward) = grad.contiguous(), _kernels()
        wide = torch.promote_types(q.dtype, torch.float32)                  # partial sums meet in fp32
        dq, dk, dv = (x.to(wide) for x in flash_backward(grad, q, k, v, out, lse, *ctx.calls[0][2:], ctx.scale))
        for i, j, *how in ctx.calls[1:]:
            parts = flash_backward(grad[i], q[i], k[j], v[j], out[i], lse[:, i].contiguous(), *how, ctx.scale)
            for total, where, part in zip((dq, dk, dv), (i, j, j), parts):
                total[where] += part        # an index names each place once
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


@functools.cache
def _kernels(hopper=True):
    """(forward, backward): FlashAttention 4 on Hopper, which vLLM brings along, else torch's own FlashAttention 2 (half as fast there).
    Both take q [n, H, D] and (cu_q, cu_k, max_q, max_k, causal, scale); forward returns out [n, H, D] and lse [H, n]."""
    if hopper and torch.cuda.get_device_capability()[0] == 9:
        try:
            from vllm.vllm_flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
        except Exception as e:      # its compiler is a package of its own, and fails in many ways
            tqdm.write(f"attention: FlashAttention 2; vLLM's FlashAttention 4 does not load ({type(e).__name__}: {str(e)[:100]})")
        else:
            how = lambda cu_q, cu_k, max_q, max_k, causal, scale: dict(
                cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, causal=causal, softmax_scale=scale)
            return (lambda q, k, v, *args: _flash_attn_fwd(q, k, v, return_lse=True, **how(*args))[:2],
                    lambda grad, q, k, v, out, lse, *args: _flash_attn_bwd(q, k, v, out, grad, lse, **how(*args)))
    unused = lambda q: (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))      # dropout's
    return (lambda q, k, v, *args: torch.ops.aten._flash_attention_forward(q, k, v, *args[:4], 0.0, args[4], False, scale=args[5])[:2],
            lambda grad, q, k, v, out, lse, *args: torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, lse, *args[:4], 0.0, args[4], *unused(q), scale=args[5]))


ALL_ATTENTION_FUNCTIONS.register("tree", _tree_attention)


def _head(hidden, weight, target, temperature, watch, vocab):
    """hidden [c, D] -> logp of target [c], entropy [c], whether target is the likeliest [c], p of the `watch` ids [c, W]."""
    # The leaf itself goes into linear: autocast then casts it once, a slice or a transpose of it for every chunk. Rows beyond
    # the tokenizer's tokens (Qwen's embedding has 271) are cut off afterwards: they are never sampled either.
    logits = F.linear(hidden, weight)[:, :vocab].float() / temperature          # [c, V]
    lse = logits.logsumexp(-1)                                                  # [c]
    chosen = logits.gather(1, target[:, None])[:, 0]                            # [c]
    with torch.no_grad():
        likeliest = chosen >= logits.amax(-1)
        p = (logits - lse[:, None]).exp_()                                      # [c, V]
        watched = p[:, watch or []]
        entropy = lse - p.mul_(logits).sum(-1)
    return chosen - lse, entropy, likeliest, watched


def packed_logprobs(model, row, temperature=1.0, watch=None):
    """(logp [K], entropy [K]) at the row's trained positions, in the order of row.trained. With `watch` (a list of ids) also
    whether the token is the likeliest one [K] and the probabilities of those ids there [K, len(watch)]. The head runs on those positions only, in checkpointed chunks:
    [T, vocabulary] never exists, and a plain loop over chunks would keep every chunk for the backward (NeMo-RL#4222)."""
    return getattr(model, "packed", functools.partial(_packed_logprobs, model))(row, temperature, watch)     # shard() sets `packed`


def _packed_logprobs(model, row, temperature, watch):
    device = next(model.parameters()).device
    row = row.to(device)
    if model.config._attn_implementation != "tree":
        model.set_attn_implementation("tree")
    hidden = model.model(input_ids=row.ids[None], position_ids=row.positions[None], attention_mask={"full_attention": None},
                         use_cache=False, row=row).last_hidden_state[0]      # [T, D]
    hidden, weight, vocab = hidden[row.source], model.lm_head.weight, getattr(model, "real_vocab", None)    # [K, D], [V, D]
    many = torch.is_grad_enabled() and len(row.target) > HEAD_CHUNK     # a single chunk needs no recomputation
    head = functools.partial(checkpoint, _head, use_reentrant=False) if many else _head
    parts = [head(h, weight, t, temperature, watch, vocab) for h, t in zip(hidden.split(HEAD_CHUNK), row.target.split(HEAD_CHUNK))]
    logp, entropy, likeliest, watched = (torch.cat(x) for x in zip(*parts))
    return (logp, entropy) if watch is None else (logp, entropy, likeliest, watched)


# --- the learner ------------------------------------------------------------------------------------------------------

@dataclass
class Learner:
    """What training changes. fp32 weights: a learning rate of 1e-6 vanishes in bf16."""
    model: torch.nn.Module
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer = None
    reference: torch.nn.Module = None       # frozen; None without KL
    skipped: int = 0                        # updates in a row that were not finite
    shard: object = None                    # how a model is sharded: shard() with its settings; None = it is in one piece

    @property
    def device(self):
        """Where the model computes. Weights may lie elsewhere (--offload_optimizer), buffers do not."""
        return next(self.model.buffers()).device

    def autocast(self):
        """bf16 on CUDA. Open it around several rows: the weights are then cast once, not once per row."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext()


def make_learner(path, tokenizer=None, checkpointing="full", compile=False, report_to="", out="", fsdp=False, offload=False):
    accelerator = Accelerator(log_with=report_to or None, project_dir=out or None)
    how = functools.partial(shard, device=accelerator.device, offload=offload) if fsdp or offload else None
    model = load_model(path, torch.float32, "cpu" if how else accelerator.device).train()
    model.set_attn_implementation("tree")
    model.real_vocab = len(tokenizer) if tokenizer else None
    save_memory(model, checkpointing)
    if compile:
        compile_layers(model)
    if how:
        how(model)
    return Learner(model, accelerator, shard=how)


def save_memory(model, checkpointing):
    """What the backward recomputes: "full" each layer, "mlp" its MLP (two thirds of what a layer keeps; attention runs once), "none"."""
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpointing == "mlp":
        class RecomputedMLP(type(model.model.layers[0].mlp)):       # not a function per layer: compiled, that would be a graph per layer
            def forward(self, x):
                return checkpoint(super().forward, x, use_reentrant=False)

        for layer in model.model.layers:
            layer.mlp.__class__ = RecomputedMLP


def compile_layers(model):
    """In place, so that names in checkpoints stay; attention stays eager. One graph serves all layers and row lengths."""
    for module in (*model.model.layers, model.model.norm):
        module.compile(dynamic=True)


def shard(model, device, offload=False):
    """FSDP2 in place: a rank keeps its part of the fp32 weights, their gradients and Adam's moments, with `offload` on the host. A
    layer's weights are gathered on `device` (CUDA: in bf16) while it runs, embedding and head during the whole packed forward."""
    cuda = device.type == "cuda"
    if not torch.distributed.is_initialized():      # one process. Nothing on the host is ever summed, so that vLLM's group will do, too
        torch.distributed.init_process_group("nccl" if cuda else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    how = {"mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)), "reshard_after_forward": True}   # the root, too: else
    if cuda:                                        # its weights of before a step would still be there after a forward without gradient
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=cuda)
    for module in (*model.model.layers, model):
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)      # the sum over the ranks, not their mean: losses are divided before
        module.set_force_sum_reduction_for_comms(True)      # else it is a kind of sum that gloo does not have
    model.get_input_embeddings().register_forward_hook(lambda module, ids, out: out.float())    # what layers add up stays fp32, as under autocast
    model.packed = functools.partial(_packed_logprobs, model)
    register_fsdp_forward_method(model, "packed")


def whole(x):
    """A sharded tensor in one piece, for which every rank must ask; any other tensor as it is."""
    if not isinstance(x, DTensor):
        return x
    x = x.detach()
    return x.to_local() if x.device_mesh.size() == 1 else x.to(x.device_mesh.device_type).full_tensor()


def like(x, p):
    """A whole tensor sharded as `p` is, from the copy that each rank has."""
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None).to(p.device) if isinstance(p, DTensor) else x


def collect(learner, named):
    """{name: whole tensor on the host} on the main process, {} elsewhere; every rank must call it."""
    parts, main = ((name, whole(x)) for name, x in named), learner.accelerator.is_main_process
    return {name: x.cpu() for name, x in parts if main}


def full_weights(learner):
    """save_pretrained's state_dict: None (the model's own) unless it is sharded, then as collect."""
    return collect(learner, learner.model.named_parameters()) if learner.shard else None


def even(learner, rows):
    """Sharded ranks gather weights together: one with fewer rows gets empty ones, or the others would wait for it. Nothing is trained
    in an empty row, so its loss and its gradients are exactly 0."""
    if not learner.shard:
        return rows
    zero, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return rows + [Row(zero, zero, [(0, 1, ())], [], none, none)] * (max(gather_object([len(rows)])) - len(rows))


def set_optimizer(learner, lr, betas=(0.9, 0.999), weight_decay=0.01):
    """A new AdamW: the paper starts each phase with an empty one."""
    fused = learner.device.type == "cuda"
    learner.optimizer = torch.optim.AdamW(learner.model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)


def set_reference(learner, path):
    """The weights in `path` as the frozen KL reference, in the policy's own precision: KL at the start is exactly 0."""
    # It keeps requires_grad, though it only ever runs without gradient: autocast caches its casts only then.
    learner.reference = load_model(path, torch.float32, "cpu" if learner.shard else learner.device).eval()
    learner.reference.set_attn_implementation("tree")
    learner.reference.real_vocab = learner.model.real_vocab
    if learner.shard:
        learner.shard(learner.reference)


def check_memory(learner, engine, config):
    """ValueError in one line if a full row does not fit beside the engine: now, not hours later. On CUDA it is tried."""
    n, advice = config.tokens_per_row, f"one packed row of {config.tokens_per_row} tokens does not fit into memory: lower --tokens_per_row or --kv_gib"
    if learner.device.type != "cuda":
        c = learner.model.config
        need = n * c.num_hidden_layers * (12 * c.hidden_size + 3 * c.intermediate_size) * 4        # bytes of activations kept
        if need > psutil.virtual_memory().available:
            raise ValueError(f"{advice} (needs about {need / 2**30:.0f} GiB)")
        return
    if config.sleep and hasattr(engine, "sleep"):
        engine.sleep()
    trial = argparse.Namespace(ids=torch.randint(0, 1000, (n,)).tolist(), mask=[0] * (n - n // 4) + [1] * (n // 4), prompt_len=n - n // 4)
    try:
        with learner.autocast():
            packed_logprobs(learner.model, pack([trial], n)[0])[0].mean().backward()
    except torch.OutOfMemoryError as e:
        raise ValueError(f"{advice} ({str(e).splitlines()[0][:150]})") from None
    finally:
        learner.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if config.sleep and hasattr(engine, "sleep"):
            engine.wake()


def across_ranks(learner, sums):
    """Sum a dict of numbers over the processes."""
    keys = sorted(sums)
    values = torch.tensor([float(sums[k]) for k in keys], dtype=torch.float64 if learner.device.type == "cpu" else torch.float32)
    return dict(zip(keys, learner.accelerator.reduce(values.to(learner.device), "sum").tolist()))


def push(learner, engine):
    """Hand the weights to the engine and prove that it holds them: an update that never arrives looks like a flat reward
    (trl#5312). The engine's cached prefixes are dropped with it."""
    named = lambda: ((n, whole(p).to(learner.device)) for n, p in learner.model.named_parameters())     # sharded: one whole tensor at a time
    engine.load_weights(named())
    if hasattr(engine, "checksum"):
        theirs, dtype = engine.checksum(), torch.bfloat16 if learner.device.type == "cuda" else None
        ours = weight_sums((p for _, p in named()), dtype)
        if any(abs(a - b) > 1e-6 * ours[1] for a, b in zip(ours, theirs)):
            raise RuntimeError(f"the engine's weights are not the trainer's after a push: sums {theirs} instead of {ours}")


def optimizer_step(learner, clip_norm, names=()):
    """Sum the gradient over the ranks, clip, step. A gradient that is not finite changes nothing and is counted; the third
    in a row stops the run and says which trajectories (`names`) were in it. Returns (gradient norm, stepped)."""
    params = [p for p in learner.model.parameters() if p.requires_grad]
    if learner.shard:       # summed already; by hand, since clip_grad_norm_ would sum on the host where the gradients lie there
        parts = [p.grad.to_local() for p in params]
        norm = across_ranks(learner, {"square": float(torch.nn.utils.get_total_norm(parts)) ** 2})["square"] ** 0.5
        torch._foreach_mul_(parts, min(1.0, clip_norm / (norm + 1e-6)))
    else:
        for p in params if learner.accelerator.num_processes > 1 else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(p.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(params, clip_norm))
    if finite := math.isfinite(norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    learner.skipped = 0 if finite else learner.skipped + 1
    if learner.skipped >= 3:
        raise FloatingPointError(f"three gradients in a row were not finite; the last came from {', '.join(sorted(set(names)))}")
    return norm, finite


# --- one update -------------------------------------------------------------------------------------------------------

def token_logprobs(learner, rows, temperature):
    """{(trajectory, position): logp} under the current policy, without gradient."""
    with torch.no_grad(), learner.autocast():
        return {key: x for row in even(learner, rows) for key, x in zip(row.trained, packed_logprobs(learner.model, row, temperature)[0].tolist())}


def share(learner, trajectories, tokens_per_row):
    """Places of this rank's part of `trajectories`, which every rank holds: their rows, the longest first, each to the rank
    with the fewest tokens so far. So no rank waits for the one whose tasks have the longest dialogues."""
    world, mine = learner.accelerator.num_processes, []
    tokens = sum(len(row.ids) for row in pack(trajectories, 10**12))
    loads = [0] * world
    for row in sorted(pack(trajectories, min(tokens_per_row, -(-tokens // world))), key=lambda row: -len(row.ids)):
        rank = loads.index(min(loads))
        loads[rank] += len(row.ids)
        if rank == learner.accelerator.process_index:
            mine += {i for i, _ in row.trained}
    return sorted(mine)


def update(learner, trajectories, adv, config, watch=None, progress=False):
    """The updates of one GRPO step: adv[i] belongs to trajectories[i]. Returns the step's metrics.

    Mini-batches of `config.mini_batch` groups; in each, groups whose advantages are all 0 are dropped, the rest packed;
    the loss is divided by the trained tokens that are left, over all ranks. A mini-batch without any is skipped: weights
    and optimizer state stay bit for bit as they were. Old log-probabilities are those before the step's first update."""
    groups = collections.defaultdict(list)
    for t, a in zip(trajectories, adv):
        groups[t.group].append((t, float(a)))
    size = max(config.mini_batch // learner.accelerator.num_processes, 1)
    batches = [list(groups.values())[k: k + size] for k in range(0, len(groups), size)]
    kept = [[(t, a) for g in batch if any(a for _, a in g) for t, a in g] for batch in batches]
    if learner.accelerator.num_processes > 1:       # who played a group need not be the one who trains on it
        kept = [gather_object(pairs) for pairs in kept]
        kept = [[pairs[i] for i in share(learner, [t for t, _ in pairs], config.tokens_per_row)] for pairs in kept]
    packed = [pack([t for t, _ in pairs], config.tokens_per_row) for pairs in kept]
    # Before the first update the current policy is the old one; only later mini-batches need their own forward.
    old = [None] + [token_logprobs(learner, rows, config.temperature) for rows in packed[1:]]
    sums, norms, updates = collections.Counter(), [], 0
    bar = tqdm(total=sum(map(len, packed)), desc="update", leave=False, disable=not progress, dynamic_ncols=True)
    for pairs, rows, old_logps in zip(kept, packed, old):
        count = across_ranks(learner, {"tokens": sum(len(r.trained) for r in rows)})["tokens"]
        if not count:
            continue
        try:
            more = _accumulate(learner, rows, pairs, old_logps, count, config, watch, bar)
        except torch.OutOfMemoryError:      # once more from the same weights, with smaller rows
            if learner.shard:       # not in the middle of a gather
                raise
            learner.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            tqdm.write(f"out of memory in the update: this mini-batch again with rows of {config.tokens_per_row // 2} tokens")
            more = _accumulate(learner, pack([t for t, _ in pairs], config.tokens_per_row // 2), pairs, old_logps, count, config, watch, bar)
        sums.update(more)
        norm, stepped = optimizer_step(learner, config.clip_norm, [t.task_id for t, _ in pairs])
        norms.append(norm)
        updates += stepped
    bar.close()
    sums.update({"groups": len(groups), "kept": sum(any(a for _, a in g) for g in groups.values()),
                 "row_tokens": sum(len(r.ids) for rows in packed for r in rows), "rows": sum(map(len, packed)),
                 "plain_tokens": sum(len(t.ids) for pairs in kept for t, _ in pairs)})
    sums = across_ranks(learner, {k: sums[k] for k in SUMS + [s for w in watch or () for s in _slot_names(w)]})
    return _update_metrics(sums, norms, updates, watch)


SUMS = ["tokens", "pg", "kl", "clipped", "ratio", "entropy", "gap", "own", "groups", "kept", "row_tokens", "rows", "plain_tokens", "kl_control",
        "pg_control", "control_tokens", *(f"slot/{s}" for s in SLOTS)]


def _slot_names(name):
    return [f"control/{slot}/{name}" for slot in SLOTS]


def _accumulate(learner, rows, pairs, old_logps, count, config, watch, bar):
    """Backward over the rows of one mini-batch; `count` is its number of trained tokens over all ranks. Returns the sums."""
    sums = collections.Counter()
    with learner.autocast():
        for row in even(learner, rows):
            old_logp = None if old_logps is None else torch.tensor([old_logps[key] for key in row.trained], device=learner.device)     # [K]
            loss, more = _row_loss(learner, row, pairs, old_logp, config, watch)
            (loss / count).backward()
            sums.update(more)
            bar.update()
    return sums


def _row_loss(learner, row, pairs, old_logp, config, watch):
    """(loss summed over the row's tokens, sums for the metrics)."""
    device = learner.device
    logp, entropy, _, watched = packed_logprobs(learner.model, row, config.temperature, list((watch or {}).values()))     # [K]
    old_logp = logp.detach() if old_logp is None else old_logp
    ref_logp = None
    if config.kl_coef and learner.reference is not None:
        with torch.no_grad():
            ref_logp = packed_logprobs(learner.reference, row, config.temperature)[0]
    of = [pairs[i] for i, _ in row.trained]
    adv = torch.tensor([a for _, a in of], device=device)                                                               # [K]
    engine_logp = torch.tensor([t.logp[p] for (t, _), (_, p) in zip(of, row.trained)], device=device)                   # [K]
    source = {s: torch.tensor([t.source == s for t, _ in of], device=device, dtype=torch.bool) for s in ("policy", "hint", "demo")}       # [K] each
    importance = torch.exp((old_logp - engine_logp).clamp(-20, 20))
    weight = torch.ones_like(adv)
    if config.tis:
        weight = torch.where(source["policy"], importance.clamp(max=config.tis), weight)
    if config.hint_correction:
        weight = torch.where(source["hint"], importance.clamp(max=2.0), weight)
    loss, sums = policy_loss(logp, old_logp, adv, ref_logp, clip_low=config.clip_low, clip_high=config.clip_high,
                             dual_clip=config.dual_clip, kl_coef=config.kl_coef, weight=weight,
                             shaped=source["demo"] if config.ops_weight == "luffy" else None,
                             control=torch.isin(row.target.to(device), torch.tensor(list((watch or {}).values()), device=device, dtype=torch.long)))
    gap = (old_logp - engine_logp).abs() * source["policy"]     # demonstrations and hinted samples have another context
    sums |= {"entropy": entropy.sum(), "gap": gap.sum(), "own": source["policy"].sum()}
    slots = torch.tensor(protocol_slots(row.trained, [t for t, _ in pairs], watch or {}), device=device, dtype=torch.bool)  # [K, 4]
    for slot, here in zip(SLOTS, slots.T):
        sums[f"slot/{slot}"] = here.sum()
        sums |= {f"control/{slot}/{name}": mass for name, mass in zip(watch or (), watched[here].sum(0))}
    sums = dict(zip(sums, torch.stack([x.float() for x in sums.values()]).tolist()))    # one wait for the GPU per row, not one per number
    return loss, sums | {"tokens": len(row.trained)}


def _update_metrics(sums, norms, updates, watch):
    tokens = max(sums["tokens"], 1)
    metrics = {"updates": updates, "updates_skipped": len(norms) - updates, "grad_norm": sum(norms) / len(norms) if norms else 0.0,
               "groups_kept": int(sums["kept"]), "groups_flat": int(sums["groups"] - sums["kept"]), "trained_tokens": int(sums["tokens"]),
               "rows": int(sums["rows"]), "row_tokens": int(sums["row_tokens"]), "tokens_saved": 1 - sums["row_tokens"] / max(sums["plain_tokens"], 1)}
    if not sums["tokens"]:
        return metrics      # no number is better than a zero that was not measured
    for name, key in (("pg_loss", "pg"), ("kl", "kl"), ("clip_share", "clipped"), ("ratio", "ratio"), ("entropy", "entropy")):
        metrics[name] = sums[key] / tokens
    metrics["engine_gap"] = sums["gap"] / max(sums["own"], 1)
    control = max(sums["control_tokens"], 1)
    metrics |= {"kl_control": sums["kl_control"] / control, "kl_rest": (sums["kl"] - sums["kl_control"]) / max(tokens - control, 1),
                "pg_control": sums["pg_control"] / control, "pg_rest": (sums["pg"] - sums["pg_control"]) / max(tokens - control, 1)}
    for slot in SLOTS:
        for name in watch or () if sums[f"slot/{slot}"] else ():
            metrics[f"control/{slot}/{name}"] = sums[f"control/{slot}/{name}"] / sums[f"slot/{slot}"]
    return metrics


# --- one step ---------------------------------------------------------------------------------------------------------

def task_order(n_tasks, per_step, step, seed):
    """Indices of step `step`'s tasks: shuffled epochs laid end to end, a pure function of its arguments (so a resumed run
    sees what the undisturbed one sees). No task twice in a step as long as per_step divides n_tasks."""
    epoch = functools.cache(lambda e: random.Random(f"{seed}/{e}").sample(range(n_tasks), n_tasks))
    return [epoch(k // n_tasks)[k % n_tasks] for k in range(step * per_step, (step + 1) * per_step)]


def play(learner, engine, tokenizer, tasks, step, config, signal):
    """n episodes of each task of this rank's share -> (trajectories, adv, stats); adv[i] is 0 where infra_error is set.

    `signal.demo(task)` is a trajectory that takes the first place of the group (OPS); `signal.hint(task, k)` a text that
    sample k sees at the end of its system message (HBG); `signal.fault(trajectory)` may damage what training sees."""
    rank, world = learner.accelerator.process_index, learner.accelerator.num_processes
    share, glue, stats, start = tasks[rank::world], chat_glue(tokenizer, config.think), {}, time.perf_counter()
    engine.temperature = config.temperature
    engine.seed = random.Random(f"{config.seed}/{step}/{rank}").randrange(2**31)
    demos = [[signal.demo(t)] if signal.demo else [] for t in share]
    envs = [BFCLEnv(t, decode_feedback=config.decode_feedback, wipe_each_turn="state_reset" in signal.faults,
                    hint=signal.hint(t, k) if signal.hint else "") for t, d in zip(share, demos) for k in range(config.n - len(d))]
    sampled = iter(rollout(
        engine, tokenizer, envs, max_generations=config.max_generations, max_prompt=config.max_prompt, max_response=config.max_response,
        max_action=config.max_action, max_observation=config.max_observation, think=config.think,
        faults=signal.faults, stats=stats, desc="rollout" if rank == 0 else None))
    trajectories, adv = [], []
    for g, (task, demo) in enumerate(zip(share, demos)):
        group = demo + [next(sampled) for _ in range(config.n - len(demo))]
        whole = [t for t in group if not t.infra_error]
        rewards = torch.tensor([[rw.training_reward(t.reward, t.finish, config.reward) for t in whole]])     # [1, n]
        values = iter(group_advantages(rewards)[0].tolist() if whole else ())
        for t in group:
            t.group = g
            if t.source == "hint":
                strip_hint(t, task, glue)
            if signal.fault and t.source != "demo":
                signal.fault(t)
            trajectories.append(t)
            adv.append(0.0 if t.infra_error else next(values))
    stats["rollout_s"] = time.perf_counter() - start
    return trajectories, adv, stats


def rollout_metrics(learner, trajectories, config):
    """reward.count as means per episode and per message, over all ranks."""
    c = rw.count(trajectories, config.reward)
    fixed = ["infra", "n", "reward", "success/official", "success/strict", "success/per_turn", "response_tokens", "sampled_tokens", "messages",
             "calls", "refused_calls", "hinted", "hinted_success"]
    fixed += [f"feedback/{f}" for f in ("malformed", "unclosed", "unknown", "held_out", "not_executed")]
    fixed += [f"finish/{f}" for f in ("done", "length", "max_steps", "max_generations", "max_response", "prompt")]
    fixed += [f"structure/{s}" for s in ("call", "response", "polluted", "collapsed", "malformed", "repeated", "cut")]
    turns = [f"turn {k}/{s}" for k in range(7) for s in ("call", "response", "polluted", "collapsed")]
    total = across_ranks(learner, {k: c[k] for k in fixed + turns})
    n, messages = max(total["n"], 1), max(total["messages"], 1)
    by_turn = [[total.pop(f"turn {k}/{s}") for s in ("call", "response", "polluted", "collapsed")] for k in range(7)]
    means = {k: int(v) if k in ("infra", "n", "hinted", "hinted_success") else v / (messages if k.startswith("structure/") else n) for k, v in total.items()}
    return means | {"structure_by_turn": [[round(x / sum(counts), 4) for x in counts] for counts in by_turn if sum(counts)]}


def checklist(learner, trajectories, config, watch):
    """The step-0 checklist: numbers that must be right before the first update. Prints PASS or FAIL, returns a dict."""
    groups = [t for t in trajectories if not t.infra_error and any(t.mask) and t.source == "policy"][: 2 * config.n]
    rows = pack(groups, config.tokens_per_row)
    exact = learner.device.type == "cpu"
    gaps, kls, masses = [], [], []
    with torch.no_grad(), learner.autocast():
        for row in even(learner, rows):
            logp, _, _, watched = packed_logprobs(learner.model, row, config.temperature, list(watch.values()))
            gaps.append(logp.cpu() - torch.tensor([groups[i].logp[p] for i, p in row.trained]))
            if learner.reference is not None and config.kl_coef:
                d = packed_logprobs(learner.reference, row, config.temperature)[0] - logp
                kls.append((d.exp() - d - 1).cpu())
            first = torch.tensor([s[0] for s in protocol_slots(row.trained, groups, watch)], device=watched.device, dtype=torch.bool)
            masses.append(watched[first].cpu())
    gaps, kls, masses = ([x for x in parts if len(x)] for parts in (gaps, kls, masses))     # not those of empty rows
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    share = sum(sum(t.mask) for t in groups) / max(sum(len(t.ids) for t in groups), 1)
    mass = dict(zip(watch, torch.cat(masses).mean(0).tolist())) if masses else {}
    values = {"mean |engine - trainer|": (float(gap.abs().mean()), gap.abs().mean() < (1e-3 if exact else 0.02)),
              "mean importance ratio": (float(gap.exp().mean()), abs(float(gap.exp().mean()) - 1) < (1e-3 if exact else 0.02)),
              "trained-token share": (share, 0 < share < 0.5)}
    if kls:
        values["KL to the reference"] = (float(torch.cat(kls).mean()), float(torch.cat(kls).mean()) < 1e-6)
    if "<|im_end|>" in mass:
        values["P(<|im_end|>) at message start"] = (mass["<|im_end|>"], mass["<|im_end|>"] < 0.05)
    if learner.accelerator.is_main_process:
        tqdm.write("step-0 checklist: " + "; ".join(f"{k} {v:.3g} {'PASS' if ok else 'FAIL'}" for k, (v, ok) in values.items()))
    return {k: {"value": v, "pass": bool(ok)} for k, (v, ok) in values.items()}


@dataclass
class Signal:
    """What a synchronous signal adds to a group, and the faults that are switched on; by default nothing. See play()."""
    demo: object = None
    hint: object = None
    fault: object = None
    faults: tuple = ()


def grpo_step(learner, engine, tokenizer, tasks, step, step_in_phase, config, signal=Signal()):
    """One whole step: rollout, update, push. Returns (metrics, trajectories of this rank).

    After a failure of the engine, or out of memory, there is a second attempt from the same state, with rows of half the tokens.
    Not once a weight may have moved: that would be another step. Not with several ranks: the others wait for a sum. Nor sharded: weights may be half gathered."""
    moved, skipped = [], learner.skipped
    watching = learner.optimizer.register_step_pre_hook(lambda *_: moved.append(True))
    try:
        return _grpo_step(learner, engine, tokenizer, tasks, step, step_in_phase, config, signal)
    except Exception as e:
        if moved or learner.accelerator.num_processes > 1 or learner.shard or isinstance(e, FloatingPointError) or not hasattr(engine, "abort"):
            raise
        tqdm.write(f"{traceback.format_exc()}step {step} failed: once more, with rows of {config.tokens_per_row // 2} tokens")
    finally:
        watching.remove()
    # Not inside the except: the exception keeps the frames, and they keep the memory of the failed attempt.
    learner.optimizer.zero_grad(set_to_none=True)
    learner.skipped = skipped
    if learner.device.type == "cuda":
        torch.cuda.empty_cache()
    engine.abort()
    push(learner, engine)
    config = dataclasses.replace(config, tokens_per_row=max(config.tokens_per_row // 2, 1))
    metrics, trajectories = _grpo_step(learner, engine, tokenizer, tasks, step, step_in_phase, config, signal)
    return metrics | {"retried": 1}, trajectories


def _grpo_step(learner, engine, tokenizer, tasks, step, step_in_phase, config, signal):
    watch = watch_ids(tokenizer)
    trajectories, adv, stats = play(learner, engine, tokenizer, tasks, step, config, signal)
    metrics = rollout_metrics(learner, trajectories, config)
    if step_in_phase == 0:
        metrics["checklist"] = checklist(learner, trajectories, config, watch)
    lr = config.lr * min(1.0, (step_in_phase + 1) / max(config.warmup, 1))     # once a step, not once an update
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    if config.sleep and hasattr(engine, "sleep"):
        engine.sleep()
    start = time.perf_counter()
    metrics |= update(learner, trajectories, adv, config, watch, progress=learner.accelerator.is_main_process) | {"lr": lr}
    stats["update_s"] = time.perf_counter() - start
    start = time.perf_counter()
    if config.sleep and hasattr(engine, "sleep"):
        torch.cuda.empty_cache()
        engine.wake()
    push(learner, engine)       # also without an update: each step starts without cached keys, so a resumed run equals an undisturbed one
    stats["push_s"] = time.perf_counter() - start
    return metrics | {f"time/{k}" if k.endswith("_s") else k: round(v, 4) for k, v in stats.items()}, trajectories


def rollouts_folder(config):
    """Where the trajectories go, "" for nowhere."""
    return "" if config.save_rollouts == "none" else config.save_rollouts or os.path.join(config.out, "rollouts")


def check_out(out):
    """ValueError if the folder `out` is none or holds a run or a model already: python grpo.py and sft.py continue nothing and overwrite nothing."""
    held = {"metrics.jsonl", "config.json", "model"} & set(os.listdir(out)) if os.path.isdir(out) else []
    if held:
        raise ValueError(f"{out} holds a run already ({min(held)}): delete it, or give another --out")
    os.makedirs(out, exist_ok=True)


def check_rollouts_folder(config):
    """A new run writes into no other run's trajectories: step 7 of the one and step 8 of the other would be read as one run."""
    if rollouts_folder(config):
        os.makedirs(os.path.dirname(rollouts_folder(config)) or ".", exist_ok=True)
    if os.path.isfile(rollouts_folder(config)):
        raise ValueError(f"--save_rollouts is a folder, {config.save_rollouts} is a file")
    if (folder := rollouts_folder(config)) and glob.glob(os.path.join(folder, "*.jsonl")):
        raise ValueError(f"{folder} holds trajectories already: delete them, or give another --{'save_rollouts' if config.save_rollouts else 'out'}")


def step_line(step, m):
    """The line a user watches."""
    kinds = "/".join(f"{100 * m['structure/' + s]:.0f}" for s in ("call", "response", "polluted", "collapsed"))
    trained = f"kl {m['kl']:.2e} entropy {m['entropy']:.3f} gap {m['engine_gap']:.1e}" if "kl" in m else "no group with mixed rewards"
    return (f"step {step}: reward {m['reward']:.3f} strict {m['success/strict']:.3f} | call/resp/poll/coll {kinds} | {trained} | kept {m['groups_kept']}/{m['groups_kept'] + m['groups_flat']} "
            f"| rollout {m['time/rollout_s']:.1f}s update {m['time/update_s']:.1f}s push {m['time/push_s']:.2f}s "
            f"env {100 * (m['time/env_s'] + m['time/reward_s']) / m['time/rollout_s']:.1f}%")


def check_config(config):
    """Refuse what would only be noticed hours later; ValueError with one line."""
    if config.top_p != 1.0:
        raise ValueError("--top_p must be 1 in training: the loss needs the distribution that was sampled from")
    check_numbers(config, "temperature clip_norm kv_gib steps prompts n mini_batch tokens_per_row max_prompt max_response max_action max_observation "
                          "max_generations sft_epochs ets_epochs sft_dialogues failed_window save_every")
    if config.n == 1 and getattr(config, "schedule", "") != "sft_only":
        raise ValueError("--n 1 learns nothing: the advantage of an episode is its distance to the others of its group")
    if config.dual_clip < 1:
        raise ValueError(f"--dual_clip must be at least 1, not {config.dual_clip}: below it cuts what is not clipped otherwise")
    if config.reward not in ("official", "strict", "per_turn"):
        raise ValueError(f"--reward is official, strict or per_turn, not {config.reward!r}")
    if config.engine not in ("auto", "vllm", "hf"):
        raise ValueError(f"--engine is vllm, hf or auto, not {config.engine!r}")
    if config.report_to and config.report_to not in ("tensorboard", "wandb", "trackio"):
        raise ValueError(f"--report_to is tensorboard, wandb or trackio, not {config.report_to!r}")
    if config.report_to and importlib.util.find_spec(config.report_to) is None:
        raise ValueError(f"--report_to {config.report_to}: pip install {config.report_to} first")     # accelerate would say nothing
    if config.ops_weight not in ("plain", "luffy"):
        raise ValueError(f"--ops_weight is plain or luffy, not {config.ops_weight!r}")
    if config.checkpointing not in ("full", "mlp", "none"):
        raise ValueError(f"--checkpointing is full, mlp or none, not {config.checkpointing!r}")
    if config.compile and (config.fsdp or config.offload_optimizer):
        raise ValueError(f"--compile does not go with --{'fsdp' if config.fsdp else 'offload_optimizer'}: compiled layers that gather weights have not been tried on a GPU")
    if config.save_rollouts.lower() in ("true", "false"):
        raise ValueError(f"--save_rollouts is a folder, or none, not {config.save_rollouts}")
    if config.decode_feedback not in ("none", "short", "error"):
        raise ValueError(f"--decode_feedback is none, short or error, not {config.decode_feedback!r}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if config.prompts % world or config.mini_batch % world:
        raise ValueError(f"--prompts {config.prompts} and --mini_batch {config.mini_batch} must be multiples of the {world} processes")


def train_tasks(config, split="train"):
    """The tasks a run trains on: all, or the `train_tasks` with the shortest system prompts (few tools, cheap rows)."""
    tasks = env_bfcl.load_tasks(split, tuple(config.categories.split(",")), short_docs=config.short_docs, skip_defective=config.skip_defective)
    if holdout := getattr(config, "holdout", ""):      # python sft.py has no such flag
        if holdout not in env_bfcl.BLOCKS:
            raise ValueError(f"--holdout is one of {', '.join(env_bfcl.BLOCKS)}, not {holdout!r}")
        tasks = [t for t in tasks if t.index not in env_bfcl.BLOCKS[holdout]]
    if config.train_tasks:
        tasks = sorted(tasks, key=lambda t: (len(env_bfcl.system_prompt(t)), env_bfcl.system_prompt(t), t.index))[: config.train_tasks]
    return tasks


def replay_files(config):
    paths = sorted(glob.glob(os.path.join(config.load_rollouts, "*.jsonl")))[: config.steps]
    if not paths:
        raise ValueError(f"no *.jsonl in {config.load_rollouts}")
    return paths


def replay(learner, tokenizer, config):
    """Yield (step, metrics) of updates on saved trajectories, at most --steps of them: the update studied without an engine."""
    paths = replay_files(config)
    for step, path in enumerate(paths):
        trajectories, rewards = load_trajectories(path), collections.defaultdict(list)
        for t in trajectories:
            if not t.infra_error:
                rewards[t.group].append(rw.training_reward(t.reward, t.finish, config.reward))
        values = {g: iter(group_advantages(torch.tensor([r]))[0].tolist()) for g, r in rewards.items()}
        adv = [0.0 if t.infra_error else next(values[t.group]) for t in trajectories]
        start = time.perf_counter()
        metrics = rollout_metrics(learner, trajectories, config) | update(learner, trajectories, adv, config, watch_ids(tokenizer), True)
        tqdm.write(f"{step + 1} of {len(paths)}, {os.path.basename(path)}: reward {metrics['reward']:.3f} | kept {metrics['groups_kept']}/{metrics['groups_kept'] + metrics['groups_flat']} | "
                   f"loss {metrics.get('pg_loss', 0):.2e} kl {metrics.get('kl', 0):.2e} entropy {metrics.get('entropy', 0):.3f} | update {time.perf_counter() - start:.1f}s")
        yield step, metrics


def main():
    config = parse_flags(GRPOConfig, description=__doc__.split("\n")[0])
    try:
        check_config(config)
        tasks = train_tasks(config)
        path = find_model(config.model, config.out)
        tokenizer = load_tokenizer(path)
        for file in replay_files(config) if config.load_rollouts else ():       # all of them, before the first update
            if bad := [t for t in load_trajectories(file) if t.ids and not 0 <= min(t.ids) <= max(t.ids) < len(tokenizer)]:
                raise ValueError(f"{file}: {bad[0].task_id} has token ids that this model's tokenizer does not know: trajectories of another model")
        check_out(config.out)
        if not config.load_rollouts:
            check_rollouts_folder(config)
        engine = None if config.load_rollouts else make_engine(
            config.engine, path, tokenizer, kv_gib=config.kv_gib, sleep=config.sleep, max_model_len=config.max_prompt + config.max_response)
        learner = make_learner(path, tokenizer, config.checkpointing, config.compile, fsdp=config.fsdp, offload=config.offload_optimizer)
        check_memory(learner, engine, config)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    set_optimizer(learner, config.lr, weight_decay=config.weight_decay)
    if config.kl_coef:
        set_reference(learner, path)

    by_id = {t.id: t for t in tasks}

    def play_on():
        for step in range(config.steps):
            batch = [tasks[i] for i in task_order(len(tasks), config.prompts, step, config.seed)]
            metrics, trajectories = grpo_step(learner, engine, tokenizer, batch, step, step, config)
            if folder := rollouts_folder(config):
                save_trajectories(os.path.join(folder, f"{step:06d}.{learner.accelerator.process_index}.jsonl"), trajectories, [by_id[t.task_id] for t in trajectories])
            tqdm.write(step_line(step, metrics))
            yield step, metrics

    with open(os.path.join(config.out, "metrics.jsonl"), "w") as log:
        log.write(json.dumps({"kind": "config", **dataclasses.asdict(config)}) + "\n")
        for step, metrics in replay(learner, tokenizer, config) if config.load_rollouts else play_on():
            log.write(json.dumps({"kind": "grpo", "step": step, **metrics}) + "\n")
            log.flush()
    weights = full_weights(learner)
    if learner.accelerator.is_main_process:
        learner.model.save_pretrained(os.path.join(config.out, "model"), state_dict=weights)
        tokenizer.save_pretrained(os.path.join(config.out, "model"))
        print(f"wrote {config.out}/metrics.jsonl and {config.out}/model")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: nothing but metrics.jsonl and trajectories is kept; interleave.py goes on where it was")
