"""Flax Linen users: NNX layers and models inside Linen modules, with the cache as an argument, through flax.nnx.bridge."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge

import mla_jax as mla
from checkpoints import TINY, quick_programs
from mla_jax import layers, models

SPEC = models.parse_config({**TINY, "model_type": "deepseek_v3", "num_hidden_layers": 3})
"""A dense layer and a segment of two with experts."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return random_weights(models.abstract_model(SPEC))


def random_weights(tree: Any) -> Any:
    """Numbers for shapes, without a program for each."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * x.shape[-1] ** -0.5, x.dtype), tree)


def as_params(module: nnx.Module) -> dict[str, Any]:
    """The parameters of an NNX module as Linen keeps them."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def batch(model: models.CausalLM) -> tuple[Any, ...]:
    """Cache, slots, block tables, lengths and cu_q_lens of two sequences, of four and two new tokens."""
    cache = mla.init_cache(model.cache_config(num_pages=3, page_size=16))
    return cache, jnp.int32([16, 17, 18, 19, 32, 33]), jnp.int32([[1], [2]]), jnp.int32([4, 2]), jnp.int32([0, 4, 6])


def compiled(fn, *args: Any) -> Any:
    return jax.jit(fn)(*args)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_model_is_a_linen_module(model):
    linen = bridge.to_linen(models.CausalLM, model.spec, dtype=model.dtype)
    tokens, rest = jnp.arange(6, dtype=jnp.int32), batch(model)
    variables = {"params": as_params(model)}
    shapes = jax.eval_shape(lambda: linen.init(jax.random.key(0), tokens, *rest))
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)
    want = compiled(lambda model, *call: model(*call), model, tokens, *rest)
    got = compiled(linen.apply, variables, tokens, *rest)
    assert_same(got, want)
    logits, cache = got
    assert logits.shape == (6, 64) and isinstance(cache, mla.PagedMLACache)


class Head(nn.Module):
    """A Linen model with one of this library's blocks in the middle."""

    @nn.compact
    def __call__(self, x: jax.Array, cache: mla.PagedMLACache, step: layers.Step) -> tuple[jax.Array, mla.PagedMLACache]:
        x = nn.Dense(SPEC.hidden_size, name="inner")(x)
        x, cache, _ = bridge.to_linen(make_block, name="block")(x, cache, 1, step)
        return nn.Dense(3, name="outer")(x), cache


def make_block(*, rngs: nnx.Rngs) -> layers.Block:
    """The bridge takes a class, or any function that makes a module of ``rngs``."""
    attention = layers.MLAttention(SPEC.hidden_size, SPEC.geometry, rngs=rngs)
    mlp = layers.MLP(SPEC.hidden_size, 24, rngs=rngs)
    return layers.Block(attention, mlp, SPEC.hidden_size, norm_eps=1e-6, dtype=jnp.float32)


@pytest.mark.slow
def test_a_block_is_part_of_a_linen_module(model, rng):
    cache, *places = batch(model)
    x, step = jnp.float32(rng.normal(size=(6, 5))), layers.make_step(*places, rope=SPEC.rope)
    variables = jax.eval_shape(Head().init, jax.random.key(1), x, cache, step)
    params = random_weights(variables["params"])
    assert set(variables) == {"params"} and set(params) == {"inner", "block", "outer"}

    def by_hand(params, x, cache):
        block = make_block(rngs=nnx.Rngs(0))
        nnx.update(block, params["block"])
        x = x @ params["inner"]["kernel"] + params["inner"]["bias"]
        x, cache, _ = block(x, cache, 1, step)
        return x @ params["outer"]["kernel"] + params["outer"]["bias"], cache

    got = compiled(lambda params, x, cache: Head().apply({"params": params}, x, cache, step), params, x, cache)
    assert_same(got, compiled(by_hand, params, x, cache))
    # The block wrote its layer of the cache, and that alone.
    latents = [np.asarray(mla.read_kv(got[1], layer, places[0])[0]) for layer in range(3)]
    assert np.any(latents[1], axis=1).all() and not np.any(latents[0]) and not np.any(latents[2])


@pytest.mark.slow
def test_the_cache_is_in_place_through_linen(model):
    linen = bridge.to_linen(models.CausalLM, SPEC)
    variables = {"params": as_params(model)}
    cache = jax.eval_shape(lambda: mla.init_cache(model.cache_config(num_pages=3000, page_size=16)))
    tokens, rest = jnp.arange(6, dtype=jnp.int32), batch(model)[1:]
    mla.assert_in_place(linen.apply, variables, tokens, cache, *rest, donate_argnums=2)
