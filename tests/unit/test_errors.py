"""What a driver answered becomes an exception that says what happened and what to do."""

from __future__ import annotations

import inspect
import pickle

import pytest

from kvferry.drivers import errors
from kvferry.drivers.errors import DriverError, KVFerryError, driver_error

BY_CODE = [
    (1, errors.InvalidValue, "not registered"),
    (2, errors.OutOfMemory, "RLIMIT_MEMLOCK"),
    (3, errors.NotInitialized, "not initialised"),
    (4, errors.Deinitialized, "exiting"),
    (209, errors.NoBinaryForDevice, "another architecture"),
    (700, errors.IllegalAddress, "context is lost"),
    (712, errors.AlreadyRegistered, "already registered"),
    (713, errors.NotRegistered, "exactly the base address"),
    (719, errors.LaunchFailure, "restart the process"),
    (801, errors.UnsupportedCall, "does not support"),
    (900, errors.CaptureUnsupported, "stream capture"),
]


@pytest.mark.parametrize(("code", "kind", "advice"), BY_CODE)
def test_a_code_has_its_own_exception(code: int, kind: type[DriverError], advice: str) -> None:
    error = driver_error("cuSomeCall", code, "CUDA_ERROR_SOME_NAME", "4096 bytes at 0x1000")
    assert type(error) is kind
    assert (error.call, error.code, error.name, error.detail) == (
        "cuSomeCall",
        code,
        "CUDA_ERROR_SOME_NAME",
        "4096 bytes at 0x1000",
    )
    assert advice in error.advice
    for part in ["cuSomeCall", str(code), "CUDA_ERROR_SOME_NAME", "4096 bytes at 0x1000", error.advice]:
        assert part in str(error)


def test_an_unknown_code_is_a_plain_driver_error() -> None:
    error = driver_error("hipSomeCall", 46, "hipErrorDevicesUnavailable")
    assert type(error) is DriverError
    assert "46 hipErrorDevicesUnavailable" in str(error)
    assert "()" not in str(error), "no detail, no parentheses"


def test_what_a_driver_cannot_do_is_also_not_supported() -> None:
    for code in (801, 900):
        assert isinstance(driver_error("call", code, "name"), errors.NotSupported)


def _one_of(kind: type[KVFerryError]) -> KVFerryError:
    if issubclass(kind, DriverError):
        return kind("cuSomeCall", 712, "CUDA_ERROR_SOME_NAME", "4096 bytes at 0x1000")
    if kind is errors.IndexOutOfRange:
        return errors.IndexOutOfRange("destination", 7, 2**31, 2**31)
    if kind is errors.DriverNotFound:
        return errors.DriverNotFound("cuda", {"libcuda.so.1": "no such file"})
    if kind is errors.NoArtefact:
        return errors.NoArtefact("sm_80", {"kv_transfer.sm_86.cubin": "needs 8.6"})
    return kind("what went wrong")


EVERY_KIND = sorted(
    (kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KVFerryError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[KVFerryError]) -> None:
    """Workers hand their errors to another process (multiprocessing, Ray): the fields have to arrive."""
    error = _one_of(kind)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        arrived = pickle.loads(pickle.dumps(error, protocol))
        assert type(arrived) is kind
        assert str(arrived) == str(error)
        assert vars(arrived) == vars(error)


def test_every_kind_was_found() -> None:
    names = {kind.__name__ for kind in EVERY_KIND}
    assert {"KVFerryError", "DriverError", "AlreadyRegistered", "IndexOutOfRange", "NoArtefact"} <= names


def test_index_out_of_range_says_where_and_what_is_valid() -> None:
    error = errors.IndexOutOfRange("source", 7, 2**31, 4096)
    assert (error.side, error.position, error.value, error.limit) == ("source", 7, 2**31, 4096)
    assert "source index 2147483648 at position 7" in str(error)
    assert "0 to 4095" in str(error)
    assert isinstance(error, IndexError)


def test_driver_not_found_lists_every_candidate() -> None:
    error = errors.DriverNotFound("cuda", {"/a/libcuda.so.1": "wrong ELF class", "libcuda.so.1": "not found"})
    assert "/a/libcuda.so.1: wrong ELF class" in str(error)
    assert "libcuda.so.1: not found" in str(error)
