"""`zerogap audit --locate`: which side is asked for, the comparison, and its table for the eye."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerogap.cli.errors import BadInput
from zerogap.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from zerogap.gaps.audit.rescore import Models, Rescored

FAMILIES, DTYPES = ("aligned", "standard", "transformers"), ("float32", "bfloat16")


def parse_side(text: str) -> tuple[str, str | None]:
    """`standard:bfloat16` -> (family, dtype); no dtype: that of the audit."""
    family, separator, dtype = text.partition(":")
    if family not in FAMILIES or (separator and dtype not in DTYPES):
        raise BadInput(
            f"--locate {text}: use {', '.join(FAMILIES)}, with {' or '.join(f':{name}' for name in DTYPES)} behind it "
            "where its dtype is another than the audit's"
        )
    return family, dtype or None


def locate_against(other: tuple[str, str | None], rescored: Rescored, models: Models) -> dict[str, Any]:
    """The audit's forward against another side, on the weights that sampled (most of) the tokens."""
    from zerogap.gaps.locate.locate import TOKENS, by_gap, locate
    from zerogap.gaps.locate.stages import DecoderSide, Side
    from zerogap.model.checkpoint import load_decoder

    first = DecoderSide(rescored.behaviour)
    family, dtype = other[0], other[1] or first.dtype
    folder = models.behaviour.get(rescored.behaviour_version) or models.learner
    assert folder is not None
    if family == "transformers":
        from zerogap.gaps.locate.transformers_side import TransformersSide

        second: Side = TransformersSide(folder, dtype, first.decoder.vocab)
    else:
        second = DecoderSide(load_decoder(folder, family, dtype))
    total = sum(len(rollout.trajectory.token_ids) - 1 for rollout in rescored.rollouts)
    with progress_bar("tokens located", min(TOKENS, total)) as advance:
        return locate(first, second, by_gap(rescored), advance).to_dict()


def show_located(console: Console, located: Mapping[str, Any]) -> None:
    """The sentence, and a table: every stage of the layer where it begins, of other layers only the last."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console.print(Text(located["sentence"], style="bold"))
    if located["first"] is None:
        return
    heads = ("layer", "stage", "unequal", "largest", "relative", "isolated", "relative")
    table = Table(*heads, box=SIMPLE_HEAD, padding=0, title="differences, then those on the same inputs (isolated)")
    stages = located["stages"]
    for stage, following in zip(stages, [*stages[1:], stages[-1]], strict=True):
        if stage["layer"] in (None, located["first"]["layer"]) or stage["layer"] != following["layer"]:
            own, same = stage["cumulative"], stage["isolated"]
            table.add_row(
                "" if stage["layer"] is None else str(stage["layer"]),
                stage["name"],
                _share(own["unequal"], stage["values"]),
                f"{own['largest']:.1e}",
                f"{own['relative']:.1e}",
                _share(same["unequal"], stage["values"]),
                f"{same['relative']:.1e}",
            )
    console.print(table)


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.3g}%"
