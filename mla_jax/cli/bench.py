"""``mla-jax bench``: the kernels on this GPU, checked, timed and tuned, as tables and JSON."""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_jax.bench import reads, tune, verify, writes
from mla_jax.bench.timing import environment

NAME = "bench"
HELP = "check, time and tune the kernels on this machine's GPU (device time, cold L2)"

SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "equality": verify.equality,
    "large_pools": verify.large_pools,
    "speed": writes.speed,
    "pool_sizes": writes.pool_sizes,
    "reads": reads.speed,
    "read_pool_sizes": reads.pool_sizes,
    "topk": reads.topk,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"which parts to run: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--tune", action="store_true", help="time launch parameters and rewrite this chip's table in tuning.json")
    parser.add_argument(
        "--peer", type=pathlib.Path, metavar="FILE", help="JSON of another library's microseconds by case, for the section reads"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write results here; sections not run keep their rows")


def run(args: argparse.Namespace) -> int:
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        raise ValueError(f"unknown section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    if jax.default_backend() != "gpu":
        raise ValueError(f"needs a GPU, jax's default backend here is {jax.default_backend()!r}")
    console = Console()
    results: dict[str, Any] = {}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())
    failed = False
    sections = dict(SECTIONS)
    if args.peer:
        sections["reads"] = functools.partial(reads.speed, json.loads(args.peer.read_text()))
    if args.tune:
        sections["tune"] = tune.tune
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    for name in [*args.sections, *(["tune"] if args.tune else [])] or SECTIONS:
        rows = []
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name)
            for row in sections[name]():
                rows.append(row)
                progress.update(task, description=f"{name}: {row.get('case', row['layout'])}")
        results[name] = {"environment": environment(), "rows": rows}
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*(str(v) for v in row.values()))
        console.print(table)
        failed |= any(not row.get("ok", True) for row in rows)
        failed |= any(row.get("rows_right", 0) != row.get("rows", 0) or row.get("words_changed_elsewhere", 0) for row in rows)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)
