"""A transfer as data: two sides of affine addresses, what is contiguous on both merged, the kernel that moves it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import DeviceAddress
from kvferry.hostpool.layout import Component
from kvferry.kernels_cubin import abi

Unit = Literal["page", "token"]
"""What an index selects: a whole page of tokens, or one token."""


@dataclass(frozen=True)
class ComponentSide:
    """How one component is addressed on one side: ``table[entry] + offset + page*P + slot*S + layer*L + head*H``."""

    table: DeviceAddress
    offset: int
    page: int
    slot: int
    layer: int
    head: int


@dataclass(frozen=True)
class Side:
    """One side of a transfer.

    ``alignment`` is a power of two that divides every table entry, in bytes. ``table_by`` is one of the ``TABLE_``
    numbers of the kernels' ABI.
    """

    components: tuple[ComponentSide, ...]
    table_by: int
    tokens: int
    page_tokens: int
    alignment: int

    def limit(self, unit: Unit) -> int:
        """The first index that is out of range; tokens that fill no page have no page index."""
        return self.tokens // self.page_tokens if unit == "page" else self.tokens


@dataclass(frozen=True)
class Run:
    """What one index pair moves of one component and layer: ``slots * heads`` runs of ``nbytes``."""

    nbytes: int
    slots: int
    heads: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a transfer except its indices, stream and number of pairs; an engine prepares it once."""

    src: Side
    dst: Side
    runs: tuple[Run, ...]
    unit: Unit
    layer_begin: int
    n_layers: int
    word_nbytes: int
    narrow: bool
    lanes: int

    @property
    def limits(self) -> tuple[int, int]:
        """The first index out of range, source and destination."""
        return self.src.limit(self.unit), self.dst.limit(self.unit)

    @property
    def pair_nbytes(self) -> int:
        """Bytes that one index pair moves."""
        return self.n_layers * sum(run.nbytes * run.slots * run.heads for run in self.runs)

    def segments(self, run: Run) -> int:
        """Tasks that one run is cut into."""
        words = self.lanes * (1 if self.narrow else abi.words_per_lane(self.word_nbytes))
        return -(-run.nbytes // (words * self.word_nbytes))

    def tasks_per_pair(self, run: Run) -> int:
        """Tasks that one index pair makes of one component and layer."""
        return run.slots * run.heads * self.segments(run)

    def explain(self) -> str:
        """One line for people: how much moves in what pieces."""
        sizes = ", ".join(f"{run.slots * run.heads} x {run.nbytes} B" for run in self.runs)
        return (
            f"{self.n_layers} layers, a {self.unit} and layer as {sizes}; kernel "
            f"{abi.kernel_name(self.word_nbytes, 8)} with {self.lanes} lanes a run segment"
        )


def layer_range(layers: object, every: int) -> range:
    """``layers`` of a transfer (all, one, or a range of ``every``) as a range; ``ArgumentError`` for anything else."""
    if layers is None:
        return range(every)
    if isinstance(layers, (int, np.integer)) and not isinstance(layers, bool):
        layers = range(int(layers), int(layers) + 1)
    if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= every:
        raise ArgumentError(f"layers must be a layer or a non-empty range inside 0 to {every}, not {layers!r}")
    return layers


def _merge(component: Component, src: ComponentSide, dst: ComponentSide, slots: int) -> Run:
    """Make one run of heads, and then of slots, where both sides have them one after the other."""
    heads, nbytes = component.heads, component.head_nbytes
    if heads == 1 or src.head == dst.head == nbytes:
        heads, nbytes = 1, nbytes * heads
    if heads == 1 and (slots == 1 or src.slot == dst.slot == nbytes):
        slots, nbytes = 1, nbytes * slots
    return Run(nbytes, slots, heads)


def plan_transfer(components: tuple[Component, ...], src: Side, dst: Side, *, unit: Unit, layers: range) -> Plan:
    """Plan a transfer of ``layers`` (a range with step 1) of every component.

    ``components`` say what a row consists of: ``heads`` pieces of ``head_nbytes``, which the sides' ``head`` strides
    count. They are heads, or whatever has a stride of its own on both sides, such as a group of heads.
    """
    slots = src.page_tokens if unit == "page" else 1
    together = tuple(zip(components, src.components, dst.components, strict=True))
    runs = tuple(_merge(c, s, d, slots) for c, s, d in together)
    for side in (src, dst):
        if side.tokens > abi.MAX_INDEX_LIMIT:
            raise ArgumentError(f"{side.tokens} tokens on one side; kernels index at most {abi.MAX_INDEX_LIMIT}")
    divisor = math.gcd(src.alignment, dst.alignment, *(run.nbytes for run in runs))
    for run, (_, s, d) in zip(runs, together, strict=True):
        for where in (s, d):
            divisor = math.gcd(divisor, where.offset, where.page)
            # A stride that was merged away, or that only layer 0 would use, is never multiplied with anything.
            if layers.stop > 1:
                divisor = math.gcd(divisor, where.layer)
            if run.slots > 1 or unit == "token":
                divisor = math.gcd(divisor, where.slot)
            if run.heads > 1:
                divisor = math.gcd(divisor, where.head)
    word = next(nbytes for nbytes in abi.WORD_NBYTES if divisor % nbytes == 0)
    words = max(run.nbytes // word for run in runs)
    narrow = words <= abi.MAX_LANES
    lanes = 1 << (words - 1).bit_length() if narrow else abi.MAX_LANES
    return Plan(src, dst, runs, unit, layers.start, len(layers), word, narrow, lanes)
