"""Where a turn ends, how an episode goes on after it, and what is refused (field cases 7 and 14)."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from tests.rollout.builders import bits, drain, request
from tests.rollout.caller import parked
from tests.rollout.hash_decoder import HashDecoder
from tests.rollout.test_stops import LetterTokenizer
from tests.rollout.test_weight_updates import spans, weights
from zerogap.learner.packing import score
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import ContextFull


def test_limits_count_per_turn_and_the_context_bounds_the_whole() -> None:
    """Field case 14, context 64 and turns of 20: no request for less than one token, and nothing is cut on the left."""
    engine = EmbeddedEngine(HashDecoder(context=64), None, EngineConfig(page_size=8))
    first = parked(engine, 0, new=20)
    for tokens in (39, 40, 300):
        with pytest.raises(ContextFull, match=f"prompt 100, sample 0: {25 + tokens} tokens leave no room .* 64"):
            engine.extend(0, 0, [7] * tokens)
    engine.extend(0, 0, [7] * 15)
    (second,) = drain(engine)
    assert (second.finish_reason, second.num_sampled, len(second.token_ids)) == ("length", 40, 60)
    assert second.token_ids[:40] == first.token_ids + [7] * 15
    engine.extend(0, 0, [8])
    (third,) = drain(engine)
    assert (third.finish_reason, len(third.token_ids), third.truncated) == ("context", 64, True)
    with pytest.raises(ContextFull):
        engine.extend(0, 0, [7])
    with pytest.raises(ContextFull):
        engine.restart(0, 0, [7] * 64, 1)
    engine.restart(0, 0, [7] * 63, 1)
    (last,) = drain(engine)
    assert (last.finish_reason, last.num_sampled) == ("context", 1)


def test_an_episode_ends_where_the_kv_cache_does() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=8, kv_tokens=16))
    parked(engine, 0)
    with pytest.raises(ContextFull, match=r"17 tokens leave no room for one more in kv_tokens \+ 1 = 17"):
        engine.extend(0, 0, [7] * 8)
    engine.extend(0, 0, [7] * 5)
    (turn,) = drain(engine)
    assert (turn.finish_reason, len(turn.token_ids)) == ("context", 17)


def test_stop_strings_and_eos_look_at_the_sampled_tokens_of_this_turn_only() -> None:
    """Neither what a tool says, nor earlier turns, nor a string that only both together spell ends a turn."""
    tokenizer = LetterTokenizer()
    engine = EmbeddedEngine(HashDecoder(eos=(44,)), tokenizer, EngineConfig())
    first = parked(engine, 0, new=2)
    said = tokenizer.decode(first.sampled_token_ids, skip_special_tokens=False)
    engine.abort([0])
    parked(engine, 0, new=2, stop=(said[1] + "B", "BC"))
    engine.extend(0, 0, [1, 2, 44])
    (turn,) = drain(engine)
    assert (turn.finish_reason, turn.num_sampled) == ("length", 4)
    engine.restart(0, 0, range(5), 0)
    drain(engine)
    engine.extend(0, 0, [1])
    (turn,) = drain(engine)
    assert turn.num_sampled == 4


def test_restart_gives_the_same_tokens_and_another_segment_others() -> None:
    """On the same weights and prompt: a retry is the same episode; a segment draws its own random numbers."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4))
    first = parked(engine, 0)
    found = []
    for number in (0, 1, 2, 1):
        engine.extend(0, 0, [7, 8])
        drain(engine)
        engine.restart(0, 0, range(5), number)
        (turn,) = drain(engine)
        assert turn.segment == number and len(turn.token_ids) == 9
        found.append(bits(turn))
    assert found[0] == bits(first) and found[1] == found[3]
    assert len({repr(tokens) for tokens, _, _ in found}) == 3
    engine.load_weights(1, weights(2))
    engine.restart(0, 0, range(5), 0)
    (again,) = drain(engine)
    assert bits(again) != bits(first) and spans(again) == [1] * 4


def test_what_cannot_go_on_is_refused_and_nothing_changes() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4))
    turn = parked(engine, 0)
    engine.submit(request(1, range(5)))
    engine.step()
    before = engine.stats()
    for call in (
        lambda g, i: engine.extend(g, i, [1]),
        lambda g, i: engine.restart(g, i, [1], 0),
        lambda g, i: engine.end(g, i),
    ):
        for place in ((1, 0), (0, 1), (9, 0)):  # runs and is not interactive; no such sample; no such group
            with pytest.raises(ValueError, match=f"group {place[0]}, sample {place[1]} is not parked"):
                call(*place)
    for tokens, message in (([], "no token ids"), ([3, 61], "token ids 3..61 must lie in 0..60"), ([-1], "-1")):
        with pytest.raises(ValueError, match=f"group 0, prompt 100, sample 0: .*{message}"):
            engine.extend(0, 0, tokens)
        with pytest.raises(ValueError, match=message):
            engine.restart(0, 0, tokens, 1)
    with pytest.raises(ValueError, match=r"segment 4096 must lie in 0\.\.4095"):
        engine.restart(0, 0, [1], 4096)
    assert engine.stats() == before
    engine.extend(0, 0, [1])
    with pytest.raises(ValueError, match="not parked"):
        engine.extend(0, 0, [1])
    (other,) = [t for t in drain(engine) if t.group_id == 0]
    assert other.token_ids[:10] == [*turn.token_ids, 1]


@pytest.mark.parametrize("owned", [50, 61])
def test_a_padded_head_over_two_turns(owned: int) -> None:
    """Field case 9: ids that the tokenizer does not own are sampled in no turn, however likely, and the learner leaves
    them out, too: recorded logprobs have its bits. With all 61 owned, the likely id is sampled."""
    decoder = tiny_decoder(eos=(), vocab_size=61, tie_word_embeddings=False)
    decoder.vocab = owned
    changed = {name: tensor.clone() for name, tensor in decoder.snapshot().items()}
    changed["head"][55] = 4 * changed["head"][7]
    decoder.load_snapshot(changed)
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=8, page_size=8))
    engine.submit(request(0, [1, 2, 3], n=8, new=6, interactive=True))
    for trajectory in drain(engine):
        engine.extend(0, trajectory.sample_index, [4, 5])
    done = drain(engine)
    sampled = {token for trajectory in done for token in trajectory.sampled_token_ids}
    assert (55 in sampled) == (owned == 61) and max(sampled) < owned
    for trajectory, scored_N in zip(done, score(decoder, done, 64), strict=True):
        recorded = [p for p, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
        assert len(recorded) == 12 and same_bits(torch.tensor(recorded), scored_N)
