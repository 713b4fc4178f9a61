"""A launcher that moves nothing but tells which bytes the kernel would move, read from the argument block alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.drivers.protocol import StreamHandle
from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.abi import ArgumentBlock
from kvferry.kernels_cubin.manifest import Artefact

from support.standin import memory

Addresses = npt.NDArray[np.int64]


@dataclass
class Launch:
    """One launch: ``args`` is a copy of its argument block."""

    kernel: str
    ctas: int
    args: npt.NDArray[np.void]


class RecordingLauncher:
    """Stands where a launcher of kernels stands."""

    artefact = Artefact("none", "none", "host", 0, "")
    warp_lanes = 32

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
        self.launches.append(Launch(kernel, ctas, block.array.copy()))


def _side(side: Any, by: Any, index: Addresses, layer: int, slot: Addresses, head: Addresses) -> Addresses:
    page, first = np.divmod(index, int(by["split"]))
    layer += int(by["layer_begin"])
    which = {0: np.zeros_like(index), 1: np.full_like(index, layer), 2: page}[int(by["table_by"])]
    entries = int(which.max()) + 1 if which.size else 0
    table = memory(int(side["table"]), 8 * entries).view(np.int64)
    base: Addresses = table[which] + int(side["offset"])
    base += page * int(side["page"]) + (first + slot) * int(side["slot"])
    base += layer * int(side["layer"]) + head * int(side["head"])
    return base


def moved_words(
    launch: Launch, sources: npt.ArrayLike, destinations: npt.ArrayLike
) -> tuple[int, Addresses, Addresses]:
    """(bytes of a word, source address of every word, its destination address), task by task as the kernel goes."""
    a: Any = launch.args
    word = int(launch.kernel.removeprefix("kv_transfer_w").split("_")[0])
    lanes = 1 << int(a["lanes_log2"])
    words_per_lane = 1 if a["narrow"] else (4 if word == 16 else 8)
    segment_words = lanes * words_per_lane
    src_index, dst_index = np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
    src_found, dst_found = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    assert sum(int(tasks) for tasks in a["component"]["tasks"][: int(a["n_components"])]) == int(a["tasks_per_layer"])
    for layer in range(int(a["n_layers"])):
        for k in a["component"][: int(a["n_components"])]:
            rest, segment = np.divmod(np.arange(int(k["tasks"])), int(k["segments"]))
            rest, head = np.divmod(rest, int(k["heads"]))
            rest, slot = np.divmod(rest, int(k["slots"]))
            src, dst = src_index[rest], dst_index[rest]
            moves = (src >= 0) & (dst >= 0)
            segment, head, slot, src, dst = segment[moves], head[moves], slot[moves], src[moves], dst[moves]
            assert (src < int(a["src"]["limit"])).all()
            assert (dst < int(a["dst"]["limit"])).all()
            begin = segment * segment_words
            words = np.minimum(int(k["run_words"]) - begin, segment_words)
            src_at = _side(k["src"], a["src"], src, layer, slot, head) + begin * word
            dst_at = _side(k["dst"], a["dst"], dst, layer, slot, head) + begin * word
            inside = np.arange(segment_words)
            each = inside[None, :] < words[:, None]
            src_found.append((src_at[:, None] + inside * word)[each])
            dst_found.append((dst_at[:, None] + inside * word)[each])
    return word, np.concatenate(src_found), np.concatenate(dst_found)


def moved_bytes(launch: Launch, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> tuple[Addresses, Addresses]:
    """The (source, destination) address of every byte, by rising destination."""
    word, src, dst = moved_words(launch, sources, destinations)
    inside = np.arange(word)
    src_bytes, dst_bytes = (src[:, None] + inside).ravel(), (dst[:, None] + inside).ravel()
    order = np.argsort(dst_bytes, kind="stable")
    return src_bytes[order], dst_bytes[order]


assert abi.KERNEL_ABI == 1, "the argument block changed: teach this file the new one"
