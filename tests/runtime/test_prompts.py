"""From the stream of prompts to numbered groups: skipping, epochs, and where a resumed run goes on."""

from __future__ import annotations

import pytest

from zerogap.config import Rollout
from zerogap.env.stream import PromptStream
from zerogap.env.task import Example
from zerogap.runtime.backend import RunFailed
from zerogap.runtime.kv_memory import default_pages
from zerogap.runtime.prompts import PromptSource, epoch_seed, max_prompt_tokens
from zerogap.trajectory import SamplingParams


class Numbers:
    """Prompt i has i + 1 tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def example(self, index: int) -> Example:
        return Example(index, [{"role": "user", "content": "x"}], None)

    def grade(self, example: Example, text: str) -> float:
        return 0.0

    def solution(self, example: Example) -> str:
        return ""


def render(example: Example) -> list[int]:
    return [7] * (example.prompt_id + 1)


def source(size: int = 10, longest: int = 10, position: int = 0, skipped: int = 0) -> PromptSource:
    sampling = SamplingParams(max_new_tokens=4, seed=11)
    stream = PromptStream(size, seed=3)
    return PromptSource(Numbers(size), stream, render, longest, 4, sampling, position, skipped)


def test_long_prompts_are_skipped_and_counted() -> None:
    """Field case 14: a prompt that does not fit is neither cut nor sent; numbering of groups has no hole."""
    prompts = source(size=10, longest=6)
    requests = [prompts.request(g, 0)[0] for g in range(12)]
    assert [r.group_id for r in requests] == list(range(12))
    assert all(len(r.prompt_token_ids) == r.prompt_id + 1 <= 6 for r in requests)
    assert sorted(r.prompt_id for r in requests[:6]) == [0, 1, 2, 3, 4, 5]  # each once per epoch
    assert prompts.skipped >= 4


def test_nothing_fits() -> None:
    with pytest.raises(RunFailed, match="all 10 prompts of the task are longer than 0 tokens"):
        source(longest=0).request(0, 0)


@pytest.mark.parametrize("first_unconsumed", [0, 1, 5, 9])
def test_cursor_admits_the_same_groups_again(first_unconsumed: int) -> None:
    """Field case 41: whatever was admitted but not trained comes again, in the same order, under the same numbers."""
    prompts = source(longest=6)
    admitted = [prompts.request(g, g)[0] for g in range(9)]
    position, skipped = prompts.cursor(first_unconsumed)
    resumed = source(longest=6, position=position, skipped=skipped)
    again = [resumed.request(g, g)[0] for g in range(first_unconsumed, 12)]
    more = [prompts.request(g, g)[0] for g in range(9, 12)]
    assert again == (admitted + more)[first_unconsumed:]
    assert resumed.skipped == prompts.skipped


def test_a_prompt_seen_again_meets_other_random_numbers() -> None:
    """The sampler is keyed by seed, prompt, sample and position; only the seed can tell epochs apart."""
    prompts = source(size=5)
    seeds = [prompts.request(g, 0)[0].sampling.seed for g in range(15)]
    assert seeds[:5] == [11] * 5 and len(set(seeds)) == 3
    assert len({epoch_seed(s, e) for s in range(3) for e in range(3)}) == 9
    assert all(0 <= epoch_seed(s, e) < 2**63 for s in (0, 2**63 - 1) for e in range(9))


def test_longest_prompt_is_what_the_engine_accepts() -> None:
    rollout = Rollout(max_new_tokens=10, page_size=8)
    assert max_prompt_tokens(rollout, context=128, cache_tokens=64) == 55  # 55 + 10 - 1 = 64
    assert max_prompt_tokens(rollout, context=128, cache_tokens=71) == 55  # whole pages only
    assert max_prompt_tokens(rollout, context=32, cache_tokens=64) == 31


def test_default_cache_holds_all_running_sequences() -> None:
    rollout = Rollout(max_new_tokens=10, max_running=4, page_size=8)
    assert default_pages(rollout, prompt_tokens=10, context=128, turns=1) == 16  # one of full length
    assert default_pages(rollout, prompt_tokens=60, context=128, turns=1) == 4 * 9  # 4 of 60 + 10, in whole pages
    assert default_pages(rollout, prompt_tokens=60, context=100_000, turns=1) == 8192 // 8
    assert default_pages(rollout, prompt_tokens=60, context=128, turns=2) == 4 * 12
    assert default_pages(rollout, prompt_tokens=60, context=256, turns=9) == 4 * 14  # a usual episode has 3 turns
