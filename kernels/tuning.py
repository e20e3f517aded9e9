"""Speed: how kernels are launched, by architecture and static shape. Nothing here changes a result beyond rounding.

The numbers are in ``tuning.json`` beside this file: tables for sm_90, gfx942, gfx950 and interpret mode ("cpu-interpret"), and one
for the other chips of each backend ("cuda", "rocm"). ``mla-jax bench --tune`` measures the candidates below and rewrites the table
of the chip it runs on. The tables of the AMD chips come from compiling for them: no spills, and tiles within 64 KiB of LDS.

Lessons behind them. Writes: one warp owns a row, so that a group's maximum needs no shared memory (packed rows on the H200: 36 us
at 2 rows and 1 warp, 259 us at 16 rows and 4 warps). Reads: few query rows leave registers for wide tiles of keys; with more than
16 registers bind first, as the output of a row takes 512 of them.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mla_jax.devices import Target
from mla_jax.layout import CacheLayout

TABLES = pathlib.Path(__file__).with_name("tuning.json")

WriteKernel = Literal["plain", "raw_fused", "scaled", "index"]
ReadKernel = Literal["dense", "sparse"]

SMALL_ROWS = 16
"""Blocks of at most so many query rows have entries of their own."""

_MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTuning:
    """How one write kernel is launched.

    Attributes:
        rows: rows each program writes, unrolled, so that their loads are in flight together.
        together: how many of them make one tile, a power of two that divides ``rows``: enough for each lane to load 8 bytes and
            store 4 also of the narrow parts of a row.
        num_warps: warps a program.
        native_fp8: convert with the device's own OCP FP8 instruction instead of the integer encoder. Only where the two were
            compared bit for bit on the chip.
    """

    rows: int
    num_warps: int
    together: int = 1
    native_fp8: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendTuning:
    """How one attention kernel is launched.

    Attributes:
        rows: query rows (heads of tokens) of a program, a power of two from 16 on.
        keys: keys of a tile, a power of two from 16 on.
        num_warps: warps a program.
        num_stages: tiles in flight.
        programs: programs that fill the chip; keys are split while there are no more.
        native_fp8: decode OCP e4m3 with the device's own instruction.
        join_planes: join the planes of decoded codes to whole rows, for warp-group matrix units, which read shared memory.
        pieces: parts, a power of two, in which the latent numbers of a row are loaded, decoded and multiplied: fewer registers
            hold them on their way to shared memory. Fewer are made where they would not be equal, or too small.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 1
    programs: int = 1
    native_fp8: bool = False
    join_planes: bool = False
    pieces: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTuning:
    """How the indexer's kernel is launched.

    Attributes:
        keys: keys of a tile, a power of two from 16 on.
        tiles: tiles of a program.
        num_warps: warps a program.
        num_stages: tiles in flight.
        native_fp8: decode OCP e4m3 with the device's own instruction.
    """

    keys: int
    tiles: int
    num_warps: int
    num_stages: int = 1
    native_fp8: bool = False


Tuning = WriteTuning | AttendTuning | IndexTuning

_OPTIONS = {"native_fp8": False, "join_planes": False, "pieces": 1, "together": 1}
"""Fields that a table leaves out where they are so; all others stand in every entry."""


def entry(tuning: Tuning) -> dict[str, Any]:
    """Launch parameters as a table has them."""
    return {name: value for name, value in vars(tuning).items() if name not in _OPTIONS or value != _OPTIONS[name]}


_FORCED: contextvars.ContextVar[Tuning | None] = contextvars.ContextVar("forced", default=None)


@contextlib.contextmanager
def forced(tuning: Tuning) -> Iterator[None]:
    """Kernels of its kind that are traced inside are launched with ``tuning``, to measure it."""
    token = _FORCED.set(tuning)
    try:
        yield
    finally:
        _FORCED.reset(token)


def is_forced() -> bool:
    """Whether :func:`forced` is in force."""
    return _FORCED.get() is not None


@functools.cache
def tables() -> Mapping[str, Any]:
    """The tables, by architecture."""
    return json.loads(TABLES.read_text())


def table_name(target: Target) -> str:
    """Which table serves ``target``.

    Raises:
        NotImplementedError: for a backend that no kernel is lowered for.
    """
    if target.backend == "cpu":
        return "cpu-interpret"
    if target.arch in tables():
        return target.arch
    if target.backend not in tables():
        raise NotImplementedError(f"the Pallas kernels serve CUDA and ROCm, not {target.backend}")
    return target.backend


def write_tuning(target: Target, kernel: WriteKernel) -> WriteTuning:
    """The launch parameters of a write kernel on ``target``."""
    chosen = _FORCED.get()
    if isinstance(chosen, WriteTuning):
        return chosen
    return WriteTuning(**tables()[table_name(target)]["write"][kernel])


def kind(layout: CacheLayout, wide: bool, coded: bool = False) -> str:
    """Which entries serve a layout.

    "float32" where products are made in it, "coded" where they are in FP8, else "plain", "packed" or "raw". Rows of e4m3, which
    cost more to decode than e5m2 unless the chip converts them itself, may have "raw_native" (OCP) and "raw_fnuz" of their own.
    """
    if wide:
        return "float32"
    if coded:
        return "coded"
    if layout.is_raw:
        return {"e4m3fn": "raw_native", "e4m3fnuz": "raw_fnuz"}.get(layout.dialect or "", "raw")
    return "packed" if layout.is_packed else "plain"


def attend_tuning(
    target: Target, kernel: ReadKernel, layout: CacheLayout, rows: int, wide: bool, coded: bool = False, tokens: int = 1
) -> AttendTuning:
    """The launch parameters of an attention kernel.

    Args:
        target: the device.
        kernel: which kernel.
        layout: of the stored rows.
        rows: query rows of a block.
        wide: products are made in float32.
        coded: products are made in FP8.
        tokens: of a block. Several that see different keys take a second loop and more registers, for which a chip may have
            entries of its own.
    """
    chosen = _FORCED.get()
    if isinstance(chosen, AttendTuning):
        return chosen
    entries = tables()[table_name(target)][kernel]
    name = kind(layout, wide, coded)
    by_rows = entries.get(name) or entries["raw" if coded else name.split("_")[0]]
    bucket = "several" if tokens > 1 else str(SMALL_ROWS) if rows <= SMALL_ROWS else "any"
    if bucket not in by_rows:
        bucket = str(SMALL_ROWS) if rows <= SMALL_ROWS and str(SMALL_ROWS) in by_rows else "any"
    return AttendTuning(**by_rows[bucket])


def index_tuning(target: Target) -> IndexTuning:
    """The launch parameters of the indexer's kernel."""
    chosen = _FORCED.get()
    if isinstance(chosen, IndexTuning):
        return chosen
    return IndexTuning(**tables()[table_name(target)]["index"])


def default_splits(tuning: AttendTuning, programs: int, columns: int) -> int:
    """Parts that keys are divided into, from static facts: enough to fill the chip, none of fewer than four tiles."""
    tiles = -(-columns // tuning.keys)
    return max(1, min(tuning.programs // programs, -(-tiles // 4), _MAX_SPLITS))
