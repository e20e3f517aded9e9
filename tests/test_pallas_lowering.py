"""The reading kernels lower for AMD and NVIDIA chips on a machine that has neither: one kernel, which loads words of the pool."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config, equations
from mla_jax.devices import Target
from mla_jax.kernels import backend, tiles
from mla_jax.kernels.tuning import attend_tuning, index_tuning
from triton_ir import TritonKernel, triton_kernel

AMD = ("gfx942", "gfx950")
WORDS = ["raw_e4m3fn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain_bfloat16", "packed_pow2", "plain_float32"))]
"""Layouts by their words: four codes, and one number of two or of four bytes."""
OPERATIONS = ("mla_decode", "mla_prefill", "sparse_mla")


def target(arch: str) -> Target:
    return Target("rocm" if arch in AMD else "cuda", arch)


def arguments(
    op: str, layout: str, *, new: int = 1, heads: int = 16, S: int = 2, M: int = 40, K: int = 2048, **sizes: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operation as a function of arrays alone, and the shapes of a call of it."""
    sizes = {"num_pages": 64, "page_size": 64, **sizes}
    cache = jax.eval_shape(lambda: mla.init_cache(config(layout, **sizes)))
    R, P = cache.config.layout.kv_lora_rank, cache.config.layout.qk_rope_head_dim
    like = jax.ShapeDtypeStruct
    layer, tables, lengths = like((), np.int32), like((S, M), np.int32), like((S,), np.int32)
    tokens, cu = S * 9, like((S + 1,), np.int32)
    pair = lambda *lead: (like((*lead, R), jnp.bfloat16), like((*lead, P), jnp.bfloat16))  # noqa: E731
    match op:
        case "mla_decode":
            return mla.mla_decode, (*pair(S, new, heads), cache, layer, tables, lengths)
        case "mla_prefill":
            return mla.mla_prefill, (*pair(tokens, heads), cache, layer, tables, lengths, cu)
        case "sparse_mla":
            return mla.sparse_mla, (*pair(tokens, heads), cache, layer, like((tokens, K), np.int32))
    d = sizes["head_dim"]
    q = like((tokens, heads, d), jnp.bfloat16), like((tokens, heads), np.float32)
    return mla.indexer_logits, (*q, cache, layer, tables, lengths, cu)


def pool_of(args: tuple[Any, ...], op: str) -> Any:
    return args[2].index if op == "indexer_logits" else args[2].kv


@functools.cache
def lowered(op: str, layout: str, arch: str, **options: Any) -> tuple[Any, Any]:
    """The lowered program of a call, and its pool."""
    fn, args = arguments(op, layout, **options)
    return backend.lower(fn, arch, *args), pool_of(args, op)


def assert_one_kernel_that_reads_words(op: str, layout: str, arch: str, **options: Any) -> TritonKernel:
    program, pool = lowered(op, layout, arch, **options)
    text = program.as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("stablehlo.custom_call") == 1
    kernel = triton_kernel(program)
    loads = [load for load in kernel.loads() if load.shape == pool.shape]
    assert loads and all(load.numbers and load.masked for load in loads), "rows beyond a length must not be touched"
    # Words of four bytes wherever the layout has them, never bytes.
    assert {int(load.element.lstrip("bfi")) for load in loads} == {8 * pool.dtype.itemsize}
    assert pool.dtype.itemsize == 4 or layout in ("plain_bfloat16", "plain_float16")
    ir = str(kernel.module)
    if arch in AMD:
        # Neither PTX nor conversions of FP8, which are missing, inexact or software on one AMD chip or another.
        assert "inline_asm" not in ir and "f8E" not in ir and "tt.fp_to_fp" not in ir
    return kernel


def cases(op: str) -> list[Any]:
    """Every layout on every chip; by default all on one chip, and one chip after the other for a few."""
    layouts = INDEX_LAYOUTS if op == "indexer_logits" else LAYOUTS
    found = []
    for arch in ("gfx942", "gfx950", "sm_90"):
        for layout in layouts:
            usual = (op == "mla_decode" and arch == "gfx942") or layout in ("packed_pow2", "index_e4m3fn_pow2")
            marks = [pytest.mark.amd] * (arch in AMD) + [pytest.mark.slow] * (not usual)
            found.append(pytest.param(layout, arch, marks=marks, id=f"{layout}-{arch}"))
    return found


# ---- one kernel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "arch"), cases("mla_decode"))
def test_decode_lowers_to_one_kernel(layout, arch):
    # Without a name the kernel is what the chip gets.
    assert_one_kernel_that_reads_words("mla_decode", layout, arch)


@pytest.mark.parametrize(("layout", "arch"), cases("mla_prefill"))
def test_prefill_lowers_to_one_kernel(layout, arch):
    assert_one_kernel_that_reads_words("mla_prefill", layout, arch, heads=20)


@pytest.mark.parametrize(("layout", "arch"), cases("sparse_mla"))
def test_sparse_lowers_to_one_kernel(layout, arch):
    assert_one_kernel_that_reads_words("sparse_mla", layout, arch, heads=128)


@pytest.mark.parametrize(("layout", "arch"), cases("indexer_logits"))
def test_indexer_lowers_to_one_kernel(layout, arch):
    assert_one_kernel_that_reads_words("indexer_logits", layout, arch, head_dim=128, heads=64)


@pytest.mark.parametrize(
    ("options"),
    [
        pytest.param({"heads": 128}, id="many heads"),
        pytest.param({"heads": 20, "new": 2}, id="two tokens a program"),
        pytest.param({"heads": 128, "new": 8}, id="many tokens", marks=pytest.mark.slow),
        pytest.param({"heads": 1}, id="one head", marks=pytest.mark.slow),
        pytest.param({"page_size": 1, "num_pages": 4096, "M": 2560}, id="pages of one token"),
        pytest.param({"page_size": 256, "num_pages": 16}, id="large pages", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.amd), pytest.param("sm_90", marks=pytest.mark.slow)])
def test_shapes_of_decodes_lower(options, arch):
    assert_one_kernel_that_reads_words("mla_decode", "raw_e4m3fn", arch, **options)


@pytest.mark.parametrize(
    ("layout", "R", "P"),
    [
        ("packed_pow2", 512, 0),
        ("raw_e4m3fnuz", 256, 32),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("packed_pow2", 256, 64), ("raw_e5m2", 128, 16)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("raw_e4m3fn", 32, 16), ("plain_float16", 256, 32)]),
    ],
)
@pytest.mark.amd
def test_unusual_widths_lower(layout, R, P):
    assert_one_kernel_that_reads_words("mla_decode", layout, "gfx942", R=R, P=P)


@pytest.mark.parametrize("op", OPERATIONS)
def test_native_conversions_are_where_the_tuning_asks_for_them(op):
    # The control for their absence on AMD.
    layout = config("raw_e4m3fn").layout
    tuning = attend_tuning(target("sm_90"), "sparse" if op == "sparse_mla" else "dense", layout, 16, False)
    text = str(triton_kernel(lowered(op, "raw_e4m3fn", "sm_90")[0]).module)
    assert ("inline_asm" in text) == tuning.native_fp8


# ---- large pools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", WORDS)
@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.amd), pytest.param("sm_90", marks=pytest.mark.slow)])
def test_f6_pools_beyond_4_gib_have_64_bit_offsets(layout, arch):
    row = config(layout).layout.row_bytes
    for op in ("mla_decode", "sparse_mla"):
        for gib, offset in ((4.5, "i64"), (3.5, "i32")):
            options = {"num_pages": int(gib * 2**30) // (64 * row * 2), "heads": 16}
            program, pool = lowered(op, layout, arch, **options)
            loads = [load for load in triton_kernel(program).loads() if load.shape == pool.shape]
            # Offsets count elements: below 4 GiB those of two bytes and more fit 32 bits.
            assert loads and {load.offset for load in loads} == {offset}


def test_f6_pools_of_single_bytes_are_refused_where_offsets_wrap():
    # An odd number of bytes a row leaves no wider word; XLA has no such limit and takes over.
    sizes = {"R": 33, "P": 4}
    for gib, refuses in ((1.9, False), (2.2, True), (3.9, True), (4.1, False)):
        options = {**sizes, "num_pages": int(gib * 2**30) // (64 * 37 * 2)}
        for op in OPERATIONS:
            fn, args = arguments(op, "raw_e4m3fn", **options)
            named = functools.partial(fn, implementation="pallas")
            with jax.sharding.use_abstract_mesh(backend.abstract_gpu("gfx942")):
                if refuses:
                    with pytest.raises(NotImplementedError, match="between 2 and 4 GiB"):
                        jax.eval_shape(named, *args)
                    assert not calls(jax.make_jaxpr(fn)(*args))
                else:
                    jax.eval_shape(named, *args)


# ---- shared memory -----------------------------------------------------------------------------------------------------

LDS = 65536
"""Bytes of shared memory that a work group has on gfx942."""


def padded_columns(words: int, numbers: int) -> int:
    return tiles.padded(words) * numbers


@pytest.mark.amd
@pytest.mark.parametrize("kernel", ["dense", "sparse"])
def test_tiles_of_attention_fit_the_shared_memory_of_gfx942(kernel):
    # The operands of a product pass through shared memory: a tile of keys in the type it is multiplied in, and its weights.
    for name in LAYOUTS:
        for R, P in ((512, 64), (512, 0), (256, 32), (128, 64)):
            layout = config(name, R=R, P=P).layout
            for wide in (False, True):
                wide = wide or name == "plain_float32"
                itemsize = 4 if wide else 2
                numbers = layout.word_dtype.itemsize if layout.dialect else 1
                columns = padded_columns(R // numbers, numbers)
                if P:
                    rope_numbers = 2 if layout.is_packed else numbers
                    columns += padded_columns(P // rope_numbers, rope_numbers)
                for rows in (1, 16, 17, 20, 32, 33, 40, 64, 96, 128, 256, 1024):
                    tuning = attend_tuning(target("gfx942"), kernel, layout, rows, wide)
                    used = tuning.keys * columns * itemsize + tuning.rows * tuning.keys * itemsize
                    assert used <= LDS, f"{name} {R}+{P}, {rows} rows: {tuning} needs {used} bytes"


@pytest.mark.amd
def test_tiles_of_the_indexer_fit_the_shared_memory_of_gfx942():
    # Keys and queries of two bytes. Those in float32 stay in registers; what the compiler made of them is verify-rocm's to judge.
    tuning = index_tuning(target("gfx942"))
    assert tuning.keys * 128 * 2 + 64 * 128 * 2 <= LDS


# ---- the choice, and what is known while tracing -----------------------------------------------------------------------


def calls(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call"]


EVERY = [("mla_decode", "plain_bfloat16"), ("mla_prefill", "raw_e4m3fnuz"), ("sparse_mla", "packed_fp32")]
EVERY += [("indexer_logits", "index_e4m3fn_pow2"), ("indexer_logits", "index_float32")]


@pytest.mark.parametrize(("op", "layout"), EVERY)
def test_f22_a_kernel_reads_the_pool_and_nothing_else_is_of_its_size(op, layout):
    head_dim = {"head_dim": 128} if op == "indexer_logits" else {}
    largest = []
    for num_pages in (512, 4096):
        fn, args = arguments(op, layout, num_pages=num_pages, heads=5, M=8, K=64, **head_dim)
        jaxpr = jax.make_jaxpr(functools.partial(fn, implementation="pallas"))(*args)
        (call,) = calls(jaxpr)
        assert call.params["interpret"]
        assert not calls(jax.make_jaxpr(fn)(*args)), "on a CPU the kernels are for tests"
        pool = pool_of(args, op)
        # The same bits under another type are no copy, nor is what refuses vmap.
        free = {"custom_vmap_call", "bitcast_convert_type"}
        largest.append(max(v.aval.size for eqn in equations(jaxpr) if eqn.primitive.name not in free for v in eqn.outvars))
        assert largest[-1] < pool.size
    assert largest[0] == largest[1]


def grids(values: int, arch: str, op: str, **options: Any) -> list[tuple[int, ...]]:
    """The launches of a call whose integer arguments are constants of the trace, all equal to ``values``."""
    fn, args = arguments(op, "raw_e4m3fn", **options)
    # Arrays with values where only shapes should count.
    held = [np.full(a.shape, values, np.int32) if getattr(a, "dtype", None) == np.int32 and a.shape else a for a in args]
    free = [i for i, a in enumerate(held) if not isinstance(a, np.ndarray)]

    def call(*given: Any) -> Any:
        full = list(held)
        for i, value in zip(free, given, strict=True):
            full[i] = value
        return fn(*full)

    with jax.sharding.use_abstract_mesh(backend.abstract_gpu(arch)):
        return [c.params["grid_mapping"].grid for c in calls(jax.make_jaxpr(call)(*(args[i] for i in free)))]


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_default_plan_depends_on_shapes_and_not_on_values(op):
    for arch in ("gfx942", "sm_90"):
        first = grids(1, arch, op, M=512)
        assert len(first) == 1 and first == grids(40, arch, op, M=512) == grids(2**31 - 1, arch, op, M=512)


@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.amd), "sm_90"])
def test_few_sequences_of_long_tables_are_split(arch):
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu(arch)):

        def programs(num_splits: int | None, S: int, M: int) -> int:
            fn, args = arguments("mla_decode", "raw_e4m3fn", S=S, M=M)
            (call,) = calls(jax.make_jaxpr(functools.partial(fn, num_splits=num_splits))(*args))
            return int(np.prod(call.params["grid_mapping"].grid))

        assert programs(None, 2, 512) > 4 * programs(1, 2, 512)
        assert programs(None, 4096, 512) == programs(1, 4096, 512)
        assert programs(7, 2, 512) == 7 * programs(1, 2, 512)
        # No part without a tile of keys.
        assert programs(1000, 2, 1) == programs(64, 2, 1) <= 4 * programs(1, 2, 1)


def test_the_layer_is_an_operand_of_the_kernel():
    # A layer that is traced must not become one kernel a layer, nor a slice of the pool.
    for op in OPERATIONS:
        assert "dynamic_slice" not in lowered(op, "raw_e4m3fn", "gfx942")[0].as_text()
