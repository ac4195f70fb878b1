"""Attention of a packed row on a GPU, one layer of the 1.5B shape: the ways to compute it, their errors and their times.

    python tools/bench_attention.py         # needs a GPU; measured on an H200: results/bench_attention_h200.txt

gather  each segment's keys copied behind each other, then torch's varlen_attn (FlashAttention 2)
tree    grpo.TreeAttention: keys read in place, partial softmaxes merged by their log-sum-exp; on torch's FlashAttention 2
        and, on Hopper, on the FlashAttention 4 kernels that vLLM brings along
"""
import functools
import inspect
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo     # before torch
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

H, HKV, D = 12, 2, 128


def plain(q, k, v, segments, scale):
    """SDPA with a T x T mask per segment: the meaning of a row."""
    out = torch.empty_like(q)
    for start, end, path in segments:
        kk, vv = (torch.cat([x[a:b] for a, b in path + ((start, end),)]) for x in (k, v))
        mask = torch.ones(end - start, len(kk), dtype=torch.bool, device=q.device).tril(len(kk) - (end - start))
        heads = lambda x: x.repeat_interleave(H // HKV, 1).transpose(0, 1)[None]
        out[start:end] = F.scaled_dot_product_attention(q[start:end].transpose(0, 1)[None], heads(kk), heads(vv), mask, scale=scale)[0].transpose(0, 1)
    return out


def forest(sizes):
    """[(prefix, [children])] with children ints or the like -> segments in the row's order."""
    segments, at = [], 0

    def grow(node, path):
        nonlocal at
        n, children = node if isinstance(node, tuple) else (node, [])
        segments.append((at, at + n, path))
        here, at = ((at, at + n),), at + n
        for child in children:
            grow(child, path + here)

    for node in sizes:
        grow(node, ())
    return segments


ROWS = {"one group, small": [(500, [130, 64, 1, 77])], "two levels, two trees, a loner": [(300, [(40, [33, 90, 128]), (65, [20, 21])]), 50, (128, [(7, [5, 6]), 3])],
        "5000 + 8 x 1550": [(5000, [1550] * 8)], "3500 + 4 x (150 + 8 x 500)": [(3500, [(150, [500] * 8)] * 4)]}


def gathered(q, k, v, segments):
    gather = torch.cat([torch.arange(a, b) for s, e, path in segments for a, b in path + ((s, e),)]).cuda()
    cu = lambda x: torch.tensor([0] + x).cumsum(0).to("cuda", torch.int32)
    n, m = [e - s for s, e, _ in segments], [sum(b - a for a, b in path) + e - s for s, e, path in segments]
    flag = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(q.contiguous(), k[gather], v[gather], cu(n), cu(m), max(n), max(m), scale=D**-0.5, window_size=(-1, 0), **flag)


def errors(attend, tensors, grad, exact):
    """Relative errors of out, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attend(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
    return got if exact is None else " ".join(f"{float((a.float() - b).norm() / b.norm()):.1e}" for a, b in zip(got, exact))


def milliseconds(attend, tensors, grad, backward):
    leaves = [t.detach().requires_grad_() for t in tensors]

    def once():
        out = attend(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, grad)
    for _ in range(3):
        once()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10):
        once()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / 10


def main():
    if not torch.cuda.is_available():
        sys.exit("error: needs a GPU")
    kernels = grpo._kernels
    for name, sizes in ROWS.items():
        segments = forest(sizes)
        T = segments[-1][1]
        tensors = [torch.randn(T, h, D, device="cuda", dtype=torch.bfloat16) for h in (H, HKV, HKV)]
        grad, calls = torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16), grpo.tree_calls(segments, "cuda")
        tree = lambda q, k, v: grpo.TreeAttention.apply(q, k, v, calls, D**-0.5)
        ways = {"gather": (lambda q, k, v: gathered(q, k, v, segments), True), "tree, FlashAttention 2": (tree, False), "tree, the default kernels": (tree, True)}
        pairs = sum((e - s) * sum(b - a for a, b in path) + (e - s) * (e - s + 1) // 2 for s, e, path in segments)
        small = T < 2000
        exact = errors(lambda q, k, v: plain(q, k, v, segments, D**-0.5), [t.float() for t in tensors], grad, None) if small else None
        if small:
            print(f"{name}: SDPA in bf16, relative errors of out, dq, dk, dv: {errors(lambda q, k, v: plain(q, k, v, segments, D**-0.5), tensors, grad, exact)}")
        for way, (attend, hopper) in ways.items():
            grpo._kernels = functools.partial(kernels, hopper)
            if small:
                print(f"{name}: {way}, relative errors: {errors(attend, tensors, grad, exact)}")
                continue
            for backward in (False, True):
                ms = milliseconds(attend, tensors, grad, backward)
                flop = 4 * H * D * pairs * (3.5 if backward else 1)
                print(f"{name}: {way}, {'forward + backward' if backward else 'forward'} {ms:.2f} ms, {flop / ms / 1e9:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
