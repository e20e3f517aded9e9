"""Logits of the lightning indexer over the index keys of a paged cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from mla_jax import checks, ragged, rows
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.devices import Target, target_of
from mla_jax.dispatch import Implementation, dispatch
from mla_jax.kernels.index_logits import index_logits
from mla_jax.layout import IndexLayout
from mla_jax.online_softmax import NEG_INF
from mla_jax.positions import sequences
from mla_jax.queries import upcast_fp8
from mla_jax.writes import index_facts


def indexer_logits(
    q_index: Float[ArrayIn, "T h d"],
    head_weights: Float[ArrayIn, "T h"],
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    block_tables: Int32[ArrayIn, "S M"],
    lengths: Int32[ArrayIn, "S"],
    cu_q_lens: Int32[ArrayIn, "S1"],
    *,
    implementation: str | None = None,
) -> Float[Array, "T columns"]:
    """logit = sum_h w_h * relu(q_h . k) of each ragged new token and each key of its sequence; -inf where the token sees none.

    Sequence s owns the tokens from cu_q_lens[s] to cu_q_lens[s + 1] - 1; new token j of its n sees the first
    clip(lengths - n + j + 1, 0, M * page_size) keys, but none on pages with ids <= 0 or >= num_pages. A NaN in a key that is seen
    reaches its logit; other keys may hold anything.

    Args:
        q_index: [T, h, d] rotated queries; float32, bfloat16, float16 or FP8.
        head_weights: [T, h], float32, with every constant (h^-0.5, d^-0.5, a query's own scale) in them. May be negative.
        cache: a cache made with ``use_nsa=True``.
        layer: which index layer, an int or a traced int32 scalar; a traced one out of range gives -inf.
        block_tables: int32[S, M], padded with 0 or -1.
        lengths: int32[S], tokens of each sequence, the new ones included.
        cu_q_lens: int32[S + 1], ascending from 0.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        float32 [T, M * page_size]; column p belongs to position p of the token's sequence.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes, a static layer out of range, a cache without index keys, or an unknown implementation.
        NotImplementedError: if the named implementation cannot; an ExceptionGroup of all reasons if none can.

    DeepSeek-V3.2's indexer, as in DeepGEMM's ``fp8_paged_mqa_logits`` with cleaned logits.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu", use_nsa=True,
        ...     kv_cache_dtype="float32",
        ... )
        >>> keys = jnp.array([1.0, 2.0])[:, None] * jnp.ones((2, 128))
        >>> cache = jax.jit(mla.write_index_k)(mla.init_cache(config), 0, jnp.array([4, 5]), keys)
        >>> q_index, head_weights = jnp.ones((1, 32, 128)), jnp.full((1, 32), 1 / (32 * 128))
        >>> batch = jnp.array([[1]]), jnp.array([2]), jnp.array([0, 1])
        >>> jax.jit(mla.indexer_logits)(q_index, head_weights, cache, 0, *batch).tolist()
        [[1.0, 2.0, -inf, -inf]]
    """
    op = "indexer_logits"
    check_cache(op, cache)
    layout, num_layers = index_facts(op, cache)
    index = checks.layer_index(op, layer, num_layers)
    tables, counts, cu = sequences(op, block_tables, lengths, cu_q_lens)
    shapes = {"q_index": ("T", "h", layout.head_dim), "head_weights": ("T", "h")}
    q, weights = checks.floats(op, shapes, q_index=upcast_fp8(q_index), head_weights=head_weights)
    target = target_of(cache.index)
    pool = checks.refuse_vmap(cache.index)
    shape = q.shape[0], tables.shape[1] * layout.page_size
    if q.shape[0] == 0 or tables.size == 0:
        nothing = lambda: jnp.full(shape, NEG_INF)  # noqa: E731
        return dispatch(op, implementation, target, {"xla": nothing, "pallas": nothing})
    choices: dict[Implementation, Callable[[], Array]] = {
        "xla": lambda: _logits(q, weights, pool, layout, index[0], tables, counts, cu),
        "pallas": lambda: _kernel_logits(q, weights, pool, layout, index[0], tables, counts, cu, target),
    }
    return dispatch(op, implementation, target, choices)


def _kernel_logits(
    q: Float[Array, "T h d"],
    head_weights: Float[Array, "T h"],
    pool: Shaped[Array, "layers pages *page"],
    layout: IndexLayout,
    layer: Int32[Array, ""],
    tables: Int32[Array, "S M"],
    lengths: Int32[Array, "S"],
    cu_q_lens: Int32[Array, "S1"],
    target: Target,
) -> Float[Array, "T columns"]:
    """The Pallas kernel's view: each token with its sequence and the number of keys it sees."""
    safe_layer = jnp.clip(layer, 0, pool.shape[0] - 1)
    columns = min(tables.shape[1] * layout.page_size, int(ragged.INT32_MAX))
    owners = ragged.owners(lengths, cu_q_lens, q.shape[0], columns)
    seen = jnp.where(layer == safe_layer, owners.visible, 0)
    # Tokens of no sequence come last; counted to the last sequence they keep the order.
    sequence = jnp.where(owners.owned, owners.sequence, np.int32(tables.shape[0] - 1))
    return index_logits(q, head_weights, pool, layout, safe_layer[None], tables, sequence, seen, target=target)


def _logits(
    q: Float[Array, "T h d"],
    head_weights: Float[Array, "T h"],
    pool: Shaped[Array, "layers pages *page"],
    layout: IndexLayout,
    layer: Int32[Array, ""],
    tables: Int32[Array, "S M"],
    lengths: Int32[Array, "S"],
    cu_q_lens: Int32[Array, "S1"],
) -> Float[Array, "T columns"]:
    """Blocks of tokens are the lanes; each walks over the sequences that occur in it. Keys are gathered by whole pages, as a page
    holds its scales apart from its keys."""
    (T, h, d), (S, M) = q.shape, tables.shape
    page_size, num_pages = layout.page_size, pool.shape[1]
    columns = M * page_size
    safe_layer = jnp.clip(layer, 0, pool.shape[0] - 1)
    owners = ragged.owners(lengths, cu_q_lens, T, min(columns, int(ragged.INT32_MAX)))
    visible = jnp.where(layer == safe_layer, owners.visible, 0)
    block = ragged.block_tokens(T, S)
    width = max(d, block * h)
    plan = ragged.plan(T, block, max(min(ragged.MAX_BLOCK // block, ragged.GROUP_FLOATS // (page_size * width)), 1))
    chunk = max(ragged.chunk_keys(columns, plan.lanes * width), page_size)
    pages_at_once = min(chunk // page_size, M)
    chunk_end = jnp.arange(pages_at_once * page_size, dtype=jnp.int32)
    is_f32 = layout.dialect is None or q.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_f32 else None

    def group(sequence: Array, visible: Array, q: Array, weights: Array) -> Array:
        asked, weights = q.astype(jnp.float32), weights.astype(jnp.float32)

        def sequence_of_each_lane(logits: Array, current: Array, seen: Array) -> Array:
            table = tables[current]

            def visit(logits: Array, start: Int32[Array, ""]) -> Array:
                # The last chunk ends with the table and so may repeat columns of the one before it.
                first = jnp.minimum(start >> np.int32(page_size.bit_length() - 1), M - pages_at_once)
                pages = jax.lax.dynamic_slice_in_dim(table, first, pages_at_once, axis=1)
                good = (pages > 0) & (pages < num_pages)
                stored = pool.at[safe_layer, jnp.where(good, pages, 0)].get(mode="promise_in_bounds")
                keys = rows.decode_index_pages(layout, stored).reshape(plan.lanes, -1, d)
                scores = jnp.einsum("gbhd,gcd->gbhc", asked, keys, precision=precision, preferred_element_type=jnp.float32)
                scores = jnp.where(scores <= 0, np.float32(0), scores)  # lets NaN through
                # Always at full precision: the order of the logits decides what is attended to.
                scores = jnp.einsum("gbhc,gbh->gbc", scores, weights, precision=jax.lax.Precision.HIGHEST)
                begin = first * np.int32(page_size)
                mask = jnp.repeat(good, page_size, axis=1)[:, None, :] & (chunk_end < (seen - begin)[:, :, None])
                old = jax.lax.dynamic_slice_in_dim(logits, begin, chunk_end.size, axis=2)
                return jax.lax.dynamic_update_slice_in_dim(logits, jnp.where(mask, scores, old), begin, axis=2)

            return ragged.fold_chunks(seen, chunk, visit, logits)

        empty = jnp.full((plan.lanes, block, columns), NEG_INF)
        return ragged.fold_sequences(sequence, visible, S, sequence_of_each_lane, empty)

    return plan.map(group, owners.sequence, visible, q, head_weights)
