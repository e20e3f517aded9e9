"""What all write kernels share: the walk over rows, the drop rule, and splitting rows into power-of-two spans of words."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped, UInt32

from mla_jax.devices import Target
from mla_jax.kernels import backend
from mla_jax.kernels.tuning import WriteTuning


def spans(width: int) -> list[tuple[int, int]]:
    """(start, size) pieces covering ``width``, each size a power of two as Triton needs, largest first."""
    pieces, start = [], 0
    for bit in reversed(range(width.bit_length())):
        if width >> bit & 1:
            pieces.append((start, 1 << bit))
            start += 1 << bit
    return pieces


def to_words(values: UInt32[Array, "rows n"], value_bytes: int, word_dtype: np.dtype) -> Shaped[Array, "rows m"]:
    """Little-endian words of ``word_dtype`` from the low ``value_bytes`` of each value."""
    word_bytes = word_dtype.itemsize
    rows, n = values.shape
    if word_bytes > value_bytes:
        ratio = word_bytes // value_bytes
        shifts = jax.lax.broadcasted_iota(jnp.uint32, (rows, n // ratio, ratio), 2) * np.uint32(8 * value_bytes)
        # The bytes do not overlap, so a sum packs them; a reduction inside one thread is what Triton makes of it.
        values = jnp.sum(values.reshape(rows, n // ratio, ratio) << shifts, axis=2, dtype=jnp.uint32)
    elif word_bytes < value_bytes:
        ratio = value_bytes // word_bytes
        shifts = jax.lax.broadcasted_iota(jnp.uint32, (rows, n, ratio), 2) * np.uint32(8 * word_bytes)
        mask = np.uint32((1 << 8 * word_bytes) - 1)
        values = ((values[:, :, None] >> shifts) & mask).reshape(rows, n * ratio)
    return values.astype(word_dtype)


Load = Callable[[int, int, int], Any]
"""load(i, start, size): numbers ``[start, start + size)`` of operand i for some rows, [rows, size] in the operand's own dtype."""

Piece = tuple[Any, Any]
"""(where, words): words [rows, m] of some rows, and what ``place`` needs to know to find them in a row."""


def scatter_rows(
    row: Callable[[Load], list[Piece]],
    place: Callable[[Any, Any], tuple[tuple[Any, ...], Any]],
    *,
    name: str,
    pool: Shaped[Array, "layers pages *page"],
    page_size: int,
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    operands: Sequence[Any],
    tuning: WriteTuning,
    target: Target,
) -> Shaped[Array, "layers pages *page"]:
    """Writes T rows in place: one program for each ``tuning.rows`` of them, ``tuning.together`` of them as one tile.

    ``row(load)`` computes the words of the rows of a tile. ``place(offset, where)`` says where the words of a piece belong within
    the page of a row at ``offset``: (indices before the last, the last's first). A row is stored only if 0 < slot < capacity and
    the layer exists; a dropped row stores nothing anywhere. Operands are [T, width], or [1, width] for what all rows share.
    """
    num_layers, num_pages = pool.shape[:2]
    capacity = num_pages * page_size
    (num_tokens,) = slots.shape
    page_shift = page_size.bit_length() - 1
    interpret = backend.require(name, target)
    together = tuning.together
    dtypes = [operand.dtype for operand in operands]
    shared = [operand.shape[0] == 1 for operand in operands]
    if interpret:
        # Interpret mode of JAX 0.10 hands bfloat16 through float32, which quiets NaN; words keep their bits.
        operands = [jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x for x in operands]

    def store(pool_ref: Any, layer: Any, slot: Any, valid: Any, pieces: list[Piece]) -> None:
        """One row (scalars and words [1, m]) where it is valid."""

        @backend.when(valid)
        def _() -> None:
            for where, words in pieces:
                lead, first = place(slot & (page_size - 1), where)
                pool_ref[layer, slot >> page_shift, *lead, backend.span(first, words.shape[1])] = words[0]

    def store_together(pool_ref: Any, layer: Any, slots: Any, valid: Any, pieces: list[Piece]) -> None:
        """Rows as one tile, masked."""
        slots = jnp.where(valid, slots, 0)  # no address is made of a slot that is dropped
        page, offset = (slots >> page_shift)[:, None], (slots & (page_size - 1))[:, None]
        for where, words in pieces:
            lead, first = place(offset, where)
            column = first + jax.lax.broadcasted_iota(jnp.int32, (1, words.shape[1]), 1)
            backend.store(pool_ref, (layer, page, *lead, column), words, valid[:, None])

    def kernel(layer_ref: Any, slots_ref: Any, *refs: Any) -> None:
        inputs, pool_ref = refs[: len(operands)], refs[-1]
        layer = layer_ref[0]
        layer_exists = (layer >= 0) & (layer < num_layers)
        first = backend.program_id(0) * tuning.rows
        todo = []
        for r in range(0, tuning.rows, together):
            t = first + r
            if together > 1:
                t = t + jnp.arange(together, dtype=jnp.int32)
            exists = layer_exists
            if num_tokens % tuning.rows:
                exists = exists & (t < num_tokens)
                t = jnp.minimum(t, num_tokens - 1)

            def load(i: int, start: int, size: int, t: Any = t) -> Any:
                if shared[i]:
                    x = inputs[i][0, backend.span(start, size)][None]
                elif together == 1:
                    x = inputs[i][t, backend.span(start, size)][None]
                else:
                    x = inputs[i][t[:, None], start + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)]
                return x if x.dtype == dtypes[i] else jax.lax.bitcast_convert_type(x, dtypes[i])

            slot = slots_ref[t]
            todo.append((slot, exists & (slot > 0) & (slot < capacity), row(load)))
        for slot, valid, pieces in todo:
            if together == 1:
                store(pool_ref, layer, slot, valid, pieces)
            elif not interpret:
                store_together(pool_ref, layer, slot, valid, pieces)
            else:
                for i in range(together):  # interpret mode knows no masked scatter
                    store(pool_ref, layer, slot[i], valid[i], [(where, words[i : i + 1]) for where, words in pieces])

    call = backend.launch(
        kernel,
        name=name,
        grid=(-(-num_tokens // tuning.rows),),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        aliases={2 + len(operands): 0},
        num_warps=tuning.num_warps,
        interpret=interpret,
    )
    return call(layer, slots, *operands, pool)
