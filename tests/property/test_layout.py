"""Every byte of a page belongs to exactly one (component, layer, slot, head, byte)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.errors import LayoutError
from kvferry.hostpool import KVLayout

from support.model import page_offsets
from support.strategies import head_ranges, layouts


def begins(layout: KVLayout) -> list[tuple[int, int]]:
    """(first byte, bytes) of every head's row in a page."""
    return [
        (layout.offset(number, layer, slot, head), component.head_nbytes)
        for number, component in enumerate(layout.components)
        for layer, slot, head in itertools.product(
            range(layout.layers), range(layout.page_tokens), range(component.heads)
        )
    ]


@given(layouts())
def test_the_address_map_is_a_bijection_onto_the_page(layout: KVLayout) -> None:
    hits = np.zeros(layout.page_nbytes, np.int64)
    for begin, nbytes in begins(layout):
        assert 0 <= begin <= layout.page_nbytes - nbytes
        hits[begin : begin + nbytes] += 1
    assert (hits == 1).all()


@given(layouts())
def test_the_order_is_the_one_that_is_promised(layout: KVLayout) -> None:
    for number, (component, where) in enumerate(zip(layout.components, page_offsets(layout), strict=True)):
        for layer, slot in itertools.product(range(layout.layers), range(layout.page_tokens)):
            for head in range(component.heads):
                expected = int(where[layer, slot, head * component.head_nbytes])
                assert layout.offset(number, layer, slot, head) == expected


@given(layouts(), st.integers(1, 4))
def test_the_address_map_is_a_bijection_onto_a_chunk_of_pages(layout: KVLayout, pages: int) -> None:
    hits = np.zeros(pages * layout.page_nbytes, np.int64)
    for number, component in enumerate(layout.components):
        axes = (range(pages), range(layout.layers), range(layout.page_tokens), range(component.heads))
        for page, layer, slot, head in itertools.product(*axes):
            begin = layout.offset(number, layer, slot, head, page=page, chunk_pages=pages)
            hits[begin : begin + component.head_nbytes] += 1
    assert (hits == 1).all()


@given(layouts(), st.integers(1, 3), st.data())
def test_strides_of_some_heads_lead_to_just_these_heads(layout: KVLayout, pages: int, data: st.DataObject) -> None:
    """Entry by entry of the head axis, the bytes are those of the heads, in their order."""
    heads = data.draw(st.none() | st.sampled_from(head_ranges(layout)))
    for number, component in enumerate(layout.components):
        s = layout.strides(number, heads, chunk_pages=pages)
        axes = (range(pages), range(layout.layers), range(layout.page_tokens))
        for page, layer, slot in itertools.product(*axes):
            begin = s.offset + page * s.page + layer * s.layer + slot * s.slot
            found = [begin + entry * s.head + byte for entry in range(s.heads) for byte in range(s.head_nbytes)]
            expected = [
                layout.offset(number, layer, slot, head, page=page, chunk_pages=pages) + byte
                for head in heads or range(component.heads)
                for byte in range(component.head_nbytes)
            ]
            assert found == expected


@given(layouts(), st.integers(0, 9), st.integers(0, 9))
def test_every_other_range_of_heads_is_an_error(layout: KVLayout, begin: int, end: int) -> None:
    heads = range(begin, end)
    if heads in head_ranges(layout):
        assert all(layout.strides(number, heads).heads for number in range(len(layout.components)))
    else:
        with pytest.raises(LayoutError, match="heads"):
            [layout.strides(number, heads) for number in range(len(layout.components))]


@given(layouts())
def test_what_each_order_keeps_together(layout: KVLayout) -> None:
    """A layer, a token, a head, or a group of heads is one run."""
    found = page_offsets(layout)
    if layout.order == "page_unified":
        groups = [
            np.sort(np.concatenate([np.split(where, layout.head_groups, axis=2)[group].ravel() for where in found]))
            for group in range(layout.head_groups)
        ]
        assert all((np.diff(group) == 1).all() for group in groups)
        return
    for component, where in zip(layout.components, found, strict=True):
        if layout.order == "page_first":
            solid = where.transpose(1, 0, 2)
        elif layout.order == "page_head":
            solid = np.stack(np.split(where, component.heads, axis=2)).transpose(0, 2, 1, 3)
        else:
            solid = where
        assert (np.diff(solid.ravel()) == 1).all()


@given(layouts(), st.integers(-1, 1))
def test_outside_of_the_layout_is_an_error_with_the_limit(layout: KVLayout, side: int) -> None:
    limits = [len(layout.components), layout.layers, layout.page_tokens, layout.components[0].heads]
    for place, name in enumerate(("component", "layer", "slot", "head")):
        where = [0, 0, 0, 0]
        where[place] = -1 if side < 0 else limits[place] + side
        with pytest.raises(LayoutError, match=rf"{name} {where[place]} is outside .* 0 to {limits[place] - 1}$"):
            layout.offset(*where)


def test_k_and_v_of_different_size_and_a_latent() -> None:
    mha = KVLayout.mha(layers=3, heads=2, head_size=5, v_head_size=7, element_nbytes=2, page_tokens=4)
    assert [component.row_nbytes for component in mha.components] == [20, 28]
    assert (mha.token_nbytes, mha.page_nbytes) == (144, 576)
    mla = KVLayout.mla(layers=61, latent_size=576, element_nbytes=2, page_tokens=64)
    assert [component.row_nbytes for component in mla.components] == [1152]
    assert mla.page_nbytes == 61 * 64 * 1152
