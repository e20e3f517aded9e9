"""What the compiled code of a kernel has to keep, each a check of its own with a name.

Byte counts are of one lane: a wave's access is 64 of them. Limits follow from the chip and from what the kernel is for; none is
fitted to what the compiler happens to give.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from mla_jax.kernels.tuning import IndexTuning, WriteTuning
from mla_jax.rocm.cases import RocmCase
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.code_object import CodeObject
from mla_jax.rocm.program import Launch, Program

_WIDTHS = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}

MAX_TEMPORARY = 2**20
"""Bytes of temporaries that a writer may have: none of them may be of a pool's size."""


def accesses(code: CodeObject, kind: str) -> dict[int, int]:
    """How many instructions of a kind ("load" or "store") on device memory there are, by bytes a lane."""
    found: dict[int, int] = {}
    for name, count in code.instructions.items():
        match = re.fullmatch(rf"(?:global|flat|buffer)_{kind}_(?:(\w+?)(?:_d16\w*)?|(?:short|sbyte|ubyte)_d16\w*)", name)
        if match:
            width = _WIDTHS.get(match[1] or name.split("_")[2], 0)
            found[width] = found.get(width, 0) + count
    return dict(sorted(found.items()))


def matrix_instructions(code: CodeObject) -> dict[str, int]:
    """Matrix instructions by mnemonic."""
    return {name: n for name, n in sorted(code.instructions.items()) if name.startswith(("v_mfma", "v_smfmac"))}


def conversions(code: CodeObject) -> dict[str, int]:
    """Conversions from and to FP8 by mnemonic."""
    return {name: n for name, n in sorted(code.instructions.items()) if re.search(r"cvt.*(fp8|bf8)", name)}


def _pool_bytes(case: RocmCase) -> int:
    return case.config.capacity * case.config.bytes_per_token


def one_kernel(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """The library's work is one launch."""
    return None if len(program.kernels) == 1 else f"{len(program.kernels)} launches of the library's kernels, expected 1"


def in_place(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """Writers alias every pool and allocate nothing of its size; readers allocate nothing of a pool's size."""
    pools = _pool_bytes(case)
    if not case.writes:
        # Queries arranged for the tiles, and the parts of split keys, are temporaries; a copy of a pool or of a sequence is not.
        if case.size == "preset" and program.temporary_bytes >= pools // 8:
            return f"{program.temporary_bytes} bytes of temporaries for {pools} of pools"
        return None
    if program.aliased_bytes < pools:
        return f"{program.aliased_bytes} bytes are aliased, the pools have {pools}"
    if program.temporary_bytes >= MAX_TEMPORARY:
        return f"{program.temporary_bytes} bytes of temporaries, allowed are less than {MAX_TEMPORARY}"
    return None


def no_spills(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """Every number stays in registers."""
    assert launch.code is not None
    if launch.code.spills or launch.code.scratch_bytes:
        return f"{launch.code.spills} registers spilled, {launch.code.scratch_bytes} bytes of scratch a lane"
    return None


def fits(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """A compute unit holds at least one work group."""
    chip = CHIPS[case.arch]
    assert launch.code is not None
    waves = chip.waves(launch.code.registers, launch.total_lds_bytes, launch.waves_per_group())
    if waves:
        return None
    return f"no work group fits: {launch.code.registers} registers, {launch.total_lds_bytes} of {chip.lds_bytes} bytes of LDS"


def wide_stores(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """Writers store at least 4 bytes a lane: no scatter of bytes."""
    assert launch.code is not None
    stores = accesses(launch.code, "store")
    if case.writes and (not stores or min(stores) < 4):
        return f"stores by bytes a lane: {stores}, the least allowed is 4"
    return None


def wide_loads(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """What is read in bulk comes 8 or 16 bytes a lane: all of a tile of stored rows or keys, or of a writer's inputs.

    Slots, lengths, page ids, scales and queries are read besides; they are few.
    """
    assert launch.code is not None
    loads = accesses(launch.code, "load")
    wide = sum(width * n for width, n in loads.items() if width >= 8)
    tuning, config = case.tuning(), case.config
    if isinstance(tuning, WriteTuning):
        g = config.geometry
        numbers = g.kv_lora_rank + g.qk_rope_head_dim if case.op == "write" else g.indexer.head_dim if g.indexer else 0
        bulk = tuning.rows * 2 * numbers
    elif isinstance(tuning, IndexTuning):
        assert config.index_layout is not None
        layout = config.index_layout
        bulk = tuning.keys * layout.head_dim * (4 if layout.dialect is None else 1)
    else:
        # The latent; the rope of a row is a ninth of it and narrower than a lane's width for some presets.
        layout = config.layout
        bulk = tuning.keys * layout.byte_map[0].stop
    lanes = math.prod(launch.block)
    if wide * lanes < bulk:
        return f"loads by bytes a lane: {loads}; {bulk} bytes of a tile over {lanes} lanes have to come in 8 or 16"
    return None


def matrix_units(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """Products run on the matrix units, in the type that the stored rows and the query make."""
    assert launch.code is not None
    if case.writes:
        return None
    used = matrix_instructions(launch.code)
    wanted = matrix_types(case)
    kinds = {name.rsplit("x", 1)[1].split("_", 1)[-1] for name in used}
    missing = [kind for kind in wanted if not any(_is_kind(name, kind) for name in used)]
    if missing or not used:
        return f"no matrix instruction of {', '.join(missing) or 'any kind'}; there are {sorted(kinds) or 'none'}"
    return None


def _is_kind(name: str, kind: str) -> bool:
    suffix = {"float16": r"_f16", "bfloat16": r"_bf16(_1k)?", "float32": r"_f32", "float8": r"(_fp8_fp8|_f8f6f4)"}[kind]
    return re.fullmatch(rf"v_mfma_\w*?\d+x\d+x\d+{suffix}", name) is not None


def matrix_types(case: RocmCase) -> tuple[str, ...]:
    """Operand types of the products of a case."""
    layout = case.config.layout
    if case.op == "indexer":
        index = case.config.index_layout
        assert index is not None
        return ("float32",) if index.dialect is None else ("float16",)
    if case.compute == "fp8":
        return ("float8",)
    if layout.is_plain:
        return (str(layout.number_dtype),)
    return ("float16", "bfloat16") if layout.is_packed else ("float16",)


ENCODER_OPERATIONS = 16
"""Vector instructions a code, at least: for NaN 2, the clamp 2, rounding 4, subnormals 4, the sign 2, and to choose 2."""


def encodes(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """A writer of FP8 holds the arithmetic of its encoder: a conversion for two codes, or the integer form's instructions."""
    assert launch.code is not None
    tuning, layout = case.tuning(), case.config.layout if case.op == "write" else case.config.index_layout
    if not isinstance(tuning, WriteTuning) or layout is None or layout.dialect is None:
        return None
    g = case.config.geometry
    numbers = g.indexer.head_dim if case.op == "write_index" and g.indexer else g.kv_lora_rank
    if case.op == "write" and case.config.layout.is_raw:
        numbers += g.qk_rope_head_dim
    codes = tuning.rows * numbers / math.prod(launch.block)
    if conversions(launch.code):
        found, wanted = sum(conversions(launch.code).values()), codes / 2
    else:
        found, wanted = launch.code.count(r"v_.*"), ENCODER_OPERATIONS * codes
    if found < wanted:
        return f"the encoder is missing: {found} instructions for {codes:g} codes a lane, expected {wanted:g}"
    return None


def wide_addresses(case: RocmCase, program: Program, launch: Launch) -> str | None:
    """Pools beyond 4 GiB are addressed with 64-bit products of page and row."""
    assert launch.code is not None
    if case.sizes.pool_bytes <= 2**32:
        return None
    if launch.code.count(r"(v|s)_(mad_[ui]64_[ui]32|mul_hi_[ui]32|lshl(rev)?_b64|lshl_add_u64)\w*"):
        return None
    return "no 64-bit arithmetic for addresses in a pool beyond 4 GiB"


CHECKS: tuple[Callable[[RocmCase, Program, Launch], str | None], ...] = (
    one_kernel,
    in_place,
    no_spills,
    fits,
    wide_stores,
    wide_loads,
    matrix_units,
    encodes,
    wide_addresses,
)


def shortfalls(case: RocmCase, program: Program) -> dict[str, str]:
    """Requirements that a compiled case falls short of: name and what was found."""
    if not program.kernels or program.kernels[0].code is None:
        return {"one_kernel": "no kernel of the library was compiled"}
    found: dict[str, Any] = {}
    for check in CHECKS:
        message = check(case, program, program.kernels[0])
        if message is not None:
            found[check.__name__] = message
    return found
