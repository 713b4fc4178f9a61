"""A layer-first KV cache of torch tensors, and a model of host pages that knows nothing of kvferry's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.hostpool import KVLayout

Bytes = npt.NDArray[np.uint8]
GUARD_ROWS = 3
GUARD = 0x5A


@dataclass
class TorchCache:
    """One uint8 tensor (rows, row bytes) a component and layer, with guard rows before and behind on the device."""

    whole: dict[str, list[torch.Tensor]]
    rows: dict[str, list[torch.Tensor]]

    @classmethod
    def random(cls, layout: KVLayout, tokens: int, device: str, seed: int = 0) -> TorchCache:
        """Random bytes between guards of a fixed value."""
        generator = torch.Generator(device).manual_seed(seed)
        whole: dict[str, list[torch.Tensor]] = {}
        for component in layout.components:
            shape = tokens + 2 * GUARD_ROWS, component.row_nbytes
            whole[component.name] = [
                torch.full(shape, GUARD, dtype=torch.uint8, device=device) for _ in range(layout.layers)
            ]
        rows = {name: [t[GUARD_ROWS:-GUARD_ROWS] for t in layers] for name, layers in whole.items()}
        for layers in rows.values():
            for layer in layers:
                layer.random_(0, 256, generator=generator)
        return cls(whole, rows)

    def host(self) -> dict[str, list[Bytes]]:
        """All rows on the host, as (tokens, row bytes)."""
        return {name: [layer.cpu().numpy() for layer in layers] for name, layers in self.rows.items()}

    def fill(self, value: int) -> None:
        """Overwrite every row."""
        for layers in self.rows.values():
            for layer in layers:
                layer.fill_(value)

    def guards_intact(self) -> bool:
        """Whether nothing wrote before or behind the rows."""
        edges = [part for layers in self.whole.values() for t in layers for part in (t[:GUARD_ROWS], t[-GUARD_ROWS:])]
        return all(bool((edge == GUARD).all()) for edge in edges)


def page_bytes(layout: KVLayout, cache: dict[str, list[Bytes]], page: int) -> Bytes:
    """What host page ``page`` holds when it is a copy of the cache's page ``page``: spelled out with transposes."""
    parts = []
    for component in layout.components:
        rows = slice(page * layout.page_tokens, (page + 1) * layout.page_tokens)
        layer_slot_row = np.stack([layer[rows] for layer in cache[component.name]])
        ordered = layer_slot_row if layout.order == "page_first_direct" else layer_slot_row.transpose(1, 0, 2)
        parts.append(ordered.ravel())
    return np.concatenate(parts)
