"""The write kernels on a GPU: bytes against XLA and the numpy oracle, pools of many GiB, donation. Run with ``pytest -m gpu``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from mla_jax import reference
from mla_jax.bench import verify, writes
from mla_jax.bench.cases import LAYOUTS, LayoutCase

pytestmark = pytest.mark.gpu

GLM5 = mla.GEOMETRIES["glm-5"]


def by_id(case: LayoutCase) -> str:
    return case.id


def test_every_kernel_writes_the_bytes_of_the_xla_implementation() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    wrong = [row for row in verify.equality(seed=seed) if not row["ok"]]
    assert not wrong, (seed, wrong)


@pytest.mark.parametrize("case", LAYOUTS, ids=by_id)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_rows_match_the_numpy_oracle_and_nothing_else_changes(case: LayoutCase, implementation: str) -> None:
    rng = np.random.default_rng()
    config = case.config(num_layers=3, num_pages=32, page_size=64)
    layout = config.layout
    c_kv, k_rope = (verify.adversarial(rng, (300, w), jnp.bfloat16) for w in (512, 64))
    slots = rng.permutation(np.arange(-50, config.capacity + 50))[:300].astype(np.int32)
    write = jax.jit(lambda c: mla.write_kv(c, 1, slots, c_kv, k_rope, implementation=implementation), donate_argnums=0)
    pool = np.asarray(write(verify.poisoned(config)).kv).view(np.uint8).reshape(3, 32, 64, layout.row_bytes)
    rows = reference.encode_rows(np.asarray(c_kv), np.asarray(k_rope), layout.name, layout.dialect, case.scale_mode)
    expected = np.full_like(pool, 0xAA)
    expected[1] = reference.write_rows(expected[1], slots, rows)
    difference = np.abs(pool.astype(int) - expected.astype(int))
    codes = difference[..., : layout.kv_lora_rank] if case.id == "packed_fp32" else difference[..., :0]
    exact = difference[..., layout.kv_lora_rank :] if case.id == "packed_fp32" else difference
    assert exact.max() == 0
    assert codes.size == 0 or codes.max() <= 1


@pytest.mark.parametrize("gib", verify.POOL_GIB)
@pytest.mark.parametrize("case", LAYOUTS, ids=by_id)
def test_large_pools_are_addressed_right(case: LayoutCase, gib: float) -> None:
    row = verify.large_pool(case, gib)
    assert row["rows_right"] == row["rows"] and row["words_changed_elsewhere"] == 0, row


@pytest.mark.parametrize("gib", verify.POOL_GIB)
@pytest.mark.parametrize("case", [c for c in LAYOUTS if c.id in ("plain_float32", "raw_e4m3fn")], ids=by_id)
def test_large_index_pools_are_addressed_right(case: LayoutCase, gib: float) -> None:
    row = verify.large_pool(case, gib, op="write_index_k")
    assert row["rows_right"] == row["rows"] and row["words_changed_elsewhere"] == 0, row


@pytest.mark.parametrize("case", LAYOUTS, ids=by_id)
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_writes_are_in_place(case: LayoutCase, implementation: str) -> None:
    config = case.config(num_layers=4, num_pages=1000, page_size=64, use_nsa=True)
    cache = jax.eval_shape(lambda: mla.init_cache(config))
    rows = writes.random_rows(config, 64, 0)

    def step(cache: mla.PagedMLACache, layer: jax.Array) -> mla.PagedMLACache:
        cache = mla.write_kv(cache, layer, rows.slots, rows.c_kv, rows.k_rope, implementation=implementation)
        return mla.write_index_k(cache, layer, rows.slots, rows.k, implementation=implementation)

    def layers(cache: mla.PagedMLACache) -> mla.PagedMLACache:
        return jax.lax.scan(lambda c, i: (step(c, i), None), cache, jnp.arange(4))[0]

    mla.assert_in_place(layers, cache, donate_argnums=0)
    with pytest.raises(AssertionError):
        mla.assert_in_place(layers, cache)


def test_a_scatter_through_a_reshape_is_caught() -> None:
    config = LAYOUTS[3].config(num_layers=4, num_pages=1000, page_size=64)
    rows = writes.random_rows(config, 64, 0)
    words = jnp.ones((64, config.layout.row_words), config.layout.word_dtype)

    def reshaped(cache: mla.PagedMLACache) -> mla.PagedMLACache:
        flat = cache.kv[1].reshape(-1, config.layout.row_words).at[rows.slots].set(words, unique_indices=True)
        return mla.PagedMLACache(kv=cache.kv.at[1].set(flat.reshape(cache.kv.shape[1:])), index=None, config=config)

    with pytest.raises(AssertionError, match="not in place"):
        mla.assert_in_place(reshaped, jax.eval_shape(lambda: mla.init_cache(config)), donate_argnums=0)
