"""CacheConfig: every static fact of a cache, and the explanation of what it resolves to."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from mla_jax import checks, devices
from mla_jax.devices import PLATFORMS, Platform
from mla_jax.geometry import GEOMETRIES, MLAGeometry
from mla_jax.layout import PLAIN_DTYPES, SCALE_MODES, CacheLayout, IndexLayout, ScaleMode, WritePath
from mla_jax.quantize import FP8_DTYPES

KV_CACHE_DTYPES = ("auto", *PLAIN_DTYPES, "fp8_e4m3", "fp8_e5m2")

_DTYPE_ALIASES = {"float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
"""Array dtypes that name a storage format: either e4m3 resolves to the platform's own dialect."""


def _dtype_name(value: Any) -> str:
    """One spelling for strings, scalar types and dtypes, so that equal configs compare and hash equal."""
    name = value
    if not isinstance(value, str):
        try:
            name = jnp.dtype(value).name
        except TypeError:
            name = repr(value)
    name = _DTYPE_ALIASES.get(name, name)
    if name not in KV_CACHE_DTYPES:
        raise ValueError(f"CacheConfig: kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {value!r}")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Static description of a paged MLA cache. Frozen and hashable; it travels as static data of the cache's pytree.

    ``platform``, ``kv_cache_dtype`` and ``num_index_layers`` are resolved at construction, so two configs that mean the same
    cache are equal and a jitted function traces once for both.

    Attributes:
        geometry: model dimensions.
        num_layers: attention layers, the leading axis of the latent pool.
        num_pages: pages a layer, the null page 0 included; at least 2.
        page_size: tokens a page, a power of two; ``num_pages * page_size`` stays below 2^31, as slots are int32.
        num_index_layers: layers with an indexer of their own; None: all of them with ``use_nsa``, else none.
        platform: "cpu", "cuda", "gfx942" or "gfx950": the chip whose FP8 dialect is stored; None: the default device's.
        use_nsa: the model has an indexer, index-key pages are allocated.
        kv_cache_dtype: "auto", "float32", "bfloat16", "float16", "fp8_e4m3" or "fp8_e5m2", or an array dtype; of these
            either e4m3 means "fp8_e4m3", the platform's own. "auto": "fp8_e4m3" for packed rows, else "bfloat16".
        nsa_kv_cache_store_fp8: store packed rows with scales (SGLang's name for it; 656 bytes for 512 + 64).
        scale_mode: "pow2" (FlashMLA) or "fp32" (SGLang), for packed rows and FP8 index keys.

    Raises:
        ValueError: for any combination that has no layout, with what was given and what is allowed.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(
        ...     geometry=mla.GEOMETRIES["glm-5"], num_layers=2, num_pages=64, platform="gfx942", use_nsa=True,
        ...     kv_cache_dtype="fp8_e4m3",
        ... )
        >>> config.layout.name, config.write_path.name, config.fp8_dtype.name, config.index_layout.dialect
        ('raw_e4m3fnuz', 'RAW_FUSED', 'float8_e4m3fnuz', 'e4m3fnuz')
        >>> config.layout.row_bytes, config.index_layout.token_bytes, config.bytes_per_token  # 2 * (576 + 132)
        (576, 132, 1416)
        >>> config.capacity, config.kv_shape, config.index_shape  # 32-bit words
        (4096, (2, 64, 64, 144), (2, 64, 2112))
    """

    geometry: MLAGeometry
    num_layers: int
    num_pages: int
    page_size: int = 64
    num_index_layers: int | None = None
    platform: Platform | None = None
    use_nsa: bool = False
    kv_cache_dtype: Any = "auto"
    nsa_kv_cache_store_fp8: bool = False
    scale_mode: ScaleMode = "pow2"

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, MLAGeometry):
            hint = f"; mla_jax.GEOMETRIES[{self.geometry!r}] is one" if str(self.geometry) in GEOMETRIES else ""
            raise ValueError(f"CacheConfig: geometry must be an MLAGeometry, got {self.geometry!r}{hint}")
        for name, minimum in (("num_layers", 1), ("num_pages", 2)):
            object.__setattr__(self, name, checks.static_int("CacheConfig", name, getattr(self, name), minimum))
        object.__setattr__(self, "page_size", checks.page_size("CacheConfig", self.page_size))
        if self.num_pages * self.page_size >= 2**31:
            raise ValueError(
                f"CacheConfig: num_pages * page_size must stay below 2^31 (slots are int32), "
                f"got {self.num_pages} * {self.page_size} = {self.num_pages * self.page_size}"
            )
        for name in ("use_nsa", "nsa_kv_cache_store_fp8"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"CacheConfig: {name} must be a bool, got {getattr(self, name)!r}")
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f"CacheConfig: scale_mode must be one of {SCALE_MODES}, got {self.scale_mode!r}")
        if self.platform is None:
            object.__setattr__(self, "platform", devices.detect_platform())
        elif self.platform not in PLATFORMS:
            raise ValueError(f"CacheConfig: platform must be one of {PLATFORMS} or None, got {self.platform!r}")
        self._resolve_dtype()
        self._resolve_index_layers()
        hash(self.layout)  # Builds the layout, whose own checks (R a multiple of 128 for packed rows) belong to construction.

    def _resolve_dtype(self) -> None:
        name = _dtype_name(self.kv_cache_dtype)
        if name == "auto":
            name = "fp8_e4m3" if self.nsa_kv_cache_store_fp8 else "bfloat16"
        if self.nsa_kv_cache_store_fp8 and name != "fp8_e4m3":
            raise ValueError(
                f"CacheConfig: nsa_kv_cache_store_fp8 (packed rows with scales) needs kv_cache_dtype 'fp8_e4m3' or 'auto', "
                f"got {self.kv_cache_dtype!r}"
            )
        object.__setattr__(self, "kv_cache_dtype", name)

    def _resolve_index_layers(self) -> None:
        layers = self.num_index_layers
        if self.use_nsa and self.geometry.indexer is None:
            raise ValueError("CacheConfig: use_nsa=True needs a geometry with an indexer, got geometry.indexer=None")
        if layers is None:
            layers = self.num_layers if self.use_nsa else 0
        is_int = isinstance(layers, int | np.integer) and not isinstance(layers, bool)
        if not is_int or (layers < 1 if self.use_nsa else layers != 0):
            raise ValueError(
                f"CacheConfig: num_index_layers must be an int >= 1 with use_nsa and 0 or None without, "
                f"got {self.num_index_layers!r} with use_nsa={self.use_nsa}"
            )
        object.__setattr__(self, "num_index_layers", int(layers))

    @property
    def fp8_dtype(self) -> np.dtype:
        """The platform's e4m3, jnp.float8_e4m3fnuz on gfx942 and jnp.float8_e4m3fn elsewhere."""
        return FP8_DTYPES[devices.e4m3_dialect(self._platform)]

    @property
    def _platform(self) -> Platform:
        assert self.platform is not None
        return self.platform

    @property
    def layout(self) -> CacheLayout:
        """The bytes of a latent row, as ``platform``, ``kv_cache_dtype`` and ``nsa_kv_cache_store_fp8`` decide."""
        R, P = self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim
        if self.nsa_kv_cache_store_fp8:
            return CacheLayout(name="packed", kv_lora_rank=R, qk_rope_head_dim=P, scale_mode=self.scale_mode)
        if self.kv_cache_dtype == "fp8_e4m3":
            name = f"raw_{devices.e4m3_dialect(self._platform)}"
        elif self.kv_cache_dtype == "fp8_e5m2":
            name = "raw_e5m2"
        else:
            name = f"plain_{self.kv_cache_dtype}"
        return CacheLayout(name=name, kv_lora_rank=R, qk_rope_head_dim=P)

    @property
    def index_layout(self) -> IndexLayout | None:
        """The bytes of a page of index keys; None without ``use_nsa``. Only a float32 cache keeps float32 keys."""
        if not self.use_nsa or self.geometry.indexer is None:
            return None
        is_f32 = self.kv_cache_dtype == "float32"
        return IndexLayout(
            head_dim=self.geometry.indexer.head_dim,
            page_size=self.page_size,
            dialect=None if is_f32 else devices.e4m3_dialect(self._platform),
            scale_mode=None if is_f32 else self.scale_mode,
        )

    @property
    def write_path(self) -> WritePath:
        """How a row is written; :attr:`CacheLayout.write_path` of the layout."""
        return self.layout.write_path

    @property
    def capacity(self) -> int:
        """Slots, the null page's included; ``num_pages * page_size`` of them."""
        return self.num_pages * self.page_size

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of the latent pool, ``[num_layers, num_pages, page_size, words a row]``."""
        return (self.num_layers, self.num_pages, self.page_size, self.layout.row_words)

    @property
    def index_shape(self) -> tuple[int, ...] | None:
        """Shape of the index-key pool, ``[num_index_layers, num_pages, *page]``; None without ``use_nsa``."""
        layout = self.index_layout
        return None if layout is None else (self._index_layers, self.num_pages, *layout.page_shape)

    @property
    def _index_layers(self) -> int:
        assert self.num_index_layers is not None
        return self.num_index_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, latent rows and index keys; times ``capacity`` it is the size of the pools."""
        index = self.index_layout
        return self.num_layers * self.layout.row_bytes + (0 if index is None else self._index_layers * index.token_bytes)


def pages_that_fit(config: CacheConfig, nbytes: int) -> int:
    """The largest ``num_pages`` whose pools take at most ``nbytes`` bytes; ``config.num_pages`` itself does not matter.

    Args:
        config: a config of the cache, with any number of pages.
        nbytes: memory for the pools, in bytes.

    Returns:
        Pages. Below 2 it is no valid ``num_pages`` (the null page needs another beside it). Slots stay within int32.

    Raises:
        ValueError: for anything but a finite number >= 0 of bytes.
        TypeError: for anything but a CacheConfig.

    Example:
        >>> import dataclasses, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> mla.pages_that_fit(config, 2**30)  # pages of 4 * 1152 bytes
        233016
        >>> dataclasses.replace(config, num_pages=mla.pages_that_fit(config, 2**30)).capacity
        932064
    """
    checks.instance("pages_that_fit", "config", config, CacheConfig)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float | np.number) or not 0 <= nbytes < math.inf:
        raise ValueError(f"pages_that_fit: nbytes must be a number >= 0, got {nbytes!r}")
    return min(int(nbytes) // (config.bytes_per_token * config.page_size), (2**31 - 1) // config.page_size)
