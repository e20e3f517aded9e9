"""The ``mla-jax`` command line: info, demo, bench, verify-rocm. Bad flags exit with 2 and one line that says what is wrong."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from mla_jax.cli import bench, demo, info, verify_rocm

COMMANDS = (info, demo, bench, verify_rocm)


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before the error; one line is enough, --help has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 when a check falls short, 2 for bad usage."""
    parser = _Parser(prog="mla-jax", description="Paged MLA KV caches for JAX: what a cache holds, what it costs, how fast it is.")
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(c.NAME for c in COMMANDS) + "}", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"mla-jax {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
