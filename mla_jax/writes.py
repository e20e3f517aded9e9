"""Writing rows and index keys into a cache."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Num, Shaped

from mla_jax import checks, rows
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.devices import target_of
from mla_jax.dispatch import dispatch
from mla_jax.kernels.write_index import write_index
from mla_jax.kernels.write_rows import write_rows


def write_kv(
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    slots: Int32[ArrayIn, "T"],
    c_kv: Num[ArrayIn, "T R"],
    k_rope: Num[ArrayIn, "T P"],
    *,
    k_scale: float | Float[ArrayIn, ""] | None = None,
    implementation: str | None = None,
) -> PagedMLACache:
    """The cache with T rows written at ``slots`` of ``layer``. In place when the caller's jit donates the cache.

    A row with slot <= 0 or >= capacity is dropped, and so is every row of a traced layer out of range. Duplicate slots are the
    caller's error: the content of that row is then unspecified, nothing else changes.

    Args:
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar.
        slots: int32[T], page * page_size + offset. int64 needs jax_enable_x64.
        c_kv: [T, R] latents after their norm; float32, bfloat16 or float16.
        k_rope: [T, P] rotated keys, of a dtype of their own; [T, 0] in models without rope.
        k_scale: raw FP8 rows store x / k_scale; a float or float32 scalar. Other layouts take None or a static 1.0.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        The updated cache.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes, a static layer out of range, slots beyond int32 in an eager numpy array, a k_scale the
            layout has no place for, or an unknown implementation.
        NotImplementedError: if the named implementation cannot; an ExceptionGroup of all reasons if none can.

    The raw path stores what SGLang 0.5.23's fused FP8 writer does (with saturation), the packed path what its
    ``quantize_k_cache`` and FlashMLA's ``tests/quant.py`` do; each is one kernel here.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=2, num_pages=3, page_size=4, platform="cpu",
        ...     kv_cache_dtype="fp8_e4m3",
        ... )
        >>> write = jax.jit(mla.write_kv, donate_argnames="cache")  # donated: the pool is updated in place
        >>> cache = mla.init_cache(config)
        >>> pool = cache.kv.unsafe_buffer_pointer()
        >>> cache = write(cache, 1, jnp.array([4, 0]), jnp.ones((2, 512)), jnp.ones((2, 64)))  # slot 0 is dropped
        >>> cache.kv.unsafe_buffer_pointer() == pool
        True
        >>> jax.jit(mla.raw_rows)(cache, 1, jnp.array([4, 0]))[:, 0].tolist()  # 56 is the code of 1.0
        [56, 0]
    """
    check_cache("write_kv", cache)
    config = cache.config
    layout = config.layout
    shapes = {"slots": ("T",), "c_kv": ("T", layout.kv_lora_rank), "k_rope": ("T", layout.qk_rope_head_dim)}
    index = checks.layer_index("write_kv", layer, config.num_layers)
    places = checks.integers("write_kv", "slots", slots, 1)
    latent, rope = checks.floats("write_kv", shapes, c_kv=c_kv, k_rope=k_rope)
    checks.check_shapes("write_kv", shapes, slots=places, c_kv=latent, k_rope=rope)
    scale = checks.k_scale_array("write_kv", k_scale, layout)
    target = target_of(cache.kv)
    pool, index, places, latent, rope, scale = checks.refuse_vmap((cache.kv, index, places, latent, rope, scale))

    def xla() -> Array:
        return _scatter(pool, index, places, config.page_size, rows.encode_rows(layout, latent, rope, scale))

    def pallas() -> Array:
        return write_rows(pool, layout, index, places, latent, rope, scale, target)

    if places.shape[0] == 0:
        return dispatch("write_kv", implementation, target, {"xla": lambda: cache, "pallas": lambda: cache})
    kv = dispatch("write_kv", implementation, target, {"xla": xla, "pallas": pallas})
    return dataclasses.replace(cache, kv=kv)


def write_index_k(
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    slots: Int32[ArrayIn, "T"],
    k: Num[ArrayIn, "T d"],
    *,
    implementation: str | None = None,
) -> PagedMLACache:
    """The cache with T indexer keys written at ``slots`` of index layer ``layer``, which counts index layers alone.

    Slots, layers and duplicates follow the rules of :func:`write_kv`. No Hadamard transform is applied.

    Args:
        cache: a cache made with ``use_nsa=True``.
        layer: which index layer, an int or a traced int32 scalar.
        slots: int32[T], page * page_size + offset.
        k: [T, d] normalised and rotated keys; float32, bfloat16 or float16.
        implementation: "xla" or "pallas"; None: the best that can run on the device.

    Returns:
        The updated cache.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`write_kv`; ValueError for a cache without index keys.

    Page layout and scale rule: SGLang 0.5.23 ``set_index_k_scale_buffer``; DeepSeek-V3.2's indexer.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu", use_nsa=True
        ... )
        >>> write = jax.jit(mla.write_index_k, donate_argnames="cache")
        >>> cache = write(mla.init_cache(config), 0, jnp.array([4]), jnp.ones((1, 128)))
        >>> cache.index.shape, cache.index.dtype.name  # pages of 4 * (128 + 4) bytes
        ((1, 3, 132), 'uint32')
    """
    check_cache("write_index_k", cache)
    layout, num_layers = index_facts("write_index_k", cache)
    shapes = {"slots": ("T",), "k": ("T", layout.head_dim)}
    index = checks.layer_index("write_index_k", layer, num_layers)
    places = checks.integers("write_index_k", "slots", slots, 1)
    (keys,) = checks.floats("write_index_k", shapes, k=k)
    checks.check_shapes("write_index_k", shapes, slots=places, k=keys)
    target = target_of(cache.index)
    pool, index, places, keys = checks.refuse_vmap((cache.index, index, places, keys))

    def xla() -> Array:
        if layout.dialect is None:
            return _scatter(pool, index, places, layout.page_size, rows.encode_index_keys(layout, keys)[0])
        layers, pages, _ = _places(index, places, pool.shape[0], pool.shape[1], layout.page_size)
        columns = jnp.concatenate(rows.index_columns(layout, places & np.int32(layout.page_size - 1)), axis=1)
        words = jnp.concatenate(rows.encode_index_keys(layout, keys), axis=1)
        return pool.at[layers[:, None], pages[:, None], columns].set(words, mode="drop", unique_indices=True)

    def pallas() -> Array:
        return write_index(pool, layout, index, places, keys, target)

    if places.shape[0] == 0:
        return dispatch("write_index_k", implementation, target, {"xla": lambda: cache, "pallas": lambda: cache})
    return dataclasses.replace(cache, index=dispatch("write_index_k", implementation, target, {"xla": xla, "pallas": pallas}))


def index_facts(op: str, cache: PagedMLACache) -> tuple[Any, int]:
    """The cache's IndexLayout and number of index layers.

    Raises:
        ValueError: for a cache without index keys.
    """
    layout, layers = cache.config.index_layout, cache.config.num_index_layers
    if layout is None or layers is None:
        raise ValueError(f"{op}: the cache has no index keys; make it with use_nsa=True")
    return layout, layers


def _places(
    layer: Int32[Array, "1"], slots: Int32[Array, "T"], num_layers: int, num_pages: int, page_size: int
) -> tuple[Int32[Array, "T"], Int32[Array, "T"], Int32[Array, "T"]]:
    """Layer, page and offset of each row. Dropped rows get a place outside the pool, each its own, so that indices stay unique."""
    valid = (slots > 0) & (slots < num_pages * page_size) & (layer >= 0) & (layer < num_layers)
    pages = jnp.where(valid, slots >> np.int32(page_size.bit_length() - 1), num_pages)
    offsets = jnp.where(valid, slots & np.int32(page_size - 1), jnp.arange(slots.shape[0], dtype=jnp.int32))
    return jnp.where(valid, layer, num_layers), pages, offsets


def _scatter(
    pool: Shaped[Array, "layers pages page words"],
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T"],
    page_size: int,
    words: Shaped[Array, "T words"],
) -> Shaped[Array, "layers pages page words"]:
    """XLA's scatter by (layer, page, offset): never through a reshaped pool, which XLA would copy."""
    layers, pages, offsets = _places(layer, slots, pool.shape[0], pool.shape[1], page_size)
    return pool.at[layers, pages, offsets].set(words, mode="drop", unique_indices=True)
