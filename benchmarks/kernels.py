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
from zerogap.kernels.native import load_best

KERNELS = AlignedKernels()
DTYPES = (torch.float32, torch.bfloat16)


def seconds(function: Callable[[], object], budget: float = 0.15) -> float:
    """Best time of a call within the budget, at least two calls."""
    function()
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < budget or best == float("inf"):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best


def linear() -> None:
    print("\nlinear, GFLOP/s: packed / rows as they are / torch F.linear / oneDNN fp32; then dX, dW")
    for dtype in DTYPES:
        for k, n in ((576, 576), (1536, 576), (576, 3072)):
            weight = Weight(torch.randn(n, k).to(dtype))
            packed = Weight(weight.data)
            KERNELS.pack(packed)
            for m in (1, 4, 8, 32, 256, 2048):
                x, dy = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
                dx, dw = torch.empty_like(x), torch.empty(n, k)
                code = 0 if dtype is torch.float32 else 1
                native = KERNELS.forward.native
                calls: dict[str, Callable[[], object]] = {
                    "packed": lambda x=x, w=packed: KERNELS.linear(x, w),
                    "rows": lambda x=x, w=weight: KERNELS.linear(x, w),
                    "torch": lambda x=x, w=weight: F.linear(x, w.data),
                }
                if dtype is torch.float32:
                    calls["onednn"] = lambda x=x, w=weight: torch.ops.mkldnn._linear_pointwise(
                        x, w.data, None, "none", [], ""
                    )
                if m >= 256:
                    calls["dX"] = lambda dy=dy, w=weight, dx=dx, m=m, n=n, k=k, c=code: native.linear_input_gradient(
                        c, dy.data_ptr(), w.data.data_ptr(), dx.data_ptr(), m, n, k
                    )
                    calls["dW"] = lambda dy=dy, x=x, dw=dw, m=m, n=n, k=k, c=code: native.linear_weight_gradient(
                        c, dy.data_ptr(), x.data_ptr(), dw.data_ptr(), m, n, k
                    )
                rates = "  ".join(f"{name} {2e-9 * m * n * k / seconds(call):.0f}" for name, call in calls.items())
                print(f"{str(dtype)[6:]:9} {k:4} x {n:4}  M={m:<5} {rates}")


def attention() -> None:
    print("\nattention, 9 query / 3 kv heads of 64, ms: ours / torch SDPA (contiguous)")
    shape = AttentionShape(9, 3, 64)
    for dtype in DTYPES:
        lengths = [512] * 8
        rows = RowBatch.pack(lengths)
        qkv = torch.randn(sum(lengths), shape.qkv_size).to(dtype)
        split = qkv.view(8, 512, 15, 64).transpose(1, 2)
        q, k, v = split[:, :9], split[:, 9:12], split[:, 12:]
        ours = seconds(lambda: KERNELS.attention(qkv, rows, None, shape))
        stock = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        print(f"{str(dtype)[6:]:9} learner 8 x 512 forward   {1e3 * ours:.2f} / {1e3 * stock:.2f}")

        leaf = qkv.clone().requires_grad_()
        out = KERNELS.attention(leaf, rows, None, shape)
        gradient = torch.randn_like(out)
        ours = seconds(lambda: torch.autograd.grad(out, leaf, gradient, retain_graph=True))
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        stock_out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        stock_gradient = torch.randn_like(stock_out)
        stock = seconds(lambda: torch.autograd.grad(stock_out, leaves, stock_gradient, retain_graph=True))
        print(f"{str(dtype)[6:]:9} learner 8 x 512 backward  {1e3 * ours:.2f} / {1e3 * stock:.2f}")

        for page_size in (16, 64):
            context, batch = 512, 32
            pages = context // page_size
            order = torch.randperm(batch * pages).view(batch, pages).tolist()
            step = RowBatch.paged([(context - 1, 1)] * batch, order, page_size)
            cache = KERNELS.new_cache(1, batch * pages, page_size, shape, dtype)[0]
            cache.keys.normal_()
            cache.values.normal_()
            rows_qkv = torch.randn(batch, shape.qkv_size).to(dtype)
            keys, values = (torch.randn(batch, 3, context, 64).to(dtype) for _ in range(2))
            queries = torch.randn(batch, 9, 1, 64).to(dtype)
            ours = seconds(lambda: KERNELS.attention(rows_qkv, step, cache, shape))
            stock = seconds(lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True))
            print(f"{str(dtype)[6:]:9} decode 32 x 512, page {page_size:2}  {1e3 * ours:.2f} / {1e3 * stock:.2f}")


def head() -> None:
    print("\nfused head, 1,024 rows, 576 -> 49,152, ms: ours / torch linear + log_softmax + gather")
    for dtype in DTYPES:
        hidden, weight = torch.randn(1024, 576).to(dtype), Weight(torch.randn(49152, 576).to(dtype) * 0.04, True)
        targets = torch.randint(0, 49152, (1024,))

        def ours(hidden: torch.Tensor = hidden, weight: Weight = weight, targets: torch.Tensor = targets) -> object:
            return KERNELS.logprobs(hidden, weight, targets, 1.0, 49152)

        def stock(hidden: torch.Tensor = hidden, weight: Weight = weight, targets: torch.Tensor = targets) -> object:
            return F.linear(hidden, weight.data).float().log_softmax(-1).gather(1, targets[:, None])

        with torch.no_grad():
            print(f"{str(dtype)[6:]:9} forward {1e3 * seconds(ours):.0f} / {1e3 * seconds(stock):.0f}")
        leaf = hidden.clone().requires_grad_()
        out = KERNELS.logprobs(leaf, weight, targets, 1.0, 49152)
        gradient = torch.randn(1024)
        backward = seconds(lambda: torch.autograd.grad(out, [leaf, weight.master], gradient, retain_graph=True))
        print(f"{str(dtype)[6:]:9} backward {1e3 * backward:.0f}")
        logits = torch.randn(32, 49152)
        keys = torch.arange(128).view(32, 4)
        print(
            f"{str(dtype)[6:]:9} sample 32 rows {1e3 * seconds(lambda: KERNELS.sample(logits, keys, 1.0, 49152)):.2f}"
        )


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
