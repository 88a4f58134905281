"""Who holds which page of the KV cache: a free list and reference counts. No tensors, no policy."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """`pages` pages of `page_size` tokens. A page is free again when its last holder releases it."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has checked `free`."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held already."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
