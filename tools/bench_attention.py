"""Attention of a packed row without gathering keys: partial softmaxes merged by log-sum-exp, with an exact backward.

In the row's order (a node, then all that descends from it) the descendants of a node are one contiguous stretch. So a row
needs one causal call over the segments themselves, and per depth one non-causal call in which all descendants of a node
are ONE long query sequence and the node's tokens its keys. Keys are read in place; the gradient of a prompt's keys is
summed inside the kernel, in fp32.

Autograd through varlen_attn(return_aux=AuxRequest(lse=True)) does NOT work: its backward drops the gradient of lse without
a word (torch 2.11 and 2.13). It isn't needed: flash backward computes P = exp(S - lse) and dS = P (dP - rowsum(dO O)), so
given the MERGED output and lse, each partial call returns its exact share of dQ and the exact dK, dV of its keys.

    python tools/bench_attention.py         # CPU: exactness in float64; CUDA: also bf16 against SDPA in fp32, and times

Measured on an H200: results/bench_attention_h200.txt. grpo.py gathers the keys instead; results/LOG.md says why.
"""
import torch
import torch.nn.functional as F


# --- drop-in for grpo.py: _layout, _tree_attention's CUDA branch -------------------------------------------------------

def tree_layout(row, device):
    """The kernel calls of a row: [(queries, keys, cu_q, cu_k, max_q, max_k, causal)]; queries and keys are None (all), a
    slice or an index. The first call is every segment with itself."""
    segments, last, depths = row.segments, {}, {}
    for _, end, path in segments:
        last |= dict.fromkeys(path, end)        # in the row's order: the last one stays
    for start, end, path in segments:
        if (start, end) in last:
            depths.setdefault(len(path), []).append((end, last[start, end], start, end))

    def call(ranges, causal):       # ranges: [(first query, end, first key, end)]
        lengths = lambda a, b: torch.tensor([0] + [r[b] - r[a] for r in ranges])
        where = lambda a, b: slice(ranges[0][a], ranges[0][b]) if len(ranges) == 1 else torch.cat([torch.arange(r[a], r[b]) for r in ranges]).to(device)
        q, k = lengths(0, 1), lengths(2, 3)
        cumulative = lambda x: x.cumsum(0).to(device, torch.int32)
        # at least 2: with one query per sequence the kernel swaps heads and queries, and lse comes in another shape
        return where(0, 1), where(2, 3), cumulative(q), cumulative(k), max(int(q.max()), 2), int(k.max()), causal

    own = (None, None, *call([(s, e, s, e) for s, e, _ in segments], True)[2:])
    return [own] + [call(ranges, False) for _, ranges in sorted(depths.items())]


def flash(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    """q [n, H, D] -> out [n, H, D], lse [H, n]."""
    return torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)[:2]


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
    none = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)     # dropout's, unused
    return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, *none, scale=scale)


class TreeAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]; calls from tree_layout."""

    @staticmethod
    def forward(ctx, q, k, v, calls, scale):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
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
        grad = grad.contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)                  # partial sums meet in fp32
        dq, dk, dv = (x.to(wide) for x in flash_backward(grad, q, k, v, out, lse, *ctx.calls[0][2:], ctx.scale))
        for i, j, *how in ctx.calls[1:]:
            parts = flash_backward(grad[i], q[i], k[j], v[j], out[i], lse[:, i].contiguous(), *how, ctx.scale)
            for total, where, part in zip((dq, dk, dv), (i, j, j), parts):
                total[where] += part        # an index names each place once
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def tree_attention(module, query, key, value, attention_mask, scaling=None, layout=None, **kwargs):
    """As grpo._tree_attention's CUDA branch: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return TreeAttention.apply(q, k, v, layout, scaling)[None], None


# --- test ---------------------------------------------------------------------------------------------------------------

def slow(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    """flash() in plain operations, for float64 on a CPU."""
    out, lse = [], []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        s = _scores(q[a:b], k[c:d], causal, scale)
        lse.append(s.logsumexp(-1))
        out.append(torch.einsum("hqk,khd->qhd", (s - lse[-1][..., None]).exp(), _repeat(v[c:d], q)))
    return torch.cat(out), torch.cat(lse, 1)


def slow_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        p = (_scores(q[a:b], k[c:d], causal, scale) - lse[:, a:b, None]).exp()
        delta = (grad[a:b] * out[a:b]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", grad[a:b], _repeat(v[c:d], q)) - delta) * scale
        fold = lambda x: x.view(x.shape[0], k.shape[1], -1, x.shape[2]).sum(2)
        dq[a:b] = torch.einsum("hqk,khd->qhd", ds, _repeat(k[c:d], q))
        dk[c:d] = fold(torch.einsum("hqk,qhd->khd", ds, q[a:b]))
        dv[c:d] = fold(torch.einsum("hqk,qhd->khd", p, grad[a:b]))
    return dq, dk, dv


def _repeat(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q, k, causal, scale):
    s = torch.einsum("qhd,khd->hqk", q, _repeat(k, q)) * scale
    return s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1), float("-inf")) if causal else s


def plain(q, k, v, segments, scale):
    """SDPA with a T x T mask per segment: the meaning of a row."""
    out = torch.empty_like(q)
    for start, end, path in segments:
        kk, vv = (torch.cat([x[a:b] for a, b in path + ((start, end),)]) for x in (k, v))
        mask = torch.ones(end - start, len(kk), dtype=torch.bool, device=q.device).tril(len(kk) - (end - start))
        heads = lambda x: _repeat(x, q).transpose(0, 1)[None]
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


FORESTS = {"one group": [(500, [130, 64, 1, 77])], "two levels, two trees, a loner": [(300, [(40, [33, 90, 128]), (65, [20, 21])]), 50, (128, [(7, [5, 6]), 3])]}


def check(device, dtype, kernels=None):
    from types import SimpleNamespace
    global flash, flash_backward
    saved = flash, flash_backward
    if kernels:
        flash, flash_backward = kernels
    torch.manual_seed(0)
    for name, sizes in FORESTS.items():
        row = SimpleNamespace(segments=forest(sizes))
        T, H, Hkv, D = row.segments[-1][1], 12, 2, 128
        x = [torch.randn(T, h, D, device=device, dtype=dtype) for h in (H, Hkv, Hkv)]
        g = torch.randn(T, H, D, device=device, dtype=dtype)

        def run(attend, cast):
            leaves = [t.detach().to(cast).requires_grad_() for t in x]
            out = attend(*leaves)
            return [out.detach()] + list(torch.autograd.grad(out, leaves, g.to(cast)))

        exact = run(lambda q, k, v: plain(q, k, v, row.segments, D**-0.5), dtype if dtype == torch.float64 else torch.float32)
        ways = {"tree": lambda q, k, v: TreeAttention.apply(q, k, v, tree_layout(row, device), D**-0.5)}
        if dtype == torch.bfloat16:
            ways |= {"SDPA": lambda q, k, v: plain(q, k, v, row.segments, D**-0.5), "gather": lambda q, k, v: gathered(q, k, v, row, device)}
        for way, attend in ways.items():
            errors = [float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(run(attend, dtype), exact)]
            print(f"{name}, {dtype}: {way} relative error of out, dq, dk, dv: " + " ".join(f"{e:.1e}" for e in errors))
            assert max(errors) < (1e-12 if dtype == torch.float64 else 2e-2)
    flash, flash_backward = saved


def gathered(q, k, v, row, device):
    """What grpo.py does today: keys gathered once per segment."""
    import inspect
    from torch.nn.attention.varlen import varlen_attn
    gather = torch.cat([torch.arange(a, b) for s, e, path in row.segments for a, b in path + ((s, e),)]).to(device)
    cu = lambda x: torch.tensor([0] + x).cumsum(0).to(device, torch.int32)
    n, m = [e - s for s, e, _ in row.segments], [sum(b - a for a, b in path) + e - s for s, e, path in row.segments]
    flag = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(q.contiguous(), k[gather], v[gather], cu(n), cu(m), max(n), max(m), scale=q.shape[2]**-0.5, window_size=(-1, 0), **flag)


def times(device="cuda"):
    """One layer of the 1.5B shape: one group, prompt 5,000, 8 x 1,550; then 4 tasks x 8 below one system prompt."""
    from types import SimpleNamespace
    for name, sizes in {"5000 + 8 x 1550": [(5000, [1550] * 8)], "3500 + 4 x (150 + 8 x 500)": [(3500, [(150, [500] * 8)] * 4)]}.items():
        row = SimpleNamespace(segments=forest(sizes))
        T, D = row.segments[-1][1], 128
        q, k, v = (torch.randn(T, h, D, device=device, dtype=torch.bfloat16, requires_grad=True) for h in (12, 2, 2))
        g, calls = torch.randn_like(q), tree_layout(row, device)
        pairs = sum((e - s) * sum(b - a for a, b in path) + (e - s) * (e - s + 1) // 2 for s, e, path in row.segments)
        for way, attend in {"gather": lambda: gathered(q, k, v, row, device), "tree": lambda: TreeAttention.apply(q, k, v, calls, D**-0.5)}.items():
            for backward in (False, True):
                def once():
                    out = attend()
                    if backward:
                        torch.autograd.grad(out, (q, k, v), g)
                for _ in range(3):
                    once()
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                for _ in range(10):
                    once()
                b.record()
                torch.cuda.synchronize()
                ms = a.elapsed_time(b) / 10
                flop = 4 * 12 * D * pairs * (3.5 if backward else 1)
                print(f"{name}: {way} {'forward + backward' if backward else 'forward'} {ms:.2f} ms, {flop / ms / 1e9:.0f} TFLOP/s")


if __name__ == "__main__":
    check("cpu", torch.float64, (slow, slow_backward))
    if torch.cuda.is_available():
        check("cuda", torch.bfloat16)
        times()
        # torch's own hook (torch.nn.attention._fa4) is of no use here: it unpacks two results where newer kernels return
        # four, and torch 2.11's refuses the window that varlen_attn passes. The kernels themselves take what we have.
        import importlib
        for name in ("flash_attn.cute.interface", "vllm.vllm_flash_attn.cute.interface"):     # flash-attn-4, vllm >= 0.26
            try:
                fa4 = importlib.import_module(name)

                def flash(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
                    return fa4._flash_attn_fwd(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
                                               softmax_scale=scale, causal=causal, return_lse=True)[:2]

                def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
                    return fa4._flash_attn_bwd(q, k, v, out, grad, lse, softmax_scale=scale, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                                               max_seqlen_q=max_q, max_seqlen_k=max_k)[:3]

                print(f"FlashAttention 4 from {name}:")
                check("cuda", torch.bfloat16)
                times()
                break
            except Exception as e:
                print(f"FlashAttention 4 from {name}: {type(e).__name__}: {e}")
