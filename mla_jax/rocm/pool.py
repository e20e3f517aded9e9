"""Compiling many cases at once: one process a core, as a process compiles one program at a time."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import jax

Job = TypeVar("Job")


def quiet_worker() -> None:
    """A process that compiles for AMD chips and runs nothing: on the CPU, without the plugin's word that there is no card."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    jax.config.update("jax_platforms", "cpu")


def _executor(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=quiet_worker)


def run(work: Callable[[Job], Any], jobs: Iterable[Job], processes: int | None = None) -> Iterator[Any]:
    """``work`` of every job, in their order, by fresh processes (default: one a core)."""
    with _executor(processes or os.cpu_count() or 1) as executor:
        yield from executor.map(work, jobs)


def fresh(work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` in a process of its own."""
    with _executor(1) as executor:
        return executor.submit(work, *args).result()
