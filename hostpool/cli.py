"""The ``kvferry`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, get_args

from kvferry.drivers.errors import KVFerryError
from kvferry.drivers.protocol import Platform
from kvferry.hostpool import demo, doctor
from kvferry.hostpool.backend import first_backend, open_backend
from kvferry.hostpool.layout import PageOrder
from kvferry.kernels_cubin.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.hostpool.mapping import Progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 something differs, 2 it could not be done."""
    parser = argparse.ArgumentParser(prog="kvferry", description="KV-cache pages between GPU and pinned host memory")
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("demo", help="back up, wipe and load back a KV cache, and compare every byte")
    command.add_argument("--platform", choices=get_args(Platform), help="instead of the first that works")
    command.add_argument("--device", type=int, default=0, help="device number (default 0)")
    command.add_argument("--order", choices=get_args(PageOrder), default="page_first_direct", help="host page order")
    command.add_argument("--layers", type=int, default=32, help="layers of the cache (default 32)")
    command.add_argument("--pages", type=int, help="pages of 64 tokens (default 64, on the stand-in 4)")
    command.add_argument("--json", action="store_true", help="print one object")
    command.set_defaults(run=_demo)

    command = commands.add_parser("artefacts", help="list and verify every shipped kernel binary")
    command.add_argument("--json", action="store_true", help="print a list of objects")
    command.set_defaults(run=_artefacts)

    command = commands.add_parser("doctor", help="what is here, whether the main job works, and what to do if not")
    command.add_argument("--platform", choices=get_args(Platform), help="instead of the first that works")
    command.add_argument("--json", action="store_true", help="print one object")
    command.set_defaults(run=_doctor)

    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KVFerryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 2


def _demo(options: argparse.Namespace) -> int:
    passed_over: dict[Platform, str] = {}
    if options.platform:
        backend = open_backend(options.platform)
    else:
        backend, passed_over = first_backend()
    quiet = options.json or not sys.stderr.isatty()
    with _progress_bar(quiet) as progress:
        result = demo.run(
            backend,
            device=options.device,
            order=options.order,
            layers=options.layers,
            pages=options.pages,
            progress=progress,
        )
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        for platform, why in passed_over.items():
            print(f"not {platform:8} {why}")
        print(f"platform     {result.platform}")
        print(f"device       {result.device}")
        print(f"driver       {result.driver}")
        print(f"artefact     {result.artefact_file} (sha256 {result.artefact_sha256})")
        print(f"domain       {result.domain_kind}: {result.domain_reason}")
        print(f"store        {result.store_gbps:.2f} GB/s")
        print(f"load         {result.load_gbps:.2f} GB/s")
        verdict = "all bytes equal" if result.ok else f"{result.different_nbytes} bytes differ"
        print(f"{result.nbytes} bytes backed up, wiped and loaded back: {verdict}")
    return 0 if result.ok else 1


def _artefacts(options: argparse.Namespace) -> int:
    problems = Manifest.load().verify()
    if options.json:
        rows = [
            {"file": a.file, "target": a.target, "kind": a.kind, "sha256": a.sha256, "verified": problem is None}
            for a, problem in problems.items()
        ]
        print(json.dumps(rows))
    else:
        for a, problem in problems.items():
            print(f"{a.file:32} {a.target:8} {a.kind:6} {a.sha256}  {'verified' if problem is None else problem}")
    bad = [f"{a.file}: {problem}" for a, problem in problems.items() if problem is not None]
    for line in bad:
        print(f"kvferry: {line}", file=sys.stderr)
    return 1 if bad else 0


def _doctor(options: argparse.Namespace) -> int:
    report = doctor.examine(options.platform)
    print(json.dumps(report.as_json()) if options.json else "\n".join(doctor.lines(report)))
    return 0 if report.ok else 1


@contextmanager
def _bar() -> Iterator[Progress]:
    from tqdm import tqdm

    with tqdm(desc="host memory", unit="B", unit_scale=True, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def _no_bar() -> Iterator[None]:
    yield None


def _progress_bar(quiet: bool) -> AbstractContextManager[Progress | None]:
    """A bar while a pool's memory is made present: on a terminal, with the ``cli`` extra."""
    if quiet:
        return _no_bar()
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return _no_bar()
    return _bar()


if __name__ == "__main__":
    sys.exit(main())
