"""Which operations `zerogap bench kernels` measures, at the shapes of which model. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerogap.model.config import DecoderConfig

OPS = ("linear", "attention", "head", "elementwise")
ROWS = (1, 4, 8, 32, 64, 256, 1024, 4096)

Case = dict[str, Any]  # arguments of kernel_cases.build


@dataclass(frozen=True)
class KernelShapes:
    """Sizes of a model, as far as its operations differ by them. model: its name in the table.
    linear: K x N of the products, for each dtype."""

    model: str
    linear: dict[str, tuple[tuple[int, int], ...]]
    hidden: int
    intermediate: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool


# Products of SmolLM2 and of other models, those for which the bar of this table was set.
SMOLLM2 = KernelShapes(
    model="SmolLM2-135M",
    linear={
        "float32": ((576, 576), (1536, 576), (576, 49152), (256, 1024)),
        "bfloat16": ((576, 576), (576, 49152), (2048, 2048)),
    },
    hidden=576,
    intermediate=1536,
    vocab=49152,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    qk_norm=False,
)


def model_shapes(config: DecoderConfig, model: str) -> KernelShapes:
    """Those of a decoder; its products are qkv, attention output, gate and up, down, and the head."""
    hidden, shape = config.hidden_size, config.shape
    products = (
        (hidden, shape.qkv_size),
        (shape.q_size, hidden),
        (hidden, 2 * config.intermediate_size),
        (config.intermediate_size, hidden),
        (hidden, config.vocab_size),
    )
    return KernelShapes(
        model=model,
        linear=dict.fromkeys(("float32", "bfloat16"), tuple(dict.fromkeys(products))),
        hidden=hidden,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        qk_norm=config.qk_norm,
    )


@dataclass(frozen=True)
class KernelsSetting:
    """ops: of OPS. rows: of the linear products."""

    shapes: KernelShapes
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    rows: tuple[int, ...]
    threads: int
    rounds: int


def cases(setting: KernelsSetting) -> list[Case]:
    """What is measured, as arguments of kernel_cases.build."""
    shapes = setting.shapes
    heads = {"q_heads": shapes.q_heads, "kv_heads": shapes.kv_heads, "head_dim": shapes.head_dim}
    found: list[Case] = []
    for dtype in setting.dtypes:
        if "linear" in setting.ops:
            found += [
                {"op": "linear", "dtype": dtype, "k": k, "n": n, "rows": rows}
                for k, n in shapes.linear[dtype]
                for rows in setting.rows
            ]
        if "attention" in setting.ops:
            learner, decode = {"sequences": 8, "length": 512}, {"sequences": 32, "length": 512}
            found += [{"op": op, "dtype": dtype} | learner | heads for op in ("attention", "attention backward")]
            found.append({"op": "attention decode", "dtype": dtype} | decode | heads)
        if "head" in setting.ops:
            head = {"k": shapes.hidden, "n": shapes.vocab, "rows": 1024}
            found += [{"op": op, "dtype": dtype} | head for op in ("logprobs", "logprobs backward")]
        if "elementwise" in setting.ops:
            found += [{"op": "rms_norm", "dtype": dtype, "k": shapes.hidden, "rows": rows} for rows in (32, 4096)]
            found += [{"op": "silu_mul", "dtype": dtype, "k": shapes.intermediate, "rows": rows} for rows in (32, 4096)]
            if shapes.qk_norm:
                found += [{"op": "head_norm", "dtype": dtype, "rows": rows} | heads for rows in (32, 4096)]
    return found


def sizes_text(case: Case) -> str:
    heads = f"{case['q_heads']}/{case['kv_heads']} heads of {case['head_dim']}" if "q_heads" in case else ""
    if "length" in case:
        return f"{case['sequences']} x {case['length']}, {heads}"
    if heads:
        return f"M={case['rows']} {heads}"
    return f"M={case['rows']} {case['k']}" + (f" x {case['n']:,}" if "n" in case else "")
