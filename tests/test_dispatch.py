"""The choice of an implementation, and the proof that it is made while tracing and only once."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config, equations
from mla_jax.devices import Target
from mla_jax.dispatch import dispatch
from mla_jax.kernels import backend

CPU, H200, MI300 = Target("cpu"), Target("cuda", "sm_90"), Target("rocm", "gfx942")


def refuse(reason: str):
    def implementation():
        raise NotImplementedError(reason)

    return implementation


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "best"), [(CPU, "xla"), (H200, "mosaic_gpu"), (MI300, "mosaic_gpu")])
def test_none_takes_the_best_of_the_target(target, best):
    choices: Any = {name: (lambda name=name: name) for name in ("xla", "pallas", "mosaic_gpu")}
    assert dispatch("op", None, target, choices) == best


@pytest.mark.parametrize("target", [H200, MI300])
def test_none_falls_back_past_what_refuses(target):
    choices: Any = {"mosaic_gpu": refuse("no"), "pallas": lambda: "pallas", "xla": lambda: "xla"}
    assert dispatch("op", None, target, choices) == "pallas"
    assert dispatch("op", None, target, {"pallas": refuse("no"), "xla": lambda: "xla"}) == "xla"


def test_named_implementation_that_refuses_raises_its_reason():
    with pytest.raises(NotImplementedError, match="too odd"):
        dispatch("op", "pallas", CPU, {"xla": lambda: 1, "pallas": refuse("too odd")})


def test_named_implementation_that_does_not_exist_says_what_does():
    with pytest.raises(NotImplementedError, match=r"op: there is no mosaic_gpu implementation.*xla, pallas"):
        dispatch("op", "mosaic_gpu", H200, {"xla": lambda: 1, "pallas": lambda: 2})


def test_all_reasons_are_raised_together():
    choices: Any = {"xla": refuse("reason one"), "pallas": refuse("reason two"), "mosaic_gpu": refuse("reason three")}
    for target in (CPU, H200):
        with pytest.raises(ExceptionGroup, match="op") as caught:
            dispatch("op", None, target, choices)
        assert {str(e) for e in caught.value.exceptions} == {"reason one", "reason two", "reason three"}
        assert all(isinstance(e, NotImplementedError) for e in caught.value.exceptions)


@pytest.mark.parametrize("name", ["", "cuda", "Pallas", "triton", 3, True])
def test_unknown_name_is_a_value_error(name):
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        dispatch("op", name, CPU, {"xla": lambda: 1})


def test_error_of_an_implementation_is_not_taken_for_a_refusal():
    def broken():
        raise ValueError("caller's mistake")

    with pytest.raises(ValueError, match="caller's mistake"):
        dispatch("op", None, CPU, {"xla": broken, "pallas": lambda: 1})


# ---- the operations --------------------------------------------------------------------------------------------------

T = 6


def write_arguments(cache_config: mla.CacheConfig, num_tokens: int = T):
    R, P = cache_config.geometry.kv_lora_rank, cache_config.geometry.qk_rope_head_dim
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    return (
        jax.eval_shape(lambda: mla.init_cache(cache_config)),
        slots,
        jax.ShapeDtypeStruct((num_tokens, R), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, P), jnp.bfloat16),
    )


def kv_jaxpr(cache_config, implementation, **kwargs):
    def write(cache, slots, c_kv, k_rope, layer):
        return mla.write_kv(cache, layer, slots, c_kv, k_rope, implementation=implementation, **kwargs)

    return jax.make_jaxpr(write)(*write_arguments(cache_config), jax.ShapeDtypeStruct((), jnp.int32))


def index_jaxpr(cache_config, implementation):
    cache, slots, _, _ = write_arguments(cache_config)
    assert cache_config.geometry.indexer is not None
    k = jax.ShapeDtypeStruct((T, cache_config.geometry.indexer.head_dim), jnp.bfloat16)
    write = lambda c, s, k, layer: mla.write_index_k(c, layer, s, k, implementation=implementation)  # noqa: E731
    return jax.make_jaxpr(write)(cache, slots, k, jax.ShapeDtypeStruct((), jnp.int32))


def primitives(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jaxpr)]


CONTROL_FLOW = {"cond", "switch", "while", "scan"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_write_is_one_kernel_without_control_flow(layout, implementation):
    names = primitives(kv_jaxpr(config(layout), implementation))
    assert names.count("pallas_call") == (implementation == "pallas")
    assert not CONTROL_FLOW & set(names)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_write_with_k_scale_is_one_kernel_without_control_flow(implementation):
    for layout in ("raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2"):
        names = primitives(kv_jaxpr(config(layout), implementation, k_scale=0.3))
        assert names.count("pallas_call") == (implementation == "pallas")
        assert not CONTROL_FLOW & set(names)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_index_write_is_one_kernel_without_control_flow(layout, implementation):
    names = primitives(index_jaxpr(config(layout, head_dim=128), implementation))
    assert names.count("pallas_call") == (implementation == "pallas")
    assert not CONTROL_FLOW & set(names)


def test_walk_over_jaxprs_sees_nested_control_flow():
    # The guard above is worth what this walk sees.
    def nested(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.cond(i > 1, jnp.sin, jnp.cos, y), x)

    assert {"cond", "sin", "cos"} <= set(primitives(jax.make_jaxpr(jax.jit(nested))(1.0)))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "gfx942", "gfx950"])
def test_device_and_not_platform_decides_the_implementation(platform):
    # A cache in a chip's dialect is written on any device: XLA on a CPU, the kernel where it lowers.
    got = config("raw_e4m3fn", platform=platform, head_dim=128)
    assert "pallas_call" not in primitives(kv_jaxpr(got, None))
    assert "pallas_call" not in primitives(index_jaxpr(got, None))
    for arch in ("gfx942", "gfx950", "sm_90"):
        with jax.sharding.use_abstract_mesh(backend.abstract_gpu(arch)):
            assert primitives(kv_jaxpr(got, None)).count("pallas_call") == 1
            assert primitives(index_jaxpr(got, None)).count("pallas_call") == 1


def test_pallas_is_interpreted_on_a_cpu_alone():
    def interpret(jaxpr):
        (call,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")
        return bool(call.params["interpret"])

    assert interpret(kv_jaxpr(config("packed_pow2"), "pallas"))
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu("gfx950")):
        assert not interpret(kv_jaxpr(config("packed_pow2"), "pallas"))


def test_target_without_a_kernel_refuses_pallas_and_takes_xla():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=None, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        with pytest.raises(NotImplementedError, match="tpu"):
            kv_jaxpr(config("raw_e4m3fn"), "pallas")
        assert "pallas_call" not in primitives(kv_jaxpr(config("raw_e4m3fn"), None))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_operations_refuse_names_they_do_not_have(num_tokens):
    # With no rows there is nothing to do, and still a wrong name is wrong.
    cache = mla.init_cache(config("raw_e4m3fn", head_dim=128))
    slots, zeros = np.arange(num_tokens, dtype=np.int32), np.zeros((num_tokens, 512), np.float32)
    for name, error in (("mosaic_gpu", NotImplementedError), ("triton", ValueError)):
        with pytest.raises(error, match="write_kv"):
            mla.write_kv(cache, 0, slots, zeros, zeros[:, :64], implementation=name)
        with pytest.raises(error, match="write_index_k"):
            mla.write_index_k(cache, 0, slots, zeros[:, :128], implementation=name)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_operations_need_no_implicit_promotion(implementation):
    # A caller may have switched both off, as many test suites do.
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for layout in LAYOUTS:
            got = config(layout, head_dim=128)
            kv_jaxpr(got, implementation)
            cache, slots, _, _ = write_arguments(got)
            jax.eval_shape(lambda c, s: (mla.read_kv(c, 0, s), mla.raw_rows(c, 1, s)), cache, slots)
        for layout in INDEX_LAYOUTS:
            got = config(layout, head_dim=96)
            index_jaxpr(got, implementation)
            cache, slots, _, _ = write_arguments(got)
            jax.eval_shape(lambda c, s: mla.read_index_k(c, 0, s), cache, slots)
        for layout in ("raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2"):
            kv_jaxpr(config(layout), implementation, k_scale=0.3)


# ---- one trace -------------------------------------------------------------------------------------------------------


def test_equal_configs_trace_once():
    chex.clear_trace_counter()
    spellings = ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), ml_dtypes.bfloat16, np.dtype("bfloat16"), "auto")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def write(cache, slots, c_kv, k_rope):
        return mla.write_kv(cache, 0, slots, c_kv, k_rope)

    zeros = np.zeros((T, 512), ml_dtypes.bfloat16)
    for spelling in spellings:
        # Geometry, config and cache are built anew each time.
        cache = mla.init_cache(config("plain_bfloat16", kv_cache_dtype=spelling))
        cache = write(cache, np.arange(T, dtype=np.int32), zeros, zeros[:, :64])
        write(cache, np.arange(T, dtype=np.int32), zeros, zeros[:, :64])


def test_platforms_of_one_dialect_are_separate_traces():
    # Equal bytes, yet another config: the static data of the pytree says which.
    traces = []

    @jax.jit
    def write(cache, slots, c_kv, k_rope):
        traces.append(cache.config.platform)
        return mla.write_kv(cache, 0, slots, c_kv, k_rope)

    zeros = np.zeros((T, 512), np.float32)
    for platform in ("gfx942", "gfx950", "gfx942", "gfx950"):
        cache = mla.init_cache(config("raw_e4m3fn", platform=platform))
        write(cache, np.arange(T, dtype=np.int32), zeros, zeros[:, :64])
    assert traces == ["gfx942", "gfx950"]


def test_values_never_cause_another_trace():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def write(cache, layer, slots, c_kv, k_rope, k_scale):
        return mla.write_kv(cache, layer, slots, c_kv, k_rope, k_scale=k_scale)

    cache = mla.init_cache(config("raw_e4m3fn"))
    rng = np.random.default_rng(0)
    for layer, k_scale in ((0, 1.0), (1, 0.5), (7, 3.0)):
        x = rng.standard_normal((T, 576), np.float32)
        cache = write(cache, np.int32(layer), rng.integers(-5, 99, T, np.int32), x[:, :512], x[:, 512:], np.float32(k_scale))


def test_config_stays_static_through_replace():
    cache = mla.init_cache(config("raw_e4m3fn"))
    again = dataclasses.replace(cache, kv=cache.kv)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
