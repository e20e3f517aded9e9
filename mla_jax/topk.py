"""The k largest logits of each row, with every tie and special value decided."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mla_jax import checks
from mla_jax.arrays import ArrayIn

_NEVER = np.int32(-(2**31))
"""Below the key of every number."""


def select_topk(logits: Float[ArrayIn, "T C"], visible_lengths: Int32[ArrayIn, "T"], k: int) -> Int32[Array, "T k"]:
    """Positions of the k largest logits of each row, in ascending order, then -1.

    NaN stands above +inf, -0 equals +0, ties go to the smaller position. Positions at -inf and those >= visible_lengths are never
    selected, so a row that sees at most k keys selects them all.

    Args:
        logits: [T, C], float32, bfloat16 or float16.
        visible_lengths: int32[T], clipped to [0, C].
        k: how many, a static int; more than C pads with -1.

    Returns:
        int32[T, k].

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes or a negative k.

    The selection of DeepSeek-V3.2's indexer (``index_topk``), which leaves ties unspecified.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> top2 = jax.jit(mla.select_topk, static_argnames="k")
        >>> top2(jnp.array([[1.0, 3.0, 3.0, 9.0], [5.0, 0.0, 0.0, 0.0]]), jnp.array([3, 1]), k=2).tolist()
        [[1, 2], [0, -1]]
    """
    op = "select_topk"
    k = checks.static_int(op, "k", k, 0)
    shapes = {"logits": ("T", "C"), "visible_lengths": ("T",)}
    (values,) = checks.floats(op, shapes, logits=logits)
    visible = checks.integers(op, "visible_lengths", visible_lengths, 1)
    checks.check_shapes(op, shapes, logits=values, visible_lengths=visible)
    T, C = values.shape
    chosen = min(k, C)
    if T == 0 or chosen == 0:
        return jnp.full((T, k), -1, jnp.int32)
    position = jnp.arange(C, dtype=jnp.int32)
    keys = jnp.where(position < visible[:, None], _ordered(values), _NEVER)
    best, places = jax.lax.top_k(keys, chosen)  # of equal keys the one at the smaller index comes first
    places = jnp.where(best > _NEVER, places.astype(jnp.int32), np.int32(2**31 - 1))
    places = jnp.sort(places, axis=1)
    places = jnp.where(places < C, places, -1)
    return jnp.pad(places, ((0, 0), (0, k - chosen)), constant_values=-1)


def _ordered(values: Float[Array, "T C"]) -> Int32[Array, "T C"]:
    """Integers in the order of the numbers: one for both zeros, one for every NaN, and ``_NEVER`` for -inf.

    By bits, as comparing floats may take a subnormal number for zero.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    magnitude = bits & np.int32(0x7FFFFFFF)
    infinity = np.int32(0x7F800000)
    keys = jnp.where(bits < 0, -magnitude, magnitude)
    keys = jnp.where(magnitude > infinity, np.int32(0x7FFFFFFF), keys)
    return jnp.where(keys == -infinity, _NEVER, keys)
