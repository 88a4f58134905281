"""Episodes of several turns on the hash decoder: no interleaving, eviction, pool or update may change a token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.builders import drain, pages_needed, request
from tests.rollout.caller import Answer, Caller, alone, parked, turn_bits
from tests.rollout.hash_decoder import VOCAB, HashDecoder
from tests.rollout.test_weight_updates import spans, weights
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, Trajectory

CONTEXT = 64
Answers = dict[int, list[Answer]]

answers = st.lists(
    st.builds(
        Answer,
        kind=st.sampled_from(["extend", "extend", "extend", "segment", "retry"]),
        tokens=st.integers(1, 12) | st.just(40),
        delay=st.integers(0, 6) | st.just(40),
    ),
    max_size=4,
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[GroupRequest], Answers]:
    """Groups of episodes, and single-turn groups among them."""
    requests: list[GroupRequest] = []
    following: Answers = {}
    for group_id in range(draw(st.integers(1, 5))):
        interactive = draw(st.integers(0, 3)) > 0
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        n, new = draw(st.integers(1, 5)), draw(st.integers(1, 10))
        requests.append(request(group_id, prompt, n=n, new=new, interactive=interactive))
        if interactive:
            following[group_id] = draw(answers)
    return requests, following


@settings(max_examples=60, deadline=None)
@given(
    workload=workloads(),
    page_size=st.sampled_from([1, 2, 3, 8, 16]),
    spare_pages=st.integers(0, 20),
    max_running=st.integers(1, 8),
    max_batched_tokens=st.integers(1, 64),
    eos=st.sampled_from([(), (3,), (3, 7, 9)]),
    data=st.data(),
)
def test_no_interleaving_eviction_chunk_page_or_pool_size_changes_a_turn(
    workload: tuple[list[GroupRequest], Answers],
    page_size: int,
    spare_pages: int,
    max_running: int,
    max_batched_tokens: int,
    eos: tuple[int, ...],
    data: st.DataObject,
) -> None:
    """From the smallest pool upward every episode ends, each turn with the bits of its episode alone and unevicted."""
    requests, following = workload
    pages = pages_needed(requests, page_size, CONTEXT) + spare_pages
    config = EngineConfig(max_running, max_batched_tokens, page_size, pages * page_size)
    engine = EmbeddedEngine(HashDecoder(eos=eos, context=CONTEXT), None, config)
    caller = Caller(engine, following)
    for r in requests:
        caller.submit(r)
        for _ in range(data.draw(st.integers(0, 5))):
            caller.step()
    caller.drain()
    assert engine.pending() == []
    stats = engine.stats()
    assert (stats["pages_free"], stats["running"], stats["waiting"], stats["parked"]) == (pages, 0, 0, 0)
    assert turn_bits(caller) == alone(HashDecoder(eos=eos, context=CONTEXT), requests, following, CONTEXT)


def redrawn(turn: Trajectory, position: int, weight: int) -> tuple[int, float]:
    """The token at this position and its logprob, from a fresh engine on these weights after the same ids."""
    engine = EmbeddedEngine(HashDecoder(weight, context=CONTEXT), None, EngineConfig(page_size=64))
    engine.submit(request(turn.group_id, [0], n=turn.sample_index + 1, new=1, interactive=True))
    engine.step()
    engine.restart(turn.group_id, turn.sample_index, turn.token_ids[:position], turn.segment)
    (again,) = drain(engine)
    return again.token_ids[-1], again.logprobs[-1]


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(["recompute", "finish"]),
    workload=workloads(),
    waits=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    spare_pages=st.integers(0, 12),
    max_running=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 24),
)
def test_each_token_of_an_episode_is_made_by_exactly_one_complete_version(
    policy: str,
    workload: tuple[list[GroupRequest], Answers],
    waits: list[int],
    spare_pages: int,
    max_running: int,
    max_batched_tokens: int,
) -> None:
    """Field cases 16 and 21 to 23 between turns: version v has weight v + 1. "finish" gives one version an episode."""
    requests, following = workload
    pages = pages_needed(requests, 4, CONTEXT) + spare_pages
    config = EngineConfig(max_running, max_batched_tokens, 4, 4 * pages, on_update=policy)  # type: ignore[arg-type]
    engine = EmbeddedEngine(HashDecoder(context=CONTEXT), None, config)
    caller = Caller(engine, following)
    for r in requests:
        caller.submit(r)
    for version, steps in enumerate(waits, start=1):
        for _ in range(steps):
            caller.step()
        engine.load_weights(version, weights(version + 1))
    caller.drain()
    assert engine.version == len(waits)
    for turns in caller.turns.values():
        assert policy == "recompute" or len({v for turn in turns for v in spans(turn)}) == 1
    for turn in caller.ended[:4]:
        assert spans(turn) == sorted(spans(turn))
        for position in [p for p, sampled in enumerate(turn.loss_mask) if sampled][-6:]:
            found = (turn.token_ids[position], turn.logprobs[position])
            made_by = [v for v in range(len(waits) + 1) if redrawn(turn, position, v + 1) == found]
            assert made_by == [turn.versions[position]]


def test_a_parked_sample_has_no_slot_keeps_its_pages_and_goes_on_from_them() -> None:
    """5 prompt tokens and 4 sampled hold 8 tokens of KV; 6 more make 7 rows (the newest token's are not there yet)."""
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(page_size=4, kv_tokens=64))
    turn = parked(engine, 0)
    assert (turn.finish_reason, turn.loss_mask, turn.turns) == ("length", [0] * 5 + [1] * 4, 1)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["parked"], stats["pages_free"]) == (0, 0, 1, 14)
    assert not engine.has_work() and engine.pending() == [(0, 0)] and engine.step() == []
    engine.extend(0, 0, range(30, 36))
    assert engine.has_work() and engine.stats()["parked"] == 0
    (second,) = drain(engine)
    assert decoder.forwards == [(5,), (1,), (1,), (1,), (7,), (1,), (1,), (1,)]
    assert second.token_ids[:15] == turn.token_ids + list(range(30, 36))
    assert (second.loss_mask, second.turns, second.num_sampled) == ([0] * 5 + [1] * 4 + [0] * 6 + [1] * 4, 2, 8)
    assert len(turn.token_ids) == 9, "what was handed out does not grow"
    engine.end(0, 0)
    assert engine.pending() == [] and engine.stats()["pages_free"] == 16


def test_parked_pages_go_first_the_youngest_first_and_the_turns_stay_the_same() -> None:
    """Three parked, 2 pages each, of 8; a fourth sample needs 4: those of the youngest parked one go, nobody is
    preempted."""
    config = EngineConfig(page_size=4, kv_tokens=32)
    engine = EmbeddedEngine(HashDecoder(), None, config)
    caller = Caller(engine, {g: [Answer("extend", 3, delay=20)] for g in range(3)})
    for g in range(3):
        caller.submit(request(g, range(5), new=4, interactive=True))
    for _ in range(4):
        caller.step()
    assert engine.stats()["parked"] == 3
    caller.submit(request(3, range(8), new=6))
    for _ in range(6):
        caller.step()
    assert [len(g.samples[0].pages) for g in engine._scheduler.groups.values()] == [2, 2, 0]
    assert (engine.stats()["evictions"], engine.stats()["preemptions"]) == (1, 0)
    caller.drain()
    expected = alone(
        HashDecoder(), [request(g, range(5), new=4, interactive=True) for g in range(3)], caller._answers, 64
    )
    assert {place: found for place, found in turn_bits(caller).items() if place[0] < 3} == expected


def test_an_older_sample_that_comes_back_takes_the_slot_of_the_youngest_which_loses_no_page() -> None:
    """One slot. The first episode waits for its tool while the second runs, and comes back; then the second goes on."""
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=1, page_size=4))
    parked(engine, 0)
    engine.submit(request(1, range(6), new=9))
    for _ in range(3):
        assert engine.step() == []
    engine.extend(0, 0, [7])
    assert (engine.stats()["pauses"], engine.stats()["waiting"], engine.stats()["running"]) == (1, 2, 0)
    assert [(t.group_id, t.turns) for t in drain(engine)] == [(0, 2), (1, 1)]
    rows = [count for counts in decoder.forwards for count in counts]
    assert rows == [5, 1, 1, 1, 6, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]  # nothing is computed twice
    engine.extend(0, 0, [7])
    drain(engine)
    engine.submit(request(2, range(6), new=9))
    engine.step()
    engine.submit(request(3, range(6), new=2, interactive=True))
    while (2, 0) in engine.pending():
        engine.step()
    drain(engine)
    engine.extend(0, 0, [7])
    engine.step()
    engine.extend(3, 0, [7])  # the younger one waits for its slot
    assert (engine.stats()["pauses"], engine.stats()["running"]) == (1, 1)
    assert [t.group_id for t in drain(engine)] == [0, 3]


def test_sixteen_episodes_end_in_a_pool_for_one() -> None:
    """Every page that the longest sequence needs and not one more, two slots, three turns each: the oldest goes on."""
    requests = [request(g, range(g, g + 9), n=4, new=6, interactive=True) for g in range(4)]
    following = {g: [Answer("extend", 10, delay=g), Answer("extend", 12)] for g in range(4)}
    config = EngineConfig(max_running=2, page_size=4, kv_tokens=48)  # 9 + 10 + 12 + 3 * 6 - 1
    engine = EmbeddedEngine(HashDecoder(), None, config)
    caller = Caller(engine, following)
    for r in requests:
        caller.submit(r)
    caller.drain()
    assert engine.pending() == [] and engine.stats()["evictions"] > 0
    assert {t.turns for t in caller.ended} == {3}
    assert turn_bits(caller) == alone(HashDecoder(), requests, following, 256)


def test_end_and_abort_release_the_pages_of_parked_samples() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, kv_tokens=400))
    for g in range(2):
        engine.submit(request(g, range(9), n=3, new=4, interactive=True))
    drain(engine)
    assert engine.pending() == [(g, i) for g in range(2) for i in range(3)]
    engine.end(0, 1)
    engine.extend(0, 0, [5] * 30)
    engine.abort([1])
    assert engine.pending() == [(0, 0), (0, 2)]
    drain(engine)
    engine.end(0, 0)
    engine.end(0, 2)
    assert engine.pending() == [] and engine.stats()["pages_free"] == 100
    engine.submit(request(0, range(5)))  # the id is free again
    assert len(drain(engine)) == 1


def test_new_weights_drop_parked_pages_or_wait_for_the_end_of_the_episode() -> None:
    """Field cases 16 and 23. recompute: tokens keep their versions, the next turn is prefilled on the new weights.
    finish: the swap waits for a parked sample, nobody else starts."""
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, kv_tokens=64))
    parked(engine, 0)
    engine.load_weights(1, weights(2))
    assert engine.stats()["pages_free"] == 16
    engine.extend(0, 0, [5, 6])
    (turn,) = drain(engine)
    assert spans(turn) == [0] * 4 + [1] * 4
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, on_update="finish"))
    parked(engine, 0)
    engine.load_weights(1, weights(2))
    engine.submit(request(1, range(5)))
    assert engine.version == 0 and not engine.has_work()
    engine.extend(0, 0, [5, 6])
    (turn,) = drain(engine)
    engine.restart(0, 0, [5, 6], 1)
    (segment,) = drain(engine)
    assert set(spans(turn) + spans(segment)) == {0}
    engine.end(0, 0)
    assert engine.version == 1
    (other,) = drain(engine)
    assert set(spans(other)) == {1}
