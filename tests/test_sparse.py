"""sparse_mla: each token attends to the slots listed for it, and to nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import LAYER, Batch, batch, call_cost, check, poisons, queries, relative_error, same_bits
from checkpoints import quick_programs
from helpers import LAYOUTS, config, equations, oracle_values, row_bytes
from mla_jax import reference

T, K, H = 6, 12, 5
UGLY = (-1, 0, -7, -(2**31), 2**31 - 1)

sparse = jax.jit(mla.sparse_mla, static_argnames=("softmax_scale", "out_dtype", "implementation"))
decode = jax.jit(mla.mla_decode)
write = jax.jit(mla.write_kv)


@pytest.fixture(scope="module", autouse=True)
def quick():
    # What decode shares with these is compiled as usual in its own tests.
    with quick_programs():
        yield


def listed(rng: np.random.Generator, case: Batch, *, num_tokens: int = T, lanes: int = K) -> np.ndarray:
    """Slots of stored tokens, some twice, with a third of the lanes no slot at all; the first token has none."""
    slots = rng.choice(np.flatnonzero(case.used), (num_tokens, lanes))
    slots = np.where(rng.random(slots.shape) < 0.3, rng.choice([*UGLY, case.config.capacity], slots.shape), slots)
    slots[0] = -1
    return slots.astype(np.int32)


def oracle(case: Batch, q: tuple[Any, Any], slots: Any, lengths: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    q_latent, q_rope = (np.asarray(part, np.float32) for part in q)
    return reference.sparse(q_latent, q_rope, *case.values(), slots, lengths, case.config.geometry.softmax_scale, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_of_every_layout(layout, rng):
    case = batch(rng, layout, [40, 7])
    q = queries(rng, T, H)
    slots = listed(rng, case)
    got = sparse(*q, case.cache(), LAYER, slots)
    check(got, oracle(case, q, slots))
    assert not np.asarray(got[0])[0].any() and np.isneginf(np.asarray(got[1])[0]).all()
    for byte in poisons(layout):
        assert same_bits(got, sparse(*q, case.cache(byte), LAYER, slots)), f"bytes {byte:#x} at slots not listed change the result"


@pytest.mark.parametrize(("num_tokens", "lanes", "heads"), [(3, 1300, 1), (70, 513, 3)])
def test_many_lanes_and_many_tokens(num_tokens, lanes, heads, rng):
    # Three chunks of 512 lanes; more tokens than one group holds.
    case = batch(rng, "raw_e4m3fn", [700, 600], page_size=64, R=256, P=0)
    q = queries(rng, num_tokens, heads, R=256, P=0)
    slots = listed(rng, case, num_tokens=num_tokens, lanes=lanes)
    slots[1, 40:] = -1
    got = sparse(*q, case.cache(), LAYER, slots)
    check(got, oracle(case, q, slots))
    assert same_bits(got, sparse(*q, case.cache(0xFF), LAYER, slots))


def test_lanes_beyond_topk_lengths_may_hold_anything(rng):
    case = batch(rng, "plain_float32", [40, 7])
    q = queries(rng, T, H)
    slots = listed(rng, case)
    lengths = np.array([4, 0, 5, 12, 13, -(2**31)], np.int32)
    got = sparse(*q, case.cache(), LAYER, slots, lengths)
    check(got, oracle(case, q, slots, lengths))
    beyond = np.arange(K) >= lengths[:, None]
    unused = np.flatnonzero(~case.used)
    for junk in (unused[unused > 0][0], case.visible_slots(0)[0], -1, 2**31 - 1):
        changed = np.where(beyond, junk, slots).astype(np.int32)
        assert same_bits(got, sparse(*q, case.cache(0xFF), LAYER, changed, lengths))


def test_a_slot_listed_twice_counts_twice(rng):
    case = batch(rng, "plain_float32", [40, 7])
    q = queries(rng, T, H)
    slots = np.full((T, K), -1, np.int32)
    slots[:, 2] = slots[:, 9] = case.visible_slots(0)[3]
    slots[:, 5] = case.visible_slots(0)[4]
    check(sparse(*q, case.cache(), LAYER, slots), oracle(case, q, slots))


def test_the_order_of_slots_does_not_matter(rng):
    case = batch(rng, "plain_float32", [40, 7])
    q = queries(rng, T, H)
    slots = listed(rng, case)
    for got, want in zip(*(sparse(*q, case.cache(), LAYER, s) for s in (slots, slots[:, ::-1].copy())), strict=True):
        assert relative_error(got, np.asarray(want, np.float64)) < 1e-6


def test_every_slot_is_dense_attention(rng):
    case = batch(rng, "raw_e4m3fn", [40, 7])
    q = queries(rng, 2, 1, H)
    slots = np.full((2, 40), -1, np.int32)
    for s in range(2):
        slots[s, : case.lengths[s]] = case.visible_slots(s)
    dense = decode(*q, case.cache(0xFF), LAYER, case.tables, case.lengths)
    got = sparse(*(part[:, 0] for part in q), case.cache(0xFF), LAYER, slots)
    for a, b in zip(got, dense, strict=True):
        assert relative_error(a, np.asarray(b, np.float64)[:, 0]) < 1e-6


@pytest.mark.parametrize("layout", ["raw_e4m3fnuz", pytest.param("plain_float32", marks=pytest.mark.slow)])
def test_f5_the_reserved_slot_poisons_nobody(layout, rng):
    empty = mla.init_cache(config(layout, R=128, P=16))
    c_kv, k_rope = rng.standard_normal((3, 128)).astype(np.float32), rng.standard_normal((3, 16)).astype(np.float32)
    c_kv[1:], k_rope[1:] = np.nan, np.nan
    cache = write(empty, 0, np.array([5, 0, 0], np.int32), c_kv, k_rope)
    assert not row_bytes(cache)[0, 0].any()
    q = queries(rng, 1, H)
    out, lse = sparse(*q, cache, 0, np.array([[5, -1, -1, -1]], np.int32))
    latent, _ = oracle_values(empty.config.layout, row_bytes(cache)[0, 5:6])
    np.testing.assert_allclose(out, np.broadcast_to(latent[:, None], (1, H, 128)), rtol=1e-6)
    assert np.isfinite(lse).all()


def test_f7_unfilled_lanes_are_no_token(rng):
    case = batch(rng, "raw_e4m3fn", [3])
    q = queries(rng, 1, H)
    three = case.visible_slots(0)
    slots = np.full((1, 8), -1, np.int32)
    slots[0, [0, 4, 6]] = three[[2, 0, 1]]
    q_latent, q_rope = (np.asarray(part)[:, None] for part in q)
    scale = case.config.geometry.softmax_scale
    want = reference.decode(q_latent, q_rope, *case.values(), case.tables, case.lengths, scale)
    check(sparse(*q, case.cache(0xFF), LAYER, slots), (want[0][:, 0], want[1][:, 0]))


def test_nan_in_a_listed_row_reaches_its_token_and_no_other(rng):
    case = batch(rng, "plain_float32", [40, 7])
    q = queries(rng, T, H)
    bad = case.visible_slots(0)[8]
    slots = listed(rng, case)
    slots = np.where(slots == bad, case.visible_slots(0)[9], slots)
    clean = [np.asarray(part) for part in sparse(*q, case.cache(), LAYER, slots)]
    slots[3, 7] = bad
    rows = case.rows.copy()
    rows[bad] = 0xFF
    out, lse = (np.array(part) for part in sparse(*q, dataclasses.replace(case, rows=rows).cache(), LAYER, slots))
    assert np.isnan(out[3]).all() and np.isnan(lse[3]).all()
    out[3], lse[3] = clean[0][3], clean[1][3]
    assert same_bits((out, lse), clean)


def test_slots_of_page_zero_are_slots_like_any_other(rng):
    # Slot 0 alone is reserved; an allocator never hands out the rest of its page, but a caller may use it.
    case = batch(rng, "plain_float32", [40, 7])
    used = case.used.copy()
    used[1:16] = True
    case = dataclasses.replace(case, used=used)
    q = queries(rng, T, H)
    slots = rng.integers(-1, 16, (T, K)).astype(np.int32)
    check(sparse(*q, case.cache(0xFF), LAYER, slots), oracle(case, q, slots))


def test_options(rng):
    case = batch(rng, "raw_e4m3fn", [40, 7])
    q = queries(rng, T, H, dtype=jnp.bfloat16)
    slots = listed(rng, case)
    sinks = np.array([0.5, -np.inf, np.inf, 3.0, -2.0], np.float32)
    got = sparse(*q, case.cache(0xFF), LAYER, slots, sinks=sinks, k_scale=np.float32(0.3), softmax_scale=0.5, out_dtype="float32")
    q_latent, q_rope = (np.asarray(part, np.float32) for part in q)
    check(got, reference.sparse(q_latent, q_rope, *case.values(), slots, None, 0.5, 0.3, sinks))


def test_traced_layers_in_a_scan(rng):
    case = batch(rng, "raw_e4m3fn", [40, 7])
    q = queries(rng, T, H)
    slots = listed(rng, case)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> Any:
        return cache, mla.sparse_mla(*q, cache, layer, slots)

    _, (out, lse) = jax.jit(lambda cache, layers: jax.lax.scan(step, cache, layers))(case.cache(0xFF), np.array([LAYER, 2, -1]))
    check((out[0], lse[0]), oracle(case, q, slots))
    assert not np.asarray(out[1:]).any() and np.isneginf(np.asarray(lse[1:])).all()


def test_f23_nothing_to_do():
    cache = mla.init_cache(config("raw_e4m3fn", R=128, P=16))
    for tokens, lanes in ((0, 8), (3, 0), (0, 0)):
        q = np.zeros((tokens, H, 128), np.float32), np.zeros((tokens, H, 16), np.float32)
        out, lse = mla.sparse_mla(*q, cache, 0, np.zeros((tokens, lanes), np.int32))
        assert out.shape == (tokens, H, 128) and lse.shape == (tokens, H)
        assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


def costs(num_pages: int) -> tuple[tuple[Any, ...], int, int]:
    """What a call costs as lowered and as compiled; the size of the pool; the size of the largest intermediate."""
    cache = jax.eval_shape(lambda: mla.init_cache(config("raw_e4m3fn", R=128, P=16, num_pages=num_pages)))
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((T, H, 128), np.float32), ((T, H, 16), np.float32))]
    rest = [jax.ShapeDtypeStruct(s, np.int32) for s in ((), (T, K))]
    cost, largest = call_cost(mla.sparse_mla, *shapes, cache, *rest)
    return cost, cache.kv.size, largest


def test_f22_cost_does_not_grow_with_the_pool():
    (small, pool, largest), (large, large_pool, large_largest) = costs(512), costs(8192)
    assert small == large
    assert large_pool == 16 * pool
    assert largest == large_largest < pool


def test_gathered_rows_stay_in_bounds():
    # 4,000 tokens of 2,048 slots would be 19 GB of float32 rows.
    cache = jax.eval_shape(lambda: mla.init_cache(config("packed_pow2", num_pages=64, page_size=64)))
    q = [jax.ShapeDtypeStruct((4000, 16, width), jnp.bfloat16) for width in (512, 64)]
    jaxpr = jax.make_jaxpr(mla.sparse_mla)(*q, cache, 0, jax.ShapeDtypeStruct((4000, 2048), np.int32))
    given = 4000 * 16 * 512
    assert max(v.aval.size for eqn in equations(jaxpr) for v in eqn.outvars) <= given + 16 * 16 * 512  # q itself, padded


def test_errors_name_what_was_given():
    right: dict[str, Any] = {
        "q_latent": np.zeros((T, H, 128), np.float32),
        "q_rope": np.zeros((T, H, 16), np.float32),
        "cache": mla.init_cache(config("raw_e4m3fn", R=128, P=16)),
        "layer": 0,
        "topk_slots": np.zeros((T, K), np.int32),
    }
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"topk_slots": np.zeros(T, np.int32)}, ValueError, "topk_slots must have 2 axes"),
        ({"topk_slots": np.zeros((T, K), np.float32)}, TypeError, "topk_slots"),
        ({"topk_slots": np.zeros((T + 1, K), np.int32)}, ValueError, r"q_latent of shape \[7"),
        ({"topk_lengths": np.zeros(T + 1, np.int32)}, ValueError, r"topk_lengths of shape \[6\]"),
        ({"topk_lengths": np.zeros(T, np.float32)}, TypeError, "topk_lengths"),
        ({"q_latent": np.zeros((T, H, 64), np.float32)}, ValueError, "q_latent"),
        ({"layer": -1}, ValueError, "layer -1 is out of range"),
        ({"out_dtype": "int32"}, ValueError, "out_dtype"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "sparse_mla: there is no mosaic_gpu implementation"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            mla.sparse_mla(**{**right, **change})
