"""Models without weights: released sizes counted against formulas, and what it takes to trace and lower them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mla_jax as mla
from checkpoints import TINY
from helpers import equations
from mla_jax import layers, models
from mla_jax.geometry import NUM_LAYERS

_DEEPSEEK: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}

_YARN: Mapping[str, Any] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

DEEPSEEK_V3: Mapping[str, Any] = {
    **_DEEPSEEK,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}

GLM_5: Mapping[str, Any] = {
    **_DEEPSEEK,
    "model_type": "glm_moe_dsa",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

RELEASED: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v2": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    "glm-5": GLM_5,
    "glm-5.2": {
        **GLM_5,
        "head_dim": 192,
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
        "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
}
"""config.json of releases, without the keys that say nothing about the model."""

PUBLISHED = {"deepseek-v2": 236, "deepseek-v3": 671, "deepseek-v3.2": 672, "glm-5": 744, "glm-5.2": 743}
"""Billions of parameters without multi-token prediction. V2, V3 and GLM-5 as their authors say (arXiv 2405.04434, 2412.19437,
GLM-5's model card); V3.2 is V3 and 0.85 billion of indexers; GLM-5.2 is GLM-5 without 57 of its 78."""


def count(config: Mapping[str, Any]) -> int:
    """The parameters that a config.json describes, term by term from the papers."""
    D, H, R, Q = (config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    N, P, V = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    layers, M, E = (config[key] for key in ("num_hidden_layers", "moe_intermediate_size", "n_routed_experts"))
    queries = D * Q + Q + Q * H * (N + P)
    rows = D * (R + P) + R + R * H * (N + V)
    attention = queries + rows + H * V * D
    indexers = 0
    if "index_n_heads" in config:
        h, d = config["index_n_heads"], config["index_head_dim"]
        own = layers if "index_topk_freq" not in config else 3 + len(range(6, layers, config["index_topk_freq"]))
        indexers = own * (Q * h * d + D * d + 2 * d + D * h)
    dense = 3 * D * config["intermediate_size"]
    has_bias = config["model_type"] != "deepseek_v2"
    experts = 3 * D * M * (E + config["n_shared_experts"]) + E * D + (E if has_bias else 0)
    num_dense = config["first_k_dense_replace"]
    blocks = layers * (attention + 2 * D) + num_dense * dense + (layers - num_dense) * experts
    return blocks + indexers + 2 * config["vocab_size"] * D + D


@pytest.mark.parametrize("name", RELEASED)
def test_full_size_models_have_their_published_size(name):
    model = models.abstract_model(RELEASED[name])
    assert models.parameter_count(model) == count(RELEASED[name])
    assert round(models.parameter_count(model) / 1e9) == PUBLISHED[name]
    assert sum(models.parameter_count(block) for block in model.layers) == models.parameter_count(model.layers)
    leaves = jax.tree.leaves(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # The correction bias is float32 in every release, all else has the config's type.
    assert sum(math.prod(x.shape) for x in leaves if x.dtype != jnp.bfloat16) <= 256 * 78


@pytest.mark.parametrize("name", [name for name in RELEASED if name != "deepseek-v2"])
def test_full_size_specs_have_the_presets_geometry(name):
    preset = mla.GEOMETRIES[name]
    spec = models.parse_config(RELEASED[name])
    assert spec.geometry == preset
    config = models.abstract_model(spec).cache_config(num_pages=4, nsa_kv_cache_store_fp8=True)
    assert (config.num_layers, config.layout.row_bytes) == (spec.num_layers, 656)
    assert spec.num_layers == NUM_LAYERS[name]
    assert config.num_index_layers == {"deepseek-v3": 0, "deepseek-v3.2": 61, "glm-5": 78, "glm-5.2": 21}[name]


@pytest.mark.parametrize(("name", "blocks"), [("deepseek-v3", 2), ("deepseek-v3.2", 2), ("glm-5", 2), ("glm-5.2", 6)])
def test_full_size_models_compile_few_blocks(name, blocks):
    spec = models.parse_config(RELEASED[name])
    assert sum(segment.period for segment in layers.plan_segments(spec.layer_kinds)) == blocks


def step_shapes(model: models.CausalLM, num_pages: int = 64) -> tuple[Any, ...]:
    """Arguments of a decode step of two sequences, as shapes."""
    cache = jax.eval_shape(lambda: mla.init_cache(model.cache_config(num_pages=num_pages, platform="cpu")))
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    return model, ids, cache, ids, jax.ShapeDtypeStruct((2, 32), jnp.int32), ids


def step(model, tokens, cache, slots, tables, lengths):
    return model(tokens, cache, slots, tables, lengths, None)


def test_full_size_models_are_lowered_without_allocating():
    model = models.abstract_model(RELEASED["glm-5.2"])
    lowered = jax.jit(step, donate_argnums=2).lower(*step_shapes(model))
    logits, cache = lowered.out_info
    assert logits.shape == (2, 154880) and cache.kv.shape[0] == 78
    # 78 layers written out would be 13 times as long.
    assert len(lowered.as_text()) < 1_000_000


def primitives(num_layers: int, **changes: Any) -> dict[str, int]:
    """How often each primitive stands in the program of a model of so many layers."""
    config = {**TINY, "model_type": "glm_moe_dsa", "num_hidden_layers": num_layers, "first_k_dense_replace": 3, **changes}
    traced = jax.jit(step).trace(*step_shapes(models.abstract_model(config)))
    names = [eqn.primitive.name for eqn in equations(traced.jaxpr)]
    return {name: names.count(name) for name in sorted(set(names))}


SHARED: Mapping[str, Any] = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


@pytest.mark.parametrize(("changes", "full", "shared"), [({}, 2, 0), (SHARED, 2, 4)], ids=["all full", "shared"])
def test_programs_do_not_grow_with_layers(changes, full, shared):
    few, many = primitives(14, **changes), primitives(78, **changes)
    assert few == many
    # A block has four norms and an indexer has one; the last norm stands before the head.
    assert many["rsqrt"] == 5 * full + 4 * shared + 1


@pytest.mark.slow
def test_a_model_can_be_described_in_three_ways(tmp_path):
    folder = models.demo_checkpoint()
    spec = models.load_spec(folder)
    described = [models.abstract_model(source) for source in (folder, str(folder), spec)]
    assert len({jax.tree.structure(model) for model in described}) == 1
    model = models.from_pretrained(folder)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), jax.tree.leaves(described[0]))
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(model)]
    assert models.parameter_count(model) == models.parameter_count(described[0]) == sum(x.size for x in jax.tree.leaves(model))
    assert models.parameter_count(model.layers[0]) < models.parameter_count(model)
    assert models.abstract_model(spec, "bfloat16").embed_tokens.weight.dtype == jnp.bfloat16
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.abstract_model(tmp_path)
    with pytest.raises(ValueError, match="unknown model_type"):
        models.abstract_model({"model_type": "llama"})
