"""Indexer logits: logit[t, c] = sum_h w[t, h] relu(q[t, h] . k[c]) over the index keys of each token's sequence.

A program computes a run of columns for one token (several where there are few heads). Keys are FP8 codes decoded in registers; the
scale of a key is positive, so that it multiplies the product before relu as well as after. The weighted sum over heads is float32:
the order of the logits decides what is attended to.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from mla_jax.devices import Target
from mla_jax.kernels import backend, tiles
from mla_jax.kernels.attend import NEG_INF
from mla_jax.kernels.keys import PagedKeys
from mla_jax.kernels.tuning import IndexTuning, index_tuning
from mla_jax.layout import GROUP, IndexLayout
from mla_jax.quantize import finite_amax


def index_logits(
    q: Float[Array, "T h d"],
    head_weights: Float[Array, "T h"],
    pool: Shaped[Array, "layers pages *page"],
    layout: IndexLayout,
    layer: Int32[Array, "1"],
    tables: Int32[Array, "S M"],
    sequence: Int32[Array, "T"],
    seen: Int32[Array, "T"],
    *,
    target: Target,
) -> Float[Array, "T columns"]:
    """float32 [T, M * page_size]; -inf where a token sees no key.

    Args:
        q: [T, h, d].
        head_weights: [T, h].
        pool: all stored index keys.
        layout: of their pages.
        layer: int32[1], in range.
        tables: int32[S, M].
        sequence: int32[T], ascending.
        seen: int32[T], keys that each token sees.
        target: the device.

    Raises:
        NotImplementedError: where the target has no such kernel, or cannot address the pool or read the layout.
    """
    backend.require_addressable("indexer_logits", pool)
    tuning = index_tuning(target)
    return _index_logits(q, head_weights, pool, layer, tables, sequence, seen, layout=layout, target=target, tuning=tuning)


@jax.jit(static_argnames=("layout", "target", "tuning"))
def _index_logits(
    q: Float[Array, "T h d"],
    head_weights: Float[Array, "T h"],
    pool: Shaped[Array, "layers pages *page"],
    layer: Int32[Array, "1"],
    tables: Int32[Array, "S M"],
    sequence: Int32[Array, "T"],
    seen: Int32[Array, "T"],
    *,
    layout: IndexLayout,
    target: Target,
    tuning: IndexTuning,
) -> Float[Array, "T columns"]:
    """The kernel, what its operands need before it and its results after it. Jitted, so that eager calls compile once."""
    (T, h, d), page_size = q.shape, layout.page_size
    interpret = backend.require("indexer_logits", target)
    word = layout.word_dtype.itemsize
    if layout.dialect is not None and word != 4:
        raise NotImplementedError(f"indexer_logits: the kernel reads words of 4 bytes, keys of width {d} have words of {word}")
    size = tuning.keys
    columns = tables.shape[1] * page_size
    runs = -(-columns // (size * tuning.tiles))
    heads = 1 << (h - 1).bit_length()
    tokens = max(1, tiles.MIN_WIDTH // heads)
    rows = tokens * heads
    blocks = -(-T // tokens)
    wide = layout.dialect is None or q.dtype == jnp.float32
    dtype = jnp.dtype(jnp.float32 if wide else jnp.float16)
    precision = jax.lax.Precision.HIGHEST if wide else None

    keys = PagedKeys(
        tables, _blocks(sequence, tokens), _blocks(seen, tokens), page_size, pool.shape[1], mixed=tokens > 1, differ=tokens > 1
    )
    weights, queries = head_weights.astype(jnp.float32), q
    if not wide:
        # Each query is divided by a power of two, so that it fits float16; its head's weight takes the power.
        power, reciprocal = tiles.fit_float16(finite_amax(q))
        weights = weights * power
        queries = q.astype(jnp.float32) * reciprocal[..., None]
    pieces = _pieces(layout)
    words = _pad(queries.astype(dtype), tokens, heads).reshape(blocks, rows, d)
    arranged = [
        jnp.swapaxes(tiles.split(words[..., p.start * p.numbers : (p.start + p.words) * p.numbers], p), 1, 2) for p in pieces
    ]
    if layout.dialect is None:
        pool = jax.lax.bitcast_convert_type(pool, jnp.float32)
        factor = 1.0
    else:
        factor = tiles.code_factor(layout.dialect, word, tuning.native_fp8)
    num_pieces = len(pieces)

    def load(pool_ref: Any, place: tiles.Place, column: Any) -> Any:
        """Words at ``column`` ([C, width]) of the page of each row."""
        page = place.page[:, None] if place.page.ndim else place.page
        return backend.load(pool_ref, (place.layer, page, column), place.mask[:, None], np.uint32(0), interpret=interpret)

    def products(pool_ref: Any, place: tiles.Place, asked: list[list[Any]]) -> Float[Array, "rows C"]:
        """q . k of every row and key."""
        offset = place.offset if place.page.ndim else place.offset + jnp.arange(size, dtype=jnp.int32)
        if layout.dialect is None:
            stored = [[place.load(pool_ref, pieces[0], interpret=interpret)]]
        else:
            stored = []
            for piece in pieces:
                lane = jax.lax.broadcasted_iota(jnp.int32, (1, piece.width), 1)
                if piece.width > piece.words:
                    # Within the key. Not where it changes nothing: the compiler would no longer see neighbours to load together.
                    lane = jnp.minimum(lane, np.int32(piece.words - 1))
                loaded = load(pool_ref, place, offset[:, None] * np.int32(d // 4) + piece.start + lane)
                stored.append(tiles.decode_codes(loaded, layout.dialect, dtype, native=tuning.native_fp8))
        result: Any = None
        for g, (planes, queries) in enumerate(zip(stored, asked, strict=True)):
            product: Any = None
            for a, b in zip(queries, planes, strict=True):
                term = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
                product = term if product is None else product + term
            if layout.dialect is not None:
                column = np.int32(page_size * (d // 4)) + offset * np.int32(layout.groups) + np.int32(g)
                index = (place.layer, place.page, column)
                scale = backend.load(pool_ref, index, place.mask, np.uint32(0), interpret=interpret)
                product = product * (jax.lax.bitcast_convert_type(scale, jnp.float32) * np.float32(factor))[None, :]
            result = product if result is None else result + product
        return result

    def kernel(layer_ref: Any, weights_ref: Any, *refs: Any) -> None:
        query_refs, key_refs = refs[:num_pieces], refs[num_pieces : num_pieces + len(keys.operands)]
        pool_ref, out_ref = refs[-2:]
        program = backend.program_id(0)
        block, run = jax.lax.div(program, np.int32(runs)), jax.lax.rem(program, np.int32(runs))
        everyone = backend.span(0, tokens)
        layer = layer_ref[0]
        asked = [[ref[block, i, :, :] for i in range(ref.shape[1])] for ref in query_refs]
        weight = weights_ref[block, :]

        def column_tile(tile: Any, walk: Any, visible: Any, located: Any, limit: Any, logits: Any) -> Any:
            place = keys.place(located, layer, tile, size, limit)
            scores = products(pool_ref, place, asked)
            scores = jnp.where(scores <= 0, np.float32(0), scores) * weight[:, None]  # lets NaN through
            if tokens == 1:
                summed = jnp.sum(scores, axis=0)[None, :]
            else:
                summed = jnp.sum(scores.reshape(tokens, heads, size), axis=1)
            lane = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
            mask = place.mask[None, :] & (lane < (visible - tile * size)[:, None])
            return jnp.where(mask, summed, logits)

        def visit(i: Any, carry: Any) -> Any:
            tile = run * tuning.tiles + i
            nothing = jnp.full((tokens, size), NEG_INF)
            bounds = keys.walks(key_refs, block, everyone)

            def walk_one(walk: Any, logits: Any) -> Any:
                visible = keys.visible(key_refs, block, everyone, walk)
                located = keys.fetch(key_refs, block, walk, tile, size)
                return column_tile(tile, walk, visible, located, jnp.max(visible), logits)

            logits = walk_one(None, nothing) if bounds is None else jax.lax.fori_loop(*bounds, walk_one, nothing)
            out_ref[block, :, backend.span(tile * size, size)] = logits
            return carry

        jax.lax.fori_loop(0, tuning.tiles, visit, jnp.int32(0))

    call = backend.launch(
        kernel,
        name="index_logits",
        grid=(blocks * runs,),
        out_shape=jax.ShapeDtypeStruct((blocks, tokens, runs * tuning.tiles * size), jnp.float32),
        aliases={},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        interpret=interpret,
    )
    out = call(layer, _pad(weights[..., None], tokens, heads).reshape(blocks, rows), *arranged, *keys.operands, pool)
    return out.reshape(blocks * tokens, -1)[:T, :columns]


def _pieces(layout: IndexLayout) -> list[tiles.Piece]:
    """The words of a key that share a scale."""
    if layout.dialect is None:
        return [tiles.Piece(0, layout.head_dim, 1)]
    words, group = layout.head_dim // 4, GROUP // 4
    return [tiles.Piece(start, min(group, words - start), 4) for start in range(0, words, group)]


def _pad(x: Array, tokens: int, heads: int) -> Array:
    """[T, h, n] widened with zeros to whole blocks of tokens and a power of two of heads."""
    return jnp.pad(x, ((0, -x.shape[0] % tokens), (0, heads - x.shape[1]), (0, 0)))


def _blocks(x: Int32[Array, "T"], tokens: int) -> Int32[Array, "blocks tokens"]:
    return jnp.pad(x, (0, -x.shape[0] % tokens), mode="edge").reshape(-1, tokens)
