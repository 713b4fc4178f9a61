"""What a compiled kernel says of itself: a small ELF reader, and the vendors' notes in it.

Standard library only, because the build and the tests must be able to check a binary on a machine that has neither a
GPU nor a vendor's tools. Reads 64-bit little-endian files, which is all that is shipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

MACHINES = {62: "x86_64", 183: "aarch64", 190: "cuda", 224: "amdgpu"}
"""``e_machine`` of what is shipped (ELF gABI registry)."""

_SHT_SYMTAB, _SHT_NOTE, _SHT_NOBITS, _SHT_DYNSYM = 2, 7, 8, 11
_NT_AMDGPU_METADATA = 32  # LLVM, "User Guide for AMDGPU Backend", code object V3 and later

# Attributes of .nv.info, as `cuobjdump -elf` names them. An entry is (format, attribute, u16), and for format 4 that
# u16 is the length of the value that follows.
_EIATTR_FRAME_SIZE, _EIATTR_KPARAM_INFO, _EIATTR_CBANK_PARAM_SIZE = 0x11, 0x17, 0x19
_EIFMT_HVAL, _EIFMT_SVAL = 3, 4

MessagePack: TypeAlias = "bool | int | str | list[MessagePack] | dict[str, MessagePack] | None"


class MalformedBinary(ValueError):
    """The bytes are not what their name says."""


@dataclass(frozen=True)
class Section:
    """A section with its bytes; empty where the file holds none."""

    name: str
    type: int
    link: int
    data: bytes


@dataclass(frozen=True)
class Symbol:
    """A symbol; ``section`` is 0 where it is undefined."""

    name: str
    section: int
    value: int
    nbytes: int


@dataclass(frozen=True)
class Kernel:
    """What decides whether a launch fits: the argument block, and memory that should have been registers."""

    args_nbytes: int
    stack_nbytes: int
    spilled_registers: int = 0


@dataclass(frozen=True)
class DeviceBinary:
    """A cubin or a hsaco: the architecture, the version of the vendor's ELF dialect, the kernels by name."""

    target: str
    elf_abi: int
    kernels: dict[str, Kernel]


class Elf:
    """Header, sections and symbols of a file."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise MalformedBinary("not a 64-bit little-endian ELF file")
        try:
            self.elf_abi = data[8]
            (self.machine,) = struct.unpack_from("<H", data, 18)
            (table,) = struct.unpack_from("<Q", data, 40)
            (self.flags,) = struct.unpack_from("<I", data, 48)
            entry_nbytes, count, names_at = struct.unpack_from("<HHH", data, 58)
            headers = [struct.unpack_from("<IIQQQQII", data, table + i * entry_nbytes) for i in range(count)]
            names_begin = headers[names_at][4]
            self.sections = tuple(
                Section(
                    _string(data, names_begin + name),
                    type_,
                    link,
                    b"" if type_ == _SHT_NOBITS else data[begin : begin + nbytes],
                )
                for name, type_, _flags, _address, begin, nbytes, link, _info in headers
            )
        except (struct.error, IndexError, ValueError) as error:
            raise MalformedBinary(f"the ELF file is cut short or damaged: {error}") from error

    def symbols(self, *, dynamic: bool = False) -> tuple[Symbol, ...]:
        """The static or the dynamic symbols in file order, so that an index from elsewhere in the file fits."""
        wanted = _SHT_DYNSYM if dynamic else _SHT_SYMTAB
        return tuple(
            Symbol(_string(self.sections[table.link].data, name), section, value, nbytes)
            for table in self.sections
            if table.type == wanted
            for name, _info, _other, section, value, nbytes in struct.iter_unpack("<IBBHQQ", table.data)
        )

    def symbol_bytes(self, name: str) -> bytes:
        """The initial bytes of a variable; in a relocatable file, where a value is an offset in its section."""
        for symbol in self.symbols():
            if symbol.name == name and symbol.section:
                return self.sections[symbol.section].data[symbol.value : symbol.value + symbol.nbytes]
        raise MalformedBinary(f"no symbol {name}")

    def notes(self) -> Iterator[tuple[str, int, bytes]]:
        """Owner, type and content of every note."""
        for section in self.sections:
            at = 0
            while section.type == _SHT_NOTE and at < len(section.data):
                owner_nbytes, nbytes, type_ = struct.unpack_from("<III", section.data, at)
                owner = section.data[at + 12 : at + 12 + owner_nbytes].rstrip(b"\0").decode()
                begin = at + 12 + _padded(owner_nbytes)
                yield owner, type_, section.data[begin : begin + nbytes]
                at = begin + _padded(nbytes)


def read_cubin(data: bytes) -> DeviceBinary:
    """Architecture and kernels of a CUDA binary."""
    elf = Elf(data)
    if MACHINES.get(elf.machine) != "cuda":
        raise MalformedBinary(f"not a CUDA binary: e_machine is {elf.machine}")
    # ABI 7 has the architecture in the lowest byte of the flags, ABI 8 in the second.
    architecture = elf.flags >> 8 & 0xFF if elf.elf_abi >= 8 else elf.flags & 0xFF
    sections = {section.name: section.data for section in elf.sections}
    symbols = elf.symbols()
    stacks: dict[str, int] = {}
    for _format, attribute, value in _nv_info(sections.get(".nv.info", b"")):
        if attribute == _EIATTR_FRAME_SIZE:
            symbol, nbytes = struct.unpack("<II", value)
            stacks[symbols[symbol].name] = nbytes
    kernels = {}
    for name, info in sections.items():
        if name.startswith(".nv.info."):
            kernel = name.removeprefix(".nv.info.")
            if f".text.{kernel}" not in sections:
                raise MalformedBinary(f"kernel {kernel} has no code")
            kernels[kernel] = Kernel(_cubin_args_nbytes(kernel, info), stacks[kernel])
    return DeviceBinary(f"sm_{architecture}", elf.elf_abi, kernels)


def read_hsaco(data: bytes) -> DeviceBinary:
    """Architecture and kernels of an AMD code object, from the metadata that the runtime reads."""
    elf = Elf(data)
    if MACHINES.get(elf.machine) != "amdgpu":
        raise MalformedBinary(f"not an AMD code object: e_machine is {elf.machine}")
    notes = [content for owner, type_, content in elf.notes() if (owner, type_) == ("AMDGPU", _NT_AMDGPU_METADATA)]
    if len(notes) != 1:
        raise MalformedBinary(f"{len(notes)} metadata notes instead of one")
    metadata = cast("dict[str, MessagePack]", unpack_messagepack(notes[0]))
    exported = {symbol.name for symbol in elf.symbols(dynamic=True) if symbol.section}
    kernels = {}
    for entry in cast("list[dict[str, MessagePack]]", metadata["amdhsa.kernels"]):
        if not {entry[".name"], entry[".symbol"]} <= exported:
            raise MalformedBinary(f"kernel {entry['.name']} has no code")
        args_nbytes, stack, sgprs, vgprs = (
            cast("int", entry[key])
            for key in (
                ".kernarg_segment_size",
                ".private_segment_fixed_size",
                ".sgpr_spill_count",
                ".vgpr_spill_count",
            )
        )
        kernels[cast("str", entry[".name"])] = Kernel(args_nbytes, stack, sgprs + vgprs)
    target = cast("str", metadata["amdhsa.target"]).removeprefix("amdgcn-amd-amdhsa--")
    return DeviceBinary(target, elf.elf_abi, kernels)


def unpack_messagepack(data: bytes) -> MessagePack:
    """The one value in ``data``; the types that AMD's metadata uses (msgpack.org, spec.md)."""
    value, end = _unpack(data, 0)
    if data[end:].strip(b"\0"):
        raise MalformedBinary("bytes after the metadata")
    return value


def _unpack(data: bytes, at: int) -> tuple[MessagePack, int]:
    tag = data[at]
    at += 1
    if tag <= 0x7F or tag >= 0xE0:
        return tag - (0x100 if tag >= 0xE0 else 0), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if 0xCC <= tag <= 0xD3:
        nbytes = 1 << (tag & 3)
        return int.from_bytes(data[at : at + nbytes], "big", signed=tag >= 0xD0), at + nbytes
    for base, mask, kind in ((0x80, 0x0F, "map"), (0x90, 0x0F, "array"), (0xA0, 0x1F, "string")):
        if tag & ~mask == base:
            return _unpack_sized(data, at, kind, tag & mask)
    sized = {0xD9: ("string", 1), 0xDA: ("string", 2), 0xDB: ("string", 4)}
    sized |= {0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}
    if tag not in sized:
        raise MalformedBinary(f"MessagePack type 0x{tag:02x} in the metadata")
    kind, nbytes = sized[tag]
    return _unpack_sized(data, at + nbytes, kind, int.from_bytes(data[at : at + nbytes], "big"))


def _unpack_sized(data: bytes, at: int, kind: str, count: int) -> tuple[MessagePack, int]:
    if kind == "string":
        return data[at : at + count].decode(), at + count
    items: list[MessagePack] = []
    for _ in range(count * 2 if kind == "map" else count):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(cast("list[str]", items[::2]), items[1::2], strict=True)) if kind == "map" else items), at


def _nv_info(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(info):
        format_, attribute, word = struct.unpack_from("<BBH", info, at)
        nbytes = word if format_ == _EIFMT_SVAL else 0
        yield format_, attribute, info[at + 4 : at + 4 + nbytes] if nbytes else info[at + 2 : at + 4]
        at += 4 + nbytes


def _cubin_args_nbytes(kernel: str, info: bytes) -> int:
    sizes, block_nbytes = [], 0
    for format_, attribute, value in _nv_info(info):
        if attribute == _EIATTR_KPARAM_INFO and format_ == _EIFMT_SVAL:
            _index, _ordinal, _offset, word = struct.unpack("<IHHI", value)
            sizes.append(word >> 18)
        elif attribute == _EIATTR_CBANK_PARAM_SIZE and format_ == _EIFMT_HVAL:
            (block_nbytes,) = struct.unpack("<H", value)
    if sizes != [block_nbytes]:
        raise MalformedBinary(f"kernel {kernel}: parameters of {sizes} bytes in a block of {block_nbytes}, not one")
    return block_nbytes


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _padded(nbytes: int) -> int:
    return nbytes + 3 & ~3
