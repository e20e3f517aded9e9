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


def to_words(values: UInt32[Array, "n"], value_bytes: int, word_dtype: np.dtype) -> Shaped[Array, "m"]:
    """Little-endian words of ``word_dtype`` from the low ``value_bytes`` of each value."""
    word_bytes = word_dtype.itemsize
    (n,) = values.shape
    if word_bytes > value_bytes:
        ratio = word_bytes // value_bytes
        shifts = jax.lax.broadcasted_iota(jnp.uint32, (n // ratio, ratio), 1) * np.uint32(8 * value_bytes)
        # The bytes do not overlap, so a sum packs them; a reduction inside one thread is what Triton makes of it.
        values = jnp.sum(values.reshape(n // ratio, ratio) << shifts, axis=1, dtype=jnp.uint32)
    elif word_bytes < value_bytes:
        ratio = value_bytes // word_bytes
        shifts = jax.lax.broadcasted_iota(jnp.uint32, (n, ratio), 1) * np.uint32(8 * word_bytes)
        mask = np.uint32((1 << 8 * word_bytes) - 1)
        values = ((values[:, None] >> shifts) & mask).reshape(n * ratio)
    return values.astype(word_dtype)


Load = Callable[[int, int, int], Any]
"""load(i, start, size): numbers ``[start, start + size)`` of operand i's row, in the operand's own dtype."""


def scatter_rows(
    row: Callable[[Load], list[Any]],
    place: Callable[[Any, Any, Any, Any, list[Any]], None],
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
    """Writes T rows in place: one program for each ``tuning.rows`` of them.

    ``row(load)`` computes the words of one row; ``place(pool, layer, page, offset, words)`` stores them. A row is stored only if
    0 < slot < capacity and the layer exists, so a dropped row computes no address at all. Operands are [T, width], or [1, width]
    for what all rows share.
    """
    num_layers, num_pages = pool.shape[:2]
    capacity = num_pages * page_size
    (num_tokens,) = slots.shape
    page_shift = page_size.bit_length() - 1
    interpret = backend.require(name, target)
    dtypes = [operand.dtype for operand in operands]
    shared = [operand.shape[0] == 1 for operand in operands]
    if interpret:
        # Interpret mode of JAX 0.10 hands bfloat16 through float32, which quiets NaN; words keep their bits.
        operands = [jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x for x in operands]

    def kernel(layer_ref: Any, slots_ref: Any, *refs: Any) -> None:
        inputs, pool_ref = refs[: len(operands)], refs[-1]
        layer = layer_ref[0]
        layer_exists = (layer >= 0) & (layer < num_layers)
        first = backend.program_id(0) * tuning.rows
        todo = []
        for r in range(tuning.rows):
            t = first + r
            exists = layer_exists
            if num_tokens % tuning.rows:
                exists = exists & (t < num_tokens)
                t = jnp.minimum(t, num_tokens - 1)

            def load(i: int, start: int, size: int, t: Any = t) -> Any:
                x = inputs[i][0 if shared[i] else t, backend.span(start, size)]
                return x if x.dtype == dtypes[i] else jax.lax.bitcast_convert_type(x, dtypes[i])

            slot = slots_ref[t]
            todo.append((slot, exists & (slot > 0) & (slot < capacity), row(load)))
        for slot, valid, words in todo:

            @backend.when(valid)
            def _(slot: Any = slot, words: list[Any] = words) -> None:
                place(pool_ref, layer, slot >> page_shift, slot & (page_size - 1), words)

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
