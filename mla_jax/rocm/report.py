"""One compiled case as a row: what was found in its code, what it falls short of, and an estimate of its time."""

import functools
import math
import pathlib
from typing import Any

import jax

from mla_jax.kernels import tuning
from mla_jax.kernels.tuning import AttendTuning
from mla_jax.rocm import pool, requirements, roofline
from mla_jax.rocm.cases import PAGE, RocmCase
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.compiler import compile_for
from mla_jax.rocm.program import Launch, Program
from mla_jax.rocm.save import save


def compile_case(case: RocmCase) -> Program:
    """The case compiled for its chip."""
    fn, arguments, donated = case.program()

    # A fresh function each time: what tuning is in force must not come from an earlier trace.
    @functools.wraps(fn.func if isinstance(fn, functools.partial) else fn)
    def program(*args: Any) -> Any:
        return fn(*args)

    return compile_for(case.arch, program, *arguments.values(), donate_argnums=donated)


def moved_bytes(case: RocmCase) -> int:
    """Device memory that the case's kernel has to move at least: stored rows once, inputs, results."""
    g, config, sizes = case.config.geometry, case.config, case.sizes
    if case.op == "write":
        return sizes.rows * (2 * (g.kv_lora_rank + g.qk_rope_head_dim) + config.layout.row_bytes)
    stored = sizes.sequences * sizes.columns * PAGE
    if case.op in ("write_index", "indexer"):
        assert g.indexer is not None and config.index_layout is not None
        key = config.index_layout.token_bytes
        return sizes.rows * (2 * g.indexer.head_dim + key) if case.op == "write_index" else stored * (key + 4)
    tokens = {"decode": sizes.sequences * case.new, "prefill": sizes.tokens, "sparse": sizes.sequences}[case.op]
    queries = tokens * g.num_heads * (2 * g.kv_lora_rank + g.qk_rope_head_dim) * 2
    return queries + (sizes.sequences * case.topk if case.op == "sparse" else stored) * config.layout.row_bytes


def loop(case: RocmCase, launch: Launch) -> tuple[float, int]:
    """(tiles of keys that a work group walks over, tiles in flight)."""
    if case.writes or case.op == "indexer":
        return 0, 1
    chosen = case.tuning()
    assert isinstance(chosen, AttendTuning)
    rows = case.config.geometry.num_heads * case.block_tokens
    blocks = -(-case.sizes.tokens // case.block_tokens) if case.op == "prefill" else case.sizes.sequences
    splits = math.prod(launch.grid) / (blocks * -(-rows // chosen.rows))
    keys = case.topk if case.op == "sparse" else case.sizes.columns * PAGE
    return keys / chosen.keys / splits, chosen.num_stages


def row(case: RocmCase, program: Program) -> dict[str, Any]:
    """The facts of a compiled case, for a table and for JSON."""
    chip = CHIPS[case.arch]
    launch = program.kernels[0]
    code = launch.code
    assert code is not None
    waves = chip.waves(code.registers, launch.total_lds_bytes, launch.waves_per_group())
    time = roofline.estimate(chip, launch, moved_bytes(case), *loop(case, launch))
    return {
        "case": case.name,
        "chip": case.arch,
        "kernel": launch.kernel,
        "compiled": True,
        "launches": len(program.launches) + len(program.others),
        "pool_bytes": case.config.capacity * case.config.bytes_per_token,
        "aliased_bytes": program.aliased_bytes,
        "temporary_bytes": program.temporary_bytes,
        "registers": code.registers,
        "accumulators": code.accumulators,
        "scalars": code.scalars,
        "lds_bytes": launch.total_lds_bytes,
        "spills": code.spills,
        "scratch_bytes": code.scratch_bytes,
        "instructions": len(code.code),
        "matrix": requirements.matrix_instructions(code),
        "conversions": requirements.conversions(code),
        "loads": {str(k): n for k, n in requirements.accesses(code, "load").items()},
        "stores": {str(k): n for k, n in requirements.accesses(code, "store").items()},
        "waves": waves,
        "occupancy": round(waves / (chip.simds * chip.waves_per_simd), 3),
        "estimate": {
            "microseconds": round(time.microseconds, 1),
            "memory_microseconds": round(time.memory_microseconds, 1),
            "binds": time.binds,
            "matrix_share": round(time.matrix_share, 3),
        },
        "shortfalls": requirements.shortfalls(case, program),
    }


def measure(case: RocmCase, folder: pathlib.Path | None = None) -> dict[str, Any]:
    """Compiles a case and returns its row; where compiling fails, a row that says so. With a folder the code is saved there.

    The compiler hands out code once a process: where another case was compiled to the same code before, a fresh process is asked.
    """
    try:
        program = compile_case(case)
        if not program.kernels:
            raise ValueError("no kernel of the library in the compiled program")
        missing = [launch for launch in (program.launches if folder else program.kernels) if launch.code is None]
        if missing and tuning.is_forced():
            raise ValueError(f"the compiler did not hand out the code of {missing[0].kernel}")
        if missing:
            return pool.fresh(_measure_once, case, folder)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return _failed(case, error)
    return _finish(case, program, folder)


def _measure_once(case: RocmCase, folder: pathlib.Path | None) -> dict[str, Any]:
    return _finish(case, compile_case(case), folder)


def _finish(case: RocmCase, program: Program, folder: pathlib.Path | None) -> dict[str, Any]:
    try:
        if folder is not None:
            save(case, program, folder)
        return row(case, program)
    except ValueError as error:
        return _failed(case, error)


def _failed(case: RocmCase, error: Exception) -> dict[str, Any]:
    reason = str(error).strip().splitlines()[0][:300]
    return {"case": case.name, "chip": case.arch, "compiled": False, "shortfalls": {"compiles": reason}}
