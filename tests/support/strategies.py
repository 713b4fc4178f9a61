"""What hypothesis may make up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hypothesis import strategies as st

from kvferry.hostpool import Component, KVLayout
from kvferry.hostpool.layout import PageOrder

SEEN_ROW_NBYTES = (1, 2, 6, 92, 96, 132, 176, 368, 432, 576, 656, 1152)
"""Row sizes that servers really have, and the smallest ones."""

_head_nbytes = st.one_of(st.integers(1, 48), st.sampled_from(SEEN_ROW_NBYTES))


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    count = draw(st.integers(1, 4))
    order: PageOrder = draw(st.sampled_from(get_args(PageOrder)))
    groups = draw(st.integers(1, 3)) if order == "page_unified" else 1
    in_group = st.integers(1, 3) if groups > 1 else st.integers(1, 4)
    heads = in_group.map(lambda each: each * groups)
    if draw(st.booleans()):  # as K and V have it, with more ranges of heads that are good for all
        heads = st.just(draw(heads))
    components = tuple(Component(f"c{number}", draw(heads), draw(_head_nbytes)) for number in range(count))
    return KVLayout(components, draw(st.integers(1, 4)), draw(st.integers(1, 6)), order, groups)


def head_ranges(layout: KVLayout) -> list[range]:
    """Every range of heads that a device pool may have, found head by head."""
    fewest = min(component.heads for component in layout.components)
    ranges = [range(begin, end) for begin in range(fewest) for end in range(begin + 1, fewest + 1)]
    if layout.order != "page_unified":
        return ranges
    return [heads for heads in ranges if all(_fits_groups(layout, each, heads) for each in layout.components)]


def _fits_groups(layout: KVLayout, component: Component, heads: range) -> bool:
    each = component.heads // layout.head_groups
    members = [
        [head for head in range(component.heads) if head // each == group] for group in range(layout.head_groups)
    ]
    met = [group for group in members if set(group) & set(heads)]
    return len(met) == 1 or all(set(group) <= set(heads) for group in met)


@dataclass(frozen=True)
class Case:
    """A pool, a cache, and one transfer between them."""

    layout: KVLayout
    pages: int
    chunk_nbytes: int
    tokens: int
    gap_nbytes: int
    shift_nbytes: int
    unit: str
    on_device: list[int]
    on_host: list[int]
    layers: range
    wide: bool
    heads: range | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts())
    unit = draw(st.sampled_from(("page", "token")))
    pages, device_pages = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    tokens = device_pages * layout.page_tokens + draw(st.integers(0, layout.page_tokens - 1))
    limits = (device_pages, pages) if unit == "page" else (tokens, pages * layout.page_tokens)
    count = draw(st.integers(0, min(limits)))
    sides = [draw(st.permutations(range(limit)))[:count] for limit in limits]
    for side in sides:
        for skipped in draw(st.sets(st.integers(0, count - 1), max_size=2)) if count else ():
            side[skipped] = draw(st.sampled_from((-1, -7, -(2**31))))
    begin = draw(st.integers(0, layout.layers - 1))
    return Case(
        layout=layout,
        pages=pages,
        chunk_nbytes=draw(st.sampled_from((1, 4096, 3 * layout.page_nbytes, 1 << 30))),
        tokens=tokens,
        gap_nbytes=draw(st.sampled_from((0, 0, 1, 3, 4, 8, 13, 16))),
        shift_nbytes=draw(st.sampled_from((0, 0, 1, 4, 8))),
        unit=unit,
        on_device=sides[0],
        on_host=sides[1],
        layers=range(begin, draw(st.integers(begin + 1, layout.layers))),
        wide=draw(st.booleans()),
        heads=draw(st.none() | st.sampled_from(head_ranges(layout))),
    )
