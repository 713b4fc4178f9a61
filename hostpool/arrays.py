"""Other people's device arrays as an address, a shape and strides, without importing their libraries.

Taken from torch's tensors by their methods, since torch's ``__cuda_array_interface__`` raises for 8-bit floats and for
tensors that require a gradient; else from ``__cuda_array_interface__`` (CuPy, Numba), else from DLPack (JAX, ...).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from kvferry.drivers.errors import ArgumentError

_DLPACK_DEVICES = {2: "cuda", 10: "rocm"}  # kDLCUDA, kDLROCM of dlpack.h
_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 4: "f", 5: "c", 6: "b"}  # kDLInt, kDLUInt, kDLFloat, kDLBfloat, ...
_NO_SYNC = -1  # DLPack's word for: do not order anything, the consumer does


@dataclass(frozen=True)
class DeviceArray:
    """Where a device array lies. ``strides`` are in bytes; ``kind`` is numpy's letter for the element type."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    kind: str
    owner: object
    """Keeps the memory alive."""

    @property
    def extent_nbytes(self) -> int:
        """Bytes from the first element's to the last one's end, gaps included."""
        return extent_nbytes(self.shape, self.strides, self.itemsize)

    def describe(self) -> str:
        """Shape and strides, for messages."""
        return f"shape {self.shape}, strides {self.strides} bytes, {self.itemsize}-byte elements"


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-ordered array."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def extent_nbytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first element's to the last one's end; nothing where there are no elements."""
    if not all(shape):
        return 0
    return itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def device_array(array: object) -> DeviceArray | None:
    """``array`` as a ``DeviceArray``, or ``None`` when it is not an array in device memory."""
    if getattr(array, "is_cuda", None) is True and hasattr(array, "data_ptr"):
        return _from_torch(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        shape, typestr = tuple(interface["shape"]), str(interface["typestr"])
        itemsize = int(typestr[2:])
        strides = interface.get("strides") or contiguous_strides(shape, itemsize)
        return DeviceArray(int(interface["data"][0]), shape, tuple(strides), itemsize, typestr[1], array)
    ask_device = getattr(array, "__dlpack_device__", None)
    if ask_device is not None and int(ask_device()[0]) in _DLPACK_DEVICES:
        return _from_dlpack(array)
    return None


def _from_torch(tensor: Any) -> DeviceArray:
    """A tensor of torch, on CUDA or ROCm, of any element type."""
    itemsize, dtype = int(tensor.element_size()), tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        kind = "f" if dtype.is_floating_point else "c"
    else:
        kind = "b" if str(dtype) == "torch.bool" else "i" if dtype.is_signed else "u"
    strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    return DeviceArray(int(tensor.data_ptr()), tuple(tensor.shape), strides, itemsize, kind, tensor)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _from_dlpack(array: object) -> DeviceArray:
    """Read a DLPack capsule (the unversioned form, which every producer gives) and leave it to its destructor."""
    capsule = array.__dlpack__(stream=_NO_SYNC)  # type: ignore[attr-defined]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    if tensor.lanes != 1 or tensor.bits % 8:
        raise ArgumentError(f"elements of {tensor.lanes} lanes of {tensor.bits} bits cannot be moved as bytes")
    itemsize = tensor.bits // 8
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] * itemsize for i in range(tensor.ndim))
    else:
        strides = contiguous_strides(shape, itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    # The producer keeps the memory; holding the producer and the capsule keeps both.
    return DeviceArray(address, shape, strides, itemsize, _DLPACK_KINDS.get(tensor.code, "V"), (array, capsule))
