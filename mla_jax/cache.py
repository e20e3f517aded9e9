"""PagedMLACache: the pools as a functional pytree. Operations return a new cache; the caller's jit donates the old one."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from mla_jax import checks, rows
from mla_jax.config import CacheConfig
from mla_jax.geometry import IndexerGeometry, MLAGeometry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedMLACache:
    """Latent rows and index keys of all layers. Its leaves are the pools and nothing else; ``config`` is static.

    Attributes:
        kv: ``[num_layers, num_pages, page_size, words]`` latent pool of unsigned words, ``config.layout.word_dtype``.
        index: ``[num_index_layers, num_pages, *page]`` index-key pool, or None without an indexer.
        config: the CacheConfig both were made from.

    Example:
        >>> import jax, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> cache = mla.init_cache(config)
        >>> cache.kv.shape, cache.kv.dtype.name, cache.index, cache.config.layout.name
        ((1, 3, 4, 576), 'uint16', None, 'plain_bfloat16')
        >>> sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == config.capacity * config.bytes_per_token
        True
    """

    kv: Shaped[Array, "layers pages page words"]
    index: Shaped[Array, "index_layers pages *page"] | None
    config: CacheConfig = dataclasses.field(metadata={"static": True})


def init_cache(config: CacheConfig) -> PagedMLACache:
    """A cache of zeros, on the default device.

    Args:
        config: what it stores, and how much of it.

    Returns:
        The cache; its pools take ``config.capacity * config.bytes_per_token`` bytes.

    Raises:
        TypeError: if ``config`` is no CacheConfig.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> mla.init_cache(config).kv.nbytes  # 12 slots of 1152 bytes
        13824
    """
    checks.instance("init_cache", "config", config, CacheConfig)
    kv = jnp.zeros(config.kv_shape, config.layout.word_dtype)
    index_layout, index_shape = config.index_layout, config.index_shape
    index = None
    if index_layout is not None and index_shape is not None:
        index = jnp.zeros(index_shape, index_layout.word_dtype)
    return PagedMLACache(kv=kv, index=index, config=config)


def check_cache(op: str, cache: PagedMLACache) -> None:
    """Raises unless the pools are those that ``cache.config`` describes: a reader of another layout stops here."""
    checks.instance(op, "cache", cache, PagedMLACache)
    config = cache.config
    expected: list[tuple[str, Any, tuple[int, ...] | None, Any]] = [("kv", cache.kv, config.kv_shape, config.layout.word_dtype)]
    index_layout = config.index_layout
    expected.append(("index", cache.index, config.index_shape, index_layout and index_layout.word_dtype))
    for name, pool, shape, dtype in expected:
        got = None if pool is None else (tuple(pool.shape), jnp.dtype(pool.dtype).name)
        want = None if shape is None else (shape, jnp.dtype(dtype).name)
        if got != want:
            raise ValueError(
                f"{op}: the {name} pool is {got}, but layout {config.layout.name} of the cache's config "
                f"({config.layout.row_bytes} bytes a row) needs {want}"
            )


def convert(cache: PagedMLACache, config: CacheConfig) -> PagedMLACache:
    """The same tokens in another dialect or layout.

    A pool whose layout is unchanged keeps its bytes. Otherwise each slot is decoded to float32 and encoded again, page by page,
    so no dequantised copy of the pool exists. Values beyond the new dialect's range saturate.

    Args:
        cache: the cache, which stays as it is.
        config: the config of the result. It may differ in ``platform``, ``kv_cache_dtype``, ``nsa_kv_cache_store_fp8`` and
            ``scale_mode``.

    Returns:
        A cache of ``config``.

    Raises:
        TypeError: if ``config`` is no CacheConfig.
        ValueError: if layers, pages, page size, ``use_nsa`` or the geometry differ.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=2, page_size=4, platform="cpu",
        ...     kv_cache_dtype="fp8_e4m3",
        ... )
        >>> cache = jax.jit(mla.write_kv)(mla.init_cache(config), 0, jnp.array([4]), jnp.ones((1, 512)), jnp.ones((1, 64)))
        >>> mi300 = jax.jit(mla.convert, static_argnames="config")(cache, dataclasses.replace(config, platform="gfx942"))
        >>> [int(jax.jit(mla.raw_rows)(c, 0, jnp.array([4]))[0, 0]) for c in (cache, mi300)]  # the codes of 1.0
        [56, 64]
    """
    check_cache("convert", cache)
    old = cache.config
    checks.instance("convert", "config", config, CacheConfig)
    for name in ("num_layers", "num_pages", "page_size", "use_nsa", "num_index_layers", "geometry"):
        if getattr(old, name) != getattr(config, name):
            raise ValueError(f"convert: {name} must stay {getattr(old, name)!r}, got {getattr(config, name)!r}")
    kv, index = cache.kv, cache.index
    if old.layout != config.layout:
        source, target = old.layout, config.layout
        kv = _map_pages(lambda page: rows.encode_rows(target, *rows.decode_rows(source, page)), kv)
    if index is not None and old.index_layout != config.index_layout:
        source_index, target_index = old.index_layout, config.index_layout
        assert source_index is not None and target_index is not None

        def recode(page: Array) -> Array:
            keys, scales = rows.encode_index_keys(target_index, rows.decode_index_pages(source_index, page))
            return jnp.concatenate([keys.reshape(-1), scales.reshape(-1)]).reshape(target_index.page_shape)

        index = _map_pages(recode, index)
    return PagedMLACache(kv=kv, index=index, config=config)


_PAGES_AT_ONCE = 16


def _map_pages(recode: Any, pool: Array) -> Array:
    """Applies ``recode`` to each [*page] of a [layers, pages, *page] pool, a few pages at a time."""
    batch = min(_PAGES_AT_ONCE, pool.shape[1])
    return jax.lax.map(lambda layer: jax.lax.map(recode, layer, batch_size=batch), pool)


def _config_to_json(aux: tuple[Any, ...]) -> bytes:
    (config,) = aux
    return json.dumps(dataclasses.asdict(config)).encode()


def _config_from_json(data: bytes | bytearray) -> tuple[CacheConfig]:
    fields: Mapping[str, Any] = json.loads(bytes(data))
    geometry = dict(fields["geometry"])
    if geometry["indexer"] is not None:
        geometry["indexer"] = IndexerGeometry(**geometry["indexer"])
    return (CacheConfig(**{**fields, "geometry": MLAGeometry(**geometry)}),)


jax.export.register_pytree_node_serialization(
    PagedMLACache,
    serialized_name="mla_jax.PagedMLACache",
    serialize_auxdata=_config_to_json,
    deserialize_auxdata=_config_from_json,
)
