"""Attention and indexer over plain arrays, without a cache: what training needs, differentiable in every float input.

Values and masks are those of the cached operations. Queries are handled a chunk at a time, and a gradient computes the weights of a
chunk again instead of keeping them, so that nothing of the size of all queries times heads times keys lives at once.

Keys that no query can see, and queries that see no key, may hold anything: they change no result and no gradient, and their own
gradients are 0. A NaN that is seen makes the results of those who see it NaN; gradients are then unspecified.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from mla_jax import checks
from mla_jax.arrays import ArrayIn
from mla_jax.online_softmax import NEG_INF

_CHUNK_FLOATS = 2**26
"""Numbers of the largest temporary of a chunk of queries."""


def attention(
    q_latent: Float[ArrayIn, "B T H R"],
    q_rope: Float[ArrayIn, "B T H P"],
    c_kv: Float[ArrayIn, "B S R"],
    k_rope: Float[ArrayIn, "B S P"],
    *,
    softmax_scale: float | Float[ArrayIn, ""],
    causal: bool = True,
    lengths: Int32[ArrayIn, "B"] | None = None,
    segment_ids: Int32[ArrayIn, "B S"] | None = None,
    out_dtype: jnp.dtype | type | str | None = None,
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H"]]:
    """softmax(scale * (q_latent . c + q_rope . k)) c over rows [c | k], those that :func:`mla_jax.mla_decode` would see.

    The T queries are the last of ``lengths`` tokens, so query j sees the first clip(lengths - T + j + 1, 0, S) rows.

    Args:
        q_latent: [B, T, H, R] queries times W_UK; float32, bfloat16 or float16, as all arrays here. Accumulated in float32.
        q_rope: [B, T, H, P] rotated queries; P may be 0.
        c_kv: [B, S, R] latent rows after their norm.
        k_rope: [B, S, P] rotated keys.
        softmax_scale: multiplies the logits. (N + P)^-0.5 in most models, never (R + P)^-0.5; hence no default.
        causal: False: every query sees the first ``lengths`` rows.
        lengths: int32[B], tokens of each sequence, the queries included; None: S.
        segment_ids: int32[B, S], for sequences packed one behind another: a query sees the rows of its own segment alone.
        out_dtype: float32, bfloat16 or float16; None: that of q_latent.

    Returns:
        out [B, T, H, R] and lse float32 [B, T, H], natural log; 0 and -inf for a query that sees nothing.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    The absorbed form of DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> q, k = jnp.zeros((1, 3, 2, 8)), jnp.ones((1, 3, 8))
        >>> loss = lambda c: mla.attention(q, q[..., :4], c, k[..., :4], softmax_scale=0.1)[0].sum()
        >>> value, gradient = jax.jit(jax.value_and_grad(loss))(k)
        >>> float(value), gradient.shape
        (48.0, (1, 3, 8))
    """
    op = "attention"
    q, keys, precision = _queries_and_keys(op, q_latent, q_rope, c_kv, k_rope, softmax_scale)
    B, T, H, _ = q.shape
    S, R = keys.shape[1], np.shape(c_kv)[-1]
    visible, segments = _visibility(op, (B, T, S), causal, lengths, segment_ids)
    q, keys = _without_unseen(q, keys, visible)
    dtype = checks.float_dtype(op, "out_dtype", out_dtype, q_latent.dtype)

    def chunk(q: Array, visible: Array, segments: Array | None) -> tuple[Array, Array]:
        logits = jnp.einsum("bthw,bsw->bths", q, keys, precision=precision)
        weights, lse = _softmax(logits, _mask(visible, segments, segment_ids, S)[:, :, None, :])
        values = _finite(keys[..., :R])
        return jnp.einsum("bths,bsr->bthr", weights, values, precision=precision).astype(dtype), lse

    return _map_queries(chunk, B * H * S, q, visible, segments)


def sparse_attention(
    q_latent: Float[ArrayIn, "B T H R"],
    q_rope: Float[ArrayIn, "B T H P"],
    c_kv: Float[ArrayIn, "B S R"],
    k_rope: Float[ArrayIn, "B S P"],
    positions: Int32[ArrayIn, "B T K"],
    *,
    softmax_scale: float | Float[ArrayIn, ""],
    out_dtype: jnp.dtype | type | str | None = None,
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H"]]:
    """:func:`attention` of each query to the rows at its own ``positions``, as :func:`mla_jax.sparse_mla` does with slots.

    Gradients of ``c_kv`` and ``k_rope`` add up over the queries that list a row; a choice of positions has none.

    Args:
        q_latent: [B, T, H, R] queries times W_UK; float32, bfloat16 or float16, as all arrays here.
        q_rope: [B, T, H, P] rotated queries; P may be 0.
        c_kv: [B, S, R] latent rows after their norm.
        k_rope: [B, S, P] rotated keys.
        positions: int32[B, T, K] in [0, S); others, -1 being the usual filler, are passed over wherever they stand. A position
            listed twice counts twice. Nothing is masked by position.
        softmax_scale: multiplies the logits, as in :func:`attention`.
        out_dtype: float32, bfloat16 or float16; None: that of q_latent.

    Returns:
        out [B, T, H, R] in ``out_dtype`` and lse float32 [B, T, H], natural log; 0 and -inf for a query without a
        valid position.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    DeepSeek sparse attention, DeepSeek-V3.2 report, section 2.1.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mla_jax as mla
        >>> q_latent, q_rope, k_rope = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 3, 4))
        >>> c_kv = jnp.array([1.0, 2.0, 4.0])[:, None] * jnp.ones((1, 3, 8))
        >>> attend = jax.jit(functools.partial(mla.sparse_attention, softmax_scale=0.1))
        >>> out, lse = attend(q_latent, q_rope, c_kv, k_rope, jnp.array([[[0, 2, -1]]]))
        >>> float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 4)  # the mean of 1 and 4, and ln 2
        (2.5, 0.6931)
    """
    op = "sparse_attention"
    q, keys, precision = _queries_and_keys(op, q_latent, q_rope, c_kv, k_rope, softmax_scale)
    places, valid = _places(op, positions, (q.shape[0], q.shape[1], keys.shape[1]))
    R, dtype = np.shape(c_kv)[-1], checks.float_dtype(op, "out_dtype", out_dtype, q_latent.dtype)

    is_gathered, floats_a_query = _form_of_listed(q, keys, places)
    if not is_gathered:
        is_listed = (
            jnp.zeros(keys.shape[:2], jnp.int32).at[jnp.arange(q.shape[0])[:, None, None], places].max(valid.astype(jnp.int32))
        )
        keys = jnp.where(is_listed[..., None] > 0, keys, np.float32(0))

    def chunk(q: Array, places: Array, valid: Array) -> tuple[Array, Array]:
        if is_gathered:
            rows = _listed_rows(keys, places, valid)
            weights, lse = _softmax(jnp.einsum("bthw,btkw->bthk", q, rows, precision=precision), valid[:, :, None, :])
            out = jnp.einsum("bthk,btkr->bthr", weights, _finite(rows[..., :R]), precision=precision)
        else:
            copies = _copies(places, valid, keys.shape[1])[:, :, None, :]
            weights, lse = _softmax(jnp.einsum("bthw,bsw->bths", q, keys, precision=precision), copies > 0, copies)
            out = jnp.einsum("bths,bsr->bthr", weights, _finite(keys[..., :R]), precision=precision)
        return out.astype(dtype), lse

    return _map_queries(chunk, floats_a_query, q, places, valid)


def attention_distribution(
    q_latent: Float[ArrayIn, "B T H R"],
    q_rope: Float[ArrayIn, "B T H P"],
    c_kv: Float[ArrayIn, "B S R"],
    k_rope: Float[ArrayIn, "B S P"],
    *,
    softmax_scale: float | Float[ArrayIn, ""],
    positions: Int32[ArrayIn, "B T K"] | None = None,
    causal: bool = True,
    lengths: Int32[ArrayIn, "B"] | None = None,
    segment_ids: Int32[ArrayIn, "B S"] | None = None,
) -> Float[Array, "B T N"]:
    """Mean over heads of the weights of :func:`attention`: the target that the indexer is trained towards. It has no gradient.

    Equal to the sum over heads, normalised to 1. The weights of all heads are never held at once.

    Args:
        q_latent: [B, T, H, R] queries times W_UK, as in :func:`attention`, as all that is not listed with a shape here.
        q_rope: [B, T, H, P] rotated queries.
        c_kv: [B, S, R] latent rows after their norm.
        k_rope: [B, S, P] rotated keys.
        softmax_scale: multiplies the logits.
        positions: int32[B, T, K]: the weights of :func:`sparse_attention`; causal, lengths and segment_ids then mean nothing.
        causal: False: every query sees the first ``lengths`` rows.
        lengths: int32[B], tokens of each sequence, the queries included; None: S.
        segment_ids: int32[B, S]: a query sees the rows of its own segment alone.

    Returns:
        float32 [B, T, S], or [B, T, K], one weight for each entry of ``positions``; 0 for a query that sees nothing.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    The target of the indexer's loss, DeepSeek-V3.2 report, section 2.1.1.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mla_jax as mla
        >>> q_latent, q_rope, c_kv, k_rope = (jnp.zeros(s) for s in ((1, 2, 2, 8), (1, 2, 2, 4), (1, 2, 8), (1, 2, 4)))
        >>> jax.jit(functools.partial(mla.attention_distribution, softmax_scale=0.1))(q_latent, q_rope, c_kv, k_rope).tolist()
        [[[1.0, 0.0], [0.5, 0.5]]]
    """
    op = "attention_distribution"
    constants = jax.lax.stop_gradient((q_latent, q_rope, c_kv, k_rope, softmax_scale))
    q, keys, precision = _queries_and_keys(op, *constants)
    B, T, H, _ = q.shape
    S = keys.shape[1]
    if positions is not None:
        places, valid = _places(op, positions, (B, T, S))
        is_gathered, floats_a_query = _form_of_listed(q, keys, places)

        def of_listed(q: Array, places: Array, valid: Array) -> Array:
            if is_gathered:
                logits = jnp.einsum("bthw,btkw->bthk", q, _listed_rows(keys, places, valid), precision=precision)
                return jnp.mean(_softmax(logits, valid[:, :, None, :])[0], axis=2)
            logits = jnp.einsum("bthw,bsw->bths", q, keys, precision=precision)
            copies = _copies(places, valid, S)[:, :, None, :]
            _, lse = _softmax(logits, copies > 0, copies)
            p = jnp.mean(jnp.exp(logits - jnp.where(lse == NEG_INF, np.float32(0), lse)[..., None]), axis=2)
            return jnp.where(valid, jnp.take_along_axis(p, places, axis=2), np.float32(0))

        return _map_queries(of_listed, floats_a_query, q, places, valid)
    visible, segments = _visibility(op, (B, T, S), causal, lengths, segment_ids)
    q, keys = _without_unseen(q, keys, visible)

    def of_all(q: Array, visible: Array, segments: Array | None) -> Array:
        logits = jnp.einsum("bthw,bsw->bths", q, keys, precision=precision)
        return jnp.mean(_softmax(logits, _mask(visible, segments, segment_ids, S)[:, :, None, :])[0], axis=2)

    return _map_queries(of_all, B * H * S, q, visible, segments)


def indexer_scores(
    q_index: Float[ArrayIn, "B T h d"],
    head_weights: Float[ArrayIn, "B T h"],
    k_index: Float[ArrayIn, "B S d"],
    *,
    causal: bool = True,
    lengths: Int32[ArrayIn, "B"] | None = None,
    segment_ids: Int32[ArrayIn, "B S"] | None = None,
) -> Float[Array, "B T S"]:
    """score = sum_h w_h * relu(q_h . k), -inf where the query does not see the key; :func:`mla_jax.indexer_logits` on arrays.

    The gradient of relu at 0 is 0.

    Args:
        q_index: [B, T, h, d] rotated queries; float32, bfloat16 or float16, as all arrays here.
        head_weights: [B, T, h] with every constant in them; may be negative.
        k_index: [B, S, d] keys.
        causal: False: every query sees the first ``lengths`` keys.
        lengths: int32[B], tokens of each sequence, the queries included; None: S.
        segment_ids: int32[B, S]: a query sees the keys of its own segment alone.

    Returns:
        float32 [B, T, S].

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    The lightning indexer, DeepSeek-V3.2 report, section 2.1.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> q_index, head_weights = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2, 1))
        >>> k_index = jnp.array([1.0, -1.0])[:, None] * jnp.ones((1, 2, 4))
        >>> jax.jit(mla.indexer_scores)(q_index, head_weights, k_index).tolist()
        [[[4.0, -inf], [4.0, 0.0]]]
    """
    op = "indexer_scores"
    shapes = {"q_index": ("B", "T", "h", "d"), "head_weights": ("B", "T", "h"), "k_index": ("B", "S", "d")}
    q, weights, keys = checks.floats(op, shapes, q_index=q_index, head_weights=head_weights, k_index=k_index)
    precision = _precision(q, keys)
    q, weights, keys = (a.astype(jnp.float32) for a in (q, weights, keys))
    B, T, heads, _ = q.shape
    S = keys.shape[1]
    visible, segments = _visibility(op, (B, T, S), causal, lengths, segment_ids)
    q, keys = _without_unseen(q, keys, visible)
    weights = jnp.where((visible > 0)[..., None], weights, np.float32(0))

    def chunk(q: Array, weights: Array, visible: Array, segments: Array | None) -> Array:
        products = jax.nn.relu(jnp.einsum("bthd,bsd->bths", q, keys, precision=precision))
        # Always at full precision: the order of the scores decides what is attended to.
        scores = jnp.einsum("bths,bth->bts", products, weights, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(_mask(visible, segments, segment_ids, S), scores, NEG_INF)

    return _map_queries(chunk, B * heads * S, q, weights, visible, segments)


def indexer_kl(
    scores: Float[ArrayIn, "B T S"],
    target: Float[ArrayIn, "..."],
    *,
    positions: Int32[ArrayIn, "B T K"] | None = None,
    rows: Bool[ArrayIn, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean over queries of KL(p || softmax(scores)), the loss that aligns the indexer with the attention.

    p is ``target``, summed over heads if it has them, over what the query sees, divided by its sum; it is a constant here. In the
    dense warm-up every visible key counts, in the sparse stage the selected ones alone.

    Args:
        scores: [B, T, S] of :func:`indexer_scores`, -inf where a query does not see a key.
        target: [B, T, S] or [B, T, H, S], attention weights >= 0, of :func:`attention_distribution` for one; what it holds where
            the score is -inf does not count. With ``positions`` its last axis is K.
        positions: int32[B, T, K], the selected keys, -1 for none; None: all visible ones.
        rows: bool[B, T], the queries that count (no padding, say); None: all.

    Returns:
        float32 scalar, natural log; the mean over queries that count, see a key and have weight there, 0 if there are none.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes.

    DeepSeek-V3.2 report, section 2.1.1 (continued pre-training), where it is a sum over queries.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> scores, target = jnp.zeros((1, 1, 2)), jnp.array([[[0.5, 0.5]]])
        >>> float(jax.jit(mla.indexer_kl)(scores, target))  # softmax(scores) is the target
        0.0
        >>> round(float(jax.jit(mla.indexer_kl)(scores, jnp.array([[[1.0, 0.0]]]))), 4)
        0.6931
    """
    op = "indexer_kl"
    (values,) = checks.floats(op, {"scores": ("B", "T", "S")}, scores=scores)
    values = values.astype(jnp.float32)
    B, T, S = values.shape
    if positions is not None:
        places, valid = _places(op, positions, (B, T, S))
        values = jnp.where(valid, jnp.take_along_axis(values, places, axis=2), NEG_INF)
    heads = ("H",) if np.ndim(target) == 4 else ()
    (weights,) = checks.floats(op, {"target": (B, T, *heads, values.shape[2])}, target=target)
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    weights = jnp.sum(weights, axis=2) if heads else weights
    if rows is not None:
        checks.check_shapes(op, {"rows": (B, T)}, rows=rows)
    visible = values != NEG_INF
    p = jnp.where(visible, weights, np.float32(0))
    mass = jnp.sum(p, axis=-1)
    counts = (mass != 0) if rows is None else (mass != 0) & jnp.asarray(rows, jnp.bool_)
    p = p / jnp.where(mass == 0, np.float32(1), mass)[..., None]
    _, lse = _softmax(values, visible)
    log_q = jnp.where(visible, values, np.float32(0)) - jnp.where(lse == NEG_INF, np.float32(0), lse)[..., None]
    log_p = jnp.log(jnp.where(p == 0, np.float32(1), p))
    of_rows = jnp.sum(p * (log_p - log_q), axis=-1)
    total = jnp.sum(jnp.where(counts, of_rows, np.float32(0)))
    return total / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)


def _queries_and_keys(
    op: str, q_latent: Any, q_rope: Any, c_kv: Any, k_rope: Any, softmax_scale: Any
) -> tuple[Float[Array, "B T H W"], Float[Array, "B S W"], jax.lax.Precision | None]:
    """Scaled queries [latent | rope] and keys [c | k] in float32, and the precision of their products."""
    shapes = {
        "q_latent": ("B", "T", "H", "R"),
        "q_rope": ("B", "T", "H", "P"),
        "c_kv": ("B", "S", "R"),
        "k_rope": ("B", "S", "P"),
    }
    arrays = checks.floats(op, shapes, q_latent=q_latent, q_rope=q_rope, c_kv=c_kv, k_rope=k_rope)
    if np.ndim(softmax_scale) != 0:
        raise ValueError(f"{op}: softmax_scale must be a scalar, got softmax_scale.shape={np.shape(softmax_scale)}")
    latent, rope, c, k = (a.astype(jnp.float32) for a in arrays)
    q = jnp.concatenate([latent, rope], axis=-1) * jnp.asarray(softmax_scale, jnp.float32)
    return q, jnp.concatenate([c, k], axis=-1), _precision(*arrays)


def _precision(*arrays: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if any(a.dtype == jnp.float32 for a in arrays) else None


def _visibility(
    op: str, sizes: tuple[int, int, int], causal: bool, lengths: Any, segment_ids: Any
) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"] | None]:
    """How many keys each query may see, from the first on, and its segment."""
    B, T, S = sizes
    counts = jnp.full((B,), S, jnp.int32) if lengths is None else checks.integers(op, "lengths", lengths, 1)
    checks.check_shapes(op, {"lengths": (B,)}, lengths=counts)
    later = jnp.arange(1 - T, 1, dtype=jnp.int32)
    counts = jnp.maximum(counts, 0)[:, None]
    visible = jnp.clip(counts + (later if causal else jnp.zeros_like(later)), 0, S)
    if segment_ids is None:
        return visible, None
    segments = checks.integers(op, "segment_ids", segment_ids, 2)
    checks.check_shapes(op, {"segment_ids": (B, S)}, segment_ids=segments)
    return visible, jnp.take_along_axis(segments, jnp.clip(counts + later - 1, 0, max(S - 1, 0)), axis=1)


def _mask(visible: Int32[Array, "B t"], segments: Int32[Array, "B t"] | None, segment_ids: Any, S: int) -> Bool[Array, "B t S"]:
    mask = jnp.arange(S, dtype=jnp.int32) < visible[..., None]
    return mask if segments is None else mask & (jnp.asarray(segment_ids)[:, None, :] == segments[..., None])


def _without_unseen(
    q: Float[Array, "B T H W"], keys: Float[Array, "B S W"], visible: Int32[Array, "B T"]
) -> tuple[Float[Array, "B T H W"], Float[Array, "B S W"]]:
    """Both with zeros where nothing is seen: a weight of 0 would keep a NaN out of results, but not out of gradients."""
    place = jnp.arange(keys.shape[1], dtype=jnp.int32)
    seen = place < jnp.max(visible, axis=1, initial=0, keepdims=True)
    return jnp.where((visible > 0)[..., None, None], q, np.float32(0)), jnp.where(seen[..., None], keys, np.float32(0))


def _finite(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Values that are not finite as 0: where they are seen, their logit has made the result NaN already."""
    return jnp.where(jnp.isfinite(values), values, np.float32(0))


def _softmax(
    logits: Float[Array, "*lead n"], mask: Bool[Array, "*lead_or_1 n"], copies: Array | None = None
) -> tuple[Float[Array, "*lead n"], Float[Array, "*lead"]]:
    """Weights and lse over the last axis where ``mask``, 0 and -inf where that is nowhere; each key counts ``copies`` times."""
    logits = jnp.where(mask, logits, NEG_INF)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, initial=NEG_INF))
    base = jnp.where(largest == NEG_INF, np.float32(0), largest)  # -inf minus -inf would be NaN
    weights = jnp.exp(logits - base[..., None])
    if copies is not None:
        weights = weights * copies
    total = jnp.sum(weights, axis=-1)
    is_empty = total == 0
    total = jnp.where(is_empty, np.float32(1), total)
    return weights / total[..., None], jnp.where(is_empty, NEG_INF, base + jnp.log(total))


def _places(op: str, positions: Any, sizes: tuple[int, int, int]) -> tuple[Int32[Array, "B T K"], Bool[Array, "B T K"]]:
    """Positions with 0 for those that are none, and which are some."""
    B, T, S = sizes
    places = checks.integers(op, "positions", positions, 3)
    checks.check_shapes(op, {"positions": (B, T, "K")}, positions=places)
    valid = (places >= 0) & (places < S)
    return jnp.where(valid, places, 0), valid


def _listed_rows(keys: Float[Array, "B S W"], places: Int32[Array, "B t K"], valid: Bool[Array, "B t K"]) -> Array:
    rows = jax.vmap(lambda keys, places: keys[places])(keys, places)
    return jnp.where(valid[..., None], rows, np.float32(0))


def _copies(places: Int32[Array, "B t K"], valid: Bool[Array, "B t K"], S: int) -> Float[Array, "B t S"]:
    """How often each position is listed."""
    B, T, _ = places.shape
    b, t = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    return jnp.zeros((B, T, S), jnp.float32).at[b, t, places].add(valid.astype(jnp.float32))


def _form_of_listed(q: Float[Array, "B T H W"], keys: Float[Array, "B S W"], places: Int32[Array, "B T K"]) -> tuple[bool, int]:
    """Whether listed rows are gathered, and the numbers that takes a query. Both forms give the same, but for rounding.

    Gathering moves K rows for each query, and its gradient scatters as many. Where the logits of all keys are fewer numbers than
    those rows, they are computed instead, and each key counts as often as it is listed, mostly not at all.
    """
    (B, _, H, W), S, K = q.shape, keys.shape[1], places.shape[2]
    return (True, B * K * (W + H)) if S > 0 and S * H > K * W else (False, B * S * H)


def _map_queries(fn: Callable[..., Any], floats_a_query: int, *arrays: Array | None) -> Any:
    """``fn`` of the arrays [B, T, ...], as many queries at a time as _CHUNK_FLOATS allow; its gradient runs it again."""
    fn = jax.checkpoint(fn)
    T = next(a for a in arrays if a is not None).shape[1]
    chunk = max(_CHUNK_FLOATS // max(floats_a_query, 1), 1)
    if chunk >= T:
        return fn(*arrays)
    num_chunks = -(-T // chunk)
    chunk = -(-T // num_chunks)

    def split(a: Array) -> Array:
        # Queries that fill up the last chunk are zeros: they see nothing.
        a = jnp.pad(a, ((0, 0), (0, num_chunks * chunk - T)) + ((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(a.shape[0], num_chunks, chunk, *a.shape[2:]), 1, 0)

    def join(a: Array) -> Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], num_chunks * chunk, *a.shape[3:])[:, :T]

    out = jax.lax.map(lambda parts: fn(*parts), jax.tree.map(split, arrays))
    return jax.tree.map(join, out)
