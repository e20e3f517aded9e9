"""mla_prefill and the walk over ragged batches: blocks of tokens that meet several sequences, in any order and number."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import LAYER, Batch, batch, call_cost, check, poisons, queries, relative_error, same_bits
from checkpoints import quick_programs
from helpers import LAYOUTS, config
from mla_jax import ragged, reference

LENGTHS = [0, 1, 16, 33, 70, 48]
NEW = [0, 1, 5, 33, 20, 0]
"""New tokens: none of none, all of one, the last of a page, all of three pages, and none of many."""

prefill = jax.jit(mla.mla_prefill, static_argnames=("softmax_scale", "out_dtype", "implementation"))
decode = jax.jit(mla.mla_decode)


@pytest.fixture(scope="module", autouse=True)
def quick():
    # What decode shares with these is compiled as usual in its own tests.
    with quick_programs():
        yield


def sums(new: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(new)]).astype(np.int32)


def oracle(case: Batch, q: tuple[Any, Any], cu: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    q_latent, q_rope = (np.asarray(part, np.float32) for part in q)
    return reference.dense(
        q_latent, q_rope, *case.values(), case.tables, case.lengths, cu, case.config.geometry.softmax_scale, **options
    )


def call(case: Batch, q: tuple[Any, Any], cu: np.ndarray, byte: int = 0, **options: Any) -> Any:
    return prefill(*q, case.cache(byte), LAYER, case.tables, case.lengths, cu, **options)


# ---- against the oracle ----------------------------------------------------------------------------------------------

FEW = ("plain_float32", "raw_e4m3fnuz", "packed_fp32")


@pytest.mark.parametrize("layout", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_prefill_of_every_layout(layout, rng):
    # 62 tokens of 6 sequences: blocks of 8, most of which meet two sequences; the last three tokens belong to none.
    case = batch(rng, layout, LENGTHS)
    cu = sums(NEW)
    q = queries(rng, int(cu[-1]) + 3, 5)
    got = call(case, q, cu)
    check(got, oracle(case, q, cu))
    assert not np.asarray(got[0])[-3:].any() and np.isneginf(np.asarray(got[1])[-3:]).all()
    for byte in poisons(layout):
        assert same_bits(got, call(case, q, cu, byte)), f"bytes {byte:#x} where no token is change the result"


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        pytest.param([150], [135], id="one sequence in blocks of 64"),
        pytest.param([7] * 70 + [0, 3], [1] * 70 + [0, 2], id="blocks of one token in two groups"),
        pytest.param([40, 0, 0, 0, 31], [1, 0, 0, 0, 9], id="empty sequences within a block"),
    ],
)
def test_shapes_of_batches(lengths, new, rng):
    case = batch(rng, "raw_e4m3fn", lengths, page_size=8, R=32, P=4)
    cu = sums(new)
    q = queries(rng, int(cu[-1]), 3, R=32, P=4)
    got = call(case, q, cu)
    check(got, oracle(case, q, cu))
    assert same_bits(got, call(case, q, cu, 0xFF))


def test_prefill_over_more_than_a_chunk(rng):
    case = batch(rng, "plain_float32", [2200, 30], page_size=1, R=16, P=4)
    cu = sums([6, 3])
    q = queries(rng, 9, 3, R=16, P=4)
    got = call(case, q, cu)
    check(got, oracle(case, q, cu))
    assert same_bits(got, call(case, q, cu, 0xFF))


def test_no_rope(rng):
    case = batch(rng, "packed_pow2", [20, 9], P=0)
    cu = sums([4, 3])
    q = queries(rng, 7, 2, P=0)
    check(call(case, q, cu, 0xFF), oracle(case, q, cu))


def test_prefill_is_decode_where_both_apply(rng):
    lengths = np.array(LENGTHS)
    case = batch(rng, "raw_e4m3fn", lengths)
    q = queries(rng, 6, 2, 5)
    cache = case.cache(0xFF)
    decoded = decode(*q, cache, LAYER, case.tables, case.lengths)
    flat = tuple(part.reshape(12, 5, -1) for part in q)
    filled = prefill(*flat, cache, LAYER, case.tables, case.lengths, sums([2] * 6))
    for a, b in zip(decoded, filled, strict=True):
        assert relative_error(b, np.asarray(a, np.float64).reshape(b.shape)) < 1e-6


def test_prefill_in_parts_is_prefill_at_once(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    cu = sums(NEW)
    q = queries(rng, 62, 5)
    cache = case.cache(0xFF)
    whole = prefill(*q, cache, LAYER, case.tables, case.lengths, cu)
    # The first 20 tokens of sequence 3 as a call of their own: its length is then 20.
    part = np.zeros(7, np.int32)
    part[4:] = 20
    lengths = np.where(np.arange(6) == 3, 20, case.lengths).astype(np.int32)
    shifted = tuple(jnp.roll(x, -int(cu[3]), axis=0) for x in q)
    out, lse = prefill(*shifted, cache, LAYER, case.tables, lengths, part)
    for got, want in ((out, whole[0]), (lse, whole[1])):
        assert relative_error(got[:20], np.asarray(want[cu[3] : cu[3] + 20])) < 1e-6
    assert np.isneginf(np.asarray(lse)[20:]).all()


# ---- visibility ------------------------------------------------------------------------------------------------------


def test_nan_reaches_the_tokens_that_see_it_and_no_other(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    cu = sums(NEW)
    q = queries(rng, 62, 5)
    clean = [np.asarray(part) for part in call(case, q, cu)]
    rows = case.rows.copy()
    rows[case.visible_slots(3)[17]] = 0xFF  # position 17, which the new tokens from 17 on see; all 33 are new
    out, lse = (np.array(part) for part in call(dataclasses.replace(case, rows=rows), q, cu))
    sees = slice(int(cu[3]) + 17, int(cu[4]))
    assert np.isnan(out[sees]).all() and np.isnan(lse[sees]).all()
    out[sees], lse[sees] = clean[0][sees], clean[1][sees]
    assert same_bits((out, lse), clean)


def test_queries_of_no_sequence_may_hold_nan(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    cu = sums(NEW)
    q_latent, q_rope = (np.array(part) for part in queries(rng, 62, 5))
    want = call(case, (q_latent, q_rope), cu)
    q_latent[-3:], q_rope[-3:] = np.nan, np.nan
    assert same_bits(want, call(case, (q_latent, q_rope), cu, 0xFF))


@pytest.mark.parametrize(
    "cu",
    [
        [5, 4, 3, 2, 1, 0, -1],
        [0, 2**31 - 1, -(2**31), 7, 7, 90, 1],
        [-(2**31)] * 7,
        [2**31 - 1] * 7,
        [3, 3, 9, 9, 20, 61, 2**31 - 1],
    ],
)
def test_any_cu_q_lens_and_lengths_are_safe(cu, rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, 62, 5)
    tables = np.where(case.tables < case.config.num_pages, case.tables, 0)
    for lengths in (case.lengths, np.array([-5, 2**31 - 1, -(2**31), 10**9, 70, 1], np.int32)):
        out, lse = prefill(*q, case.cache(), LAYER, tables, lengths, np.array(cu, np.int32))
        assert np.isfinite(out).all() and not np.isnan(lse).any()


def test_owners_of_tokens(rng):
    S, T = 7, 50
    owners_of = jax.jit(lambda lengths, cu: ragged.owners(lengths, cu, T, 15))
    for _ in range(50):
        new = rng.integers(0, 7, S)
        lengths = (new + rng.integers(-3, 20, S)).astype(np.int32)
        before = int(rng.integers(0, 3))  # tokens of no sequence in front, which nothing promises but nothing forbids
        cu = sums(new) + np.int32(before)
        owners = owners_of(lengths, cu)
        sequence = np.concatenate([np.zeros(before), np.repeat(np.arange(S), new), np.zeros(T - cu[-1])])
        np.testing.assert_array_equal(owners.sequence, sequence)
        np.testing.assert_array_equal(owners.visible, reference.visible_keys(lengths, cu, T, 5, 3))
        np.testing.assert_array_equal(owners.owned, (np.arange(T) >= before) & (np.arange(T) < cu[-1]))


def test_plans_cover_every_token():
    for T in (1, 2, 63, 64, 65, 1000):
        for S in (1, 2, 7, 64, 2000):
            block = ragged.block_tokens(T, S)
            assert block == 1 or (1 <= block <= 64 and block <= T / S and block & (block - 1) == 0)
            plan = ragged.plan(T, block, ragged.MAX_BLOCK // block)
            assert plan.lanes * block <= ragged.MAX_BLOCK
            assert plan.groups * plan.lanes * block >= T > (plan.groups - 1) * plan.lanes * block
    plan = ragged.plan(65, 2, 16)
    x = np.arange(65, dtype=np.int32)
    assert plan.split(jnp.asarray(x)).shape == (3, 11, 2)
    np.testing.assert_array_equal(plan.join(plan.split(jnp.asarray(x))), x)


def test_chunks_stay_within_bounds():
    for columns in (1, 3, 64, 10**6, 2**31 - 1):
        for floats in (1, 576, 10**5, 10**8):
            chunk = ragged.chunk_keys(columns, floats)
            assert chunk & (chunk - 1) == 0 and chunk <= ragged.MAX_CHUNK and chunk < 2 * columns
            assert chunk <= ragged.MIN_CHUNK or chunk * floats <= ragged.GROUP_FLOATS


# ---- options, batches ------------------------------------------------------------------------------------------------


def test_sinks_and_output_dtype(rng):
    case = batch(rng, "raw_e4m3fn", [20, 9])
    cu = sums([4, 3])
    q = queries(rng, 7, 5, dtype=jnp.bfloat16)
    sinks = np.array([0.5, -np.inf, np.inf, 3.0, -2.0], np.float32)
    k_scale = np.float32(0.3)
    got = call(case, q, cu, sinks=sinks, k_scale=k_scale, out_dtype="float32")
    check(got, oracle(case, q, cu, sinks=sinks, k_scale=0.3))


def test_traced_layers_in_a_scan(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    cu = sums(NEW)
    q = queries(rng, 62, 5)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> Any:
        return cache, mla.mla_prefill(*q, cache, layer, case.tables, case.lengths, cu)

    _, (out, lse) = jax.jit(lambda cache, layers: jax.lax.scan(step, cache, layers))(case.cache(0xFF), np.array([LAYER, 2, -1]))
    check((out[0], lse[0]), oracle(case, q, cu))
    assert not np.asarray(out[1:]).any() and np.isneginf(np.asarray(lse[1:])).all()


def test_f23_nothing_to_do():
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16))
    for T, S, M in ((0, 2, 4), (3, 0, 4), (0, 0, 0), (3, 2, 0)):
        q = np.zeros((T, 5, 128), np.float32), np.zeros((T, 5, 16), np.float32)
        tables, lengths, cu = np.zeros((S, M), np.int32), np.full(S, 9, np.int32), np.zeros(S + 1, np.int32)
        out, lse = mla.mla_prefill(*q, cache, 0, tables, lengths, cu)
        assert out.shape == (T, 5, 128) and lse.shape == (T, 5)
        assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


def costs(num_pages: int) -> tuple[tuple[Any, ...], int, int]:
    """What a prefill costs as lowered and as compiled; the size of the pool; the size of the largest intermediate."""
    cache = jax.eval_shape(lambda: mla.init_cache(config("packed_pow2", R=128, P=16, num_pages=num_pages)))
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((9, 5, 128), np.float32), ((9, 5, 16), np.float32))]
    rest = [jax.ShapeDtypeStruct(s, np.int32) for s in ((), (2, 8), (2,), (3,))]
    cost, largest = call_cost(mla.mla_prefill, *shapes, cache, *rest)
    return cost, cache.kv.size, largest


def test_f22_cost_does_not_grow_with_the_pool():
    (small, pool, largest), (large, large_pool, large_largest) = costs(512), costs(8192)
    assert small == large
    assert large_pool == 16 * pool
    assert largest == large_largest < pool


def test_errors_name_what_was_given():
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16))
    right: dict[str, Any] = {
        "q_latent": np.zeros((7, 5, 128), np.float32),
        "q_rope": np.zeros((7, 5, 16), np.float32),
        "cache": cache,
        "layer": 0,
        "block_tables": np.zeros((2, 3), np.int32),
        "lengths": np.zeros(2, np.int32),
        "cu_q_lens": np.zeros(3, np.int32),
    }
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q_rope": np.zeros((6, 5, 16), np.float32)}, ValueError, r"q_rope of shape \[T=7, H=5, 16\]"),
        ({"cu_q_lens": np.zeros(2, np.int32)}, ValueError, r"cu_q_lens of shape \[3\], got cu_q_lens.shape=\(2,\)"),
        ({"lengths": np.zeros(3, np.int32)}, ValueError, "lengths"),
        ({"cu_q_lens": np.zeros(3, np.float32)}, TypeError, "cu_q_lens"),
        ({"layer": 2}, ValueError, "layer 2 is out of range"),
        ({"k_scale": -1.0}, ValueError, "k_scale"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "mla_prefill: there is no mosaic_gpu implementation"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.mla_prefill(**{**right, **change})
