"""Reads: what is stored inside the pool, zeros outside it, bytes as they are, and the error of a round trip."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import (
    INDEX_LAYOUTS,
    LAYOUTS,
    config,
    equal_nan,
    hard_floats,
    oracle_rows,
    oracle_values,
    row_bytes,
    temporaries,
    with_pages,
    with_rows,
)
from mla_jax import reference

CAPACITY = 64
# Every slot of the pool but a few, in no order, and slots outside it.
SLOTS = np.array([0, 5, -1, 63, 64, 1, 71, -(2**31), 2**31 - 1, 17, 62, -5, 33, 16, 15, 5], np.int32)
INSIDE = (SLOTS >= 0) & (SLOTS < CAPACITY)

read = jax.jit(mla.read_kv, static_argnames="dtype")
raw = jax.jit(mla.raw_rows)
read_index = jax.jit(mla.read_index_k, static_argnames="dtype")


def sized(layout: str, page_size: int = 16, **kwargs) -> mla.CacheConfig:
    return config(layout, page_size=page_size, num_pages=CAPACITY // page_size, **kwargs)


def full_cache(cache_config: mla.CacheConfig, rng) -> mla.PagedMLACache:
    """A cache whose rows the oracle wrote, the whole of the null page included."""
    layout = cache_config.layout
    shape = (cache_config.num_layers, CAPACITY)
    c_kv, k_rope = (hard_floats(rng, (*shape, n), np.float32) for n in (layout.kv_lora_rank, layout.qk_rope_head_dim))
    return with_rows(mla.init_cache(cache_config), oracle_rows(layout, c_kv, k_rope))


def at_slots(rows: np.ndarray) -> np.ndarray:
    """Rows [T, .] of [capacity, .] at SLOTS, zeros outside the pool."""
    got = np.zeros((len(SLOTS), *rows.shape[1:]), rows.dtype)
    got[INSIDE] = rows[SLOTS[INSIDE]]
    return got


# ---- latent rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "R", "P", "page_size"),
    [
        *((layout, 512, 64, 16) for layout in LAYOUTS),
        ("packed_pow2", 256, 32, 1),
        ("packed_fp32", 384, 0, 32),
        ("raw_e4m3fnuz", 33, 7, 2),
        ("plain_bfloat16", 128, 0, 1),
    ],
)
def test_rows_are_dequantised_as_the_oracle_does(layout, R, P, page_size, rng):
    cache = full_cache(sized(layout, page_size, R=R, P=P), rng)
    want = oracle_values(cache.config.layout, row_bytes(cache)[1])
    got = read(cache, np.int32(1), SLOTS)
    for values, expected, width in zip(got, want, (R, P), strict=True):
        assert values.shape == (len(SLOTS), width)
        assert equal_nan(values, at_slots(expected))


@pytest.mark.parametrize("layer", [-1, 2, 2**31 - 1, -(2**31)])
def test_traced_layer_out_of_range_reads_zeros(layer, rng):
    cache = full_cache(sized("packed_pow2"), rng)
    for values in (*read(cache, np.int32(layer), SLOTS), raw(cache, np.int32(layer), SLOTS)):
        assert not np.any(np.asarray(values).view(np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_rows_are_the_stored_bytes(layout, rng):
    cache_config = sized(layout, page_size=2)
    W = cache_config.layout.row_bytes
    noise = rng.integers(0, 256, (2, CAPACITY, W), np.uint8)
    rows = raw(with_rows(mla.init_cache(cache_config), noise), np.int32(1), SLOTS)
    assert rows.dtype == np.uint8 and rows.shape == (len(SLOTS), W)
    np.testing.assert_array_equal(rows, at_slots(noise[1]))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, "text"])
def test_rows_come_back_as_floats_alone(dtype):
    cache = mla.init_cache(sized("raw_e4m3fn", R=64, P=16))
    with pytest.raises(ValueError, match="read_kv: dtype must be None, float32, bfloat16 or float16, got"):
        mla.read_kv(cache, 0, SLOTS, dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, "bfloat16", np.float32])
def test_rows_are_returned_in_the_dtype_asked_for(dtype, rng):
    cache = full_cache(sized("raw_e4m3fn", R=64, P=16), rng)
    want = oracle_values(cache.config.layout, row_bytes(cache)[0])
    for values, expected in zip(read(cache, np.int32(0), SLOTS, dtype=dtype), want, strict=True):
        assert values.dtype == jnp.dtype(dtype)
        # Every value of FP8 is exact in bfloat16 and float16.
        assert equal_nan(np.asarray(values, np.float32), at_slots(expected))


@pytest.mark.parametrize("layout", ["raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2"])
def test_k_scale_multiplies_what_is_read(layout, rng):
    cache = full_cache(sized(layout, R=64, P=16), rng)
    for k_scale in (0.5, 0.3, 3.0):
        want = oracle_values(cache.config.layout, row_bytes(cache)[1], k_scale)
        for values, expected in zip(read(cache, np.int32(1), SLOTS, k_scale=k_scale), want, strict=True):
            assert equal_nan(values, at_slots(expected))


def test_static_layer_and_numpy_slots_read_eagerly(rng):
    cache = full_cache(sized("plain_float32", R=8, P=0), rng)
    c_kv, k_rope = mla.read_kv(cache, 1, SLOTS)
    assert k_rope.shape == (len(SLOTS), 0)
    assert equal_nan(c_kv, at_slots(oracle_values(cache.config.layout, row_bytes(cache)[1])[0]))


def test_no_slots_give_no_rows():
    cache = mla.init_cache(sized("packed_pow2", head_dim=128))
    nothing = np.zeros(0, np.int32)
    c_kv, k_rope = read(cache, np.int32(0), nothing)
    assert (c_kv.shape, k_rope.shape) == ((0, 512), (0, 64))
    assert raw(cache, np.int32(0), nothing).shape == (0, 656)
    assert read_index(cache, np.int32(0), nothing).shape == (0, 128)


def test_reading_costs_what_is_read_and_not_the_pool():
    # https://github.com/sgl-project/sglang/issues/35291: a reader that dequantised the entire pool in each step.
    cache_config = config("packed_pow2", num_pages=2048, page_size=64, head_dim=128)
    cache = jax.eval_shape(lambda: mla.init_cache(cache_config))
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)

    def everything(cache, slots):
        return mla.read_kv(cache, 1, slots), mla.raw_rows(cache, 0, slots), mla.read_index_k(cache, 1, slots)

    assert temporaries(everything, cache, slots) < 2**20


# ---- index keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "head_dim", "page_size"),
    [
        *((layout, 128, 16) for layout in INDEX_LAYOUTS),
        ("index_e4m3fn_pow2", 192, 2),
        ("index_e4m3fnuz_fp32", 96, 1),
        ("index_e4m3fn_fp32", 65, 32),
        ("index_float32", 32, 1),
    ],
)
def test_index_keys_are_dequantised_as_the_oracle_does(layout, head_dim, page_size, rng):
    cache_config = sized(layout, page_size, head_dim=head_dim, R=128, P=0)
    index = cache_config.index_layout
    assert index is not None
    keys = hard_floats(rng, (2, CAPACITY // page_size, page_size, head_dim), np.float32)
    pages = np.stack([[reference.encode_index_page(p, index.dialect, index.scale_mode) for p in ps] for ps in keys])
    cache = with_pages(mla.init_cache(cache_config), pages)
    got = read_index(cache, np.int32(1), SLOTS)
    want = reference.decode_index_page(pages[1], page_size, head_dim, index.dialect).reshape(CAPACITY, head_dim)
    assert got.shape == (len(SLOTS), head_dim)
    assert equal_nan(got, at_slots(want))
    assert not np.any(np.asarray(read_index(cache, np.int32(2), SLOTS)))
    assert read_index(cache, np.int32(1), SLOTS, dtype="bfloat16").dtype == jnp.bfloat16


# ---- round trips -----------------------------------------------------------------------------------------------------

# Half a unit in the last place: relative for normal numbers, absolute below them.
HALF_ULP = {
    "plain_float32": (0.0, 0.0),
    "plain_bfloat16": (2.0**-8, 0.0),
    "plain_float16": (2.0**-11, 2.0**-25),
    "raw_e4m3fn": (2.0**-4, 2.0**-10),
    "raw_e4m3fnuz": (2.0**-4, 2.0**-11),
    "raw_e5m2": (2.0**-3, 2.0**-17),
}


def written_and_read(layout: str, c_kv, k_rope, k_scale=None):
    cache_config = sized(layout, R=c_kv.shape[1], P=k_rope.shape[1])
    slots = np.arange(len(c_kv), dtype=np.int32) + 1

    @jax.jit
    def step(cache):
        cache = mla.write_kv(cache, 1, slots, c_kv, k_rope, k_scale=k_scale)
        return mla.read_kv(cache, 1, slots, k_scale=k_scale)

    return map(np.asarray, step(mla.init_cache(cache_config)))


@pytest.mark.parametrize("layout", HALF_ULP)
def test_round_trip_is_within_half_an_ulp(layout, rng):
    c_kv, k_rope = (rng.standard_normal((40, n)).astype(np.float32) * 2.0 ** rng.integers(-14, 5, (40, n)) for n in (128, 16))
    c_kv, k_rope = c_kv.astype(np.float32), k_rope.astype(np.float32)
    relative, absolute = HALF_ULP[layout]
    for x, got in zip((c_kv, k_rope), written_and_read(layout, c_kv, k_rope), strict=True):
        error = np.abs(got.astype(np.float64) - x)
        assert np.all(error <= np.maximum(relative * np.abs(x), absolute))
        # The bound is tight: numbers with one bit more would stay within half of it.
        if relative:
            assert np.max(error / np.maximum(relative * np.abs(x), absolute)) > 0.9


@pytest.mark.parametrize("layout", ["packed_pow2", "packed_fp32"])
def test_packed_round_trip_is_within_half_an_ulp_of_the_group(layout, rng):
    c_kv = (rng.standard_normal((40, 256)) * 2.0 ** rng.integers(-20, 20, (40, 1))).astype(np.float32)
    k_rope = rng.standard_normal((40, 16)).astype(np.float32)
    latent, rope = written_and_read(layout, c_kv, k_rope)
    np.testing.assert_array_equal(rope, k_rope.astype(ml_dtypes.bfloat16).astype(np.float32))
    amax = np.max(np.abs(c_kv.reshape(40, 2, 128)), axis=-1)
    scale = np.repeat(reference.packed_scale(amax, layout.removeprefix("packed_")), 128, axis=1)
    bound = np.maximum(2.0**-4 * np.abs(c_kv), 2.0**-10 * scale) * (1 + 1e-6)
    assert np.all(np.abs(latent - c_kv) <= bound)


@pytest.mark.parametrize(("layout", "largest"), [("raw_e4m3fn", 448.0), ("raw_e4m3fnuz", 240.0)])
def test_power_of_two_k_scale_changes_nothing_in_the_normal_range(layout, largest, rng):
    # https://github.com/vllm-project/vllm/issues/37054: the scale was folded in on one side only.
    x = rng.standard_normal((20, 80))
    x = (np.sign(x) * np.clip(np.abs(x), 2.0**-5, largest / 2)).astype(np.float32)
    without = written_and_read(layout, x[:, :64], x[:, 64:])
    for a, b in zip(written_and_read(layout, x[:, :64], x[:, 64:], k_scale=0.5), without, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_one_layer_holds_another_does_not(rng):
    cache = mla.init_cache(sized("raw_e4m3fn", R=64, P=16))
    x = rng.standard_normal((3, 80)).astype(np.float32)
    slots = np.array([5, 6, 7], np.int32)
    cache = jax.jit(mla.write_kv)(cache, np.int32(1), slots, x[:, :64], x[:, 64:])
    assert not np.any(np.asarray(read(cache, np.int32(0), slots)[0]))
    assert np.all(np.asarray(read(cache, np.int32(1), slots)[0]) != 0)
