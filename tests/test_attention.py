"""mla_decode, and what it shares with the other attentions: against the oracle on stored rows, with poison out of sight."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import LAYER, Batch, batch, call_cost, check, poisons, queries, relative_error, same_bits
from helpers import LAYOUTS, config, equations, oracle_values, row_bytes, with_rows
from mla_jax import reference

LENGTHS = [0, 1, 16, 33, 70, 48]
"""Empty, one, full pages, a last page that begins inside the two new tokens, and a length that ends in the middle of a page."""

decode = jax.jit(mla.mla_decode, static_argnames=("softmax_scale", "num_splits", "out_dtype", "implementation"))


write = jax.jit(mla.write_kv)


def oracle(case: Batch, q: tuple[Any, Any], *, k_scale: float = 1.0, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    q_latent, q_rope = (np.asarray(part, np.float32) for part in q)
    scale = case.config.geometry.softmax_scale
    return reference.decode(q_latent, q_rope, *case.values(), case.tables, case.lengths, scale, k_scale, **options)


def call(case: Batch, q: tuple[Any, Any], byte: int = 0, **options: Any) -> Any:
    return decode(*q, case.cache(byte), LAYER, case.tables, case.lengths, **options)


# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_every_layout(layout, rng):
    case = batch(rng, layout, LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    got = call(case, q)
    check(got, oracle(case, q))
    assert not np.asarray(got[0])[0].any() and np.isneginf(np.asarray(got[1])[0]).all()
    # One new token of a sequence of one: the other query stands before its beginning.
    assert np.isneginf(np.asarray(got[1])[1, 0]).all() and np.isfinite(np.asarray(got[1])[1, 1]).all()
    for byte in poisons(layout):
        assert same_bits(got, call(case, q, byte)), f"bytes {byte:#x} where no token is change the result"


@pytest.mark.parametrize("page_size", [1, 2])
def test_page_sizes(page_size, rng):
    case = batch(rng, "raw_e4m3fn", [5, 0, 67], page_size=page_size)
    q = queries(rng, 3, 2, 5)
    got = call(case, q)
    check(got, oracle(case, q))
    assert same_bits(got, call(case, q, 0xFF))


@pytest.mark.parametrize("heads", [1, 20, *(pytest.param(h, marks=pytest.mark.slow) for h in (4, 8, 12, 16, 32, 40, 64, 96, 128))])
def test_f12_any_number_of_heads(heads, rng):
    case = batch(rng, "packed_pow2", [9, 40])
    q = queries(rng, 2, 2, heads)
    check(call(case, q), oracle(case, q))


@pytest.mark.parametrize(
    ("layout", "R", "P"), [("packed_fp32", 256, 0), pytest.param("raw_e4m3fn", 36, 12, marks=pytest.mark.slow)]
)
def test_f15_other_widths(layout, R, P, rng):
    case = batch(rng, layout, [9, 40], R=R, P=P)
    q = queries(rng, 2, 1, 5, R=R, P=P)
    got = call(case, q)
    check(got, oracle(case, q))
    assert same_bits(got, call(case, q, 0xFF))


def test_tables_longer_than_a_chunk(rng):
    # Three chunks of 1024 keys, of which the first sequence needs one and the last page of the second begins in the third.
    case = batch(rng, "plain_float32", [700, 2113], page_size=64, R=16, P=4, spare_columns=7)
    q = queries(rng, 2, 1, 3, R=16, P=4)
    got = call(case, q)
    check(got, oracle(case, q))
    assert same_bits(got, call(case, q, 0xFF))


def test_large_logits_do_not_overflow(rng):
    case = batch(rng, "plain_float32", [700, 2113], page_size=64, R=16, P=4, spare_columns=7)
    q_latent, q_rope = queries(rng, 2, 1, 3, R=16, P=4)
    q = q_latent * 3000, q_rope * 3000
    check(call(case, q), oracle(case, q), tolerance=1e-4)


def test_pages_are_read_wherever_they_are(rng):
    # The same tokens on other pages give the same bits.
    case = batch(rng, "raw_e4m3fnuz", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    pages, size = case.config.num_pages, case.config.page_size
    move = np.concatenate([[0], 1 + rng.permutation(pages - 1)])
    rows = np.empty_like(case.rows.reshape(pages, size, -1))
    rows[move] = case.rows.reshape(pages, size, -1)
    used = np.empty_like(case.used.reshape(pages, size))
    used[move] = case.used.reshape(pages, size)
    good = (case.tables > 0) & (case.tables < pages)
    tables = np.where(good, move[np.where(good, case.tables, 0)], case.tables).astype(np.int32)
    moved = dataclasses.replace(case, rows=rows.reshape(case.rows.shape), used=used.reshape(-1), tables=tables)
    assert same_bits(call(case, q), call(moved, q, 0x80))


# ---- visibility ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain_float32", "raw_e5m2", "packed_pow2"])
@pytest.mark.parametrize("byte", [0xFF, 0x7C])  # 0x7C is infinite in e5m2 and large elsewhere
def test_nan_within_sight_reaches_the_output_and_no_other_row(layout, byte, rng):
    case = batch(rng, layout, LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    clean = [np.asarray(part) for part in call(case, q)]
    # The last token of sequence 3: its own query sees it, the one before does not, though both share the rows they read.
    rows = case.rows.copy()
    rows[case.visible_slots(3)[-1]] = byte
    out, lse = (np.array(part) for part in call(dataclasses.replace(case, rows=rows), q))
    if byte == 0xFF:
        assert np.isnan(out[3, 1]).all() and np.isnan(lse[3, 1]).all()
    out[3, 1], lse[3, 1] = clean[0][3, 1], clean[1][3, 1]
    assert same_bits((out, lse), clean)


def test_nan_in_a_rope_reaches_the_output(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    rows = case.rows.copy()
    rows[case.visible_slots(4)[7], -4:] = 0xFF
    out, lse = call(dataclasses.replace(case, rows=rows), queries(rng, len(LENGTHS), 2, 5))
    assert np.isnan(out[4]).all() and np.isnan(lse[4]).all()
    assert np.isfinite(out[:4]).all() and np.isfinite(out[5]).all()


def test_nan_in_a_query_stays_there(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q_latent, q_rope = (np.asarray(part).copy() for part in queries(rng, len(LENGTHS), 2, 5))
    clean = [np.asarray(part) for part in call(case, (q_latent, q_rope))]
    q_latent[:, 0, 1] = np.nan
    out, lse = (np.asarray(part) for part in call(case, (q_latent, q_rope)))
    assert np.isnan(out[2:, 0, 1]).all() and np.isnan(lse[2:, 0, 1]).all()
    assert not out[0].any() and np.isneginf(lse[0]).all()
    for got, want in ((out, clean[0]), (lse, clean[1])):
        np.testing.assert_array_equal(np.delete(got, 1, axis=2), np.delete(want, 1, axis=2))
        np.testing.assert_array_equal(got[:, 1], want[:, 1])


def test_bad_pages_within_need_are_invisible(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    tables = case.tables.copy()
    for column, page in enumerate((-1, 0, case.config.num_pages, 2**31 - 1)):
        tables[4, column] = page
    tables[5, :3] = -(2**31)
    case = dataclasses.replace(case, tables=tables)
    q = queries(rng, len(LENGTHS), 2, 5)
    got = call(case, q, 0xFF)
    check(got, oracle(case, q))
    assert not np.asarray(got[0])[5].any() and np.isneginf(np.asarray(got[1])[5]).all()


def test_any_length_is_safe(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    wild = dataclasses.replace(case, lengths=np.array([-1, -(2**31), 2**31 - 1, 10**6, 70, 2], np.int32))
    tables = np.where(case.tables < case.config.num_pages, case.tables, 0)
    out, lse = decode(*q, case.cache(), LAYER, tables, wild.lengths)
    assert not np.asarray(out)[:2].any() and np.isneginf(np.asarray(lse)[:2]).all()
    assert np.isfinite(out).all() and np.isfinite(lse[2:4]).all()
    assert same_bits((out[4], lse[4]), [part[4] for part in decode(*q, case.cache(), LAYER, tables, case.lengths)])


def test_f9_stale_rows_of_the_last_page(rng):
    for layout, bytes_ in (("raw_e4m3fnuz", (0x80, 0xFF)), ("raw_e4m3fn", (0x7F, 0xFF))):
        case = batch(rng, layout, [65, 3], page_size=64)
        q = queries(rng, 2, 2, 5)
        got = call(case, q)
        check(got, oracle(case, q))
        for byte in bytes_:
            assert same_bits(got, call(case, q, byte))


def test_f10_an_empty_sequence_between_others(rng):
    case = batch(rng, "raw_e4m3fn", [65, 0], page_size=64)
    out, lse = call(case, queries(rng, 2, 2, 5), 0xFF)
    assert not np.asarray(out)[1].any() and np.isneginf(np.asarray(lse)[1]).all()
    assert np.isfinite(out[0]).all() and np.isfinite(lse[0]).all()


def test_f19_new_tokens_see_what_single_queries_see(rng):
    # Of two new tokens at length 65 the first sees one page of 64, the second needs the next.
    case = batch(rng, "raw_e4m3fn", [65, 3], page_size=64)
    q = queries(rng, 2, 2, 5)
    out, lse = call(case, q)
    for j in range(2):
        single = tuple(part[:, j : j + 1] for part in q)
        alone = decode(*single, case.cache(0xFF), LAYER, case.tables, case.lengths - 1 + j)
        for got, want in zip((out, lse), alone, strict=True):
            assert relative_error(got[:, j], np.asarray(want[:, 0])) < 1e-6


# ---- options ---------------------------------------------------------------------------------------------------------


def test_sinks_weigh_but_never_enter_lse(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    sinks = np.array([0.5, -np.inf, np.inf, 3.0, -2.0], np.float32)
    plain, got = call(case, q), call(case, q, sinks=sinks)
    check(got, oracle(case, q, sinks=sinks))
    np.testing.assert_array_equal(got[1], plain[1])
    np.testing.assert_array_equal(got[0][:, :, 1], plain[0][:, :, 1])
    assert not np.asarray(got[0])[:, :, 2].any() and not np.asarray(got[0])[0].any()


@pytest.mark.parametrize("layout", ["raw_e4m3fn", pytest.param("raw_e4m3fnuz", marks=pytest.mark.slow)])
def test_f4_k_scale_divides_on_write_and_multiplies_on_read(layout, rng):
    cache = mla.init_cache(config(layout, R=128, P=16, num_pages=8))
    slots = np.arange(16, 16 + 48, dtype=np.int32)
    sign = rng.choice([-1.0, 1.0], (48, 144))
    values = (sign * rng.uniform(0.1, 100, (48, 144))).astype(np.float32)  # normal as codes, with and without the scale
    q_latent, q_rope = queries(rng, 1, 1, 5)
    q = q_latent * 0.01, q_rope * 0.01
    tables, lengths = np.array([[1, 2, 3]], np.int32), np.array([48], np.int32)

    def through(scale: float | None) -> Any:
        scales = {} if scale is None else {"k_scale": jnp.float32(scale)}
        written = write(cache, 0, slots, values[:, :128], values[:, 128:], **scales)
        return written, decode(*q, written, 0, tables, lengths, **scales)

    (_, none), (_, one), (half_cache, half) = through(None), through(1.0), through(0.5)
    assert same_bits(none, one) and same_bits(none, half)
    latent, rope = (part.reshape(8, 16, -1) for part in oracle_values(cache.config.layout, row_bytes(half_cache)[0]))
    check(half, reference.decode(np.asarray(q[0]), np.asarray(q[1]), latent, rope, tables, lengths, 0.0721688, 0.5))


def test_softmax_scale_is_the_geometrys_unless_given(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    cache = case.cache()
    fn = jax.jit(lambda scale: mla.mla_decode(*q, cache, LAYER, case.tables, case.lengths, softmax_scale=scale))
    assert same_bits(call(case, q), fn(case.config.geometry.softmax_scale))
    q_latent, q_rope = (np.asarray(part) for part in q)
    check(fn(0.3), reference.decode(q_latent, q_rope, *case.values(), case.tables, case.lengths, 0.3))


def test_default_dtypes_of_the_output():
    cache = jax.eval_shape(lambda: mla.init_cache(config("raw_e4m3fn", R=128, P=16)))
    tables, lengths = np.ones((2, 3), np.int32), np.ones(2, np.int32)
    fp8 = (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2)
    for dtype, default in ((np.float32,) * 2, (jnp.bfloat16,) * 2, (np.float16,) * 2, *((d, jnp.bfloat16) for d in fp8)):
        q = jax.ShapeDtypeStruct((2, 1, 5, 128), dtype), jax.ShapeDtypeStruct((2, 1, 5, 16), np.float32)
        for asked, want in ((None, default), ("float16", np.float16), (np.dtype(np.float32), np.float32)):
            out, lse = jax.eval_shape(functools.partial(mla.mla_decode, out_dtype=asked), *q, cache, 0, tables, lengths)
            assert (out.dtype, lse.dtype) == (want, np.float32)


def test_narrow_queries_are_computed_in_float32(rng):
    case = batch(rng, "plain_bfloat16", [30, 2])
    fp8 = queries(rng, 2, 1, 5, dtype=jnp.float8_e4m3fnuz)
    check(call(case, fp8, out_dtype="float32"), oracle(case, fp8))
    half = queries(rng, 2, 1, 5, dtype=jnp.bfloat16)
    out, lse = call(case, half)
    want = oracle(case, half)
    assert out.dtype == jnp.bfloat16 and relative_error(out, want[0]) < 2**-8 and relative_error(lse, want[1]) < 1e-6


def test_products_are_of_highest_precision_where_float32_is_at_stake():
    def precisions(layout: str, dtype: Any) -> set[Any]:
        cache = mla.init_cache(config(layout, R=128, P=16))
        q = jnp.zeros((1, 1, 2, 128), dtype), jnp.zeros((1, 1, 2, 16), dtype)
        jaxpr = jax.make_jaxpr(lambda: mla.mla_decode(*q, cache, 0, np.ones((1, 1), np.int32), np.ones(1, np.int32)))()
        dots = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        assert all(eqn.params["preferred_element_type"] == np.float32 for eqn in dots)
        return {eqn.params["precision"] for eqn in dots}

    highest = {(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}
    assert precisions("plain_float32", jnp.bfloat16) == precisions("raw_e4m3fn", jnp.float32) == highest
    assert precisions("raw_e4m3fn", jnp.bfloat16) == precisions("plain_bfloat16", jnp.float16) == {None}


def test_num_splits_is_checked_and_changes_nothing_here(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    assert same_bits(call(case, q), call(case, q, num_splits=3))
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="num_splits must be an int >= 1"):
            call(case, q, num_splits=wrong)


# ---- layers, batches, transformations --------------------------------------------------------------------------------


def test_traced_layers_in_a_scan(rng):
    case = batch(rng, "raw_e4m3fn", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    layers = jnp.array([LAYER, 2, -1, -(2**31), 2**31 - 1], jnp.int32)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> Any:
        return cache, mla.mla_decode(*q, cache, layer, case.tables, case.lengths)

    _, (out, lse) = jax.jit(lambda cache: jax.lax.scan(step, cache, layers))(case.cache(0xFF))
    check((out[0], lse[0]), oracle(case, q))
    assert not np.asarray(out[1:]).any() and np.isneginf(np.asarray(lse[1:])).all()


def test_every_layer_is_its_own(rng):
    case = batch(rng, "raw_e4m3fn", LENGTHS)
    q = queries(rng, len(LENGTHS), 2, 5)
    rows = row_bytes(case.cache()).copy()
    other = with_rows(case.cache(), rows[::-1])
    assert same_bits(call(case, q), decode(*q, other, 1 - LAYER, case.tables, case.lengths))


def test_f23_nothing_to_do():
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16))
    for S, Q, M in ((0, 1, 4), (2, 0, 4), (2, 1, 0)):
        q = np.zeros((S, Q, 5, 128), np.float32), np.zeros((S, Q, 5, 16), np.float32)
        out, lse = mla.mla_decode(*q, cache, 0, np.zeros((S, M), np.int32), np.full(S, 9, np.int32), out_dtype="bfloat16")
        assert out.shape == (S, Q, 5, 128) and lse.shape == (S, Q, 5)
        assert out.dtype == jnp.bfloat16 and not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()
        with pytest.raises(NotImplementedError, match="mosaic_gpu"):
            mla.mla_decode(*q, cache, 0, np.zeros((S, M), np.int32), np.zeros(S, np.int32), implementation="mosaic_gpu")


def test_vmap_over_a_cache_is_refused_and_over_queries_allowed(rng):
    case = batch(rng, "plain_float32", LENGTHS)
    q = queries(rng, 2, len(LENGTHS), 2, 5)
    cache = case.cache()
    caches = jax.tree.map(lambda pool: jnp.stack([pool, pool]), cache)

    def one(cache: mla.PagedMLACache, q_latent: jax.Array, q_rope: jax.Array) -> Any:
        return mla.mla_decode(q_latent, q_rope, cache, LAYER, case.tables, case.lengths)

    with pytest.raises(NotImplementedError, match=r"cannot be batched with vmap.*scan"):
        jax.vmap(one)(caches, *q)
    out, lse = jax.eval_shape(jax.vmap(one, in_axes=(None, 0, 0)), cache, *q)
    assert out.shape == q[0].shape and lse.shape == q[0].shape[:-1]


def test_numpy_arguments_and_wide_integers(rng):
    case = batch(rng, "plain_float32", [5, 20])
    q_latent, q_rope = (np.asarray(part) for part in queries(rng, 2, 1, 5))
    q = q_latent, q_rope
    want = oracle(case, q)
    host = jax.device_get(case.cache())
    narrow = jax.jit(lambda: mla.mla_decode(*q, host, LAYER, case.tables.tolist(), case.lengths.astype(np.int64)))
    check(narrow(), want)
    with jax.enable_x64(True):
        # Ids beyond int32 are bad pages, not their low 32 bits.
        wide = case.tables.astype(np.int64)
        wide = np.where((wide > 0) & (wide < case.config.num_pages), wide, 2**33 + 1)
        check(jax.jit(lambda: mla.mla_decode(*q, host, LAYER, wide, case.lengths.astype(np.int64)))(), want)


# ---- cost ------------------------------------------------------------------------------------------------------------


def costs(num_pages: int) -> tuple[tuple[Any, ...], int, int]:
    """What a decode costs as lowered and as compiled; the size of the pool; the size of the largest intermediate."""
    cache = jax.eval_shape(lambda: mla.init_cache(config("raw_e4m3fn", R=128, P=16, num_pages=num_pages)))
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((2, 1, 5, 128), np.float32), ((2, 1, 5, 16), np.float32))]
    rest = [jax.ShapeDtypeStruct(s, np.int32) for s in ((), (2, 8), (2,))]
    cost, largest = call_cost(mla.mla_decode, *shapes, cache, *rest)
    return cost, cache.kv.size, largest


def test_f22_cost_does_not_grow_with_the_pool():
    (small, pool, largest), (large, large_pool, large_largest) = costs(512), costs(8192)
    assert small == large
    assert large_pool == 16 * pool
    assert largest == large_largest < pool


# ---- errors ----------------------------------------------------------------------------------------------------------


def arguments(S: int = 2, Q: int = 1, H: int = 5, M: int = 3) -> dict[str, Any]:
    return {
        "q_latent": np.zeros((S, Q, H, 128), np.float32),
        "q_rope": np.zeros((S, Q, H, 16), np.float32),
        "cache": mla.init_cache(config("raw_e4m3fn", R=128, P=16)),
        "layer": 0,
        "block_tables": np.zeros((S, M), np.int32),
        "lengths": np.zeros(S, np.int32),
    }


F32 = np.float32
WRONG = {
    "latent width": ({"q_latent": np.zeros((2, 1, 5, 64), F32)}, ValueError, r"q_latent.*128.*got q_latent.shape=\(2, 1, 5, 64\)"),
    "rope width": ({"q_rope": np.zeros((2, 1, 5, 3), F32)}, ValueError, r"q_rope.*16.*got"),
    "heads": ({"q_rope": np.zeros((2, 1, 4, 16), F32)}, ValueError, r"q_rope of shape \[2, Q=1, H=5, 16\]"),
    "rank": ({"q_latent": np.zeros((2, 5, 128), F32)}, ValueError, "q_latent"),
    "sequences": ({"block_tables": np.zeros((3, 3), np.int32)}, ValueError, r"q_latent of shape \[3"),
    "lengths": ({"lengths": np.zeros(3, np.int32)}, ValueError, "lengths of shape"),
    "table rank": ({"block_tables": np.zeros(2, np.int32)}, ValueError, "block_tables must have 2 axes"),
    "query dtype": ({"q_latent": np.zeros((2, 1, 5, 128), np.float64)}, TypeError, "q_latent must be an array of"),
    "integer query": ({"q_rope": np.zeros((2, 1, 5, 16), np.int32)}, TypeError, "q_rope"),
    "float table": ({"block_tables": np.zeros((2, 3), F32)}, TypeError, "block_tables"),
    "float lengths": ({"lengths": np.zeros(2, F32)}, TypeError, "lengths"),
    "lengths beyond int32": ({"lengths": np.full(2, 2**31)}, ValueError, "beyond int32"),
    "layer": ({"layer": 2}, ValueError, "layer 2 is out of range"),
    "negative layer": ({"layer": -1}, ValueError, "layer -1 is out of range"),
    "cache": ({"cache": None}, TypeError, "must be a PagedMLACache"),
    "scale": ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and positive"),
    "nan scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
    "scale of no number": ({"softmax_scale": "auto"}, ValueError, "softmax_scale"),
    "scale shape": ({"softmax_scale": np.ones(5, F32)}, ValueError, r"softmax_scale.*got float32\[5\]"),
    "sinks shape": ({"sinks": np.zeros(4, F32)}, ValueError, r"sinks of shape \[H=5\]"),
    "sinks dtype": ({"sinks": np.zeros(5, np.int32)}, TypeError, "sinks"),
    "k_scale": ({"k_scale": 0.0}, ValueError, "k_scale must be finite and positive"),
    "out_dtype": ({"out_dtype": jnp.float8_e4m3fn}, ValueError, "out_dtype must be None, float32"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None or one of"),
    "mosaic_gpu": ({"implementation": "mosaic_gpu"}, NotImplementedError, "no mosaic_gpu implementation"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_what_was_given(wrong):
    change, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        mla.mla_decode(**{**arguments(), **change})
    if wrong != "mosaic_gpu":
        # The same before anything is computed: shapes alone suffice.
        with pytest.raises(error):
            jax.eval_shape(lambda: mla.mla_decode(**{**arguments(), **change}))


@pytest.mark.parametrize("layout", ["packed_pow2", "plain_bfloat16"])
def test_k_scale_belongs_to_raw_rows(layout):
    call_arguments = arguments()
    call_arguments["cache"] = mla.init_cache(config(layout, R=128, P=16))
    scales: list[Any] = [0.5, np.float32(0.5), jnp.float32(1.0)]
    for wrong in scales:
        with pytest.raises(ValueError, match="k_scale applies to raw FP8 rows"):
            mla.mla_decode(**call_arguments, k_scale=wrong)
    jax.eval_shape(lambda: mla.mla_decode(**call_arguments, k_scale=1.0))


def test_f14_a_reader_of_another_layout_raises():
    call_arguments = arguments()
    other = config("packed_pow2", R=128, P=16)
    call_arguments["cache"] = dataclasses.replace(call_arguments["cache"], config=other)
    with pytest.raises(ValueError, match="layout packed"):
        mla.mla_decode(**call_arguments)
