"""Every shipped AMD code object that can be decoded, every kernel in it, byte by byte against a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.manifest import Manifest

from emulator.codeobject import CodeObject, load
from emulator.errors import DeviceFault, NoDecoder
from emulator.report import RECORD, has_decoder, shipped
from emulator.scene import EPOCH, Case, Part, Scene
from emulator.wave import sweep

pytestmark = pytest.mark.emulated

TARGETS = [target for target in shipped() if has_decoder(target)]
WORDS = [pytest.param(word, index, id=abi.kernel_name(word, index)) for index in (8, 4) for word in abi.WORD_NBYTES]
every_target = pytest.mark.parametrize("target", TARGETS)
every_kernel = pytest.mark.parametrize(("word", "index_nbytes"), WORDS)

PAGES: dict[str, Any] = {"pool_indices": (5, 0, 3, 2), "cache_indices": (1, 4, 0, 2)}
TOKENS: dict[str, Any] = {"pool_indices": (23, 0, 6, 7, 13), "cache_indices": (2, 19, 5, 4, 0), "unit": "token"}


def parts(word: int, *, narrow: bool, lanes: int) -> tuple[Part, Part]:
    """A part whose runs end inside a segment, and one of two heads with a gap between them."""
    segment = lanes * (1 if narrow else abi.words_per_lane(word))
    return Part(word * (segment - 1 if narrow else segment + 5)), Part(word * 3, heads=2, head_gap=word * 2)


def variants(word: int, index_nbytes: int) -> Iterator[Case]:
    """Long and short runs, pages and tokens, both directions, and everything else in one of them."""
    long = Case(word, index_nbytes, parts(word, narrow=False, lanes=8), narrow=False, lanes=8, **PAGES)
    short = Case(word, index_nbytes, parts(word, narrow=True, lanes=8), narrow=True, lanes=8, **PAGES)
    shift = 3 if word == 1 else word
    yield long
    yield replace(long, storing=True, lanes=32, shift=shift, moved_layers=2, layer_begin=1)
    yield replace(long, **TOKENS, split=True, counting=False)
    yield replace(short, **TOKENS, storing=True, lanes=16, shift=shift, rcp_direction=1)
    yield replace(short, **TOKENS, split=True, rcp_direction=-1)
    yield replace(short, storing=True, threads=1024, ctas=1)
    yield replace(short, **TOKENS, lanes=2, threads=64, ctas=3)


@every_target
@every_kernel
def test_moves_exactly_these_bytes(code: CodeObject, word: int, index_nbytes: int) -> None:
    for number, case in enumerate(variants(word, index_nbytes)):
        scene = Scene(case, seed=number)
        before = scene.contents()
        moved = scene.expected(scene.contents())
        assert any(
            (a != b).any() for a, b in [*zip(moved.blocks, before.blocks, strict=True), (moved.pages, before.pages)]
        )
        scene.run(code)
        scene.assert_holds(moved)
        tasks = int(scene.args["tasks_per_layer"]) if case.counting else 0
        assert scene.counted() == [tasks] * case.moved_layers + [0] * (case.layers - case.moved_layers)
        assert scene.error["code"][0] == 0


@every_target
@pytest.mark.parametrize("narrow", [False, True], ids=["long", "short"])
@every_kernel
def test_negative_indices_are_skipped_and_others_recorded(
    code: CodeObject, word: int, index_nbytes: int, narrow: bool
) -> None:
    case = Case(
        word,
        index_nbytes,
        (Part(word * 7),),
        narrow=narrow,
        lanes=8,
        pool_indices=(2, -1, 6, 4),
        cache_indices=(3, 0, 1, -5),
    )
    for side, bad in ((1, case), (2, replace(case, storing=True))):
        scene = Scene(bad)
        expected = scene.expected(scene.contents())
        scene.run(code)
        scene.assert_holds(expected)
        (record,) = scene.error
        assert (record["side"], record["position"], record["value"], record["code"]) == (side, 2, 6, 1)
        assert scene.claim[0] == EPOCH
        assert scene.counted() == [int(scene.args["tasks_per_layer"])] * 3, "waiting streams go on all the same"


@every_target
@pytest.mark.parametrize("index_nbytes", [8, 4])
def test_one_of_many_bad_indices_is_recorded(code: CodeObject, index_nbytes: int) -> None:
    pool, cache = tuple(range(6)) * 12, (1000, 5, 6, 7, 4) * 14 + (9, 9)
    largest = 2 ** (8 * index_nbytes - 1) - 1
    case = Case(16, index_nbytes, (Part(64),), True, 4, pool, (largest, *cache[1:]))
    scene = Scene(case)
    scene.run(code)
    (record,) = scene.error
    assert (record["side"], record["code"]) == (2, 1)
    assert case.cache_indices[int(record["position"])] == record["value"]
    assert not 0 <= record["value"] < scene.cache_pages


@every_target
@pytest.mark.parametrize("storing", [False, True], ids=["load", "store"])
@every_kernel
def test_a_host_address_faults(code: CodeObject, word: int, index_nbytes: int, storing: bool) -> None:
    """The mistake that works on most CUDA machines: the process's address of a pinned page in a kernel."""
    case = Case(word, index_nbytes, parts(word, narrow=True, lanes=8), narrow=True, lanes=8, storing=storing, **PAGES)
    scene = Scene(case)
    scene.use_page_table([chunk.host_address for chunk in scene.pool])
    with pytest.raises(DeviceFault) as caught:
        scene.run(code)
    fault = caught.value
    assert any(chunk.host_address <= fault.address < chunk.host_address + chunk.nbytes for chunk in scene.pool)
    assert (fault.nbytes, fault.is_write) == (word, storing)
    assert ("STORE" if storing else "LOAD") in fault.instruction
    assert code.kernel(case.kernel).entry <= fault.pc < len(code.memory)


@every_target
def test_chunks_have_aliases_of_their_own(code: CodeObject) -> None:
    """The other mistake: one chunk's distance between host and device taken for every chunk's."""
    case = Case(16, 8, parts(16, narrow=False, lanes=8), narrow=False, lanes=8, **PAGES)
    scene = Scene(case)
    distance = scene.pool[0].alias - scene.pool[0].host_address
    assert {chunk.alias - chunk.host_address for chunk in scene.pool} != {distance}
    scene.use_page_table([chunk.host_address + distance for chunk in scene.pool])
    expected = scene.expected(scene.contents())

    def transfer() -> None:
        scene.run(code)
        scene.assert_holds(expected)

    with pytest.raises((DeviceFault, AssertionError)):
        transfer()


@every_target
def test_an_unwritable_argument_block_and_a_missing_range(code: CodeObject) -> None:
    """Every range is needed: without any one of them the kernel faults inside what is missing."""
    case = Case(8, 8, (Part(8 * 5),), narrow=True, lanes=8, **PAGES)
    needed = Scene(case)
    ranges = list(needed.ranges)
    errors_only = {int(needed.error.ctypes.data), int(needed.claim.ctypes.data)}
    for missing in ranges:
        scene = needed
        scene.ranges[:] = [r for r in ranges if r != missing]
        if missing[0] in errors_only:
            scene.run(code)
            continue
        with pytest.raises(DeviceFault) as caught:
            scene.run(code)
        assert missing[0] <= caught.value.address < missing[1]


@every_target
def test_every_instruction_in_the_file_is_known(code: CodeObject) -> None:
    """Also those that no test reaches; the summary says how many are reached."""
    found = sweep(code)
    assert {i.opcode for i in found} >= {"S_ENDPGM"}
    RECORD.instructions[code.architecture] = len(found)


def test_what_cannot_be_decoded_says_so(manifest: Manifest) -> None:
    undecodable = [a for a in manifest.artefacts if a.kind == "hsaco" and not has_decoder(a.target)]
    for artefact in undecodable:
        with pytest.raises(NoDecoder, match=artefact.target):
            load(manifest.read(artefact))
    assert {artefact.target for artefact in undecodable} <= {"gfx1030", "gfx10-3-generic"}, (
        "a new one: teach the decoder or this list"
    )
