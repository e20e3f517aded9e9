"""Latent rows: one kernel a path. Bytes moved a row: the inputs once, the stored row once, nothing else.

PLAIN casts, RAW_FUSED encodes to FP8, SCALED quantises groups of 128 and stores codes, scales and rope together.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num, Shaped

from mla_jax.devices import Target
from mla_jax.kernels import backend
from mla_jax.kernels.scatter import Load, Piece, scatter_rows, spans, to_words
from mla_jax.kernels.tuning import WriteTuning, write_tuning
from mla_jax.layout import GROUP, CacheLayout
from mla_jax.quantize import divide, encode_bits, encode_group, finite_amax, packed_scale, plain_bits


def write_rows(
    pool: Shaped[Array, "layers pages page words"],
    layout: CacheLayout,
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    c_kv: Num[Array, "T R"],
    k_rope: Num[Array, "T P"],
    k_scale: Float[Array, ""] | None,
    target: Target,
) -> Shaped[Array, "layers pages page words"]:
    """The pool with T rows written, in place when the pool is donated.

    Raises:
        NotImplementedError: where the target has no such kernel, or cannot address the pool.
    """
    backend.require_addressable("write_kv", pool)
    tuning = write_tuning(target, layout.write_path.value)
    return _write_rows(pool, layer, slots, c_kv, k_rope, k_scale, layout=layout, target=target, tuning=tuning)


@jax.jit(static_argnames=("layout", "target", "tuning"))
def _write_rows(
    pool: Shaped[Array, "layers pages page words"],
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    c_kv: Num[Array, "T R"],
    k_rope: Num[Array, "T P"],
    k_scale: Float[Array, ""] | None,
    *,
    layout: CacheLayout,
    target: Target,
    tuning: WriteTuning,
) -> Shaped[Array, "layers pages page words"]:
    """Jitted, so that eager calls compile once; inside a caller's jit it is inlined, and the caller's donation holds."""
    word = layout.word_dtype
    numbers_a_word = word.itemsize if layout.dialect is not None else 1
    operands: list[Any] = [c_kv]
    if layout.qk_rope_head_dim:
        operands.append(k_rope)
    if k_scale is not None:
        operands.append(k_scale.reshape(1, 1))

    def plain(load: Load, i: int, start: int, size: int) -> Any:
        return plain_bits(load(i, start, size), layout.number_dtype).astype(word)

    def raw(load: Load, i: int, start: int, size: int) -> Any:
        x = load(i, start, size)
        scaled = x if k_scale is None else divide(x.astype(jnp.float32), load(len(operands) - 1, 0, 1))
        return to_words(encode_bits(scaled, layout.dialect or "e4m3fn", source=x, native=tuning.native_fp8), 1, word)

    def packed(load: Load, start: int, size: int) -> tuple[Any, Any]:
        assert layout.scale_mode is not None
        x = load(0, start, size)
        rows = x.shape[0]
        x = x.reshape(rows, size // GROUP, GROUP)
        amax = finite_amax(x)
        scale = packed_scale(amax, layout.scale_mode)
        codes = encode_group(x, amax, scale, layout.scale_mode, "e4m3fn", native=tuning.native_fp8)
        scale_bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
        return to_words(codes.reshape(rows, size), 1, word), to_words(scale_bits, 4, word)

    R, P = layout.kv_lora_rank, layout.qk_rope_head_dim

    def row(load: Load) -> list[Piece]:
        """Pieces by their first word in a row."""
        pieces: list[Piece] = []
        if layout.is_packed:
            scales_at = R // word.itemsize
            rope_at = (R + R // GROUP * 4) // word.itemsize
            for start, size in spans(R):
                codes, scales = packed(load, start, size)
                pieces.append((start // word.itemsize, codes))
                pieces.append((scales_at + start // GROUP * 4 // word.itemsize, scales))
            for start, size in spans(P):
                words = to_words(plain_bits(load(1, start, size), jnp.bfloat16), 2, word)
                pieces.append((rope_at + 2 * start // word.itemsize, words))
            return pieces
        write = plain if layout.is_plain else raw
        for i, first, width in ((0, 0, R), (1, R, P)):
            for start, size in spans(width):
                pieces.append(((first + start) // numbers_a_word, write(load, i, start, size)))
        return pieces

    def place(offset: Any, start: Any) -> tuple[tuple[Any, ...], Any]:
        return (offset,), start

    return scatter_rows(
        row,
        place,
        name=f"write_kv_{layout.write_path.value}",
        pool=pool,
        page_size=pool.shape[2],
        layer=layer,
        slots=slots,
        operands=operands,
        tuning=tuning,
        target=target,
    )
