"""Straight-through rounding: numbers as a cache would give them back, with the gradient of the identity."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax import checks, rows
from mla_jax.arrays import ArrayIn
from mla_jax.layout import GROUP, CacheLayout, IndexLayout
from mla_jax.quantize import decode


def straight_through(
    c_kv: Float[ArrayIn, "*lead R"], k_rope: Float[ArrayIn, "*lead P"], layout: CacheLayout
) -> tuple[Float[Array, "*lead R"], Float[Array, "*lead P"]]:
    """Rows as a cache of ``layout`` would give them back, with the gradient of the identity.

    Attention computed from the result sees the rounding of the stored format, while gradients pass as if there were none, also
    where a number was clipped (the straight-through estimator, Bengio et al., arXiv 1308.3432).

    Args:
        c_kv: [..., R], float32, bfloat16 or float16.
        k_rope: [..., P].
        layout: ``config.layout`` of any :class:`mla_jax.CacheConfig`: raw FP8, packed or plain.

    Returns:
        Both, in their own dtypes.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other widths.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> layout = mla.CacheLayout(name="raw_e4m3fn", kv_lora_rank=2, qk_rope_head_dim=1)
        >>> rounded = jax.jit(lambda c: mla.straight_through(c, jnp.zeros(1), layout)[0])
        >>> rounded(jnp.array([1.03, 500.0])).tolist()  # three bits of mantissa, at most 448
        [1.0, 448.0]
        >>> jax.jit(jax.grad(lambda c: rounded(c).sum()))(jnp.array([1.03, 500.0])).tolist()
        [1.0, 1.0]
    """
    op = "straight_through"
    checks.instance(op, "layout", layout, CacheLayout)
    lead = tuple(np.shape(c_kv)[:-1])
    shapes: dict[str, tuple[int | str, ...]] = {"c_kv": (*lead, layout.kv_lora_rank), "k_rope": (*lead, layout.qk_rope_head_dim)}
    arrays = checks.floats(op, shapes, c_kv=c_kv, k_rope=k_rope)
    latent, rope = _with_identity_gradient(lambda c, k: rows.decode_rows(layout, rows.encode_rows(layout, c, k)), *arrays)
    return latent, rope


def straight_through_index(k: Float[ArrayIn, "*lead d"], layout: IndexLayout) -> Float[Array, "*lead d"]:
    """:func:`straight_through` for index keys and ``config.index_layout``.

    Args:
        k: [..., d], float32, bfloat16 or float16.
        layout: ``config.index_layout`` of any :class:`mla_jax.CacheConfig` with ``use_nsa=True``.

    Returns:
        [..., d] in its own dtype.

    Raises:
        TypeError: for other dtypes.
        ValueError: for another width.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> layout = mla.IndexLayout(head_dim=2, page_size=4, dialect="e4m3fn", scale_mode="pow2")
        >>> jax.jit(lambda k: mla.straight_through_index(k, layout))(jnp.array([1.03, 448.0])).tolist()
        [1.0, 448.0]
    """
    checks.instance("straight_through_index", "layout", layout, IndexLayout)
    (keys,) = checks.floats("straight_through_index", {"k": (*np.shape(k)[:-1], layout.head_dim)}, k=k)
    return _with_identity_gradient(lambda k: (_stored_keys(k, layout),), keys)[0]


def _stored_keys(k: Float[Array, "*lead d"], layout: IndexLayout) -> Float[Array, "*lead d"]:
    codes, scales = rows.encode_index_keys(layout, k)
    if layout.dialect is None:
        return k
    scale = jnp.repeat(rows.from_bytes(rows.to_bytes(scales), jnp.float32), GROUP, axis=-1)[..., : layout.head_dim]
    return decode(rows.to_bytes(codes), layout.dialect) * scale


def _with_identity_gradient(stored: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """``stored(*arrays)`` in the arrays' dtypes. Not x + stop_gradient(stored - x), which would round once more."""

    @jax.custom_jvp
    def round_trip(*arrays: Array) -> tuple[Array, ...]:
        return tuple(new.astype(old.dtype) for new, old in zip(stored(*arrays), arrays, strict=True))

    @round_trip.defjvp
    def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return round_trip(*primals), tangents

    return round_trip(*arrays)
