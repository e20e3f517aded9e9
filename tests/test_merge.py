"""merge_lse: attentions over disjoint keys become one, empty and broken parts included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import check
from mla_jax import reference

INF, NAN = np.inf, np.nan

merge = jax.jit(mla.merge_lse)


def parts(rng: np.random.Generator, *lead: int, H: int = 3, R: int = 8, dtype: Any = np.float32) -> tuple[Any, Any]:
    return rng.standard_normal((*lead, H, R)).astype(dtype), (3 * rng.standard_normal((*lead, H))).astype(np.float32)


@pytest.mark.parametrize("lead", [(1, 4), (5, 4), (3,), (2, 3, 2)])
def test_merge_against_the_oracle(lead, rng):
    outs, lses = parts(rng, *lead)
    lses = np.where(rng.random(lses.shape) < 0.3, np.float32(-INF), lses)
    outs[np.isneginf(lses)] = rng.choice([NAN, INF, 7.0])
    check(merge(outs, lses), reference.merge_lse(outs, lses))
    sinks = np.array([0.5, -INF, INF], np.float32)
    check(merge(outs, lses, sinks), reference.merge_lse(outs, lses, sinks))


def test_merged_parts_are_the_whole(rng):
    q, rope = rng.standard_normal((4, 3, 8)), np.zeros((4, 3, 0))
    keys, valid = rng.standard_normal((1, 30, 8)), rng.random((4, 30)) < 0.7
    whole = reference.attention(q, rope, keys, np.zeros((1, 30, 0)), valid, 0.3)
    cuts = [slice(0, 11), slice(11, 12), slice(12, 30)]
    some = [reference.attention(q, rope, keys[:, c], np.zeros((1, 30, 0))[:, c], valid[:, c], 0.3) for c in cuts]
    outs, lses = (np.stack(x).astype(np.float32) for x in zip(*some, strict=True))
    check(merge(outs, lses), whole)


def test_f10_two_empty_parts_are_empty():
    for garbage in (0.0, NAN, INF):
        out, lse = merge(np.full((2, 1, 1, 4), garbage, np.float32), np.full((2, 1, 1), -INF, np.float32))
        assert not np.asarray(out).any() and np.isneginf(lse).all()


def test_f10_an_empty_part_changes_no_bit(rng):
    outs, lses = parts(rng, 1, 6)
    for garbage in (0.0, NAN, -INF):
        with_empty = np.concatenate([np.full_like(outs, garbage), outs]), np.concatenate([np.full_like(lses, -INF), lses])
        out, lse = merge(*with_empty)
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_array_equal(lse, lses[0])


def test_nan_in_a_part_that_counts_reaches_the_result(rng):
    outs, lses = parts(rng, 2, 3)
    outs[1, 0, 1, 5] = NAN
    lses[0, 2, 0] = NAN
    out, lse = (np.asarray(x) for x in merge(outs, lses))
    assert np.isnan(out[0, 1, 5]) and np.isnan(out[2, 0]).all() and np.isnan(lse[2, 0])
    assert np.isnan(out).sum() == 9 and np.isnan(lse).sum() == 1


def test_far_apart_parts_do_not_overflow():
    outs = np.stack([np.ones((1, 1, 4)), np.zeros((1, 1, 4))]).astype(np.float32)
    out, lse = merge(outs, np.array([[[5000.0]], [[-5000.0]]], np.float32))
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, [[5000.0]])


def test_sinks_enter_once_here_or_in_one_attention(rng):
    outs, lses = parts(rng, 1, 5)
    sinks = np.array([0.5, -2.0, 3.0], np.float32)
    here = merge(outs, lses, sinks)
    check(here, reference.merge_lse(outs, lses, sinks))
    np.testing.assert_array_equal(here[1], lses[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrow_outputs_are_merged_in_float32(dtype, rng):
    outs, lses = parts(rng, 3, 4, dtype=dtype)
    out, lse = merge(outs, lses)
    want = reference.merge_lse(outs.astype(np.float32), lses)
    assert out.dtype == dtype and lse.dtype == np.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), want[0], rtol=float(jnp.finfo(dtype).eps), atol=1e-6)


def test_nothing_to_merge():
    for lead in ((0, 4), (2, 0), (0, 0)):
        out, lse = mla.merge_lse(np.zeros((*lead, 3, 8), np.float32), np.zeros((*lead, 3), np.float32))
        assert out.shape == (*lead[1:], 3, 8) and lse.shape == (*lead[1:], 3)
        assert not np.asarray(out).any() and np.isneginf(lse).all()


def test_errors_name_what_was_given():
    outs, lses = np.zeros((2, 4, 3, 8), np.float32), np.zeros((2, 4, 3), np.float32)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((outs, lses[:1]), ValueError, r"lses of shape \[2, 4, 3\], got lses.shape=\(1, 4, 3\)"),
        ((outs, outs), ValueError, "lses"),
        ((outs[0, 0], lses[0, 0]), ValueError, r"at least the axes \[N, H, R\]"),
        ((outs.astype(np.int32), lses), TypeError, "outs"),
        ((outs, lses.astype(np.int32)), TypeError, "lses"),
        ((outs, lses, np.zeros(2, np.float32)), ValueError, r"sinks of shape \[3\]"),
        ((outs, lses, np.zeros(3, np.int32)), TypeError, "sinks"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.merge_lse(*arguments)
