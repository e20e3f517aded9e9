"""Attention and indexer over plain arrays: values and gradients against float64, equality with the cached operations."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import mla_jax as mla
from checkpoints import QUICK
from mla_jax import training

SCALE = 0.37


def f32(array: Any) -> Any:
    return np.asarray(array, np.float32)


def quick(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as one program that takes little time to compile; one operation after another they take far longer."""
    return jax.jit(fn, compiler_options=dict(QUICK))


# ---- float64, written independently --------------------------------------------------------------------------------------


def one_query(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights' product with values, and lse, of one query and head over the keys it sees, in float64."""
    if not logits.size:
        return np.zeros(values.shape[1]), -np.inf
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum(), np.log(weights.sum()) + logits.max()


def oracle(q: Any, qr: Any, c: Any, k: Any, keys: list[list[list[int]]], scale: Any = SCALE) -> tuple[np.ndarray, np.ndarray]:
    """out and lse where query (b, t) sees the rows ``keys[b][t]``, one after another."""
    B, T, H, _ = q.shape
    out, lse = np.zeros(q.shape), np.zeros((B, T, H))
    for b in range(B):
        for t in range(T):
            seen = keys[b][t]
            for h in range(H):
                logits = scale * (c[b, seen] @ q[b, t, h] + k[b, seen] @ qr[b, t, h])
                out[b, t, h], lse[b, t, h] = one_query(logits, c[b, seen])
    return out, lse


def oracle_scores(q: np.ndarray, w: np.ndarray, k: np.ndarray, keys: list[list[list[int]]]) -> np.ndarray:
    scores = np.full((*q.shape[:2], k.shape[1]), -np.inf)
    for b, t in np.ndindex(q.shape[:2]):
        for s in keys[b][t]:
            scores[b, t, s] = w[b, t] @ np.maximum(q[b, t] @ k[b, s], 0)
    return scores


def oracle_kl(scores: np.ndarray, target: np.ndarray, keys: list[list[list[int]]], rows: np.ndarray | None = None) -> Any:
    """Mean over queries of KL; ``target`` [B, T, S]."""
    terms = []
    for b, t in np.ndindex(scores.shape[:2]):
        seen = [s for s in keys[b][t] if scores[b, t, s] > -np.inf]
        mass = target[b, t, seen].sum()
        if mass == 0 or (rows is not None and not rows[b, t]):
            continue
        p, x = target[b, t, seen] / mass, scores[b, t, seen]
        log_q = x - x.max() - np.log(np.exp(x - x.max()).sum())
        terms.append(sum(pi * (np.log(pi) - qi) for pi, qi in zip(p, log_q, strict=True) if pi > 0))
    return np.mean(terms) if terms else np.float64(0)


def difference(fn: Callable[..., Any], arrays: list[Any], which: int, step: float = 1e-5) -> np.ndarray:
    """Central finite differences in float64 of a scalar function in one of its arrays."""
    grad = np.zeros(arrays[which].shape)
    for place in np.ndindex(grad.shape):
        sides = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[which][place] += sign * step
            sides.append(fn(*moved))
        grad[place] = (sides[0] - sides[1]) / (2 * step)
    return grad


def check_gradients(fn: Callable[..., Any], reference: Callable[..., Any], arrays: list[Any]) -> None:
    """Value and gradients of ``fn`` in every array against ``reference``, both scalar functions."""
    value, grads = jax.jit(jax.value_and_grad(fn, argnums=tuple(range(len(arrays)))))(
        *(jnp.asarray(a, jnp.float32) for a in arrays)
    )
    wide = [np.asarray(f32(a), np.float64) for a in arrays]
    np.testing.assert_allclose(value, reference(*wide), rtol=2e-5, atol=2e-5)
    for i, grad in enumerate(grads):
        want = difference(reference, wide, i)
        np.testing.assert_allclose(grad, want, rtol=2e-4, atol=2e-5 * max(1, np.abs(want).max()), err_msg=f"gradient {i}")


def projected(rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Two spellings, for jax and numpy, of a scalar of out and lse: fixed random weights, infinite lse left out."""
    weights = [rng.standard_normal(shape) for shape in shapes]

    def of(xp: Any, parts: Any) -> Any:
        return sum((xp.where(xp.isfinite(p), p, 0) * xp.asarray(w, p.dtype)).sum() for p, w in zip(parts, weights, strict=True))

    return functools.partial(of, jnp), functools.partial(of, np)


def inputs(rng: np.random.Generator, B: int, T: int, S: int, H: int = 2, R: int = 3, P: int = 2) -> list[Any]:
    return [rng.standard_normal(shape) for shape in ((B, T, H, R), (B, T, H, P), (B, S, R), (B, S, P))]


def prefix(T: int, lengths: list[int], S: int, causal: bool = True) -> list[list[list[int]]]:
    """The keys that each query sees, as ``mla_decode`` says."""
    later = [j - T + 1 if causal else 0 for j in range(T)]
    return [[list(range(int(np.clip(n + j, 0, S)))) for j in later] for n in lengths]


@pytest.fixture(params=[None, pytest.param(1, marks=pytest.mark.slow)], ids=["at_once", "in_chunks"])
def chunks(request, monkeypatch) -> None:
    """Every query at once, or one at a time."""
    if request.param:
        monkeypatch.setattr(training, "_CHUNK_FLOATS", request.param)


# ---- attention -----------------------------------------------------------------------------------------------------------

SEGMENTS = [[0, 0, 1, 1, 1], [3, 3, 3, 3, 8]]
ATTENTION = {
    "causal": ({}, prefix(3, [5, 5], 5)),
    "lengths_and_empty_rows": ({"lengths": [2, 0]}, prefix(3, [2, 0], 5)),
    "not_causal": ({"lengths": [4, 9], "causal": False}, prefix(3, [4, 9], 5, causal=False)),
    "segments": ({"segment_ids": SEGMENTS}, [[[2], [2, 3], [2, 3, 4]], [[0, 1, 2], [0, 1, 2, 3], [4]]]),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_and_its_gradients(case, rng, chunks):
    options, keys = ATTENTION[case]
    to_jax, to_numpy = projected(rng, (2, 3, 2, 3), (2, 3, 2))

    def fn(q: Any, qr: Any, c: Any, k: Any, scale: Any) -> Any:
        return to_jax(mla.attention(q, qr, c, k, softmax_scale=scale, **options))

    def reference(q: Any, qr: Any, c: Any, k: Any, scale: Any) -> Any:
        return to_numpy(oracle(q, qr, c, k, keys, scale))

    check_gradients(fn, reference, [*inputs(rng, 2, 3, 5), np.float64(SCALE)])


def test_attention_of_nothing(rng):
    q, qr, c, k = (f32(a) for a in inputs(rng, 2, 3, 5))
    dense = quick(functools.partial(mla.attention, softmax_scale=SCALE))
    out, lse = dense(q, qr, c, k, lengths=np.array([0, 5], np.int32))
    assert not np.any(out[0]) and np.all(lse[0] == -np.inf) and np.all(np.isfinite(lse[1]))
    out, lse = dense(q, qr, c[:, :0], k[:, :0])
    assert not np.any(out) and np.all(lse == -np.inf)
    out, lse = quick(functools.partial(mla.sparse_attention, softmax_scale=SCALE))(q, qr, c, k, np.zeros((2, 3, 0), np.int32))
    assert not np.any(out) and np.all(lse == -np.inf)


def test_attention_without_rope(rng):
    q, qr, c, k = (f32(a) for a in inputs(rng, 1, 2, 4, P=0))
    out, _ = quick(lambda *a: mla.attention(*a, softmax_scale=SCALE))(q, qr, c, k)
    np.testing.assert_allclose(out, oracle(q, qr, c, k, prefix(2, [4], 4))[0], atol=1e-6)


def test_attention_in_bfloat16_accumulates_in_float32(rng):
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in inputs(rng, 1, 3, 40)]
    q, qr, c, k = (np.asarray(a, np.float64) for a in arrays)
    want, want_lse = oracle(q, qr, c, k, prefix(3, [40], 40))
    out, lse = quick(lambda *a: mla.attention(*a, softmax_scale=SCALE))(*arrays)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2**-8, atol=1e-5)
    out, lse = quick(lambda *a: mla.attention(*a, softmax_scale=SCALE, out_dtype="float32"))(*arrays)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_nan_that_nobody_sees_changes_neither_results_nor_gradients(rng):
    q, qr, c, k = (jnp.asarray(a, jnp.float32) for a in inputs(rng, 2, 3, 6))
    lengths, positions = jnp.asarray([4, 0], jnp.int32), jnp.asarray([[[0, 2], [3, -1], [1, 1]], [[-1, 9]] * 3], jnp.int32)
    bad = c.at[0, 4:].set(jnp.nan).at[1].set(jnp.inf), k.at[0, 4:].set(jnp.nan).at[1].set(jnp.nan)
    bad_q = q.at[1].set(jnp.nan)
    wi, wk = jnp.asarray(rng.standard_normal((2, 3, 2)), jnp.float32), jnp.asarray(rng.standard_normal((2, 6, 3)), jnp.float32)

    def total(q: Any, c: Any, k: Any) -> Any:
        dense = mla.attention(q, qr, c, k, softmax_scale=SCALE, lengths=lengths)
        sparse = mla.sparse_attention(jnp.where(jnp.isnan(q), 0, q), qr, c, k, positions, softmax_scale=SCALE)
        scores = mla.indexer_scores(q, wi, c, lengths=lengths)
        kl = mla.indexer_kl(scores, jnp.where(jnp.isfinite(scores), jnp.exp(wk[:, :3, :1]), jnp.nan))
        parts = [*dense, *sparse, scores, kl]
        return sum(jnp.sum(jnp.where(p == -jnp.inf, 0, p) ** 2) for p in parts)

    grad = quick(jax.value_and_grad(total, argnums=(0, 1, 2)))
    value, grads = grad(q, c, k)
    bad_value, bad_grads = grad(bad_q, *bad)
    assert np.isfinite(value) and value == bad_value
    for good, other in zip(grads, bad_grads, strict=True):
        assert np.all(np.isfinite(good)) and np.array_equal(good, other)


def test_nan_that_is_seen_reaches_those_who_see_it(rng):
    q, qr, c, k = (f32(a) for a in inputs(rng, 1, 3, 3))
    c[0, 1] = np.nan
    out, lse = quick(lambda *a: mla.attention(*a, softmax_scale=SCALE))(q, qr, c, k)
    assert np.all(np.isfinite(out[0, 0])) and np.all(np.isnan(out[0, 1:])) and np.all(np.isnan(lse[0, 1:]))


@pytest.mark.slow
def test_chunks_change_nothing(rng, monkeypatch):
    arrays = [f32(a) for a in inputs(rng, 2, 5, 6)]
    positions = np.array(rng.integers(-1, 6, (2, 5, 3)), np.int32)
    lengths, segments = np.array([6, 4], np.int32), np.array([[0, 0, 0, 1, 1, 1], [2] * 6], np.int32)
    seen: dict[str, Any] = {"lengths": lengths, "segment_ids": segments}

    def run() -> Any:
        def total(q: Any, qr: Any, c: Any, k: Any) -> Any:
            parts = (
                *mla.attention(q, qr, c, k, softmax_scale=SCALE, **seen),
                *mla.sparse_attention(q, qr, c, k, positions, softmax_scale=SCALE),
                mla.indexer_scores(q, qr[..., 0], c, **seen),
                mla.attention_distribution(q, qr, c, k, softmax_scale=SCALE, **seen),
                mla.attention_distribution(q, qr, c, k, softmax_scale=SCALE, positions=positions),
            )
            return sum(jnp.sum(jnp.where(jnp.isfinite(p), p, 0) ** 2) for p in parts), parts

        return quick(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    whole = run()
    monkeypatch.setattr(training, "_CHUNK_FLOATS", 60)
    for got, want in zip(jax.tree.leaves(run()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_attention_keeps_no_logits_of_all_queries(monkeypatch):
    monkeypatch.setattr(training, "_CHUNK_FLOATS", 2**19)
    T, H = 1024, 8
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, T, H, 16), (1, T, H, 8), (1, T, 16), (1, T, 8))]
    grad = jax.grad(lambda *a: mla.attention(*a, softmax_scale=SCALE)[0].sum(), argnums=(0, 1, 2, 3))
    assert helpers.temporaries(grad, *arrays) < T * T * H * 4 / 2


# ---- sparse attention ----------------------------------------------------------------------------------------------------

LISTS = [[[0, 2, -1], [1, 1, 3], [-1, -1, -1]], [[3, 0, 1], [7, -5, 2], [2, 2, 2]]]


@pytest.mark.parametrize("S", [4, 9], ids=["counted", "gathered"])
def test_sparse_attention_and_its_gradients(S, rng, chunks):
    keys = [[[s for s in row if 0 <= s < S] for row in rows] for rows in LISTS]
    to_jax, to_numpy = projected(rng, (2, 3, 2, 3), (2, 3, 2))

    def fn(q: Any, qr: Any, c: Any, k: Any, scale: Any) -> Any:
        return to_jax(mla.sparse_attention(q, qr, c, k, jnp.asarray(LISTS, jnp.int32), softmax_scale=scale))

    def reference(q: Any, qr: Any, c: Any, k: Any, scale: Any) -> Any:
        return to_numpy(oracle(q, qr, c, k, keys, scale))

    check_gradients(fn, reference, [*inputs(rng, 2, 3, S), np.float64(SCALE)])


# ---- indexer -------------------------------------------------------------------------------------------------------------


def test_indexer_scores_and_their_gradients(rng, chunks):
    arrays = [rng.standard_normal(shape) for shape in ((2, 3, 4, 3), (2, 3, 4), (2, 5, 3))]
    keys = prefix(3, [4, 1], 5)
    to_jax, to_numpy = projected(rng, (2, 3, 5))

    def fn(*arrays: Any) -> Any:
        return to_jax([mla.indexer_scores(*arrays, lengths=np.array([4, 1], np.int32))])

    check_gradients(fn, lambda q, w, k: to_numpy([oracle_scores(q, w, k, keys)]), arrays)


def test_indexer_relu_has_no_gradient_at_zero():
    q, w, k = jnp.zeros((1, 1, 2, 3)), jnp.ones((1, 1, 2)), jnp.ones((1, 1, 3))
    grads = quick(jax.grad(lambda *a: mla.indexer_scores(*a).sum(), argnums=(0, 1, 2)))(q, w, k)
    assert all(not np.any(g) for g in grads)


@pytest.mark.parametrize("with_heads", [False, True])
def test_indexer_kl_over_all_keys(with_heads, rng):
    keys = prefix(3, [5, 2], 5)
    hidden = np.array([[[s in seen for s in range(5)] for seen in rows] for rows in keys])
    target = rng.random((2, 3, 4, 5))
    target[0, 1, :, 0] = 0
    target = target if with_heads else target.sum(axis=2)
    rows = np.array([[True, True, False], [True] * 3])

    def fn(scores: Any) -> Any:
        return mla.indexer_kl(jnp.where(hidden, scores, -jnp.inf), f32(target), rows=rows)

    wide = target.sum(axis=2) if with_heads else target
    check_gradients(fn, lambda x: oracle_kl(np.where(hidden, x, -np.inf), wide, keys, rows), [rng.standard_normal((2, 3, 5))])


def test_indexer_kl_over_selected_keys(rng):
    positions = np.array([[[0, 2, -1], [1, 3, 4], [-1, -1, -1]]], np.int32)
    keys = [[[s for s in row if s >= 0] for row in positions[0]]]
    target = rng.random((1, 3, 3))
    spread = np.zeros((1, 3, 5))
    for t, row in enumerate(positions[0]):
        for lane, s in enumerate(row):
            spread[0, t, s] += target[0, t, lane] if s >= 0 else 0

    def fn(scores: Any) -> Any:
        return mla.indexer_kl(scores, f32(target), positions=positions)

    check_gradients(fn, lambda x: oracle_kl(x, spread, keys), [rng.standard_normal((1, 3, 5))])


def test_indexer_kl_is_zero_at_its_target_and_for_nothing(rng):
    scores, ones = f32(rng.standard_normal((2, 3, 5))), np.ones((2, 3, 5), np.float32)
    kl = quick(jax.value_and_grad(mla.indexer_kl, argnums=(0, 1)))
    value, grads = kl(scores, 7 * np.exp(scores))
    assert abs(value) < 1e-6 and np.all(np.abs(grads[0]) < 1e-6) and not np.any(grads[1])
    value, grads = kl(np.full_like(scores, -np.inf), ones)
    assert value == 0 and not np.any(grads[0])


def test_attention_distribution(rng, chunks):
    q, qr, c, k = (f32(a) for a in inputs(rng, 2, 3, 5))
    lengths = np.array([5, 1], np.int32)
    one_hot = [[np.eye(5)] * 3] * 2
    distribution = functools.partial(mla.attention_distribution, softmax_scale=SCALE)

    @quick
    def run(q: Any, qr: Any, c: Any, k: Any, lengths: Any, positions: Any) -> Any:
        one_head = q[:, :, :1], qr[:, :, :1], c, k
        return (
            distribution(q, qr, c, k, lengths=lengths),
            distribution(q, qr, c, k, positions=positions),
            distribution(*one_head, positions=positions),
            mla.sparse_attention(*one_head, positions, softmax_scale=SCALE)[0],
            jax.grad(lambda *a: (distribution(*a) ** 2).sum(), argnums=(0, 1, 2, 3))(q, qr, c, k),
        )

    positions = np.array(LISTS, np.int32)
    p, listed, one_head, out, grads = run(q, qr, c, k, lengths, positions)
    long = np.concatenate([c, np.full((2, 40, 3), 1e3, np.float32)], axis=1), np.pad(k, ((0, 0), (0, 40), (0, 0)))
    positions = np.where(positions < 5, positions, -1)
    np.testing.assert_allclose(quick(distribution)(q, qr, *long, positions=positions), listed, atol=1e-6)
    for b, rows in enumerate(prefix(3, [5, 1], 5)):
        for t, seen in enumerate(rows):
            logits = [SCALE * (c[b, seen] @ q[b, t, h] + k[b, seen] @ qr[b, t, h]) for h in range(2)]
            want = np.mean([one_query(x, one_hot[b][t][seen])[0] for x in logits], axis=0)
            np.testing.assert_allclose(p[b, t], want, atol=1e-6)
    assert listed.shape == (2, 3, 3) and not np.any(np.asarray(listed)[(positions < 0) | (positions >= 5)])
    sums = np.asarray(listed).sum(-1)
    np.testing.assert_allclose(sums[np.any((positions >= 0) & (positions < 5), axis=2)], 1, atol=1e-6)
    rows = np.take_along_axis(c[:, None], np.clip(positions, 0, 4)[..., None], axis=2)
    np.testing.assert_allclose(out[:, :, 0], np.einsum("btk,btkr->btr", one_head, rows), atol=1e-6)
    assert all(not np.any(g) for g in grads)


# ---- the cached operations -----------------------------------------------------------------------------------------------


def flat(array: Any) -> Any:
    return array.reshape(-1, *array.shape[2:])


def test_equal_to_the_cached_operations(rng):
    config = helpers.config("plain_float32", R=32, P=16, head_dim=8, num_pages=6)
    B, S, topk, last = 2, 29, 7, 4
    shapes = (B, S, 3, 32), (B, S, 3, 16), (B, S, 32), (B, S, 16), (B, S, 2, 8), (B, S, 2), (B, S, 8)
    arrays = [f32(rng.standard_normal(shape)) for shape in shapes]
    tables = np.array([[4, 1], [2, 5]], np.int32)
    few = np.array([23, 2], np.int32)

    @quick
    def run(arrays: Any) -> Any:
        q, qr, c, k, qi, w, ki = arrays
        slots = (tables[:, :, None] * 16 + jnp.arange(16)).reshape(B, -1)[:, :S]
        cache = mla.write_kv(mla.init_cache(config), 1, slots.reshape(-1), flat(c), flat(k))
        cache = mla.write_index_k(cache, 1, slots.reshape(-1), flat(ki))
        ragged = tables, np.full(B, S, np.int32), np.array([0, S, 2 * S], np.int32)
        scores = mla.indexer_scores(qi, w, ki)
        positions = mla.select_topk(flat(scores), jnp.tile(jnp.arange(1, S + 1), B), topk).reshape(B, S, topk)
        listed = jnp.where(positions < 0, -1, jnp.take_along_axis(slots[:, None], jnp.maximum(positions, 0), axis=2))
        new = q[:, :last], qr[:, :last]
        ours = (
            mla.attention(q, qr, c, k, softmax_scale=SCALE),
            mla.attention(*new, c, k, softmax_scale=SCALE, lengths=few),
            scores,
            mla.sparse_attention(q, qr, c, k, positions, softmax_scale=SCALE),
        )
        cached = (
            mla.mla_prefill(flat(q), flat(qr), cache, 1, *ragged, SCALE),
            mla.mla_decode(*new, cache, 1, tables, few, SCALE),
            mla.indexer_logits(flat(qi), flat(w), cache, 1, *ragged)[:, :S],
            mla.sparse_mla(flat(q), flat(qr), cache, 1, flat(listed), softmax_scale=SCALE),
        )
        return ours, cached

    ours, cached = run(arrays)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(cached), strict=True):
        np.testing.assert_allclose(np.reshape(got, want.shape), want, atol=1e-5)


# ---- straight through ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", helpers.LAYOUTS)
def test_straight_through_is_a_write_and_a_read(layout, rng):
    config = helpers.config(layout, R=128, P=16)
    c, k, upstream = (f32(3 * rng.standard_normal((2, 5, n))) for n in (128, 16, 128))

    @quick
    def run(c: Any, k: Any, upstream: Any) -> Any:
        got, pull = jax.vjp(lambda c, k: mla.straight_through(c, k, config.layout), c, k)
        return got, pull((upstream, jnp.ones_like(k)))

    got, grads = run(c, k, upstream)
    want = helpers.oracle_values(config.layout, helpers.oracle_rows(config.layout, flat(c), flat(k)))
    # In fp32 mode a code may be a neighbour of the oracle's.
    tolerance = 0.13 if layout == "packed_fp32" else 0
    for part, value in zip(got, want, strict=True):
        assert part.dtype == jnp.float32
        np.testing.assert_allclose(flat(part), value, rtol=tolerance)
    assert np.array_equal(grads[0], upstream) and np.all(np.asarray(grads[1]) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", helpers.INDEX_LAYOUTS)
def test_straight_through_of_index_keys(layout, rng):
    config = helpers.config(layout, head_dim=160)
    keys = jnp.asarray(rng.standard_normal((2, 5, 160)), jnp.bfloat16)
    slots = np.arange(1, 11, dtype=np.int32)

    @quick
    def run(keys: Any) -> Any:
        index_layout = config.index_layout
        assert index_layout is not None
        cache = mla.write_index_k(mla.init_cache(config), 0, slots, flat(keys))
        got, pull = jax.vjp(lambda k: mla.straight_through_index(k, index_layout), keys)
        return got, mla.read_index_k(cache, 0, slots).astype(jnp.bfloat16), pull(jnp.ones_like(keys))

    got, want, (grad,) = run(keys)
    assert got.dtype == jnp.bfloat16 and np.array_equal(flat(got), want) and np.all(f32(grad) == 1)


# ---- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, qr, c, k: mla.attention(q, qr, c[:, :, :2], k, softmax_scale=1.0), ValueError, r"expected c_kv of shape \[B=1"),
        (
            lambda q, qr, c, k: mla.attention(q, qr, c.astype(int), k, softmax_scale=1.0),
            TypeError,
            "c_kv must be an array of one of",
        ),
        (lambda q, qr, c, k: mla.attention(q, qr, c, k, softmax_scale=np.ones(2)), ValueError, "softmax_scale must be a scalar"),
        (
            lambda q, qr, c, k: mla.attention(q, qr, c, k, softmax_scale=1.0, lengths=np.ones(2, np.int32)),
            ValueError,
            "expected lengths of shape",
        ),
        (
            lambda q, qr, c, k: mla.attention(q, qr, c, k, softmax_scale=1.0, segment_ids=np.ones((1, 2), np.int32)),
            ValueError,
            "expected segment_ids of shape",
        ),
        (lambda q, qr, c, k: mla.attention(q, qr, c, k, softmax_scale=1.0, out_dtype="int8"), ValueError, "out_dtype must be"),
        (
            lambda q, qr, c, k: mla.sparse_attention(q, qr, c, k, c, softmax_scale=1.0),
            TypeError,
            "positions must be an array of int32",
        ),
        (lambda q, qr, c, k: mla.indexer_scores(q, q, c), ValueError, "expected head_weights of shape"),
        (lambda q, qr, c, k: mla.indexer_kl(c, c[:, :1]), ValueError, "expected target of shape"),
        (lambda q, qr, c, k: mla.indexer_kl(c, c, rows=np.ones((1, 2), bool)), ValueError, "expected rows of shape"),
        (
            lambda q, qr, c, k: mla.straight_through(c, k, helpers.config("packed_pow2").layout),
            ValueError,
            "expected c_kv of shape",
        ),
    ],
)
def test_errors_show_what_was_wrong(call, error, message, rng):
    with pytest.raises(error, match=message):
        call(*(f32(a) for a in inputs(rng, 1, 3, 5)))
