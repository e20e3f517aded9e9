"""An estimate of a kernel's time from its instructions and the chip's published rates. Never a measurement.

What counts: bytes of the operands once at peak bandwidth; in the loop over keys, vector instructions at one wave in four cycles,
matrix instructions at the published rate of their type, LDS traffic at 128 bytes a cycle and compute unit, and one trip to memory
an iteration, hidden by other waves and by loading a tile ahead. Barriers, caches, bank conflicts and clocks below the peak are left
out, so that a card will be slower; the ranking of launch parameters is what the estimate is for.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from mla_jax.rocm.chips import Chip
from mla_jax.rocm.code_object import Instruction
from mla_jax.rocm.program import Launch

MEMORY_LATENCY = 2000
"""Cycles of a load that misses every cache: assumed, about a microsecond at 2.1 GHz."""

_LDS_BYTES_A_CYCLE = 128
_CYCLES_A_VECTOR_INSTRUCTION = 4
_LDS_WIDTHS = {"u8": 1, "u16": 2, "b8": 1, "b16": 2, "i8": 1, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "fp8_fp8": "float8", "bf8_bf8": "float8", "f8f6f4": "float8"}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one wave issues, in cycles of its unit.

    Attributes:
        vector: of the vector unit.
        matrix: of the matrix unit.
        lds: of the compute unit's LDS.
    """

    vector: float
    matrix: float
    lds: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds, and what binds: "memory", "vector", "matrix", "lds" or "latency"."""

    microseconds: float
    memory_microseconds: float
    binds: str
    matrix_share: float


def work(code: Sequence[Instruction], chip: Chip) -> Work:
    """Cycles of ``code``, each instruction once."""
    vector = matrix = lds = 0.0
    for instruction in code:
        name = instruction.name
        if product := re.match(r"v_mfma\w*?_(\d+)x(\d+)x(\d+)_?(\w+)", name):
            m, n, k = (int(product[i]) for i in (1, 2, 3))
            kind = next((v for suffix, v in _TYPES.items() if product[4].startswith(suffix)), "float16")
            rate = chip.matrix_rates[kind] / (chip.compute_units * chip.simds * chip.clock_ghz * 1e9)
            matrix += 2 * m * n * k / rate
        elif name.startswith("v_"):
            vector += _CYCLES_A_VECTOR_INSTRUCTION
        elif access := re.match(r"ds_(?:read|write)(2?)(?:st64)?_(?:tr_)?([a-z]+\d+)|ds_read_(b64)_tr", name):
            width = _LDS_WIDTHS.get(access[2] or access[3] or "b32", 4) * (2 if access[1] else 1)
            lds += width * chip.wave_lanes / _LDS_BYTES_A_CYCLE
    return Work(vector, matrix, lds)


def estimate(chip: Chip, launch: Launch, nbytes: int, iterations: float, stages: int = 1) -> Estimate:
    """The time of a launch.

    Args:
        chip: the chip.
        launch: with its code.
        nbytes: of device memory that have to move, at least.
        iterations: of the innermost loop with the most matrix instructions, in each work group; 0 where there is no such loop.
        stages: tiles in flight: with two or more a tile's loads are issued an iteration ahead.
    """
    assert launch.code is not None
    per_group = launch.waves_per_group()
    waves = max(chip.waves(launch.code.registers, launch.total_lds_bytes, per_group), per_group) / chip.simds
    total = work(launch.code.code, chip)
    body = work(main_loop(launch), chip) if iterations else Work(0, 0, 0)
    once = Work(total.vector - body.vector, total.matrix - body.matrix, total.lds - body.lds)

    def cycles(w: Work, ahead: bool) -> tuple[float, str]:
        """Cycles of a SIMD for one wave's share of an iteration, and what binds it."""
        own = w.vector + w.matrix + w.lds
        options = {
            "vector": w.vector,
            "matrix": w.matrix,
            # The LDS serves the waves of all SIMDs.
            "lds": w.lds * chip.simds,
            "latency": (max(own, MEMORY_LATENCY) if ahead else own + MEMORY_LATENCY) / waves,
        }
        name = max(options, key=lambda key: options[key])
        return options[name], name

    in_loop, binds = cycles(body if iterations else once, stages > 1)
    straight, _ = cycles(once, False)
    of_group = (iterations * in_loop + straight) * waves
    groups_at_once = chip.compute_units * waves * chip.simds / per_group
    rounds = math.ceil(math.prod(launch.grid) / groups_at_once)
    # A last round that is not full still takes its time; less than one round leaves units idle.
    compute = rounds * of_group / (chip.clock_ghz * 1e3)
    memory = nbytes / chip.bandwidth * 1e6
    whole = body if iterations else once
    busy = whole.vector + whole.matrix + whole.lds
    return Estimate(max(compute, memory), memory, binds if compute > memory else "memory", whole.matrix / busy if busy else 0.0)


def main_loop(launch: Launch) -> list[Instruction]:
    """The innermost loop with the most matrix instructions, or the longest if none has any; [] without a loop."""
    assert launch.code is not None
    loops = launch.code.loops()
    return max(loops, key=lambda body: (sum(i.name.startswith("v_mfma") for i in body), len(body)), default=[])
