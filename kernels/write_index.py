"""Index keys: quantise and place keys and scales in one kernel. Float32 keys are plain rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Num, Shaped

from mla_jax.devices import Target
from mla_jax.kernels import backend
from mla_jax.kernels.scatter import Load, Piece, scatter_rows, spans, to_words
from mla_jax.kernels.tuning import WriteTuning, write_tuning
from mla_jax.layout import GROUP, IndexLayout
from mla_jax.quantize import encode_group, finite_amax, index_scale, larger, plain_bits


def write_index(
    pool: Shaped[Array, "layers pages *page"],
    layout: IndexLayout,
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    k: Num[Array, "T d"],
    target: Target,
) -> Shaped[Array, "layers pages *page"]:
    """The index pool with T keys written, in place when the pool is donated.

    Raises:
        NotImplementedError: where the target has no such kernel, or cannot address the pool.
    """
    backend.require_addressable("write_index_k", pool)
    tuning = write_tuning(target, "plain" if layout.dialect is None else "index")
    return _write_index(pool, layer, slots, k, layout=layout, target=target, tuning=tuning)


@jax.jit(static_argnames=("layout", "target", "tuning"))
def _write_index(
    pool: Shaped[Array, "layers pages *page"],
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    k: Num[Array, "T d"],
    *,
    layout: IndexLayout,
    target: Target,
    tuning: WriteTuning,
) -> Shaped[Array, "layers pages *page"]:
    """Jitted as the writing of rows is."""
    dialect, mode = layout.dialect, layout.scale_mode
    word, d = layout.word_dtype, layout.head_dim

    def row(load: Load) -> list[Piece]:
        """Float32 pieces by their first column; FP8 ones by ("key" or "scale", first word of the token's keys or scales)."""
        if dialect is None or mode is None:
            return [(start, plain_bits(load(0, start, size), jnp.float32)) for start, size in spans(d)]
        pieces: list[Piece] = []
        for group in range(layout.groups):
            first = group * GROUP
            parts = [(first + start, load(0, first + start, size)) for start, size in spans(min(GROUP, d - first))]
            amax = functools.reduce(larger, [finite_amax(x) for _, x in parts])
            scale = index_scale(amax, mode, dialect)
            for start, x in parts:
                codes = encode_group(x, amax, scale, mode, dialect, native=tuning.native_fp8)
                pieces.append((("key", start // word.itemsize), to_words(codes, 1, word)))
            scale_words = to_words(jax.lax.bitcast_convert_type(scale, jnp.uint32)[:, None], 4, word)
            pieces.append((("scale", group * 4 // word.itemsize), scale_words))
        return pieces

    key_words, scale_words = d // word.itemsize, layout.groups * 4 // word.itemsize

    def place(offset: Any, where: Any) -> tuple[tuple[Any, ...], Any]:
        if dialect is None:
            return (offset,), where
        kind, start = where
        if kind == "key":
            return (), offset * key_words + start
        return (), layout.page_size * key_words + offset * scale_words + start

    return scatter_rows(
        row,
        place,
        name="write_index_k",
        pool=pool,
        page_size=layout.page_size,
        layer=layer,
        slots=slots,
        operands=[k],
        tuning=tuning,
        target=target,
    )
