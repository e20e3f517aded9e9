"""Tiles: stored rows as operands of matrix products, decoded in registers. Nothing dequantised ever reaches device memory.

A row is loaded as the pool's words. A word holds 1, 2 or 4 numbers; number b of every word makes *plane* b, so a field of n
numbers becomes planes of n / numbers-a-word columns and no number has to move between threads. Queries are split into the same
planes beforehand, outputs joined from them afterwards: a product of sums over planes is the product over the columns.

FP8 numbers become float16 by placing their bits: for e4m3 the exact value times 2^-8 (OCP) or 2^-7 (fnuz), subnormals included,
for every code but NaN, for which the exponent is filled; e5m2 is the upper byte of a float16. The constant is multiplied into the
logits and the output. Packed rows have a scale for each 128 numbers: each row is divided by the largest power of two in its
scales, so that its numbers fit float16 whatever they were, and that power is multiplied into the row's logits and weights.

Where queries and weights are FP8 too, the codes themselves are the operands of the matrix units and nothing is decoded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped, UInt32

from mla_jax.kernels import backend
from mla_jax.layout import GROUP, CacheLayout, Dialect
from mla_jax.quantize import FP8_DTYPES

MIN_WIDTH = 16
"""Columns of a plane at least: matrix units take no fewer."""

MIN_CODED_WIDTH = 32
"""The same for FP8 operands."""

_PLACED = {"e4m3fn": 2.0**8, "e4m3fnuz": 2.0**7, "e5m2": 1.0}
"""The value of a code over that of its placed bits."""


def padded(width: int, least: int = MIN_WIDTH) -> int:
    """The power of two that ``width`` columns are widened to, with zeros."""
    return max(least, 1 << (width - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Words ``[start, start + words)`` of a row, each of ``numbers`` numbers: that many planes of ``width`` columns."""

    start: int
    words: int
    numbers: int
    least: int = MIN_WIDTH

    @property
    def width(self) -> int:
        return padded(self.words, self.least)


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How rows of a layout are read.

    Attributes:
        latent: pieces of the latent numbers, in order and of equal width.
        rope: piece of the rope numbers, or None.
        dtype: of the planes of the latent numbers.
        rope_dtype: of the planes of the rope numbers.
        scales: piece of the scales, or None.
        dialect: of the codes, or None.
        factor: what the placed bits must be multiplied by.
        coded: the planes are the codes themselves; ``dtype`` is their FP8 type.
        joined: planes are joined to rows in the columns' own order, for matrix units that read them from shared memory anyway.
    """

    latent: tuple[Piece, ...]
    rope: Piece | None
    dtype: np.dtype
    rope_dtype: np.dtype
    scales: Piece | None
    dialect: Dialect | None
    factor: float
    joined: bool
    coded: bool = False

    def arrangement(self, piece: Piece) -> Piece:
        """What queries and outputs of a piece are split into and joined from."""
        return Piece(0, piece.words * piece.numbers, 1, least=piece.width * piece.numbers) if self.joined else piece

    def split_latent(self, x: Shaped[Array, "*lead n"]) -> Shaped[Array, "*lead planes width"]:
        """Columns as the planes of all pieces."""
        parts = jnp.split(x, len(self.latent), axis=-1)
        return jnp.concatenate([split(part, self.arrangement(self.latent[0])) for part in parts], axis=-2)

    def join_latent(self, x: Shaped[Array, "*lead planes width"]) -> Shaped[Array, "*lead n"]:
        """The columns of planes; undoes :meth:`split_latent`."""
        parts = jnp.split(x, len(self.latent), axis=-2)
        return jnp.concatenate([join(part, self.arrangement(self.latent[0])) for part in parts], axis=-1)


def row_format(layout: CacheLayout, *, wide: bool, native: bool, joined: bool, coded: bool = False, pieces: int = 1) -> RowFormat:
    """The format of ``layout``.

    Args:
        layout: of the rows.
        wide: compute in float32.
        native: codes are converted by the device's own instruction, which needs no factor.
        joined: as in :class:`RowFormat`.
        coded: as in :class:`RowFormat`; raw rows only.
        pieces: of the latent numbers at most, a power of two; fewer where they would not be equal, or smaller than matrix units or
            the groups of packed rows.

    Raises:
        NotImplementedError: for packed rows of words that hold less than a scale (odd rope dims).
    """
    R, P = layout.kv_lora_rank, layout.qk_rope_head_dim
    word = layout.word_dtype.itemsize
    if coded:
        assert layout.is_raw and layout.dialect is not None
        dtype = jnp.dtype(FP8_DTYPES[layout.dialect])
        latent = _equal_pieces(R // word, word, pieces, MIN_CODED_WIDTH, MIN_CODED_WIDTH)
        rope = Piece(R // word, P // word, word, least=MIN_CODED_WIDTH) if P else None
        return RowFormat(latent, rope, dtype, dtype, None, layout.dialect, 1.0, False, coded=True)
    if layout.is_packed:
        if word != 4:
            raise NotImplementedError(f"packed rows with an odd number of rope dims have words of {word} bytes, the kernels read 4")
        latent = _equal_pieces(R // 4, 4, pieces, MIN_WIDTH, unit=GROUP // 4)
        scales = Piece(R // 4, R // GROUP, 1, least=1)
        rope = Piece(R // 4 + R // GROUP, P // 2, 2) if P else None
        dtype, rope_dtype = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
    else:
        scales = None
        numbers = word if layout.is_raw else 1
        latent = _equal_pieces(R // numbers, numbers, pieces, MIN_WIDTH)
        rope = Piece(R // numbers, P // numbers, numbers) if P else None
        dtype = rope_dtype = jnp.dtype(jnp.float16) if layout.is_raw else layout.number_dtype
    if wide:
        dtype = rope_dtype = jnp.dtype(jnp.float32)
    # The scales of packed rows carry the factor.
    factor = 1.0 if layout.is_packed or layout.dialect is None else code_factor(layout.dialect, word, native)
    return RowFormat(latent, rope, dtype, rope_dtype, scales, layout.dialect, factor, joined)


def _equal_pieces(
    words: int, numbers: int, pieces: int, least_words: int, least: int = MIN_WIDTH, *, unit: int = 1
) -> tuple[Piece, ...]:
    """``words`` words in as many pieces as are wanted and possible, each of whole units."""
    while pieces > 1 and (words % (pieces * unit) or words // pieces < least_words):
        pieces //= 2
    size = words // pieces
    return tuple(Piece(start, size, numbers, least) for start in range(0, words, size))


def fit_float16(amax: Float[Array, "*lead"]) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
    """The power of two below ``amax`` and its reciprocal, exact: numbers up to amax, times the latter, are below 2."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(amax, np.float32(2.0**-100)), jnp.uint32) & np.uint32(0x7F800000)
    reciprocal = jax.lax.bitcast_convert_type(np.uint32(0x7F000000) - bits, jnp.float32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32), reciprocal


def split(x: Shaped[Array, "*lead n"], piece: Piece) -> Shaped[Array, "*lead planes width"]:
    """Columns as planes, widened with zeros."""
    x = jnp.swapaxes(x.reshape(*x.shape[:-1], piece.words, piece.numbers), -1, -2)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, piece.width - piece.words)])


def join(x: Shaped[Array, "*lead planes width"], piece: Piece) -> Shaped[Array, "*lead n"]:
    """The columns of planes; undoes :func:`split`."""
    x = jnp.swapaxes(x[..., : piece.words], -1, -2)
    return x.reshape(*x.shape[:-2], piece.words * piece.numbers)


# ---- inside a kernel -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where the C rows of a tile lie: one page with an offset that its rows follow, or a page and an offset for each row.

    Attributes:
        layer: scalar.
        page: scalar, or [C].
        offset: scalar of the first row, or [C].
        mask: bool[C]; other rows are not touched, but their page and offset are in range.
    """

    layer: Any
    page: Any
    offset: Any
    mask: Bool[Array, "C"]

    def load(self, pool_ref: Any, piece: Piece, *, interpret: bool) -> Shaped[Array, "C width"]:
        """The piece of each row, zeros where the mask or the widening says so."""
        columns = backend.span(piece.start, piece.width)
        mask = self.mask[:, None]
        if piece.width != piece.words:
            column = jax.lax.broadcasted_iota(jnp.int32, (1, piece.width), 1)
            mask = mask & (column < piece.words)
            columns = piece.start + jnp.minimum(column, piece.words - 1)
        return backend.load(pool_ref, self._index(columns), mask, jnp.zeros((), pool_ref.dtype), interpret=interpret)

    def _index(self, columns: Any) -> tuple[Any, ...]:
        size = self.mask.shape[0]
        if isinstance(columns, jax.Array):
            rows = self.offset if self.page.ndim else self.offset + jnp.arange(size, dtype=jnp.int32)
            page = self.page[:, None] if self.page.ndim else self.page
            return (self.layer, page, rows[:, None], columns)
        if self.page.ndim:
            return (self.layer, self.page, self.offset, columns)
        return (self.layer, self.page, backend.span(self.offset, size), columns)


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """C rows, decoded.

    Attributes:
        latent: planes [C, width]; uint8 where they are codes.
        rope: planes [C, width], likewise.
        power: float32[C] that multiplies the logits and the values of packed rows, else None.
    """

    latent: list[Any]
    rope: list[Any]
    power: Float[Array, "C"] | None


def load_tile(pool_ref: Any, place: Place, fmt: RowFormat, *, native: bool, interpret: bool) -> Tile:
    """The rows at ``place``."""
    words = [place.load(pool_ref, piece, interpret=interpret) for piece in fmt.latent]
    rope = [place.load(pool_ref, fmt.rope, interpret=interpret)] if fmt.rope is not None else []
    if fmt.dialect is None:
        return Tile([w.astype(fmt.dtype) for w in words], [w.astype(fmt.dtype) for w in rope], None)
    if fmt.coded:
        return Tile([plane for w in words for plane in _codes(w)], [plane for w in rope for plane in _codes(w)], None)

    def decoded(words: Any) -> list[Any]:
        assert fmt.dialect is not None
        return decode_codes(words, fmt.dialect, fmt.dtype, native=native)

    if fmt.scales is None:
        latent, rope = ([plane for w in part for plane in _arranged(decoded(w), fmt)] for part in (words, rope))
        return Tile(latent, rope, None)
    planes = [decoded(w) for w in words]
    bits = place.load(pool_ref, fmt.scales, interpret=interpret)
    largest = jnp.max(bits.astype(jnp.int32), axis=1).astype(jnp.uint32)  # positive floats are ordered as their bits
    # Rows that are not read have zeros for scales; below every scale that is written, and its reciprocal is finite.
    largest = jnp.maximum(largest, np.uint32((127 - 112) << 23))
    power = largest & np.uint32(0x7F800000)
    reciprocal = jax.lax.bitcast_convert_type(np.uint32(0x7F000000) - power, jnp.float32)
    reciprocal = reciprocal * np.float32(code_factor(fmt.dialect, 4, native))
    column = jax.lax.broadcasted_iota(jnp.int32, (1, fmt.scales.width), 1)
    group = jax.lax.broadcasted_iota(jnp.int32, (1, fmt.latent[0].width), 1) >> np.int32((GROUP // 4).bit_length() - 1)
    groups = fmt.scales.words // len(fmt.latent)
    latent = []
    for i, part in enumerate(planes):
        scale: Any = None
        for g in range(groups):
            own = jnp.sum(jnp.where(column == groups * i + g, bits, np.uint32(0)), axis=1, dtype=jnp.uint32)
            own = (jax.lax.bitcast_convert_type(own, jnp.float32) * reciprocal).astype(fmt.dtype)[:, None]
            scale = own if scale is None else jnp.where(group < g, scale, own)
        latent += _arranged([plane * scale for plane in part], fmt)
    halves = [_bfloat16(w, i).astype(fmt.rope_dtype) for w in rope for i in range(2)]
    return Tile(latent, _arranged(halves, fmt) if halves else [], jax.lax.bitcast_convert_type(power, jnp.float32))


def _arranged(planes: list[Any], fmt: RowFormat) -> list[Any]:
    """The planes, or one tile of all columns in order."""
    if not fmt.joined or len(planes) < 2:
        return planes
    # Joining pairs of planes that lie apart first puts all four in order in the end.
    half = len(planes) // 2
    if half > 1:
        planes = [jnp.stack([planes[i], planes[i + half]], axis=-1) for i in range(half)]
    joined = jnp.stack(planes, axis=-1)
    return [joined.reshape(joined.shape[0], -1)]


def _codes(words: Any) -> list[Any]:
    """The bytes of words, a plane each."""
    return [(words >> (8 * b) if b else words).astype(jnp.uint8) for b in range(words.dtype.itemsize)]


def finite_codes(codes: Any, dialect: Dialect) -> Any:
    """FP8 codes with zeros for those of NaN and infinities."""
    if dialect == "e4m3fnuz":
        return jnp.where(codes == np.uint8(0x80), np.uint8(0), codes)
    first = np.uint8(0x7F if dialect == "e4m3fn" else 0x7C)
    return jnp.where((codes & np.uint8(0x7F)) >= first, np.uint8(0), codes)


def decode_codes(words: Any, dialect: Dialect, dtype: Any, *, native: bool) -> list[Any]:
    """The planes of FP8 codes in ``dtype``: exact values if ``native``, else placed bits, :func:`code_factor` times smaller."""
    numbers = words.dtype.itemsize
    if uses_native(dialect, numbers, native):
        planes = [_native_plane(words, b) for b in range(numbers)]
    else:
        planes = [jax.lax.bitcast_convert_type(_placed_bits(words, b, dialect), jnp.float16) for b in range(numbers)]
    return [plane.astype(dtype) for plane in planes]


def uses_native(dialect: Dialect, numbers: int, native: bool) -> bool:
    """Whether codes in words of ``numbers`` are converted by the device where ``native`` allows it."""
    return native and dialect == "e4m3fn" and numbers == 4


def code_factor(dialect: Dialect, numbers: int, native: bool) -> float:
    """The value of a code over what :func:`decode_codes` makes of it."""
    return 1.0 if uses_native(dialect, numbers, native) else _PLACED[dialect]


def _placed_bits(words: Any, b: int, dialect: Dialect) -> Any:
    """uint16 bits of float16 numbers from byte ``b`` of each word; NaN where the code is NaN.

    The bits go where float16 has them, two codes to a register where the chip has such instructions.
    """
    codes = (words >> (8 * b)).astype(jnp.uint16) if b else words.astype(jnp.uint16)
    upper = codes << np.uint16(8)
    if dialect == "e5m2":
        return upper
    # Shifted by one with its sign, the code's sign stays where it is and its magnitude is 128 times itself.
    moved = jax.lax.bitcast_convert_type(upper, jnp.int16) >> np.int16(1)
    placed = jax.lax.bitcast_convert_type(moved, jnp.uint16) & np.uint16(0xBF80)
    if dialect == "e4m3fn":
        # One more than the largest magnitude is bit 14, and with that the exponent is full.
        return placed | ((placed + np.uint16(0x80)) & np.uint16(0x4000))
    # The NaN of fnuz is the sign alone: the least of all integers, and the only one that is less than the one before it, which
    # wraps to a NaN of float16.
    number = jax.lax.bitcast_convert_type(placed, jnp.int16)
    return jax.lax.bitcast_convert_type(jnp.maximum(number, number - np.int16(1)), jnp.uint16)


_FROM_E4M3 = """{{
.reg .b32 pair;
.reg .b16 codes, rest;
prmt.b32 pair, $1, $2, {selector};
mov.b32 {{codes, rest}}, pair;
cvt.rn.f16x2.e4m3x2 $0, codes;
}}"""
"""Two words to a pair of float16: byte b of each is brought together, then both are converted by one instruction."""


def _native_plane(words: UInt32[Array, "C width"], b: int) -> Any:
    """Plane b of OCP e4m3 codes by the converter of NVIDIA's chips (sm_89 on)."""
    text = _FROM_E4M3.format(selector=hex(b | (4 + b) << 4))
    return backend.assembly(text, "=r,r,r", 2, jax.ShapeDtypeStruct(words.shape, jnp.float16), words)


def _bfloat16(words: UInt32[Array, "C width"], b: int) -> Any:
    """Half ``b`` of each word."""
    bits = (words >> np.uint32(16 * b)).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
