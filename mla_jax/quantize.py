"""FP8 codecs and scale rules, usable in Pallas kernels and in plain jnp alike.

One encoder and one decoder serve e4m3fn, e4m3fnuz and e5m2. Both work on the bits of float32 with integer operations: Pallas'
Triton lowering refuses every cast to or from e4m3fnuz, casts overflow differently on CPU and GPU, and a clip in a Triton kernel
turns NaN into the clip's bound. The integer form gives the same byte everywhere.

Rules: overflow and infinities give the largest finite value, NaN gives the NaN code of ml_dtypes (sign kept; 0x80 in e4m3fnuz),
rounding is to nearest, ties to even.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, Shaped, UInt8, UInt32

from mla_jax.layout import Dialect, ScaleMode


@dataclasses.dataclass(frozen=True)
class Fp8Format:
    """An FP8 encoding: 1 sign bit, the rest exponent, ``mantissa_bits`` of mantissa.

    Attributes:
        mantissa_bits: 3 for e4m3, 2 for e5m2.
        bias: exponent bias.
        max_finite: largest finite value.
        max_code: its code.
        nan_code: code of a positive NaN.
        signed: whether -0 and a NaN's sign exist (not in e4m3fnuz, whose 0x80 is the only NaN).
    """

    mantissa_bits: int
    bias: int
    max_finite: float
    max_code: int
    nan_code: int
    signed: bool


FORMATS: Mapping[Dialect, Fp8Format] = MappingProxyType(
    {
        "e4m3fn": Fp8Format(3, 7, 448.0, 0x7E, 0x7F, True),
        "e4m3fnuz": Fp8Format(3, 8, 240.0, 0x7F, 0x80, False),
        "e5m2": Fp8Format(2, 15, 57344.0, 0x7B, 0x7E, True),
    }
)

FP8_DTYPES: Mapping[Dialect, np.dtype] = MappingProxyType({d: jnp.dtype(f"float8_{d}") for d in FORMATS})

_F32_INF = 0x7F800000


def _u32(value: int) -> np.uint32:
    return np.uint32(value)


def _bits(x: Num[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _float(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sign_and_nan(x: Num[Array, "*shape"]) -> tuple[UInt32[Array, "*shape"], Array]:
    """The sign as 0 or 0x80, and whether x is NaN, from the bits of its own type.

    Arithmetic loses the sign of a NaN on GPUs, and so does the conversion of float16 to float32.
    """
    if x.dtype.itemsize == 4:
        bits, infinity = jax.lax.bitcast_convert_type(x, jnp.uint32), _F32_INF
    else:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << _u32(16)
        infinity = 0x7C000000 if x.dtype == jnp.float16 else _F32_INF
    return (bits >> _u32(24)) & _u32(0x80), (bits & _u32(0x7FFFFFFF)) > _u32(infinity)


def plain_bits(x: Num[Array, "*shape"], dtype: jax.typing.DTypeLike) -> UInt32[Array, "*shape"]:
    """Bits of x cast to float32, bfloat16 or float16 by IEEE rules, in the low bytes of uint32.

    A number of that type already keeps its bits. A NaN that is cast becomes the quiet NaN of its sign, as numpy's casts give for
    ``nan``; devices differ in what they do with it.
    """
    dtype = jnp.dtype(dtype)
    word = jnp.uint32 if dtype.itemsize == 4 else jnp.uint16
    if x.dtype == dtype:
        return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    if dtype == jnp.bfloat16:
        # Rounded by integers, to nearest and ties to even: a CPU may flush the subnormals that a cast meets or makes.
        bits = _bits(x)
        bits = (bits + _u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1))) >> _u32(16)
    else:
        bits = jax.lax.bitcast_convert_type(x.astype(dtype), word).astype(jnp.uint32)
    quiet = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype.name]
    sign, is_nan = _sign_and_nan(x)
    return jnp.where(is_nan, _u32(quiet) | (sign << _u32(8 * dtype.itemsize - 8)), bits)


def encode_bits(
    x: Num[Array, "*shape"], dialect: Dialect, *, source: Num[Array, "*shape"] | None = None, native: bool = False
) -> UInt32[Array, "*shape"]:
    """FP8 codes of ``x`` (float32, bfloat16 or float16, any shape) in the low byte of uint32.

    ``source``: the numbers that ``x`` was computed from, if any; NaN and its sign are taken from them. ``native`` uses the device's
    own conversion for the rest. It is for Triton kernels on NVIDIA alone, where that conversion saturates; every other compiler
    must take the integer form.
    """
    fmt = FORMATS[dialect]
    source_sign, is_nan = _sign_and_nan(x if source is None else source)
    nan = source_sign | _u32(fmt.nan_code) if fmt.signed else _u32(fmt.nan_code)
    return jnp.where(is_nan, nan, _native_codes(x, dialect) if native else _codes(x, fmt))


def _native_codes(x: Num[Array, "*shape"], dialect: Dialect) -> UInt32[Array, "*shape"]:
    """Codes by the device's saturating conversion to OCP FP8; of NaN, anything.

    e4m3fnuz is e4m3fn of twice the number, but for what lies past the midpoint of 224 and 240, and for -0, which it lacks.
    """
    x = x.astype(jnp.float32)
    is_fnuz = dialect == "e4m3fnuz"
    values = (x * np.float32(2) if is_fnuz else x).astype(FP8_DTYPES["e4m3fn" if is_fnuz else dialect])
    codes = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32)
    if not is_fnuz:
        return codes
    codes = jnp.where(jnp.abs(x) > np.float32(232), codes | _u32(0x7F), codes)
    return jnp.where(codes == _u32(0x80), _u32(0), codes)


def _codes(x: Num[Array, "*shape"], fmt: Fp8Format) -> UInt32[Array, "*shape"]:
    """Codes by integer arithmetic on the bits of float32; of NaN, anything."""
    bits = _bits(x)
    magnitude = bits & _u32(0x7FFFFFFF)
    sign = (bits >> _u32(24)) & _u32(0x80)
    # Below the smallest normal exponent the significand is shifted further right, so one rounding serves normals and
    # subnormals, and a carry out of the mantissa lands in the exponent where it belongs. A shift of 25 already gives 0.
    smallest_normal = _u32(128 - fmt.bias)
    exponent = magnitude >> _u32(23)
    stored = jnp.maximum(exponent, smallest_normal)
    shift = jnp.minimum(stored - exponent + _u32(23 - fmt.mantissa_bits), _u32(25))
    significand = (magnitude & _u32(0x7FFFFF)) | _u32(0x800000)
    half = (_u32(1) << (shift - _u32(1))) - _u32(1)
    rounded = (significand + half + ((significand >> shift) & _u32(1))) >> shift
    codes = ((stored - smallest_normal) << _u32(fmt.mantissa_bits)) + rounded
    codes = jnp.minimum(codes, _u32(fmt.max_code))
    return codes | sign if fmt.signed else jnp.where(codes == _u32(0), _u32(0), codes | sign)


def encode(x: Num[Array, "*shape"], dialect: Dialect) -> UInt8[Array, "*shape"]:
    """FP8 codes of ``x``, one byte each."""
    return encode_bits(x, dialect).astype(jnp.uint8)


def decode(codes: Shaped[Array, "*shape"], dialect: Dialect) -> Float[Array, "*shape"]:
    """float32 values of FP8 codes (uint8, or uint32 with the code in its low byte); exact for all 256 codes."""
    fmt = FORMATS[dialect]
    codes = codes.astype(jnp.uint32)
    magnitude = codes & _u32(0x7F)
    normal = _float((magnitude << _u32(23 - fmt.mantissa_bits)) + _u32((127 - fmt.bias) << 23))
    # Subnormals go through an integer conversion: as float32 bits they would be denormal, which devices may flush.
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0 ** (1 - fmt.bias - fmt.mantissa_bits))
    value = jnp.where(magnitude < _u32(1 << fmt.mantissa_bits), subnormal, normal)
    if dialect == "e5m2":
        value = jnp.where(magnitude == _u32(0x7C), np.float32(np.inf), value)
        value = jnp.where(magnitude > _u32(0x7C), np.float32(np.nan), value)
    elif dialect == "e4m3fn":
        value = jnp.where(magnitude == _u32(0x7F), np.float32(np.nan), value)
    value = _float(_bits(value) | ((codes & _u32(0x80)) << _u32(24)))
    if dialect == "e4m3fnuz":
        value = jnp.where(codes == _u32(0x80), np.float32(-np.nan), value)  # ml_dtypes' sign, which a conversion keeps
    return value


def finite_amax(x: Num[Array, "*lead n"]) -> Float[Array, "*lead"]:
    """Largest magnitude among the finite members of the last axis, 0 if there are none."""
    # By bits, whose order is that of the magnitudes: a float maximum would flush subnormal ones on some devices.
    magnitude = _bits(x) & _u32(0x7FFFFFFF)
    return _float(jnp.max(jnp.where(magnitude < _u32(_F32_INF), magnitude, _u32(0)), axis=-1))


def larger(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The larger of two magnitudes, by bits as in :func:`finite_amax`."""
    return _float(jnp.maximum(_bits(a), _bits(b)))


def _pow2_scale(amax: Float[Array, "*shape"], fp8_max: float, floor: float) -> Float[Array, "*shape"]:
    """The smallest power of two s with s * fp8_max >= amax, at least ``floor`` (a power of two), by exponent bits.

    Comparing mantissas is exact where log2 and a division are not, and agrees with ceil(log2(amax / fp8_max)) for every
    float32 (a quotient never rounds across a power of two here).
    """
    limit = int(np.float32(fp8_max).view(np.uint32))
    bits = _bits(amax)
    exponent = bits >> _u32(23)
    above = (bits & _u32(0x7FFFFF)) > _u32(limit & 0x7FFFFF)
    smallest = _u32(int(np.float32(floor).view(np.uint32)) >> 23)
    offset = _u32((limit >> 23) - 127)
    exponent = jnp.maximum(exponent + above.astype(jnp.uint32), smallest + offset) - offset
    return _float(exponent << _u32(23))


PACKED_FLOOR = 2.0**-13
"""Smallest scale of a power-of-two group: 2^ceil(log2(1e-4))."""

_INDEX_AMAX_FLOOR = 1e-4


def packed_scale(amax: Float[Array, "*shape"], mode: ScaleMode) -> Float[Array, "*shape"]:
    """Scales of packed groups: pow2 is FlashMLA's 2^ceil(log2(max(amax/448, 1e-4))), fp32 is SGLang's amax * fl32(1/448).

    Groups with nothing to scale get 2^-13 (pow2) or 1 (fp32), so a scale is always finite and positive.
    """
    if mode == "pow2":
        return _pow2_scale(amax, FORMATS["e4m3fn"].max_finite, PACKED_FLOOR)
    return jnp.where(is_zero_group(amax, mode), np.float32(1), amax * np.float32(1 / 448))


def index_scale(amax: Float[Array, "*shape"], mode: ScaleMode, dialect: Dialect) -> Float[Array, "*shape"]:
    """Scales of index keys: max(amax, 1e-4) / m, or the smallest power of two no less; m is 448, or 240 for e4m3fnuz."""
    fp8_max = FORMATS[dialect].max_finite
    amax = jnp.maximum(amax, np.float32(_INDEX_AMAX_FLOOR))
    if mode == "pow2":
        # amax has a floor, so the smallest normal float is floor enough here.
        return _pow2_scale(amax, fp8_max, 2.0**-126)
    return amax * np.float32(1 / fp8_max)


def is_zero_group(amax: Float[Array, "*shape"], mode: ScaleMode) -> Array:
    """Groups whose finite members are all stored as code 0. In fp32 mode tiny groups count, whose reciprocal would overflow."""
    return _bits(amax) == _u32(0) if mode == "pow2" else amax < np.float32(2.0**-100)


def encode_group(
    x: Num[Array, "*lead n"],
    amax: Float[Array, "*lead"],
    scale: Float[Array, "*lead"],
    mode: ScaleMode,
    dialect: Dialect,
    *,
    native: bool = False,
) -> UInt32[Array, "*lead n"]:
    """Codes of x / scale for groups along the last axis.

    The reciprocal of a power of two is exact; in fp32 mode it may move a code by one. Adding -0 changes nothing; in a zero group
    a tiny positive number is added instead, so that every finite member, -0 and the tiny ones of fp32 mode included, gets code 0
    while infinities and NaN keep theirs.
    """
    zero = is_zero_group(amax, mode)
    tiny = np.float32(2.0**-60)
    factor = jnp.where(zero, tiny, np.float32(1) / scale)
    offset = jnp.where(zero, tiny, np.float32(-0.0))
    scaled = x.astype(jnp.float32) * factor[..., None] + offset[..., None]
    return encode_bits(scaled, dialect, source=x, native=native)


def divide(x: Float[Array, "*shape"], y: Float[Array, ""]) -> Float[Array, "*shape"]:
    """x / y rounded correctly, from operations every compiler here rounds correctly.

    Triton divides by an approximate reciprocal and XLA may replace a division by a constant; a quotient one ulp off changes the
    FP8 code at a tie. The quotient is corrected by its remainder, computed exactly from 12-bit halves (Dekker, 1971).
    """
    reciprocal = np.float32(1) / y
    quotient = x * reciprocal

    def halves(v: Array) -> tuple[Array, Array]:
        high = _float(_bits(v) & _u32(0xFFFFF000))
        return high, v - high

    q_high, q_low = halves(quotient)
    y_high, y_low = halves(y)
    remainder = ((x - q_high * y_high) - q_high * y_low - q_low * y_high) - q_low * y_low
    corrected = quotient + remainder * reciprocal
    # Near the ends of the range the products above leave it; there FP8 has only its extremes, which the quotient decides.
    magnitude = jnp.abs(quotient)
    return jnp.where((magnitude > np.float32(2.0**-60)) & (magnitude < np.float32(2.0**60)), corrected, quotient)
