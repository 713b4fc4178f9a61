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
from support.strategies import layouts


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


@given(layouts())
def test_page_first_direct_keeps_a_layer_and_page_first_a_token_together(layout: KVLayout) -> None:
    for where in page_offsets(layout):
        solid = where if layout.order == "page_first_direct" else where.transpose(1, 0, 2)
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
