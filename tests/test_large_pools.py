"""Pools of gigabytes: no address of a write kernel wraps, shown by the IR of pools that are never allocated.

Pallas' Triton lowering offsets a pool with signed 32-bit element counts until it has 2^32 bytes. Counted in single bytes
that goes wrong from 2^31 on, silently; counted in words of two bytes or more it never does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config, equations
from mla_jax.kernels import backend
from triton_ir import triton_kernel

T = 16
GIB = 2**30
SIZES = [1.9, 2.2, 3.9, 4.2, 8.0]
AMD = [pytest.param(arch, marks=pytest.mark.amd) for arch in ("gfx942", "gfx950")]


def pool_of(layout: str, gib: float, *, num_layers: int = 2, **overrides) -> mla.CacheConfig:
    """A config whose latent pool has ``gib`` GiB; of an index layout, its index pool."""
    small = config(layout, num_layers=num_layers, num_pages=2, page_size=64, **overrides)
    index = small.index_layout
    row_bytes = small.layout.row_bytes if index is None else index.token_bytes
    return dataclasses.replace(small, num_pages=int(gib * GIB / (num_layers * 64 * row_bytes)))


def shapes(cache_config: mla.CacheConfig) -> mla.PagedMLACache:
    return jax.eval_shape(lambda: mla.init_cache(cache_config))


def lower_kv(cache_config: mla.CacheConfig, arch: str):
    R, P = cache_config.geometry.kv_lora_rank, cache_config.geometry.qk_rope_head_dim
    parts = (jax.ShapeDtypeStruct((T, width), jnp.bfloat16) for width in (R, P))

    def write(cache, layer, slots, c_kv, k_rope):
        return mla.write_kv(cache, layer, slots, c_kv, k_rope, implementation="pallas")

    layer, slots = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((T,), jnp.int32)
    return backend.lower(write, arch, shapes(cache_config), layer, slots, *parts, donate_argnums=0)


def lower_index(cache_config: mla.CacheConfig, arch: str):
    def write(cache, layer, slots, k):
        return mla.write_index_k(cache, layer, slots, k, implementation="pallas")

    layer, slots = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((T,), jnp.int32)
    k = jax.ShapeDtypeStruct((T, 128), jnp.bfloat16)
    return backend.lower(write, arch, shapes(cache_config), layer, slots, k, donate_argnums=0)


def assert_addressed(lowered, pool, first_byte, row_bytes: int, capacity: int) -> None:
    """Every store of the last rows of the last layer lands on those rows, in elements wider than a byte."""
    kernel = triton_kernel(lowered)
    stores = kernel.stores(layer=pool.shape[0] - 1, slot=lambda t: capacity - 1 - t)
    for store in stores:
        assert store.itemsize == pool.dtype.itemsize > 1
        assert store.offset == "i64" or pool.size <= 2**31, "32-bit offsets of more than 2^31 elements"
    stored = np.sort(np.concatenate([store.bytes for store in stores]))
    assert len(stored) % row_bytes == 0
    rows = len(stored) // row_bytes
    assert rows > 0
    assert np.array_equal(stored, np.sort(np.concatenate([first_byte(capacity - 1 - t) for t in range(rows)])))


def check_kv(layout: str, gib: float, arch: str) -> None:
    cache_config = pool_of(layout, gib)
    pool, W = shapes(cache_config).kv, cache_config.layout.row_bytes
    assert abs(pool.size * pool.dtype.itemsize / GIB - gib) < 0.01

    def row(slot: int) -> np.ndarray:
        return (cache_config.capacity + slot) * W + np.arange(W)

    assert_addressed(lower_kv(cache_config, arch), pool, row, W, cache_config.capacity)


def check_index(layout: str, gib: float, arch: str) -> None:
    cache_config = pool_of(layout, gib, head_dim=128)
    pool, index = shapes(cache_config).index, cache_config.index_layout
    assert pool is not None and index is not None
    assert abs(pool.size * pool.dtype.itemsize / GIB - gib) < 0.01
    key_bytes = 512 if index.dialect is None else 128
    scale_bytes = index.token_bytes - key_bytes

    def token(slot: int) -> np.ndarray:
        page = (cache_config.num_pages + slot // 64) * index.page_bytes
        keys = page + slot % 64 * key_bytes + np.arange(key_bytes)
        return np.concatenate([keys, page + 64 * key_bytes + slot % 64 * scale_bytes + np.arange(scale_bytes)])

    assert_addressed(lower_index(cache_config, arch), pool, token, index.token_bytes, cache_config.capacity)


# Every size for one chip and one layout of each path and word, every layout for another chip at the most dangerous size.
# The full product is marked slow.


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("layout", ["plain_float32", "plain_bfloat16", "raw_e4m3fnuz", "packed_pow2"])
@pytest.mark.amd
def test_no_address_wraps(layout, gib):
    check_kv(layout, gib, "gfx942")


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("layout", ["index_float32", "index_e4m3fnuz_pow2"])
@pytest.mark.amd
def test_no_index_address_wraps(layout, gib):
    check_index(layout, gib, "gfx942")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.amd
def test_no_address_wraps_between_2_and_4_gib(layout):
    check_kv(layout, 2.2, "gfx950")


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.amd
def test_no_index_address_wraps_between_2_and_4_gib(layout):
    check_index(layout, 2.2, "gfx950")


@pytest.mark.parametrize("layout", ["plain_float16", "raw_e4m3fn", "packed_fp32"])
def test_no_address_wraps_on_nvidia(layout):
    check_kv(layout, 3.9, "sm_90")


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("arch", [*AMD, "sm_90"])
@pytest.mark.slow
def test_no_address_wraps_anywhere(arch, gib):
    for layout in LAYOUTS:
        check_kv(layout, gib, arch)
    for layout in INDEX_LAYOUTS:
        check_index(layout, gib, arch)


@pytest.mark.parametrize("num_layers", [1, 61])
@pytest.mark.amd
def test_layers_count_towards_the_size(num_layers):
    cache_config = pool_of("raw_e4m3fnuz", 6.0, num_layers=num_layers)
    (store, *_) = triton_kernel(lower_kv(cache_config, "gfx942")).stores(num_layers - 1, lambda t: 1)
    assert store.first[0] == ((num_layers - 1) * cache_config.capacity + 1) * 576


# ---- the hazard itself -----------------------------------------------------------------------------------------------


def lower_byte_pool(rows: int, arch: str):
    """What not to do: one Pallas row write into a pool of single bytes, through the same backend."""

    def kernel(layer_ref, slots_ref, values_ref, pool_in_ref, pool_ref):
        del layer_ref, pool_in_ref
        pool_ref[slots_ref[0], backend.span(0, 512)] = values_ref[...]

    def write(pool, layer, slots, values):
        return backend.launch(
            kernel,
            name="bytes",
            grid=(1,),
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            aliases={3: 0},
            num_warps=1,
            interpret=False,
        )(layer, slots, values, pool)

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    pool, values = jax.ShapeDtypeStruct((rows, 576), jnp.uint8), jax.ShapeDtypeStruct((512,), jnp.uint8)
    return backend.lower(write, arch, pool, one, one, values, donate_argnums=0)


@pytest.mark.parametrize("arch", [*AMD, "sm_90"])
@pytest.mark.parametrize(("gib", "wraps"), [(1.9, False), (2.2, True), (3.9, True), (4.2, False)])
def test_pool_of_bytes_would_wrap_between_2_and_4_gib(arch, gib, wraps):
    rows = int(gib * GIB) // 576
    (store,) = triton_kernel(lower_byte_pool(rows, arch)).stores(0, lambda t: rows - 1)
    assert store.element == "i8"
    assert store.offset == ("i64" if gib > 4 else "i32")
    right = (rows - 1) * 576 + np.arange(512)
    if wraps:
        # The address is negative: memory of something else, before the pool.
        assert np.array_equal(store.bytes, right - 2**32)
        assert np.all(store.bytes < 0)
    else:
        assert np.array_equal(store.bytes, right)


# ---- rows with an odd number of bytes --------------------------------------------------------------------------------

ODD = {"R": 255, "P": 64}


@pytest.mark.parametrize("gib", [2.2, 3.9])
@pytest.mark.parametrize("arch", [*AMD, "sm_90"])
def test_odd_rows_refuse_the_kernel_where_it_would_wrap(arch, gib):
    cache_config = pool_of("raw_e4m3fn", gib, **ODD)
    assert cache_config.layout.word_dtype == np.uint8
    with pytest.raises(NotImplementedError, match="between 2 and 4 GiB"):
        lower_kv(cache_config, arch)


@pytest.mark.parametrize("gib", [1.9, 4.2])
@pytest.mark.amd
def test_odd_rows_have_a_kernel_where_it_is_right(gib):
    cache_config = pool_of("raw_e4m3fn", gib, **ODD)
    capacity = cache_config.capacity
    stores = triton_kernel(lower_kv(cache_config, "gfx942")).stores(1, lambda t: capacity - 1 - t)
    stored = np.sort(np.concatenate([store.bytes for store in stores]))
    assert stored[-1] == 2 * capacity * 319 - 1
    assert np.all(np.diff(stored) == 1)


def test_odd_rows_take_xla_where_the_kernel_refuses():
    cache_config = pool_of("raw_e4m3fn", 2.2, **ODD)
    arguments = (
        shapes(cache_config),
        *(jax.ShapeDtypeStruct(s, d) for s, d in (((T,), jnp.int32), ((T, 255), jnp.bfloat16), ((T, 64), jnp.bfloat16))),
    )
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu("sm_90")):
        jaxpr = jax.make_jaxpr(lambda cache, *rest: mla.write_kv(cache, 0, *rest))(*arguments)
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert "pallas_call" not in names and "scatter" in names


def test_index_keys_of_odd_width_refuse_the_kernel_where_it_would_wrap():
    cache = shapes(pool_of("index_e4m3fn_pow2", 2.2, head_dim=65))
    arguments = jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T, 65), jnp.bfloat16)

    def write(cache, slots, k):
        return mla.write_index_k(cache, 0, slots, k, implementation="pallas")

    with pytest.raises(NotImplementedError, match="between 2 and 4 GiB"):
        backend.lower(write, "sm_90", cache, *arguments)


@pytest.mark.parametrize(("size", "refused"), [(2**31 - 1, False), (2**31, True), (2**32, True), (2**32 + 1, False)])
def test_refusal_begins_and_ends_exactly(size, refused):
    pool = jax.ShapeDtypeStruct((size,), jnp.uint8)
    if refused:
        with pytest.raises(NotImplementedError, match="single bytes"):
            backend.require_addressable("op", pool)
    else:
        backend.require_addressable("op", pool)
    backend.require_addressable("op", jax.ShapeDtypeStruct((size,), jnp.uint16))


def test_xla_scatters_by_row_and_never_by_byte():
    # Without 64-bit integers a flattened byte index would overflow at 2 GiB.
    for layout, gib in (("raw_e4m3fnuz", 8.0), ("packed_pow2", 3.9)):
        cache_config = pool_of(layout, gib)
        arguments = (
            shapes(cache_config),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((T,), jnp.int32),
            jax.ShapeDtypeStruct((T, 512), jnp.bfloat16),
            jax.ShapeDtypeStruct((T, 64), jnp.bfloat16),
        )
        jaxpr = jax.make_jaxpr(lambda *args: mla.write_kv(*args, implementation="xla"))(*arguments)
        (scatter,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scatter")
        assert scatter.invars[0].aval.shape == cache_config.kv_shape
        assert scatter.params["unique_indices"]
        assert max(cache_config.kv_shape) < 2**31
