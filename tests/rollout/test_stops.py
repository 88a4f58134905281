"""Why a trajectory ends, what it then holds, and which requests are refused at once."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from tests.rollout.builders import by_sample, drain, request, run
from tests.rollout.hash_decoder import HashDecoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import NonFiniteLogprob
from zerogap.trajectory import NOT_SAMPLED, GroupRequest, SamplingParams, Trajectory


class LetterTokenizer:
    """Id i is the letter chr(65 + i); ids 58..60 are a broken, a three-letter and a two-byte token."""

    special: ClassVar = {58: "�", 59: "XYZ", 60: "é"}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.special.get(i, chr(65 + i)) for i in ids)


def check_lengths(trajectory: Trajectory, prompt: int) -> None:
    t = trajectory
    assert len(t.token_ids) == len(t.loss_mask) == len(t.logprobs) == len(t.versions)
    assert t.loss_mask == [0] * prompt + [1] * (len(t.token_ids) - prompt)
    assert t.versions == [NOT_SAMPLED] * prompt + [0] * t.num_sampled
    assert t.logprobs[:prompt] == [0.0] * prompt
    assert all(x < 0 and math.isfinite(x) for x in t.logprobs[prompt:])


def sampled(prompt: list[int], new: int) -> list[int]:
    """What the hash decoder says when nothing stops it."""
    return run(HashDecoder(), [request(0, prompt, new=new)], EngineConfig())[0].sampled_token_ids


def test_sampled_eos_stays_with_mask_and_logprob() -> None:
    """Field case 7, an answer that ends with EOS: every id of the list ends it, and it counts as sampled."""
    free = sampled([1, 2, 3], 12)
    for eos in ((free[4],), (free[9], free[4])):
        (t,) = run(HashDecoder(eos=eos), [request(0, [1, 2, 3], new=12)], EngineConfig())
        end = min(free.index(i) for i in eos) + 1
        assert (t.finish_reason, t.sampled_token_ids) == ("eos", free[:end])
        assert not t.truncated
        check_lengths(t, 3)


def test_eos_inside_the_prompt_does_not_stop() -> None:
    free = sampled([7, 7, 7], 6)
    assert 7 not in free
    (t,) = run(HashDecoder(eos=(7,)), [request(0, [7, 7, 7], new=6)], EngineConfig())
    assert t.sampled_token_ids == free


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_string_appends_nothing_and_its_tokens_stay(length: int) -> None:
    """Field case 7, a stop string without EOS: only sampled tokens, each with a real logprob."""
    tokenizer = LetterTokenizer()
    free = sampled([1, 2, 3], 40)
    text = tokenizer.decode(free, skip_special_tokens=False)
    stop = text[20 : 20 + length]
    engine = EmbeddedEngine(HashDecoder(), tokenizer, EngineConfig())
    engine.submit(request(0, [1, 2, 3], new=40, stop=("never said", stop)))
    (t,) = drain(engine)
    ended = next(n for n in range(1, 41) if stop in tokenizer.decode(free[:n], skip_special_tokens=False))
    assert (t.finish_reason, t.sampled_token_ids) == ("stop_string", free[:ended])
    check_lengths(t, 3)


def test_stop_string_in_the_prompt_does_not_stop() -> None:
    tokenizer = LetterTokenizer()
    engine = EmbeddedEngine(HashDecoder(), tokenizer, EngineConfig())
    engine.submit(request(0, [0, 1, 2], new=6, stop=("ABC",)))
    (t,) = drain(engine)
    assert t.finish_reason == "length"


def test_length_and_context_end_as_truncated() -> None:
    """Field case 7, a length-terminated answer; when both limits are met at once it is the request's own."""
    limits = [(4, 64, 4, "length"), (90, 16, 13, "context"), (13, 16, 13, "length"), (1, 64, 1, "length")]
    for new, context, count, reason in limits:
        (t,) = run(HashDecoder(), [request(0, [1, 2, 3], new=new)], EngineConfig(max_context=context))
        assert (t.finish_reason, t.num_sampled, t.truncated) == (reason, count, True)
        check_lengths(t, 3)


def test_wrong_number_of_logprobs_raises() -> None:
    """Field case 7, an engine that returns 5 tokens and 4 logprobs."""

    class Broken(HashDecoder):
        def sample(
            self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, logprobs = super().sample(logits_BV, keys_B4, temperature)
            return tokens, logprobs[:-1]

    engine = EmbeddedEngine(Broken(), None, EngineConfig())
    engine.submit(request(0, [1, 2], n=5))
    engine.step()
    with pytest.raises(ValueError, match="shorter"):
        engine.step()
    with pytest.raises(ValueError, match=r"5 token ids.*4 logprobs"):
        Trajectory([1] * 5, [1] * 5, [-1.0] * 4, [0] * 5, "eos", 0, 0, 0, SamplingParams())


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_non_finite_logprob_stops_with_its_place(value: float) -> None:
    """Field case 5: an error that names the request, token index and version, counted, no value put in its place."""
    decoder = HashDecoder()
    decoder.nan_at = {11: value}
    engine = EmbeddedEngine(decoder, None, EngineConfig(), version=4)
    engine.submit(request(0, range(5), n=2, new=20))
    engine.submit(request(1, range(3), n=1, new=20))
    with pytest.raises(NonFiniteLogprob, match=r"group 0, prompt 100, sample 0: logprob .* at index 11, .* version 4"):
        drain(engine)
    assert engine.stats()["nonfinite"] == 2
    assert engine.pending() == [(0, 0), (0, 1), (1, 0)]  # nothing was handed out, nothing of the step was kept
    decoder.nan_at = {}
    done = drain(engine)
    expected = run(HashDecoder(), [request(0, range(5), n=2, new=20), request(1, range(3), new=20)], EngineConfig())
    assert by_sample(done) == by_sample(expected)


def test_mixed_temperatures_share_a_forward_but_not_a_distribution() -> None:
    requests = [request(g, range(4), temperature=temperature) for g, temperature in enumerate([1.0, 0.5, 1.0, 0.0])]
    together = run(HashDecoder(), requests, EngineConfig())
    for r in requests:
        assert by_sample(run(HashDecoder(), [r], EngineConfig())).items() <= by_sample(together).items()


REFUSALS: list[tuple[GroupRequest, str]] = [
    (request(0, range(40)), "40 tokens leave no room .* max_context 40"),
    (request(0, range(300)), "token ids 0..299 must lie in 0..60"),
    (request(0, range(20), new=21), "need 39 tokens of KV, the cache has 32; raise kv_tokens"),
    (request(0, []), "no token ids; give at least one"),
    (request(0, [-1]), "token ids -1..-1"),
    (request(0, [1], n=0), "n 0 .* must be >= 1"),
    (request(0, [1], new=0), "max_new_tokens 0 must be >= 1"),
    (request(0, [1], temperature=-1.0), "temperature -1.0 must be >= 0"),
    (request(0, [1], temperature=math.nan), "temperature nan"),
    (request(0, [1], seed=2**63), "seed 9223372036854775808"),
    (request(0, [1], stop=("",)), "empty string"),
    (request(0, [1], stop=("x",)), "needs an engine with a tokenizer"),
    (request(5, [1]), "still unfinished"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_submit_refuses_what_can_never_be_served(refused: GroupRequest, message: str) -> None:
    """Prompt longer than the context and the like: refused whole, nothing queued, the engine goes on."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=8, kv_tokens=32, max_context=40))
    engine.submit(request(5, [1, 2]))
    with pytest.raises(ValueError, match=message) as caught:
        engine.submit(refused)
    assert f"prompt {refused.prompt_id}" in str(caught.value)
    assert engine.pending() == [(5, 0)]
    assert len(drain(engine)) == 1


def test_largest_request_that_fits_is_served() -> None:
    (t,) = run(HashDecoder(), [request(0, range(20), new=13)], EngineConfig(page_size=8, kv_tokens=32))
    assert t.num_sampled == 13
    (t,) = run(HashDecoder(), [request(0, range(39))], EngineConfig(max_context=40))
    assert (t.num_sampled, t.finish_reason) == (1, "context")


def test_config_refuses_what_cannot_work() -> None:
    for key in ("max_running", "max_batched_tokens", "page_size", "kv_tokens", "max_context"):
        values: dict[str, Any] = {key: 0}
        with pytest.raises(ValueError, match=f"{key} 0 must be >= 1"):
            EngineConfig(**values)
    with pytest.raises(ValueError, match=r"max_context 257 exceeds .* 256"):
        EmbeddedEngine(HashDecoder(), None, EngineConfig(max_context=257))
