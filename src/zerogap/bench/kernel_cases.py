"""Single operations as calls of ours and of stock torch. Runs inside the child.

A case is named by JSON values (kernels.py lists them); `build` turns it into functions to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from zerogap.bench.machine import one_dnn_linear
from zerogap.bench.serve import Channel, Watch
from zerogap.kernels import AttentionShape, RowBatch, Weight
from zerogap.kernels.aligned import AlignedKernels

Call = Callable[[], object]

PACKED_BELOW = 256  # rows: the engine's packed panels below, the learner's rows from here on
PAGE_SIZE = 32
BURST_S = 0.02  # calls of one side in a row, before the other's turn

KERNELS = AlignedKernels()


def serve_cases(channel: Channel) -> None:
    """A request is a case and `rounds`; the answer: {"times": {name of a call: [seconds of each round]}}."""
    torch.manual_seed(0)

    def run(rounds: int, **case: Any) -> dict[str, Any]:
        return {"times": measure(build(**case), rounds)}

    channel.serve(run)


def measure(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each, by turns: a burst of calls each, `rounds` times, after a warm-up."""
    repeats, watch = {}, Watch()
    for name, call in calls.items():
        call()
        repeats[name] = max(1, round(BURST_S / _seconds(call, 1, watch)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, repeats[name], watch))
    return times


def build(op: str, dtype: str, **sizes: int) -> dict[str, Call]:
    """Name -> call. "ours" is the aligned kernel, "oneDNN packed" no peer by default (see kernels.py)."""
    calls: dict[str, Call] = BUILDERS[op](getattr(torch, dtype), **sizes)
    return calls


def linear(dtype: torch.dtype, k: int, n: int, rows: int) -> dict[str, Call]:
    """x @ weight.T. fp32 has two stock kernels: F.linear is MKL's, oneDNN's is another operation."""
    x, w = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    weight = Weight(w)
    calls: dict[str, Call] = {"ours": lambda: KERNELS.linear(x, weight), "F.linear": lambda: F.linear(x, w)}
    if dtype == torch.float32:
        calls["oneDNN"] = lambda: one_dnn_linear(x, w)
    if rows < PACKED_BELOW:
        KERNELS.pack(weight)
        reordered = torch.ops.mkldnn._reorder_linear_weight(w, rows)
        calls["oneDNN packed"] = lambda: one_dnn_linear(x, reordered)
    return calls


def attention(dtype: torch.dtype, sequences: int, length: int, **heads: int) -> dict[str, Call]:
    """Packed causal attention of the learner."""
    shape = AttentionShape(**heads)
    qkv, split, rows = _sequences(dtype, sequences, length, shape)
    return {
        "ours": lambda: KERNELS.attention(qkv, rows, None, shape),
        "SDPA": lambda: _causal(split),
    }


def attention_backward(dtype: torch.dtype, sequences: int, length: int, **heads: int) -> dict[str, Call]:
    shape = AttentionShape(**heads)
    qkv, split, rows = _sequences(dtype, sequences, length, shape)
    leaf, leaves = qkv.requires_grad_(), [part.requires_grad_() for part in split]
    out = KERNELS.attention(leaf, rows, None, shape)
    stock_out = _causal(split)
    stock_dout = torch.randn_like(stock_out)
    dout = stock_dout.transpose(1, 2).reshape(out.shape)
    return {
        "ours": lambda: torch.autograd.grad(out, leaf, dout, retain_graph=True),
        "SDPA": lambda: torch.autograd.grad(stock_out, leaves, stock_dout, retain_graph=True),
    }


def decode_attention(dtype: torch.dtype, sequences: int, length: int, **heads: int) -> dict[str, Call]:
    """One row per sequence: ours on shuffled pages, SDPA on contiguous keys and values."""
    shape = AttentionShape(**heads)
    pages = length // PAGE_SIZE
    tables = torch.randperm(sequences * pages).view(sequences, pages).tolist()
    rows = RowBatch.paged([(length - 1, 1)] * sequences, tables, PAGE_SIZE)
    cache = KERNELS.new_cache(1, sequences * pages, PAGE_SIZE, shape, dtype)[0]
    cache.keys.normal_()
    cache.values.normal_()
    qkv = torch.randn(sequences, shape.qkv_size).to(dtype)
    queries = torch.randn(sequences, shape.q_heads, 1, shape.head_dim).to(dtype)
    keys, values = (torch.randn(sequences, shape.kv_heads, length, shape.head_dim).to(dtype) for _ in range(2))
    return {
        "ours": lambda: KERNELS.attention(qkv, rows, cache, shape),
        "SDPA": lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True),
    }


def logprobs(dtype: torch.dtype, k: int, n: int, rows: int) -> dict[str, Call]:
    """Head, log-softmax and gather; ours never holds the logits."""
    hidden, weight, targets = torch.randn(rows, k).to(dtype), Weight(torch.randn(n, k).to(dtype)), _targets(rows, n)
    calls: dict[str, Call] = {
        "ours": lambda: KERNELS.logprobs(hidden, weight, targets, 1.0, n),
        "F.linear": lambda: _gather(F.linear(hidden, weight.data), targets),
    }
    if dtype == torch.float32:
        calls["oneDNN"] = lambda: _gather(one_dnn_linear(hidden, weight.data), targets)
    return calls


def logprobs_backward(dtype: torch.dtype, k: int, n: int, rows: int) -> dict[str, Call]:
    hidden, w, targets = torch.randn(rows, k).to(dtype).requires_grad_(), torch.randn(n, k).to(dtype), _targets(rows, n)
    weight, leaf = Weight(w, trainable=True), w.clone().requires_grad_()
    assert weight.master is not None
    out = KERNELS.logprobs(hidden, weight, targets, 1.0, n)
    stock_out = _gather(F.linear(hidden, leaf), targets)
    leaves, stock_leaves, dout = [hidden, weight.master], [hidden, leaf], torch.randn_like(out)
    return {
        "ours": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "torch": lambda: torch.autograd.grad(stock_out, stock_leaves, dout[:, None], retain_graph=True),
    }


def rms_norm(dtype: torch.dtype, k: int, rows: int) -> dict[str, Call]:
    """With its residual addition."""
    x, residual, weight = torch.randn(rows, k).to(dtype), torch.zeros(rows, k, dtype=dtype), torch.ones(k, dtype=dtype)
    ours = Weight(weight)
    return {
        "ours": lambda: KERNELS.rms_norm(x, ours, 1e-5, residual),
        "F.rms_norm": lambda: F.rms_norm(residual + x, (k,), weight, 1e-5),
    }


def silu_mul(dtype: torch.dtype, k: int, rows: int) -> dict[str, Call]:
    gate_up = torch.randn(rows, 2 * k).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return {"ours": lambda: KERNELS.silu_mul(gate_up), "F.silu": lambda: F.silu(gate) * up}


def head_norm(dtype: torch.dtype, rows: int, **heads: int) -> dict[str, Call]:
    """QK-norm of fused rows; ours copies the values into its result, which stock torch is spared."""
    shape, eps = AttentionShape(**heads), 1e-6
    qkv = torch.randn(rows, shape.qkv_size).to(dtype)
    q, k, _ = _heads(qkv, shape)
    weight = torch.ones(shape.head_dim, dtype=dtype)
    ours = Weight(weight)
    return {
        "ours": lambda: KERNELS.head_norm(qkv, ours, ours, eps, shape),
        "F.rms_norm": lambda: [F.rms_norm(part, (shape.head_dim,), weight, eps) for part in (q, k)],
    }


BUILDERS: dict[str, Callable[..., dict[str, Call]]] = {
    "linear": linear,
    "attention": attention,
    "attention backward": attention_backward,
    "attention decode": decode_attention,
    "logprobs": logprobs,
    "logprobs backward": logprobs_backward,
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "head_norm": head_norm,
}


def _sequences(
    dtype: torch.dtype, sequences: int, length: int, shape: AttentionShape
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor], RowBatch]:
    """qkv rows, the same as [sequences, heads, length, head_dim] for SDPA, and the packed batch."""
    qkv = torch.randn(sequences * length, shape.qkv_size).to(dtype)
    q, k, v = (part.unflatten(0, (sequences, length)).transpose(1, 2).clone() for part in _heads(qkv, shape))
    return qkv, (q, k, v), RowBatch.pack([length] * sequences)


def _heads(qkv_TE: torch.Tensor, shape: AttentionShape) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, each a view [rows, heads, head_dim]."""
    return qkv_TE.unflatten(1, (-1, shape.head_dim)).split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)


def _causal(split: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)


def _targets(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows,))


def _gather(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    return logits_TV.float().log_softmax(-1).gather(1, targets_T[:, None])


def _seconds(call: Call, repeats: int, watch: Watch) -> float:
    watch.start()
    for _ in range(repeats):
        call()
    return watch.read()["seconds"] / repeats
