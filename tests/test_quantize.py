"""The FP8 codecs against ml_dtypes, the scale rules against float64, and the division against IEEE."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from helpers import FP8, equal_nan, near_ties, steps
from mla_jax import quantize
from mla_jax.layout import GROUP

DIALECTS = tuple(FP8)
MODES = ("pow2", "fp32")


@functools.cache
def encoder(dialect):
    return jax.jit(functools.partial(quantize.encode, dialect=dialect))


def ml_encode(x: np.ndarray, dialect: str) -> np.ndarray:
    """Codes by ml_dtypes after clamping, which keeps NaN and turns infinities into the largest finite value."""
    dtype, largest = FP8[dialect]
    largest = np.asarray(largest, x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.clip(x, -largest, largest).astype(dtype).view(np.uint8)


def f32(bits) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def assert_codes(got, want, x):
    bad = np.flatnonzero(np.asarray(got) != want)
    assert bad.size == 0, f"{bad.size} codes differ, first {x[bad[0]]!r}: {np.asarray(got)[bad[0]]:#x} not {want[bad[0]]:#x}"


# ---- codecs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_encode_matches_ml_dtypes_for_every_16_bit_number(dialect, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    assert_codes(encoder(dialect)(x), ml_encode(x, dialect), x)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_encode_matches_ml_dtypes_for_ten_million_float32(dialect, rng):
    x = f32(rng.integers(0, 1 << 32, 10_000_000, dtype=np.uint32))
    assert_codes(encoder(dialect)(x), ml_encode(x, dialect), x)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_encode_matches_ml_dtypes_at_every_tie_and_around_it(dialect):
    # Random bits hardly ever hit the range of FP8, and a tie never: codes, midpoints and their float32 neighbours do.
    values = np.unique(np.abs(decoded_by_ml_dtypes(dialect)))
    values = values[np.isfinite(values)]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.0625, values[1:2] / 4])
    bits = points.astype(np.float32).view(np.uint32)
    bits = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1])
    x = np.concatenate([f32(bits), -f32(bits)])
    assert_codes(encoder(dialect)(x), ml_encode(x, dialect), x)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_extremes_have_the_promised_codes(dialect, dtype):
    largest = {"e4m3fn": 0x7E, "e4m3fnuz": 0x7F, "e5m2": 0x7B}[dialect]
    nan = {"e4m3fn": (0x7F, 0xFF), "e4m3fnuz": (0x80, 0x80), "e5m2": (0x7E, 0xFE)}[dialect]
    minus_zero = 0x00 if dialect == "e4m3fnuz" else 0x80
    x = np.array([np.inf, -np.inf, 6e4, -6e4, 0.0, -0.0, np.nan, -np.nan], np.float32).astype(dtype)
    want = [largest, largest | 0x80, largest, largest | 0x80, 0, minus_zero, *nan]
    np.testing.assert_array_equal(encoder(dialect)(x), np.array(want, np.uint8))
    tiny = np.array([-1e-5, 1e-5], np.float32)
    if dialect != "e5m2":
        # A tiny negative must not become the NaN of e4m3fnuz.
        np.testing.assert_array_equal(encoder(dialect)(tiny), np.array([minus_zero, 0], np.uint8))


def decoded_by_ml_dtypes(dialect: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(FP8[dialect][0]).astype(np.float32)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_decode_is_exact_for_every_code(dialect, dtype):
    codes = np.arange(256).astype(dtype)
    assert equal_nan(jax.jit(lambda c: quantize.decode(c, dialect))(codes), decoded_by_ml_dtypes(dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_encode_inverts_decode(dialect):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.copy()
    if dialect == "e5m2":
        # Infinities saturate, and of three NaN codes one is written.
        want[[0x7C, 0xFC]] = [0x7B, 0xFB]
        want[[0x7D, 0x7F, 0xFD, 0xFF]] = [0x7E, 0x7E, 0xFE, 0xFE]
    np.testing.assert_array_equal(encoder(dialect)(quantize.decode(jnp.asarray(codes), dialect)), want)


def test_the_two_e4m3_dialects_read_the_same_bytes_differently():
    # https://github.com/vllm-project/vllm/pull/45720: bytes written as one and read as the other are half, or NaN.
    fn, fnuz = (np.asarray(quantize.decode(jnp.arange(256, dtype=jnp.uint8), d)) for d in ("e4m3fn", "e4m3fnuz"))
    same = np.ones(256, bool)
    same[[0x7F, 0x80, 0xFF]] = False
    np.testing.assert_array_equal(fn[same], 2 * fnuz[same])
    assert np.isnan(fn[0x7F]) and fnuz[0x7F] == 240
    assert fn[0x80] == 0 and np.isnan(fnuz[0x80])
    assert np.isnan(fn[0xFF]) and fnuz[0xFF] == -240


@pytest.mark.parametrize("dialect", DIALECTS)
def test_codec_runs_inside_a_pallas_kernel(dialect, rng):
    x = f32(rng.integers(0, 1 << 32, 1024, dtype=np.uint32)).copy()
    x[:256] = decoded_by_ml_dtypes(dialect)

    def kernel(x_ref, codes_ref, values_ref):
        codes = quantize.encode_bits(x_ref[...], dialect)
        codes_ref[...] = codes.astype(jnp.uint8)
        values_ref[...] = quantize.decode(codes, dialect)

    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.uint8), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    codes, values = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x)
    want = ml_encode(x, dialect)
    assert_codes(codes, want, x)
    assert equal_nan(values, want.view(FP8[dialect][0]).astype(np.float32))


def test_formats_agree_with_ml_dtypes():
    for dialect, fmt in quantize.FORMATS.items():
        dtype, largest = FP8[dialect]
        info = ml_dtypes.finfo(dtype)
        assert fmt.max_finite == largest == float(info.max)
        assert np.array(fmt.max_code, np.uint8).view(dtype) == largest
        assert np.isnan(np.array(fmt.nan_code, np.uint8).view(dtype).astype(np.float32))
        assert float(info.smallest_subnormal) == 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
        assert quantize.FP8_DTYPES[dialect] == dtype


# ---- scales ----------------------------------------------------------------------------------------------------------


def power_of_two_at_least(x: np.ndarray) -> np.ndarray:
    """The smallest power of two no less than each x > 0, by float64's own exponent."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


def amax_samples(rng, largest: float) -> np.ndarray:
    """Positive float32: random ones, and every largest * 2^k with the float32 on either side of it."""
    random = f32(rng.integers(1 << 23, 0x7F800000, 500_000, dtype=np.uint32))
    with np.errstate(over="ignore"):
        edges = np.float32(largest) * 2.0 ** np.arange(-110, 120).astype(np.float32)
    edges = edges[np.isfinite(edges)].astype(np.float32).view(np.uint32)
    return np.concatenate([random, f32(np.concatenate([edges - 1, edges, edges + 1]))])


def test_packed_pow2_scale_is_the_smallest_sufficient_power_of_two(rng):
    amax = amax_samples(rng, 448)
    got = jax.jit(lambda a: quantize.packed_scale(a, "pow2"))(amax)
    want = power_of_two_at_least(np.maximum(amax.astype(np.float64) / 448, 1e-4))
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


def test_packed_fp32_scale_is_amax_times_the_rounded_reciprocal(rng):
    amax = amax_samples(rng, 448)
    got = jax.jit(lambda a: quantize.packed_scale(a, "fp32"))(amax)
    want = np.where(amax < np.float32(2.0**-100), np.float32(1), amax * np.float32(1 / 448))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("mode", MODES)
def test_index_scale_has_its_floor_and_its_denominator(dialect, mode, rng):
    m = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}[dialect]
    amax = np.concatenate([amax_samples(rng, m), np.array([0, 1e-4, 9.9e-5, 1e-30], np.float32)])
    got = np.asarray(jax.jit(lambda a: quantize.index_scale(a, mode, dialect))(amax))
    floored = np.maximum(amax, np.float32(1e-4))
    if mode == "fp32":
        np.testing.assert_array_equal(got, floored * np.float32(1 / m))
    else:
        np.testing.assert_array_equal(got.astype(np.float64), power_of_two_at_least(floored.astype(np.float64) / m))
    assert np.all(np.isfinite(got) & (got > 0))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (336.0, 1.0),
        (448.0, 1.0),
        (449.0, 2.0),
        (np.nextafter(np.float32(448), np.float32(0)), 1.0),
        (np.nextafter(np.float32(448), np.float32(1e9)), 2.0),
        (0.0, 2.0**-13),
        (448 * 2.0**-13, 2.0**-13),
        (448 * 2.0**-14, 2.0**-13),
        (1e-30, 2.0**-13),
        (3.4028235e38, 2.0**120),
    ],
)
def test_packed_pow2_scale_of_known_groups(amax, scale):
    # https://github.com/vllm-project/vllm/pull/49435: a reader that rounds scales to E8M0 must find a power of two.
    got = quantize.packed_scale(jnp.float32(amax), "pow2")
    assert got == scale
    assert np.float32(got).view(np.uint32) & 0x7FFFFF == 0


def test_packed_fp32_scale_of_known_groups():
    got = [float(quantize.packed_scale(jnp.float32(a), "fp32")) for a in (448.0, 336.0, 0.0, 2.0**-101)]
    assert got == pytest.approx([1.0, 0.75, 1.0, 1.0], rel=1e-7)
    assert got[2:] == [1.0, 1.0]


def test_finite_amax_ignores_what_is_not_finite():
    x = np.zeros((6, GROUP), np.float32)
    x[0, 5] = -3
    x[1, :3] = [np.nan, 2, -np.inf]
    x[2] = np.nan
    x[3] = -np.inf
    x[4] = -0.0
    x[5, 7] = -3.4028235e38
    want = np.array([3, 2, 0, 0, 0, 3.4028235e38], np.float32)
    np.testing.assert_array_equal(jax.jit(quantize.finite_amax)(x), want)


# ---- groups ----------------------------------------------------------------------------------------------------------


def groups(rng, n: int = 4000) -> np.ndarray:
    """[n, 128] groups of all magnitudes, some with NaN and infinities, some of zeros."""
    x = rng.standard_normal((n, GROUP)) * 2.0 ** rng.integers(-40, 60, (n, 1))
    x *= 2.0 ** rng.integers(-8, 1, x.shape)
    x[rng.random(x.shape) < 0.01] = np.nan
    x[rng.random(x.shape) < 0.01] = -np.nan
    x[rng.random(x.shape) < 0.01] = np.inf
    x[rng.random(x.shape) < 0.01] = -np.inf
    x[:50] = 0.0
    x[50:60] = -0.0
    x[60:70] = np.nan
    x[70:80] = -np.inf
    x[80:90, ::3] = np.nan
    x[80:90, 1::3] = 0.0
    x[80:90, 2::3] = np.inf
    return x.astype(np.float32)


@functools.cache
def group_encoder(mode, dialect, index):
    @jax.jit
    def run(x):
        amax = quantize.finite_amax(x)
        scale = quantize.index_scale(amax, mode, dialect) if index else quantize.packed_scale(amax, mode)
        return quantize.encode_group(x, amax, scale, mode, dialect).astype(jnp.uint8), scale

    return run


@pytest.mark.parametrize(("index", "dialect"), [(False, "e4m3fn"), (True, "e4m3fn"), (True, "e4m3fnuz")])
def test_pow2_codes_are_those_of_the_exact_quotient(index, dialect, rng):
    x = groups(rng)
    codes, scale = map(np.asarray, group_encoder("pow2", dialect, index)(x))
    # Dividing a float32 by a power of two is exact wherever FP8 has a nonzero code.
    exact = (x.astype(np.float64) / scale[:, None]).astype(np.float32)
    want = ml_encode(exact, dialect)
    amax = np.max(np.where(np.isfinite(x), np.abs(x), 0), axis=1)
    want[(amax == 0)[:, None] & np.isfinite(x)] = 0
    assert_codes(codes.ravel(), want.ravel(), x.ravel())


@pytest.mark.parametrize(("index", "dialect"), [(False, "e4m3fn"), (True, "e4m3fn"), (True, "e4m3fnuz")])
def test_fp32_codes_are_within_one_of_the_exact_quotient(index, dialect, rng):
    x = groups(rng)
    codes, scale = map(np.asarray, group_encoder("fp32", dialect, index)(x))
    with np.errstate(over="ignore"):
        want = ml_encode((x.astype(np.float64) / scale[:, None]).astype(np.float32), dialect)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(codes[is_nan], want[is_nan])
    distance = np.abs(steps(codes[~is_nan]) - steps(want[~is_nan]))
    assert distance.max() <= 1
    # Within one is for rounding's sake; a wrong reciprocal would move far more than a few.
    assert np.mean(distance != 0) < 0.01


@pytest.mark.parametrize("mode", MODES)
def test_zero_group_has_zero_codes_and_the_promised_scale(mode):
    x = np.zeros((3, GROUP), np.float32)
    x[1] = -0.0
    x[2, ::2] = -0.0
    codes, scale = group_encoder(mode, "e4m3fn", False)(x)
    assert not np.any(np.asarray(codes))
    assert np.all(np.asarray(scale) == {"pow2": 2.0**-13, "fp32": 1.0}[mode])


@pytest.mark.parametrize("mode", MODES)
def test_group_without_finite_members_keeps_nan_and_saturates(mode):
    x = np.zeros((2, GROUP), np.float32)
    x[0], x[1] = np.nan, -np.inf
    x[0, 0], x[1, 0] = -np.nan, np.inf
    codes, scale = map(np.asarray, group_encoder(mode, "e4m3fn", False)(x))
    assert codes[0].tolist() == [0xFF] + [0x7F] * 127
    assert codes[1].tolist() == [0x7E] + [0xFE] * 127
    assert np.all(np.isfinite(scale) & (scale > 0))


@pytest.mark.parametrize("mode", MODES)
def test_infinity_in_a_group_leaves_its_neighbours_alone(mode):
    x = np.full((1, GROUP), 3.0, np.float32)
    calm_codes, calm_scale = map(np.asarray, group_encoder(mode, "e4m3fn", False)(x))
    x[0, 7], x[0, 9] = np.inf, np.nan
    codes, scale = map(np.asarray, group_encoder(mode, "e4m3fn", False)(x))
    assert scale == calm_scale
    others = np.delete(np.arange(GROUP), [7, 9])
    np.testing.assert_array_equal(codes[0, others], calm_codes[0, others])
    assert (codes[0, 7], codes[0, 9]) == (0x7E, 0x7F)


@pytest.mark.parametrize("sign", [1, -1])
def test_group_of_subnormals_only_is_no_zero_group(sign):
    # XLA on a CPU flushes subnormals in arithmetic; whether a group counts as zero must not depend on the device.
    x = np.full((1, GROUP), sign * 1e-40, np.float32)
    codes, scale = map(np.asarray, group_encoder("pow2", "e4m3fn", False)(x))
    assert scale == 2.0**-13
    assert np.all(codes == (0x80 if sign < 0 else 0))


def test_tiny_group_of_fp32_mode_has_zero_codes():
    x = np.full((2, GROUP), -(2.0**-101), np.float32)
    x[1] = 2.0**-100
    codes, scale = map(np.asarray, group_encoder("fp32", "e4m3fn", False)(x))
    assert scale[0] == 1.0 and not np.any(codes[0])
    assert scale[1] < 2.0**-100 and np.all(codes[1] == 0x7E)


# ---- division --------------------------------------------------------------------------------------------------------

divide = jax.jit(quantize.divide)


def numbers(rng, low: int, high: int, n: int) -> np.ndarray:
    """Random float32 of either sign with exponents in [low, high)."""
    exponent = rng.integers(low + 127, high + 127, n, dtype=np.uint32)
    bits = rng.integers(0, 1 << 23, n, dtype=np.uint32) | exponent << np.uint32(23)
    return f32(bits | rng.integers(0, 2, n, dtype=np.uint32) << np.uint32(31))


@pytest.mark.parametrize("spread", [1, 20, 60])
def test_division_is_ieee(spread, rng):
    x, y = numbers(rng, -spread, spread, 2_000_000), np.abs(numbers(rng, -spread, spread, 2_000_000))
    want = x / y
    inside = (np.abs(want) > 2.0**-60) & (np.abs(want) < 2.0**60)
    got = np.asarray(divide(x, y))
    bad = np.flatnonzero((got != want) & inside)
    assert bad.size == 0, f"{bad.size} differ, first {x[bad[0]]!r} / {y[bad[0]]!r}: {got[bad[0]]!r}, not {want[bad[0]]!r}"
    # Outside that range only FP8's extremes are left, 0 and the largest, and the sign.
    outside = np.isfinite(want) & ~inside
    np.testing.assert_allclose(got[outside], want[outside], rtol=3e-7, atol=2.0**-120)


@pytest.mark.parametrize("k_scale", [0.5, 1.5, 0.3, 3.0, 0.1, 448.0, 1 / 448])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_division_by_k_scale_gives_the_codes_of_the_ieee_quotient(dialect, k_scale):
    x, k = near_ties(dialect, k_scale)
    assert_codes(encoder(dialect)(divide(x, k)), ml_encode(x / k, dialect), x)


def test_product_with_the_reciprocal_would_give_other_codes():
    # What the division is for: the same numbers through x * (1 / k_scale), as a compiler would have it.
    x, k = near_ties("e4m3fn", 0.3)
    with_reciprocal = ml_encode(x * (np.float32(1) / k), "e4m3fn")
    assert np.count_nonzero(with_reciprocal != ml_encode(x / k, "e4m3fn")) > 10


def test_division_hits_a_tie_exactly():
    # 1.59375 / 1.5 = 1.0625, the midpoint of 1 and 1.125, which rounds to even; the next float32 rounds up.
    x = np.array([1.59375, np.float32(1.59375 + 2**-23)], np.float32)
    quotient = divide(x, np.float32(1.5))
    assert np.asarray(quotient)[0] == np.float32(1.0625)
    np.testing.assert_array_equal(encoder("e4m3fn")(quotient), ml_encode(np.array([1.0, 1.125], np.float32), "e4m3fn"))


def test_division_of_specials():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    assert equal_nan(divide(x, np.float32(1.5)), x)
