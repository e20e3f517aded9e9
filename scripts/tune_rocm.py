"""Chooses the launch parameters of gfx942 and gfx950 by compiling every candidate with the ROCm compiler; needs the rocm extra.

    python scripts/tune_rocm.py [gfx942 gfx950]

Rewrites the tables of kernels/tuning.json and benchmarks/rocm_sweep.json, which holds every candidate's row. About half an hour on
two cores.
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


def measure(job: tuple[RocmCase, sweep.Tuning]) -> dict[str, object]:
    return sweep.tuned(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", default=list(CHIPS), help="chips (default: all)")
    archs = parser.parse_args().arch
    check_available()
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    for arch in archs:
        buckets = list(sweep.buckets(arch))
        jobs = [(case, candidate) for _, case, candidates in buckets for candidate in candidates]
        rows = pool.run(measure, jobs)
        choices, table = {}, []
        for path, _, candidates in buckets:
            measured = [next(rows) for _ in candidates]
            chosen = sweep.choose(measured)
            choices[path] = chosen["tuning"]
            table.append(
                {
                    "entry": "/".join(path),
                    "chosen": chosen["tuning"],
                    "candidates": [{k: row[k] for k in KEPT if k in row} for row in measured],
                }
            )
            print(arch, "/".join(path), chosen["tuning"], chosen["estimate"], flush=True)
        sweep.write_table(arch, choices)
        results[arch] = {"versions": versions(), "date": datetime.date.today().isoformat(), "entries": table}
        OUT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
