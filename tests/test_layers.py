"""Layers alone: norms, rotation, routing, experts, indexer and attention against numpy and against transformers' arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import DTypeLike

import mla_jax as mla
import model_reference as ref
from checkpoints import quick_programs, reference
from helpers import assert_same_choice
from mla_jax import layers, models
from mla_jax.layers.moe import sort_into_tiles


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


# --- products and norms -----------------------------------------------------------------------------------------------


def test_linear_uses_pytorchs_layout(rng):
    x, w, b = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=3)
    linear: Any = layers.Linear(7, 3, bias=True, rngs=nnx.Rngs(0))
    assert linear.weight.shape == (3, 7)
    linear.weight[...], linear.bias[...] = jnp.float32(w), jnp.float32(b)
    np.testing.assert_allclose(linear(jnp.float32(x)), x @ w.T + b, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_layers_compute_in_the_type_of_their_input(dtype: DTypeLike):
    def run(x):
        moe = layers.MoE(16, 24, num_shared=1, routing=routing(), rngs=nnx.Rngs(0))
        return [layer(x) for layer in (moe, layers.RMSNorm(16, eps=1e-6), layers.LayerNorm(16, eps=1e-6))]

    assert [y.dtype for y in jax.eval_shape(run, jnp.ones((4, 16), dtype))] == [jnp.dtype(dtype)] * 3


def test_norms_follow_their_formulas(rng):
    x, w, b = 3 + rng.normal(size=(5, 16)), rng.normal(size=16), rng.normal(size=16)
    rms, norm = layers.RMSNorm(16, eps=0.3), layers.LayerNorm(16, eps=0.3)
    rms.weight[...], norm.weight[...], norm.bias[...] = jnp.float32(w), jnp.float32(w), jnp.float32(b)
    np.testing.assert_allclose(rms(jnp.float32(x)), ref.rms_norm(x, w, 0.3), atol=1e-5)
    np.testing.assert_allclose(norm(jnp.float32(x)), ref.layer_norm(x, w, b, 0.3), atol=1e-5)


def test_rms_norm_takes_its_mean_in_float32():
    # 300^2 overflows float16.
    y = layers.RMSNorm(8, eps=0.0)(jnp.full((1, 8), 300, jnp.float16))
    np.testing.assert_array_equal(y, np.ones((1, 8)))


# --- rotation ---------------------------------------------------------------------------------------------------------

PLAIN = layers.RopeSpec(dim=16, theta=10000.0)
YARN = layers.RopeSpec(
    dim=16,
    theta=50000.0,
    yarn=layers.YarnSpec(factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5),
)


def test_frequencies_equal_transformers():
    _, arrays = reference("glm_moe_dsa")
    np.testing.assert_allclose(layers.RopeSpec(dim=16, theta=1e6).frequencies(), arrays["inv_freq"], rtol=1e-6)


@pytest.mark.parametrize("beta_fast", [32.0, 1.0])
def test_yarn_follows_its_formula(beta_fast):
    settings = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "beta_fast": beta_fast, "mscale": 1.0}
    settings |= {"mscale_all_dim": 0.5, "original_max_position_embeddings": 64}
    inverse, amplitude, _ = ref.rope_settings({"qk_rope_head_dim": 16, "rope_parameters": settings})
    yarn = layers.YarnSpec(factor=32.0, original_max_position_embeddings=64, beta_fast=beta_fast, mscale=1.0, mscale_all_dim=0.5)
    rope = layers.RopeSpec(dim=16, theta=50000.0, yarn=yarn)
    np.testing.assert_allclose(rope.frequencies(), inverse, rtol=1e-6)
    assert rope.amplitude == pytest.approx(amplitude) and amplitude > 1.1


def test_yarn_amplitude_without_mscales():
    yarn = layers.YarnSpec(factor=40.0, original_max_position_embeddings=4096)
    assert yarn.amplitude == pytest.approx(1.368888, abs=1e-6)
    stated = layers.YarnSpec(factor=40.0, original_max_position_embeddings=4096, attention_factor=1.5)
    assert stated.amplitude == 1.5


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotate_turns_pairs(rng, rope, interleaved):
    x, positions = rng.normal(size=(7, 3, 16)), rng.integers(0, 60, 7)
    cos, sin = layers.cos_sin(rope, jnp.int32(positions))
    angles = positions[:, None, None] * rope.frequencies().astype(np.float64)
    want = ref.rotate(x, angles, rope.amplitude, interleaved)
    np.testing.assert_allclose(layers.rotate(jnp.float32(x), cos, sin, interleaved=interleaved), want, atol=2e-5)


def test_the_two_orders_are_permutations_of_each_other(rng):
    x = jnp.float32(rng.normal(size=(4, 16)))
    cos, sin = layers.cos_sin(PLAIN, jnp.arange(4))
    turned = layers.to_half_split(layers.rotate(x, cos, sin, interleaved=True))
    np.testing.assert_array_equal(turned, layers.rotate(layers.to_half_split(x), cos, sin, interleaved=False))


def test_rope_width_must_be_even():
    with pytest.raises(ValueError, match="even"):
        layers.RopeSpec(dim=15, theta=1e4)


# --- routing and experts ----------------------------------------------------------------------------------------------


def f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def routing(**changes) -> layers.RoutingSpec:
    base = {"num_experts": 8, "topk": 3, "scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "normalise": True}
    return layers.RoutingSpec(**{**base, "scaling_factor": 2.5, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 4, "topk_group": 2},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        {"model_type": "deepseek_v2", "topk_method": "greedy"},
        {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ],
    ids=["groups", "one group not normalised", "softmax greedy", "softmax groups"],
)
def test_router_follows_its_formula(rng, changes):
    config = {
        "model_type": "deepseek_v3",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 3,
        **changes,
    }
    softmax = config["model_type"] == "deepseek_v2"
    spec = routing(
        scoring="softmax" if softmax else "sigmoid",
        num_groups=config.get("n_group"),
        topk_groups=config.get("topk_group"),
        normalise=config["norm_topk_prob"] and not softmax,
    )
    router: Any = layers.Router(12, spec, rngs=nnx.Rngs(0))
    tensors = {"mlp.gate.weight": f64(router.weight[...])}
    if not softmax:
        router.e_score_correction_bias[...] = jnp.float32(rng.normal(size=8) * 0.3)
        tensors["mlp.gate.e_score_correction_bias"] = f64(router.e_score_correction_bias[...])
    x = rng.normal(size=(33, 12))
    assert_same_choice(jax.jit(lambda m, x: m(x))(router, jnp.float32(x)), ref.route(config, tensors, "mlp", x))


def test_moe_follows_its_formula(rng):
    spec = routing(num_groups=1, topk_groups=1)
    moe: Any = layers.MoE(12, 10, num_shared=2, routing=spec, rngs=nnx.Rngs(0))
    tensors = {"gate.weight": f64(moe.gate.weight[...]), "gate.e_score_correction_bias": np.zeros(8)}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"shared_experts.{name}.weight"] = f64(getattr(moe.shared_experts, name).weight[...])
    gate_up, down = f64(moe.experts.gate_up[...]), f64(moe.experts.down[...])
    for j in range(8):
        gate, up = np.split(gate_up[j].T, 2)
        tensors |= {f"experts.{j}.gate_proj.weight": gate, f"experts.{j}.up_proj.weight": up}
        tensors[f"experts.{j}.down_proj.weight"] = down[j].T
    config = {"model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
    config |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    x = rng.normal(size=(33, 12))
    want = ref.moe(config, {f"mlp.{key}": value for key, value in tensors.items()}, "mlp", x)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(moe, jnp.float32(x)), want, atol=2e-5)


tiles = jax.jit(sort_into_tiles, static_argnums=(1, 2))


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("experts", [[0], [3] * 20, [0, 5, 0, 5, 5, 2], list(range(6)), [5, 4, 3, 2, 1, 0] * 7])
def test_tiles_hold_rows_of_one_expert(experts, tile):
    places, tile_experts = tiles(np.array(experts, np.int32), 6, tile)
    places = np.asarray(places)
    assert len(set(places.tolist())) == len(experts) and places.max() < tile * tile_experts.shape[0]
    np.testing.assert_array_equal(np.asarray(tile_experts)[places // tile], experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 9}, "topk must be in 1..8"),
        ({"num_groups": 3}, "divide num_experts"),
        ({"num_groups": 8}, "at least 2"),
        ({"topk_groups": 5}, "topk_groups must be in 1..4"),
        ({"topk": 5}, "do not fit in 2 groups"),
        ({"scoring": "relu"}, "scoring"),
    ],
)
def test_impossible_routing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        routing(**changes)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_step_positions_of_a_ragged_batch():
    # Three new tokens of a sequence of ten, none of an empty one, one of one, and two rows of padding.
    step = layers.make_step(
        jnp.arange(70, 76),
        jnp.ones((3, 1), jnp.int32),
        jnp.int32([10, 0, 1]),
        jnp.int32([0, 3, 3, 4]),
        PLAIN,
    )
    np.testing.assert_array_equal(step.positions, [7, 8, 9, 0, 0, 0])
    np.testing.assert_array_equal(step.slots, [70, 71, 72, 73, 0, 0])
    np.testing.assert_array_equal(step.valid, [1, 1, 1, 1, 0, 0])


# --- indexer and attention against transformers -----------------------------------------------------------------------


def layer_zero():
    model, arrays = reference("glm_moe_dsa")
    config = model.cache_config(num_pages=3, kv_cache_dtype="float32")
    tables = jnp.int32([[1], [2]])
    slots = (tables * 64 + jnp.arange(40, dtype=jnp.int32)).reshape(-1)
    step = layers.make_step(slots, tables, jnp.int32([40, 40]), jnp.int32([0, 40, 80]), model.spec.rope)
    return model.layers[0].self_attn, arrays, mla.init_cache(config), step


def test_what_the_cache_holds_equals_transformers():
    attention, arrays, _, step = layer_zero()
    x = jnp.asarray(arrays["attn_in_l0"].reshape(80, 64))
    c_kv, k_rope = attention.rows(x, step)
    np.testing.assert_allclose(c_kv, arrays["c_kv_l0"].reshape(80, 32), atol=2e-5)
    np.testing.assert_allclose(k_rope, arrays["k_pe_interleaved_l0"].reshape(80, 16), atol=2e-5)
    np.testing.assert_allclose(attention.indexer.keys(x, step), arrays["index_k_l0"].reshape(80, 32), atol=2e-5)


def test_absorbed_query_equals_transformers():
    attention, arrays, _, _ = layer_zero()
    _, q = attention.queries(jnp.asarray(arrays["attn_in_l0"].reshape(80, 64)))
    absorbed = jnp.einsum("thn,hnr->thr", q[..., :24], attention.w_uk[...], precision="highest")
    np.testing.assert_allclose(absorbed, arrays["q_latent_l0"].reshape(80, 4, 32), atol=5e-5)


def test_indexer_weights_carry_both_constants():
    attention, arrays, _, step = layer_zero()
    x = jnp.asarray(arrays["attn_in_l0"].reshape(80, 64))
    q_latent, _ = attention.queries(x)
    q, weights = attention.indexer.queries(x, q_latent, step)
    products = np.einsum("thd,sd->ths", q[:40], arrays["index_k_l0"][0])
    scores = np.einsum("th,ths->ts", weights[:40], np.maximum(products, 0))
    visible = np.tril(np.ones((40, 40), bool))
    np.testing.assert_allclose(scores[visible], arrays["index_scores_l0"][0][visible], atol=2e-5)


def test_a_layer_that_shares_needs_a_selection():
    _, arrays, cache, step = layer_zero()

    def attend(x):
        shared = layers.MLAttention(64, reference("glm_moe_dsa")[0].spec.geometry, kind="shared", rngs=nnx.Rngs(0))
        assert shared.indexer is None
        return shared(x, cache, 0, step)[0]

    with pytest.raises(ValueError, match="selection of a 'full' layer"):
        jax.eval_shape(attend, arrays["attn_in_l0"].reshape(80, 64))


def test_an_indexer_needs_its_geometry_and_a_query_latent():
    geometry = mla.GEOMETRIES["deepseek-v2-lite"]
    with pytest.raises(ValueError, match="q_lora_rank"):
        nnx.eval_shape(lambda: layers.MLAttention(64, geometry, kind="full", rngs=nnx.Rngs(0)))


def test_an_unknown_kind_of_attention_is_refused():
    with pytest.raises(ValueError, match=r"kind must be one of \('dense', 'full', 'shared'\), got 'sparse'"):
        nnx.eval_shape(lambda: layers.MLAttention(64, mla.GEOMETRIES["glm-5"], kind="sparse", rngs=nnx.Rngs(0)))  # pyright: ignore[reportArgumentType]


def test_modules_of_layers_are_pytrees():
    model, _ = reference("glm_moe_dsa")
    assert isinstance(model, models.CausalLM)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
