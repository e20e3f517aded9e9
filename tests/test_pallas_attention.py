"""The Pallas reading kernels, interpreted: against the oracle on stored rows, with poison out of sight, and bit by bit.

Few shapes, many questions: a shape costs a second of compiling, a further call with it nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import (
    LAYER,
    Batch,
    batch,
    check,
    decode_oracle,
    interpreted,
    listed,
    logits_oracle,
    poisons,
    prefill_oracle,
    queries,
    relative_error,
    same_bits,
    sparse_oracle,
    sums,
    tolerances,
)
from checkpoints import quick_programs
from helpers import INDEX_LAYOUTS, LAYOUTS, config, oracle_rows, row_bytes, with_rows
from mla_jax import reference
from mla_jax.kernels import tiles, tuning

LENGTHS = [0, 1, 16, 33, 70, 48]
"""Empty, one, one page, a last page that begins inside the two new tokens, one that ends in the middle, and full pages."""
NEW = [0, 1, 5, 33, 20, 0]
"""New tokens of a prefill: none of none, all of one, the last of a page, all of three pages, and none of many."""
S, Q, H, T = len(LENGTHS), 2, 5, sum(NEW) + 3
LANES = 40

RAW = ("raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2")
FEW = ("raw_e4m3fnuz", "packed_fp32")
"""Layouts of the tests that repeat for each kernel; with the others they are slow."""
MOST = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]

decode, prefill, sparse = interpreted(mla.mla_decode), interpreted(mla.mla_prefill), interpreted(mla.sparse_mla)
indexer = interpreted(mla.indexer_logits)


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def ask(case: Batch, q: tuple[Any, Any], byte: int = 0, *, layer: int = LAYER, num_splits: int = 2, **options: Any) -> Any:
    """A decode of ``case`` to float32. All that differ in values alone share one compilation."""
    scale = np.float32(case.config.geometry.softmax_scale)
    options = {"out_dtype": "float32", "num_splits": num_splits, "softmax_scale": scale, **options}
    if case.config.layout.is_raw:
        options = {"k_scale": np.float32(1), **options}
    return decode(*q, case.cache(byte), layer, case.tables, case.lengths, **options)


def usual(rng: np.random.Generator, layout: str, dtype: Any = jnp.bfloat16) -> tuple[Batch, tuple[Any, Any]]:
    """The batch of LENGTHS, and queries of two new tokens a sequence."""
    return batch(rng, layout, LENGTHS), queries(rng, S, Q, H, dtype=dtype)


def with_slot(case: Batch, slot: int, data: Any) -> Batch:
    """The batch with other bytes in one row."""
    rows = case.rows.copy()
    rows[slot] = data
    return dataclasses.replace(case, rows=rows)


def assert_nothing(got: Any) -> None:
    assert not np.asarray(got[0]).any() and np.isneginf(np.asarray(got[1])).all()


# ---- decode against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_every_layout(layout, rng):
    case, q = usual(rng, layout)
    got = ask(case, q)
    check(got, decode_oracle(case, q), *tolerances(layout, jnp.bfloat16))
    assert_nothing([part[0] for part in got])
    # One new token of a sequence of one: the other query stands before its beginning.
    assert_nothing([part[1, 0] for part in got])
    assert np.isfinite(got[1][1, 1]).all()
    for byte in poisons(layout):
        assert same_bits(got, ask(case, q, byte)), f"bytes {byte:#x} where no token is change the result"
    for layer in (2, -1, -(2**31), 2**31 - 1):
        assert_nothing(ask(case, q, 0xFF, layer=layer))


@pytest.mark.parametrize(
    "layout", ["raw_e4m3fnuz", *slow("plain_bfloat16", "plain_float16", "packed_pow2", "packed_fp32", "raw_e5m2")]
)
def test_decode_with_float32_queries_is_exact_and_what_xla_gives(layout, rng):
    case, q = usual(rng, layout, np.float32)
    got = ask(case, q, 0xFF)
    check(got, decode_oracle(case, q), *tolerances(layout, np.float32))
    xla = jax.jit(mla.mla_decode)(*q, case.cache(), LAYER, case.tables, case.lengths)
    for a, b in zip(got, xla, strict=True):
        assert relative_error(a, np.asarray(b, np.float64)) < 1e-6


@pytest.mark.parametrize("page_size", [64, *slow(2, 4, 8, 16, 32, 128, 256)])
def test_page_sizes(page_size, rng):
    # Smaller than a tile of keys, as large and larger; the last page of the first sequence begins with the second new token.
    case = batch(rng, "raw_e4m3fnuz", [2 * max(page_size, 16) + 1, 0, 77], page_size=page_size)
    q = queries(rng, 3, Q, H, dtype=jnp.bfloat16)
    got = ask(case, q)
    check(got, decode_oracle(case, q), *tolerances("raw_e4m3fnuz", jnp.bfloat16))
    assert same_bits(got, ask(case, q, 0xFF))


def test_f27_pages_of_one_token(rng):
    # Words hold four codes: a kernel that took the page size from a shape in words would see pages of four.
    case = batch(rng, "raw_e4m3fn", [5, 0, 37], page_size=1)
    q = queries(rng, 3, 1, H)
    got = ask(case, q)
    check(got, decode_oracle(case, q), *tolerances("raw_e4m3fn", np.float32))
    assert same_bits(got, ask(case, q, 0xFF))


@pytest.mark.parametrize(
    ("new", "heads"),
    [(1, 20), *(pytest.param(1, n, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 8, 12, 16, 32, 40, 64, 96, 128))]
    # Two new tokens have twice the rows: fewer than a tile, an odd number of each kind of word, and more than a tile.
    + [pytest.param(2, n, marks=pytest.mark.slow) for n in (3, 20, 128)],
)
def test_f12_any_number_of_heads(new, heads, rng):
    # Layouts whose words hold one and four numbers; heads beside others neither see them nor are seen.
    layout = "packed_pow2" if heads % 2 else "plain_float16"
    case = batch(rng, layout, [9, 40])
    q = queries(rng, 2, new, heads, dtype=jnp.bfloat16)
    check(ask(case, q), decode_oracle(case, q), *tolerances(layout, jnp.bfloat16))


@pytest.mark.parametrize(
    ("layout", "R", "P"),
    [
        ("packed_fp32", 256, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("raw_e4m3fnuz", 512, 64),
                ("packed_pow2", 512, 64),
                ("plain_bfloat16", 512, 64),
                ("raw_e5m2", 256, 32),
                ("raw_e4m3fn", 32, 16),
                ("plain_float16", 32, 0),
                ("raw_e4m3fn", 512, 0),
                ("raw_e4m3fn", 36, 12),
                ("plain_float32", 100, 6),
            ]
        ),
    ],
)
def test_f15_other_widths(layout, R, P, rng):
    case = batch(rng, layout, [9, 40], R=R, P=P)
    q = queries(rng, 2, 1, H, R=R, P=P, dtype=jnp.bfloat16)
    got = ask(case, q)
    check(got, decode_oracle(case, q), *tolerances(layout, jnp.bfloat16))
    assert same_bits(got, ask(case, q, 0xFF))


@pytest.mark.parametrize(
    ("layout", "R", "pieces", "joined", "made"),
    [
        ("packed_fp32", 512, 4, True, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("packed_pow2", 512, 2, False, 2),
                ("packed_fp32", 384, 4, True, 1),
                ("raw_e4m3fnuz", 256, 4, True, 4),
                ("raw_e5m2", 36, 4, True, 1),
                ("plain_bfloat16", 256, 4, False, 4),
            ]
        ),
    ],
)
def test_rows_read_in_pieces(layout, R, pieces, joined, made, rng):
    # What only some chips' tables ask for.
    case = batch(rng, layout, [9, 40], R=R)
    q = queries(rng, 2, 1, H, R=R, dtype=jnp.bfloat16)
    fmt = tiles.row_format(case.config.layout, wide=False, native=False, joined=joined, pieces=pieces)
    assert len(fmt.latent) == made
    read = interpreted(mla.mla_decode)
    with tuning.forced(tuning.AttendTuning(rows=16, keys=16, num_warps=1, pieces=pieces, join_planes=joined)):
        got, again = (
            read(*q, case.cache(byte), LAYER, case.tables, case.lengths, out_dtype="float32", num_splits=2) for byte in (0, 0xFF)
        )
    check(got, decode_oracle(case, q), *tolerances(layout, jnp.bfloat16))
    assert same_bits(got, again)


@pytest.mark.parametrize("new", [8, *slow(3, 5, 7)])
def test_f19_new_tokens_see_what_single_queries_see(new, rng):
    # The last page begins inside the new tokens; two sequences are shorter than their new tokens are many.
    case = batch(rng, "plain_bfloat16", [0, 3, 33, 70, 18], page_size=16)
    q = queries(rng, 5, new, 3)
    got = ask(case, q, 0xFF, num_splits=1)
    check(got, decode_oracle(case, q), *tolerances("plain_bfloat16", np.float32))
    for j in range(new):
        earlier = dataclasses.replace(case, lengths=np.maximum(case.lengths - new + 1 + j, 0).astype(np.int32))
        alone = ask(earlier, tuple(part[:, j : j + 1] for part in q), 0xFF, num_splits=1)
        for a, b in zip(got, alone, strict=True):
            assert relative_error(a[:, j], np.asarray(b[:, 0], np.float64)) < 1e-6


@pytest.mark.parametrize("num_splits", [1000, *slow(1, 3)])
def test_splits_change_nothing_but_rounding(num_splits, rng):
    # A table of 7 pages has 7 tiles of 16 keys, so most of a thousand parts would be empty; of three, some sequences have fewer.
    case, q = usual(rng, "plain_bfloat16", np.float32)
    got = ask(case, q, 0xFF, num_splits=num_splits)
    check(got, decode_oracle(case, q), *tolerances("plain_bfloat16", np.float32))
    assert_nothing([part[0] for part in got])


@pytest.mark.parametrize(
    ("layout", "stale"), [("raw_e4m3fnuz", (0x80, 0xFF)), *(pytest.param("raw_e4m3fn", (0x7F, 0xFF), marks=pytest.mark.slow),)]
)
def test_f9_stale_rows_of_the_last_page(layout, stale, rng):
    case = batch(rng, layout, [129, 0, 77], page_size=64)
    q = queries(rng, 3, Q, H, dtype=jnp.bfloat16)
    got = ask(case, q)
    check(got, decode_oracle(case, q), *tolerances(layout, jnp.bfloat16))
    for byte in stale:
        assert same_bits(got, ask(case, q, byte))


def test_f10_empty_sequences_and_empty_parts(rng):
    case, q = usual(rng, "raw_e4m3fn")
    got = ask(dataclasses.replace(case, lengths=np.array([0, 0, 0, 33, 0, 1], np.int32)), q, 0xFF)
    assert_nothing([np.asarray(part)[[0, 1, 2, 4]] for part in got])
    assert np.isfinite(np.asarray(got[0])).all() and np.isfinite(np.asarray(got[1])[3]).all()
    full = ask(case, q)
    assert same_bits([part[3] for part in got], [part[3] for part in full])


# ---- prefill, sparse attention and the indexer against the oracle ------------------------------------------------------

SINKS = np.array([0.5, -np.inf, np.inf, 3.0, -2.0], np.float32)
K_SCALE = 0.3


def options_of(layout: str, sinks: np.ndarray | None = SINKS) -> dict[str, Any]:
    """Sinks and, for raw rows, the scale that they were divided by: for a kernel and for the oracle alike."""
    return {"sinks": sinks, **({"k_scale": np.float32(K_SCALE)} if layout in RAW else {})}


def fill(case: Batch, q: tuple[Any, Any], cu: np.ndarray, byte: int = 0, layer: int = LAYER, **options: Any) -> Any:
    """A prefill to float32."""
    return prefill(*q, case.cache(byte), layer, case.tables, case.lengths, cu, out_dtype="float32", **options)


def choose(case: Batch, q: tuple[Any, Any], slots: Any, byte: int = 0, layer: int = LAYER, **options: Any) -> Any:
    """Sparse attention to float32."""
    return sparse(*q, case.cache(byte), layer, slots, out_dtype="float32", **options)


@pytest.mark.parametrize("layout", MOST)
def test_prefill_of_every_layout(layout, rng):
    # Blocks of a dozen tokens, most of which meet two sequences; the last three tokens belong to none.
    case, cu = batch(rng, layout, LENGTHS), sums(NEW)
    q, options = queries(rng, T, H, dtype=jnp.bfloat16), options_of(layout)
    got = fill(case, q, cu, **options)
    check(got, prefill_oracle(case, q, cu, **options), *tolerances(layout, jnp.bfloat16))
    assert_nothing([part[-3:] for part in got])
    for byte in poisons(layout):
        assert same_bits(got, fill(case, q, cu, byte, **options)), f"bytes {byte:#x} where no token is change the result"
    assert_nothing(fill(case, q, cu, layer=-1, **options))


@pytest.mark.parametrize(
    ("lengths", "new", "heads"),
    [
        pytest.param([40, 0, 0, 0, 31], [1, 0, 0, 0, 9], 1, id="empty sequences within a block, one head", marks=pytest.mark.slow),
        pytest.param([150], [135], 3, id="one sequence of many blocks", marks=pytest.mark.slow),
        pytest.param([7] * 70 + [0, 3], [1] * 70 + [0, 2], 3, id="many sequences a block", marks=pytest.mark.slow),
        pytest.param([40, 9], [12, 3], 64, id="a block a token", marks=pytest.mark.slow),
        pytest.param([40, 9], [12, 3], 128, id="more heads than rows of a block", marks=pytest.mark.slow),
        pytest.param([40, 9], [12, 3], 20, id="heads that fill no block", marks=pytest.mark.slow),
    ],
)
def test_shapes_of_prefills(lengths, new, heads, rng):
    case, cu = batch(rng, "plain_bfloat16", lengths, page_size=8, R=32, P=4), sums(new)
    q = queries(rng, int(cu[-1]), heads, R=32, P=4)
    got = fill(case, q, cu)
    check(got, prefill_oracle(case, q, cu), *tolerances("plain_bfloat16", np.float32))
    assert same_bits(got, fill(case, q, cu, 0xFF))


@pytest.mark.parametrize("layout", MOST)
def test_sparse_of_every_layout(layout, rng):
    case = batch(rng, layout, LENGTHS)
    q, slots, options = queries(rng, 6, H, dtype=jnp.bfloat16), listed(rng, case, 6, LANES), options_of(layout)
    slots[1, 3:] = -1  # almost all of the lanes of a tile
    got = choose(case, q, slots, **options)
    check(got, sparse_oracle(case, q, slots, **options), *tolerances(layout, jnp.bfloat16))
    assert_nothing([part[0] for part in got])
    for byte in poisons(layout):
        assert same_bits(got, choose(case, q, slots, byte, **options)), f"bytes {byte:#x} at slots not listed change the result"
    assert_nothing(choose(case, q, slots, layer=2, **options))


@pytest.mark.parametrize("heads", [3, *slow(1, 12, 16, 20, 64, 128)])
def test_lanes_beyond_topk_lengths_may_hold_anything(heads, rng):
    case = batch(rng, "plain_bfloat16", [40, 7])
    q, slots = queries(rng, 6, heads), listed(rng, case, 6, LANES)
    lengths = np.array([4, 0, 5, LANES, LANES + 1, -(2**31)], np.int32)
    got = choose(case, q, slots, topk_lengths=lengths)
    check(got, sparse_oracle(case, q, slots, lengths), *tolerances("plain_bfloat16", np.float32))
    unused = np.flatnonzero(~case.used)
    for junk in (unused[unused > 0][0], case.visible_slots(0)[0], 2**31 - 1):
        changed = np.where(np.arange(LANES) >= lengths[:, None], junk, slots).astype(np.int32)
        assert same_bits(got, choose(case, q, changed, 0xFF, topk_lengths=lengths))


INDEX_FEW = ("index_float32", "index_e4m3fn_fp32")


@pytest.mark.parametrize("layout", [n if n in INDEX_FEW else pytest.param(n, marks=pytest.mark.slow) for n in INDEX_LAYOUTS])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_logits_of_every_layout(layout, dtype, rng):
    case, cu = batch(rng, layout, LENGTHS, head_dim=128), sums(NEW)
    q = jnp.asarray(rng.standard_normal((T, 3, 128)), dtype)
    weights = rng.standard_normal((T, 3)).astype(np.float32)

    def call(byte: int, layer: int = LAYER) -> np.ndarray:
        return np.asarray(indexer(q, weights, case.cache(byte), layer, case.tables, case.lengths, cu))

    got = call(0)
    assert got.dtype == np.float32 and got.shape == (T, case.tables.shape[1] * 16)
    # Products of FP8 and bfloat16 numbers are exact in float32, and only their sums round.
    assert relative_error(got, logits_oracle(case, q, weights, cu)) < 1e-6
    assert np.isneginf(got[-3:]).all() and np.isneginf(call(0, 2)).all()
    for byte in poisons(layout):
        assert got.tobytes() == call(byte).tobytes(), f"bytes {byte:#x} change the logits"


@pytest.mark.parametrize(
    ("lengths", "new", "page_size", "d", "heads"),
    [
        pytest.param([37, 30], [5, 3], 1, 64, 20, id="pages of one token and heads that fill no block"),
        pytest.param([150], [135], 64, 32, 1, id="one head", marks=pytest.mark.slow),
        pytest.param([7] * 70 + [0, 3], [1] * 70 + [0, 2], 2, 20, 2, id="many sequences", marks=pytest.mark.slow),
        pytest.param([150, 30], [2, 1], 256, 160, 64, id="large pages and two scales a key", marks=pytest.mark.slow),
    ],
)
def test_shapes_of_logits(lengths, new, page_size, d, heads, rng):
    case, cu = batch(rng, "index_e4m3fn_pow2", lengths, page_size=page_size, head_dim=d), sums(new)
    q = jnp.asarray(rng.standard_normal((int(cu[-1]), heads, d)), jnp.bfloat16)
    weights = rng.standard_normal(q.shape[:2]).astype(np.float32)
    got = indexer(q, weights, case.cache(0), LAYER, case.tables, case.lengths, cu)
    assert relative_error(got, logits_oracle(case, q, weights, cu)) < 1e-6
    assert same_bits([got], [indexer(q, weights, case.cache(0xFF), LAYER, case.tables, case.lengths, cu)])


# ---- what is not seen, and what is -------------------------------------------------------------------------------------

NAN_BYTES = {"raw_e4m3fn": (0x7F, 0xFF), "raw_e4m3fnuz": (0x80,), "raw_e5m2": (0x7E, 0xFF, 0x7C), "plain_bfloat16": (0xFF,)}
"""Bytes of which a row of them is NaN; of e5m2 also one of which it is infinite."""


@pytest.mark.parametrize("layout", [*NAN_BYTES, "packed_pow2", *slow("packed_fp32", "plain_float16")])
def test_nan_reaches_exactly_the_tokens_that_see_it(layout, rng):
    case, q = usual(rng, layout)
    clean = [np.asarray(part) for part in ask(case, q)]
    for byte in NAN_BYTES.get(layout, (0xFF,)):
        # A last token, alone in its tile or behind others: its own query sees it, the one before does not.
        for s in (3, 4, 5):
            out, lse = (np.array(part) for part in ask(with_slot(case, case.visible_slots(s)[-1], byte), q))
            if byte != 0x7C:
                assert np.isnan(out[s, 1]).all() and np.isnan(lse[s, 1]).all()
            out[s, 1], lse[s, 1] = clean[0][s, 1], clean[1][s, 1]
            assert same_bits((out, lse), clean), f"a row of bytes {byte:#x} reaches a token that does not see it"
        # A token within: all new tokens of its sequence see it, and no other sequence does.
        out, lse = (np.array(part) for part in ask(with_slot(case, case.visible_slots(4)[7], byte), q))
        if byte != 0x7C:
            assert np.isnan(out[4]).all() and np.isnan(lse[4]).all()
        out[4], lse[4] = clean[0][4], clean[1][4]
        assert same_bits((out, lse), clean)


@pytest.mark.parametrize("layout", ["packed_pow2", "plain_bfloat16", *slow(*RAW)])
def test_rows_that_a_token_does_not_see_change_none_of_its_bits(layout, rng):
    # Finite rows of any size: the numbers of one token must not depend on what a later one brings.
    case, q = usual(rng, layout)
    base = ask(case, q)
    for size in (2.0**-6, 2.0, 2.0**7, 2.0**30, 2.0**100):
        with np.errstate(over="ignore"):
            c_kv, k_rope = (rng.standard_normal((1, width)).astype(np.float32) * np.float32(size) for width in (128, 16))
        data = oracle_rows(case.config.layout, c_kv, k_rope)[0]
        for s in (3, 4, 5):
            got = ask(with_slot(case, case.visible_slots(s)[-1], data), q)
            assert same_bits([part[s, 0] for part in got], [part[s, 0] for part in base]), f"a later row of size {size:g} does"


@pytest.mark.slow
def test_nan_in_prefilled_and_listed_rows(rng):
    case, cu = batch(rng, "raw_e4m3fnuz", LENGTHS), sums(NEW)
    q, slots = queries(rng, T, H, dtype=jnp.bfloat16), listed(rng, case, 6, LANES)
    few = tuple(part[:6] for part in q)
    bad = case.visible_slots(3)[17]
    slots = np.where(slots == bad, case.visible_slots(3)[18], slots)
    slots[3, 7] = bad
    sick = with_slot(case, bad, 0x80)
    sees = slice(int(cu[3]) + 17, int(cu[4]))
    options = options_of("raw_e4m3fnuz", np.zeros(H, np.float32))
    calls = (
        (sees, lambda case: fill(case, q, cu, **options)),
        (slice(3, 4), lambda case: choose(case, few, slots, **options)),
    )
    for rows, call in calls:
        # Without the bad lane the token of the sparse call would see another set, so only the others are compared.
        clean, got = ([np.array(part) for part in call(c)] for c in (case, sick))
        for a, b in zip(got, clean, strict=True):
            assert np.isnan(a[rows]).all()
            a[rows] = b[rows]
        assert same_bits(got, clean)


def test_nan_in_a_query_stays_there(rng):
    case, (latent, rope) = usual(rng, "raw_e4m3fn")
    clean = [np.asarray(part) for part in ask(case, (latent, rope))]
    out, lse = (np.array(part) for part in ask(case, (latent.at[:, 0, 1].set(np.nan), rope)))
    assert np.isnan(out[2:, 0, 1]).all() and np.isnan(lse[2:, 0, 1]).all()
    assert_nothing((out[0], lse[0]))
    out[2:, 0, 1], lse[2:, 0, 1] = clean[0][2:, 0, 1], clean[1][2:, 0, 1]
    assert same_bits((out, lse), clean)


def test_bad_pages_within_need_are_invisible(rng):
    case, q = usual(rng, "raw_e4m3fn")
    tables = case.tables.copy()
    tables[4, :4] = -1, 0, case.config.num_pages, 2**31 - 1
    tables[5, :3] = -(2**31)
    case = dataclasses.replace(case, tables=tables)
    got = ask(case, q, 0xFF)
    check(got, decode_oracle(case, q), *tolerances("raw_e4m3fn", jnp.bfloat16))
    assert_nothing([part[5] for part in got])


def test_any_length_is_safe(rng):
    case, q = usual(rng, "raw_e4m3fn")
    tables = np.where(case.tables < case.config.num_pages, case.tables, 0)
    case = dataclasses.replace(case, tables=tables)
    wild = dataclasses.replace(case, lengths=np.array([-1, -(2**31), 2**31 - 1, 10**6, 70, 2], np.int32))
    got = ask(wild, q)
    assert_nothing([part[:2] for part in got])
    assert np.isfinite(got[0]).all() and np.isfinite(got[1][2:4]).all()
    assert same_bits([part[4] for part in got], [part[4] for part in ask(case, q)])


def test_any_cu_q_lens_are_safe(rng):
    case = batch(rng, "raw_e4m3fnuz", LENGTHS)
    q = queries(rng, T, H, dtype=jnp.bfloat16)
    tables = np.where(case.tables < case.config.num_pages, case.tables, 0)
    options = options_of("raw_e4m3fnuz")
    for cu in ([5, 4, 3, 2, 1, 0, -1], [0, 2**31 - 1, -(2**31), 7, 7, 90, 1], [-(2**31)] * 7, [2**31 - 1] * 7):
        for lengths in (case.lengths, np.array([-5, 2**31 - 1, -(2**31), 10**9, 70, 1], np.int32)):
            wild = dataclasses.replace(case, tables=tables, lengths=lengths)
            out, lse = fill(wild, q, np.array(cu, np.int32), **options)
            assert np.isfinite(out).all() and not np.isnan(lse).any()


def test_f5_the_reserved_slot_poisons_nobody(rng):
    # What a write of rows to slots 5, 0 and 0 leaves, were it to write the last two.
    case = batch(rng, "raw_e4m3fnuz", LENGTHS)
    used = np.zeros_like(case.used)
    used[5] = True
    case = dataclasses.replace(case, used=used)
    slots = np.full((6, LANES), -1, np.int32)
    slots[:, 0] = 5
    options = options_of("raw_e4m3fnuz", np.full(H, -np.inf, np.float32))
    out, lse = choose(case, queries(rng, 6, H, dtype=jnp.bfloat16), slots, 0x80, **options)
    latent = case.values()[0].reshape(-1, 128)[5] * np.float32(K_SCALE)
    np.testing.assert_allclose(out, np.broadcast_to(latent, (6, H, 128)), rtol=1e-6)
    assert np.isfinite(lse).all()


def test_f7_unfilled_lanes_are_no_token(rng):
    case = batch(rng, "packed_fp32", LENGTHS)
    q = queries(rng, 6, H, dtype=jnp.bfloat16)
    slots = np.full((6, LANES), -1, np.int32)
    slots[:, [0, 4, 39]] = case.visible_slots(4)[[2, 0, 1]]
    got = choose(case, q, slots, 0xFF, **options_of("packed_fp32"))
    three = dataclasses.replace(case, tables=case.tables[[4] * 6], lengths=np.full(6, 3, np.int32))
    want = decode_oracle(three, tuple(part[:, None] for part in q), sinks=SINKS)
    check(got, (want[0][:, 0], want[1][:, 0]), *tolerances("packed_fp32", jnp.bfloat16))


# ---- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, *slow(2)])
def test_sinks_weigh_but_never_enter_lse(num_splits, rng):
    case, q = usual(rng, "plain_bfloat16", np.float32)
    got = ask(case, q, 0xFF, num_splits=num_splits, sinks=SINKS)
    check(got, decode_oracle(case, q, sinks=SINKS), 1e-5)
    assert not np.asarray(got[0])[:, :, 2].any() and not np.asarray(got[0])[0].any()


def test_k_scale_and_softmax_scale_may_be_traced(rng):
    case, q = usual(rng, "raw_e4m3fn")
    for k_scale, scale in ((0.5, 0.3), (3.7, 0.01)):
        got = ask(case, q, 0xFF, k_scale=np.float32(k_scale), softmax_scale=np.float32(scale))
        check(got, decode_oracle(case, q, k_scale=k_scale, softmax_scale=scale), *tolerances("raw_e4m3fn", jnp.bfloat16))


@pytest.mark.parametrize("layout", ["raw_e4m3fn", "packed_pow2", *slow("plain_bfloat16", "raw_e4m3fnuz", "raw_e5m2")])
def test_the_size_of_queries_does_not_matter(layout, rng):
    # 2^30 and 2^-30 are beyond float16, in which FP8 rows may be multiplied; a power of two leaves every rounding as it is.
    case, q = usual(rng, layout)
    base = None
    for power in (0, 30, -30):
        scaled = tuple(part * jnp.bfloat16(2.0**power) for part in q)
        got = ask(case, scaled, softmax_scale=np.float32(0.07 * 2.0**-power))
        assert base is None or same_bits(got, base)
        base = got


def test_output_dtypes(rng):
    case, q = usual(rng, "plain_bfloat16")
    want = decode_oracle(case, q)
    out, lse = ask(case, q, num_splits=1, out_dtype=None)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert relative_error(out, want[0]) < 3e-3 + 2**-9
    cache = jax.eval_shape(lambda: mla.init_cache(case.config))
    fp8 = tuple(part.astype(jnp.float8_e4m3fn) for part in q)
    for asked, queries_, dtype in ((None, fp8, "bfloat16"), ("float16", q, "float16"), (jnp.float32, fp8, "float32")):
        for splits in (1, 2):
            options: dict[str, Any] = {"out_dtype": asked, "num_splits": splits, "implementation": "pallas"}
            call = functools.partial(mla.mla_decode, **options)
            out, lse = jax.eval_shape(call, *queries_, cache, np.int32(0), case.tables, case.lengths)
            assert out.dtype == dtype and lse.dtype == jnp.float32 and out.shape == q[0].shape


def test_f14_a_reader_of_another_layout_raises(rng):
    case, q = usual(rng, "raw_e4m3fn")
    other = dataclasses.replace(case.cache(), config=config("packed_pow2", R=128, P=16, num_pages=case.config.num_pages))
    with pytest.raises(ValueError, match="layout packed"):
        decode(*q, other, LAYER, case.tables, case.lengths)


def test_f23_nothing_to_do():
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16))
    pallas: dict[str, Any] = {"implementation": "pallas"}
    for s, new, M in ((0, 1, 4), (2, 0, 4), (2, 1, 0)):
        q = np.zeros((s, new, H, 128), np.float32), np.zeros((s, new, H, 16), np.float32)
        got = mla.mla_decode(*q, cache, 0, np.zeros((s, M), np.int32), np.full(s, 9, np.int32), **pallas)
        assert_nothing(got)
        assert got[0].shape == q[0].shape and got[1].shape == q[0].shape[:-1]
    for tokens, s, M in ((0, 2, 4), (3, 0, 4), (3, 2, 0)):
        q = np.zeros((tokens, H, 128), np.float32), np.zeros((tokens, H, 16), np.float32)
        rest = np.zeros((s, M), np.int32), np.full(s, 9, np.int32), np.zeros(s + 1, np.int32)
        assert_nothing(mla.mla_prefill(*q, cache, 0, *rest, **pallas))
        assert_nothing(mla.sparse_mla(*q, cache, 0, np.zeros((tokens, M if tokens else 8), np.int32)[:, :0], **pallas))


# ---- scales of packed rows ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed_pow2", "packed_fp32"])
def test_packed_scales_of_any_size(layout, rng):
    # Two groups a row: all tiny, all huge, and both in one row. The softmax scale keeps the logits of order 1.
    case = batch(rng, layout, [33, 48], R=256)
    q_latent, q_rope = queries(rng, 2, 1, H, R=256, dtype=jnp.bfloat16)
    for sizes in ((2.0**-13, 2.0**-13), (2.0**-30, 2.0**-30), (2.0**100, 2.0**100), (1.0, 2.0**-9), (2.0**-20, 2.0**20)):
        c_kv = rng.standard_normal((case.config.capacity, 256)).astype(np.float32)
        c_kv *= np.repeat(np.array(sizes, np.float32), 128)
        k_rope = rng.standard_normal((case.config.capacity, 16)).astype(np.float32) * np.float32(max(sizes))
        sized = dataclasses.replace(case, rows=oracle_rows(case.config.layout, c_kv, k_rope))
        scale = np.float32(0.07 / max(sizes))
        got = ask(sized, (q_latent, q_rope), 0xFF, softmax_scale=scale)
        check(got, decode_oracle(sized, (q_latent, q_rope), softmax_scale=scale), *tolerances(layout, jnp.bfloat16))


@pytest.mark.parametrize("size", [2.0**10, 2.0**20, 2.0**100])
def test_a_huge_packed_row_that_no_head_attends_to(size, rng):
    # The row is seen, and its weight vanishes: what is left are the rows of order 1 beside it.
    case = batch(rng, "packed_pow2", [33, 48], R=256)
    q_latent, q_rope = queries(rng, 2, 1, H, R=256, dtype=jnp.bfloat16)
    c_kv, k_rope = (rng.standard_normal((case.config.capacity, width)).astype(np.float32) for width in (256, 16))
    q_latent = q_latent.at[..., 0].set(8.0)
    for s in range(2):
        c_kv[case.visible_slots(s)[5]] = 0
        c_kv[case.visible_slots(s)[5], 0] = -size
    case = dataclasses.replace(case, rows=oracle_rows(case.config.layout, c_kv, k_rope))
    got = ask(case, (q_latent, q_rope))
    check(got, decode_oracle(case, (q_latent, q_rope)), *tolerances("packed_pow2", jnp.bfloat16))


# ---- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed_pow2", *slow("raw_e4m3fn", "plain_bfloat16")])
def test_bits_of_a_sequence_do_not_depend_on_its_companions(layout, rng):
    case, q = usual(rng, layout)
    base = ask(case, q)
    assert same_bits(base, ask(case, q))
    # A wider table is more padding: the number of parts is fixed, so nothing moves. One call has both, as each shape compiles.
    for chosen, wider in ((np.array([4, 3, 5, 0, 1, 2]), 0), (np.array([3, 5, 4, 4]), 5)):
        tables = np.pad(case.tables[chosen], ((0, 0), (0, wider)), constant_values=-1)
        part = dataclasses.replace(case, tables=tables, lengths=case.lengths[chosen])
        got = ask(part, (np.asarray(q[0])[chosen], np.asarray(q[1])[chosen]))
        assert same_bits(got, [np.asarray(x)[chosen] for x in base])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed_fp32", *slow("raw_e4m3fnuz", "plain_bfloat16", "packed_pow2")])
def test_bits_of_a_prefill_do_not_depend_on_companions(layout, rng):
    case, cu = batch(rng, layout, LENGTHS), sums(NEW)
    q = queries(rng, T, H, dtype=jnp.bfloat16)
    options = options_of(layout)
    base = fill(case, q, cu, **options)
    # Sequences 3 and 4 in the other order, without the rest and with other tokens of no sequence behind them.
    own = [np.arange(cu[s], cu[s + 1]) for s in (4, 3)]
    token = np.concatenate([*own, np.arange(T - sum(map(len, own)))])
    chosen = np.array([4, 3, 0, 0, 0, 0])
    new_cu = np.minimum(sums([20, 33, 0, 0, 0, 0]), 53).astype(np.int32)
    part = dataclasses.replace(case, tables=case.tables[chosen], lengths=case.lengths[chosen])
    got = fill(part, (np.asarray(q[0])[token], np.asarray(q[1])[token]), new_cu, 0xFF, **options)
    assert same_bits([np.asarray(x)[:53] for x in got], [np.asarray(x)[token[:53]] for x in base])


def test_bits_of_a_sparse_call_do_not_depend_on_companions(rng):
    case = batch(rng, "packed_fp32", LENGTHS)
    q, slots = queries(rng, 6, H, dtype=jnp.bfloat16), listed(rng, case, 6, LANES)
    options = options_of("packed_fp32")
    base = choose(case, q, slots, **options)
    for chosen in (np.array([5, 1, 0, 3, 2, 4]), np.array([3, 4])):
        got = choose(case, (np.asarray(q[0])[chosen], np.asarray(q[1])[chosen]), slots[chosen], 0xFF, **options)
        assert same_bits(got, [np.asarray(x)[chosen] for x in base])


def test_pages_are_read_wherever_they_are(rng):
    case, q = usual(rng, "raw_e4m3fnuz")
    pages, size = case.config.num_pages, case.config.page_size
    move = np.concatenate([[0], 1 + rng.permutation(pages - 1)])
    rows, used = np.empty_like(case.rows.reshape(pages, size, -1)), np.empty_like(case.used.reshape(pages, size))
    rows[move], used[move] = case.rows.reshape(pages, size, -1), case.used.reshape(pages, size)
    good = (case.tables > 0) & (case.tables < pages)
    tables = np.where(good, move[np.where(good, case.tables, 0)], case.tables).astype(np.int32)
    moved = dataclasses.replace(case, rows=rows.reshape(case.rows.shape), used=used.reshape(-1), tables=tables)
    assert same_bits(ask(case, q), ask(moved, q, 0x80))


# ---- one selection for several layers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_selection_is_shared_between_layers(rng):
    # IndexShare: a layer without an indexer attends to the tokens that an earlier layer chose. Slots are the same in every layer,
    # so the earlier layer's slots and another layer number are all it takes.
    case = batch(rng, "plain_bfloat16", LENGTHS)
    k, cu = 8, sums(NEW)
    parts = [rng.standard_normal((case.config.capacity, width)).astype(np.float32) for width in (128, 16)]
    other = dataclasses.replace(case, rows=oracle_rows(case.config.layout, *parts))
    rows = row_bytes(case.cache(0xFF)).copy()
    rows[1 - LAYER, case.used] = other.rows[case.used]
    cache = with_rows(case.cache(0xFF), rows)
    logits = rng.standard_normal((T, case.tables.shape[1] * 16)).astype(np.float32)

    @jax.jit
    def select(logits: jax.Array) -> Any:
        tables, visible = mla.expand_rows(case.tables, case.lengths, cu, T)
        positions = mla.select_topk(logits, visible, k)
        return tables, positions, mla.positions_to_slots(positions, tables, 16, case.config.num_pages)

    tables, positions, slots = (np.asarray(part) for part in select(logits))
    asked = queries(rng, T, H)
    share: Any = interpreted(mla.sparse_mla)
    for layer, stored in ((LAYER, case), (1 - LAYER, other)):
        got = share(*asked, cache, layer, slots)
        # Dense attention over the table's pages, restricted to the chosen positions.
        pages = tables % case.config.num_pages  # ids of no page are not chosen
        latent, rope = (part[pages].reshape(T, -1, part.shape[-1]) for part in stored.values())
        allowed = (np.arange(latent.shape[1]) == positions[..., None]).any(axis=1)
        q_latent, q_rope = (np.asarray(part) for part in asked)
        want = reference.attention(q_latent, q_rope, latent, rope, allowed, case.config.geometry.softmax_scale)
        check(got, want, *tolerances("plain_bfloat16", np.float32))
    assert share._cache_size() == 1


def test_a_second_eager_call_compiles_nothing(rng):
    # A kernel outside of any jit would be traced and compiled again at each call.
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    case, q = usual(rng, "raw_e4m3fn")
    cache = case.cache()
    counts = []
    with quick_programs():
        for _ in range(3):
            mla.mla_decode(*q, cache, LAYER, case.tables, case.lengths, implementation="pallas")
            counts.append(len(compiled))
    assert 0 < counts[0] == counts[1] == counts[2]
