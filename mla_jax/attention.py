"""Dense attention over a paged cache: decoding a fixed number of new tokens a sequence, and prefilling ragged ones."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mla_jax import checks, pallas_attention, ragged
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.devices import target_of
from mla_jax.dispatch import Implementation, dispatch
from mla_jax.online_softmax import empty_partial, finish
from mla_jax.paged_attention import LatentRows, attend_pages, lane_floats, latent_rows
from mla_jax.positions import sequences
from mla_jax.queries import Queries, queries

Attention = tuple[Float[Array, "*lead H R"], Float[Array, "*lead H"]]


def mla_decode(
    q_latent: Float[ArrayIn, "S Q H R"],
    q_rope: Float[ArrayIn, "S Q H P"],
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    block_tables: Int32[ArrayIn, "S M"],
    lengths: Int32[ArrayIn, "S"],
    softmax_scale: float | Float[ArrayIn, ""] | None = None,
    num_splits: int | None = None,
    *,
    k_scale: float | Float[ArrayIn, ""] | None = None,
    sinks: Float[ArrayIn, "H"] | None = None,
    out_dtype: jnp.dtype | type | str | None = None,
    compute: str | None = None,
    implementation: str | None = None,
) -> Attention:
    """softmax(scale * (q_latent . c + q_rope . k)) c of Q new tokens a sequence, over the cache rows [c | k] they see.

    New token j of a sequence sees the first clip(lengths - Q + j + 1, 0, M * page_size) keys, itself included, so its row must
    have been written before. Keys on pages with ids <= 0 or >= num_pages are invisible. What is not seen may hold anything and
    changes no bit; a NaN that is seen makes the result NaN.

    Args:
        q_latent: [S, Q, H, R] queries times W_UK; float32, bfloat16, float16 or FP8. H is free: the heads of one device will do.
        q_rope: [S, Q, H, P] rotated queries; [S, Q, H, 0] in models without rope.
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar; a traced one out of range sees nothing.
        block_tables: int32[S, M], page ids of each sequence in order, padded with 0 or -1.
        lengths: int32[S], tokens of each sequence, the Q new ones included.
        softmax_scale: multiplies the logits; None: the geometry's.
        num_splits: parts that the keys are divided into by the Pallas kernels, at most one a tile of keys; None: by static shapes,
            layout and chip. XLA does not split.
        k_scale: raw FP8 rows only, the value they were written with; multiplies logits and output.
        sinks: [H] logits without a value, which enter the denominator and never lse.
        out_dtype: float32, bfloat16 or float16; None: that of q_latent, bfloat16 if it is an FP8 type.
        compute: None: products in the type that the rows decode to. "fp8", raw FP8 rows only: queries (each head's with a power of
            two of its own) and softmax weights are rounded to the rows' FP8 type and multiplied with the codes themselves, for
            chips whose matrix units read that type; 3 to 4 % of relative error in e4m3, 7 % in e5m2.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        out [S, Q, H, R] in ``out_dtype`` and lse float32 [S, Q, H], natural log; 0 and -inf for a token that sees nothing.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes, a static layer out of range, num_splits < 1, a k_scale the layout has no
            place for, or an unknown implementation.
        NotImplementedError: if the named implementation cannot; an ExceptionGroup of all reasons if none can.

    The absorbed form of DeepSeek-V2, arXiv 2405.04434, section 2.1; lse as in FlashMLA.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> c_kv, k_rope = 2 * jnp.ones((3, 512)), jnp.zeros((3, 64))
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4, 5, 6]), c_kv, k_rope)
        >>> q_latent, q_rope = jnp.zeros((1, 1, 2, 512)), jnp.zeros((1, 1, 2, 64))
        >>> out, lse = jax.jit(mla.mla_decode)(q_latent, q_rope, cache, 0, jnp.array([[1]]), jnp.array([3]))
        >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 4)  # three equal keys: their mean, and ln 3
        ((1, 1, 2, 512), 2.0, 1.0986)
    """
    op = "mla_decode"
    check_cache(op, cache)
    index = checks.layer_index(op, layer, cache.config.num_layers)
    tables = checks.integers(op, "block_tables", block_tables, 2)
    counts = checks.integers(op, "lengths", lengths, 1)
    q = queries(
        op,
        cache,
        (tables.shape[0], "Q"),
        q_latent,
        q_rope,
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        sinks=sinks,
        out_dtype=out_dtype,
        compute=compute,
    )
    checks.check_shapes(op, {"block_tables": ("S", "M"), "lengths": ("S",)}, block_tables=tables, lengths=counts)
    if num_splits is not None:
        checks.static_int(op, "num_splits", num_splits, 1)
    target = target_of(cache.kv)
    source = latent_rows(cache, index)
    if q.latent.size == 0 or tables.shape[1] == 0:
        return dispatch(op, implementation, target, {"xla": q.nothing, "pallas": q.nothing})
    choices: dict[Implementation, Callable[[], Attention]] = {
        "xla": lambda: _decode(q.rounded(), source, tables, counts),
        "pallas": lambda: pallas_attention.decode(q, source, tables, counts, num_splits, target),
    }
    return dispatch(op, implementation, target, choices)


def mla_prefill(
    q_latent: Float[ArrayIn, "T H R"],
    q_rope: Float[ArrayIn, "T H P"],
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    block_tables: Int32[ArrayIn, "S M"],
    lengths: Int32[ArrayIn, "S"],
    cu_q_lens: Int32[ArrayIn, "S1"],
    softmax_scale: float | Float[ArrayIn, ""] | None = None,
    *,
    k_scale: float | Float[ArrayIn, ""] | None = None,
    sinks: Float[ArrayIn, "H"] | None = None,
    out_dtype: jnp.dtype | type | str | None = None,
    compute: str | None = None,
    implementation: str | None = None,
) -> Attention:
    """:func:`mla_decode` for ragged new tokens: sequence s owns those from cu_q_lens[s] to cu_q_lens[s + 1] - 1.

    New token j of the n of a sequence sees the first clip(lengths - n + j + 1, 0, M * page_size) keys. Tokens past cu_q_lens[-1]
    see nothing. What is said of keys, pages and NaN in :func:`mla_decode` holds here.

    Args:
        q_latent: [T, H, R] queries times W_UK; float32, bfloat16, float16 or FP8. H is free.
        q_rope: [T, H, P] rotated queries; [T, H, 0] in models without rope.
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar; a traced one out of range sees nothing.
        block_tables: int32[S, M], page ids of each sequence in order, padded with 0 or -1.
        lengths: int32[S], tokens of each sequence, the new ones included.
        cu_q_lens: int32[S + 1], ascending from 0.
        softmax_scale: multiplies the logits; None: the geometry's.
        k_scale: raw FP8 rows only, the value they were written with; multiplies logits and output.
        sinks: [H] logits without a value, which enter the denominator and never lse.
        out_dtype: float32, bfloat16 or float16; None: that of q_latent, bfloat16 if it is an FP8 type.
        compute: None: products in the type that the rows decode to. "fp8", raw FP8 rows only: queries (each head's with a power of
            two of its own) and softmax weights are rounded to the rows' FP8 type and multiplied with the codes themselves, for
            chips whose matrix units read that type; 3 to 4 % of relative error in e4m3, 7 % in e5m2.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        out [T, H, R] in ``out_dtype`` and lse float32 [T, H], natural log; 0 and -inf for a token that sees nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`mla_decode`.

    The absorbed form of DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> rows = jnp.ones((3, 512)), jnp.zeros((3, 64))
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4, 5, 8]), *rows)
        >>> q_latent, q_rope = jnp.zeros((3, 2, 512)), jnp.zeros((3, 2, 64))  # two new tokens on page 1, one on page 2
        >>> batch = jnp.array([[1], [2]]), jnp.array([2, 1]), jnp.array([0, 2, 3])
        >>> out, lse = jax.jit(mla.mla_prefill)(q_latent, q_rope, cache, 0, *batch)
        >>> out.shape, [round(float(x), 4) for x in lse[:, 0]]  # ln of the number of keys each token sees
        ((3, 2, 512), [0.0, 0.6931, 0.0])
    """
    op = "mla_prefill"
    check_cache(op, cache)
    index = checks.layer_index(op, layer, cache.config.num_layers)
    tables, counts, cu = sequences(op, block_tables, lengths, cu_q_lens)
    q = queries(
        op,
        cache,
        ("T",),
        q_latent,
        q_rope,
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        sinks=sinks,
        out_dtype=out_dtype,
        compute=compute,
    )
    target = target_of(cache.kv)
    source = latent_rows(cache, index)
    if q.latent.size == 0 or tables.size == 0:
        return dispatch(op, implementation, target, {"xla": q.nothing, "pallas": q.nothing})
    choices: dict[Implementation, Callable[[], Attention]] = {
        "xla": lambda: _prefill(q.rounded(), source, tables, counts, cu),
        "pallas": lambda: pallas_attention.prefill(q, source, tables, counts, cu, target),
    }
    return dispatch(op, implementation, target, choices)


def _decode(q: Queries, source: LatentRows, tables: Int32[Array, "S M"], lengths: Int32[Array, "S"]) -> Attention:
    """Sequences are the lanes; all advance together, as far as the longest needs."""
    S, Q, H, R = q.latent.shape
    columns = source.columns(tables)
    visible = source.decode_visible(tables, lengths, Q)
    chunk = ragged.chunk_keys(columns, S * lane_floats(R + q.rope.shape[-1], Q, H))
    asked = q.latent.astype(jnp.float32), q.rope.astype(jnp.float32)
    every = jnp.arange(S, dtype=jnp.int32)
    partial = attend_pages(empty_partial(S, Q, H, R), asked, q, source, tables, every, visible, chunk)
    return finish(partial, q.k_scale, q.sinks, q.dtype)


def _prefill(
    q: Queries, source: LatentRows, tables: Int32[Array, "S M"], lengths: Int32[Array, "S"], cu_q_lens: Int32[Array, "S1"]
) -> Attention:
    """Blocks of tokens are the lanes; each walks over the sequences that occur in it, and its tokens share the rows."""
    (T, H, R), S = q.latent.shape, tables.shape[0]
    columns = source.columns(tables)
    owners = ragged.owners(lengths, cu_q_lens, T, columns)
    visible = jnp.where(source.layer_exists, owners.visible, 0)
    block = ragged.block_tokens(T, S)
    plan = ragged.plan(T, block, ragged.MAX_BLOCK // block)
    chunk = ragged.chunk_keys(columns, plan.lanes * lane_floats(R + q.rope.shape[-1], block, H))

    def group(sequence: Array, visible: Array, latent: Array, rope: Array) -> Attention:
        asked = latent.astype(jnp.float32), rope.astype(jnp.float32)
        partial = ragged.fold_sequences(
            sequence,
            visible,
            S,
            lambda partial, current, seen: attend_pages(partial, asked, q, source, tables, current, seen, chunk),
            empty_partial(plan.lanes, block, H, R),
        )
        return finish(partial, q.k_scale, q.sinks, q.dtype)

    return plan.map(group, owners.sequence, visible, q.latent, q.rope)
