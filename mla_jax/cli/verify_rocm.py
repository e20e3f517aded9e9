"""``mla-jax verify-rocm``: every kernel compiled for AMD chips by the ROCm XLA compiler, and its code checked. Needs no card."""

import argparse
import datetime
import functools
import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_jax.rocm import cases, pool
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.compiler import RocmUnavailableError, check_available, versions
from mla_jax.rocm.report import measure

NAME = "verify-rocm"
HELP = "compile every kernel for AMD chips with the ROCm compiler, on any machine, and check the code"

OPERATIONS = ("write", "write_index", "decode", "prefill", "sparse", "indexer")

COLUMNS = ("case", "kernel", "ok", "alias", "temp", "VGPR", "AGPR", "LDS", "spills", "waves", "loads", "stores", "key instructions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", nargs="+", choices=list(CHIPS), default=list(CHIPS), help="chips (default: both)")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="operations (default: all)")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="shapes of a few work groups instead of the presets', for running the saved code elsewhere",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every row here")
    parser.add_argument(
        "--save", type=pathlib.Path, metavar="DIR", help="write each code object here, with what launching it elsewhere takes"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile at a time (default: one a core)")


def run(args: argparse.Namespace) -> int:
    try:
        check_available()
    except RocmUnavailableError as error:
        print(f"mla-jax {NAME}: {error}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width of its own
    todo = [case for arch in args.arch for case in cases.cases(arch, "tiny" if args.tiny else "preset") if case.op in args.only]
    work = functools.partial(measure, folder=args.save)
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(todo))
        for row in pool.run(work, todo, args.jobs):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row['chip']} {row['case']}")
    for arch in args.arch:
        console.print(_table(arch, [row for row in rows if row["chip"] == arch]))
    short = [row for row in rows if row["shortfalls"]]
    for row in short:
        for name, message in row["shortfalls"].items():
            console.print(f"{row['chip']} {row['case']}: {name}: {message}", style="red", markup=False)
    have = versions()
    console.print(
        f"{len(rows) - len(short)} of {len(rows)} cases keep every requirement; compiled by jax {have['jax']} and ROCm plugin "
        f"{have['jax-rocm7-plugin']}, run on no card.",
        highlight=False,
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"versions": have, "date": datetime.date.today().isoformat(), "chips": _chips(args.arch), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(short))


def _chips(archs: list[str]) -> dict[str, Any]:
    """The chips' limits, as the rows were judged by."""
    return {
        arch: {k: v for k, v in vars(CHIPS[arch]).items() if k in ("product", "lds_bytes", "registers_per_lane", "compute_units")}
        for arch in archs
    }


def _table(arch: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, title=f"{arch}, {CHIPS[arch].product}: code of the ROCm compiler; waves are of 32 a compute unit")
    for row in rows:
        if not row["compiled"]:
            table.add_row(row["case"], "", "no")
            continue
        table.add_row(
            row["case"],
            row["kernel"],
            "no" if row["shortfalls"] else "yes",
            _bytes(row["aliased_bytes"]),
            _bytes(row["temporary_bytes"]),
            *(str(row[key]) for key in ("registers", "accumulators", "lds_bytes", "spills", "waves")),
            _widths(row["loads"]),
            _widths(row["stores"]),
            ", ".join(f"{name.removeprefix('v_')} {n}" for name, n in {**row["matrix"], **row["conversions"]}.items()),
        )
    return table


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _widths(counts: dict[str, int]) -> str:
    return " ".join(f"{width}Bx{n}" for width, n in counts.items())
