"""Speed of the aligned kernels against stock torch in the same run: GEMM, attention, head, and per-call overhead.

Run alone on an idle core: OMP_NUM_THREADS=1 python benchmarks/kernels.py [linear attention head overhead]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from zerogap.kernels import AttentionShape, RowBatch, Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import dtype_code, load_best

KERNELS = AlignedKernels()
DTYPES = (torch.float32, torch.bfloat16)
SHAPE = AttentionShape(9, 3, 64)


def seconds(function: Callable[[], object], budget: float = 0.15) -> float:
    """Best time of a call within the budget, at least two calls."""
    function()
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < budget or best == float("inf"):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best


def linear_case(dtype: torch.dtype, k: int, n: int, m: int) -> None:
    weight = Weight(torch.randn(n, k).to(dtype))
    packed = Weight(weight.data)
    KERNELS.pack(packed)
    x, dy = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
    dx, dw = torch.empty_like(x), torch.empty(n, k)
    native, w, code = KERNELS.forward.native, weight.data, dtype_code(x)
    calls: dict[str, Callable[[], object]] = {
        "packed": lambda: KERNELS.linear(x, packed),
        "rows": lambda: KERNELS.linear(x, weight),
        "torch": lambda: F.linear(x, w),
    }
    if dtype is torch.float32:
        calls["onednn"] = lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    if m >= 256:
        calls["dX"] = lambda: native.linear_input_gradient(code, dy.data_ptr(), w.data_ptr(), dx.data_ptr(), m, n, k)
        calls["dW"] = lambda: native.linear_weight_gradient(code, dy.data_ptr(), x.data_ptr(), dw.data_ptr(), m, n, k)
    rates = "  ".join(f"{name} {2e-9 * m * n * k / seconds(call):.0f}" for name, call in calls.items())
    print(f"{str(dtype)[6:]:9} {k:4} x {n:4}  M={m:<5} {rates}")


def linear() -> None:
    print("\nlinear, GFLOP/s: packed / rows as they are / torch F.linear / oneDNN fp32; then dX, dW")
    for dtype in DTYPES:
        for k, n in ((576, 576), (1536, 576), (576, 3072)):
            for m in (1, 4, 8, 32, 256, 2048):
                linear_case(dtype, k, n, m)


def learner_attention(dtype: torch.dtype) -> None:
    rows = RowBatch.pack([512] * 8)
    leaf = torch.randn(8 * 512, SHAPE.qkv_size).to(dtype).requires_grad_()
    split = leaf.detach().view(8, 512, 15, 64).transpose(1, 2)
    leaves = [x.clone().requires_grad_() for x in (split[:, :9], split[:, 9:12], split[:, 12:])]

    def ours() -> torch.Tensor:
        return KERNELS.attention(leaf, rows, None, SHAPE)

    def stock() -> torch.Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    forward = [1e3 * seconds(ours), 1e3 * seconds(stock)]
    out, stock_out = ours(), stock()
    dout, stock_dout = torch.randn_like(out), torch.randn_like(stock_out)
    backward = [
        1e3 * seconds(lambda: torch.autograd.grad(out, leaf, dout, retain_graph=True)),
        1e3 * seconds(lambda: torch.autograd.grad(stock_out, leaves, stock_dout, retain_graph=True)),
    ]
    print(f"{str(dtype)[6:]:9} learner 8 x 512 forward   {forward[0]:.2f} / {forward[1]:.2f}")
    print(f"{str(dtype)[6:]:9} learner 8 x 512 backward  {backward[0]:.2f} / {backward[1]:.2f}")


def decode_attention(dtype: torch.dtype, page_size: int, context: int = 512, batch: int = 32) -> None:
    pages = context // page_size
    tables = torch.randperm(batch * pages).view(batch, pages).tolist()
    step = RowBatch.paged([(context - 1, 1)] * batch, tables, page_size)
    cache = KERNELS.new_cache(1, batch * pages, page_size, SHAPE, dtype)[0]
    cache.keys.normal_()
    cache.values.normal_()
    qkv = torch.randn(batch, SHAPE.qkv_size).to(dtype)
    keys, values = (torch.randn(batch, 3, context, 64).to(dtype) for _ in range(2))
    queries = torch.randn(batch, 9, 1, 64).to(dtype)
    ours = 1e3 * seconds(lambda: KERNELS.attention(qkv, step, cache, SHAPE))
    stock = 1e3 * seconds(lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True))
    print(f"{str(dtype)[6:]:9} decode {batch} x {context}, page {page_size:2}  {ours:.2f} / {stock:.2f}")


def attention() -> None:
    print("\nattention, 9 query / 3 kv heads of 64, ms: ours / torch SDPA (contiguous)")
    for dtype in DTYPES:
        learner_attention(dtype)
        for page_size in (16, 64):
            decode_attention(dtype, page_size)


def head_case(dtype: torch.dtype, rows: int = 1024, vocab: int = 49152) -> None:
    hidden, weight = (
        torch.randn(rows, 576).to(dtype).requires_grad_(),
        Weight(torch.randn(vocab, 576).to(dtype) / 24, True),
    )
    targets, dlogprobs = torch.randint(0, vocab, (rows,)), torch.randn(rows)

    def ours() -> torch.Tensor:
        return KERNELS.logprobs(hidden, weight, targets, 1.0, vocab)

    def stock() -> torch.Tensor:
        return F.linear(hidden.detach(), weight.data).float().log_softmax(-1).gather(1, targets[:, None])

    print(f"{str(dtype)[6:]:9} forward {1e3 * seconds(ours):.0f} / {1e3 * seconds(stock):.0f}")
    out = ours()
    backward = seconds(lambda: torch.autograd.grad(out, [hidden, weight.master], dlogprobs, retain_graph=True))
    print(f"{str(dtype)[6:]:9} backward {1e3 * backward:.0f}")


def head() -> None:
    print("\nfused head, 1,024 rows, 576 -> 49,152, ms: ours / torch linear + log_softmax + gather")
    for dtype in DTYPES:
        head_case(dtype)
    logits, keys = torch.randn(32, 49152), torch.arange(128).view(32, 4)
    print(f"sample 32 rows {1e3 * seconds(lambda: KERNELS.sample(logits, keys, 1.0, 49152)):.2f}")


def overhead() -> None:
    print("\none call at batch 1, hidden 128, us")
    shape = AttentionShape(4, 2, 32)
    x, qkv, gate_up = torch.randn(1, 128), torch.randn(1, shape.qkv_size), torch.randn(1, 512)
    norm, matrix = Weight(torch.ones(128)), Weight(torch.randn(128, 128))
    KERNELS.pack(matrix)
    cache = KERNELS.new_cache(1, 4, 16, shape, torch.float32)[0]
    rows = RowBatch.paged([(20, 1)], [[0, 1]], 16)
    cos = torch.ones(64, 16)
    calls = {
        "rms_norm": lambda: KERNELS.rms_norm(x, norm, 1e-5, x),
        "linear 128 x 128": lambda: KERNELS.linear(x, matrix),
        "rotary": lambda: KERNELS.rotary(qkv, cos, cos, rows.positions_T, shape),
        "attention": lambda: KERNELS.attention(qkv, rows, cache, shape),
        "silu_mul": lambda: KERNELS.silu_mul(gate_up),
    }
    for name, call in calls.items():

        def repeat(call: Callable[[], object] = call) -> None:
            for _ in range(100):
                call()

        with torch.no_grad():
            print(f"{name:18} {1e4 * seconds(repeat):.2f}")


def main() -> None:
    torch.manual_seed(0)
    sections = {"linear": linear, "attention": attention, "head": head, "overhead": overhead}
    print(f"variant {load_best().name}, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    for name in sys.argv[1:] or sections:
        sections[name]()


if __name__ == "__main__":
    main()
