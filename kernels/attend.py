"""Attention of blocks of query rows over stored rows, a tile of keys at a time: what decode, prefill and sparse attention share.

A *row* is one head of one token; a block is the rows of one or a few tokens. Each program holds some rows of one block and walks
over the tiles of its share of the keys with a running maximum, denominator and weighted sum (online softmax, Milakov and
Gimelshein 2018; split keys as in Flash-Decoding). A program's numbers depend on its own rows and keys alone.

Keys that a row does not see cannot change a bit of its result. Their logits become -inf. As a value such a key meets a weight of 0,
and 0 times NaN is NaN: rows that no query of the block sees are loaded as zeros, and where the tokens of a block see different
keys, the tiles in which they differ have values that are not finite replaced by 0. A NaN that is seen makes its logit NaN, and
through that the row's result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from mla_jax.devices import Target
from mla_jax.kernels import backend, tiles
from mla_jax.kernels.tuning import AttendTuning
from mla_jax.layout import CacheLayout, Dialect
from mla_jax.quantize import encode_bits, finite_amax

NEG_INF = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)

QUERY_SCALE = 64.0
"""What FP8 queries below 2 are multiplied by: within e4m3fnuz's 240, and far above its subnormals."""
WEIGHT_SCALE = 128.0
"""What FP8 weights, at most 1, are multiplied by."""


class Keys(Protocol):
    """Which stored rows a block's queries see, and in what order.

    ``operands`` reach ``refs`` inside the kernel. One walk over the keys is made for each of ``walks``; ``visible`` says, for a
    walk and the rows of a program, how many keys each row sees; ``fetch`` loads what locates a tile, which the loop does one tile
    ahead; ``place`` turns that into a place.
    """

    @property
    def operands(self) -> Sequence[Any]: ...
    @property
    def differ(self) -> bool:
        """Whether the rows of one program may see different keys."""

    def walks(self, refs: Sequence[Any], block: Any, rows: Any) -> tuple[Any, Any] | None: ...
    def visible(self, refs: Sequence[Any], block: Any, rows: Any, walk: Any) -> Int32[Array, "M"]: ...
    def fetch(self, refs: Sequence[Any], block: Any, walk: Any, tile: Any, size: int) -> Any: ...
    def place(self, located: Any, layer: Any, tile: Any, size: int, limit: Any) -> tiles.Place: ...


@dataclasses.dataclass(frozen=True, eq=False)
class QueryRows:
    """Queries arranged for the tiles of a row format.

    Attributes:
        latent: [blocks, planes, rows, width], rows a multiple of the rows of a program.
        rope: [blocks, rope planes, rows, width], or None.
        factor: float32 [blocks, rows], multiplies the products to logits in base 2.
    """

    latent: Shaped[Array, "blocks planes rows width"]
    rope: Shaped[Array, "blocks planes rows width"] | None
    factor: Float[Array, "blocks rows"]


def arrange_queries(
    latent: Shaped[Array, "blocks rows R"],
    rope: Shaped[Array, "blocks rows P"],
    factor: Float[Array, ""],
    fmt: tiles.RowFormat,
    program_rows: int,
) -> QueryRows:
    """Queries in the types and planes of ``fmt``. For float16 and FP8 each row is divided by a power of two, so that it fits."""
    logit_factor = factor * LOG2_E * np.float32(fmt.factor)
    factors = jnp.broadcast_to(logit_factor, latent.shape[:2])
    if fmt.dtype == jnp.float16 or fmt.coded:
        amax = jnp.maximum(finite_amax(latent), finite_amax(rope)) if rope.shape[-1] else finite_amax(latent)
        power, reciprocal = tiles.fit_float16(amax)
        latent, rope = (part.astype(jnp.float32) * reciprocal[..., None] for part in (latent, rope))
        factors = factors * power
    if fmt.coded:
        assert fmt.dialect is not None
        factors = factors * np.float32(1 / QUERY_SCALE)
        latent, rope = (_coded(part * np.float32(QUERY_SCALE), fmt.dialect) for part in (latent, rope))

    def widened(x: Array, dtype: Any) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % program_rows), (0, 0)))
        return x if fmt.coded else x.astype(dtype)

    return QueryRows(
        jnp.swapaxes(fmt.split_latent(widened(latent, fmt.dtype)), 1, 2),
        None if fmt.rope is None else jnp.swapaxes(tiles.split(widened(rope, fmt.rope_dtype), fmt.arrangement(fmt.rope)), 1, 2),
        jnp.pad(factors, ((0, 0), (0, -factors.shape[1] % program_rows))),
    )


def _coded(x: Float[Array, "*lead"], dialect: Dialect) -> UInt8[Array, "*lead"]:
    """FP8 codes of numbers."""
    return encode_bits(x, dialect, source=x).astype(jnp.uint8)


def attend(
    q: QueryRows,
    keys: Keys,
    pool: Shaped[Array, "layers pages page words"],
    layout: CacheLayout,
    fmt: tiles.RowFormat,
    layer: Int32[Array, "1"],
    value_factor: Float[Array, "1"],
    num_splits: int,
    out_dtype: Any,
    *,
    name: str,
    tuning: AttendTuning,
    target: Target,
) -> tuple[Shaped[Array, "splits blocks planes rows width"], Float[Array, "splits blocks rows"]]:
    """Output planes in ``out_dtype`` and natural-log lse of each split; 0 and -inf where a row saw none of its keys."""
    blocks, planes, rows, width = q.latent.shape
    row_blocks = rows // tuning.rows
    size = tuning.keys
    interpret = backend.require(name, target)
    rope_planes = 0 if q.rope is None else q.rope.shape[1]
    if layout.is_plain:
        pool = jax.lax.bitcast_convert_type(pool, layout.number_dtype)
    precision = jax.lax.Precision.HIGHEST if fmt.dtype == jnp.float32 else None
    # The numbers divided are never negative, which `//` would guard against.
    div = jax.lax.div

    def dot(a: Any, b: Any, transpose_b: bool) -> Any:
        contract = ((1,), (1 if transpose_b else 0,))
        if fmt.coded:
            a, b = (jax.lax.bitcast_convert_type(x, fmt.dtype) for x in (a, b))
        return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def kernel(layer_ref: Any, value_factor_ref: Any, latent_ref: Any, factor_ref: Any, *refs: Any) -> None:
        rope_ref = refs[0] if rope_planes else None
        key_refs = refs[bool(rope_planes) : bool(rope_planes) + len(keys.operands)]
        pool_ref, out_ref, lse_ref = refs[-3:]
        program = backend.program_id(0)
        block = div(program, np.int32(row_blocks * num_splits))
        part = jax.lax.rem(program, np.int32(row_blocks * num_splits))
        split, row_block = div(part, np.int32(row_blocks)), jax.lax.rem(part, np.int32(row_blocks))
        own = backend.span(row_block * tuning.rows, tuning.rows)
        layer = layer_ref[0]
        q_latent = [latent_ref[block, i, own, :] for i in range(planes)]
        q_rope = [rope_ref[block, i, own, :] for i in range(rope_planes)] if rope_ref is not None else []
        factor = factor_ref[block, own]

        def visit(carry: Any, tile: Any, walk: Any, visible: Any, limit: Any, careful: bool) -> Any:
            located, largest, total, value_largest, sums = carry
            ahead = keys.fetch(key_refs, block, walk, tile + 1, size)
            place = keys.place(located, layer, tile, size, limit)
            stored = tiles.load_tile(pool_ref, place, fmt, native=tuning.native_fp8, interpret=interpret)
            scores: Any = None
            for a, b in zip(q_latent, stored.latent, strict=True):
                scores = dot(a, b, True) if scores is None else scores + dot(a, b, True)
            if stored.power is not None:
                scores = scores * stored.power[None, :]
            for a, b in zip(q_rope, stored.rope, strict=True):
                scores = scores + dot(a, b, True)
            scores = scores * factor[:, None]
            seen = place.mask[None, :]
            if keys.differ:
                lane = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
                seen = seen & (lane < (visible - tile * size)[:, None])
            scores = jnp.where(seen, scores, NEG_INF)
            new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
            base = jnp.where(new_largest == NEG_INF, np.float32(0), new_largest)
            weights = jnp.exp2(scores - base[:, None])
            decay = jnp.exp2(largest - base)
            total = total * decay + jnp.sum(weights, axis=1)
            if stored.power is not None:
                # The values of packed rows lack their power, which may exceed float16 in a weight: weights of values have a
                # maximum of their own, so that the largest is 1 whatever the powers are.
                exponent = (jax.lax.bitcast_convert_type(stored.power, jnp.int32) >> 23) - 127
                scores = scores + exponent.astype(jnp.float32)[None, :]
                new_value_largest = jnp.maximum(value_largest, jnp.max(scores, axis=1))
                base = jnp.where(new_value_largest == NEG_INF, np.float32(0), new_value_largest)
                weights = jnp.exp2(scores - base[:, None])
                decay = jnp.exp2(value_largest - base)
                value_largest = new_value_largest
            weights = _coded(weights * np.float32(WEIGHT_SCALE), fmt.dialect) if fmt.coded else weights.astype(fmt.dtype)
            new_sums = []
            for partial, values in zip(sums, stored.latent, strict=True):
                if careful and fmt.coded:
                    values = tiles.finite_codes(values, fmt.dialect)
                elif careful:
                    values = jnp.where(jnp.abs(values) < np.inf, values, jnp.zeros((), values.dtype))
                new_sums.append(partial * decay[:, None] + dot(weights, values, False))
            return ahead, new_largest, total, value_largest, tuple(new_sums)

        def walk_keys(walk: Any, carry: Any) -> Any:
            visible = keys.visible(key_refs, block, own, walk)
            limit = jnp.max(visible)
            count = div(limit + np.int32(size - 1), np.int32(size))
            share = div(count + np.int32(num_splits - 1), np.int32(num_splits))
            first = jnp.minimum(split * share, count)
            last = jnp.minimum(first + share, count)
            carry = (keys.fetch(key_refs, block, walk, first, size), *carry)
            middle = last
            if keys.differ:
                middle = jnp.clip(div(jnp.min(visible), np.int32(size)), first, last)
            carry = jax.lax.fori_loop(first, middle, lambda i, c: visit(c, i, walk, visible, limit, False), carry)
            if keys.differ:
                carry = jax.lax.fori_loop(middle, last, lambda i, c: visit(c, i, walk, visible, limit, True), carry)
            return carry[1:]

        shape = (tuning.rows,)
        carry = (
            jnp.full(shape, NEG_INF),
            jnp.zeros(shape, jnp.float32),
            jnp.full(shape, NEG_INF),
            tuple(jnp.zeros((tuning.rows, width), jnp.float32) for _ in range(planes)),
        )
        bounds = keys.walks(key_refs, block, own)
        if bounds is None:
            carry = walk_keys(None, carry)
        else:
            carry = jax.lax.fori_loop(*bounds, walk_keys, carry)
        largest, total, value_largest, sums = carry
        is_empty = total == 0
        scale = value_factor_ref[0] / jnp.where(is_empty, np.float32(1), total)
        if fmt.scales is not None:
            scale = scale * jnp.where(is_empty, np.float32(1), jnp.exp2(value_largest - largest))
        for i, partial in enumerate(sums):
            out = jnp.where(is_empty[:, None], np.float32(0), partial * scale[:, None])
            out_ref[split, block, i, own, :] = out.astype(out_dtype)
        lse_ref[split, block, own] = jnp.where(is_empty, NEG_INF, (largest + jnp.log2(total)) * LN_2)

    operands = [layer, value_factor, q.latent, q.factor]
    if q.rope is not None:
        operands.append(q.rope)
    call = backend.launch(
        kernel,
        name=name,
        grid=(blocks * num_splits * row_blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((num_splits, blocks, planes, rows, width), out_dtype),
            jax.ShapeDtypeStruct((num_splits, blocks, rows), jnp.float32),
        ),
        aliases={},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        interpret=interpret,
    )
    return call(*operands, *keys.operands, pool)
