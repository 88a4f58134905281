"""Decides which rows run next and who holds pages: continuous batching, prefix sharing, preemption. No tensors.

Two rules carry everything. A step runs rows tokens[computed : computed + chunk] of some sequences. When pages run
out, the asker may preempt holders younger than itself, the youngest first: pages released, computed = 0, tokens kept.

Why nothing waits for ever. Let s be the oldest unfinished sample that may run.
(1) While s holds pages nobody can take them: only an older asker could, and there is none. (A prefix that is older
    than s has an older waiting sample; a prefix of its own group asks for pages only on behalf of a waiting sample
    that is younger than s, so it is younger too.)
(2) While s waits, it has a slot: younger samples start only on slots that no older waiting sample needs, and a
    preempted sample leaves its own. Its group's prefix is then the oldest of all and can take every page, and it fits
    because s fits (submit refuses what does not); then s can take every page except the prefix's, and when even the
    copied page is missing it takes over the prefix's own pages, which always suffices (see `_fork`).
(3) The rows of s are scheduled: one row of s goes first among the decode rows; a longer rest goes first among the
    prefill chunks, behind decode rows that are finite in number (new ones come only from prefills behind s, or from
    finitely many finished prefixes).
So s computes, samples and ends after at most max_new_tokens tokens, then the next oldest does.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from zerogap.rollout.embedded.pages import PagePool
from zerogap.rollout.embedded.sequence import Group, Prefix, Sample, Sequence
from zerogap.trajectory import GroupRequest

by_age = attrgetter("order")


class Scheduler:
    """Owns groups, their samples and prefixes, and the page pool.

    copy_page: called with (source, target) when a shared prefix's last, partial page is copied.
    running: samples that hold pages, oldest first. prefixes: prefixes that hold pages.
    draining: no sample that has not run yet may start (on_update "finish", until the swap).
    """

    def __init__(
        self, pool: PagePool, max_running: int, max_batched_tokens: int, copy_page: Callable[[int, int], None]
    ) -> None:
        self.pool = pool
        self.max_running = max_running
        self.max_batched_tokens = max_batched_tokens
        self.groups: dict[int, Group] = {}
        self.running: list[Sample] = []
        self.prefixes: list[Prefix] = []
        self.draining = False
        self.preemptions = 0
        self.prefix_forks = 0
        self._copy_page = copy_page
        self._arrivals = 0
        self._version = 0
        self._batch: dict[Sequence, int] = {}
        self._budget = 0

    def add(self, request: GroupRequest) -> None:
        self._arrivals += 1
        self.groups[request.group_id] = Group(request, self._arrivals)

    def schedule(self, version: int) -> list[tuple[Sequence, int]]:
        """(sequence, rows) of the next forward, on weights `version`. Every row has its page."""
        self._version, self._batch, self._budget = version, {}, self.max_batched_tokens
        for sample in list(self.running):
            # A younger sample in this copy may have lost its pages to an older one; then it has none to grow.
            if self._budget > 0 and sample.remaining == 1 and sample.pages and self._grow(sample):
                self._batch[sample] = 1
                self._budget -= 1
        if self._budget > 0:
            self._admit()
        rest = [sequence for sequence in (*self.prefixes, *self.running) if sequence not in self._batch]
        for sequence in sorted(rest, key=by_age):
            ready = len(sequence.pages) >= self.pool.pages_for(len(sequence.tokens))
            rows = min(sequence.remaining, self._budget)
            if ready and rows > 0:
                self._batch[sequence] = rows
                self._budget -= rows
        return list(self._batch.items())

    def finish(self, sample: Sample) -> None:
        """The sample has ended: release what it holds."""
        self._release(sample)
        self.running.remove(sample)
        group = sample.group
        group.samples.remove(sample)
        if not group.samples:
            del self.groups[group.request.group_id]
        self._drop_useless_prefix(group)

    def abort(self, group_id: int) -> None:
        group = self.groups.pop(group_id)
        for sample in group.samples:
            if sample.pages:
                self._release(sample)
                self.running.remove(sample)
        group.waiting.clear()
        self._drop_useless_prefix(group)

    def drop_all(self) -> None:
        """Release every page (weight update): running samples wait again and keep their tokens."""
        for prefix in list(self.prefixes):
            self._drop(prefix)
        for sample in list(self.running):
            self._drop(sample)

    def drain(self) -> None:
        """From now on only samples that have run go on; prefixes that serve none of them are released."""
        self.draining = True
        for group in self.groups.values():
            self._drop_useless_prefix(group)

    def startable(self, group: Group) -> list[Sample]:
        """Waiting samples of the group that may run now, oldest first."""
        if self.draining:
            return [sample for sample in group.waiting if sample.started]
        return group.waiting

    def _grow(self, sample: Sample) -> bool:
        """A page for the sample's last token, if it needs one."""
        missing = self.pool.pages_for(len(sample.tokens)) - len(sample.pages)
        if missing > 0:
            if not self._make_room(sample, missing):
                return False
            sample.pages += self.pool.allocate(missing)
        return True

    def _admit(self) -> None:
        """Start waiting samples in order of age until slots or pages run out.

        A sample that waits for its group's prefix keeps its slot reserved. The first lack of pages ends admission:
        younger samples must not pass, they would only be preempted.
        """
        slots = self.max_running - len(self.running)
        for group in list(self.groups.values()):
            if slots <= 0:
                return
            if group.request.min_version > self._version:
                continue
            waiting = list(self.startable(group))
            prefix = group.prefix
            for i, sample in enumerate(waiting[:slots]):
                if not prefix.pages and prefix.tokens and len(waiting) - i >= 2 and not self._start_prefix(prefix):
                    return
                if prefix.pages and prefix.remaining > 0:
                    break
                if not (self._fork(sample) if prefix.pages else self._start(sample)):
                    return
            slots -= len(waiting)

    def _start_prefix(self, prefix: Prefix) -> bool:
        pages = self.pool.pages_for(len(prefix.tokens))
        if not self._make_room(prefix, pages):
            return False
        prefix.pages = self.pool.allocate(pages)
        prefix.kv_version = self._version
        self.prefixes.append(prefix)
        return True

    def _start(self, sample: Sample) -> bool:
        """Give the sample pages for all its tokens; it computes them itself."""
        pages = self.pool.pages_for(len(sample.tokens))
        if not self._make_room(sample, pages):
            return False
        sample.pages = self.pool.allocate(pages)
        self._run(sample)
        return True

    def _fork(self, sample: Sample) -> bool:
        """Start the sample on its group's computed prefix.

        Full pages are shared, the last partial one is copied. The last sample to fork takes the pages over; so does
        any other when nothing runs and the copy finds no page: nobody is left to wait for.
        """
        prefix = sample.group.prefix
        computed = prefix.computed
        total = self.pool.pages_for(len(sample.tokens))
        full = computed // self.pool.page_size
        is_last = len(self.startable(sample.group)) == 1
        if not is_last and self._make_room(sample, total - full):
            fresh = self.pool.allocate(total - full)
            shared = prefix.pages[:full]
            self.pool.share(shared)
            if computed % self.pool.page_size:
                self._copy_page(prefix.pages[full], fresh[0])
            sample.pages = shared + fresh
        elif (is_last or not self.running) and self._make_room(sample, total - len(prefix.pages)):
            sample.pages = prefix.pages + self.pool.allocate(total - len(prefix.pages))
            prefix.pages, prefix.computed = [], 0
            self.prefixes.remove(prefix)
        else:
            return False
        sample.computed = computed
        self.prefix_forks += 1
        self._run(sample)
        self._drop_useless_prefix(sample.group)
        return True

    def _run(self, sample: Sample) -> None:
        sample.started = True
        sample.kv_version = self._version
        sample.group.waiting.remove(sample)
        insort(self.running, sample, key=by_age)

    def _make_room(self, asker: Sequence, pages: int) -> bool:
        """Preempt holders younger than the asker, the youngest first, until `pages` pages are free."""
        while self.pool.free < pages:
            holders = (*self.prefixes, *self.running[-1:])
            victim = max(holders, key=by_age, default=asker)
            if victim.order <= asker.order:
                return False
            self._drop(victim)
            self.preemptions += 1
        return True

    def _drop(self, holder: Sequence) -> None:
        """Back to the start, tokens kept; rows already scheduled in this step are taken back."""
        self._budget += self._batch.pop(holder, 0)
        self._release(holder)
        if isinstance(holder, Sample):
            self.running.remove(holder)
            insort(holder.group.waiting, holder, key=by_age)
        elif isinstance(holder, Prefix):
            self.prefixes.remove(holder)

    def _drop_useless_prefix(self, group: Group) -> None:
        if group.prefix.pages and not self.startable(group):
            self._drop(group.prefix)

    def _release(self, holder: Sequence) -> None:
        self.pool.release(holder.pages)
        holder.pages, holder.computed = [], 0
