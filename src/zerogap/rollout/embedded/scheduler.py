"""Decides which rows run next and who holds pages: batching, prefix sharing, preemption, parking. No tensors.

Two rules carry everything. A step runs rows tokens[computed : computed + chunk] of some sequences. When pages run
out, the asker takes those of samples without a slot (parked, or waiting again), then it preempts holders younger than
itself, each time the youngest first: pages released, computed = 0, tokens kept.

Why nothing waits for ever. Let s be the oldest unfinished sample that may run: not parked, not held by its min_version
or by a drain. Assume that finitely many groups and turns arrive meanwhile.
(1) While s runs nobody can take its pages or its slot: only an older asker could, and there is none. (A prefix that is
    older than s has an older waiting sample; a prefix of its own group asks for pages only on behalf of a waiting
    sample that is younger than s, so it is younger too.)
(2) While s waits, it has a slot, because no older sample runs and of younger ones at most max_running - 1: they start
    only on slots that no older waiting sample needs, a preempted sample leaves its own, and a sample that comes back
    when younger ones have all slots takes that of the youngest (see `come_back`).
    It has pages, because those of samples without a slot are anybody's. If it is to fork its group's prefix, that is
    the oldest of all and can take every page, and it fits because s fits (the engine refuses what does not); then s can
    take every page except the prefix's, and when even the copied page is missing it takes over the prefix's own pages,
    which always suffices (see `_fork`). Else it keeps what pages it has and can take every other.
(3) The rows of s are scheduled: one row of s goes first among the decode rows; a longer rest goes first among the
    prefill chunks, behind decode rows that are finite in number (new ones come only from prefills behind s, or from
    finitely many finished prefixes).
So s computes and samples, and its turn ends after at most max_new_tokens tokens; then the next oldest's does. A turn
makes its sequence longer, up to the context, and its caller restarts an episode finitely often: every episode ends.
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
    running: samples with a slot, oldest first; they hold pages. spare: samples without one that hold pages, oldest
        first. prefixes: prefixes that hold pages.
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
        self.spare: list[Sample] = []
        self.prefixes: list[Prefix] = []
        self.draining = False
        self.preemptions = 0
        self.evictions = 0
        self.pauses = 0
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

    def park(self, sample: Sample) -> None:
        """Its turn has ended: it leaves its slot, and keeps its pages until somebody needs them."""
        self.running.remove(sample)
        sample.state = "parked"
        insort(self.spare, sample, key=by_age)

    def come_back(self, sample: Sample) -> None:
        """A parked sample goes on. Where no slot is free, it takes that of the youngest sample if that is younger."""
        self._wait(sample)
        if len(self.running) == self.max_running and self.running[-1].order > sample.order:
            youngest = self.running.pop()
            self._wait(youngest)
            insort(self.spare, youngest, key=by_age)
            self.pauses += 1

    def restart(self, sample: Sample, prompt: list[int], segment: int) -> None:
        """A parked sample goes on from another prompt."""
        self._withdraw(sample)
        sample.begin(prompt, segment)
        self.come_back(sample)

    def finish(self, sample: Sample) -> None:
        """The sample, running or parked, has ended: release what it holds."""
        self._withdraw(sample)
        group = sample.group
        group.samples.remove(sample)
        if not group.samples:
            del self.groups[group.request.group_id]
        self._drop_useless_prefix(group)

    def abort(self, group_id: int) -> None:
        group = self.groups.pop(group_id)
        for sample in group.samples:
            self._withdraw(sample)
        group.waiting.clear()
        self._drop_useless_prefix(group)

    def drop_all(self) -> None:
        """Release every page (weight update): running samples wait again, all keep their tokens."""
        for holder in (*self.prefixes, *self.running, *self.spare):
            self._drop(holder)

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
                shared = not prefix.pages and prefix.tokens and sample.forks
                if shared and sum(other.forks for other in waiting[i:]) >= 2 and not self._start_prefix(prefix):
                    return
                forks = sample.forks and bool(prefix.pages)
                if forks and prefix.remaining > 0:
                    continue
                if not (self._fork(sample) if forks else self._start(sample)):
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
        """Give the sample pages for all its tokens, beside those it still has; it computes the rest itself."""
        kept = bool(sample.pages)
        if kept:
            self.spare.remove(sample)
        missing = self.pool.pages_for(len(sample.tokens)) - len(sample.pages)
        if not self._make_room(sample, missing):
            if kept:
                insort(self.spare, sample, key=by_age)
            return False
        sample.pages += self.pool.allocate(missing)
        if not kept:
            sample.kv_version = self._version
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
        is_last = sum(other.forks for other in self.startable(sample.group)) == 1
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
        sample.kv_version = prefix.kv_version
        self.prefix_forks += 1
        self._run(sample)
        self._drop_useless_prefix(sample.group)
        return True

    def _run(self, sample: Sample) -> None:
        sample.started = True
        sample.state = "running"
        sample.group.waiting.remove(sample)
        insort(self.running, sample, key=by_age)

    def _wait(self, sample: Sample) -> None:
        sample.state = "waiting"
        insort(sample.group.waiting, sample, key=by_age)

    def _make_room(self, asker: Sequence, pages: int) -> bool:
        """Take pages of others, by the rule above, until `pages` of them are free."""
        while self.pool.free < pages:
            if self.spare:
                self._drop(self.spare[-1])
                self.evictions += 1
                continue
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
        if isinstance(holder, Prefix):
            self.prefixes.remove(holder)
        elif isinstance(holder, Sample):
            if holder.state == "running":
                self.running.remove(holder)
                self._wait(holder)
            else:
                self.spare.remove(holder)

    def _drop_useless_prefix(self, group: Group) -> None:
        if group.prefix.pages and not any(sample.forks for sample in self.startable(group)):
            self._drop(group.prefix)

    def _withdraw(self, sample: Sample) -> None:
        """Out of its slot, and of all its pages."""
        if sample.state == "running":
            self.running.remove(sample)
        elif sample.pages:
            self.spare.remove(sample)
        self._release(sample)

    def _release(self, holder: Sequence) -> None:
        self.pool.release(holder.pages)
        holder.pages, holder.computed = [], 0
