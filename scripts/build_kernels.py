#!/usr/bin/env python3
"""Build every kernel binary in kernels_cubin/ and its manifest.json, from one source and with pip packages alone.

    python scripts/build_kernels.py                 write them
    python scripts/build_kernels.py --check         build, compare bytes, exit 1 and name what differs
    ... --output DIR                                write to, or compare with, another folder

The compilers are the wheels of toolchain.txt, by hash, in the user's cache (KVFERRY_TOOLCHAIN names another folder to
keep them in). Nothing else of the machine takes part: no PATH, no vendor's headers, no libc, no absolute path. So the
bytes are the same for everybody, and anybody can check that the binaries are what the source says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from elf import MACHINES, Elf, MalformedBinary, read_cubin, read_hsaco
from toolchain import BuildError, Tools, install_toolchain, pinned_versions

KERNELS = Path(__file__).resolve().parent.parent / "kernels_cubin"
SOURCE = "kv_transfer.cu"
MANIFEST = "manifest.json"
EXPORTS = frozenset({"kv_host_abi", "kv_host_find", "kv_host_launch"})

MAX_CUBIN_STACK_NBYTES = 32
"""ptxas spills a few 32-bit registers in some kernels of sm_75 to sm_89; more than this is a kernel gone wrong."""


@dataclass(frozen=True)
class Target:
    """One binary: ``kind`` says how it is built, ``elf_abi`` which version of the vendor's ELF it has to be."""

    name: str
    kind: str
    elf_abi: int = 0

    @property
    def file(self) -> str:
        return f"kv_transfer.{self.name}.{'so' if self.kind == 'host' else self.kind}"


TARGETS = (
    # ELF ABI 7 is what every driver from 12.0 reads; these two architectures came with 12.8 and ABI 8.
    *(Target(f"sm_{architecture}", "cubin", 7) for architecture in (75, 80, 86, 89, 90)),
    *(Target(f"sm_{architecture}", "cubin", 8) for architecture in (100, 120)),
    Target("sm_75", "ptx"),
    # ELF ABI 3 is code object V5, which every supported runtime reads. Generic targets, for processors without a named
    # one, exist in V6 only, which is ELF ABI 4 and needs a recent runtime.
    *(Target(f"gfx{model}", "hsaco", 3) for model in ("90a", "942", "950", "1030", "1100", "1101", "1200", "1201")),
    *(Target(f"gfx{family}-generic", "hsaco", 4) for family in ("9-4", "10-3", "11", "12")),
    Target("x86_64", "host"),
    Target("aarch64", "host"),
)

COMMON = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-ident", "-nostdinc", "-nostdinc++"]
DEVICE = [*COMMON, "-O3", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-fuse-cuid=none"]
DEVICE += ["-Wno-unknown-cuda-version"]
HOST = [*COMMON, "-O2", "-x", "c++", "-ffreestanding", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
HOST += ["-fno-stack-protector", "-fno-asynchronous-unwind-tables"]
# Without the flag an atomic becomes a call into libgcc, which is not there.
HOST_EXTRA = {"x86_64": [], "aarch64": ["-mno-outline-atomics"]}
# CUDA 11.7's, so every supported driver takes it. With an older one clang has no grid_constant parameters, and every
# thread would first copy all arguments to local memory.
OLDEST_PTX = "--cuda-feature=+ptx77"


def build_ptx(tools: Tools, target: Target, *features: str) -> str:
    output = f"{target.file}.s"
    tools.clang("-x", "cuda", f"--cuda-gpu-arch={target.name}", *features, *DEVICE, "-S", SOURCE, "-o", output)
    return output


def cubin(tools: Tools, target: Target) -> None:
    tools.ptxas("-O3", f"-arch={target.name}", build_ptx(tools, target), "-o", target.file)


def ptx(tools: Tools, target: Target) -> None:
    text = (tools.work / build_ptx(tools, target, OLDEST_PTX)).read_text()
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    (tools.work / target.file).write_text("\n".join(line for line in lines if line) + "\n")


def hsaco(tools: Tools, target: Target) -> None:
    assembly, obj = f"{target.file}.s", f"{target.file}.o"
    version = f"-mcode-object-version={target.elf_abi + 2}"
    tools.clang("-x", "hip", f"--offload-arch={target.name}", *DEVICE, version, "-S", SOURCE, "-o", assembly)
    amd = ["--target=amdgcn-amd-amdhsa", f"-mcpu={target.name}", version]
    tools.clang(*amd, "-x", "assembler", "-c", assembly, "-o", obj)
    tools.link(obj, "-o", target.file)


def host(tools: Tools, target: Target) -> None:
    obj = host_object(tools, target.name, SOURCE)
    tools.link(obj, "-o", target.file)


def host_object(tools: Tools, machine: str, source: str) -> str:
    output = f"{source}.{machine}.o"
    tools.clang(f"--target={machine}-linux-gnu", *HOST, *HOST_EXTRA[machine], "-c", source, "-o", output)
    return output


BUILDERS: Mapping[str, Callable[[Tools, Target], None]] = {"cubin": cubin, "ptx": ptx, "hsaco": hsaco, "host": host}


@dataclass(frozen=True)
class Interface:
    """What the Python side must agree on with the kernels, as the compiler sees it."""

    kernel_abi: int
    args_nbytes: int
    kernels: tuple[str, ...]
    parameters: tuple[dict[str, str | int], ...]


def read_interface(tools: Tools) -> Interface:
    """Names from the source, numbers from the compiler: from the bytes of a table that it compiled."""
    source = (tools.work / SOURCE).read_text()
    kernels = re.findall(r"^KV_VARIANT\((\w+),", source, re.MULTILINE)
    body = re.search(r"struct kv_transfer_args \{(.*?)\n\};", source, re.DOTALL)
    if not kernels or not body:
        raise BuildError(f"{SOURCE}: found no KV_VARIANT lines or no struct kv_transfer_args")
    declarations = re.sub(r"//.*|\[.*?\]", "", body[1]).split(";")
    fields = [name.split()[-1] for text in declarations if text.strip() for name in text.split(",")]
    entries = ["KV_ABI", "sizeof(kv_transfer_args)"]
    for field in fields:
        entries += [f"__builtin_offsetof(kv_transfer_args, {field})", f"sizeof(kv_transfer_args::{field})"]
    probe = f'#include "{SOURCE}"\nextern "C" {{ extern const kv_u32 kv_facts[] = {{{", ".join(entries)}}}; }}\n'
    (tools.work / "probe.cc").write_text(probe)
    table = Elf((tools.work / host_object(tools, "x86_64", "probe.cc")).read_bytes()).symbol_bytes("kv_facts")
    abi, args_nbytes, *numbers = memoryview(table).cast("I").tolist()
    parameters: list[dict[str, str | int]] = [
        {"name": name, "offset": offset, "nbytes": nbytes}
        for name, offset, nbytes in zip(fields, numbers[::2], numbers[1::2], strict=True)
    ]
    return Interface(abi, args_nbytes, tuple(kernels), tuple(parameters))


def check_binary(target: Target, data: bytes, interface: Interface) -> None:
    """Raise ``BuildError`` unless the binary is for its target and takes the arguments that Python will pass."""

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise BuildError(f"{target.file}: {problem}")

    if target.kind in ("cubin", "hsaco"):
        binary = (read_cubin if target.kind == "cubin" else read_hsaco)(data)
        require(binary.target == target.name, f"built for {binary.target}")
        require(binary.elf_abi == target.elf_abi, f"ELF ABI {binary.elf_abi} instead of {target.elf_abi}")
        require(set(binary.kernels) == set(interface.kernels), f"kernels {sorted(binary.kernels)}")
        stack_limit = MAX_CUBIN_STACK_NBYTES if target.kind == "cubin" else 0
        for name, kernel in binary.kernels.items():
            require(kernel.args_nbytes == interface.args_nbytes, f"{name} takes {kernel.args_nbytes} bytes")
            require(kernel.stack_nbytes <= stack_limit, f"{name} needs {kernel.stack_nbytes} bytes of stack")
            require(not kernel.spilled_registers, f"{name} spills {kernel.spilled_registers} registers")
    elif target.kind == "ptx":
        text = data.decode("ascii")
        require(f".target {target.name}\n" in text, "built for another target")
        require(set(re.findall(r"^\.visible \.entry (\w+)\($", text, re.M)) == set(interface.kernels), "other kernels")
        sizes = re.findall(r"_param_0\[(\d+)\]$", text, re.M)
        require(sizes == [str(interface.args_nbytes)] * len(interface.kernels), f"arguments of {sizes} bytes")
        require(".local" not in text, "arguments are copied to local memory")
    else:
        elf = Elf(data)
        symbols = elf.symbols(dynamic=True)
        require(MACHINES.get(elf.machine) == target.name, f"built for machine {elf.machine}")
        require({symbol.name for symbol in symbols if symbol.section} == EXPORTS, "exports other symbols")
        undefined = [symbol.name for symbol in symbols if symbol.name and not symbol.section]
        require(not undefined, f"undefined symbols {undefined}")


def build_one(tools: Tools, target: Target, interface: Interface) -> bytes:
    BUILDERS[target.kind](tools, target)
    data = (tools.work / target.file).read_bytes()
    try:
        check_binary(target, data, interface)
    except MalformedBinary as error:
        raise BuildError(f"{target.file}: {error}") from error
    if os.fsencode(tools.work) in data or os.fsencode(tools.toolchain) in data:
        raise BuildError(f"{target.file}: holds a path of this machine")
    return data


def build_all(toolchain: Path, work: Path) -> dict[str, bytes]:
    """Every file by name, the manifest among them."""
    sources = sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("kv_*.h")])
    for source in sources:
        shutil.copyfile(source, work / source.name)
    tools = Tools(toolchain, work)
    interface = read_interface(tools)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(lambda target: build_one(tools, target, interface), TARGETS))
    built = {target.file: data for target, data in zip(TARGETS, files, strict=True)}
    manifest = {
        "kernel_abi": interface.kernel_abi,
        "args_nbytes": interface.args_nbytes,
        "kernels": interface.kernels,
        "parameters": interface.parameters,
        "sources": {source.name: sha256((work / source.name).read_bytes()) for source in sources},
        "toolchain": {**pinned_versions(), "clang": tools.clang("--version").splitlines()[0].split()[-1]},
        "elf_abi": {target.file: target.elf_abi for target in TARGETS if target.elf_abi},
        "artefacts": [
            {
                "file": target.file,
                "target": target.name,
                "kind": target.kind,
                "nbytes": len(built[target.file]),
                "sha256": sha256(built[target.file]),
            }
            for target in TARGETS
        ],
    }
    built[MANIFEST] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    return built


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def binaries_in(folder: Path) -> set[str]:
    return {path.name for kind in ("cubin", "ptx", "hsaco", "so") for path in folder.glob(f"*.{kind}")}


def differences(built: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """What keeps ``folder`` from being exactly what was built, by file name."""
    problems = dict.fromkeys(binaries_in(folder) - set(built), "unexpected, nothing builds it")
    for name, data in built.items():
        path = folder / name
        if not path.is_file():
            problems[name] = "missing"
        elif path.read_bytes() != data:
            problems[name] = "differs from what the source and toolchain.txt give"
    return dict(sorted(problems.items()))


def write(built: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in binaries_in(folder) - set(built):
        (folder / name).unlink()
    for name, data in built.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o644)
        print(f"{name:28} {len(data):8}  {sha256(data)[:16]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the kernel binaries and their manifest.")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    parser.add_argument("--output", type=Path, default=KERNELS, metavar="DIR", help="instead of kernels_cubin/")
    options = parser.parse_args()
    try:
        toolchain = install_toolchain()
        with tempfile.TemporaryDirectory(prefix="kvferry-build-") as work:
            built = build_all(toolchain, Path(work).resolve())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not options.check:
        write(built, options.output)
        return 0
    problems = differences(built, options.output)
    for name, problem in problems.items():
        print(f"{name}: {problem}", file=sys.stderr)
    if problems:
        print("run scripts/build_kernels.py and check the result in", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
