"""Code of AMD chips made by the ROCm compiler, read back and judged; and controls that have to be found wanting.

What compiles needs the rocm extra. Without it those tests are skipped, unless `-m amd` asks for them by name.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from mla_jax import pallas_attention
from mla_jax.cli import main
from mla_jax.kernels import tuning, write_rows
from mla_jax.kernels.tuning import AttendTuning, WriteTuning
from mla_jax.rocm import CHIPS, RocmUnavailableError, compile_for, report, requirements, roofline, save, sweep
from mla_jax.rocm import program as programs
from mla_jax.rocm.cases import SIZES, RocmCase, cases, own_raw
from mla_jax.rocm.chips import Chip
from mla_jax.rocm.code_object import Instruction
from mla_jax.rocm.compiler import check_available

ARCHS = ("gfx942", "gfx950")
compiles = pytest.mark.usefixtures("rocm_compiler")


@pytest.fixture
def rocm_compiler(request: pytest.FixtureRequest) -> None:
    try:
        check_available()
    except RocmUnavailableError as error:
        asked = re.search(r"(?<!\bnot )\bamd\b", request.config.getoption("markexpr") or "")
        (pytest.fail if asked else pytest.skip)(str(error))


@functools.cache
def compiled(case: RocmCase) -> programs.Program:
    return report.compile_case(case)


def tiny(op, layout, preset="glm-5", arch="gfx942", **fields) -> RocmCase:
    return RocmCase(op=op, arch=arch, layout=layout, preset=preset, size="tiny", **fields)


# ---- chips -------------------------------------------------------------------------------------------------------------


def test_waves_of_a_compute_unit():
    chip = CHIPS["gfx942"]
    # 512 registers a lane and SIMD, in granules of 8; 8 waves a SIMD at most, 4 SIMDs.
    assert [chip.waves(r, 0, 1) for r in (1, 64, 65, 128, 129, 256, 257, 512)] == [32, 32, 28, 16, 12, 8, 4, 4]
    # Work groups of 4 waves, and their LDS: three groups of 16 KiB and a little do not fit 64 KiB a fourth time.
    assert chip.waves(64, 16 * 1024, 4) == 16 and chip.waves(64, 16 * 1024 + 1, 4) == 12
    assert CHIPS["gfx950"].waves(64, 16 * 1024 + 1, 4) == 32
    # Too much of either: nothing fits.
    assert chip.waves(64, chip.lds_bytes + 1, 4) == 0 and chip.waves(257, 0, 8) == 0


def test_a_chip_is_described_to_the_compiler():
    for arch, lds in (("gfx942", 65536), ("gfx950", 163840)):
        text = CHIPS[arch].target_config()
        fields = dict(re.findall(r"(\w+): (\S+)", text))
        assert fields["gcn_arch_name"].strip('"').startswith(arch + ":")
        assert {int(v) for k, v in fields.items() if k.startswith("shared_memory")} == {lds}
        assert int(fields["core_count"]) == CHIPS[arch].compute_units
    assert (CHIPS["gfx942"].dialect, CHIPS["gfx950"].dialect) == ("e4m3fnuz", "e4m3fn")


# ---- the estimate ------------------------------------------------------------------------------------------------------


def test_work_counts_cycles_of_each_unit():
    chip = CHIPS["gfx942"]
    names = ["v_add_f32_e32", "v_mfma_f32_32x32x8_f16", "ds_read_b128", "ds_write2_b64", "s_nop", "global_load_dwordx4"]
    counted = roofline.work([Instruction(4 * i, name, None) for i, name in enumerate(names)], chip)
    assert counted.vector == 4
    # 2 * 32 * 32 * 8 operations at the published rate of float16, which is 512 a cycle and SIMD: 32 cycles.
    assert counted.matrix == pytest.approx(32, rel=1e-3)
    # 16 bytes of 64 lanes at 128 a cycle, twice.
    assert counted.lds == 16


# ---- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", ["preset", "tiny"])
def test_cases_cover_every_layout_and_every_preset(arch, size):
    found = list(cases(arch, size))
    assert len({case.name for case in found}) == len(found)
    written = {case.layout for case in found if case.op == "write"}
    from mla_jax.bench.cases import LAYOUTS

    assert written == {case.id for case in LAYOUTS}
    # Every count of heads and every width of the presets is decoded, in every kind of layout.
    shapes = {(g.num_heads, g.kv_lora_rank, g.qk_rope_head_dim) for g in mla.GEOMETRIES.values()}
    for kind in ("plain_bfloat16", own_raw(arch), "raw_e5m2", "packed_pow2"):
        decoded = [mla.GEOMETRIES[case.preset] for case in found if case.op == "decode" and case.layout == kind]
        assert {(g.num_heads, g.kv_lora_rank, g.qk_rope_head_dim) for g in decoded} == shapes
    indexed = {mla.GEOMETRIES[case.preset].indexer for case in found if case.op == "indexer"}
    assert indexed == {g.indexer for g in mla.GEOMETRIES.values() if g.indexer}
    assert {case.op for case in found if case.compute == "fp8"} == {"decode", "prefill", "sparse"}
    for case in found:
        fn, arguments, _ = case.program()
        assert jax.eval_shape(fn, *arguments.values()) is not None


def test_preset_pools_need_64_bit_addresses():
    for case in cases("gfx942"):
        nbytes = case.config.capacity * case.config.bytes_per_token
        assert (nbytes > 2**33) == (case.size == "preset")
        assert nbytes <= SIZES[case.size].pool_bytes


# ---- what the compiler made -------------------------------------------------------------------------------------------

# One case of each kernel; the whole list is what `mla-jax verify-rocm` compiles.
SAMPLE = [
    *(RocmCase(op="write", arch=arch, layout=own_raw(arch), preset="glm-5") for arch in ARCHS),
    RocmCase(op="write", arch="gfx942", layout="plain_bfloat16", preset="glm-5"),
    RocmCase(op="write", arch="gfx950", layout="packed_pow2", preset="glm-5"),
    RocmCase(op="write_index", arch="gfx942", layout="raw_e4m3fnuz", preset="glm-5"),
    RocmCase(op="decode", arch="gfx942", layout="raw_e4m3fnuz", preset="kimi-k2.5"),
    RocmCase(op="sparse", arch="gfx942", layout="packed_pow2", preset="glm-5"),
    *(RocmCase(op="decode", arch=arch, layout=own_raw(arch), preset="kimi-k2.5", compute="fp8") for arch in ARCHS),
    RocmCase(op="indexer", arch="gfx950", layout="raw_e4m3fn", preset="glm-5"),
]


@pytest.mark.amd
@compiles
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.arch} {case.name}")
def test_the_code_keeps_every_requirement(case):
    row = report.row(case, compiled(case))
    assert row["shortfalls"] == {}
    assert row["spills"] == row["scratch_bytes"] == 0 and row["waves"] >= 4
    if case.writes:
        assert row["aliased_bytes"] == row["pool_bytes"] and row["temporary_bytes"] == 0
        assert min(map(int, row["stores"])) >= 4
    if case.compute == "fp8":
        # The dialect's own instruction, and on gfx950 the wide one too.
        assert any("fp8_fp8" in name or "f8f6f4" in name for name in row["matrix"])
        assert not any(name.endswith("_f16") for name in row["matrix"])


@pytest.mark.amd
@compiles
def test_a_kernels_arguments_are_the_calls_operands_and_results():
    case = tiny("write", "raw_e4m3fnuz")
    (launch,) = compiled(case).launches
    assert launch.is_pallas and launch.kernel == "write_kv_raw_fused" and not compiled(case).others
    assert [(b.dtype, b.shape) for b in launch.arguments[:4]] == [
        ("int32", (1,)),
        ("int32", (21,)),
        ("bfloat16", (21, 512)),
        ("bfloat16", (21, 64)),
    ]
    assert launch.roles() == ["in"] * 4 + ["inout"] * 2
    assert launch.arguments[4].shape == launch.arguments[5].shape == case.config.kv_shape
    assert launch.code is not None and launch.code.access == ["read_only"] * 5 + ["write_only"]


@pytest.mark.amd
@compiles
def test_a_program_is_saved_with_all_that_a_launch_needs(tmp_path):
    case = tiny("decode", "raw_e4m3fnuz", "deepseek-v2-lite")
    folder = save.save(case, compiled(case), tmp_path)
    described = json.loads((folder / "program.json").read_text())
    assert described["parameters"] == ["q_latent", "q_rope", "cache.kv", "layer", "block_tables", "lengths"]
    held = {a["name"] for a in described["allocations"].values() if a["name"]}
    assert held == set(described["parameters"])
    written: set[tuple[int, int]] = set()
    parameters = {int(n) for n, a in described["allocations"].items() if a["parameter"] is not None or a["constant"]}
    for step in described["steps"]:
        binary = (folder / step["file"]).read_bytes()
        assert binary.startswith(b"\x7fELF") and step["kernel"].encode() in binary
        assert len(step["grid"]) == len(step["block"]) == 3
        assert len(step["arguments"]) * 8 == step["kernarg_bytes"]
        for argument in step["arguments"]:
            allocation = described["allocations"][str(argument["allocation"])]
            assert argument["offset"] + argument["bytes"] <= allocation["bytes"]
            place = argument["allocation"], argument["offset"]
            # Nothing is read that no argument, constant or earlier step has put there.
            assert argument["role"] != "in" or place in written or argument["allocation"] in parameters
            if argument["role"] != "in":
                written.add(place)
    (own,) = (step for step in described["steps"] if step["library"])
    assert own["kernel"] == "mla_paged" and own["lds_bytes"] > 0 and own["arguments"][-1]["role"] == "out"
    assert [tuple(result["shape"]) for result in described["results"]] == [(3, 1, 16, 512), (3, 1, 16)]


@pytest.mark.amd
@compiles
def test_compiling_leaves_this_process_its_devices():
    before = jax.devices()
    compiled(tiny("write", "raw_e4m3fnuz"))
    assert jax.devices() == before and jax.default_backend() == "cpu"
    assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2


@pytest.mark.amd
@compiles
def test_any_function_compiles():
    program = compile_for("gfx950", lambda x, y: jnp.tanh(x) @ y, *(jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2)
    assert program.launches and not program.kernels
    with pytest.raises(ValueError, match="unknown chip 'gfx90a', known are gfx942, gfx950"):
        compile_for("gfx90a", lambda x: x, jax.ShapeDtypeStruct((1,), jnp.float32))


# ---- controls: each of these has to be found --------------------------------------------------------------------------


def shortfalls(case: RocmCase) -> dict[str, str]:
    return report.measure(case)["shortfalls"]


@pytest.mark.amd
@compiles
def test_a_pool_that_is_not_donated_is_found(monkeypatch):
    case = RocmCase(op="write", arch="gfx942", layout="raw_e4m3fnuz", preset="glm-5")
    fn, arguments, _ = case.program()
    monkeypatch.setattr(RocmCase, "program", lambda self: (fn, arguments, ()))
    assert "bytes are aliased" in shortfalls(case)["in_place"]


@pytest.mark.amd
@compiles
def test_a_tile_beyond_the_lds_is_found():
    case = RocmCase(op="decode", arch="gfx942", layout="plain_float32", preset="deepseek-v3")
    with tuning.forced(AttendTuning(rows=32, keys=32, num_warps=4, num_stages=2)):
        assert re.search(r"requested \d+, available: 65536", shortfalls(case)["compiles"])
        # gfx950 has two and a half times as much.
        assert "compiles" not in shortfalls(dataclasses.replace(case, arch="gfx950"))


@pytest.mark.amd
@compiles
def test_a_tile_that_spills_is_found():
    case = RocmCase(op="decode", arch="gfx942", layout="raw_e4m3fnuz", preset="deepseek-v3")
    with tuning.forced(AttendTuning(rows=64, keys=64, num_warps=4)):
        assert "registers spilled" in shortfalls(case)["no_spills"]


@pytest.mark.amd
@compiles
def test_a_tuned_tile_taken_from_the_table_is_found(monkeypatch):
    case = RocmCase(op="decode", arch="gfx942", layout="raw_e4m3fnuz", preset="deepseek-v3")
    tables = json.loads(tuning.TABLES.read_text())
    tables["gfx942"]["dense"]["raw_fnuz"]["any"] = tables["sm_90"]["dense"]["raw"]["any"]
    monkeypatch.setattr(tuning, "tables", lambda: tables)
    assert shortfalls(case)


@pytest.mark.amd
@compiles
def test_narrow_stores_are_found():
    # One row a tile leaves 64 numbers of two bytes to 64 lanes.
    case = RocmCase(op="write", arch="gfx942", layout="plain_bfloat16", preset="glm-5")
    with tuning.forced(WriteTuning(rows=2, num_warps=1)):
        assert "the least allowed is 4" in shortfalls(case)["wide_stores"]


@pytest.mark.amd
@compiles
def test_a_kernel_without_its_encoder_is_found(monkeypatch):
    def truncate(x, dialect, *, source=None, native=False):
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) >> np.uint32(24)

    monkeypatch.setattr(write_rows, "encode_bits", truncate)
    # Of a width of its own, as kernels are traced once.
    case = RocmCase(op="write", arch="gfx942", layout="raw_e4m3fnuz", preset="minicpm3-4b", size="small pool")
    assert "the encoder is missing" in shortfalls(case)["encodes"]


@pytest.mark.amd
@compiles
@pytest.mark.parametrize(("arch", "layout"), [("gfx942", "raw_e4m3fn"), ("gfx950", "raw_e4m3fnuz")])
def test_products_in_the_wrong_dialect_are_refused_and_would_be_found(arch, layout, monkeypatch):
    case = RocmCase(op="decode", arch=arch, layout=layout, preset="deepseek-v2-lite", compute="fp8")
    assert "needs matrix units that read" in shortfalls(case)["compiles"]
    monkeypatch.setattr(pallas_attention, "_CODED", {arch: ("e4m3fn", "e4m3fnuz")})
    assert "no matrix instruction of float8" in shortfalls(case)["matrix_units"]


def test_choosing_wants_every_requirement_kept():
    def made(us, code, **short):
        return {"estimate": {"microseconds": us}, "instructions": code, "shortfalls": short}

    rows = [made(1.0, 10, no_spills="3 registers spilled"), made(2.0, 500), made(2.05, 400), made(3.0, 1)]
    assert sweep.choose(rows) is rows[2]  # near the shortest, and less code
    with pytest.raises(ValueError, match="no candidate keeps every requirement"):
        sweep.choose(rows[:1])


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.amd
@compiles
def test_verify_rocm_reports_and_saves(tmp_path, capsys):
    argv = ["verify-rocm", "--tiny", "--arch", "gfx942", "--only", "write_index", "--jobs", "1"]
    assert main([*argv, "--json", str(tmp_path / "out.json"), "--save", str(tmp_path / "code")]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 cases keep every requirement" in printed and "run on no card" in printed
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["kernel"] for row in result["rows"]] == ["write_index_k"] * 3
    assert result["chips"]["gfx942"]["lds_bytes"] == 65536 and result["versions"]["jax"] == jax.__version__
    assert len(list((tmp_path / "code").glob("*/program.json"))) == 3


def test_verify_rocm_without_the_compiler_exits_with_2(monkeypatch, capsys):
    from mla_jax.rocm import compiler

    none = {"jax": jax.__version__, "jaxlib": "0", "jax-rocm7-plugin": "none", "jax-rocm7-pjrt": "none"}
    monkeypatch.setattr(compiler, "versions", lambda: none)
    assert main(["verify-rocm"]) == 2
    error = capsys.readouterr().err
    line = ".".join(jax.__version__.split(".")[:2])
    pip = f"pip install 'jax=={line}.*' 'jax-rocm7-plugin=={line}.*' 'jax-rocm7-pjrt=={line}.*' msgpack tinygrad"
    assert error == f"mla-jax verify-rocm: the ROCm compiler is not installed: {pip}\n"


def test_a_plugin_of_another_release_is_refused(monkeypatch):
    from mla_jax.rocm import compiler

    other = {"jax": "0.12.0", "jaxlib": "0", "jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}
    monkeypatch.setattr(compiler, "versions", lambda: other)
    with pytest.raises(RocmUnavailableError, match=r"got jax 0.12.0 and plugin 0.10.2: pip install"):
        compiler.check_available()


# ---- the committed results --------------------------------------------------------------------------------------------


def test_the_tables_of_the_chips_are_the_sweeps_choices(request):
    file = request.config.rootpath / "benchmarks" / "rocm_sweep.json"
    if not file.exists():
        pytest.skip("benchmarks/ is not part of the wheel")
    for arch, entries in json.loads(file.read_text()).items():
        chip: Chip = CHIPS[arch]
        assert set(entries) == {"/".join(path) for path, *_ in sweep.buckets(arch)}
        for name, found in entries.items():
            place = tuning.tables()[arch]
            for key in name.split("/"):
                place = place[key]
            assert place == found["chosen"]
            (row,) = (row for row in found["candidates"] if row["tuning"] == found["chosen"])
            assert row["shortfalls"] == {} and row["spills"] == row["scratch_bytes"] == 0
            assert row["lds_bytes"] <= chip.lds_bytes


def test_requirements_have_names_of_their_own():
    assert len({check.__name__ for check in requirements.CHECKS}) == len(requirements.CHECKS)
    assert all(check.__doc__ for check in requirements.CHECKS)
