"""Choosing launch parameters: every candidate is compiled for this chip and timed, and the fastest is written to the table."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from mla_jax.bench.reads import ReadCase, prepare
from mla_jax.bench.timing import device_time, make_flush
from mla_jax.devices import default_target
from mla_jax.kernels import tuning
from mla_jax.kernels.tuning import AttendTuning, IndexTuning

BUCKETS: tuple[tuple[str, str, str, str], ...] = (
    ("dense", "plain", "plain_bfloat16", "decode"),
    ("dense", "raw_native", "raw_e4m3fn", "decode"),
    ("dense", "raw_fnuz", "raw_e4m3fnuz", "decode"),
    ("dense", "raw", "raw_e5m2", "decode"),
    ("dense", "packed", "packed_pow2", "decode"),
    ("sparse", "plain", "plain_bfloat16", "sparse"),
    ("sparse", "raw_native", "raw_e4m3fn", "sparse"),
    ("sparse", "raw_fnuz", "raw_e4m3fnuz", "sparse"),
    ("sparse", "raw", "raw_e5m2", "sparse"),
    ("sparse", "packed", "packed_pow2", "sparse"),
)
"""(kernel, kind of entry, layout, operation) of what is timed; H = 16 for small blocks, 128 for all others."""


def candidates(heads: int, native: bool, coded: bool) -> list[AttendTuning]:
    """Launch parameters worth a try; ``coded``: the rows hold FP8. Tiles that do not fit the chip fail to compile and drop out."""
    pieces = (1, 4) if coded else (1,)
    if heads <= tuning.SMALL_ROWS:
        shapes = [(16, keys, 4, stages, False, parts) for keys in (32, 64) for stages in (1, 2, 3) for parts in pieces]
    else:
        shapes = [(32, keys, 4, stages, False, parts) for keys, stages in ((32, 3), (64, 1), (64, 2)) for parts in pieces]
        shapes += [(64, 32, 8, stages, coded, 1) for stages in (2, 3)]
        shapes += [(64, 64, 8, stages, coded, parts) for stages in (1, 2, 3) for parts in (1, 2, 4)]
    return [
        AttendTuning(
            rows=rows,
            keys=keys,
            num_warps=warps,
            num_stages=stages,
            programs=132 if rows == 64 else 264,
            native_fp8=native,
            join_planes=joined,
            pieces=parts,
        )
        for rows, keys, warps, stages, joined, parts in shapes
    ]


def index_candidates(native: bool) -> list[IndexTuning]:
    """Launch parameters of the indexer worth a try."""
    options = itertools.product((64, 128), (1, 4), (4, 8), (1, 2))
    return [IndexTuning(keys=k, tiles=t, num_warps=w, num_stages=s, native_fp8=native) for k, t, w, s in options]


def tune(buckets: tuple[tuple[str, str, str, str], ...] = BUCKETS) -> Iterator[dict[str, Any]]:
    """Times the candidates of every bucket, writes each choice to the table of this chip as it is made, and yields it."""
    target = default_target()
    native = target.backend == "cuda" and (target.arch or "") >= "sm_89"
    tables: dict[str, Any] = json.loads(tuning.TABLES.read_text())
    table = tables.setdefault(target.arch or target.backend, json.loads(json.dumps(tables[target.backend])))
    flush, ignore = make_flush()

    def best(case: ReadCase, options: list[Any]) -> tuple[Any, float]:
        fn, args = prepare(case)
        lowered = []
        for option in options:
            with tuning.forced(option):
                lowered.append(jax.jit(lambda *a: fn(*a)).lower(*args))

        def compile_(low: Any) -> Any:
            try:
                return low.compile()
            except jax.errors.JaxRuntimeError:
                return None

        with ThreadPoolExecutor() as pool:
            compiled = list(pool.map(compile_, lowered))
        times = []
        for program, option in zip(compiled, options, strict=True):
            if program is None:
                continue

            def step(program: Any = program) -> Any:
                flush()
                return program(*args)

            times.append((device_time(step, calls=1, reps=5, ignore=ignore).microseconds, option))
        microseconds, option = min(times, key=lambda pair: pair[0])
        return option, microseconds

    def write() -> None:
        tuning.TABLES.write_text(json.dumps(tables, indent=1) + "\n")
        tuning.tables.cache_clear()

    for kernel, kind, layout, op in buckets:
        for heads, name in ((16, str(tuning.SMALL_ROWS)), (128, "any")):
            case = ReadCase(op, layout, 128, heads, 4096, 2048 if op == "sparse" else 0)
            option, microseconds = best(case, candidates(heads, native and kind in ("raw_native", "packed"), kind != "plain"))
            table[kernel].setdefault(kind, {})[name] = tuning.entry(option)
            write()
            yield {"case": case.name, "layout": layout, "microseconds": round(microseconds, 1), "choice": str(tuning.entry(option))}
    case = ReadCase("indexer", "raw_e4m3fn", 128, 32, 4096)
    option, microseconds = best(case, index_candidates(native))
    table["index"] = tuning.entry(option)
    write()
    yield {"case": case.name, "layout": case.layout, "microseconds": round(microseconds, 1), "choice": str(tuning.entry(option))}
