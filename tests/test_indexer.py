"""indexer_logits: against the oracle on stored keys, with poison wherever nobody may look, and on to sparse attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import LAYER, Batch, batch, call_cost, check, poisons, queries, relative_error
from checkpoints import quick_programs
from helpers import INDEX_LAYOUTS, config
from mla_jax import reference

LENGTHS = [0, 1, 16, 33, 70, 48]
NEW = [0, 1, 5, 33, 20, 0]
HEADS = 3

logits_of = jax.jit(mla.indexer_logits, static_argnames="implementation")


@pytest.fixture(scope="module", autouse=True)
def quick():
    # What decode shares with these is compiled as usual in its own tests.
    with quick_programs():
        yield


def sums(new: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(new)]).astype(np.int32)


def asked(rng: np.random.Generator, T: int, d: int, heads: int = HEADS, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Queries [T, heads, d], and weights [T, heads] of both signs."""
    q = jnp.asarray(rng.standard_normal((T, heads, d)).astype(np.float32)).astype(dtype)
    return q, rng.standard_normal((T, heads)).astype(np.float32)


def oracle(case: Batch, q: Any, weights: Any, cu: np.ndarray) -> np.ndarray:
    return reference.indexer_logits(np.asarray(q, np.float32), weights, case.keys(), case.tables, case.lengths, cu)


def call(case: Batch, q: Any, weights: Any, cu: np.ndarray, byte: int = 0) -> np.ndarray:
    return np.asarray(logits_of(q, weights, case.cache(byte), LAYER, case.tables, case.lengths, cu))


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_logits_of_every_layout(layout, rng):
    case = batch(rng, layout, LENGTHS, head_dim=128)
    cu = sums(NEW)
    q, weights = asked(rng, int(cu[-1]) + 3, 128)
    got = call(case, q, weights, cu)
    assert got.dtype == np.float32 and got.shape == (62, case.tables.shape[1] * 16)
    assert relative_error(got, oracle(case, q, weights, cu)) < 1e-6
    assert np.isneginf(got[-3:]).all()
    for byte in poisons(layout):
        assert got.tobytes() == call(case, q, weights, cu, byte).tobytes(), f"bytes {byte:#x} change the logits"


@pytest.mark.parametrize(
    ("lengths", "new", "page_size", "d"),
    [
        pytest.param([150], [135], 64, 32, id="one sequence in blocks of 64"),
        pytest.param([7] * 70 + [0, 3], [1] * 70 + [0, 2], 2, 20, id="blocks of one token in two groups"),
        pytest.param([2200, 30], [5, 3], 1, 4, id="more than a chunk of pages of one token"),
        pytest.param([1500, 30], [2, 1], 1024, 160, id="pages as large as a chunk and two scales a key"),
    ],
)
def test_shapes_of_batches(lengths, new, page_size, d, rng):
    case = batch(rng, "index_e4m3fn_pow2", lengths, page_size=page_size, head_dim=d, spare_pages=1)
    cu = sums(new)
    q, weights = asked(rng, int(cu[-1]), d)
    got = call(case, q, weights, cu)
    assert relative_error(got, oracle(case, q, weights, cu)) < 1e-6
    assert got.tobytes() == call(case, q, weights, cu, 0xFF).tobytes()


def test_one_token_and_one_column(rng):
    case = batch(rng, "index_float32", [1], head_dim=8, page_size=1, spare_columns=0)
    q, weights = asked(rng, 1, 8, heads=1)
    got = call(case, q, weights, sums([1]), 0xFF)
    assert got.shape == (1, 1) and relative_error(got, oracle(case, q, weights, sums([1]))) < 1e-6


# ---- visibility ------------------------------------------------------------------------------------------------------


def test_bad_pages_within_need_are_invisible(rng):
    case = batch(rng, "index_e4m3fn_pow2", LENGTHS, head_dim=128)
    tables = case.tables.copy()
    tables[4, :4] = -1, 0, case.config.num_pages, 2**31 - 1
    case = dataclasses.replace(case, tables=tables)
    cu = sums(NEW)
    q, weights = asked(rng, 62, 128)
    got = call(case, q, weights, cu, 0xFF)
    assert relative_error(got, oracle(case, q, weights, cu)) < 1e-6
    assert np.isneginf(got[cu[4] : cu[5], :64]).all() and np.isfinite(got[cu[5] - 1, 64:70]).all()


def test_nan_within_sight_reaches_its_logits_and_no_other(rng):
    for layout in ("index_e4m3fn_pow2", "index_float32"):
        case = batch(rng, layout, LENGTHS, head_dim=128)
        index = case.config.index_layout
        assert index is not None and case.pages is not None
        cu = sums(NEW)
        q, weights = asked(rng, 62, 128)
        clean = call(case, q, weights, cu)
        pages = case.pages.copy()
        page, offset = divmod(int(case.visible_slots(3)[17]), 16)
        pages[page, reference.index_ranges(offset, 16, 128, index.dialect)[0]] = 0xFF
        got = call(dataclasses.replace(case, pages=pages), q, weights, cu).copy()
        sees = slice(int(cu[3]) + 17, int(cu[4]))
        assert np.isnan(got[sees, 17]).all()
        got[sees, 17] = clean[sees, 17]
        assert got.tobytes() == clean.tobytes()


@pytest.mark.parametrize("cu", [[5, 4, 3, 2, 1, 0, -1], [0, 2**31 - 1, -(2**31), 7, 7, 90, 1], [2**31 - 1] * 7])
def test_any_cu_q_lens_and_lengths_are_safe(cu, rng):
    case = batch(rng, "index_e4m3fn_pow2", LENGTHS, head_dim=128)
    q, weights = asked(rng, 62, 128)
    for lengths in (case.lengths, np.array([-5, 2**31 - 1, -(2**31), 10**9, 70, 1], np.int32)):
        got = np.asarray(logits_of(q, weights, case.cache(), LAYER, case.tables, lengths, np.array(cu, np.int32)))
        assert not np.isnan(got).any() and not np.isposinf(got).any()


# ---- types, layers, batches ------------------------------------------------------------------------------------------


def test_narrow_queries(rng):
    case = batch(rng, "index_e4m3fn_pow2", [20, 9], head_dim=32)
    cu = sums([3, 2])
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        q, weights = asked(rng, 5, 32, dtype=dtype)
        assert relative_error(call(case, q, weights, cu), oracle(case, q, weights, cu)) < 1e-6


def test_traced_layers_in_a_scan(rng):
    case = batch(rng, "index_e4m3fn_pow2", [20, 9], head_dim=32)
    cu = sums([3, 2])
    q, weights = asked(rng, 5, 32)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> Any:
        return cache, mla.indexer_logits(q, weights, cache, layer, case.tables, case.lengths, cu)

    _, got = jax.jit(lambda cache, layers: jax.lax.scan(step, cache, layers))(case.cache(0xFF), np.array([LAYER, 2, -1]))
    assert relative_error(got[0], oracle(case, q, weights, cu)) < 1e-6
    assert np.isneginf(np.asarray(got[1:])).all()


def test_layers_are_index_layers():
    cache = mla.init_cache(config("index_float32", head_dim=8, num_layers=3, num_index_layers=1))
    arguments = np.zeros((1, 2, 8), np.float32), np.zeros((1, 2), np.float32), cache
    rest = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="layer 1 is out of range, the cache has 1 layers of this kind"):
        mla.indexer_logits(*arguments, 1, *rest)


def test_f23_nothing_to_do():
    cache = mla.init_cache(config("index_float32", head_dim=8))
    for T, S, M in ((0, 2, 4), (3, 0, 4), (3, 2, 0)):
        q, weights = np.zeros((T, 2, 8), np.float32), np.zeros((T, 2), np.float32)
        rest = np.zeros((S, M), np.int32), np.full(S, 9, np.int32), np.zeros(S + 1, np.int32)
        got = mla.indexer_logits(q, weights, cache, 0, *rest)
        assert got.shape == (T, M * 16) and np.isneginf(got).all()


def costs(num_pages: int) -> tuple[tuple[Any, ...], int, int]:
    """What a call costs as lowered and as compiled; the size of the pool; the size of the largest intermediate."""
    cache = jax.eval_shape(lambda: mla.init_cache(config("index_e4m3fn_pow2", R=128, P=16, head_dim=128, num_pages=num_pages)))
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((9, 3, 128), np.float32), ((9, 3), np.float32))]
    rest = [jax.ShapeDtypeStruct(s, np.int32) for s in ((), (2, 8), (2,), (3,))]
    assert cache.index is not None
    cost, largest = call_cost(mla.indexer_logits, *shapes, cache, *rest)
    return cost, cache.index.size, largest


def test_f22_cost_does_not_grow_with_the_pool():
    (small, pool, largest), (large, large_pool, large_largest) = costs(512), costs(8192)
    assert small == large
    assert large_pool == 16 * pool
    assert largest == large_largest < pool


def test_vmap_over_a_cache_is_refused():
    cache = mla.init_cache(config("index_float32", head_dim=8))
    caches = jax.tree.map(lambda pool: jnp.stack([pool, pool]), cache)
    q, weights = np.zeros((1, 2, 8), np.float32), np.zeros((1, 2), np.float32)
    rest = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32)
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda cache: mla.indexer_logits(q, weights, cache, 0, *rest))(caches)


def test_errors_name_what_was_given():
    right: dict[str, Any] = {
        "q_index": np.zeros((7, 2, 8), np.float32),
        "head_weights": np.zeros((7, 2), np.float32),
        "cache": mla.init_cache(config("index_float32", head_dim=8)),
        "layer": 0,
        "block_tables": np.zeros((2, 3), np.int32),
        "lengths": np.zeros(2, np.int32),
        "cu_q_lens": np.zeros(3, np.int32),
    }
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q_index": np.zeros((7, 2, 9), np.float32)}, ValueError, r"q_index of shape \[T=7, h=2, 8\]"),
        ({"head_weights": np.zeros((7, 3), np.float32)}, ValueError, r"head_weights of shape \[T=7, h=2\]"),
        ({"head_weights": np.zeros((7, 2), np.int32)}, TypeError, "head_weights"),
        ({"cu_q_lens": np.zeros(2, np.int32)}, ValueError, "cu_q_lens"),
        ({"cache": mla.init_cache(config("index_float32"))}, ValueError, "the cache has no index keys"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "indexer_logits: there is no mosaic_gpu implementation"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.indexer_logits(**{**right, **change})


# ---- the whole way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["raw_e4m3fnuz", pytest.param("packed_pow2", marks=pytest.mark.slow)])
def test_from_logits_to_sparse_attention(layout, rng):
    case = batch(rng, layout, LENGTHS, head_dim=128)
    cu = sums(NEW)
    T, k = 62, 8
    q, weights = asked(rng, T, 128)
    queries_ = queries(rng, T, 5)

    @jax.jit
    def way(cache: mla.PagedMLACache) -> Any:
        logits = mla.indexer_logits(q, weights, cache, LAYER, case.tables, case.lengths, cu)
        tables, visible = mla.expand_rows(case.tables, case.lengths, cu, T)
        positions = mla.select_topk(logits, visible, k)
        slots = mla.positions_to_slots(positions, tables, 16, case.config.num_pages)
        return logits, positions, slots, mla.sparse_mla(*queries_, cache, LAYER, slots)

    logits, positions, slots, got = way(case.cache(0xFF))
    assert relative_error(logits, oracle(case, q, weights, cu)) < 1e-6
    tables, visible = reference.expand_rows(case.tables, case.lengths, cu, T)
    np.testing.assert_array_equal(positions, reference.select_topk(np.asarray(logits), visible, k))
    np.testing.assert_array_equal(slots, reference.positions_to_slots(positions, tables, 16, case.config.num_pages))
    q_latent, q_rope = (np.asarray(part) for part in queries_)
    check(got, reference.sparse(q_latent, q_rope, *case.values(), slots, None, case.config.geometry.softmax_scale))


def test_a_step_that_writes_and_reads_keeps_its_cache_in_place(rng):
    # Loops that read a pool must not make the scan over layers copy what it carries.
    T, L = 4, 3
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16, num_layers=L, num_pages=512, page_size=64, head_dim=128))
    q_latent, q_rope = queries(rng, T, 5)
    q, weights = asked(rng, T, 128)
    c_kv, k_rope, k = (rng.standard_normal((T, width)).astype(np.float32) for width in (128, 16, 128))
    slots, tables, lengths = np.zeros(T, np.int32), np.ones((T, 3), np.int32), np.ones(T, np.int32)
    cu = np.arange(T + 1, dtype=np.int32)

    def layer(cache: mla.PagedMLACache, index: jax.Array) -> Any:
        cache = mla.write_index_k(mla.write_kv(cache, index, slots, c_kv, k_rope), index, slots, k)
        dense = mla.mla_decode(q_latent[:, None], q_rope[:, None], cache, index, tables, lengths)[0][:, 0]
        dense += mla.mla_prefill(q_latent, q_rope, cache, index, tables, lengths, cu)[0]
        positions = mla.select_topk(mla.indexer_logits(q, weights, cache, index, tables, lengths, cu), lengths, 8)
        chosen = mla.positions_to_slots(positions, tables, 64)
        return cache, dense + mla.sparse_mla(q_latent, q_rope, cache, index, chosen)[0]

    mla.assert_in_place(
        lambda cache: jax.lax.scan(layer, cache, jnp.arange(L, dtype=jnp.int32)), cache, donate_argnums=0, max_temp_bytes=2**23
    )
