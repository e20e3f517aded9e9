"""The reading kernels on a GPU: against the float64 oracle on fresh numbers, bit by bit, and in pools of many GiB.

Run with ``pytest -m gpu -n 0``; pools of many GiB want up to 45 GiB a process. ``-k sanitizer`` selects a sweep small enough for
compute-sanitizer, with ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` and one test a process.
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
    decode_oracle,
    listed,
    logits_oracle,
    poisons,
    prefill_oracle,
    queries,
    relative_error,
    same_bits,
    sparse_oracle,
    sums,
)
from helpers import INDEX_LAYOUTS, LAYOUTS

pytestmark = pytest.mark.gpu

LENGTHS = [1500, 1, 0, 64, 65, 777]
NEW = [70, 1, 0, 5, 65, 30]
TOLERANCE, LSE_TOLERANCE = 3e-3, 1e-3
WIDTHS = {"R": 512, "P": 64}

decode = jax.jit(
    functools.partial(mla.mla_decode, implementation="pallas", out_dtype="float32"), static_argnames=("num_splits", "compute")
)
prefill = jax.jit(functools.partial(mla.mla_prefill, implementation="pallas", out_dtype="float32"), static_argnames=("compute",))
sparse = jax.jit(functools.partial(mla.sparse_mla, implementation="pallas", out_dtype="float32"), static_argnames=("compute",))
indexer = jax.jit(functools.partial(mla.indexer_logits, implementation="pallas"))


@pytest.fixture
def fresh() -> np.random.Generator:
    """Other numbers in every run; a failure prints the seed."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def make(rng: np.random.Generator, layout: str, lengths: Any = LENGTHS, **sizes: Any) -> Batch:
    return batch(rng, layout, lengths, **{"page_size": 64, **WIDTHS, **sizes})


def ask(rng: np.random.Generator, *lead: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    return queries(rng, *lead, **WIDTHS, dtype=dtype)


def on_device(case: Batch, byte: int) -> mla.PagedMLACache:
    return jax.device_put(case.cache(byte))


def assert_close(got: Any, want: tuple[np.ndarray, np.ndarray], tolerance: float = TOLERANCE) -> None:
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    assert errors[0] <= tolerance and errors[1] <= LSE_TOLERANCE, f"relative errors of out and lse: {errors}"
    # The whole must not hide a token: each is held to a looser bound of its own.
    for t, (a, b) in enumerate(zip(*(np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got[0], want[0])), strict=True)):
        assert np.linalg.norm(a - b) <= 5 * tolerance * np.linalg.norm(b), f"row {t}"


# ---- against the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "heads"), [(1, 16), (1, 128), (2, 20), (1, 1), (8, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode(layout, new, heads, fresh):
    case, q = make(fresh, layout), ask(fresh, len(LENGTHS), new, heads)
    want = decode_oracle(case, q)
    cache = on_device(case, poisons(layout)[0])
    for num_splits in (None, 1, 3, 1000):
        got = decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=num_splits)
        assert_close(got, want)
        for byte in (0, *poisons(layout)):
            again = decode(*q, on_device(case, byte), LAYER, case.tables, case.lengths, num_splits=num_splits)
            assert same_bits(got, again), f"bytes {byte:#x} where no token is change the result"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_with_float32_queries(layout, fresh):
    case, q = make(fresh, layout), ask(fresh, len(LENGTHS), 2, 5, dtype=np.float32)
    got = decode(*q, on_device(case, 0xFF), LAYER, case.tables, case.lengths)
    assert_close(got, decode_oracle(case, q), 1e-5)


@pytest.mark.parametrize("heads", [16, 128, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill(layout, heads, fresh):
    case, cu = make(fresh, layout), sums(NEW)
    q = ask(fresh, int(cu[-1]) + 3, heads)
    got = prefill(*q, on_device(case, poisons(layout)[0]), LAYER, case.tables, case.lengths, cu)
    assert_close(got, prefill_oracle(case, q, cu))
    assert not np.asarray(got[0])[-3:].any() and np.isneginf(np.asarray(got[1])[-3:]).all()
    for byte in (0, *poisons(layout)):
        assert same_bits(got, prefill(*q, on_device(case, byte), LAYER, case.tables, case.lengths, cu))


@pytest.mark.parametrize(("heads", "lanes"), [(16, 512), (128, 300), (20, 2048)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse(layout, heads, lanes, fresh):
    case = make(fresh, layout)
    q, slots = ask(fresh, 8, heads), listed(fresh, case, 8, lanes)
    slots[1, 5:] = -1
    got = sparse(*q, on_device(case, poisons(layout)[0]), LAYER, slots)
    assert_close(got, sparse_oracle(case, q, slots))
    for byte in (0, *poisons(layout)):
        assert same_bits(got, sparse(*q, on_device(case, byte), LAYER, slots))


@pytest.mark.parametrize(("heads", "dtype"), [(64, jnp.bfloat16), (3, jnp.bfloat16), (64, jnp.float32)])
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_indexer(layout, heads, dtype, fresh):
    case, cu = make(fresh, layout, head_dim=128), sums(NEW)
    q = jnp.asarray(fresh.standard_normal((int(cu[-1]) + 3, heads, 128)), dtype)
    weights = fresh.standard_normal(q.shape[:2]).astype(np.float32)
    got = np.asarray(indexer(q, weights, on_device(case, 0xFF), LAYER, case.tables, case.lengths, cu))
    assert relative_error(got, logits_oracle(case, q, weights, cu)) < (1e-5 if dtype == jnp.float32 else 1e-4)
    for byte in (0, *poisons(layout)):
        again = indexer(q, weights, on_device(case, byte), LAYER, case.tables, case.lengths, cu)
        assert got.tobytes() == np.asarray(again).tobytes()


@pytest.mark.parametrize("page_size", [1, 2, 16, 128, 256])
def test_page_sizes(page_size, fresh):
    for layout in ("raw_e4m3fnuz", "plain_bfloat16", "packed_fp32"):
        case, q = make(fresh, layout, [300, 0, 17, 65], page_size=page_size), ask(fresh, 4, 2, 16)
        got = decode(*q, on_device(case, 0xFF), LAYER, case.tables, case.lengths)
        assert_close(got, decode_oracle(case, q))


@pytest.mark.parametrize(
    ("layout", "R", "P"), [("packed_pow2", 256, 32), ("raw_e4m3fn", 256, 32), ("raw_e5m2", 512, 0), ("plain_float16", 32, 16)]
)
def test_other_widths(layout, R, P, fresh):
    case, q = make(fresh, layout, [300, 0, 65], R=R, P=P), queries(fresh, 3, 2, 16, R=R, P=P, dtype=jnp.bfloat16)
    assert_close(decode(*q, on_device(case, 0xFF), LAYER, case.tables, case.lengths), decode_oracle(case, q))


# ---- NaN, layers, options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_reaches_exactly_the_tokens_that_see_it(layout, fresh):
    case, q = make(fresh, layout), ask(fresh, len(LENGTHS), 2, 5)
    clean = [np.asarray(part) for part in decode(*q, on_device(case, 0), LAYER, case.tables, case.lengths, num_splits=2)]
    for s in (3, 4, 5):
        for byte in poisons(layout)[:1]:
            rows = case.rows.copy()
            rows[case.visible_slots(s)[-1]] = byte
            sick = on_device(dataclasses.replace(case, rows=rows), 0)
            out, lse = (np.array(part) for part in decode(*q, sick, LAYER, case.tables, case.lengths, num_splits=2))
            assert np.isnan(out[s, 1]).all() and np.isnan(lse[s, 1]).all()
            out[s, 1], lse[s, 1] = clean[0][s, 1], clean[1][s, 1]
            assert same_bits((out, lse), clean)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_layers_in_a_scan(layout, fresh):
    case, q = make(fresh, layout, [130, 3]), ask(fresh, 2, 1, 16)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> Any:
        return cache, mla.mla_decode(*q, cache, layer, case.tables, case.lengths, implementation="pallas", out_dtype="float32")

    _, (out, lse) = jax.jit(lambda c, layers: jax.lax.scan(step, c, layers))(on_device(case, 0xFF), np.array([LAYER, 2, -1]))
    assert_close((out[0], lse[0]), decode_oracle(case, q))
    assert not np.asarray(out[1:]).any() and np.isneginf(np.asarray(lse[1:])).all()


def test_sinks_and_k_scale(fresh):
    case = make(fresh, "raw_e4m3fn", [300, 0, 65], k_scale=0.3)
    q, cu = ask(fresh, 3, 2, 5), sums([2, 2, 2])
    options = {"sinks": np.array([0.5, -np.inf, np.inf, 3.0, -2.0], np.float32), "k_scale": np.float32(0.3)}
    cache = on_device(case, 0xFF)
    for num_splits in (1, 4):
        got = decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=num_splits, **options)
        assert_close(got, decode_oracle(case, q, **options))
    flat = tuple(part.reshape(6, 5, -1) for part in q)
    assert_close(prefill(*flat, cache, LAYER, case.tables, case.lengths, cu, **options), prefill_oracle(case, flat, cu, **options))
    slots = listed(fresh, case, 6, 100)
    assert_close(sparse(*flat, cache, LAYER, slots, **options), sparse_oracle(case, flat, slots, **options))


@pytest.mark.parametrize(("layout", "bound"), [("raw_e4m3fn", 0.06), ("raw_e5m2", 0.12)])
def test_products_in_fp8(layout, bound, fresh):
    # Queries and weights are rounded to the rows' type, so that the error is theirs.
    case, cu = make(fresh, layout), sums(NEW)
    for new, heads in ((1, 16), (2, 20), (1, 128)):
        q = ask(fresh, len(LENGTHS), new, heads)
        got = decode(*q, on_device(case, 0xFF), LAYER, case.tables, case.lengths, compute="fp8")
        assert relative_error(got[0], decode_oracle(case, q)[0]) < bound
        assert same_bits(got, decode(*q, on_device(case, 0), LAYER, case.tables, case.lengths, compute="fp8"))
    q = ask(fresh, int(cu[-1]) + 3, 16)
    got = prefill(*q, on_device(case, 0xFF), LAYER, case.tables, case.lengths, cu, compute="fp8")
    assert relative_error(got[0], prefill_oracle(case, q, cu)[0]) < bound
    q, slots = ask(fresh, 8, 64), listed(fresh, case, 8, 300)
    got = sparse(*q, on_device(case, 0xFF), LAYER, slots, compute="fp8")
    assert relative_error(got[0], sparse_oracle(case, q, slots)[0]) < bound


# ---- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_companions(layout, fresh):
    case, q, cu = make(fresh, layout), ask(fresh, len(LENGTHS), 2, 20), sums(NEW)
    cache = on_device(case, 0xFF)
    base = decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=3)
    for _ in range(3):
        assert same_bits(base, decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=3))
    wide = np.pad(case.tables, ((0, 0), (0, 9)), constant_values=-1)
    assert same_bits(base, decode(*q, cache, LAYER, wide, case.lengths, num_splits=3))
    for chosen in (np.array([5, 0, 3, 1, 2, 4]), np.array([0]), np.array([4, 4, 5])):
        got = decode(*(x[chosen] for x in q), cache, LAYER, case.tables[chosen], case.lengths[chosen], num_splits=3)
        assert same_bits(got, [x[chosen] for x in base])
    asked = ask(fresh, int(cu[-1]), 20)
    base = prefill(*asked, cache, LAYER, case.tables, case.lengths, cu)
    assert same_bits(base, prefill(*asked, cache, LAYER, case.tables, case.lengths, cu))
    own = slice(int(cu[4]), int(cu[5]))
    alone = prefill(*(x[own] for x in asked), cache, LAYER, case.tables[4:5], case.lengths[4:5], sums(NEW[4:5]))
    assert same_bits(alone, [x[own] for x in base])
    few, slots = tuple(x[:8] for x in asked), listed(fresh, case, 8, 300)
    base = sparse(*few, cache, LAYER, slots)
    assert same_bits(base, sparse(*few, cache, LAYER, slots))
    back = sparse(*(x[::-1] for x in few), cache, LAYER, slots[::-1].copy())
    assert same_bits(back, [x[::-1] for x in base])


# ---- large pools -------------------------------------------------------------------------------------------------------


def spread(num_pages: int, page_bytes: int, count: int) -> np.ndarray:
    """Pages at the start, around 2 and 4 GiB counted from the layer's own start, and at the end; in scattered order."""
    marks = [1, 2**31 // page_bytes, 2**32 // page_bytes, num_pages // 2, num_pages - 1]
    near = np.concatenate([np.arange(m - count, m + count + 1) for m in marks])
    return np.unique(near[(near > 0) & (near < num_pages)])


def enlarged(pool: jax.Array, num_pages: int, ids: np.ndarray) -> jax.Array:
    """A pool of as many layers whose page ``ids[i]`` is page i of ``pool``, with NaN bytes everywhere else."""

    def build(pages: jax.Array) -> jax.Array:
        ones = np.asarray(np.iinfo(pages.dtype).max, pages.dtype)
        full = jnp.full((pages.shape[0], num_pages, *pages.shape[2:]), ones)
        return full.at[:, ids].set(pages, unique_indices=True)

    return jax.jit(build)(pool)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("raw_e4m3fn", {}), ("plain_bfloat16", {}), ("plain_float32", {}), ("packed_pow2", {}), ("raw_e4m3fn", {"R": 129, "P": 16})],
    ids=["raw", "plain_bfloat16", "plain_float32", "packed", "raw_single_bytes"],
)
@pytest.mark.parametrize("gib", [2.5, 4.5, 6.5])
def test_f6_large_pools_are_addressed_right(layout, sizes, gib, fresh):
    # ``gib`` is the size of one of two layers; the layer that holds the tokens is the second.
    sizes = {**WIDTHS, **sizes}
    case = batch(fresh, layout, [400, 0, 65, 333], page_size=64, **sizes)
    small, row = case.cache(0xFF), case.config.layout.row_bytes
    num_pages = int(gib * 2**30) // (64 * row)
    places = spread(num_pages, 64 * row, 8)
    ids = np.concatenate([[0], fresh.permutation(places)[: case.config.num_pages - 1]])
    assert ids.size == case.config.num_pages
    large_config = dataclasses.replace(case.config, num_pages=num_pages)
    large = dataclasses.replace(small, kv=enlarged(small.kv, num_pages, ids), config=large_config)
    good = (case.tables > 0) & (case.tables < case.config.num_pages)
    tables = np.where(good, ids[np.where(good, case.tables, 0)], -1).astype(np.int32)
    q = queries(fresh, 4, 2, 5, R=sizes["R"], P=sizes["P"], dtype=jnp.bfloat16)
    want = decode(*q, small, LAYER, case.tables, case.lengths, num_splits=2)
    assert_close(want, decode_oracle(case, q))
    assert same_bits(want, decode(*q, large, LAYER, tables, case.lengths, num_splits=2))
    flat, cu = tuple(part.reshape(8, 5, -1) for part in q), sums([2] * 4)
    want = prefill(*flat, small, LAYER, case.tables, case.lengths, cu)
    assert same_bits(want, prefill(*flat, large, LAYER, tables, case.lengths, cu))
    slots = listed(fresh, case, 8, 100)
    valid = (slots > 0) & (slots < case.config.capacity)
    moved = np.where(valid, ids[np.where(valid, slots, 0) // 64] * 64 + slots % 64, -1).astype(np.int32)
    want = sparse(*flat, small, LAYER, np.where(valid, slots, -1))
    assert same_bits(want, sparse(*flat, large, LAYER, moved))


@pytest.mark.parametrize("layout", ["index_e4m3fn_pow2", "index_float32"])
@pytest.mark.parametrize("gib", [2.5, 4.5])
def test_f6_large_index_pools_are_addressed_right(layout, gib, fresh):
    case, cu = batch(fresh, layout, [400, 0, 65, 333], page_size=64, R=128, P=0, head_dim=128), sums([2] * 4)
    small, index = case.cache(0xFF), case.config.index_layout
    assert index is not None and small.index is not None
    num_pages = int(gib * 2**30) // index.page_bytes
    ids = np.concatenate([[0], fresh.permutation(spread(num_pages, index.page_bytes, 8))[: case.config.num_pages - 1]])
    large_config = dataclasses.replace(case.config, num_pages=num_pages)
    kv, keys = (enlarged(pool, num_pages, ids) for pool in (small.kv, small.index))
    large = dataclasses.replace(small, kv=kv, index=keys, config=large_config)
    good = (case.tables > 0) & (case.tables < case.config.num_pages)
    tables = np.where(good, ids[np.where(good, case.tables, 0)], -1).astype(np.int32)
    q = jnp.asarray(fresh.standard_normal((8, 16, 128)), jnp.bfloat16)
    weights = fresh.standard_normal(q.shape[:2]).astype(np.float32)
    want = indexer(q, weights, small, LAYER, case.tables, case.lengths, cu)
    assert same_bits([want], [indexer(q, weights, large, LAYER, tables, case.lengths, cu)])


# ---- for compute-sanitizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain_bfloat16", "raw_e4m3fn", "raw_e4m3fnuz", "packed_fp32"])
def test_sanitizer_attention(layout, rng):
    case, cu = make(rng, layout, [70, 0, 3]), sums([3, 0, 2])
    cache = on_device(case, 0xFF)
    q = ask(rng, 3, 2, 20)
    assert_close(decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=2), decode_oracle(case, q))
    q = ask(rng, 5, 5)
    assert_close(prefill(*q, cache, LAYER, case.tables, case.lengths, cu), prefill_oracle(case, q, cu))
    slots = listed(rng, case, 5, 70)
    assert_close(sparse(*q, cache, LAYER, slots), sparse_oracle(case, q, slots))


@pytest.mark.parametrize("layout", ["index_float32", "index_e4m3fn_pow2"])
def test_sanitizer_indexer(layout, rng):
    case, cu = make(rng, layout, [70, 0, 3], head_dim=128), sums([3, 0, 2])
    q, weights = jnp.asarray(rng.standard_normal((5, 8, 128)), jnp.bfloat16), rng.standard_normal((5, 8)).astype(np.float32)
    got = indexer(q, weights, on_device(case, 0xFF), LAYER, case.tables, case.lengths, cu)
    assert relative_error(got, logits_oracle(case, q, weights, cu)) < 1e-4
