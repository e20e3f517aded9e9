"""Device time of jitted functions, from the profiler's record of what ran on the GPU.

Host clocks measure launches: a jit call costs tens of microseconds whatever it does. The profiler's kernel durations do not.
"""

import collections
import dataclasses
import datetime
import pathlib
import platform
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def kernel_durations(step: Callable[[], Any], reps: int) -> dict[str, list[float]]:
    """Microseconds of every kernel that ``reps`` calls of ``step`` ran on the GPU's streams, by kernel name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = None
            for _ in range(reps):
                result = step()
            jax.block_until_ready(result)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    durations: dict[str, list[float]] = collections.defaultdict(list)
    for plane in profile.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if line.name.lower().startswith("stream"):
                for event in line.events:
                    durations[event.name].append(event.duration_ns / 1e3)
    if not durations:
        raise RuntimeError("the profiler recorded no kernel; device times need a GPU")
    return dict(durations)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Device microseconds of one call: the sum over its kernels of their median durations, and the kernels' share of launches."""

    microseconds: float
    spread: float
    launches: float


def device_time(step: Callable[[], Any], *, calls: int, reps: int = 10, ignore: frozenset[str] = frozenset()) -> Timing:
    """Device time of one of the ``calls`` calls that each ``step`` makes.

    Args:
        step: runs the calls, already compiled; returns arrays to wait for.
        calls: calls a step.
        reps: steps recorded.
        ignore: names of kernels that are not part of the call (the cache flush).

    Returns:
        Timing; ``spread`` is the same sum at the 10th to the 90th percentile, as a share of the median.
    """
    jax.block_until_ready(step())
    total = low = high = launches = 0.0
    for name, values in kernel_durations(step, reps).items():
        if name in ignore:
            continue
        share = len(values) / (reps * calls)
        deciles = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
        total += statistics.median(values) * share
        low, high = low + deciles[0] * share, high + deciles[8] * share
        launches += share
    return Timing(total, (high - low) / total, launches)


_FLUSH_BYTES = 2**28


def make_flush() -> tuple[Callable[[], Any], frozenset[str]]:
    """A function that sweeps several times the GPU's L2, and the names of its kernels, to leave out of a timing."""
    data = jnp.ones(_FLUSH_BYTES // 4, jnp.float32)
    sweep = jax.jit(lambda x: x * jnp.float32(1.0001))
    jax.block_until_ready(sweep(data))
    return lambda: sweep(data), frozenset(kernel_durations(lambda: sweep(data), 2))


def copy_time(nbytes: int) -> float:
    """Device microseconds of an elementwise XLA pass that reads and writes ``nbytes`` in all: the ceiling to compare with."""
    n = nbytes // 4
    arrays = [jax.random.normal(jax.random.key(i), (n,), jnp.bfloat16) for i in range(3)]
    add = jax.jit(lambda xs: [x + jnp.bfloat16(1) for x in xs])
    return device_time(lambda: add(arrays), calls=len(arrays)).microseconds


def environment() -> dict[str, Any]:
    """Where and with what a measurement was made."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "driver": getattr(device.client, "platform_version", "").replace("\n", " "),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
