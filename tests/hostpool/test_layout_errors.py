"""Zero of anything is refused (scenario 28), with the name and the value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.drivers.errors import ArgumentError, LayoutError
from kvferry.hostpool import Component, HostPool, KVLayout
from kvferry.hostpool.backend import Backend

MHA: dict[str, int] = {"layers": 2, "heads": 2, "head_size": 8, "element_nbytes": 2, "page_tokens": 4}


@pytest.mark.parametrize("name", [*MHA, "v_head_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_mha(name: str, value: object) -> None:
    with pytest.raises(LayoutError, match=rf"{name} must be a whole number of at least 1, not {value!r}"):
        KVLayout.mha(**{**MHA, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["layers", "latent_size", "element_nbytes", "page_tokens"])
def test_mla(name: str) -> None:
    sizes = {"layers": 2, "latent_size": 8, "element_nbytes": 2, "page_tokens": 4, name: 0}
    with pytest.raises(LayoutError, match=f"{name} must be .* not 0"):
        KVLayout.mla(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Component("k", 0, 8), "heads must be .* not 0"),
        (lambda: Component("k", 1, 0), "head_nbytes must be .* not 0"),
        (lambda: KVLayout((), 1, 1), "1 to 4 components, not 0"),
        (lambda: KVLayout(tuple(Component(str(n), 1, 1) for n in range(5)), 1, 1), "1 to 4 components, not 5"),
        (lambda: KVLayout((Component("k", 1, 1), Component("k", 1, 1)), 1, 1), "names must differ: k, k"),
        (lambda: KVLayout((Component("k", 1, 1),), 1, 1, "token_first"), "layer_first, not 'token_first'"),  # type: ignore[arg-type]
    ],
)
def test_components_and_order(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize("pages", [0, -1, 1.0, True, None])
def test_a_pool_of_no_pages(backend: Backend, layout: KVLayout, pages: object) -> None:
    with pytest.raises(ArgumentError, match=f"at least 1 page, not {pages!r}"):
        HostPool(layout, pages, backend=backend)  # type: ignore[arg-type]


def test_a_pool_of_no_devices_or_empty_chunks(backend: Backend, layout: KVLayout) -> None:
    with pytest.raises(ArgumentError, match="at least one device"):
        HostPool(layout, 1, backend=backend, devices=[])
    with pytest.raises(ArgumentError, match="at least 1 byte, not 0"):
        HostPool(layout, 1, backend=backend, chunk_nbytes=0)


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_outside_the_pool(backend: Backend, layout: KVLayout, page: int) -> None:
    with HostPool(layout, 3, backend=backend) as pool, pytest.raises(ArgumentError, match=f"page {page} .* 0 to 2"):
        pool.page_view(page)
