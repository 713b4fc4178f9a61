"""The argument block: the Python half of the kernels' signature.

Field by field the structs of ``kv_transfer.cu``. The manifest carries the offsets that the compiler computed, and a
test holds the two against each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KERNEL_ABI = 1
"""Changes whenever the block or its meaning does; a binary of another number is refused."""

MAX_COMPONENTS = 4
MAX_TASKS = 2**31 - 1
"""Tasks of one launch: the kernel counts them in 32 bits."""

MAX_INDEX_LIMIT = 2**32 - 1
"""Rows or pages that one side of a transfer can have."""

CTA_THREADS = 1024
"""Threads of a CTA: the most that every device takes."""

MAX_LANES = 32
"""Lanes that share one segment of a run; a wavefront of 64 holds two such groups."""

LONG_RUNS, SHORT_RUNS = 2, 4
"""Runs that a lane group has in flight, for long and for short runs."""

WORD_NBYTES = (16, 8, 4, 1)
"""Widths that a row can be moved in, widest first."""

TABLE_ONE, TABLE_BY_LAYER, TABLE_BY_PAGE = 0, 1, 2
"""Which number selects a table entry."""

SIDES = {1: "source", 2: "destination"}
"""The side that an error record names."""

_SIDE = np.dtype([("table", "u8"), ("offset", "i8"), ("page", "i8"), ("slot", "i8"), ("layer", "i8"), ("head", "i8")])
_COMPONENT = np.dtype(
    [
        ("src", _SIDE),
        ("dst", _SIDE),
        ("run_words", "u4"),
        ("segments", "u4"),
        ("heads", "u4"),
        ("slots", "u4"),
        ("tasks", "u4"),
        ("reserved", "u4"),
    ]
)
_SELECTOR = np.dtype([("indices", "u8"), ("limit", "u4"), ("split", "u4"), ("table_by", "u4"), ("layer_begin", "u4")])

ARGS = np.dtype(
    [
        ("component", _COMPONENT, MAX_COMPONENTS),
        ("src", _SELECTOR),
        ("dst", _SELECTOR),
        ("layer_done", "u8"),
        ("error_record", "u8"),
        ("error_claim", "u8"),
        ("error_epoch", "u4"),
        ("n_components", "u4"),
        ("n_layers", "u4"),
        ("tasks_per_layer", "u4"),
        ("lanes_log2", "u4"),
        ("narrow", "u4"),
        ("n_warps", "u4"),
        ("warps_per_cta", "u4"),
    ]
)
ARGS_NBYTES = ARGS.itemsize

ERROR_RECORD = np.dtype([("value", "i8"), ("position", "u8"), ("side", "u4"), ("code", "u4")])
"""What a kernel writes into page-locked memory when an index is out of range; ``code`` is not 0 then."""


def kernel_name(word_nbytes: int, index_nbytes: int) -> str:
    """The variant that moves words of ``word_nbytes`` and reads indices of ``index_nbytes`` (4 or 8)."""
    return f"kv_transfer_w{word_nbytes}_i{8 * index_nbytes}"


KERNELS = tuple(kernel_name(word, index) for index in (8, 4) for word in WORD_NBYTES)


def words_per_lane(word_nbytes: int) -> int:
    """Words of one long run that a lane has in flight: 64 bytes of it where words are wide."""
    return 4 if word_nbytes == 16 else 8


class ArgumentBlock:
    """One argument block at an address that stays.

    Launchers copy it while ``launch`` runs, so one block serves many launches; not two threads at once.
    """

    def __init__(self) -> None:
        self.array: npt.NDArray[np.void] = np.zeros((), dtype=ARGS)
        self.address = int(self.array.ctypes.data)
        self._parameters = np.array([self.address], dtype=np.uint64)
        self.parameters = int(self._parameters.ctypes.data)
        """Address of the ``void *[1]`` that CUDA's launch call takes."""
        self._nbytes = np.array([ARGS_NBYTES], dtype=np.uint64)
        pointer, size, end = 1, 2, 3  # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        words = [pointer, self.address, size, int(self._nbytes.ctypes.data), end]
        self._extra = np.array(words, dtype=np.uint64)
        self.extra = int(self._extra.ctypes.data)
        """Address of the ``void *[5]`` that HIP's launch call takes."""
