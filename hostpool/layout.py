"""How (component, layer, page, slot, head) becomes bytes. Integers only: no memory, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvferry.drivers.errors import LayoutError
from kvferry.kernels_cubin.abi import MAX_COMPONENTS

PageOrder = Literal["page_first_direct", "page_first"]
"""The order of bytes in a host page, outermost first: (layer, slot, head) or (slot, layer, head)."""


def _positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(f"{name} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True)
class Component:
    """One of the arrays that make up the cache: K, V, a latent. ``head_nbytes`` are the bytes of one head's row."""

    name: str
    heads: int
    head_nbytes: int

    def __post_init__(self) -> None:
        _positive(heads=self.heads, head_nbytes=self.head_nbytes)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * self.head_nbytes


@dataclass(frozen=True)
class PageStrides:
    """Where a component lies in a page, in bytes: ``offset + slot*S + layer*L + head*H``."""

    offset: int
    slot: int
    layer: int
    head: int


@dataclass(frozen=True)
class KVLayout:
    """The shape of a KV cache and the byte order of its host pages.

    A page holds ``page_tokens`` tokens of every layer and every component; ``order`` says how they lie in it.
    Components lie one after the other, without padding, so a page is ``page_nbytes`` long and every byte of it is used.

    ``page_first_direct`` (layer, slot, head) keeps a layer of a page in one run, as the layer-first device pool has it;
    ``page_first`` (slot, layer, head) keeps a token's layers together.
    """

    components: tuple[Component, ...]
    layers: int
    page_tokens: int
    order: PageOrder = "page_first_direct"

    def __post_init__(self) -> None:
        _positive(layers=self.layers, page_tokens=self.page_tokens)
        if not 1 <= len(self.components) <= MAX_COMPONENTS:
            raise LayoutError(f"a layout has 1 to {MAX_COMPONENTS} components, not {len(self.components)}")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise LayoutError(f"component names must differ: {', '.join(names)}")
        if self.order not in get_args(PageOrder):
            raise LayoutError(f"order must be one of {', '.join(get_args(PageOrder))}, not {self.order!r}")

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        heads: int,
        head_size: int,
        element_nbytes: int,
        page_tokens: int,
        v_head_size: int | None = None,
        order: PageOrder = "page_first_direct",
    ) -> KVLayout:
        """Multi-head or grouped-query attention: components ``k`` and ``v`` of ``heads`` KV heads."""
        v_size = head_size if v_head_size is None else v_head_size
        _positive(heads=heads, head_size=head_size, v_head_size=v_size, element_nbytes=element_nbytes)
        k = Component("k", heads, head_size * element_nbytes)
        v = Component("v", heads, v_size * element_nbytes)
        return cls((k, v), layers, page_tokens, order)

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        latent_size: int,
        element_nbytes: int,
        page_tokens: int,
        order: PageOrder = "page_first_direct",
    ) -> KVLayout:
        """Multi-head latent attention: one component ``latent`` (the compressed KV and the rotary part together)."""
        _positive(latent_size=latent_size, element_nbytes=element_nbytes)
        return cls((Component("latent", 1, latent_size * element_nbytes),), layers, page_tokens, order)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers and components."""
        return self.layers * sum(component.row_nbytes for component in self.components)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one host page."""
        return self.page_tokens * self.token_nbytes

    def strides(self, component: int) -> PageStrides:
        """Where component number ``component`` lies in a host page."""
        this = self.components[component]
        before = sum(other.row_nbytes for other in self.components[:component])
        offset = self.layers * self.page_tokens * before
        if self.order == "page_first_direct":
            return PageStrides(offset, this.row_nbytes, self.page_tokens * this.row_nbytes, this.head_nbytes)
        return PageStrides(offset, self.layers * this.row_nbytes, this.row_nbytes, this.head_nbytes)

    def offset(self, component: int, layer: int, slot: int, head: int) -> int:
        """The byte in a page at which a head's row begins; ``LayoutError`` outside the layout."""
        limits = {
            "component": (component, len(self.components)),
            "layer": (layer, self.layers),
            "slot": (slot, self.page_tokens),
        }
        for name, (value, limit) in limits.items():
            if not 0 <= value < limit:
                raise LayoutError(f"{name} {value} is outside the layout: valid are 0 to {limit - 1}")
        heads = self.components[component].heads
        if not 0 <= head < heads:
            raise LayoutError(f"head {head} is outside component {component}: valid are 0 to {heads - 1}")
        s = self.strides(component)
        return s.offset + slot * s.slot + layer * s.layer + head * s.head

    def pages_per_chunk(self, chunk_nbytes: int, granule_nbytes: int) -> int:
        """Whole pages in a registration chunk of about ``chunk_nbytes``.

        No page crosses a chunk (sglang#36798). Where it costs less than a chunk, the count is one that makes the chunk
        a multiple of ``granule_nbytes`` (the operating system's page), so that chunks follow each other without a gap.
        """
        most = max(1, chunk_nbytes // self.page_nbytes)
        step = granule_nbytes // math.gcd(self.page_nbytes, granule_nbytes)
        return most // step * step if step <= most else most
