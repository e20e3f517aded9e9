"""Launch parameters of the AMD chips by compiling every candidate: no spills, what fits, and the shortest estimate."""

import functools
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
    """For the writers: the rows of a tile. One wave owns them, so that nothing is exchanged through LDS."""
    return [WriteTuning(rows=rows, together=rows, num_warps=1) for rows in (2, 4, 8, 16)]


def attend_candidates(arch: str, rows: Sequence[int], keys: Sequence[int]) -> list[Tuning]:
    """For the attentions."""
    options = itertools.product(rows, keys, (4, 8), (1, 2))
    return [AttendTuning(rows=r, keys=k, num_warps=w, num_stages=s, programs=CHIPS[arch].compute_units) for r, k, w, s in options]


def index_candidates() -> list[Tuning]:
    """For the indexer."""
    return [
        IndexTuning(keys=k, tiles=t, num_warps=w, num_stages=1) for k, t, w in itertools.product((32, 64, 128), (1, 4), (1, 2, 4))
    ]


def buckets(arch: str) -> Iterator[tuple[tuple[str, ...], list[RocmCase], list[Tuning]]]:
    """(path in the table, the case whose time counts and others that have to keep the requirements too, candidates)."""

    def case(op: Any, layout: str, preset: str, **fields: Any) -> RocmCase:
        return RocmCase(op=op, arch=arch, layout=layout, preset=preset, **fields)

    own = own_raw(arch)
    writers = {"plain": ["plain_bfloat16"], "raw_fused": [own, "raw_e5m2"], "scaled": ["packed_pow2", "packed_fp32"]}
    for kernel, layouts in writers.items():
        witnesses = [case("write", layout, "glm-5") for layout in layouts]
        if kernel == "raw_fused":
            witnesses.append(case("write", own, "minicpm3-4b"))
        yield ("write", kernel), witnesses, write_candidates()
    yield ("write", "index"), [case("write_index", own, "glm-5")], write_candidates()

    kinds = {
        "plain": ["plain_bfloat16"],
        "raw": ["raw_e5m2"],
        ("raw_fnuz" if arch == "gfx942" else "raw_native"): [own],
        "packed": ["packed_pow2"],
        "float32": ["plain_float32"],
        "coded": [own],
    }
    for kind, layouts in kinds.items():
        # Products in float32 take twice the registers and the LDS, those in FP8 half; 64 keys of two bytes exceed gfx942's LDS.
        keys = {"float32": (16, 32), "coded": (32, 64)}.get(kind, (32, 64) if arch == "gfx950" else (32,))
        small, large = ((16,), (16, 32)) if kind == "float32" else ((16,), (32, 64))
        make = functools.partial(case, compute="fp8") if kind == "coded" else case

        def of(op: str, *presets: str, layouts: list[str] = layouts, make: Any = make, **fields: Any) -> list[RocmCase]:
            return [make(op, layout, preset, **fields) for preset in presets for layout in layouts]

        name = str(tuning.SMALL_ROWS)
        yield ("dense", kind, name), of("decode", "deepseek-v2-lite"), attend_candidates(arch, small, keys)
        # A few heads that are no power of two, and narrower rows.
        yield (
            ("dense", kind, "any"),
            of("decode", "deepseek-v3", "glm-4.7-flash", "minicpm3-4b"),
            attend_candidates(arch, large, keys),
        )
        several = [*of("prefill", "deepseek-v2-lite"), *of("decode", "kimi-k2.5", new=4)]
        yield ("dense", kind, "several"), several, attend_candidates(arch, (16, 32), keys)
        yield ("sparse", kind, name), of("sparse", "deepseek-v2-lite"), attend_candidates(arch, small, keys)
        yield ("sparse", kind, "any"), of("sparse", "deepseek-v3.2", "glm-5"), attend_candidates(arch, large, keys)
    yield ("index",), [case("indexer", own, "glm-5"), case("indexer", "plain_float32", "glm-5")], index_candidates()


def tuned(cases: Sequence[RocmCase], candidate: Tuning) -> dict[str, Any]:
    """The row of the first case launched with ``candidate``, with the shortfalls of all."""
    with tuning.forced(candidate):
        row = {"tuning": tuning.entry(candidate), **measure(cases[0])}
        for case in cases[1:]:
            if not row["shortfalls"]:
                row["shortfalls"] = {f"{case.name}: {k}": v for k, v in measure(case)["shortfalls"].items()}
    return row


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


def write_entries(arch: str, choices: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """Puts choices into the table of ``arch``."""
    tables: dict[str, Any] = json.loads(tuning.TABLES.read_text())
    for path, chosen in choices.items():
        place = tables.setdefault(arch, {})
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = chosen
    tuning.TABLES.write_text(json.dumps(tables, indent=1) + "\n")
    tuning.tables.cache_clear()
