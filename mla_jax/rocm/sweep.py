"""Launch parameters of the AMD chips by compiling every candidate: no spills, what fits, and the shortest estimate."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mla_jax.kernels import tuning
from mla_jax.kernels.tuning import AttendTuning, IndexTuning, WriteTuning
from mla_jax.rocm.cases import RocmCase, own_raw
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.report import measure

Tuning = WriteTuning | AttendTuning | IndexTuning


def write_candidates() -> list[Tuning]:
    """For the writers: a wave and more, and the rows of a tile."""
    return [
        WriteTuning(rows=rows, together=rows, num_warps=warps) for rows, warps in itertools.product((2, 4, 8, 16), (1, 2, 4)) if rows >= warps
    ]


def attend_candidates(arch: str, rows: Sequence[int]) -> list[Tuning]:
    """For the attentions."""
    options = itertools.product(rows, (32, 64), (2, 4, 8) if rows == (16,) else (4, 8), (1, 2))
    return [
        AttendTuning(rows=r, keys=k, num_warps=w, num_stages=s, programs=CHIPS[arch].compute_units) for r, k, w, s in options
    ]


def index_candidates() -> list[Tuning]:
    """For the indexer."""
    return [IndexTuning(keys=k, tiles=t, num_warps=w, num_stages=1) for k, t, w in itertools.product((32, 64, 128), (1, 4), (1, 2, 4))]


def buckets(arch: str) -> Iterator[tuple[tuple[str, ...], RocmCase, list[Tuning]]]:
    """(path in the table, the case that stands for it, candidates)."""

    def case(op: Any, layout: str, preset: str) -> RocmCase:
        return RocmCase(op=op, arch=arch, layout=layout, preset=preset)

    writers = {"plain": "plain_bfloat16", "raw_fused": own_raw(arch), "scaled": "packed_pow2"}
    for kernel, layout in writers.items():
        yield ("write", kernel), case("write", layout, "glm-5"), write_candidates()
    yield ("write", "index"), case("write_index", own_raw(arch), "glm-5"), write_candidates()
    kinds = {"plain": "plain_bfloat16", "raw": "raw_e5m2", "raw_native": own_raw(arch), "packed": "packed_pow2", "float32": "plain_float32"}
    if arch == "gfx942":
        # Its own dialect is decoded as any other: "raw" is tuned for the costlier of them.
        kinds = {**kinds, "raw": own_raw(arch)}
        del kinds["raw_native"]
    small, large = (16,), (32, 64)
    for kind, layout in kinds.items():
        yield ("dense", kind, str(tuning.SMALL_ROWS)), case("decode", layout, "deepseek-v2-lite"), attend_candidates(arch, small)
        yield ("dense", kind, "any"), case("decode", layout, "deepseek-v3"), attend_candidates(arch, large)
        yield ("sparse", kind, str(tuning.SMALL_ROWS)), case("sparse", layout, "deepseek-v2-lite"), attend_candidates(arch, small)
        yield ("sparse", kind, "any"), case("sparse", layout, "deepseek-v3.2"), attend_candidates(arch, large)
    for kernel, op, preset, other in (("dense", "decode", "deepseek-v2-lite", "deepseek-v3"), ("sparse", "sparse", "deepseek-v2-lite", "deepseek-v3.2")):
        for name, chosen, rows in ((str(tuning.SMALL_ROWS), preset, small), ("any", other, large)):
            yield (kernel, "coded", name), dataclasses.replace(case(op, own_raw(arch), chosen), compute="fp8"), attend_candidates(arch, rows)
    yield ("index",), case("indexer", own_raw(arch), "glm-5"), index_candidates()


def tuned(case: RocmCase, candidate: Tuning) -> dict[str, Any]:
    """The row of a case launched with ``candidate``."""
    with tuning.forced(candidate):
        return {"tuning": entry(candidate), **measure(case)}


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best of a bucket: of those that keep every requirement the shortest estimate, then the smallest code.

    Raises:
        ValueError: if none keeps every requirement.
    """
    good = [row for row in rows if not row["shortfalls"]]
    if not good:
        raise ValueError(f"no candidate keeps every requirement: {[row['shortfalls'] for row in rows]}")
    # A tenth of a difference is within what the estimate leaves out; the smaller code is the safer choice then.
    least = min(row["estimate"]["microseconds"] for row in good)
    near = [row for row in good if row["estimate"]["microseconds"] <= 1.03 * least]
    return min(near, key=lambda row: row["instructions"])


def entry(candidate: Tuning) -> dict[str, Any]:
    """As the table has it: without what is at its default."""
    defaults = {"native_fp8": False, "join_planes": False, "together": 1}
    return {k: v for k, v in vars(candidate).items() if defaults.get(k) is not v}


def write_table(arch: str, choices: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """Puts the choices into the table of ``arch``; entries that no bucket chooses go."""
    tables: dict[str, Any] = json.loads(tuning.TABLES.read_text())
    table: dict[str, Any] = {}
    for path, chosen in choices.items():
        place = table
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = chosen
    tables[arch] = table
    tuning.TABLES.write_text(json.dumps(tables, indent=1) + "\n")
    tuning.tables.cache_clear()
