"""How a pool's pages are spread over its registration chunks, and where in them each one lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.drivers import posix
from kvferry.drivers.protocol import HostAddress
from kvferry.hostpool.layout import KVLayout, PageStrides


@dataclass(frozen=True)
class Chunking:
    """Page ``p`` is number ``p % pages_per_chunk`` of chunk ``p // pages_per_chunk``; no page crosses a chunk."""

    layout: KVLayout
    pages: int
    pages_per_chunk: int

    @classmethod
    def choose(cls, layout: KVLayout, pages: int, chunk_nbytes: int) -> Chunking:
        """Spread ``pages`` over chunks of at most ``chunk_nbytes``, or of one page where a page is larger.

        In ``layer_first`` every chunk is as long as the first, since kernels have one layer stride for all of them. The
        pages are spread evenly there, so that fewer pages' bytes stay unused than there are chunks.
        """
        if layout.solid_pages:
            return cls(layout, pages, layout.pages_per_chunk(chunk_nbytes, posix.PAGE_NBYTES))
        most = max(1, chunk_nbytes // layout.page_nbytes)
        count = -(-pages // most)
        return cls(layout, pages, -(-pages // count))

    @property
    def spans(self) -> list[int]:
        """Bytes of each chunk, in whole pages of the operating system."""
        full, rest = divmod(self.pages, self.pages_per_chunk)
        counts = [self.pages_per_chunk] * full + ([rest] if rest else [])
        if not self.layout.solid_pages:
            counts = [self.pages_per_chunk] * len(counts)
        return [-(-count * self.layout.page_nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES for count in counts]

    def strides(self, heads: range | None = None) -> tuple[PageStrides, ...]:
        """By component, where its heads (all, or a range of them) lie in a chunk; ``LayoutError`` for a bad range."""
        return tuple(
            self.layout.strides(number, heads, chunk_pages=self.pages_per_chunk)
            for number in range(len(self.layout.components))
        )

    def runs(self, bases: Sequence[int], page: int) -> list[tuple[HostAddress, int]]:
        """(address, bytes) of each contiguous run of a page, where ``bases`` are the addresses of the chunks.

        One run, or in ``layer_first`` one a component and layer, in this order.
        """
        chunk, number = divmod(page, self.pages_per_chunk)
        if self.layout.solid_pages:
            nbytes = self.layout.page_nbytes
            return [(HostAddress(bases[chunk] + number * nbytes), nbytes)]
        return [
            (HostAddress(bases[chunk] + s.offset + number * s.page + layer * s.layer), s.page)
            for s in self.strides()
            for layer in range(self.layout.layers)
        ]
