"""Writes: the bytes of every layout against the numpy oracle, what is dropped, what is left alone, and what is refused."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import (
    INDEX_LAYOUTS,
    LAYOUTS,
    assert_same_bytes,
    config,
    filled,
    geometry,
    hard_floats,
    near_ties,
    oracle_rows,
    pool_bytes,
    row_bytes,
)
from mla_jax import reference
from mla_jax.kernels import write_index as write_index_module
from mla_jax.kernels import write_rows as write_rows_module
from mla_jax.kernels.tuning import WriteTuning

IMPLEMENTATIONS = ("xla", "pallas")
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

CAPACITY = 128
# Dropped and kept, in no order: below, on and above every bound, and neighbours.
SLOTS = np.array([-(2**31), 5, -5, 0, 127, 1, 128, 135, 2**31 - 1, 17, 126, -1, 65], np.int32)
T = len(SLOTS)

write = jax.jit(mla.write_kv, static_argnames="implementation")
write_index = jax.jit(mla.write_index_k, static_argnames="implementation")


def sized(layout: str, page_size: int = 16, **kwargs) -> mla.CacheConfig:
    return config(layout, page_size=page_size, num_pages=CAPACITY // page_size, **kwargs)


def expected_rows(cache_config: mla.CacheConfig, layer: int, slots, c_kv, k_rope, k_scale=None, byte: int = 0xAA):
    """uint8 [layers, capacity, W] after one write into a pool of ``byte``."""
    layout = cache_config.layout
    pool = np.full((cache_config.num_layers, 1, cache_config.capacity, layout.row_bytes), byte, np.uint8)
    pool[layer] = reference.write_rows(pool[layer], slots, oracle_rows(layout, c_kv, k_rope, k_scale))
    return pool[:, 0]


def assert_written(cache: mla.PagedMLACache, want: np.ndarray) -> None:
    layout = cache.config.layout
    codes = slice(0, layout.kv_lora_rank)
    assert_same_bytes(row_bytes(cache), want, codes, within_one=layout.scale_mode == "fp32")


def hard_rows(rng, layout: mla.CacheLayout, dtypes=(np.float32, np.float32), num_tokens: int = T):
    R, P = layout.kv_lora_rank, layout.qk_rope_head_dim
    return tuple(hard_floats(rng, (num_tokens, width), dtype) for width, dtype in zip((R, P), dtypes, strict=True))


# ---- bytes -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_stores_the_bytes_of_the_oracle(layout, implementation, rng):
    got_config = sized(layout)
    c_kv, k_rope = hard_rows(rng, got_config.layout)
    c_kv[0] = c_kv[4] = 0.0
    c_kv[5] = np.nan
    c_kv[9] = -1e-40
    k_rope[10] = -0.0
    cache = write(filled(got_config), np.int32(1), SLOTS, c_kv, k_rope, implementation=implementation)
    assert_written(cache, expected_rows(got_config, 1, SLOTS, c_kv, k_rope))


DIMS = [
    ("plain_bfloat16", 32, 2, 64),
    ("plain_float32", 33, 7, 1),
    ("raw_e4m3fn", 384, 0, 2),
    ("raw_e5m2", 33, 7, 16),
    ("raw_e4m3fnuz", 510, 6, 64),
    ("packed_pow2", 384, 0, 64),
    ("packed_pow2", 128, 3, 2),
    *(
        pytest.param(layout, R, P, page_size, marks=pytest.mark.slow)
        for layout in LAYOUTS
        for R, P, page_size in ((256, 32, 1), (384, 0, 2), (1024, 64, 64), (512, 1, 16))
    ),
]


@both
@pytest.mark.parametrize(("layout", "R", "P", "page_size"), DIMS)
def test_unusual_ranks_ropes_and_page_sizes(layout, R, P, page_size, implementation, rng):
    # Page sizes 1 and 2 are smaller than the tokens a packed word of some kernels holds:
    # https://github.com/sgl-project/sglang-jax/issues/1074.
    got_config = sized(layout, page_size, R=R, P=P)
    c_kv, k_rope = hard_rows(rng, got_config.layout)
    cache = write(filled(got_config), np.int32(0), SLOTS, c_kv, k_rope, implementation=implementation)
    assert_written(cache, expected_rows(got_config, 0, SLOTS, c_kv, k_rope))


BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32


@both
@pytest.mark.parametrize(
    ("layout", "dtypes"),
    [
        ("plain_bfloat16", (BF16, F32)),
        ("plain_float16", (F16, BF16)),
        ("raw_e4m3fnuz", (BF16, F16)),
        ("packed_pow2", (F16, BF16)),
        ("packed_pow2", (BF16, F32)),
    ],
)
def test_latent_and_rope_are_cast_independently(layout, dtypes, implementation, rng):
    # SGLang casts the rope only if the latent needs a cast, and then stores rows of the wrong width.
    got_config = sized(layout, R=128, P=16)
    c_kv, k_rope = hard_rows(rng, got_config.layout, dtypes)
    cache = write(filled(got_config), np.int32(1), SLOTS, c_kv, k_rope, implementation=implementation)
    assert_written(cache, expected_rows(got_config, 1, SLOTS, c_kv, k_rope))


@both
@pytest.mark.parametrize("layout", ["plain_bfloat16", "packed_pow2"])
def test_bfloat16_keeps_its_bits(layout, implementation):
    # Every one of the 65,536 patterns, NaN payloads included.
    num_tokens = 1024 if layout == "packed_pow2" else 128
    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    cache = mla.init_cache(config(layout, num_pages=65))
    c_kv, k_rope = np.zeros((num_tokens, 512), BF16), np.zeros((num_tokens, 64), BF16)
    if layout == "packed_pow2":
        k_rope = patterns.reshape(num_tokens, 64)
    else:
        c_kv = patterns.reshape(num_tokens, 512)
    cache = write(cache, np.int32(1), np.arange(num_tokens) + 1, c_kv, k_rope, implementation=implementation)
    start = 528 if layout == "packed_pow2" else 0
    stored = row_bytes(cache)[1, 1 : num_tokens + 1, start : start + (1 << 17) // num_tokens]
    np.testing.assert_array_equal(np.ascontiguousarray(stored).view(np.uint16).ravel(), patterns.view(np.uint16))


@both
@pytest.mark.parametrize(("layout", "dtype"), [("plain_bfloat16", F16), ("plain_float16", BF16), ("plain_float32", F16)])
def test_plain_casts_are_ieee_for_every_16_bit_number(layout, dtype, implementation):
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(128, 512)
    cache = mla.init_cache(config(layout, num_pages=9))
    rope = np.zeros((128, 64), dtype)
    cache = write(cache, np.int32(0), np.arange(128) + 1, numbers, rope, implementation=implementation)
    with np.errstate(all="ignore"):
        want = numbers.astype(cache.config.layout.number_dtype)
        is_nan = np.isnan(numbers)
    stored = np.ascontiguousarray(row_bytes(cache)[0, 1:129, : want.dtype.itemsize * 512]).view(want.dtype)
    word = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(stored.view(word)[~is_nan], want.view(word)[~is_nan])
    assert np.all(np.isnan(stored[is_nan]))
    np.testing.assert_array_equal(np.signbit(stored[is_nan]), np.signbit(numbers[is_nan]))


@both
def test_raw_row_on_mi300_is_the_cast_of_latent_and_rope_together(implementation, rng):
    # https://github.com/sgl-project/sglang/pull/22314: GLM-5 with FP8 on MI300 took the eager path or failed.
    got_config = mla.CacheConfig(
        geometry=mla.GEOMETRIES["glm-5"], num_layers=2, num_pages=8, page_size=16, platform="gfx942", use_nsa=True,
        kv_cache_dtype="fp8_e4m3", nsa_kv_cache_store_fp8=False,
    )  # fmt: skip
    rows = rng.standard_normal((T, 576)).astype(BF16)
    cache = write(filled(got_config), np.int32(0), SLOTS, rows[:, :512], rows[:, 512:], implementation=implementation)
    assert got_config.layout.row_bytes == 576
    want = rows.astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)
    np.testing.assert_array_equal(row_bytes(cache)[0, 17], want[9])
    np.testing.assert_array_equal(row_bytes(cache)[0, 127], want[4])


def write_one(c_kv: np.ndarray, scale_mode: str, implementation: str) -> np.ndarray:
    """The 656 bytes of one row on MI350, whose pool held 0xAA."""
    cache = filled(sized("packed_pow2", platform="gfx950", scale_mode=scale_mode))
    rope = np.ones((1, 64), np.float32)
    cache = write(cache, np.int32(1), np.array([5], np.int32), c_kv[None], rope, implementation=implementation)
    return row_bytes(cache)[1, 5]


@both
@pytest.mark.parametrize(("scale_mode", "scale", "code"), [("fp32", np.float32(1 / 448), 0x7E), ("pow2", 2.0**-8, 0x78)])
def test_packed_write_leaves_no_byte_of_the_row_unwritten(scale_mode, scale, code, implementation):
    # https://github.com/sgl-project/sglang/pull/31338: 576 of 656 bytes were written on a HIP device.
    row = write_one(np.ones(512, np.float32), scale_mode, implementation)
    assert not np.any(row == 0xAA)
    assert np.all(row[:512] == code)
    np.testing.assert_array_equal(row[512:528].view(np.float32), np.full(4, scale, np.float32))
    np.testing.assert_array_equal(row[528:].view(np.uint16), np.full(64, 0x3F80, np.uint16))


@both
def test_scales_of_known_groups_are_powers_of_two(implementation):
    # https://github.com/vllm-project/vllm/pull/49435
    c_kv = np.zeros(512, np.float32)
    c_kv[0], c_kv[128], c_kv[256 + 7] = 336, 449, 448
    row = write_one(c_kv, "pow2", implementation)
    np.testing.assert_array_equal(row[512:528].view(np.float32), np.array([1, 2, 1, 2.0**-13], np.float32))
    assert not np.any(row[384:512])
    # A reader that rounds scales to their exponents (E8M0) reads the same numbers.
    assert not np.any(row[512:528].view(np.uint32) & 0x7FFFFF)


@both
def test_released_model_of_unusual_dimensions(implementation, rng):
    # MiniCPM3: rank 256 and rope 32. https://github.com/vllm-project/vllm/issues/35577
    got_config = sized("packed_pow2", page_size=1, geometry=mla.GEOMETRIES["minicpm3-4b"])
    assert got_config.layout.row_bytes == 328
    c_kv, k_rope = hard_rows(rng, got_config.layout)
    cache = write(filled(got_config), np.int32(1), SLOTS, c_kv, k_rope, implementation=implementation)
    assert_written(cache, expected_rows(got_config, 1, SLOTS, c_kv, k_rope))


# ---- slots and layers ------------------------------------------------------------------------------------------------


@functools.cache
def ones(layout: str = "raw_e4m3fn"):
    got_config = sized(layout)
    return filled(got_config), np.ones((T, 512), np.float32), np.ones((T, 64), np.float32)


def changed(cache: mla.PagedMLACache) -> set[tuple[int, int]]:
    """(layer, slot) of every row that no longer holds 0xAA alone."""
    return {(int(layer), int(slot)) for layer, slot in np.argwhere(np.any(row_bytes(cache) != 0xAA, axis=-1))}


@both
def test_only_slots_inside_the_pool_are_written(implementation):
    cache, c_kv, k_rope = ones()
    got = write(cache, np.int32(1), SLOTS, c_kv, k_rope, implementation=implementation)
    assert changed(got) == {(1, slot) for slot in (5, 127, 1, 17, 126, 65)}


@both
@pytest.mark.parametrize("layer", [-1, 2, 3, -(2**31), 2**31 - 1])
def test_traced_layer_out_of_range_drops_every_row(layer, implementation):
    cache, c_kv, k_rope = ones()
    assert not changed(write(cache, np.int32(layer), SLOTS, c_kv, k_rope, implementation=implementation))


@pytest.mark.parametrize(("layer", "implementation"), [(0, "pallas"), (1, "xla"), (np.int64(1), "xla"), (np.asarray(1), "xla")])
def test_static_layer_of_any_integer_type(layer, implementation):
    cache, c_kv, k_rope = ones()

    @jax.jit
    def static(cache):
        return mla.write_kv(cache, layer, SLOTS, c_kv, k_rope, implementation=implementation)

    assert {row for row, _ in changed(static(cache))} == {int(layer)}


@both
def test_reserved_slot_survives_padding_rows_of_nan(implementation):
    # https://github.com/sgl-project/sglang/issues/36207: padding of a captured graph wrote NaN into slot 0.
    cache, c_kv, k_rope = ones()
    c_kv = c_kv.copy()
    c_kv[1:] = np.nan
    slots = np.zeros(T, np.int32)
    slots[0] = 5
    got = write(cache, np.int32(0), slots, c_kv, k_rope, implementation=implementation)
    assert changed(got) == {(0, 5)}


@both
def test_rest_of_the_null_page_is_written_like_any_other(implementation):
    cache, c_kv, k_rope = ones()
    slots = np.arange(T, dtype=np.int32)
    got = write(cache, np.int32(0), slots, c_kv, k_rope, implementation=implementation)
    assert changed(got) == {(0, slot) for slot in range(1, T)}


@both
def test_duplicates_change_no_other_row(implementation):
    cache, c_kv, k_rope = ones()
    c_kv = c_kv * np.arange(T, dtype=np.float32)[:, None]
    slots = np.array([5, 5, 5, 9, 0, 0, 0, -1, -1, 128, 128, 12, 12], np.int32)
    got = write(cache, np.int32(1), slots, c_kv, k_rope, implementation=implementation)
    assert changed(got) == {(1, slot) for slot in (5, 9, 12)}
    want = expected_rows(got.config, 1, slots[3:4], c_kv[3:4], k_rope[3:4])
    np.testing.assert_array_equal(row_bytes(got)[1, 9], want[1, 9])


@both
@pytest.mark.parametrize("num_tokens", [1, 31])
def test_any_number_of_rows(num_tokens, implementation, rng):
    got_config = sized("raw_e4m3fnuz", R=64, P=4)
    c_kv, k_rope = hard_rows(rng, got_config.layout, num_tokens=num_tokens)
    slots = rng.permutation(CAPACITY)[:num_tokens].astype(np.int32)
    cache = write(filled(got_config), np.int32(1), slots, c_kv, k_rope, implementation=implementation)
    assert_written(cache, expected_rows(got_config, 1, slots, c_kv, k_rope))


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_no_rows_at_all_return_the_cache_at_once(implementation):
    # https://github.com/deepseek-ai/FlashMLA asserts a batch above zero.
    cache = filled(config("packed_pow2", head_dim=128))
    nothing = np.zeros(0, np.int32)
    got = mla.write_kv(cache, 0, nothing, np.zeros((0, 512), BF16), np.zeros((0, 64), BF16), implementation=implementation)
    got = mla.write_index_k(got, 0, nothing, np.zeros((0, 128), BF16), implementation=implementation)
    assert got.kv is cache.kv and got.index is cache.index


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        (2, "packed_pow2"),
        (4, "raw_e4m3fnuz"),
        *(pytest.param(rows, name, marks=pytest.mark.slow) for rows in (3, 8) for name in LAYOUTS if "fp32" not in name),
    ],
)
def test_rows_of_a_program_do_not_matter(rows, layout, monkeypatch, rng):
    # A GPU writes several rows a program and T need not be a multiple; interpret mode otherwise takes one.
    tuning = lambda target, kernel: WriteTuning(rows=rows, num_warps=1)  # noqa: E731
    monkeypatch.setattr(write_rows_module, "write_tuning", tuning)
    monkeypatch.setattr(write_index_module, "write_tuning", tuning)
    got_config = sized(layout, R=128, P=4, head_dim=32)
    c_kv, k_rope = hard_rows(rng, got_config.layout)
    k = hard_floats(rng, (T, 32), np.float32)

    @jax.jit
    def both_pools(cache):
        cache = mla.write_kv(cache, 1, SLOTS, c_kv, k_rope, implementation="pallas")
        return mla.write_index_k(cache, 1, SLOTS, k, implementation="pallas")

    cache = both_pools(filled(got_config))
    assert_written(cache, expected_rows(got_config, 1, SLOTS, c_kv, k_rope))
    np.testing.assert_array_equal(pool_bytes(cache.index), expected_pages(got_config, 1, SLOTS, k))


@both
@pytest.mark.parametrize("layout", ["raw_e4m3fnuz", "packed_pow2"])
def test_scan_over_layers_inside_a_loop_over_steps(layout, implementation, rng):
    got_config = sized(layout, R=128, P=16, head_dim=32, num_layers=3)
    steps = 4
    c_kv, k_rope = (x.reshape(steps, T, -1) for x in hard_rows(rng, got_config.layout, num_tokens=steps * T))
    k = hard_floats(rng, (steps, T, 32), np.float32)
    slots = np.stack([rng.permutation(CAPACITY)[:T] for _ in range(steps)]).astype(np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, c_kv, k_rope, k, slots):
        def layer_step(carry, layer):
            cache, step = carry
            # Each layer writes other numbers.
            factor = 2.0 ** layer.astype(jnp.float32)
            cache = mla.write_kv(cache, layer, slots[step], c_kv[step] * factor, k_rope[step], implementation=implementation)
            return (mla.write_index_k(cache, layer, slots[step], k[step], implementation=implementation), step), None

        def step(state):
            (cache, i), _ = jax.lax.scan(layer_step, state, jnp.arange(3))
            return cache, i + 1

        return jax.lax.while_loop(lambda state: state[1] < steps, step, (cache, jnp.int32(0)))[0]

    cache = run(filled(got_config), c_kv, k_rope, k, slots)
    layout_, index = got_config.layout, got_config.index_layout
    assert index is not None
    rows = np.full((3, 1, CAPACITY, layout_.row_bytes), 0xAA, np.uint8)
    pages = np.full((3, CAPACITY // 16, index.page_bytes), 0xAA, np.uint8)
    for i in range(steps):
        for layer in range(3):
            with np.errstate(over="ignore", invalid="ignore"):
                encoded = oracle_rows(layout_, c_kv[i] * np.float32(2.0**layer), k_rope[i])
            rows[layer] = reference.write_rows(rows[layer], slots[i], encoded)
            pages[layer] = reference.write_index_keys(pages[layer], slots[i], k[i], 16, index.dialect, index.scale_mode)
    assert_written(cache, rows[:, 0])
    np.testing.assert_array_equal(pool_bytes(cache.index), pages)


@both
def test_int64_slots_with_x64_enabled(implementation):
    cache, c_kv, k_rope = ones()
    slots = np.array([2**40 + 5, -(2**40), 2**32 + 7, 5, 127, 128, 0, -1, 2**31, -(2**31) - 1, 1, 2**62, 33])
    step = jax.jit(lambda *args: mla.write_kv(*args, implementation=implementation))
    with jax.enable_x64(True):
        got, far = (
            step(cache, jnp.asarray(layer, jnp.int64), jnp.asarray(slots, jnp.int64), c_kv, k_rope) for layer in (1, 2**32 + 1)
        )
    assert changed(got) == {(1, slot) for slot in (5, 127, 1, 33)}
    assert not changed(far)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_slots_of_other_integer_types(dtype):
    cache, c_kv, k_rope = ones()
    got = write(cache, np.int32(1), np.array([5, 33, 1], dtype), c_kv[:3], k_rope[:3], implementation="xla")
    assert changed(got) == {(1, slot) for slot in (5, 33, 1)}


def test_unsigned_slots_beyond_int32_are_dropped():
    cache, c_kv, k_rope = ones()
    slots = jnp.asarray(np.array([2**32 - 1, 2**31, 5], np.uint32))
    assert changed(write(cache, np.int32(0), slots, c_kv[:3], k_rope[:3], implementation="xla")) == {(0, 5)}


# ---- k_scale ---------------------------------------------------------------------------------------------------------

RAW = [name for name in LAYOUTS if name.startswith("raw_")]


@both
@pytest.mark.parametrize("layout", RAW)
def test_raw_rows_store_the_float32_quotient(layout, implementation, rng):
    # Hard numbers, and numbers whose quotient lies on a tie of FP8 or one float32 beside it.
    got_config = sized(layout, R=512, P=16)
    c_kv, k_rope = hard_rows(rng, got_config.layout)
    for k_scale in (1.0, 0.5, 1.5, 0.3):
        ties, k = near_ties(got_config.layout.dialect, k_scale)
        c_kv[1], k_rope[1] = np.resize(ties, 512), -np.resize(ties[100:], 16)
        c_kv[4] = np.resize(ties[300:], 512)
        cache = write(filled(got_config), np.int32(1), SLOTS, c_kv, k_rope, k_scale=k, implementation=implementation)
        assert_written(cache, expected_rows(got_config, 1, SLOTS, c_kv, k_rope, k_scale))


@both
def test_static_k_scale_divides_too(implementation):
    # A compiler that sees a constant multiplies by its rounded reciprocal instead.
    got_config = sized("raw_e4m3fn", R=512, P=0)
    ties, _ = near_ties("e4m3fn", 0.3)
    c_kv, nothing = np.resize(ties, (2, 512)), np.zeros((2, 0), np.float32)
    slots = np.array([5, 6], np.int32)
    static = jax.jit(lambda c, *rest: mla.write_kv(c, 1, *rest, k_scale=0.3, implementation=implementation))
    cache = static(filled(got_config), slots, c_kv, nothing)
    assert_written(cache, expected_rows(got_config, 1, slots, c_kv, nothing, 0.3))


def test_static_k_scale_of_one_is_no_scale():
    cache, c_kv, k_rope = ones()
    k_scales: list[Any] = [None, 1, 1.0, np.float32(1), np.float64(1)]
    jaxprs = {
        str(jax.make_jaxpr(lambda c, k=k_scale: mla.write_kv(c, 0, SLOTS, c_kv, k_rope, k_scale=k))(cache)) for k_scale in k_scales
    }
    assert len(jaxprs) == 1


# ---- index keys ------------------------------------------------------------------------------------------------------


def expected_pages(cache_config: mla.CacheConfig, layer: int, slots, k, byte: int = 0xAA) -> np.ndarray:
    """uint8 [index layers, pages, bytes a page] after one write into a pool of ``byte``."""
    layout = cache_config.index_layout
    assert layout is not None
    pool = np.full((cache_config.num_index_layers or 0, cache_config.num_pages, layout.page_bytes), byte, np.uint8)
    pool[layer] = reference.write_index_keys(pool[layer], slots, k, layout.page_size, layout.dialect, layout.scale_mode)
    return pool


INDEX_CASES = [
    ("index_float32", 128, 16),
    ("index_e4m3fn_pow2", 128, 16),
    ("index_e4m3fnuz_fp32", 128, 64),
    ("index_e4m3fn_fp32", 96, 2),
    ("index_e4m3fnuz_pow2", 192, 1),
    ("index_e4m3fn_pow2", 65, 2),
    *(
        pytest.param(layout, head_dim, page_size, marks=pytest.mark.slow)
        for layout in INDEX_LAYOUTS
        for head_dim, page_size in ((32, 64), (64, 1), (96, 16), (128, 1), (192, 2), (256, 1), (130, 64), (33, 1))
    ),
]


@both
@pytest.mark.parametrize(("layout", "head_dim", "page_size"), INDEX_CASES)
def test_every_index_layout_stores_the_bytes_of_the_oracle(layout, head_dim, page_size, implementation, rng):
    got_config = sized(layout, page_size, head_dim=head_dim, R=128, P=0)
    k = hard_floats(rng, (T, head_dim), np.float32)
    k[1], k[4], k[5], k[9] = 0.0, np.nan, -1e-40, 1e-6
    cache = filled(got_config)
    got = write_index(cache, np.int32(1), SLOTS, k, implementation=implementation)
    scales_at = page_size * head_dim
    assert_same_bytes(
        pool_bytes(got.index),
        expected_pages(got_config, 1, SLOTS, k),
        slice(0, scales_at),
        within_one=layout.endswith("fp32"),
    )
    np.testing.assert_array_equal(got.kv, cache.kv)


@both
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)])
def test_index_keys_of_16_bit_types(dtype, implementation, rng):
    got_config = sized("index_e4m3fnuz_pow2", head_dim=64, R=128, P=0)
    k = hard_floats(rng, (T, 64), dtype)
    got = write_index(filled(got_config), np.int32(0), SLOTS, k, implementation=implementation)
    np.testing.assert_array_equal(pool_bytes(got.index), expected_pages(got_config, 0, SLOTS, k))


@both
def test_index_layer_counts_index_layers(implementation, rng):
    got_config = sized("index_e4m3fn_pow2", head_dim=32, R=128, P=0, num_layers=4, num_index_layers=2)
    k = rng.standard_normal((T, 32)).astype(np.float32)
    got = write_index(filled(got_config), np.int32(1), SLOTS, k, implementation=implementation)
    np.testing.assert_array_equal(pool_bytes(got.index), expected_pages(got_config, 1, SLOTS, k))
    beyond = write_index(filled(got_config), np.int32(3), SLOTS, k, implementation=implementation)
    assert np.all(pool_bytes(beyond.index) == 0xAA)
    with pytest.raises(ValueError, match=r"layer 3.*2 layers"):
        mla.write_index_k(mla.init_cache(got_config), 3, SLOTS, k, implementation=implementation)


@both
def test_index_key_and_scale_lie_apart_in_the_page(implementation):
    # https://github.com/sgl-project/sglang/pull/31218: a page is all keys, then all scales, not rows of 132 bytes.
    got_config = config("index_e4m3fn_pow2", head_dim=128, page_size=64, num_pages=3)
    k = np.ones((1, 128), BF16)
    got = write_index(filled(got_config), np.int32(0), np.array([64 + 6]), k, implementation=implementation)
    page = pool_bytes(got.index)[0, 1]
    written = np.flatnonzero(page != 0xAA)
    assert set(written) <= {*range(6 * 128, 7 * 128), *range(8192 + 24, 8192 + 28)}
    np.testing.assert_array_equal(page[8192 + 24 : 8192 + 28].view(np.float32), np.float32(2.0**-8))
    assert np.all(page[6 * 128 : 7 * 128] == 0x78)


# ---- speed of interpret mode -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["raw_e4m3fnuz", "packed_pow2"])
def test_interpret_mode_is_usable_on_a_pool_of_144_mib(layout, rng):
    # The generous bound stands for "does not touch the whole pool": an FP8-typed pool took 78 s, a masked store 19 s.
    got_config = config(layout, num_pages=2048, page_size=64)
    cache = mla.init_cache(got_config)
    assert cache.kv.nbytes >= 144 * 2**20
    c_kv, k_rope = (rng.standard_normal((64, width)).astype(BF16) for width in (512, 64))
    slots = rng.integers(1, got_config.capacity, 64).astype(np.int32)
    step = jax.jit(lambda c: mla.write_kv(c, 1, slots, c_kv, k_rope, implementation="pallas"), donate_argnums=0)
    cache = jax.block_until_ready(step(cache))
    start = time.perf_counter()
    for _ in range(3):
        cache = step(cache)
    jax.block_until_ready(cache)
    assert (time.perf_counter() - start) / 3 < 5


def test_unused_geometry_does_not_matter():
    # The bytes depend on R and P alone.
    assert config("packed_pow2").layout == config("packed_pow2", geometry=geometry(head_dim=128)).layout


def test_eager_pallas_calls_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_jax.kernels import backend

    launches = []
    launch = backend.launch
    monkeypatch.setattr(backend, "launch", lambda *args, **kwargs: launches.append(kwargs["name"]) or launch(*args, **kwargs))
    # A width no other test uses, so that nothing is compiled yet.
    geometry = mla.MLAGeometry(
        num_heads=1, q_lora_rank=None, kv_lora_rank=44, qk_nope_head_dim=8, qk_rope_head_dim=20, v_head_dim=8, softmax_scale=1.0
    )
    config = mla.CacheConfig(geometry=geometry, num_layers=1, num_pages=3, page_size=4, kv_cache_dtype="fp8_e4m3", platform="cpu")
    cache, slots = mla.init_cache(config), np.array([4, 5], np.int32)
    for _ in range(3):
        rows = np.ones((2, 44), np.float32), np.ones((2, 20), np.float32)
        cache = mla.write_kv(cache, 0, slots, *rows, implementation="pallas")
    assert launches == ["write_kv_raw_fused"]
