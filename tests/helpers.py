"""What several test files share: the caches under test, inputs that hurt, a walk over jaxprs, and byte comparisons."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mla_jax as mla
from mla_jax import reference
from mla_jax.bench import cases
from mla_jax.layout import CacheLayout

LAYOUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        case.id: {
            "kv_cache_dtype": case.kv_cache_dtype,
            "nsa_kv_cache_store_fp8": case.packed,
            "scale_mode": case.scale_mode,
            "platform": case.platform,
        }
        for case in cases.LAYOUTS
    }
)
"""Every latent layout by name, as arguments of CacheConfig: the list that the benchmarks use."""

INDEX_LAYOUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "index_float32": {"kv_cache_dtype": "float32"},
        "index_e4m3fn_pow2": {},
        "index_e4m3fn_fp32": {"scale_mode": "fp32"},
        "index_e4m3fnuz_pow2": {"platform": "gfx942"},
        "index_e4m3fnuz_fp32": {"platform": "gfx942", "scale_mode": "fp32"},
    }
)
"""Every layout of index keys; a config of these needs ``head_dim``."""

FP8 = {
    "e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    "e4m3fnuz": (np.dtype(ml_dtypes.float8_e4m3fnuz), 240.0),
    "e5m2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0),
}
"""Dialect -> (dtype of ml_dtypes, largest finite value)."""


def geometry(R: int = 512, P: int = 64, head_dim: int | None = None) -> mla.MLAGeometry:
    """A small model: what a cache depends on is free, the rest is fixed."""
    return mla.MLAGeometry(
        num_heads=4,
        q_lora_rank=None,
        kv_lora_rank=R,
        qk_nope_head_dim=128,
        qk_rope_head_dim=P,
        v_head_dim=128,
        softmax_scale=0.0721688,
        indexer=None if head_dim is None else mla.IndexerGeometry(num_heads=2, head_dim=head_dim, topk=8),
    )


def config(
    layout: str,
    *,
    R: int = 512,
    P: int = 64,
    head_dim: int | None = None,
    num_layers: int = 2,
    num_pages: int = 4,
    page_size: int = 16,
    **overrides: Any,
) -> mla.CacheConfig:
    """The config of a named layout, with an indexer if ``head_dim`` is given, for the CPU unless the layout says."""
    fields = {**LAYOUTS, **INDEX_LAYOUTS}[layout]
    return mla.CacheConfig(
        **{
            "geometry": geometry(R, P, head_dim),
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "platform": "cpu",
            "use_nsa": head_dim is not None,
            **fields,
            **overrides,
        }
    )


def filled(cache_config: mla.CacheConfig, byte: int = 0xAA) -> mla.PagedMLACache:
    """A cache whose pools hold ``byte`` everywhere, so that a byte left unwritten shows."""

    def fill(pool: Any) -> jax.Array:
        data = np.full(pool.size * pool.dtype.itemsize, byte, np.uint8)
        return jnp.asarray(data.view(pool.dtype).reshape(pool.shape))

    return jax.tree.map(fill, jax.eval_shape(lambda: mla.init_cache(cache_config)))


def pool_bytes(pool: Any) -> np.ndarray:
    """uint8 [layers, pages, bytes a page] of a pool."""
    array = np.asarray(pool)
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape[:2], -1)


def row_bytes(cache: mla.PagedMLACache) -> np.ndarray:
    """uint8 [layers, capacity, W]: the latent rows, taken from the pool without the library's readers."""
    return pool_bytes(cache.kv).reshape(cache.config.num_layers, cache.config.capacity, -1)


def hard_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Numbers over the whole range of ``dtype``, most of order 1, some tiny, huge, subnormal, -0, infinite or NaN."""
    x = rng.standard_normal(shape)
    x *= np.where(rng.random(shape) < 0.3, 2.0 ** rng.integers(-30, 15, shape), 1.0)
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40, 448.0, -464.0, 240.0, 3e38, -6e4, 2.0**-10]
    x = np.where(rng.random(shape) < 0.02, rng.choice(specials, shape), x)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(dtype)


def equal_nan(a: Any, b: Any) -> bool:
    """Same dtype, shape and numbers, NaN equal to NaN and -0 different from 0."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.all((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))))


def assert_same_choice(got: Any, want: Any) -> None:
    """A router's (ids, weights): the same experts with the same weights, in whatever order."""
    (ids, weights), (want_ids, want_weights) = ([np.asarray(a) for a in pair] for pair in (got, want))
    order, want_order = np.argsort(ids, -1), np.argsort(want_ids, -1)
    np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), np.take_along_axis(want_ids, want_order, -1))
    np.testing.assert_allclose(np.take_along_axis(weights, order, -1), np.take_along_axis(want_weights, want_order, -1), atol=1e-5)


def temporaries(fn: Callable[..., Any], *args: Any, donate_argnums: Any = ()) -> int:
    """Bytes of temporaries that XLA allocates for ``fn``."""
    memory: Any = jax.jit(fn, donate_argnums=donate_argnums).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those within it, but not of a Pallas kernel's own body."""

    def is_jaxpr(value: Any) -> bool:
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for value in filter(is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)):
                yield from equations(value)


# ---- bytes in and out of a cache, with the oracle alone ----------------------------------------------------------------


def with_rows(cache: mla.PagedMLACache, rows: np.ndarray) -> mla.PagedMLACache:
    """The cache with its latent rows replaced by uint8 [layers, capacity, W]."""
    pool = np.ascontiguousarray(rows).view(cache.kv.dtype).reshape(cache.kv.shape)
    return dataclasses.replace(cache, kv=jnp.asarray(pool))


def with_pages(cache: mla.PagedMLACache, pages: np.ndarray) -> mla.PagedMLACache:
    """The cache with its index pages replaced by uint8 [index layers, pages, bytes a page]."""
    assert cache.index is not None
    pool = np.ascontiguousarray(pages).view(cache.index.dtype).reshape(cache.index.shape)
    return dataclasses.replace(cache, index=jnp.asarray(pool))


def oracle_rows(layout: CacheLayout, c_kv: np.ndarray, k_rope: np.ndarray, k_scale: float | None = None) -> np.ndarray:
    """The bytes that numpy gives rows of ``layout``."""
    return reference.encode_rows(c_kv, k_rope, layout.name, layout.dialect, layout.scale_mode, k_scale)


def oracle_values(layout: CacheLayout, rows: np.ndarray, k_scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The float32 latents and ropes that numpy finds in rows of ``layout``."""
    R, P = layout.kv_lora_rank, layout.qk_rope_head_dim
    return reference.decode_rows(rows, R, P, layout.name, layout.dialect, k_scale)


def steps(codes: np.ndarray) -> np.ndarray:
    """FP8 codes as integers in the order of their values: neighbours differ by one, +0 and -0 coincide."""
    magnitude = (codes & 0x7F).astype(np.int32)
    return np.where(codes & 0x80, -magnitude, magnitude)


def assert_same_bytes(got: np.ndarray, want: np.ndarray, codes: slice, *, within_one: bool = False) -> None:
    """Equal bytes along the last axis; ``within_one`` lets those at ``codes`` be a neighbouring FP8 code (fp32 scales)."""
    assert got.shape == want.shape and got.dtype == want.dtype == np.uint8
    same = got == want
    if within_one:
        near = np.abs(steps(got[..., codes]) - steps(want[..., codes])) <= 1
        same[..., codes] |= near & ((got[..., codes] & 0x7F) != 0x7F)
    bad = np.argwhere(~same)
    assert bad.size == 0, f"{len(bad)} bytes differ, first at {tuple(bad[0])}: {got[tuple(bad[0])]:#x} not {want[tuple(bad[0])]:#x}"


def near_ties(dialect: Any, k_scale: float) -> tuple[np.ndarray, np.float32]:
    """float32 whose quotients by ``k_scale`` lie within three float32 of a tie of FP8, where one ulp decides the code."""
    values = np.abs(np.arange(256, dtype=np.uint8).view(FP8[dialect][0]).astype(np.float32))
    values = np.unique(values[np.isfinite(values)])
    k = np.float32(k_scale)
    bits = ((values[1:] + values[:-1]) / 2 * k).astype(np.float32).view(np.uint32).astype(np.int64)
    return np.concatenate([(bits + n).astype(np.uint32).view(np.float32) for n in range(-3, 4)]), k
