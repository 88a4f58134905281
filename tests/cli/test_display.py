"""What a person sees of a run: one line for every update on any console, and the verdict in it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from zerogap.cli.display import Display
from zerogap.cli.format import sparkline, step_line, summary_rows, verdict

METRICS: dict[str, Any] = {
    "step": 12,
    "reward/mean": 0.4125,
    "loss/policy": -0.01318,
    "grad_norm": 0.8123,
    "lag/mean": 1.5,
    "lag/max": 2.0,
    "kl/k1": -1.25e-5,
    "kl/k3": 3.4e-4,
    "ess/all": 0.981,
    "bitwise/checked": 1024,
    "bitwise/unequal": 0,
    "throughput/engine_tokens_per_s": 3120.4,
}
SUMMARY: dict[str, Any] = {
    "updates": 300,
    "reward_first": 0.4,
    "reward_last": 0.9,
    "bits_checked": 12345,
    "bits_unequal": 0,
    "lag_max": 2,
    "dropped": 0,
    "engine_tokens_per_s": 3000.0,
    "learner_tokens_per_s": None,
    "seconds": 61.0,
    "final_model": "runs/x/final",
}


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=60, highlight=False)


def test_step_line() -> None:
    assert step_line(METRICS, total=300, aligned=True) == (
        "step  12/300  reward 0.412  loss -0.0132  grad 0.812  lag 1.5/2  kl k1 -1.3e-05 k3 3.4e-04  ess 0.98  "
        "bitwise 1,024/1,024  3,120 tok/s"
    )


def test_what_was_not_measured_is_absent() -> None:
    """Field case 45: an absent metric is not shown as 0."""
    assert step_line({"step": 3}, total=None, aligned=True) == "step 3  bitwise not checked"


def test_step_line_shows_what_the_objective_did() -> None:
    """Shares of tokens; one that is 0 is left out of the line (not of metrics.jsonl)."""
    marks = {"clipped/tokens": 0.0123, "rejected/tokens": 0.0, "masked/tokens": 0.5, "truncated_weight/tokens": 1.0}
    assert step_line({"step": 3} | marks, total=None, aligned=True) == (
        "step 3  clipped 1.2%  truncated 100.0%  masked 50.0%  bitwise not checked"
    )


def test_verdict() -> None:
    assert verdict({"bitwise/checked": 96, "bitwise/unequal": 5}, aligned=True) == "bitwise 91/96"
    assert verdict({"bitwise/checked": 96, "bitwise/unequal": 5}, aligned=False) == "bitwise 91/96 (aligned: no)"
    assert verdict({}, aligned=False) == "aligned: no"


def test_step_line_shows_both_gaps_where_bits_differ() -> None:
    gaps = {"gap/lag/abs_mean": 0.0012, "gap/kernel/abs_mean": 3.4e-06, "bitwise/checked": 96}
    assert step_line({"step": 3, "bitwise/unequal": 5} | gaps, total=None, aligned=False) == (
        "step 3  bitwise 91/96 (aligned: no)  gap lag 1.2e-03 kernel 3.4e-06"
    )
    assert step_line({"step": 3, "bitwise/unequal": 0} | gaps, total=None, aligned=True) == "step 3  bitwise 96/96"


def test_plain_output_is_one_line_per_update_without_control_codes() -> None:
    console = plain_console()
    with Display(300, aligned=True, console=console) as display:
        display.stage("warm start", 200)
        display.progress(200, "loss 0.5")
        display.stage_end()
        display.step(METRICS)
        display.step(METRICS | {"step": 13})
        display.warning("ess/age_2 is low")
        display.summary(SUMMARY)
    text = shown(console)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "warm start: 200 steps"
    assert lines[1].startswith("warm start: done in ") and lines[1].endswith("loss 0.5")
    assert lines[2] == step_line(METRICS, 300, aligned=True)  # longer than the console, still one line
    assert lines[3].startswith("step  13/300")
    assert lines[4] == "warning: ess/age_2 is low"
    assert lines[5].split("  ")[0] == "reward, first 10% to last 10%" and lines[5].endswith("0.400 to 0.900")


def test_terminal_shows_every_step_and_the_table() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None, highlight=False)
    with Display(300, aligned=True, console=console) as display:
        for step in range(1, 6):
            display.step(METRICS | {"step": step, "reward/mean": step / 8})
        view = Console(file=io.StringIO(), width=200)
        view.print(display._view())
        display.summary(SUMMARY)
    live = shown(view)
    assert "▁▃▅▇█ 0.125 to 0.625" in live.replace("  ", " ")
    assert "5/300" in live and "bitwise 1,024/1,024" in live and "ess 0.98" in live
    text = shown(console)
    assert all(f"step   {step}/300  reward {step / 8:.3f}" in text for step in range(1, 6))
    assert "bits unequal (tokens)" in text and "12,345" in text


def test_no_summary_table_after_a_failure() -> None:
    console = plain_console()
    with pytest.raises(RuntimeError), Display(3, aligned=True, console=console) as display:
        display.summary(SUMMARY)
        raise RuntimeError("late")
    assert shown(console) == ""


def test_summary_rows_leave_out_what_is_null() -> None:
    rows = dict(summary_rows(SUMMARY))
    assert rows["updates"] == "300" and rows["model"] == "runs/x/final"
    assert "learner tokens/s" not in rows and "samples not graded" not in rows
    assert dict(summary_rows(SUMMARY | {"errors": 3, "prompts_skipped": 0}))["samples not graded"] == "3"
    assert "reward, first 10% to last 10%" not in dict(summary_rows(SUMMARY | {"reward_last": None}))


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([0.0] * 500 + [1.0] * 500, 4) == "▁▁██"
