"""Attention over latent keys that come a chunk at a time: running maximum, denominator and weighted sum, in float32.

Each of G lanes has B tokens that share the lane's C keys of a chunk; a mask says which token sees which key. Keys that a token
does not see cannot change a bit of its result, whatever they hold: their logits are replaced by -inf. As a value such a key meets a
weight of 0, and 0 times NaN is NaN, so values that are not finite are replaced by 0. A NaN that is seen is not lost by that: it has
made the key's logit NaN, and through it the whole result of the token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mla_jax.kernels.attend import WEIGHT_SCALE
from mla_jax.layout import Dialect
from mla_jax.quantize import decode, encode

NEG_INF = np.float32(-np.inf)


class Partial(NamedTuple):
    """Attention over the keys met so far: sum of weights times values, sum of weights, both relative to exp(largest)."""

    weighted: Float[Array, "G B H R"]
    total: Float[Array, "G B H"]
    largest: Float[Array, "G B H"]


def empty_partial(lanes: int, block: int, heads: int, width: int) -> Partial:
    """No key met yet."""
    lead = (lanes, block, heads)
    return Partial(jnp.zeros((*lead, width), jnp.float32), jnp.zeros(lead, jnp.float32), jnp.full(lead, NEG_INF))


def attend(
    partial: Partial,
    q_latent: Float[Array, "G B H R"],
    q_rope: Float[Array, "G B H P"],
    latent: Float[Array, "G C R"],
    rope: Float[Array, "G C P"],
    mask: Bool[Array, "G B C"],
    factor: Float[Array, ""],
    precision: jax.lax.Precision | None,
    coded: Dialect | None = None,
) -> Partial:
    """``partial`` with C more keys; all numbers float32. ``factor`` multiplies the logits; weights are rounded to ``coded``."""
    logits = jnp.einsum("gbhr,gcr->gbhc", q_latent, latent, precision=precision, preferred_element_type=jnp.float32)
    if rope.shape[-1]:
        logits += jnp.einsum("gbhp,gcp->gbhc", q_rope, rope, precision=precision, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, :, None, :], logits * factor, NEG_INF)

    largest = jnp.maximum(partial.largest, jnp.max(logits, axis=-1))
    # While nothing is seen the maximum is -inf, and -inf minus -inf would be NaN.
    base = jnp.where(largest == NEG_INF, np.float32(0), largest)
    weights = jnp.exp(logits - base[..., None])
    decay = jnp.exp(partial.largest - base)
    some_token_sees = jnp.any(mask, axis=1)[..., None]
    values = jnp.where(jnp.isfinite(latent) & some_token_sees, latent, np.float32(0))
    multiplied = weights
    if coded is not None:
        multiplied = decode(encode(weights * np.float32(WEIGHT_SCALE), coded), coded) * np.float32(1 / WEIGHT_SCALE)
    product = jnp.einsum("gbhc,gcr->gbhr", multiplied, values, precision=precision, preferred_element_type=jnp.float32)
    return Partial(
        weighted=partial.weighted * decay[..., None] + product,
        total=partial.total * decay + jnp.sum(weights, axis=-1),
        largest=largest,
    )


def finish(
    partial: Partial, k_scale: Float[Array, ""] | None, sinks: Float[Array, "H"] | None, dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "G B H R"], Float[Array, "G B H"]]:
    """Output in ``dtype`` and float32 lse; 0 and -inf for a token that saw nothing. ``k_scale`` multiplies the values."""
    is_empty = partial.total == 0
    lse = partial.largest + jnp.log(partial.total)  # -inf for an empty row
    out = partial.weighted / jnp.where(is_empty, np.float32(1), partial.total)[..., None]
    if k_scale is not None:
        out = out * k_scale
    return weigh_sinks(jnp.where(is_empty[..., None], np.float32(0), out), lse, sinks).astype(dtype), lse


def weigh_sinks(
    out: Float[Array, "*lead H R"], lse: Float[Array, "*lead H"], sinks: Float[Array, "H"] | None
) -> Float[Array, "*lead H R"]:
    """out * exp(lse) / (exp(lse) + exp(sinks)): sinks are logits that have no value. Empty rows stay 0."""
    if sinks is None:
        return out
    share = np.float32(1) / (np.float32(1) + jnp.exp(sinks.astype(jnp.float32) - lse))
    return jnp.where((lse == NEG_INF)[..., None], np.float32(0), out * share[..., None])
