"""Chooses the launch parameters of gfx942 and gfx950 by compiling every candidate with the ROCm compiler; needs the rocm extra.

    python scripts/tune_rocm.py [--arch gfx942 gfx950] [--entries dense/raw ...]

Rewrites entries of kernels/tuning.json and of benchmarks/rocm_sweep.json, which holds every candidate's row. About half an hour on
two cores for everything.
"""

import argparse
import datetime
import json
import pathlib

from mla_jax.rocm import pool, sweep
from mla_jax.rocm.cases import RocmCase
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.compiler import check_available, versions

OUT = pathlib.Path(__file__).parents[1] / "benchmarks" / "rocm_sweep.json"
KEPT = ("case", "tuning", "registers", "lds_bytes", "spills", "scratch_bytes", "instructions", "waves", "estimate", "shortfalls")


def measure(job: tuple[list[RocmCase], sweep.Tuning]) -> dict[str, object]:
    return sweep.tuned(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=list(CHIPS), default=list(CHIPS), help="chips (default: both)")
    parser.add_argument("--entries", nargs="+", default=[""], metavar="PATH", help="only entries that begin so, e.g. dense/raw")
    args = parser.parse_args()
    check_available()
    buckets = [
        (arch, "/".join(path), path, cases, candidates)
        for arch in args.arch
        for path, cases, candidates in sweep.buckets(arch)
        if "/".join(path).startswith(tuple(args.entries))
    ]
    rows = pool.run(measure, [(cases, candidate) for *_, cases, candidates in buckets for candidate in candidates])
    for arch, name, path, _, candidates in buckets:
        measured = [next(rows) for _ in candidates]
        chosen = sweep.choose(measured)
        print(arch, name, chosen["tuning"], chosen["estimate"], flush=True)
        sweep.write_entries(arch, {path: chosen["tuning"]})
        results = json.loads(OUT.read_text()) if OUT.exists() else {}
        results.setdefault(arch, {})[name] = {
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "chosen": chosen["tuning"],
            "candidates": [{k: row[k] for k in KEPT if k in row} for row in measured],
        }
        OUT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
