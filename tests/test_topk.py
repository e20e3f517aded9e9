"""select_topk, and the way from its positions to slots: every tie, special value and bad id decided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from mla_jax import reference

INF, NAN = np.inf, np.nan

select = jax.jit(mla.select_topk, static_argnums=2)
to_slots = jax.jit(mla.positions_to_slots, static_argnums=(2, 3))
expand = jax.jit(mla.expand_rows, static_argnums=3)

# ---- select_topk -----------------------------------------------------------------------------------------------------


def hard_logits(rng: np.random.Generator, T: int, C: int) -> np.ndarray:
    """Many ties, both zeros, infinities, NaN of both signs, subnormal numbers."""
    values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, INF, -INF, NAN, -NAN, 3e38, -3e38]
    x = np.where(rng.random((T, C)) < 0.5, rng.choice(values, (T, C)), rng.integers(-3, 4, (T, C)))
    return np.where(rng.random((T, C)) < 0.3, rng.standard_normal((T, C)), x).astype(np.float32)


@pytest.mark.parametrize("k", [0, 1, 5, 37, 50])
def test_select_on_hard_rows(k, rng):
    T, C = 40, 37
    logits = hard_logits(rng, T, C)
    visible = rng.integers(-2, C + 4, T).astype(np.int32)
    visible[:3] = -(2**31), 2**31 - 1, C
    got = np.asarray(select(logits, visible, k))
    assert got.shape == (T, k) and got.dtype == np.int32
    np.testing.assert_array_equal(got, reference.select_topk(logits, visible, k))


@pytest.mark.parametrize(
    ("row", "visible", "k", "want"),
    [
        pytest.param([1, 5, 3, 5, 5], 5, 2, [1, 3], id="ties go to the smaller position"),
        pytest.param([-0.0, 0.0, -0.0], 3, 1, [0], id="zeros are equal"),
        pytest.param([0.0, 1e-45, -0.0], 3, 1, [1], id="a subnormal number is no zero"),
        pytest.param([INF, NAN, INF, -NAN], 4, 2, [1, 3], id="NaN stands above infinity"),
        pytest.param([-INF, 2, -INF], 3, 3, [1, -1, -1], id="minus infinity never"),
        pytest.param([9, 1, 2, 3], 3, 2, [0, 2], id="ascending"),
        pytest.param([1, 2, 3, 99], 3, 1, [2], id="what is not visible"),
        pytest.param([1, 2, 3], 2, 8, [0, 1, *[-1] * 6], id="all visible where k exceeds them"),
        pytest.param([NAN, NAN], 0, 2, [-1, -1], id="nothing visible"),
    ],
)
def test_select_by_example(row, visible, k, want):
    np.testing.assert_array_equal(select(np.array([row], np.float32), np.array([visible], np.int32), k), [want])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_select_of_narrow_logits(dtype, rng):
    with np.errstate(over="ignore"):
        logits = hard_logits(rng, 10, 21).astype(dtype)
    visible = np.full(10, 21, np.int32)
    np.testing.assert_array_equal(select(logits, visible, 6), reference.select_topk(logits.astype(np.float32), visible, 6))


def test_select_of_many_columns(rng):
    logits = rng.standard_normal((3, 5000)).astype(np.float32).round(2)
    visible = np.array([5000, 4097, 1500], np.int32)
    np.testing.assert_array_equal(select(logits, visible, 2048), reference.select_topk(logits, visible, 2048))


def test_select_of_empty_arrays():
    for shape, k in (((0, 5), 3), ((4, 0), 3), ((4, 5), 0), ((0, 0), 0)):
        got = mla.select_topk(np.zeros(shape, np.float32), np.zeros(shape[0], np.int32), k)
        assert got.shape == (shape[0], k) and got.dtype == np.int32 and (np.asarray(got) == -1).all()


def test_select_errors():
    logits, visible = np.zeros((2, 5), np.float32), np.zeros(2, np.int32)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((logits.astype(np.int32), visible, 3), TypeError, "logits must be an array of"),
        ((logits.astype(np.float64), visible, 3), TypeError, "logits"),
        ((logits[0], visible, 3), ValueError, "logits"),
        ((logits, visible[:1], 3), ValueError, r"visible_lengths of shape \[T=2\]"),
        ((logits, visible.astype(np.float32), 3), TypeError, "visible_lengths"),
        ((logits, visible, -1), ValueError, "k must be an int >= 0, got -1"),
        ((logits, visible, 2.0), ValueError, "k must be an int"),
        ((logits, visible, True), ValueError, "k must be an int"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.select_topk(*arguments)


# ---- positions_to_slots ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("num_pages", [None, 30])
def test_slots_of_positions(page_size, num_pages, rng):
    T, M, K = 12, 5, 9
    tables = rng.choice([*range(1, 40), -1, 0, -(2**31), 2**31 - 1, 2**31 // page_size - 1, 2**24], (T, M)).astype(np.int32)
    positions = rng.integers(-3, M * page_size + 3, (T, K)).astype(np.int32)
    positions[0, :4] = -1, 2**31 - 1, -(2**31), M * page_size
    got = np.asarray(to_slots(positions, tables, page_size, num_pages))
    np.testing.assert_array_equal(got, reference.positions_to_slots(positions, tables, page_size, num_pages))
    assert ((got > 0) | (got == -1)).all()


def test_slots_never_wrap():
    # 2^25 * 64 is 2^31, one more than int32 holds; 2^26 * 64 is 2^32, which would wrap to slot 0.
    pages = np.array([[2**25 - 1], [2**25], [2**26], [2**26 + 1]], np.int32)
    got = mla.positions_to_slots(np.full((4, 2), [0, 63], np.int32), pages, 64)
    np.testing.assert_array_equal(got, [[2**31 - 64, 2**31 - 1], [-1, -1], [-1, -1], [-1, -1]])


def test_slots_of_empty_arrays():
    for T, K, M in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
        got = mla.positions_to_slots(np.zeros((T, K), np.int32), np.ones((T, M), np.int32), 16)
        assert got.shape == (T, K) and got.dtype == np.int32 and (np.asarray(got) == -1).all()


def test_slots_errors():
    positions, tables = np.zeros((2, 3), np.int32), np.zeros((2, 4), np.int32)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((positions.astype(np.float32), tables, 16), TypeError, "positions"),
        ((positions, tables.astype(np.float32), 16), TypeError, "block_tables"),
        ((positions[0], tables, 16), ValueError, "positions must have 2 axes"),
        ((positions, tables[:1], 16), ValueError, r"block_tables of shape \[T=2, M"),
        ((positions, tables, 12), ValueError, "page_size must be a power of two, got 12"),
        ((positions, tables, 0), ValueError, "page_size"),
        ((positions, tables, 16, 0), ValueError, "num_pages must be an int >= 1, got 0"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.positions_to_slots(*arguments)


# ---- expand_rows -----------------------------------------------------------------------------------------------------


def test_rows_of_tokens(rng):
    S, M, T = 6, 4, 30
    for _ in range(20):
        new = rng.integers(0, 6, S)
        lengths = (new + rng.integers(-3, 9, S)).astype(np.int32)
        cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        tables = rng.integers(-1, 100, (S, M)).astype(np.int32)
        for got, want in zip(expand(tables, lengths, cu, T), reference.expand_rows(tables, lengths, cu, T), strict=True):
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, want)


def test_rows_of_garbage_are_safe():
    tables = np.arange(8, dtype=np.int32).reshape(2, 4)
    for cu in ([9, 3, -4], [0, 2**31 - 1, 5], [-(2**31), 0, 2**31 - 1], [2**31 - 1] * 3):
        rows, visible = expand(tables, np.array([2**31 - 1, -(2**31)], np.int32), np.array(cu, np.int32), 30)
        assert (np.asarray(visible) >= 0).all() and (np.asarray(rows) < 8).all()


def test_rows_of_nothing():
    for S, M, T in ((0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)):
        rows, visible = mla.expand_rows(np.ones((S, M), np.int32), np.ones(S, np.int32), np.zeros(S + 1, np.int32), T)
        assert rows.shape == (T, M) and visible.shape == (T,) and rows.dtype == visible.dtype == np.int32
        assert not np.asarray(rows).any() and not np.asarray(visible).any()


def test_rows_errors():
    tables, lengths, cu = np.zeros((2, 4), np.int32), np.zeros(2, np.int32), np.zeros(3, np.int32)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((tables, lengths, cu, -1), ValueError, "T must be an int >= 0, got -1"),
        ((tables, lengths, cu[:2], 5), ValueError, r"cu_q_lens of shape \[3\]"),
        ((tables, lengths[:1], cu, 5), ValueError, r"lengths of shape \[S=2\]"),
        ((tables[0], lengths, cu, 5), ValueError, "block_tables must have 2 axes"),
        ((tables, lengths.astype(np.float32), cu, 5), TypeError, "lengths"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.expand_rows(*arguments)
