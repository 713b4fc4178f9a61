"""How (component, layer, page, slot, head) becomes bytes. Integers only: no memory, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kvferry.drivers.errors import LayoutError
from kvferry.kernels_cubin.abi import MAX_COMPONENTS

PageOrder = Literal["page_first_direct", "page_first", "page_head", "page_unified", "layer_first"]
"""The order of bytes in host memory; ``KVLayout`` says what each means."""


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
    """Where (heads of) a component lie in a chunk, in bytes: ``offset + page*P + slot*S + layer*L + head*H``.

    ``page`` counts within the chunk. The head axis has ``heads`` entries, each ``head_nbytes`` without a gap: single
    heads, or in ``page_unified`` groups of heads.
    """

    offset: int
    page: int
    slot: int
    layer: int
    head: int
    heads: int
    head_nbytes: int


@dataclass(frozen=True)
class KVLayout:
    """The shape of a KV cache and the byte order of its host pages.

    A page holds ``page_tokens`` tokens of every layer and every component, ``page_nbytes`` without padding; ``order``
    says how they lie, outermost first:

    - ``page_first_direct``: (component, layer, slot, head). A layer of a page is one run, as in the device pool.
    - ``page_first``: (component, slot, layer, head). A token's layers are together.
    - ``page_head``: (component, head, slot, layer). A head's rows are together, for ranks with fewer heads.
    - ``page_unified``: (head group, layer, component, slot, head in the group), ``head_groups`` groups of equally many
      heads. A group is one run, so that a rank that has just these heads can take its part of the page as it is.
    - ``layer_first``: (component, layer, page, slot, head) for the pages of a registration chunk together. A page is
      not one run there but one a component and layer.
    """

    components: tuple[Component, ...]
    layers: int
    page_tokens: int
    order: PageOrder = "page_first_direct"
    head_groups: int = 1

    def __post_init__(self) -> None:
        _positive(layers=self.layers, page_tokens=self.page_tokens, head_groups=self.head_groups)
        if not 1 <= len(self.components) <= MAX_COMPONENTS:
            raise LayoutError(f"a layout has 1 to {MAX_COMPONENTS} components, not {len(self.components)}")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise LayoutError(f"component names must differ: {', '.join(names)}")
        if self.order not in get_args(PageOrder):
            raise LayoutError(f"order must be one of {', '.join(get_args(PageOrder))}, not {self.order!r}")
        if self.head_groups != 1 and self.order != "page_unified":
            raise LayoutError(
                f"head_groups {self.head_groups} needs order page_unified; {self.order} takes 1, and any range of heads"
            )
        for component in self.components:
            if component.heads % self.head_groups:
                raise LayoutError(
                    f"head_groups {self.head_groups} does not divide the {component.heads} heads of {component.name}: "
                    "take a divisor of every component's heads, or keep this component in a pool of its own"
                )

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
        head_groups: int = 1,
    ) -> KVLayout:
        """Multi-head or grouped-query attention: components ``k`` and ``v`` of ``heads`` KV heads."""
        v_size = head_size if v_head_size is None else v_head_size
        _positive(heads=heads, head_size=head_size, v_head_size=v_size, element_nbytes=element_nbytes)
        k = Component("k", heads, head_size * element_nbytes)
        v = Component("v", heads, v_size * element_nbytes)
        return cls((k, v), layers, page_tokens, order, head_groups)

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

    @property
    def solid_pages(self) -> bool:
        """Whether a page is one run of ``page_nbytes`` bytes: in every order but ``layer_first``."""
        return self.order != "layer_first"

    def strides(self, component: int, heads: range | None = None, *, chunk_pages: int = 1) -> PageStrides:
        """Where component number ``component`` lies in a chunk of ``chunk_pages`` pages: all of it, or some heads.

        ``heads`` has step 1. In ``page_unified`` it covers whole head groups or lies inside one, because groups are
        what the head axis counts; the part inside a group is then the only entry of that axis. Raises ``LayoutError``
        for anything else. Only ``layer_first`` depends on ``chunk_pages``.
        """
        this = self.components[component]
        heads = self._head_range(this, heads)
        row, head, tokens, layers = this.row_nbytes, this.head_nbytes, self.page_tokens, self.layers
        before = sum(other.row_nbytes for other in self.components[:component])
        offset, page, in_group = layers * tokens * before, self.page_nbytes, 1
        if self.order == "page_first_direct":
            by_slot, by_layer, by_head = row, tokens * row, head
        elif self.order == "page_first":
            by_slot, by_layer, by_head = layers * row, row, head
        elif self.order == "page_head":
            by_slot, by_layer, by_head = layers * head, head, tokens * layers * head
        elif self.order == "page_unified":
            groups = self.head_groups
            in_group = this.heads // groups
            offset = tokens * before // groups
            by_slot, by_layer, by_head = in_group * head, page // groups // layers, page // groups
        else:
            offset, page = offset * chunk_pages, tokens * row
            by_slot, by_layer, by_head = row, chunk_pages * tokens * row, head
        entry, inside = divmod(heads.start, in_group)
        if len(heads) % in_group == inside == 0:
            entries, entry_nbytes = len(heads) // in_group, in_group * head
        elif inside + len(heads) <= in_group:
            entries, entry_nbytes = 1, len(heads) * head
        else:
            raise LayoutError(
                f"heads {heads.start} to {heads.stop - 1} of {this.name} cross head groups of {in_group} without "
                f"covering them: take whole groups, heads inside one group, or another number than {self.head_groups} "
                "for head_groups"
            )
        offset += entry * by_head + inside * head
        return PageStrides(offset, page, by_slot, by_layer, by_head, entries, entry_nbytes)

    @staticmethod
    def _head_range(component: Component, heads: range | None) -> range:
        if heads is None:
            return range(component.heads)
        if not isinstance(heads, range) or heads.step != 1 or not 0 <= heads.start < heads.stop:
            raise LayoutError(f"heads must be a non-empty range with step 1 and no negative numbers, not {heads!r}")
        if heads.stop > component.heads:
            raise LayoutError(
                f"heads {heads.start} to {heads.stop - 1} are outside {component.name}: valid are 0 to "
                f"{component.heads - 1}. Leave heads= out for all heads; a component with fewer heads than the others "
                "is not split between ranks, it needs a pool of its own"
            )
        return heads

    def offset(self, component: int, layer: int, slot: int, head: int, *, page: int = 0, chunk_pages: int = 1) -> int:
        """The byte at which a head's row begins; ``LayoutError`` outside the layout.

        Counted from the first byte of the page, or with ``page`` and ``chunk_pages`` from that of a chunk of
        ``chunk_pages`` pages. In ``layer_first`` a page is not one run, so give both there, with the pool's
        ``pages_per_chunk``; without them it is the byte in a chunk of one page.
        """
        _positive(chunk_pages=chunk_pages)
        limits = {
            "component": (component, len(self.components)),
            "layer": (layer, self.layers),
            "slot": (slot, self.page_tokens),
            "page": (page, chunk_pages),
        }
        for name, (value, limit) in limits.items():
            if not 0 <= value < limit:
                raise LayoutError(f"{name} {value} is outside the layout: valid are 0 to {limit - 1}")
        heads = self.components[component].heads
        if not 0 <= head < heads:
            raise LayoutError(f"head {head} is outside component {component}: valid are 0 to {heads - 1}")
        s = self.strides(component, range(head, head + 1), chunk_pages=chunk_pages)
        return s.offset + page * s.page + slot * s.slot + layer * s.layer

    def pages_per_chunk(self, chunk_nbytes: int, granule_nbytes: int) -> int:
        """Whole pages in a registration chunk of about ``chunk_nbytes``.

        No page crosses a chunk (sglang#36798). Where it costs less than a chunk, the count is one that makes the chunk
        a multiple of ``granule_nbytes`` (the operating system's page), so that chunks follow each other without a gap.
        """
        most = max(1, chunk_nbytes // self.page_nbytes)
        step = granule_nbytes // math.gcd(self.page_nbytes, granule_nbytes)
        return most // step * step if step <= most else most
