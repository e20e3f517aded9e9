"""Checkpoints for tests: transformers' tiny ones with their arrays, and random ones of any family."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import mla_jax as mla
from mla_jax import models
from mla_jax.models.loading import checkpoint_shapes

DATA = Path(__file__).parent / "data"


def config_of(name: str, file: str = "config.json") -> dict:
    """config.json of tests/data/NAME, or another file of its folder."""
    return json.loads((DATA / name / file).read_text())


@functools.cache
def reference(name: str, latent_norm_eps: float | str | None = None) -> tuple[Any, Mapping[str, np.ndarray]]:
    """The model in tests/data/NAME, and transformers' arrays for it. Shared by all tests: do not change the model."""
    with np.load(DATA / name / "reference.npz") as arrays:
        return models.from_pretrained(DATA / name, latent_norm_eps=latent_norm_eps), dict(arrays)


def run(model: models.CausalLM, ids: np.ndarray, **cache: Any):
    """One pass over ids [B, T], T <= 64: the stream [B*T, D], the cache, its slots [B*T], and the blocks' traces."""
    B, T = ids.shape
    config = model.cache_config(num_pages=B + 1, **{"kv_cache_dtype": "float32", **cache})
    tables = jnp.arange(1, B + 1, dtype=jnp.int32)[:, None]
    slots = (tables * 64 + jnp.arange(T, dtype=jnp.int32)).reshape(-1)
    lengths, cu_q_lens = jnp.full(B, T, jnp.int32), jnp.arange(B + 1, dtype=jnp.int32) * T
    tokens = jnp.asarray(ids.reshape(-1), jnp.int32)
    hidden, cache_after, traces = _trace(model, mla.init_cache(config), tokens, slots, tables, lengths, cu_q_lens)
    return hidden, cache_after, slots, traces


QUICK: Mapping[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiler options that halve the time to compile; these models are so small that compiling is all that takes time."""


@contextlib.contextmanager
def quick_programs() -> Iterator[None]:
    """What is compiled meanwhile is compiled as with QUICK: for programs that the library jits itself."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@jax.jit(donate_argnums=1, compiler_options=dict(QUICK))
def _trace(model, cache, tokens, slots, tables, lengths, cu_q_lens):
    return model.trace(tokens, cache, slots, tables, lengths, cu_q_lens)


@functools.cache
def reference_run(name: str, **cache: Any):
    """:func:`run` on the ids of tests/data/NAME, once for all tests."""
    model, arrays = reference(name)
    return run(model, arrays["input_ids"], **cache)


TINY: Mapping[str, Any] = {
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": None,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 40,
    "index_head_dim": 24,
    "index_n_heads": 4,
    "index_topk": 5,
    "intermediate_size": 56,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 18,
    "vocab_size": 64,
}
"""A config to which a family adds its model_type and what is its own. No two widths that could be mixed up are equal."""

YARN: Mapping[str, Any] = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}


def kimi_k25(**changes: Any) -> dict[str, Any]:
    """A config.json with a text part; what the text part leaves out stands beside it."""
    text = {**TINY, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "dtype": None, "eos_token_id": None, **changes}
    parts = {"vision_config": {"hidden_size": 1152}, "media_placeholder_token_id": 7}
    return {"model_type": "kimi_k25", "text_config": text, "dtype": "bfloat16", "eos_token_id": 9, **parts}


def random_checkpoint(folder: Path, rng: np.random.Generator, **config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Writes a random checkpoint of TINY with changes; its config and tensors."""
    config = {**TINY, **config}
    tensors = {}
    for key, shape in checkpoint_shapes(models.parse_config(config)).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            tensors[key] = noise * 0.1 + (0 if key.endswith("bias") else 1)
        else:
            tensors[key] = noise * np.float32(shape[1] ** -0.5)
    write_checkpoint(folder, config, tensors)
    return config, tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
