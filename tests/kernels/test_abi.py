"""One signature, written three times: in the source, in ``abi.py``, and by the compiler into the manifest."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.manifest import Manifest

SHIPPED = Manifest.load()
KERNELS_FOLDER = Path(__file__).resolve().parents[2] / "kernels_cubin"
SOURCE = re.sub(r"//.*", "", (KERNELS_FOLDER / "kv_transfer.cu").read_text())
C_TYPES = {"kv_u64": "u8", "kv_i64": "i8", "kv_u32": "u4"}


def define(name: str) -> int:
    (value,) = re.findall(rf"^#define {name} (\d+)$", SOURCE, re.MULTILINE)
    return int(value)


def test_the_manifests_parameters_are_the_argument_block() -> None:
    fields = abi.ARGS.fields
    assert fields is not None
    python = {name: (entry[1], entry[0].itemsize) for name, entry in fields.items()}
    assert {field.name: (field.offset, field.nbytes) for field in SHIPPED.parameters} == python
    assert SHIPPED.args_nbytes == abi.ARGS_NBYTES == 584
    assert SHIPPED.kernel_abi == abi.KERNEL_ABI


def test_the_numbers_of_the_source_are_those_of_python() -> None:
    assert define("KV_ABI") == abi.KERNEL_ABI
    assert define("KV_MAX_COMPONENTS") == abi.MAX_COMPONENTS
    assert define("KV_LONG_RUNS") == abi.LONG_RUNS
    assert define("KV_SHORT_RUNS") == abi.SHORT_RUNS
    (default,) = re.findall(r"template <class Word> struct kv_long \{ static const int words = (\d+); \}", SOURCE)
    special = dict(re.findall(r"struct kv_long<(\w+)> \{ static const int words = (\d+); \}", SOURCE))
    nbytes = {"kv_word4": 16, "kv_u64": 8, "kv_u32": 4, "kv_u8": 1}
    for word, size in nbytes.items():
        assert abi.words_per_lane(size) == int(special.get(word, default)), word
    assert set(special) <= set(nbytes)


def test_the_variants_of_the_source_are_the_kernels() -> None:
    variants = re.findall(r"^KV_VARIANT\((\w+), (\w+), (\w+)\)$", SOURCE, re.MULTILINE)
    words = {"kv_word4": 16, "kv_u64": 8, "kv_u32": 4, "kv_u8": 1}
    indices = {"kv_i64": 8, "kv_i32": 4}
    named = {name: abi.kernel_name(words[word], indices[index]) for name, word, index in variants}
    assert all(name == expected for name, expected in named.items())
    assert set(named) == set(abi.KERNELS) == set(SHIPPED.kernels)
    assert len(variants) == 8


def struct(name: str) -> list[tuple[str, str]]:
    """(type, field) of a struct of the source, in order."""
    (body,) = re.findall(rf"struct {name} \{{(.*?)\}};", SOURCE, re.DOTALL)
    fields = list[tuple[str, str]]()
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = declaration.split(maxsplit=1)
        fields += [(kind, re.sub(r"\[\w+\]", "", field.strip())) for field in names.split(",")]
    return fields


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("kv_side", abi.ARGS["component"].base["src"]),
        ("kv_component", abi.ARGS["component"].base),
        ("kv_selector", abi.ARGS["src"]),
        ("kv_transfer_args", abi.ARGS),
        ("kv_error_record", abi.ERROR_RECORD),
    ],
)
def test_the_structs_of_the_source_have_these_fields_in_this_order(name: str, dtype: np.dtype[np.void]) -> None:
    fields = struct(name)
    assert [field for _, field in fields] == list(dtype.names or ())
    for kind, field in fields:
        if kind in C_TYPES:
            assert dtype[field] == np.dtype(C_TYPES[kind]), field
    sizes = dict(re.findall(r"sizeof\((\w+)\) == (\d+)", SOURCE))
    assert int(sizes[name]) == dtype.itemsize


def test_every_field_keeps_64_bits_of_a_stride() -> None:
    """Scenario 15: 2**32 + 8 goes in and comes out, negative strides too."""
    block = abi.ArgumentBlock()
    names = ("table", "offset", "page", "slot", "layer", "head")
    for number in range(abi.MAX_COMPONENTS):
        for side in ("src", "dst"):
            for place, name in enumerate(names):
                block.array["component"][number][side][name] = 2**32 + 8 * (place + 6 * number + 24 * (side == "dst"))
    raw = np.frombuffer(block.array.tobytes(), np.int64)
    assert raw.size * 8 == abi.ARGS_NBYTES
    for number in range(abi.MAX_COMPONENTS):
        words = raw[15 * number : 15 * number + 12]
        expected = [2**32 + 8 * (place + 6 * number + 24 * dst) for dst in (0, 1) for place in range(6)]
        assert words.tolist() == expected
    block.array["component"][0]["src"]["slot"] = -(2**40)
    assert block.array["component"][0]["src"]["slot"] == -(2**40)


def test_the_block_stays_where_its_address_says() -> None:
    from kvferry.drivers import posix

    block = abi.ArgumentBlock()
    block.array["n_warps"] = 77
    content = np.frombuffer(posix.buffer(block.address, abi.ARGS_NBYTES), abi.ARGS)[0]
    assert content["n_warps"] == 77
    pointer = np.frombuffer(posix.buffer(block.parameters, 8), np.uint64)[0]
    assert pointer == block.address


def test_the_source_lies_where_the_manifest_is() -> None:
    assert Path(abi.__file__).resolve().parent == SHIPPED.directory
