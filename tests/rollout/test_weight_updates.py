"""New weights in mid flight: between steps, whole or not at all, and every token says which version made it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.builders import bits, by_sample, drain, request, run
from tests.rollout.hash_decoder import HashDecoder
from zerogap.model.decoder import WeightMismatch
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.trajectory import Trajectory


def weights(value: int) -> dict[str, torch.Tensor]:
    return {"embed": torch.tensor([value]), "extra": torch.tensor([value])}


def spans(trajectory: Trajectory) -> list[int]:
    return [v for v, m in zip(trajectory.versions, trajectory.loss_mask, strict=True) if m]


def check_every_token(trajectory: Trajectory) -> None:
    """Each sampled token is what a fresh engine on exactly its version says after the same prefix, and no other is.

    Version v of the hash decoder has weight v + 1.
    """
    t = trajectory
    prompt = t.loss_mask.count(0)
    for position in range(prompt, len(t.token_ids)):
        made_by = []
        for version in range(max(t.versions) + 1):
            decoder = HashDecoder(weight=version + 1)
            engine = EmbeddedEngine(decoder, None, EngineConfig(page_size=64))
            engine.submit(request(t.group_id, t.token_ids[:position], n=t.sample_index + 1, new=1))
            (again,) = [d for d in drain(engine) if d.sample_index == t.sample_index]
            if again.token_ids[-1] == t.token_ids[position] and again.logprobs[-1] == t.logprobs[position]:
                made_by.append(version)
        assert made_by == [t.versions[position]], f"token {position}"


def test_labels_come_from_the_weights_that_made_the_token() -> None:
    """Field case 22: 3 tokens at v3, then 2 at v4, read after the update; one waits in the queue across it."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(max_running=1), version=3)
    engine.submit(request(0, [1, 2], new=5))
    engine.submit(request(1, [3], new=2))
    for _ in range(3):
        assert engine.step() == []
    engine.load_weights(4, weights(9))
    first, queued = drain(engine)
    assert spans(first) == [3, 3, 3, 4, 4]
    assert spans(queued) == [4, 4]


def test_five_buckets_are_one_version_step() -> None:
    """Field case 22: nothing changes with a bucket, everything with the commit."""
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig())
    engine.submit(request(0, [1, 2], new=6))
    for bucket in ({"embed": torch.tensor([7])}, {}, {"extra": torch.tensor([7])}, {}, {}):
        engine.stage_weights(1, bucket)
        engine.step()
        assert engine.version == 0
        assert int(decoder.weights["embed"].data) == int(decoder.weights["extra"].data) == 1
    engine.commit_weights(1)
    assert engine.version == 1
    assert engine.stats()["weight_updates"] == 1
    (t,) = drain(engine)
    assert spans(t) == [0, 0, 0, 0, 0, 1]


def test_sender_that_dies_after_half_of_the_buckets_changes_nothing() -> None:
    """Field case 21: 8 requests decode, half of the tensors arrive; old weights bit for bit, version unchanged."""
    requests = [request(g, range(g, g + 9), new=10) for g in range(8)]
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4))
    for r in requests:
        engine.submit(r)
    done = engine.step()
    engine.stage_weights(1, {"embed": torch.tensor([2])})
    done += engine.step()
    with pytest.raises(WeightMismatch, match="extra"):
        engine.commit_weights(1)
    engine.stage_weights(1, {"extra": torch.tensor([2])})  # what was staged before the failed commit is gone
    with pytest.raises(WeightMismatch, match="embed"):
        engine.commit_weights(1)
    assert engine.version == 0
    done += drain(engine)
    assert by_sample(done) == by_sample(run(HashDecoder(), requests, EngineConfig()))
    assert all(set(spans(t)) == {0} for t in done)
    engine.load_weights(1, weights(2))
    assert engine.version == 1


def test_set_is_never_completed_from_two_senders() -> None:
    """Field case 21: what a dead sender of version 1 left does not complete the buckets of version 2."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig())
    engine.stage_weights(1, {"embed": torch.tensor([2])})
    engine.stage_weights(2, {"extra": torch.tensor([3])})
    with pytest.raises(WeightMismatch, match="embed"):
        engine.commit_weights(2)
    engine.stage_weights(2, weights(3))
    with pytest.raises(WeightMismatch, match="commit of version 3, but the staged buckets are of 2"):
        engine.commit_weights(3)
    assert engine.version == 0


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        ({**weights(2), "extra": torch.tensor([2], dtype=torch.int32)}, "extra.*int32"),
        ({**weights(2), "extra": torch.tensor([2, 2])}, r"extra.*\(2,\)"),
        ({**weights(2), "other": torch.tensor([2])}, "other"),
    ],
)
def test_wrong_tensor_is_refused_whole(bucket: dict[str, torch.Tensor], message: str) -> None:
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig())
    with pytest.raises(WeightMismatch, match=message):
        engine.load_weights(1, bucket)
    assert engine.version == 0
    assert int(decoder.weights["embed"].data) == 1


def test_versions_must_grow() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(), version=5)
    for version in (4, 5):
        with pytest.raises(ValueError, match=f"version {version} cannot follow version 5"):
            engine.load_weights(version, weights(2))
    engine.load_weights(9, weights(2))
    assert engine.version == 9


def test_prefix_of_old_weights_is_never_reused() -> None:
    """Field case 16: the same prompt before and after a big change, and one request in flight during it."""
    config = EngineConfig(page_size=4, max_batched_tokens=8, max_running=4)
    engine = EmbeddedEngine(HashDecoder(), None, config)
    engine.submit(request(0, range(12), n=4, new=6))
    drain(engine)
    engine.submit(request(1, range(12), n=4, new=6))  # in flight: the prefix is half computed, or forked by some
    for _ in range(2):
        engine.step()
    assert engine._scheduler.prefixes
    engine.load_weights(1, weights(77))
    assert not engine._scheduler.prefixes
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
    engine.submit(request(2, range(12), n=4, new=6))
    done = drain(engine)
    fresh = run(HashDecoder(weight=77), [request(g, range(12), n=4, new=6) for g in (1, 2)], EngineConfig())
    assert by_sample(done) == by_sample(fresh)


def test_samples_in_flight_share_one_recomputed_prefix() -> None:
    """After an update the prompt of a group is computed once again, not once for each sample."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=8))
    engine.submit(request(0, range(33), n=8, new=10))
    for _ in range(4):
        engine.step()
    before = engine.stats()["prefill_tokens"]
    engine.load_weights(1, weights(2))
    done = drain(engine)
    # 32 of the prompt once; the last prompt token and 3 sampled ones (of which the last row samples) for each of 8
    assert engine.stats()["prefill_tokens"] - before == 32 + 8 * 3
    assert engine.stats()["preemptions"] == 0
    for t in done[:2]:
        check_every_token(t)


def test_kv_of_another_version_stops_the_forward() -> None:
    """Field case 16, the guard behind the guard: were a page to survive an update, the engine would not go on."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig())
    engine.submit(request(0, range(6)))
    engine.step()
    engine._version = 1
    with pytest.raises(RuntimeError, match="KV of weight version 0 met a forward of version 1"):
        engine.step()


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(["recompute", "finish"]),
    shapes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=4),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    spare_pages=st.integers(0, 12),
    max_running=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 24),
)
def test_each_token_is_made_by_exactly_one_complete_version(
    policy: str,
    shapes: list[tuple[int, int, int]],
    waits: list[int],
    spare_pages: int,
    max_running: int,
    max_batched_tokens: int,
) -> None:
    """Field cases 21 to 23 under any timing: labels, spans and bits agree; "finish" gives one version each."""
    pages = -(-max(p + new - 1 for p, _, new in shapes) // 4) + spare_pages
    config = EngineConfig(max_running, max_batched_tokens, 4, kv_tokens=4 * pages, on_update=policy)  # type: ignore[arg-type]
    engine = EmbeddedEngine(HashDecoder(), None, config)
    for g, (prompt, n, new) in enumerate(shapes):
        engine.submit(request(g, range(prompt), n=n, new=new))
    done = []
    for version, steps in enumerate(waits, start=1):
        for _ in range(steps):
            done += engine.step()
        engine.load_weights(version, weights(version + 1))
    done += drain(engine)
    assert engine.version == len(waits)
    assert len(done) == sum(n for _, n, _ in shapes)
    for t in done:
        assert spans(t) == sorted(spans(t))
        if policy == "finish":
            assert len(set(spans(t))) == 1
    for t in done[:3]:
        check_every_token(t)


def test_finish_ends_running_samples_on_the_old_weights() -> None:
    """Field case 23, continuing switched off: one version for each trajectory; meanwhile nothing new starts."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(max_running=2, on_update="finish"))
    for g, new in enumerate((3, 9, 6, 6)):
        engine.submit(request(g, [g, 1], new=new))
    engine.step()
    engine.load_weights(1, weights(2))
    done = []
    while engine.version == 0:
        assert engine.has_work()
        assert engine.stats()["running"] <= 2
        done += engine.step()
    assert [t.group_id for t in done] == [0, 1]
    done += drain(engine)
    assert [set(spans(t)) for t in done] == [{0}, {0}, {1}, {1}]


def test_finish_takes_pages_from_a_prefix_that_serves_nobody_before_the_swap() -> None:
    """The older group waits for its prefix when the drain begins; the younger one runs and needs the pages."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, kv_tokens=40, on_update="finish"))
    engine.submit(request(0, range(30), n=2, new=2))
    engine.submit(request(1, range(4), new=20))
    engine.step()
    engine.load_weights(1, weights(2))
    done = drain(engine, limit=100)
    assert [(t.group_id, set(spans(t))) for t in done] == [(1, {0}), (0, {1}), (0, {1})]


def test_finish_lets_preempted_samples_end_on_the_old_weights() -> None:
    """Field case 23, some lose their pages meanwhile: they are recomputed on the old weights, not restarted."""
    config = EngineConfig(page_size=2, kv_tokens=28, on_update="finish")
    requests = [request(g, range(4), n=3, new=16) for g in range(2)]
    engine = EmbeddedEngine(HashDecoder(), None, config)
    for r in requests:
        engine.submit(r)
    for _ in range(4):
        engine.step()
    started = {(s.group.request.group_id, s.index) for s in engine._scheduler.running}
    engine.load_weights(1, weights(2))
    preemptions = engine.stats()["preemptions"]
    done = drain(engine)
    assert engine.stats()["preemptions"] > preemptions
    assert {(t.group_id, t.sample_index): set(spans(t)) for t in done} == {
        (g, i): {0} if (g, i) in started else {1} for g in range(2) for i in range(3)
    }
    old, new = (by_sample(run(HashDecoder(weight=w), requests, EngineConfig())) for w in (1, 2))
    for t in done:
        key = (t.group_id, t.sample_index)
        assert bits(t) == (old if key in started else new)[key]


def test_finish_swaps_at_once_when_nothing_runs_and_takes_the_newest() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(on_update="finish"))
    engine.submit(request(0, [1], min_version=1))
    engine.load_weights(1, weights(2))
    assert engine.version == 1
    engine.step()
    engine.load_weights(2, weights(3))
    engine.load_weights(3, weights(4))
    assert engine.version == 1
    with pytest.raises(ValueError, match="version 3 cannot follow version 3"):
        engine.load_weights(3, weights(5))
    engine.abort([0])
    assert engine.version == 3
    assert engine.stats()["weight_updates"] == 2


def test_group_is_held_until_its_min_version() -> None:
    """The lag bound as a property of the request: no token of it from older weights; others pass meanwhile."""
    for policy in ("recompute", "finish"):
        engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(on_update=policy))
        engine.submit(request(0, [1, 2], n=2, min_version=2))
        engine.submit(request(1, [3, 4]))
        (t,) = drain(engine)
        assert t.group_id == 1
        assert (engine.stats()["waiting"], engine.pending()) == (2, [(0, 0), (0, 1)])
        assert engine.step() == []
        engine.load_weights(1, weights(2))
        assert not engine.has_work()
        engine.load_weights(2, weights(3))
        assert all(set(spans(t)) == {2} for t in drain(engine))
