"""Bytes: FP8 codes, scales, rows and index pages, and where a pool holds them."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Ints = ArrayLike  # of whole numbers
Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

GROUP = 128
"""Channels that share one scale."""

# dialect -> (dtype, largest finite value)
_FP8: dict[str, tuple[Any, float]] = {
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
_PLAIN = {"plain_float32": np.float32, "plain_bfloat16": ml_dtypes.bfloat16, "plain_float16": np.float16}


@np.errstate(all="ignore")
def encode_fp8(x: ArrayLike, dialect: str) -> Bytes:
    """FP8 codes [*] of x [*]: round to nearest, ties to even; beyond the largest finite value, that value.

    NaN gets ml_dtypes' code: 0x7F (e4m3fn) or 0x7E (e5m2) with its sign bit kept, 0x80 in e4m3fnuz, which has no other.
    x is float32, bfloat16 or float16; float64 is taken too, but ml_dtypes rounds it to float32 on the way.
    """
    dtype, largest = _FP8[dialect]
    x = np.asarray(x)
    x = x if x.dtype == np.float64 else x.astype(np.float32)  # exact for the 16-bit types
    # ml_dtypes alone turns overflow into NaN. Comparisons are false for NaN, so NaN passes.
    x = np.where(x > largest, x.dtype.type(largest), x)
    x = np.where(x < -largest, x.dtype.type(-largest), x)
    return x.astype(dtype).view(np.uint8)


def decode_fp8(code: ArrayLike, dialect: str) -> Float32:
    """Values [*] of FP8 codes uint8 [*], exactly."""
    return np.asarray(code, np.uint8).view(_FP8[dialect][0]).astype(np.float32)


def _power_of_two_at_least(x: ArrayLike) -> Float64:
    """The smallest power of two >= x > 0, exactly."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def packed_scale(amax: ArrayLike, mode: str) -> Float32:
    """Scales [*] of packed groups from amax [*], the largest magnitude of a group's finite members (0 if it has none).

    "pow2": 2^ceil(log2(max(amax/448, 1e-4))), hence 2^-13 or more. "fp32": amax * fl32(1/448), but 1 if amax < 2^-100.
    """
    amax = np.asarray(amax, np.float32)
    if mode == "fp32":
        return np.where(amax < 2.0**-100, np.float32(1), amax * np.float32(1 / 448))
    assert mode == "pow2", mode
    # float64 has bits to spare: no quotient of a float32 rounds onto a power of two that it does not equal.
    return _power_of_two_at_least(np.maximum(amax.astype(np.float64) / 448, 1e-4)).astype(np.float32)


def index_scale(amax: ArrayLike, mode: str, fp8_max: float) -> Float32:
    """Scales [*] of index keys from amax [*]: max(amax, 1e-4) * fl32(1/fp8_max), zero groups included.

    "pow2": the smallest power of two >= max(amax, 1e-4) / fp8_max. fp8_max is 448 (e4m3fn) or 240 (e4m3fnuz).
    """
    amax = np.maximum(np.asarray(amax, np.float32), np.float32(1e-4))
    if mode == "fp32":
        return amax * np.float32(1 / fp8_max)
    assert mode == "pow2", mode
    return _power_of_two_at_least(amax.astype(np.float64) / fp8_max).astype(np.float32)


@np.errstate(all="ignore")
def _encode_group(x: Array, dialect: str, scale_mode: str, *, index: bool) -> tuple[Bytes, Float32]:
    """Codes [*, n] and scales [*] of groups x [*, n]."""
    x = x.astype(np.float32)
    finite = np.isfinite(x)
    amax = np.max(np.where(finite, np.abs(x), np.float32(0)), axis=-1)
    scale = index_scale(amax, scale_mode, _FP8[dialect][1]) if index else packed_scale(amax, scale_mode)
    # Exact when the scale is a power of two. Otherwise the rules leave one code of play, more than the rounding needs.
    codes = encode_fp8(x.astype(np.float64) / scale[..., None].astype(np.float64), dialect)
    # Finite members of a zero group are literally 0x00, where a division might leave -0. Inf and NaN keep their codes.
    zero = amax < 2.0**-100 if scale_mode == "fp32" else amax == 0
    return np.where(zero[..., None] & finite, np.uint8(0), codes), scale


def _view(x: Array, dtype: Any) -> Array:
    """The bytes of the last axis of x [*, n] as ``dtype``."""
    return np.ascontiguousarray(x).view(dtype)


def _check_layout(name: str, dialect: str | None, k_scale: float | None) -> None:
    known = {**dict.fromkeys(_PLAIN), **{f"raw_{d}": d for d in _FP8}, "packed": "e4m3fn"}
    if name not in known or dialect != known[name]:
        raise ValueError(f"no layout {name!r} with dialect {dialect!r}; the layouts and their dialects are {known}")
    if k_scale is not None and k_scale != 1 and not name.startswith("raw_"):
        raise ValueError(f"{name} rows take no k_scale, got {k_scale!r}")


@np.errstate(all="ignore")
def encode_rows(
    c_kv: Array,
    k_rope: Array,
    name: str,
    dialect: str | None,
    scale_mode: str | None = None,
    k_scale: float | None = None,
) -> Bytes:
    """The stored bytes [*, W] of latents c_kv [*, R] and ropes k_rope [*, P], each float32, bfloat16 or float16.

    =============  ======================================================  ================
    name           fields, in order                                        W
    =============  ======================================================  ================
    plain_<dtype>  R latent, P rope in float32, bfloat16 or float16        itemsize (R + P)
    raw_<dialect>  R latent codes, P rope codes                            R + P
    packed         R e4m3fn codes, R/128 float32 scales, P bfloat16 rope   R + R/32 + 2 P
    =============  ======================================================  ================

    dialect is the layout's, None for plain rows. scale_mode ("pow2" or "fp32") counts for packed rows alone, k_scale
    for raw ones, whose numbers are divided by it in float32 before they are encoded.
    """
    _check_layout(name, dialect, k_scale)
    c_kv, k_rope = np.asarray(c_kv), np.asarray(k_rope)
    if dialect is None:
        parts = [_view(part.astype(_PLAIN[name]), np.uint8) for part in (c_kv, k_rope)]
    elif name == "packed":
        assert scale_mode is not None
        groups = c_kv.reshape(*c_kv.shape[:-1], c_kv.shape[-1] // GROUP, GROUP)
        codes, scales = _encode_group(groups, dialect, scale_mode, index=False)
        parts = [codes.reshape(c_kv.shape), _view(scales, np.uint8), _view(k_rope.astype(ml_dtypes.bfloat16), np.uint8)]
    else:
        divisor = np.float32(1 if k_scale is None else k_scale)
        parts = [encode_fp8(part.astype(np.float32) / divisor, dialect) for part in (c_kv, k_rope)]
    return np.concatenate(parts, axis=-1)


@np.errstate(all="ignore")
def decode_rows(
    rows: Bytes, R: int, P: int, name: str, dialect: str | None, k_scale: float | None = None
) -> tuple[Float32, Float32]:
    """Latents [*, R] and ropes [*, P] that rows [*, W] hold, dequantised.

    Raw rows are multiplied by k_scale; whoever passes it here must not pass it to an attention as well.
    """
    _check_layout(name, dialect, k_scale)
    if name == "packed":
        codes, scales, rope = np.split(rows, [R, R + R // GROUP * 4], axis=-1)
        latent = decode_fp8(codes, "e4m3fn") * np.repeat(_view(scales, np.float32), GROUP, axis=-1)
        return latent, _view(rope, ml_dtypes.bfloat16).astype(np.float32)
    if dialect is None:
        values = _view(rows, _PLAIN[name]).astype(np.float32)
    else:
        values = decode_fp8(rows, dialect) * np.float32(1 if k_scale is None else k_scale)
    return values[..., :R], values[..., R : R + P]


def write_rows(pool: Array, slots: Ints, rows: Array) -> Array:
    """A copy of pool [pages, page_size, W] with rows [T, W] at slots int [T]; those <= 0 or >= capacity are dropped."""
    pool = np.array(pool)
    pages, page_size = pool.shape[:2]
    for slot, row in zip(np.asarray(slots, np.int64), rows, strict=True):
        if 0 < slot < pages * page_size:
            pool[slot // page_size, slot % page_size] = row
    return pool


def read_rows(pool: Array, slots: Ints) -> Array:
    """Rows [T, W] of pool [pages, page_size, W] (bytes or numbers) at slots int [T], zeros for those out of range."""
    pages, page_size = pool.shape[:2]
    slots = np.asarray(slots, np.int64)
    rows = np.zeros((len(slots), *pool.shape[2:]), pool.dtype)
    for t, slot in enumerate(slots):
        if 0 <= slot < pages * page_size:
            rows[t] = pool[slot // page_size, slot % page_size]
    return rows


def index_ranges(offset: int, page_size: int, d: int, dialect: str | None) -> tuple[slice, slice]:
    """Byte ranges, within an index page, of the key and of the scales of the token at ``offset`` in that page.

    All keys come before all scales, so a token's bytes are not contiguous. dialect None is a float32 cache: its keys
    are float32 numbers and its scales an empty range.
    """
    width = 4 * d if dialect is None else d
    scale_width = 0 if dialect is None else 4 * -(-d // GROUP)
    scales = page_size * width + offset * scale_width
    return slice(offset * width, (offset + 1) * width), slice(scales, scales + scale_width)


def _encode_index_keys(keys: Array, dialect: str | None, scale_mode: str | None) -> tuple[Bytes, Bytes]:
    """Bytes of keys [T, d] and of their scales: [T, d] and [T, 4 G], or [T, 4 d] and [T, 0] for dialect None."""
    if dialect is None:
        return _view(keys.astype(np.float32), np.uint8), np.zeros((len(keys), 0), np.uint8)
    assert scale_mode is not None
    groups = [keys[:, start : start + GROUP] for start in range(0, keys.shape[1], GROUP)]  # the last may be a part
    encoded = [_encode_group(group, dialect, scale_mode, index=True) for group in groups]
    scales = np.stack([scale for _, scale in encoded], axis=1)
    return np.concatenate([codes for codes, _ in encoded], axis=1), _view(scales, np.uint8)


def encode_index_page(keys: Array, dialect: str | None, scale_mode: str | None = None) -> Bytes:
    """The page [page_size * (d + 4 G)] of keys [page_size, d]; [page_size * 4 d] for dialect None, a float32 cache.

    All keys token-major, then one float32 scale a token and 128 channels or part, token-major.
    """
    key_bytes, scale_bytes = _encode_index_keys(np.asarray(keys), dialect, scale_mode)
    return np.concatenate([key_bytes.reshape(-1), scale_bytes.reshape(-1)])


@np.errstate(all="ignore")
def decode_index_page(page: Bytes, page_size: int, d: int, dialect: str | None) -> Float32:
    """Keys [*, page_size, d] of pages [*, page bytes], dequantised."""
    keys = []
    for offset in range(page_size):
        key, scales = (page[..., part] for part in index_ranges(offset, page_size, d, dialect))
        if dialect is None:
            keys.append(_view(key, np.float32))
        else:
            scale = np.repeat(_view(scales, np.float32), GROUP, axis=-1)[..., :d]
            keys.append(decode_fp8(key, dialect) * scale)
    return np.stack(keys, axis=-2)


def write_index_keys(
    pool: Bytes, slots: Ints, keys: Array, page_size: int, dialect: str | None, scale_mode: str | None = None
) -> Bytes:
    """A copy of pool [pages, page bytes] with keys [T, d] at slots int [T], dropped as in ``write_rows``."""
    pool, keys = np.array(pool), np.asarray(keys)
    key_bytes, scale_bytes = _encode_index_keys(keys, dialect, scale_mode)
    for t, slot in enumerate(np.asarray(slots, np.int64)):
        if 0 < slot < len(pool) * page_size:
            key, scales = index_ranges(int(slot % page_size), page_size, keys.shape[1], dialect)
            pool[slot // page_size, key] = key_bytes[t]
            pool[slot // page_size, scales] = scale_bytes[t]
    return pool
