"""What the operations refuse, each before anything is computed: dtypes, shapes, layers, slots, k_scale, vmap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import LAYOUTS, config, filled

SLOTS = np.array([5, 1, 0, 63, -1, 64, 17], np.int32)
T = len(SLOTS)
F32 = np.float32

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


@functools.cache
def ones():
    cache = filled(config("raw_e4m3fn"))
    return cache, np.ones((T, 512), np.float32), np.ones((T, 64), np.float32)


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, bool, ml_dtypes.float8_e4m3fn, np.complex64])
def test_inputs_of_other_dtypes_are_type_errors(dtype):
    cache, c_kv, k_rope = filled(config("raw_e4m3fn", head_dim=128)), *ones()[1:]
    with pytest.raises(TypeError, match="c_kv"):
        mla.write_kv(cache, 0, SLOTS, c_kv.astype(dtype), k_rope)
    with pytest.raises(TypeError, match="k_rope"):
        mla.write_kv(cache, 0, SLOTS, c_kv, k_rope.astype(dtype))
    with pytest.raises(TypeError, match="write_index_k: k "):
        mla.write_index_k(cache, 0, SLOTS, c_kv[:, :128].astype(dtype))


@pytest.mark.parametrize(
    ("slots", "c_kv", "k_rope", "names"),
    [
        ((T,), (T, 511), (T, 64), "c_kv"),
        ((T,), (T, 576), (T, 64), "c_kv"),
        ((T,), (T, 512), (T, 0), "k_rope"),
        ((T,), (T, 512), (T, 128), "k_rope"),
        ((T,), (T - 1, 512), (T, 64), "k_rope|c_kv"),
        ((T,), (T, 512), (T + 1, 64), "k_rope"),
        ((T - 1,), (T, 512), (T, 64), "c_kv|slots"),
        ((1,), (T, 512), (T, 64), "c_kv|slots"),
        ((T, 1), (T, 512), (T, 64), "slots"),
        ((), (T, 512), (T, 64), "slots"),
        ((T,), (T, 1, 512), (T, 64), "c_kv"),
        ((T,), (512,), (T, 64), "c_kv"),
    ],
)
@both
def test_wrong_shapes_are_value_errors_that_name_the_array(slots, c_kv, k_rope, names, implementation):
    with pytest.raises(ValueError, match=rf"write_kv: .*({names})"):
        mla.write_kv(
            ones()[0], 0, np.ones(slots, np.int32), np.ones(c_kv, F32), np.ones(k_rope, F32),
            implementation=implementation,
        )  # fmt: skip


def test_wrong_index_width_is_a_value_error():
    cache = mla.init_cache(config("raw_e4m3fn", head_dim=128))
    for shape in ((T, 64), (T - 1, 128), (T, 1, 128)):
        with pytest.raises(ValueError, match="write_index_k"):
            mla.write_index_k(cache, 0, SLOTS, np.ones(shape, F32))


@pytest.mark.parametrize("slots", [SLOTS.astype(F32), SLOTS > 3, "slots", None], ids=["float", "bool", "str", "None"])
def test_slots_that_are_no_integers_are_type_errors(slots):
    cache, c_kv, k_rope = ones()
    with pytest.raises(TypeError, match="slots"):
        mla.write_kv(cache, 0, slots, c_kv, k_rope)


@pytest.mark.parametrize("layer", [-1, 2, 99, np.int64(2)])
def test_static_layer_out_of_range_is_a_value_error(layer):
    cache, c_kv, k_rope = ones()
    for call in (
        lambda: mla.write_kv(cache, layer, SLOTS, c_kv, k_rope),
        lambda: mla.read_kv(cache, layer, SLOTS),
        lambda: mla.raw_rows(cache, layer, SLOTS),
    ):
        with pytest.raises(ValueError, match=rf"layer {int(layer)} is out of range"):
            call()


@pytest.mark.parametrize(
    "layer", [True, np.bool_(True), 1.0, None, "0", jnp.float32(0)], ids=["bool", "np.bool", "float", "None", "str", "jax"]
)
def test_layer_that_is_no_integer_is_a_type_error(layer):
    cache, c_kv, k_rope = ones()
    with pytest.raises(TypeError, match="layer"):
        mla.write_kv(cache, layer, SLOTS, c_kv, k_rope)


def test_layer_that_is_no_scalar_is_a_value_error():
    cache, c_kv, k_rope = ones()
    with pytest.raises(ValueError, match="scalar"):
        mla.write_kv(cache, jnp.zeros(1, jnp.int32), SLOTS, c_kv, k_rope)


@pytest.mark.parametrize("slot", [2**31, 2**32 + 5, -(2**31) - 1, 2**63 - 1])
def test_eager_numpy_slots_beyond_int32_raise(slot):
    # JAX would wrap them: 2^32 + 5 is a live slot then.
    cache, c_kv, k_rope = ones()
    with pytest.raises(ValueError, match="beyond int32"):
        mla.write_kv(cache, 0, np.array([slot], np.int64), c_kv[:1], k_rope[:1])
    with pytest.raises(ValueError, match="beyond int32"):
        mla.read_kv(cache, 0, np.array([slot], np.int64))


def test_cache_without_indexer_refuses_index_keys():
    cache, c_kv, _ = ones()
    with pytest.raises(ValueError, match="use_nsa"):
        mla.write_index_k(cache, 0, SLOTS, c_kv[:, :128])
    with pytest.raises(ValueError, match="use_nsa"):
        mla.read_index_k(cache, 0, SLOTS)


# ---- k_scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("raw_")])
def test_k_scale_is_for_raw_rows_alone(layout):
    cache, c_kv, k_rope = mla.init_cache(config(layout)), np.ones((T, 512), np.float32), np.ones((T, 64), np.float32)
    refused: list[Any] = [0.5, np.float32(2), jnp.float32(1.0), np.ones((), np.float32)]
    accepted: list[Any] = [None, 1.0, 1, np.float32(1)]
    for bad in refused:
        with pytest.raises(ValueError, match=f"k_scale.*{cache.config.layout.name}"):
            mla.write_kv(cache, 0, SLOTS, c_kv, k_rope, k_scale=bad)
        with pytest.raises(ValueError, match=f"k_scale.*{cache.config.layout.name}"):
            mla.read_kv(cache, 0, SLOTS, k_scale=bad)
    for fine in accepted:
        jax.eval_shape(lambda cache, k=fine: mla.write_kv(cache, 0, SLOTS, c_kv, k_rope, k_scale=k), cache)


@pytest.mark.parametrize("k_scale", [0.0, -1.0, np.inf, np.nan, 1e39, 1e-60, np.ones(1, np.float32), np.ones(T)])
def test_impossible_k_scale_is_a_value_error(k_scale):
    cache, c_kv, k_rope = ones()
    with pytest.raises(ValueError, match="k_scale"):
        mla.write_kv(cache, 0, SLOTS, c_kv, k_rope, k_scale=k_scale)


@pytest.mark.parametrize("k_scale", [True, "1.0", [1.0], np.ones((), np.int32)])
def test_k_scale_of_another_type_is_a_type_error(k_scale):
    cache, c_kv, k_rope = ones()
    with pytest.raises(TypeError, match="k_scale"):
        mla.write_kv(cache, 0, SLOTS, c_kv, k_rope, k_scale=k_scale)


# ---- vmap ------------------------------------------------------------------------------------------------------------

# Which arguments of (cache, layer, slots, c_kv, k_rope, k_scale) are batched.
BATCHED = {
    "everything": (0, 0, 0, 0, 0, 0),
    "cache": (0, None, None, None, None, None),
    "layer": (None, 0, None, None, None, None),
    "slots": (None, None, 0, None, None, None),
    "c_kv": (None, None, None, 0, None, None),
    "k_rope": (None, None, None, None, 0, None),
    "k_scale": (None, None, None, None, None, 0),
}


@both
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["plain", "jit inside"])
@pytest.mark.parametrize("axes", BATCHED.values(), ids=BATCHED)
def test_vmap_over_a_write_is_refused(axes, inner, implementation):
    cache, c_kv, k_rope = ones()
    arguments = [cache, np.int32(0), SLOTS, c_kv, k_rope, np.float32(0.5)]
    batched = [
        jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), argument) if axis == 0 else argument
        for argument, axis in zip(arguments, axes, strict=True)
    ]

    def fn(cache, layer, slots, c_kv, k_rope, k_scale):
        return mla.write_kv(cache, layer, slots, c_kv, k_rope, k_scale=k_scale, implementation=implementation)

    with pytest.raises((NotImplementedError, ValueError), match=r"vmap|kv pool"):
        jax.vmap(inner(fn), in_axes=axes)(*batched)


@both
def test_refusal_of_vmap_says_what_to_do_instead(implementation):
    cache, c_kv, k_rope = ones()
    fn = jax.jit(lambda c_kv: mla.write_kv(cache, 0, SLOTS, c_kv, k_rope, implementation=implementation))
    with pytest.raises(NotImplementedError, match=r"cannot be batched with vmap.*scan"):
        jax.vmap(fn)(np.stack([c_kv, c_kv]))


def test_vmap_over_an_index_write_or_a_read_is_refused():
    cache = filled(config("raw_e4m3fn", head_dim=128))
    caches = jax.tree.map(lambda pool: jnp.stack([pool, pool]), cache)
    k = np.ones((2, T, 128), F32)
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda k: mla.write_index_k(cache, 0, SLOTS, k))(k)
    for read in (mla.read_kv, mla.raw_rows, mla.read_index_k):
        with pytest.raises(NotImplementedError, match="vmap"):
            jax.vmap(lambda cache, read=read: read(cache, 0, SLOTS))(caches)
