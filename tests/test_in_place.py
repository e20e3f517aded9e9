"""Writes happen in place: every pool is aliased, nothing of a pool's size is allocated, and the assertion can fail."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config, temporaries

T = 64
MIB = 2**20


def big(layout: str, times: int = 1, **overrides) -> mla.PagedMLACache:
    """Shapes of a cache whose latent pool has at least 144 MiB, and its index pool too if it has one."""
    small = config(layout, num_pages=2, page_size=64, **overrides)
    index = small.index_layout
    pages = -(-144 * MIB // (2 * 64 * min(small.layout.row_bytes, index.token_bytes if index else 1 << 30)))
    got = dataclasses.replace(small, num_pages=times * pages)
    return jax.eval_shape(lambda: mla.init_cache(got))


def kv_arguments(R: int = 512, P: int = 64):
    bf16 = jnp.bfloat16
    return jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T, R), bf16), jax.ShapeDtypeStruct((T, P), bf16)


LAYER = jax.ShapeDtypeStruct((), jnp.int32)


def write(cache, layer, slots, c_kv, k_rope, implementation):
    return mla.write_kv(cache, layer, slots, c_kv, k_rope, implementation=implementation)


def write_index(cache, layer, slots, k, implementation):
    return mla.write_index_k(cache, layer, slots, k, implementation=implementation)


def assert_in_place_at_any_size(fn, make_cache, *args) -> None:
    """``fn`` is in place, and a pool four times larger needs not a byte of temporaries more."""
    bound = temporaries(fn, make_cache(), *args, donate_argnums=0) + 1
    assert bound < MIB
    mla.assert_in_place(fn, make_cache(times=4), *args, donate_argnums=0, max_temp_bytes=bound)


# Layouts that differ from another here in arithmetic alone; their pools have the same words.
ALIKE = ("raw_e4m3fn", "raw_e5m2", "packed_fp32", "index_e4m3fn_pow2", "index_e4m3fn_fp32", "index_e4m3fnuz_fp32")


def each(layouts):
    return [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in layouts]


@pytest.mark.parametrize("layout", each(LAYOUTS))
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_write_is_in_place(layout, implementation):
    # Every dtype, because XLA treats them differently: on a CPU, jax 0.10 scatters bfloat16 through a float32 copy.
    cache = big(layout)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) >= 144 * MIB
    fn = functools.partial(write, implementation=implementation)
    mla.assert_in_place(fn, cache, LAYER, *kv_arguments(), donate_argnums=0)


@pytest.mark.parametrize("layout", each(INDEX_LAYOUTS))
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_index_write_is_in_place(layout, implementation):
    fn = functools.partial(write_index, implementation=implementation)
    arguments = (LAYER, jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T, 128), jnp.bfloat16))
    mla.assert_in_place(fn, big(layout, head_dim=128), *arguments, donate_argnums=0)


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        ("raw_e4m3fnuz", "xla"),
        ("packed_pow2", "pallas"),
        pytest.param("raw_e4m3fnuz", "pallas", marks=pytest.mark.slow),
        pytest.param("packed_pow2", "xla", marks=pytest.mark.slow),
    ],
)
def test_temporaries_do_not_grow_with_the_pool(layout, implementation):
    fn = functools.partial(write, implementation=implementation)
    assert_in_place_at_any_size(fn, functools.partial(big, layout), LAYER, *kv_arguments())


@pytest.mark.parametrize("layout", ["index_e4m3fnuz_pow2"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_temporaries_of_an_index_write_do_not_grow_with_the_pool(layout, implementation):
    fn = functools.partial(write_index, implementation=implementation)
    arguments = (LAYER, jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((T, 128), jnp.bfloat16))
    assert_in_place_at_any_size(fn, functools.partial(big, layout, head_dim=128), *arguments)


# ---- loops -----------------------------------------------------------------------------------------------------------


def scan_of_writes_and_reads(cache, slots, c_kv, k_rope, k, *, implementation):
    """A step of a model: each layer writes rows and index keys, then reads them back."""

    def layer_step(cache, layer):
        cache = mla.write_kv(cache, layer, slots, c_kv, k_rope, implementation=implementation)
        cache = mla.write_index_k(cache, layer, slots, k, implementation=implementation)
        latent, _ = mla.read_kv(cache, layer, slots)
        keys = mla.read_index_k(cache, layer, slots)
        return cache, latent.sum() + keys.sum()

    return jax.lax.scan(layer_step, cache, jnp.arange(cache.config.num_layers))


def loop_of_scans(cache, slots, c_kv, k_rope, k, *, implementation):
    """Decoding: steps in a while_loop, layers in a scan."""

    def body(state):
        step, cache, total = state
        cache, sums = scan_of_writes_and_reads(cache, slots + step, c_kv, k_rope, k, implementation=implementation)
        return step + 1, cache, total + sums.sum()

    return jax.lax.while_loop(lambda state: state[0] < 5, body, (jnp.int32(0), cache, jnp.float32(0)))


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        ("plain_bfloat16", "xla"),
        ("raw_e4m3fnuz", "pallas"),
        pytest.param("packed_pow2", "xla", marks=pytest.mark.slow),
        ("packed_pow2", "pallas"),
    ],
)
def test_decoding_loop_is_in_place(layout, implementation):
    # Reading after writing in the same step included: a scan over layers inside a loop over steps.
    cache = big(layout, head_dim=128)
    fn = functools.partial(loop_of_scans, implementation=implementation)
    k = jax.ShapeDtypeStruct((T, 128), jnp.bfloat16)
    mla.assert_in_place(fn, cache, *kv_arguments(), k, donate_argnums=0)


# ---- the assertion itself --------------------------------------------------------------------------------------------

xla_write = functools.partial(write, implementation="xla")


def test_undonated_cache_fails():
    with pytest.raises(AssertionError, match="aliased to no output"):
        mla.assert_in_place(xla_write, big("raw_e4m3fn"), LAYER, *kv_arguments())


def test_cache_that_is_not_returned_fails():
    def forget(cache, *rest):
        return mla.read_kv(xla_write(cache, *rest), 0, rest[1])

    # XLA warns that the donated buffers were of no use, which is the point.
    with pytest.warns(UserWarning, match="donated buffers were not usable"), pytest.raises(AssertionError):
        mla.assert_in_place(forget, big("raw_e4m3fn"), LAYER, *kv_arguments(), donate_argnums=0)


def test_one_of_two_caches_undonated_fails():
    def both(one, other, *rest):
        return xla_write(one, *rest), xla_write(other, *rest)

    caches = big("raw_e4m3fn"), big("raw_e4m3fn", times=2)
    mla.assert_in_place(both, *caches, LAYER, *kv_arguments(), donate_argnums=(0, 1))
    with pytest.raises(AssertionError, match="aliased to no output"):
        mla.assert_in_place(both, *caches, LAYER, *kv_arguments(), donate_argnums=1)


def test_cache_inside_a_larger_argument_counts():
    def fn(state, *rest):
        return {"cache": xla_write(state["cache"], *rest), "step": state["step"] + 1}

    state = {"cache": big("raw_e4m3fn"), "step": 3}
    mla.assert_in_place(fn, state, LAYER, *kv_arguments(), donate_argnums=0)
    with pytest.raises(AssertionError):
        mla.assert_in_place(fn, state, LAYER, *kv_arguments())


def test_index_pool_that_is_not_returned_fails():
    # The latent pool alone is returned: half of the cache would be lost.
    def fn(cache, *rest):
        return xla_write(cache, *rest).kv

    mla.assert_in_place(fn, big("raw_e4m3fn"), LAYER, *kv_arguments(), donate_argnums=0)
    with (
        pytest.warns(UserWarning, match="donated buffers were not usable"),
        pytest.raises(AssertionError, match="aliased to no output"),
    ):
        mla.assert_in_place(fn, big("raw_e4m3fn", head_dim=128), LAYER, *kv_arguments(), donate_argnums=0)


def test_layers_as_inputs_and_outputs_of_a_scan_fail():
    # The obvious way to loop over layers: XLA slices each layer out of the pool and stacks a new one.
    def per_layer(cache, slots, c_kv, k_rope):
        one = dataclasses.replace(cache.config, num_layers=1)

        def step(carry, layer_pool):
            layer = mla.PagedMLACache(kv=layer_pool[None], index=None, config=one)
            layer = mla.write_kv(layer, 0, slots, c_kv, k_rope, implementation="xla")
            return carry, layer.kv[0]

        return dataclasses.replace(cache, kv=jax.lax.scan(step, 0, cache.kv)[1])

    with pytest.raises(AssertionError, match="bytes of temporaries"):
        mla.assert_in_place(per_layer, big("raw_e4m3fn"), *kv_arguments(), donate_argnums=0)


def test_copy_for_a_second_use_fails():
    # Aliased, donated and returned, and yet the old pool is still needed afterwards: XLA has to copy it.
    def fn(cache, layer, slots, c_kv, k_rope):
        written = xla_write(cache, layer, slots, c_kv, k_rope)
        return written, mla.read_kv(cache, layer, slots + jnp.int32(written.kv[0, 0, 0, 0]))

    with pytest.raises(AssertionError, match="bytes of temporaries"):
        mla.assert_in_place(fn, big("raw_e4m3fn"), LAYER, *kv_arguments(), donate_argnums=0)


def test_scatter_through_a_transposed_pool_fails():
    # A mere reshape would do on a GPU; on a CPU both jax lines treat it as a bitcast and stay in place.
    def fn(cache, slots, rows):
        flat = jnp.moveaxis(cache.kv, -1, 0).reshape(cache.kv.shape[-1], -1)
        flat = flat.at[:, slots].set(rows.T, mode="drop")
        kv = jnp.moveaxis(flat.reshape(cache.kv.shape[-1], *cache.kv.shape[:-1]), 0, -1)
        return dataclasses.replace(cache, kv=kv)

    rows = jax.ShapeDtypeStruct((T, 144), jnp.uint32)
    with pytest.raises(AssertionError, match="bytes of temporaries"):
        mla.assert_in_place(fn, big("raw_e4m3fn"), kv_arguments()[0], rows, donate_argnums=0)


def test_temporaries_are_bounded_by_the_callers_number():
    def fn(cache, *rest):
        noise = jnp.sort(jnp.cos(jnp.arange(3 * MIB, dtype=jnp.float32)))
        return xla_write(cache, *rest), noise[::1000]

    arguments = big("raw_e4m3fn"), LAYER, *kv_arguments()
    with pytest.raises(AssertionError, match="bytes of temporaries"):
        mla.assert_in_place(fn, *arguments, donate_argnums=0)
    mla.assert_in_place(fn, *arguments, donate_argnums=0, max_temp_bytes=64 * MIB)


def test_nothing_is_consumed_or_run():
    cache = mla.init_cache(config("raw_e4m3fn"))
    x = jnp.ones((T, 576), jnp.bfloat16)
    arguments = cache, 1, jnp.arange(T), x[:, :512], x[:, 512:]
    mla.assert_in_place(xla_write, *arguments, donate_argnums=0)
    assert not cache.kv.is_deleted()
    assert not jnp.any(cache.kv)


def test_arguments_without_a_cache_are_a_callers_mistake():
    with pytest.raises(ValueError, match="PagedMLACache"):
        mla.assert_in_place(lambda x: x, jnp.zeros(3), donate_argnums=0)
