"""Merging attentions over disjoint keys by their log-sum-exp."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax import checks
from mla_jax.arrays import ArrayIn
from mla_jax.online_softmax import NEG_INF, weigh_sinks


def merge_lse(
    outs: Float[ArrayIn, "N *lead H R"], lses: Float[ArrayIn, "N *lead H"], sinks: Float[ArrayIn, "H"] | None = None
) -> tuple[Float[Array, "*lead H R"], Float[Array, "*lead H"]]:
    """One attention from N over disjoint keys: out = sum_i exp(lse_i) out_i / sum_i exp(lse_i).

    A part with lse -inf is empty: it has no weight, and its out may hold anything. Where every part is empty the result is 0 and
    -inf.

    Args:
        outs: [N, ..., H, R], float32, bfloat16 or float16; merged in float32.
        lses: [N, ..., H], natural log.
        sinks: [H], logits without a value. Give them here or to one attention call, never to both.

    Returns:
        out [..., H, R] in the dtype of ``outs`` and float32 lse [..., H], which the sinks never enter.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    The combine step of FlashMLA's split-KV decode (``csrc/smxx/combine.cu``), with empty parts defined.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> outs = jnp.array([1.0, 5.0])[:, None, None] * jnp.ones((2, 1, 4))  # one key each, of equal logits
        >>> out, lse = jax.jit(mla.merge_lse)(outs, jnp.zeros((2, 1)))
        >>> out.tolist(), round(float(lse[0]), 4)
        ([[3.0, 3.0, 3.0, 3.0]], 0.6931)
    """
    op = "merge_lse"
    if np.ndim(outs) < 3:
        raise ValueError(f"{op}: outs must have at least the axes [N, H, R], got outs.shape={np.shape(outs)}")
    shape = tuple(np.shape(outs))
    parts, weights_log = checks.floats(op, {"outs": shape, "lses": shape[:-1]}, outs=outs, lses=lses)
    if sinks is not None:
        (sinks,) = checks.floats(op, {"sinks": shape[-2:-1]}, sinks=sinks)
    dtype = parts.dtype
    weights_log = weights_log.astype(jnp.float32)
    is_empty = weights_log == NEG_INF
    parts = jnp.where(is_empty[..., None], np.float32(0), parts.astype(jnp.float32))
    largest = jnp.max(weights_log, axis=0, initial=NEG_INF)
    base = jnp.where(largest == NEG_INF, np.float32(0), largest)  # -inf minus -inf would be NaN
    weights = jnp.exp(weights_log - base)
    total = jnp.sum(weights, axis=0)
    all_empty = jnp.all(is_empty, axis=0)
    out = jnp.sum(parts * weights[..., None], axis=0) / jnp.where(all_empty, np.float32(1), total)[..., None]
    lse = jnp.where(all_empty, NEG_INF, base + jnp.log(total))
    return weigh_sinks(out, lse, sinks).astype(dtype), lse
