"""The oracle against numbers worked out by hand, and against public faults of other libraries."""

import ast
import inspect
import math

import ml_dtypes
import numpy as np
import pytest

from mla_jax import reference as ref
from mla_jax.reference import attending, stored

BF16 = ml_dtypes.bfloat16
INF, NAN = math.inf, math.nan
LN = math.log


def f32(*values) -> np.ndarray:
    return np.array(values, np.float32)


def codes(x, dialect: str) -> list[int]:
    return ref.encode_fp8(x, dialect).tolist()


def float_bytes(bits: int) -> list[int]:
    """The little-endian bytes of a 32-bit number."""
    return list(bits.to_bytes(4, "little"))


def test_shares_no_code_with_the_implementations():
    imported = set()
    for module in (ref, attending, stored):
        tree = ast.parse(inspect.getsource(module))
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"mla_jax.reference.attending", "mla_jax.reference.stored"}
    assert imported - own <= {"typing", "ml_dtypes", "numpy", "numpy.typing"}


# ---- FP8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "e4m3fn", "e4m3fnuz"),
    [
        (1.0, 0x38, 0x40),
        (-1.0, 0xB8, 0xC0),
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x00),
        (-1e-5, 0x80, 0x00),  # not 0x80 in fnuz, which is its NaN
        (2.0**-9, 0x01, 0x02),
        (2.0**-10, 0x00, 0x01),  # fn: a tie between 0 and its smallest number
        (2.0**-11, 0x00, 0x00),
        (3 * 2.0**-11, 0x01, 0x02),
        (2.0**-12, 0x00, 0x00),
        (1.0625, 0x38, 0x40),  # ties go to the even code
        (1.1875, 0x3A, 0x42),
        (240.0, 0x77, 0x7F),
        (241.0, 0x77, 0x7F),
        (247.9, 0x77, 0x7F),
        (248.0, 0x78, 0x7F),  # fn: a tie that goes to 256
        (-248.0, 0xF8, 0xFF),
        (256.0, 0x78, 0x7F),
        (448.0, 0x7E, 0x7F),
        (449.0, 0x7E, 0x7F),
        (464.0, 0x7E, 0x7F),
        (465.0, 0x7E, 0x7F),  # ml_dtypes alone gives NaN from here on
        (480.0, 0x7E, 0x7F),
        (-1e30, 0xFE, 0xFF),
        (INF, 0x7E, 0x7F),
        (-INF, 0xFE, 0xFF),
        (NAN, 0x7F, 0x80),
        (-NAN, 0xFF, 0x80),
    ],
)
def test_e4m3_codes(x, e4m3fn, e4m3fnuz):
    assert codes(f32(x), "e4m3fn") == [e4m3fn]
    assert codes(f32(x), "e4m3fnuz") == [e4m3fnuz]


def test_e5m2_codes():
    x = f32(1.0, 1.125, 1.375, -0.0, 2.0**-16, -1e-5, 57344, 61440, 1e30, INF, -INF, NAN, -NAN)
    want = [0x3C, 0x3C, 0x3E, 0x80, 0x01, 0x81, 0x7B, 0x7B, 0x7B, 0x7B, 0xFB, 0x7E, 0xFE]
    assert codes(x, "e5m2") == want


def test_codes_of_16_bit_inputs():
    # bfloat16 has rounded 465 to 464 already; float16 reaches beyond all three formats.
    assert codes(np.array([1.0, 465, -INF, -NAN], BF16), "e4m3fn") == [0x38, 0x7E, 0xFE, 0xFF]
    for dialect, want in (("e4m3fn", [0x7E, 0xFF]), ("e4m3fnuz", [0x7F, 0x80]), ("e5m2", [0x7B, 0xFE])):
        assert codes(np.array([65504, -NAN], np.float16), dialect) == want


@pytest.mark.parametrize(("dialect", "bias", "mantissa"), [("e4m3fn", 7, 3), ("e4m3fnuz", 8, 3), ("e5m2", 15, 2)])
def test_values_of_all_codes(dialect, bias, mantissa):
    not_numbers = {
        "e4m3fn": {0x7F: NAN, 0xFF: NAN},
        "e4m3fnuz": {0x80: NAN},
        "e5m2": {0x7C: INF, 0xFC: -INF, **dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), NAN)},
    }[dialect]
    want = []
    for code in range(256):
        exponent, low = divmod(code & 0x7F, 1 << mantissa)
        fraction = low / (1 << mantissa)
        size = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        want.append(not_numbers.get(code, -size if code & 0x80 else size))
    got = ref.decode_fp8(np.arange(256, dtype=np.uint8), dialect)
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    assert got.dtype == np.float32
    if dialect != "e4m3fnuz":
        assert math.copysign(1, got[0x80]) == -1


def test_one_dialect_read_as_the_other():
    # https://github.com/vllm-project/vllm/pull/45720: half the magnitude, and NaN for every -0.
    fn, fnuz = (ref.decode_fp8(np.arange(256, dtype=np.uint8), d) for d in ("e4m3fn", "e4m3fnuz"))
    same = ~np.isin(np.arange(256), [0x7F, 0x80, 0xFF])
    assert same.sum() == 253
    np.testing.assert_array_equal(fn[same], 2 * fnuz[same])
    assert (fn[0x7E], fnuz[0x7F], fnuz[0xFF]) == (448, 240, -240)
    assert np.isnan([fn[0x7F], fn[0xFF], fnuz[0x80]]).all()


# ---- scales ----------------------------------------------------------------------------------------------------------

ABOVE_448 = np.nextafter(np.float32(448), np.float32(449))


def test_packed_scales():
    # https://github.com/vllm-project/vllm/pull/49435: 336 is 0.75 * 448, which a reader of powers of two would round.
    amax = np.array([336, 448, ABOVE_448, 449, 224, 0, 448 * 2.0**-13, ABOVE_448 * 2.0**-13, 1, 3e38], np.float32)
    want = f32(1, 1, 2, 2, 0.5, 2.0**-13, 2.0**-13, 2.0**-12, 2.0**-8, 2.0**120)
    np.testing.assert_array_equal(ref.packed_scale(amax, "pow2"), want)
    # fl32(1/448) is 0x3B124925, a little too large, so 336 gives the number after 0.75.
    got = ref.packed_scale(f32(1, 336, 2.0**-100, 0.99 * 2.0**-100, 0), "fp32")
    assert got.view(np.uint32).tolist() == [0x3B124925, 0x3F400001, 0x3B124925 - (100 << 23), 0x3F800000, 0x3F800000]


def test_index_scales():
    amax = np.array([448, ABOVE_448, 449, 1, 0, 1e-4], np.float32)
    want = f32(1, 2, 2, 2.0**-8, 2.0**-22, 2.0**-22)  # 1e-4/448 is 2.2e-7, 2^-22 is 2.4e-7
    np.testing.assert_array_equal(ref.index_scale(amax, "pow2", 448), want)
    want = f32(1, 2, 2.0**-7, 2.0**-21)
    np.testing.assert_array_equal(ref.index_scale(f32(240, 241, 1, 0), "pow2", 240), want)
    got = ref.index_scale(f32(1, 0), "fp32", 448)
    assert got[0] == np.float32(1 / 448)
    np.testing.assert_allclose(got[1], 1e-4 / 448, rtol=2e-7)
    np.testing.assert_allclose(ref.index_scale(f32(480, 0), "fp32", 240), [2, 1e-4 / 240], rtol=2e-7)


# ---- latent rows -----------------------------------------------------------------------------------------------------


def test_packed_row_of_ones_replaces_all_656_bytes():
    # https://github.com/sgl-project/sglang/pull/31338: rows of 656 bytes of which 576 were written.
    ones = np.ones((1, 512), BF16), np.ones((1, 64), BF16)
    row = ref.encode_rows(*ones, "packed", "e4m3fn", "fp32")
    assert row.shape == (1, 656) and row.dtype == np.uint8
    assert row[0, :512].tolist() == [0x7E] * 512
    assert row[0, 512:528].tolist() == float_bytes(0x3B124925) * 4
    assert row[0, 528:].tolist() == [0x80, 0x3F] * 64
    row = ref.encode_rows(*ones, "packed", "e4m3fn", "pow2")
    assert row[0, :512].tolist() == [0x78] * 512  # 1 / 2^-8 = 256
    assert row[0, 512:528].tolist() == float_bytes(0x3B800000) * 4

    pool = ref.write_rows(np.full((2, 1, 656), 0xAA, np.uint8), [1], row)
    assert not np.any(pool[1] == 0xAA) and np.all(pool[0] == 0xAA)


def test_packed_groups_have_their_own_scales():
    c_kv = np.zeros((1, 384), np.float32)
    c_kv[0, 0] = 336
    c_kv[0, 128], c_kv[0, 255] = -449, 1
    c_kv[0, 256] = -0.0
    row = ref.encode_rows(c_kv, np.zeros((1, 0), np.float32), "packed", "e4m3fn", "pow2")
    assert row.shape == (1, 384 + 12)
    assert row[0, 384:].tolist() == [*float_bytes(0x3F800000), *float_bytes(0x40000000), *float_bytes(0x39000000)]
    # 336 is halfway between 320 (0x7A, even) and 352; 449/2 is nearest to 224 and 1/2 has a code.
    assert row[0, [0, 128, 255]].tolist() == [0x7A, 0xF6, 0x30]
    assert row[0, 256:384].tolist() == [0] * 128  # no -0 in a zero group
    latent, rope = ref.decode_rows(row, 384, 0, "packed", "e4m3fn")
    assert latent[0, [0, 128, 255, 256]].tolist() == [320, -448, 1, 0]
    assert rope.shape == (1, 0)


@pytest.mark.parametrize(("mode", "scale"), [("pow2", 0x39000000), ("fp32", 0x3F800000)])
def test_packed_group_without_finite_numbers_to_scale(mode, scale):
    c_kv = np.zeros((1, 128), np.float32)
    c_kv[0, :5] = [INF, -INF, NAN, -NAN, -0.0]
    row = ref.encode_rows(c_kv, f32([1.0]), "packed", "e4m3fn", mode)[0]
    assert row[:6].tolist() == [0x7E, 0xFE, 0x7F, 0xFF, 0, 0]
    assert row[128:132].tolist() == float_bytes(scale)
    c_kv[0, :] = INF
    row = ref.encode_rows(c_kv, f32([1.0]), "packed", "e4m3fn", mode)[0]
    assert row[126:132].tolist() == [0x7E, 0x7E, *float_bytes(scale)]


def test_packed_scale_looks_at_finite_numbers_alone():
    c_kv = np.zeros((1, 128), np.float32)
    c_kv[0, :5] = [INF, NAN, 448, -1, -0.0]
    row = ref.encode_rows(c_kv, f32([0.0]), "packed", "e4m3fn", "pow2")[0]
    assert row[:5].tolist() == [0x7E, 0x7F, 0x7E, 0xB8, 0x80]
    assert row[128:132].tolist() == float_bytes(0x3F800000)


def test_tiny_packed_groups():
    c_kv = np.full((1, 128), -(2.0**-101), np.float32)
    row = ref.encode_rows(c_kv, f32([0.0]), "packed", "e4m3fn", "fp32")[0]
    assert row[:132].tolist() == [0] * 128 + float_bytes(0x3F800000)
    # pow2 calls no group zero but one of zeros, so the sign stays.
    row = ref.encode_rows(c_kv, f32([0.0]), "packed", "e4m3fn", "pow2")[0]
    assert row[:132].tolist() == [0x80] * 128 + float_bytes(0x39000000)


def test_packed_rope_is_bfloat16():
    latent = np.zeros((1, 128), np.float32)
    bits = np.array([[0x7FC1, 0xFF81, 0x0001, 0x8000]], np.uint16)
    row = ref.encode_rows(latent, bits.view(BF16), "packed", "e4m3fn", "pow2")[0]
    assert row[132:].tolist() == [0xC1, 0x7F, 0x81, 0xFF, 0x01, 0x00, 0x00, 0x80]  # NaN payloads and subnormals, too
    rope = f32(1 + 2.0**-8, 1 + 3 * 2.0**-8, INF)[None]  # ties to even
    row = ref.encode_rows(latent, rope, "packed", "e4m3fn", "pow2")[0]
    assert row[132:].tolist() == [0x80, 0x3F, 0x82, 0x3F, 0x80, 0x7F]
    assert ref.decode_rows(row, 128, 3, "packed", "e4m3fn")[1].tolist() == [1, 1 + 2.0**-6, INF]


@pytest.mark.parametrize(
    ("dialect", "want"),
    [
        ("e4m3fn", [0x38, 0x80, 0x77, 0xF7]),
        ("e4m3fnuz", [0x40, 0x00, 0x7F, 0xFF]),
    ],
)
def test_raw_rows(dialect, want):
    name = f"raw_{dialect}"
    row = ref.encode_rows(f32(1, -1e-5, 240)[None], np.array([[-240]], np.float16), name, dialect)
    assert row.tolist() == [want]
    latent, rope = ref.decode_rows(row, 3, 1, name, dialect)
    assert latent.tolist() == [[1, 0, 240]] and rope.tolist() == [[-240]]


def test_k_scale_divides_on_write_and_multiplies_on_read():
    row = ref.encode_rows(f32(1, 500)[None], f32(-0.25)[None], "raw_e4m3fn", "e4m3fn", k_scale=0.5)
    assert row.tolist() == [[0x40, 0x7E, 0xB0]]
    latent, rope = ref.decode_rows(row, 2, 1, "raw_e4m3fn", "e4m3fn", k_scale=0.5)
    assert latent.tolist() == [[1, 224]] and rope.tolist() == [[-0.25]]
    inexact = float(np.float32(0.3))
    for k_scale, x in ((inexact, inexact), (None, 1.0), (1.0, 1.0)):
        row = ref.encode_rows(f32(x)[None], f32(-x)[None], "raw_e5m2", "e5m2", k_scale=k_scale)
        assert row.tolist() == [[0x3C, 0xBC]]
    for name, dialect in (("packed", "e4m3fn"), ("plain_float32", None)):
        assert ref.encode_rows(np.ones((1, 128)), f32(1)[None], name, dialect, "pow2", k_scale=1.0).shape[0] == 1
        with pytest.raises(ValueError, match="no k_scale"):
            ref.encode_rows(np.ones((1, 128)), f32(1)[None], name, dialect, "pow2", k_scale=0.5)


@pytest.mark.parametrize(
    ("name", "one", "large"),
    [
        ("plain_float32", [0, 0, 0x80, 0x3F], [0, 0xB8, 0x88, 0x47]),
        ("plain_bfloat16", [0x80, 0x3F], [0x89, 0x47]),
        ("plain_float16", [0, 0x3C], [0, 0x7C]),
    ],
)
def test_plain_rows_are_ieee_casts(name, one, large):
    # 70000 is 0x4788B800, just above a tie of bfloat16, and beyond float16. Latent and rope come in different dtypes.
    row = ref.encode_rows(f32(1, 70000)[None], np.ones((1, 1), BF16), name, None)
    assert row.tolist() == [one + large + one]
    latent, rope = ref.decode_rows(row, 2, 1, name, None)
    assert latent.dtype == rope.dtype == np.float32
    assert rope.tolist() == [[1]] and latent[0, 0] == 1


def test_layouts_know_their_dialects():
    mismatches = ("raw_e4m3fn", "e4m3fnuz"), ("packed", "e4m3fnuz"), ("plain_float32", "e4m3fn"), ("row", None)
    for name, dialect in mismatches:
        with pytest.raises(ValueError, match="no layout"):
            ref.encode_rows(f32(1)[None], f32(1)[None], name, dialect)
        with pytest.raises(ValueError, match="no layout"):
            ref.decode_rows(np.zeros((1, 2), np.uint8), 1, 1, name, dialect)


def test_writes_outside_the_pool_and_to_slot_0_are_dropped():
    # https://github.com/sgl-project/sglang/issues/36207: padding rows wrote NaN into slot 0.
    pool = np.full((2, 4, 3), 0xAA, np.uint8)
    rows = np.arange(21, dtype=np.uint8).reshape(7, 3)
    new = ref.write_rows(pool, np.array([0, -1, 8, 3, 5, 2**31, -(2**31)]), rows)
    assert np.all(pool == 0xAA)
    want = pool.copy()
    want[0, 3], want[1, 1] = [9, 10, 11], [12, 13, 14]
    np.testing.assert_array_equal(new, want)
    np.testing.assert_array_equal(ref.write_rows(pool, np.zeros(0, np.int32), rows[:0]), pool)
    read = ref.read_rows(new, [3, -1, 8, 0, 5])
    assert read.tolist() == [[9, 10, 11], [0] * 3, [0] * 3, [0xAA] * 3, [12, 13, 14]]


# ---- index-key pages -------------------------------------------------------------------------------------------------


def test_index_page_holds_all_keys_then_all_scales():
    # https://github.com/sgl-project/sglang/pull/31218: moved as rows of 132 bytes, which it does not consist of.
    assert ref.index_ranges(5, 64, 128, "e4m3fn") == (slice(640, 768), slice(8192 + 20, 8192 + 24))
    assert ref.index_ranges(1, 2, 130, "e4m3fnuz") == (slice(130, 260), slice(268, 276))
    assert ref.index_ranges(1, 2, 32, None) == (slice(128, 256), slice(256, 256))

    keys = np.ones((2, 130), np.float32)
    keys[1] = [*[-448] * 128, 0, -0.0]
    page = ref.encode_index_page(keys, "e4m3fn", "pow2")
    assert page.tolist() == [
        *[0x78] * 130,  # 1 / 2^-8
        *[0xFE] * 128,
        *[0, 0],
        *float_bytes(0x3B800000) * 2,
        *float_bytes(0x3F800000),
        *float_bytes(0x34800000),  # 2^-22
    ]
    np.testing.assert_array_equal(ref.decode_index_page(page, 2, 130, "e4m3fn"), keys)
    np.testing.assert_array_equal(ref.decode_index_page(page[None], 2, 130, "e4m3fn"), keys[None])


def test_index_keys_of_e4m3fnuz():
    page = ref.encode_index_page(np.ones((1, 4), BF16), "e4m3fnuz", "pow2")
    assert page.tolist() == [0x78] * 4 + float_bytes(0x3C000000)  # 1 / 2^-7 = 128
    page = ref.encode_index_page(f32(240, -120, NAN, -INF)[None], "e4m3fnuz", "fp32")
    assert page[:4].tolist() == [0x7F, 0xF7, 0x80, 0xFF]
    assert page[4:].view(np.float32)[0] == pytest.approx(1, rel=2e-7)


def test_index_page_of_a_float32_cache():
    page = ref.encode_index_page(np.array([[1, -2]], BF16), None)
    assert page.tolist() == float_bytes(0x3F800000) + float_bytes(0xC0000000)
    assert ref.decode_index_page(page, 1, 2, None).tolist() == [[1, -2]]


@pytest.mark.parametrize("dialect", ["e4m3fn", None])
def test_index_writes_touch_their_own_bytes_alone(dialect):
    page_bytes = 4 * (8 if dialect is None else 2 + 4)
    pool = np.full((2, page_bytes), 0xAA, np.uint8)
    keys = f32([9, 9], [9, 9], [9, 9], [448, -448])
    new = ref.write_index_keys(pool, [0, -1, 8, 5], keys, 4, dialect, "pow2")
    want = pool.copy()
    if dialect is None:
        want[1, 8:16] = float_bytes(0x43E00000) + float_bytes(0xC3E00000)
    else:
        want[1, 2:4], want[1, 12:16] = [0x7E, 0xFE], float_bytes(0x3F800000)
    np.testing.assert_array_equal(new, want)
    assert np.all(pool == 0xAA)


# ---- who sees what ---------------------------------------------------------------------------------------------------


def test_visible_keys():
    # https://github.com/vllm-project/vllm/issues/34552: two new tokens of which the first must not see the second.
    assert ref.visible_keys([65], [0, 2], 2, 2, 64).tolist() == [64, 65]
    assert ref.visible_keys([65], [0, 2], 2, 1, 64).tolist() == [64, 64]
    # Three sequences of 3, 0 and 1 tokens and two rows of nobody; the first has one token for three rows.
    assert ref.visible_keys([1, 9, 7], [0, 3, 3, 4], 6, 4, 4).tolist() == [0, 0, 1, 7, 0, 0]
    assert ref.visible_keys([0, -5], [0, 1, 2], 2, 4, 4).tolist() == [0, 0]


def test_expand_rows():
    tables, visible = ref.expand_rows([[1, 2], [7, 8], [3, -1]], [4, 9, 7], [0, 2, 2, 3], 4)
    assert tables.tolist() == [[1, 2], [1, 2], [3, -1], [0, 0]]
    assert visible.tolist() == [3, 4, 7, 0]
    assert tables.dtype == visible.dtype == np.int32


# ---- attention -------------------------------------------------------------------------------------------------------


def two_keys():
    """One token and head; keys with logits 0 and ln 3, hence weights 1/4 and 3/4; a third key of NaN."""
    q_latent, q_rope = f32([[1, 0]]), f32([[1]])
    latent = np.array([[0, 4], [0, 8], [NAN, NAN]])
    rope = np.array([[0], [LN(3)], [NAN]])
    return q_latent, q_rope, latent, rope, np.array([[True, True, False]])


def test_attention_of_two_keys():
    q_latent, q_rope, latent, rope, valid = two_keys()
    out, lse = ref.attention(q_latent, q_rope, latent, rope, valid, 1.0)
    np.testing.assert_allclose(out, [[[0, 7]]], rtol=1e-14)
    np.testing.assert_allclose(lse, [[LN(4)]], rtol=1e-14)
    out, lse = ref.attention(q_latent * 4, q_rope * 4, latent, rope, valid, 0.25)
    np.testing.assert_allclose(out, [[[0, 7]]], rtol=1e-14)
    # Latent and rope both enter the logits: ln 3 from one, ln 3 from the other.
    latent[1, 0] = LN(3)
    out, lse = ref.attention(q_latent, q_rope, latent, rope, valid, 1.0)
    np.testing.assert_allclose(out, [[[0.9 * LN(3), 7.6]]], rtol=1e-14)
    np.testing.assert_allclose(lse, [[LN(10)]], rtol=1e-14)


def test_attention_with_k_scale():
    q_latent, q_rope, latent, rope, valid = two_keys()
    out, lse = ref.attention(q_latent, q_rope, latent / 2, rope / 2, valid, 1.0, k_scale=2.0)
    np.testing.assert_allclose(out, [[[0, 7]]], rtol=1e-14)
    np.testing.assert_allclose(lse, [[LN(4)]], rtol=1e-14)


@pytest.mark.parametrize(("sink", "share"), [(LN(4), 0.5), (LN(12), 0.25), (-INF, 1.0), (INF, 0.0), (0.0, 0.8)])
def test_sinks_enter_the_denominator_and_never_lse(sink, share):
    out, lse = ref.attention(*two_keys(), 1.0, sinks=f32(sink))
    np.testing.assert_allclose(out, [[[0, 7 * share]]], rtol=1e-6)
    np.testing.assert_allclose(lse, [[LN(4)]], rtol=1e-14)


def test_sinks_are_one_a_head():
    q = np.zeros((1, 2, 1)), np.zeros((1, 2, 0))
    out, _ = ref.attention(*q, f32([3]), np.zeros((1, 0)), np.ones((1, 1), bool), 1.0, sinks=f32(0, -INF))
    np.testing.assert_allclose(out, [[[1.5], [3]]], rtol=1e-14)


@pytest.mark.parametrize("sinks", [None, f32(0), f32(-INF), f32(INF)], ids=str)
def test_token_without_keys(sinks):
    q_latent, q_rope, latent, rope, valid = two_keys()
    out, lse = ref.attention(q_latent, q_rope, latent, rope, np.zeros_like(valid), 1.0, sinks=sinks)
    assert out.tolist() == [[[0, 0]]] and lse.tolist() == [[-INF]]


def test_nan_in_a_valid_key_reaches_that_token_alone():
    q_latent, q_rope, latent, rope, _ = two_keys()
    valid = np.array([[True, True, False], [True, True, True]])
    out, lse = ref.attention(np.tile(q_latent, (2, 1, 1)), np.tile(q_rope, (2, 1, 1)), latent, rope, valid, 1.0)
    np.testing.assert_allclose(out[0], [[0, 7]], rtol=1e-14)
    assert np.isnan(out[1]).all() and np.isnan(lse[1]).all()


def numbered_pool(num_pages: int, page_size: int, used) -> tuple[np.ndarray, np.ndarray]:
    """Latents [num_pages, page_size, 1] that hold their slot's number if used, else NaN; ropes of width 0."""
    latent = np.full(num_pages * page_size, NAN, np.float32)
    latent[list(used)] = list(used)
    return latent.reshape(num_pages, page_size, 1), np.zeros((num_pages, page_size, 0), np.float32)


def zeros_q(*lead) -> tuple[np.ndarray, np.ndarray]:
    """A query that weighs all keys alike: out is the mean of the visible slots' numbers, lse ln of their count."""
    return np.zeros((*lead, 1), np.float32), np.zeros((*lead, 0), np.float32)


def assert_means(got, means, counts):
    out, lse = got
    np.testing.assert_allclose(out[..., 0, 0], means, rtol=1e-14)
    np.testing.assert_allclose(np.exp(lse[..., 0]), counts, rtol=1e-14)


def test_decode_is_causal_among_new_tokens():
    # Page 2 comes first, and NaN stands everywhere outside the 65 keys, in the last page as well (flashinfer #941).
    pool = numbered_pool(3, 64, [*range(128, 192), 64])
    got = ref.decode(*zeros_q(1, 2, 1), *pool, np.array([[2, 1]]), [65], 1.0)
    assert got[0].shape == (1, 2, 1, 1) and got[1].shape == (1, 2, 1)
    assert_means(got, [[159.5, (64 * 159.5 + 64) / 65]], [[64, 65]])
    single = ref.decode(*zeros_q(1, 1, 1), *pool, np.array([[2, 1]]), [64], 1.0)
    assert single[0][0, 0] == got[0][0, 0] and single[1][0, 0] == got[1][0, 0]
    # A table one column short (vllm #46074) clips; it does not reach beyond.
    assert_means(ref.decode(*zeros_q(1, 2, 1), *pool, np.array([[2]]), [65], 1.0), [[159.5, 159.5]], [[64, 64]])


def test_decode_of_an_empty_sequence():
    # https://github.com/vllm-project/vllm/issues/37442: rows of length 0 returned stale memory.
    out, lse = ref.decode(*zeros_q(2, 1, 1), *numbered_pool(3, 4, [4, 5]), np.array([[0], [1]]), [0, 2], 1.0)
    assert out[0].tolist() == [[[0]]] and lse[0].tolist() == [[-INF]]
    assert_means((out[1], lse[1]), [4.5], [2])


def test_dense_of_ragged_tokens():
    pool = numbered_pool(4, 2, [2, 3, 6, 7])
    tables = np.array([[1, 3], [3, -1], [3, 0]])
    got = ref.dense(*zeros_q(6, 1), *pool, tables, [4, 2, 1], [0, 3, 3, 4], 1.0)
    assert_means(got, [2.5, (2 + 3 + 6) / 3, 4.5, 6, 0, 0], [2, 3, 4, 1, 0, 0])
    assert np.all(got[0][4:] == 0) and np.all(np.isneginf(got[1][4:]))


def test_dense_of_nothing():
    pool = numbered_pool(2, 2, [])
    out, lse = ref.dense(*zeros_q(0, 3), *pool, np.zeros((0, 2), np.int32), [], [0], 1.0)
    assert out.shape == (0, 3, 1) and lse.shape == (0, 3)


@pytest.mark.parametrize("bad", [0, -1, -(2**31), 3, 2**31 - 1])
def test_keys_on_bad_pages_are_invisible(bad):
    pool = numbered_pool(3, 2, [2, 4, 5])
    tables = np.array([[2, bad, 1]], np.int32)
    assert_means(ref.decode(*zeros_q(1, 1, 1), *pool, tables, [5], 1.0), [[(4 + 5 + 2) / 3]], [[3]])
    assert_means(ref.decode(*zeros_q(1, 1, 1), *pool, tables, [4], 1.0), [[4.5]], [[2]])


def test_sparse_ids():
    pool = numbered_pool(2, 4, [2, 5, 6])  # slots 1..3 lie on the null page and count like any other
    ids = np.array(
        [
            [5, 5, 2, -1, -1, -1],  # twice counted twice
            [-1, 5, 0, 8, 2**31 - 1, 6],  # none, the null slot, beyond the pool
            [5, 6, 7, 0, 4, 1],  # lanes from topk_lengths on, here NaN
            [5, 6, 7, 0, 4, 1],
            [-1, -2, 0, 8, 9, -(2**31)],
        ],
        np.int32,
    )
    got = ref.sparse(*zeros_q(5, 1), *pool, ids, [6, 99, 2, 0, 6], 1.0)
    assert_means(got, [4, 5.5, 5.5, 0, 0], [3, 2, 2, 0, 0])
    assert np.all(got[0][3:] == 0) and np.all(np.isneginf(got[1][3:]))
    assert_means(ref.sparse(*zeros_q(2, 1), *pool, ids[:2], None, 1.0), [4, 5.5], [3, 2])
    out, _ = ref.sparse(*zeros_q(1, 1), *pool, ids[:1], None, 1.0, sinks=f32(LN(3)))
    np.testing.assert_allclose(out[0, 0], [2], rtol=1e-6)


def test_padding_rows_of_nan_never_show():
    # https://github.com/sgl-project/sglang/pull/36003: NaN in slot 0, which readers gathered for -1.
    row = ref.encode_rows(f32([1, 2], [NAN, NAN], [NAN, NAN]), f32([1], [NAN], [NAN]), "raw_e4m3fn", "e4m3fn")
    pool = ref.write_rows(np.zeros((2, 4, 3), np.uint8), [5, 0, 0], row)
    assert np.all(pool[0] == 0)
    latent, rope = ref.decode_rows(pool, 2, 1, "raw_e4m3fn", "e4m3fn")
    out, lse = ref.sparse(np.ones((1, 1, 2)), np.ones((1, 1, 1)), latent, rope, [[5, -1, -1]], None, 0.5)
    assert out.tolist() == [[[1, 2]]] and lse.tolist() == [[2]]


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_merge_of_empty_parts():
    out, lse = ref.merge_lse(np.zeros((2, 1, 1)), np.full((2, 1), -INF))
    assert out.tolist() == [[0]] and lse.tolist() == [-INF]
    out, lse = ref.merge_lse(np.full((2, 1, 1), NAN), np.full((2, 1), -INF), sinks=f32(-INF))
    assert out.tolist() == [[0]] and lse.tolist() == [-INF]
    # A real part comes through bit for bit.
    out, lse = ref.merge_lse([[[0.1, -7.3]], [[NAN, INF]]], [[1.7], [-INF]])
    assert out.tolist() == [[0.1, -7.3]] and lse.tolist() == [1.7]


def test_merge_weighs_by_lse():
    outs, lses = [[[2.0]], [[6.0]]], [[LN(1)], [LN(3)]]
    out, lse = ref.merge_lse(outs, lses)
    np.testing.assert_allclose(out, [[5]], rtol=1e-14)
    np.testing.assert_allclose(lse, [LN(4)], rtol=1e-14)
    for sink, want in ((LN(4), 2.5), (-INF, 5), (INF, 0)):
        out, lse = ref.merge_lse(outs, lses, sinks=np.array([sink]))
        np.testing.assert_allclose(out, [[want]], rtol=1e-14)
        np.testing.assert_allclose(lse, [LN(4)], rtol=1e-14)
    # Far from 0, where a bare exp would overflow; and NaN in a part that is not empty.
    np.testing.assert_allclose(ref.merge_lse(outs, np.array(lses) + 1e4)[0], [[5]], rtol=1e-11)
    assert np.isnan(ref.merge_lse([[[NAN]], [[6.0]]], lses)[0]).all()


def test_merged_halves_are_the_whole():
    q_latent, q_rope, latent, rope, valid = two_keys()
    keeps = [True, False, False], [False, True, True]
    halves = [ref.attention(q_latent, q_rope, latent, rope, valid & keep, 1.0) for keep in keeps]
    out, lse = ref.merge_lse([half[0] for half in halves], [half[1] for half in halves])
    np.testing.assert_allclose(out, [[[0, 7]]], rtol=1e-14)
    np.testing.assert_allclose(lse, [[LN(4)]], rtol=1e-14)


# ---- indexer ---------------------------------------------------------------------------------------------------------


def test_indexer_logits():
    q_index = np.tile(f32([1, 0], [0, 1]), (3, 1, 1))
    head_weights = np.tile(f32(2, -1), (3, 1))
    keys = np.full((3, 2, 2), NAN, np.float32)
    keys[1] = [[3, 4], [-3, 4]]
    keys[2, 0] = [5, -1]
    tables = np.array([[1, 3, 2]])
    got = ref.indexer_logits(q_index, head_weights, keys, tables, [5], [0, 2])
    # relu comes before the weight; page 3 of 3 is bad, the third row is nobody's.
    assert got.tolist() == [[2, -4, -INF, -INF, -INF, -INF], [2, -4, -INF, -INF, 10, -INF], [-INF] * 6]
    got = ref.indexer_logits(q_index, head_weights, keys, tables, [6], [0, 1])
    assert np.isnan(got[0, 5]) and not np.isnan(got[0, :5]).any()


@pytest.mark.parametrize(
    ("row", "visible", "k", "want"),
    [
        ([5, 1, 9], 3, 2, [0, 2]),
        ([1, 3, 3, 2], 4, 2, [1, 2]),
        ([1, 1, 1], 3, 2, [0, 1]),
        ([0, 2, 2, 2], 4, 2, [1, 2]),
        ([-0.0, 0.0, -1], 3, 1, [0]),
        ([0.0, -0.0, -1], 3, 1, [0]),
        ([-1, 0.0, -0.0, 0.0], 4, 2, [1, 2]),
        ([INF, NAN, 1], 3, 1, [1]),
        ([INF, -NAN, 1], 3, 2, [0, 1]),
        ([NAN, NAN, INF, NAN], 4, 2, [0, 1]),
        ([-INF, 1, -INF], 3, 2, [1, -1]),
        ([1, -INF], 2, 4, [0, -1, -1, -1]),  # not even when everything visible fits
        ([1, 2, 9, 9], 2, 3, [0, 1, -1]),
        ([NAN, 2, NAN], 2, 1, [0]),
        ([3, 1, 2], 99, 2, [0, 2]),
        ([3, 1, 2], 0, 2, [-1, -1]),
        ([3, 1, 2], -1, 2, [-1, -1]),
        ([1e-45, 0, -1e-45], 3, 2, [0, 1]),  # subnormal numbers are not zeros
        ([3, 1], 2, 0, []),
        ([], 5, 2, [-1, -1]),
    ],
)
def test_select_topk(row, visible, k, want):
    got = ref.select_topk(np.array([row], np.float32), [visible], k)
    assert got.tolist() == [want] and got.dtype == np.int32


def test_positions_to_slots():
    positions = [[0, 3, 4, 9, 12, 16, -1, -5]]
    tables = [[3, 0, 5, -1]]
    got = ref.positions_to_slots(positions, tables, 4)
    assert got.tolist() == [[12, 15, -1, 21, -1, -1, -1, -1]] and got.dtype == np.int32
    assert ref.positions_to_slots(positions, tables, 4, num_pages=5).tolist() == [[12, 15, -1, -1, -1, -1, -1, -1]]
    # Pages whose slots int32 cannot hold must not wrap round onto good ones.
    got = ref.positions_to_slots([[3], [3], [3]], [[2**29 - 1], [2**29], [2**31 - 1]], 4)
    assert got.tolist() == [[2**31 - 1], [-1], [-1]]
