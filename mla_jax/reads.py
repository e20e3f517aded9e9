"""Reading rows and index keys back by slot."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from mla_jax import checks, rows
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.writes import index_facts


def read_kv(
    cache: PagedMLACache,
    layer: int | Int32[ArrayIn, ""],
    slots: Int32[ArrayIn, "T"],
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    k_scale: float | Float[ArrayIn, ""] | None = None,
) -> tuple[Float[Array, "T R"], Float[Array, "T P"]]:
    """Dequantised latent and rope of T rows.

    Gives what is stored for 0 <= slot < capacity, zeros elsewhere and for a traced layer out of range.

    Args:
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar.
        slots: int32[T].
        dtype: of the results.
        k_scale: raw FP8 rows are multiplied by it; the value they were written with.

    Returns:
        c_kv [T, R] and k_rope [T, P].

    Raises:
        ValueError, TypeError: as :func:`mla_jax.write_kv`.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4]), jnp.ones((1, 512)), jnp.ones((1, 64)))
        >>> c_kv, k_rope = jax.jit(mla.read_kv)(cache, 0, jnp.array([4, 5, 99]))  # written, zeros, no slot
        >>> c_kv.shape, k_rope.shape, c_kv[:, 0].tolist()
        ((3, 512), (3, 64), [1.0, 0.0, 0.0])
    """
    check_cache("read_kv", cache)
    result = checks.float_dtype("read_kv", "dtype", dtype, jnp.float32)
    scale = checks.k_scale_array("read_kv", k_scale, cache.config.layout)
    words, valid = _gather("read_kv", cache, layer, slots)
    parts = rows.decode_rows(cache.config.layout, words, scale)
    c_kv, k_rope = (jnp.where(valid[:, None], part, np.float32(0)).astype(result) for part in parts)
    return c_kv, k_rope


def raw_rows(cache: PagedMLACache, layer: int | Int32[ArrayIn, ""], slots: Int32[ArrayIn, "T"]) -> UInt8[Array, "T W"]:
    """The stored bytes of T rows; zeros for slots outside [0, capacity) and for a traced layer out of range.

    Args:
        cache: the cache.
        layer: which layer, an int or a traced int32 scalar.
        slots: int32[T].

    Returns:
        uint8 [T, W] with W = ``cache.config.layout.row_bytes``, fields as in ``cache.config.layout.byte_map``.

    Raises:
        ValueError, TypeError: as :func:`mla_jax.write_kv`.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4]), jnp.ones((1, 512)), jnp.ones((1, 64)))
        >>> row = jax.jit(mla.raw_rows)(cache, 0, jnp.array([4]))
        >>> row.shape, row.dtype.name, bytes(row[0, :4].tolist()).hex()  # 1.0 in bfloat16 is 0x3f80, little endian
        ((1, 1152), 'uint8', '803f803f')
    """
    check_cache("raw_rows", cache)
    words, valid = _gather("raw_rows", cache, layer, slots)
    return jnp.where(valid[:, None], rows.to_bytes(words), np.uint8(0))


def read_index_k(
    cache: PagedMLACache, layer: int | Int32[ArrayIn, ""], slots: Int32[ArrayIn, "T"], *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "T d"]:
    """Dequantised indexer keys of T slots of index layer ``layer``; zeros outside, as :func:`read_kv`.

    Args:
        cache: a cache made with ``use_nsa=True``.
        layer: which index layer, an int or a traced int32 scalar.
        slots: int32[T].
        dtype: of the result.

    Returns:
        [T, d].

    Raises:
        ValueError, TypeError: as :func:`mla_jax.write_kv`; ValueError for a cache without index keys.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu", use_nsa=True
        ... )
        >>> cache = jax.jit(mla.write_index_k)(mla.init_cache(config), 0, jnp.array([4]), jnp.ones((1, 128)))
        >>> keys = jax.jit(mla.read_index_k)(cache, 0, jnp.array([4, 5]))
        >>> keys.shape, keys[:, 0].tolist()
        ((2, 128), [1.0, 0.0])
    """
    check_cache("read_index_k", cache)
    result = checks.float_dtype("read_index_k", "dtype", dtype, jnp.float32)
    layout, num_layers = index_facts("read_index_k", cache)
    index = checks.layer_index("read_index_k", layer, num_layers)
    places = checks.integers("read_index_k", "slots", slots, 1)
    pool = checks.refuse_vmap(cache.index)
    valid, page, offset = _safe_places(places, index, num_layers, cache.config.capacity, layout.page_size)
    layer_of = jnp.clip(index, 0, num_layers - 1)
    if layout.dialect is None:
        keys = rows.decode_index_pages(layout, pool[layer_of, page, offset])
    else:
        key_columns, scale_columns = rows.index_columns(layout, offset)
        columns = jnp.concatenate([key_columns, scale_columns], axis=1)
        token = pool[layer_of[:, None], page[:, None], columns]
        # A token's keys followed by its scales are a page of one token.
        one = rows.IndexLayout(head_dim=layout.head_dim, page_size=1, dialect=layout.dialect, scale_mode=layout.scale_mode)
        keys = rows.decode_index_pages(one, token)[:, 0]
    return jnp.where(valid[:, None], keys, np.float32(0)).astype(result)


def _safe_places(
    slots: Int32[Array, "T"], layer: Int32[Array, "1"], num_layers: int, capacity: int, page_size: int
) -> tuple[Array, Int32[Array, "T"], Int32[Array, "T"]]:
    """(valid, page, offset); invalid rows point at slot 0, which exists."""
    valid = (slots >= 0) & (slots < capacity) & (layer >= 0) & (layer < num_layers)
    safe = jnp.where(valid, slots, 0)
    return valid, safe >> np.int32(page_size.bit_length() - 1), safe & np.int32(page_size - 1)


def _gather(
    op: str, cache: PagedMLACache, layer: int | Int32[ArrayIn, ""], slots: Int32[ArrayIn, "T"]
) -> tuple[Shaped[Array, "T words"], Array]:
    config = cache.config
    index = checks.layer_index(op, layer, config.num_layers)
    places = checks.integers(op, "slots", slots, 1)
    pool = checks.refuse_vmap(cache.kv)
    valid, page, offset = _safe_places(places, index, config.num_layers, config.capacity, config.page_size)
    return pool[jnp.clip(index, 0, config.num_layers - 1), page, offset], valid
