"""Sparse attention: each token attends to the slots listed for it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mla_jax import checks, pallas_attention, ragged
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.devices import target_of
from mla_jax.dispatch import Implementation, dispatch
from mla_jax.online_softmax import Partial, attend, empty_partial, finish
from mla_jax.paged_attention import LatentRows, lane_floats, latent_rows
from mla_jax.queries import Queries, queries

_MAX_LANES = 512
"""Listed slots of a token that are handled together."""


def sparse_mla(
    q_latent: Float[ArrayIn, "T H R"],
    q_rope: Float[ArrayIn, "T H P"],
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    topk_slots: Int32[ArrayIn, "T K"],
    topk_lengths: Int32[ArrayIn, "T"] | None = None,
    softmax_scale: float | Float[ArrayIn, ""] | None = None,
    *,
    k_scale: float | Float[ArrayIn, ""] | None = None,
    sinks: Float[ArrayIn, "H"] | None = None,
    out_dtype: jnp.dtype | type | str | None = None,
    compute: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H R"], Float[Array, "T H"]]:
    """softmax(scale * (q_latent . c + q_rope . k)) c over the cache rows [c | k] at the slots listed for each token.

    A slot is valid iff 0 < slot < capacity; others are passed over wherever they stand, -1 being the usual filler. A slot listed
    twice counts twice. Rows that are not listed may hold anything and change no bit; a NaN in one that is listed makes
    the token's result NaN.

    Args:
        q_latent: [T, H, R] queries times W_UK; float32, bfloat16, float16 or FP8. H is free.
        q_rope: [T, H, P] rotated queries; [T, H, 0] in models without rope.
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar; a traced one out of range sees nothing.
        topk_slots: int32[T, K], as :func:`mla_jax.positions_to_slots` gives them. Nothing is masked by position.
        topk_lengths: int32[T]; lanes from there on are ignored, whatever they hold. None: all K count.
        softmax_scale: multiplies the logits; None: the geometry's.
        k_scale: raw FP8 rows only, the value they were written with; multiplies logits and output.
        sinks: [H] logits without a value, which enter the denominator and never lse.
        out_dtype: float32, bfloat16 or float16; None: that of q_latent, bfloat16 if it is an FP8 type.
        compute: None: products in the type that the rows decode to. "fp8", raw FP8 rows only: queries (each head's with a power of
            two of its own) and softmax weights are rounded to the rows' FP8 type and multiplied with the codes themselves, for
            chips whose matrix units read that type; 3 to 4 % of relative error in e4m3, 7 % in e5m2.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        out [T, H, R] in ``out_dtype`` and lse float32 [T, H], natural log; 0 and -inf for a token without a valid slot.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes, a static layer out of range, a k_scale the layout has no place for, or an
            unknown implementation.
        NotImplementedError: if the named implementation cannot; an ExceptionGroup of all reasons if none can.

    The sparse attention of DeepSeek-V3.2 and GLM-5; indices as in FlashMLA's ``flash_mla_sparse_fwd``.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> c_kv, k_rope = jnp.array([1.0, 2.0, 4.0])[:, None] * jnp.ones((3, 512)), jnp.zeros((3, 64))
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4, 5, 6]), c_kv, k_rope)
        >>> q_latent, q_rope = jnp.zeros((1, 2, 512)), jnp.zeros((1, 2, 64))
        >>> out, lse = jax.jit(mla.sparse_mla)(q_latent, q_rope, cache, 0, jnp.array([[4, 6, -1]]))
        >>> float(out[0, 0, 0]), round(float(lse[0, 0]), 4)  # the mean of 1 and 4, and ln 2
        (2.5, 0.6931)
    """
    op = "sparse_mla"
    check_cache(op, cache)
    index = checks.layer_index(op, layer, cache.config.num_layers)
    slots = checks.integers(op, "topk_slots", topk_slots, 2)
    T = slots.shape[0]
    q = queries(
        op,
        cache,
        (T,),
        q_latent,
        q_rope,
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        sinks=sinks,
        out_dtype=out_dtype,
        compute=compute,
    )
    if topk_lengths is not None:
        lanes = checks.integers(op, "topk_lengths", topk_lengths, 1)
        checks.check_shapes(op, {"topk_lengths": (T,)}, topk_lengths=lanes)
        slots = jnp.where(jnp.arange(slots.shape[1], dtype=jnp.int32) < lanes[:, None], slots, -1)
    target = target_of(cache.kv)
    source = latent_rows(cache, index)
    if q.latent.size == 0 or slots.size == 0:
        return dispatch(op, implementation, target, {"xla": q.nothing, "pallas": q.nothing})
    choices: dict[Implementation, Callable[[], pallas_attention.Attention]] = {
        "xla": lambda: _sparse(q.rounded(), source, slots, cache.config.capacity),
        "pallas": lambda: pallas_attention.sparse(q, source, slots, target),
    }
    return dispatch(op, implementation, target, choices)


def _sparse(
    q: Queries, source: LatentRows, slots: Int32[Array, "T K"], capacity: int
) -> tuple[Float[Array, "T H R"], Float[Array, "T H"]]:
    """Tokens are the lanes, each a block of its own, as they share no rows; a group ends at the last valid slot of any of them."""
    (T, H, R), K = q.latent.shape, slots.shape[1]
    shift, in_page = np.int32(source.page_size.bit_length() - 1), np.int32(source.page_size - 1)
    chunk = min(ragged.chunk_keys(K, 1), _MAX_LANES)
    max_lanes = ragged.power_of_two_below(max(ragged.GROUP_FLOATS // (chunk * lane_floats(R + q.rope.shape[-1], 1, H)), 1))
    plan = ragged.plan(T, 1, max_lanes)
    valid = (slots > 0) & (slots < capacity) & source.layer_exists
    slots = jnp.where(valid, slots, 0)
    slots = jnp.pad(slots, ((0, 0), (0, -K % chunk)))

    def group(slots: Array, latent: Array, rope: Array) -> tuple[Array, Array]:
        slots = slots[:, 0]
        asked = latent.astype(jnp.float32), rope.astype(jnp.float32)
        lane = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
        needed = jnp.max(jnp.where(slots > 0, lane, 0), axis=1, keepdims=True)

        def visit(partial: Partial, start: Int32[Array, ""]) -> Partial:
            places = jax.lax.dynamic_slice_in_dim(slots, start, chunk, axis=1)
            keys = source.gather(places >> shift, places & in_page)
            return attend(partial, *asked, *keys, (places > 0)[:, None, :], q.factor, q.precision, q.coded)

        partial = ragged.fold_chunks(needed, chunk, visit, empty_partial(plan.lanes, 1, H, R))
        return finish(partial, q.k_scale, q.sinks, q.dtype)

    return plan.map(group, slots, q.latent, q.rope)
