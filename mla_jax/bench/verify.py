"""On-device checks: the kernels against the XLA implementation bit for bit, and writes into pools of many GiB."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import rows
from mla_jax.bench.cases import LAYOUTS, LayoutCase
from mla_jax.cache import PagedMLACache, init_cache
from mla_jax.config import CacheConfig, pages_that_fit
from mla_jax.geometry import GEOMETRIES
from mla_jax.layout import WritePath
from mla_jax.reads import raw_rows
from mla_jax.writes import write_index_k, write_kv

POOL_GIB = (1.9, 2.2, 3.9, 4.2, 8.0)
_POISON = 0xAA


def poisoned(config: CacheConfig) -> PagedMLACache:
    """A cache in which every byte is 0xAA, so that an unwritten byte shows."""

    abstract = jax.eval_shape(lambda: init_cache(config))
    return jax.tree.map(lambda pool: jnp.full(pool.shape, _poison(pool.dtype)), abstract)


def _poison(dtype: Any) -> np.ndarray:
    """A word of 0xAA bytes."""
    return np.asarray(int.from_bytes(bytes([_POISON] * dtype.itemsize), "little"), dtype)


def adversarial(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers over 24 binades with NaN of both signs, infinities, subnormals, zeros of both signs and whole zero groups."""
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, size=shape))
    for value, share in ((np.nan, 0.01), (-np.nan, 0.01), (np.inf, 0.01), (-np.inf, 0.01), (-0.0, 0.02), (3e-40, 0.02)):
        x = np.where(rng.random(shape) < share, value, x)
    x[rng.random(shape[0]) < 0.05] = 0.0
    return jnp.asarray(x.astype(np.float32).astype(dtype))  # cast by numpy: a device may drop the signs of NaN


def _as_bytes(pool: Any) -> np.ndarray:
    return np.asarray(pool).view(np.uint8)


def _written(
    config: CacheConfig, slots: jax.Array, c_kv: jax.Array, k_rope: jax.Array, k: jax.Array, implementation: str
) -> PagedMLACache:
    def write(cache: PagedMLACache) -> PagedMLACache:
        cache = write_kv(cache, 1, slots, c_kv, k_rope, implementation=implementation)
        return write_index_k(cache, 1, slots, k, implementation=implementation)

    return jax.jit(write, donate_argnums=0)(poisoned(config))


def equality(tokens: int = 4001, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Pallas against XLA on the default device, whole pools compared, for every layout and input dtype.

    Rows of the fp32 scale mode may differ by one code where the device divides by an approximate reciprocal.
    """
    rng = np.random.default_rng(seed)
    for case in LAYOUTS:
        config = case.config(GEOMETRIES["glm-5"], num_layers=2, num_pages=128, page_size=64, use_nsa=True)
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            g = config.geometry
            assert g.indexer is not None
            c_kv, k_rope, k = (
                adversarial(rng, (tokens, w), dtype) for w in (g.kv_lora_rank, g.qk_rope_head_dim, g.indexer.head_dim)
            )
            slots = jnp.asarray(rng.permutation(np.arange(-100, config.capacity + 100))[:tokens].astype(np.int32))
            expected_pools, got_pools = (
                jax.tree.map(_as_bytes, _written(config, slots, c_kv, k_rope, k, implementation))
                for implementation in ("xla", "pallas")
            )
            worst, differing = 0, 0
            for expected, got in zip(jax.tree.leaves(expected_pools), jax.tree.leaves(got_pools), strict=True):
                different = expected != got
                differing += int(different.sum())
                if different.any():
                    worst = max(worst, int(np.abs(expected[different].astype(int) - got[different].astype(int)).max()))
            yield {
                "layout": case.id,
                "dtype": jnp.dtype(dtype).name,
                "bytes_compared": sum(pool.size for pool in jax.tree.leaves(expected_pools)),
                "bytes_differing": differing,
                "largest_difference": worst,
                "ok": differing == 0 or (config.scale_mode == "fp32" and config.write_path is WritePath.SCALED and worst <= 1),
            }


def large_pool(case: LayoutCase, gib: float, implementation: str = "pallas", op: str = "write_kv") -> dict[str, Any]:
    """Writes first, middle and last slots of a pool of ``gib`` GiB and counts what changed elsewhere.

    The expected words come from the row encoder on few rows, so the pool's size has no part in them.
    """
    with_index = op == "write_index_k"
    two = case.config(GEOMETRIES["glm-5"], num_layers=1, num_pages=2, page_size=64)
    if with_index:
        assert two.geometry.indexer is not None
        # Small rows, so that the index pool is the large one.
        geometry = dataclasses.replace(two.geometry, kv_lora_rank=128, qk_rope_head_dim=0)
        two = case.config(geometry, num_layers=1, num_pages=2, page_size=64, use_nsa=True)
        index = two.index_layout
        assert index is not None
        pages = int(gib * 2**30) // index.page_bytes
    else:
        pages = pages_that_fit(two, int(gib * 2**30))
    config = dataclasses.replace(two, num_pages=pages)
    rng = np.random.default_rng(pages)
    last = config.capacity - 1
    around = [1, 63, 64, last // 4, last // 2 - 1, last // 2, last // 2 + 1, 3 * (last // 4), last - 64, last - 1, last]
    slots = np.unique(np.concatenate([around, rng.integers(1, last, 53)])).astype(np.int32)
    g = config.geometry
    assert g.indexer is not None
    shapes = [(slots.size, w) for w in (g.kv_lora_rank, g.qk_rope_head_dim, g.indexer.head_dim)]
    c_kv, k_rope, k = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)

    def write(cache: PagedMLACache) -> PagedMLACache:
        if with_index:
            return write_index_k(cache, 0, slots, k, implementation=implementation)
        return write_kv(cache, 0, slots, c_kv, k_rope, implementation=implementation)

    cache = jax.jit(write, donate_argnums=0)(poisoned(config))
    pool = cache.index if with_index else cache.kv
    word = _poison(pool.dtype)
    # Compared as words and reduced page by page, so that no second pool exists.
    changed = jax.jit(lambda p: jnp.sum(p != word, axis=tuple(range(2, p.ndim)), dtype=jnp.int32))(pool)
    changed_words = int(np.asarray(changed).astype(np.int64).sum())
    if with_index:
        assert config.index_layout is not None
        words = _index_words(config, k)
        page, offset = slots // 64, slots % 64
        if config.index_layout.dialect is None:
            got = np.asarray(pool[0, page, offset])
        else:
            columns = np.concatenate([np.asarray(c) for c in rows.index_columns(config.index_layout, jnp.asarray(offset))], axis=1)
            got = np.asarray(pool[0, page[:, None], columns])
    else:
        words = np.asarray(jax.jit(lambda: rows.encode_rows(config.layout, c_kv, k_rope))())
        got = np.asarray(raw_rows(cache, 0, slots)).view(words.dtype)
    return {
        "layout": case.id,
        "op": op,
        "implementation": implementation,
        "pool_gib": gib,
        "pool_bytes": pool.size * pool.dtype.itemsize,
        "rows": int(slots.size),
        "rows_right": int((got == words).all(axis=1).sum()),
        "words_changed_elsewhere": changed_words - int((words != word).sum()),
    }


def _index_words(config: CacheConfig, k: jax.Array) -> np.ndarray:
    layout = config.index_layout
    assert layout is not None
    keys, scales = jax.jit(lambda: rows.encode_index_keys(layout, k))()
    return np.concatenate([np.asarray(keys), np.asarray(scales)], axis=1)


def large_pools(gibibytes: tuple[float, ...] = POOL_GIB) -> Iterator[dict[str, Any]]:
    """Every layout, and index keys of each kind, at every size around the 2 and 4 GiB boundaries."""
    for gib in gibibytes:
        for case in LAYOUTS:
            yield large_pool(case, gib)
        for case in LAYOUTS:
            if case.id in ("plain_float32", "raw_e4m3fn", "raw_e4m3fnuz"):
                yield large_pool(case, gib, op="write_index_k")
