"""Other people's device arrays: the CUDA array interface, and DLPack capsules of a real producer."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch

from kvferry.drivers.errors import ArgumentError
from kvferry.hostpool.arrays import _DLTensor, contiguous_strides, device_array

from support.standin import CudaArray, memory


class OnDevice:
    """A CPU tensor that says it lies on a GPU: its capsule is real, its place is not."""

    def __init__(self, tensor: torch.Tensor, device: int = 2) -> None:
        self.tensor, self.device = tensor, device
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        return torch.utils.dlpack.to_dlpack(self.tensor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [2, 10], ids=["cuda", "rocm"])
def test_a_capsule_says_where_and_how(device: int) -> None:
    tensor = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)[1:, ::2, 1:]
    given = OnDevice(tensor, device)
    found = device_array(given)
    assert found is not None
    assert found.address == tensor.data_ptr()
    assert (found.shape, found.strides, found.itemsize, found.kind) == ((2, 2, 4), (80, 40, 4), 4, "i")
    assert given.streams == [-1]  # the caller orders, and says with which stream


@pytest.mark.parametrize(
    ("dtype", "kind", "itemsize"),
    [
        (torch.bfloat16, "f", 2),
        (torch.float16, "f", 2),
        (torch.uint8, "u", 1),
        (torch.int64, "i", 8),
        (torch.bool, "b", 1),
        (torch.complex64, "c", 8),
    ],
)
def test_element_types(dtype: torch.dtype, kind: str, itemsize: int) -> None:
    found = device_array(OnDevice(torch.zeros(2, 3, dtype=dtype)))
    assert found is not None
    assert (found.kind, found.itemsize, found.strides) == (kind, itemsize, (3 * itemsize, itemsize))


def test_a_capsule_is_kept_and_then_left_to_its_destructor() -> None:
    tensor = torch.zeros(4)
    storage = weakref.ref(tensor.untyped_storage())
    found = device_array(OnDevice(tensor))
    del tensor
    gc.collect()
    assert found is not None
    assert not memory(found.address, 16).any()
    del found
    gc.collect()
    assert storage() is None


def test_the_interface_with_and_without_strides() -> None:
    found = device_array(CudaArray(4096, (2, 3), "<f4"))
    assert found is not None
    assert (found.address, found.strides, found.itemsize, found.kind) == (4096, (12, 4), 4, "f")
    found = device_array(CudaArray(4096, (2, 3), "<f4", (40, 8)))
    assert found is not None
    assert found.strides == (40, 8)
    assert found.describe() == "shape (2, 3), strides (40, 8) bytes, 4-byte elements"


@pytest.mark.parametrize("other", [[1], 4096, np.zeros(3), torch.zeros(3), None, "a"])
def test_what_is_not_in_device_memory_is_none(other: object) -> None:
    assert device_array(other) is None


class Edited(OnDevice):
    """Its capsule says something else in one field."""

    def __init__(self, tensor: torch.Tensor, **fields: int) -> None:
        super().__init__(tensor)
        self.fields = fields

    def __dlpack__(self, *, stream: object = None) -> object:
        capsule = super().__dlpack__(stream=stream)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        return capsule


@pytest.mark.parametrize(
    ("fields", "message"), [({"bits": 4}, "1 lanes of 4 bits"), ({"lanes": 4}, "4 lanes of 32 bits")]
)
def test_elements_that_are_not_whole_bytes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        device_array(Edited(torch.zeros(4), **fields))


def test_the_byte_offset_of_a_capsule_counts() -> None:
    tensor = torch.zeros(4)
    found = device_array(Edited(tensor, byte_offset=8))
    assert found is not None
    assert found.address == tensor.data_ptr() + 8


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (1, 5, 7)])
def test_contiguous_strides_are_numpys(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert contiguous_strides(shape, 4) == np.zeros(shape, np.float32).strides
    else:
        assert len(contiguous_strides(shape, 4)) == len(shape)


class OnGpu:
    """A torch tensor that says it is on a GPU, and raises where torch's do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.is_cuda = tensor, True

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise KeyError(self._tensor.dtype)  # as torch does for 8-bit floats

    def __getattr__(self, name: str) -> object:
        return getattr(self._tensor, name)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float8_e4m3fn, "f"),
        (torch.float8_e5m2, "f"),
        (torch.bfloat16, "f"),
        (torch.complex64, "c"),
        (torch.int64, "i"),
        (torch.int32, "i"),
        (torch.uint8, "u"),
        (torch.uint64, "u"),
        (torch.bool, "b"),
    ],
    ids=str,
)
def test_torch_tensors_of_every_element_type(dtype: torch.dtype, kind: str) -> None:
    """Caches of 8-bit floats too, for which torch's own interface raises."""
    tensor = torch.zeros((4, 6, 8), dtype=dtype)[:, ::2]
    found = device_array(OnGpu(tensor))
    assert found is not None
    assert (found.address, found.shape, found.kind) == (tensor.data_ptr(), (4, 3, 8), kind)
    assert found.strides == tuple(stride * dtype.itemsize for stride in (48, 16, 1))
    assert device_array(tensor) is None, "on the CPU"
