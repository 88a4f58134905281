"""Which rows run and who holds pages, on the hash decoder: no request mix or pool size may change a token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.builders import alone, by_sample, drain, pages_needed, request, run
from tests.rollout.hash_decoder import VOCAB, HashDecoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.embedded.pages import PagePool
from zerogap.rollout.embedded.scheduler import Scheduler
from zerogap.trajectory import GroupRequest

CONTEXT = 64


@st.composite
def workloads(draw: st.DrawFn) -> list[GroupRequest]:
    groups = draw(st.integers(1, 6))
    return [
        request(
            group_id,
            draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)),
            n=draw(st.integers(1, 8)),
            new=draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([0.5, 1.0])),
        )
        for group_id in range(groups)
    ]


@settings(max_examples=150, deadline=None)
@given(
    requests=workloads(),
    page_size=st.sampled_from([1, 2, 3, 8, 16]),
    spare_pages=st.integers(0, 30),
    max_running=st.integers(1, 12),
    max_batched_tokens=st.integers(1, 64),
    eos=st.sampled_from([(), (3,), (3, 7, 9)]),
    data=st.data(),
)
def test_no_request_mix_chunk_page_or_pool_size_changes_a_token(
    requests: list[GroupRequest],
    page_size: int,
    spare_pages: int,
    max_running: int,
    max_batched_tokens: int,
    eos: tuple[int, ...],
    data: st.DataObject,
) -> None:
    """From the smallest pool that submit accepts upward: everything ends (no livelock), with the bits of each alone.

    Groups arrive while others run.
    """
    decoder = HashDecoder(eos=eos, context=CONTEXT)
    pages = pages_needed(requests, page_size, CONTEXT) + spare_pages
    config = EngineConfig(max_running, max_batched_tokens, page_size, kv_tokens=pages * page_size)
    engine = EmbeddedEngine(decoder, None, config)
    done = []
    for r in requests:
        engine.submit(r)
        for _ in range(data.draw(st.integers(0, 5))):
            done += engine.step()
    done += drain(engine)
    assert engine.stats()["pages_free"] == pages
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert all(sum(rows) <= max_batched_tokens and len(rows) <= max_running + 6 for rows in decoder.forwards)
    assert by_sample(done) == alone(HashDecoder(eos=eos, context=CONTEXT), requests)


def test_tiny_pool_preempts_and_every_sample_still_ends() -> None:
    """16 samples, pages for one of them: the oldest always goes on (the no-livelock argument in scheduler.py)."""
    requests = [request(g, range(g, g + 10), n=4, new=22) for g in range(4)]
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=8, page_size=4, kv_tokens=32))
    for r in requests:
        engine.submit(r)
    done = drain(engine)
    assert engine.stats()["preemptions"] > 0
    assert [(t.group_id, t.sample_index) for t in done] == [(g, i) for g in range(4) for i in range(4)]
    assert by_sample(done) == alone(HashDecoder(), requests)


def test_sample_takes_over_the_prefix_where_the_pool_has_no_page_for_a_copy() -> None:
    """Two pages, a prompt of one and a half: a fork by copy can never succeed, so waiting for it would be for ever."""
    requests = [request(0, range(12), n=3, new=4)]
    done = run(HashDecoder(), requests, EngineConfig(page_size=8, kv_tokens=16))
    assert by_sample(done) == alone(HashDecoder(), requests)


def test_sample_preempted_while_rows_are_handed_out_gets_none() -> None:
    """The youngest loses its page to the first, the next youngest frees more than is asked for: still not for it."""
    scheduler = Scheduler(PagePool(7, 2), 8, 100, lambda source, target: None)
    for g, prompt in enumerate(([1, 2], [1, 2], range(8), [1])):
        scheduler.add(request(g, prompt))
    scheduler.schedule(0)
    first, second, long, single = scheduler.running
    for sample in (first, second):
        sample.computed = 2
        sample.append(5, -1.0, 0)
    long.computed = 7
    assert scheduler.schedule(0) == [(first, 1), (second, 1)]
    assert scheduler.preemptions == 2
    assert long.pages == single.pages == []


def test_oldest_sample_is_never_preempted() -> None:
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=8, page_size=2, kv_tokens=40))
    for g in range(3):
        engine.submit(request(g, range(8), n=3, new=20))
    computed = 0
    oldest = engine._scheduler.groups[0].samples[0]
    while (0, 0) in engine.pending():
        engine.step()
        assert oldest.computed >= computed or (0, 0) not in engine.pending()
        computed = oldest.computed
    assert engine.stats()["preemptions"] > 0


def test_group_prompt_is_computed_once() -> None:
    """n = 8: prompt[:-1] once, then one row for each sample's last prompt token; nothing else is prefilled."""
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(page_size=8, max_context=64))
    engine.submit(request(0, range(21), n=8, new=5))
    done = drain(engine)
    assert decoder.forwards == [(20,)] + [(1,) * 8] * 5
    assert engine.stats()["prefill_tokens"] == 20
    assert engine.stats()["prefix_forks"] == 8
    assert by_sample(done) == alone(HashDecoder(), [request(0, range(21), n=8, new=5)])


@pytest.mark.parametrize(("prompt", "n"), [([5], 1), ([5], 8), (list(range(9)), 1), (list(range(9)), 8)])
def test_single_token_prompts_and_single_samples_need_no_prefix(prompt: list[int], n: int) -> None:
    requests = [request(0, prompt, n=n)]
    assert by_sample(run(HashDecoder(), requests, EngineConfig(page_size=4))) == alone(HashDecoder(), requests)


def test_decode_rows_go_before_prefill_chunks() -> None:
    decoder = HashDecoder()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_batched_tokens=10))
    engine.submit(request(0, range(4), new=8))
    engine.step()
    engine.submit(request(1, range(30), new=2))
    drain(engine)
    assert decoder.forwards[1:5] == [(1, 9), (1, 9), (1, 9), (1, 3)]


def test_max_running_bounds_the_samples_of_a_forward() -> None:
    decoder = HashDecoder()
    run(decoder, [request(g, range(5), n=3) for g in range(4)], EngineConfig(max_running=5))
    assert max(len(rows) for rows in decoder.forwards if set(rows) == {1}) == 5


def test_prefix_pages_are_released_when_all_samples_have_forked() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, kv_tokens=256))
    engine.submit(request(0, range(14), n=4, new=2))
    engine.step()
    assert engine.stats()["pages_free"] == 64 - 4
    engine.step()  # 3 full pages shared, a last one for each; the last sample took over the prefix's own
    assert engine.stats()["pages_free"] == 64 - 3 - 4


def test_abort_forgets_a_group_and_leaves_the_others_alone() -> None:
    requests = [request(g, range(12), n=4, new=10) for g in range(3)]
    for steps in range(6):
        engine = EmbeddedEngine(HashDecoder(), None, EngineConfig(page_size=4, max_batched_tokens=16))
        for r in requests:
            engine.submit(r)
        for _ in range(steps):
            assert engine.step() == []
        engine.abort([1, 77])
        assert {group_id for group_id, _ in engine.pending()} == {0, 2}
        assert by_sample(drain(engine)) == alone(HashDecoder(), [requests[0], requests[2]])
        assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_aborted_group_may_be_submitted_again() -> None:
    engine = EmbeddedEngine(HashDecoder(), None, EngineConfig())
    engine.submit(request(0, range(5)))
    engine.step()
    engine.abort([0])
    assert not engine.has_work()
    engine.submit(request(0, range(5)))
    assert by_sample(drain(engine)) == alone(HashDecoder(), [request(0, range(5))])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 100)), max_size=60))
def test_page_is_free_exactly_when_its_last_holder_released_it(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(10, 4)
    holds: list[list[int]] = []
    for action, number in actions:
        if action == "allocate" and number % 4 <= pool.free:
            holds.append(pool.allocate(number % 4))
        elif action == "share" and holds:
            pool.share(holds[number % len(holds)])
            holds.append(list(holds[number % len(holds)]))
        elif action == "release" and holds:
            pool.release(holds.pop(number % len(holds)))
        held = {page for pages in holds for page in pages}
        assert pool.free == 10 - len(held)
    for pages in holds:
        pool.release(pages)
    assert sorted(pool.allocate(10)) == list(range(10))
