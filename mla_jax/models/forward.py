"""forward: logits of whole token arrays, through a paged cache that lives for one call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mla_jax import checks
from mla_jax.arrays import ArrayIn
from mla_jax.cache import init_cache
from mla_jax.config import CacheConfig
from mla_jax.devices import Platform
from mla_jax.dispatch import check_implementation
from mla_jax.layout import ScaleMode
from mla_jax.models.model import CausalLM


def forward(
    model: CausalLM,
    tokens: Int32[ArrayIn, "B T"],
    kv_cache_dtype: Any = "auto",
    page_size: int = 64,
    *,
    platform: Platform | None = None,
    scale_mode: ScaleMode = "pow2",
    nsa_kv_cache_store_fp8: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T V"]:
    """Logits of B sequences of T tokens. Every row is written to the cache first and attended to as stored, rounding included.

    Args:
        model: the model.
        tokens: int32[B, T] ids.
        kv_cache_dtype: as in :meth:`CausalLM.cache_config`, as are the arguments up to ``implementation``.
        page_size: tokens a page.
        platform: whose FP8 dialect the cache stores.
        scale_mode: of packed rows and FP8 index keys.
        nsa_kv_cache_store_fp8: packed rows.
        implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

    Returns:
        float32 [B, T, V] logits, natural log.

    Raises:
        ValueError: for tokens that are not [B, T], or (where they are known) not in the vocabulary, a page_size that is no power of
            two, or an unknown implementation.
        TypeError: for tokens that are no integers.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from mla_jax import models
        >>> model = models.abstract_model(models.demo_checkpoint())  # from_pretrained for numbers
        >>> forward = functools.partial(models.forward, page_size=4, platform="cpu")
        >>> jax.eval_shape(forward, model, jnp.array([[72, 105]])).shape
        (1, 2, 256)
    """
    page_size = checks.page_size("forward", page_size)
    check_implementation("forward", implementation)
    if not isinstance(tokens, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
        check_ids("forward", np.asarray(tokens), model.spec.vocab_size)
    tokens = checks.integers("forward", "tokens", tokens, 2)
    num_sequences, num_tokens = tokens.shape
    if tokens.size == 0:
        return jnp.zeros((num_sequences, num_tokens, model.spec.vocab_size), jnp.float32)
    config = model.cache_config(
        num_pages=1 + num_sequences * -(-num_tokens // page_size),
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        platform=platform,
        scale_mode=scale_mode,
        nsa_kv_cache_store_fp8=nsa_kv_cache_store_fp8,
    )
    return _forward(model, tokens, config=config, implementation=implementation)


@jax.jit(static_argnames=("config", "implementation"))
def _forward(model: CausalLM, tokens: Array, *, config: CacheConfig, implementation: str | None) -> Array:
    num_sequences, num_tokens = tokens.shape
    tables = jnp.arange(1, config.num_pages, dtype=jnp.int32).reshape(num_sequences, -1)
    slots = tables[:, :1] * config.page_size + jnp.arange(num_tokens, dtype=jnp.int32)
    logits, _ = model(
        tokens.reshape(-1),
        init_cache(config),
        slots.reshape(-1),
        tables,
        jnp.full((num_sequences,), num_tokens, jnp.int32),
        jnp.arange(num_sequences + 1, dtype=jnp.int32) * num_tokens,
        implementation=implementation,
    )
    return logits.reshape(num_sequences, num_tokens, -1)


def check_ids(op: str, ids: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError where an id is not in [0, vocab_size); the embedding would answer NaN, without saying why."""
    if ids.size and np.issubdtype(ids.dtype, np.integer):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{op}: token ids must be in 0..{vocab_size - 1}, got {low if low < 0 else high}")
