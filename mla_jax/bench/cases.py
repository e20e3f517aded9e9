"""The cases that tests and benchmarks share: every storage layout, by name."""

import dataclasses
from typing import Any

from mla_jax.config import CacheConfig
from mla_jax.devices import Platform
from mla_jax.geometry import GEOMETRIES, MLAGeometry
from mla_jax.layout import ScaleMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One way to store a token: the flags that select it, and the platform whose dialect it uses."""

    id: str
    kv_cache_dtype: str
    packed: bool = False
    scale_mode: ScaleMode = "pow2"
    platform: Platform = "cuda"

    def config(self, geometry: MLAGeometry = GEOMETRIES["glm-5"], **sizes: Any) -> CacheConfig:
        """A config of this layout; ``sizes`` are num_layers, num_pages, page_size, use_nsa, ..."""
        return CacheConfig(
            geometry=geometry,
            kv_cache_dtype=self.kv_cache_dtype,
            nsa_kv_cache_store_fp8=self.packed,
            scale_mode=self.scale_mode,
            platform=self.platform,
            **sizes,
        )


LAYOUTS: tuple[LayoutCase, ...] = (
    LayoutCase(id="plain_float32", kv_cache_dtype="float32"),
    LayoutCase(id="plain_bfloat16", kv_cache_dtype="bfloat16"),
    LayoutCase(id="plain_float16", kv_cache_dtype="float16"),
    LayoutCase(id="raw_e4m3fn", kv_cache_dtype="fp8_e4m3"),
    LayoutCase(id="raw_e4m3fnuz", kv_cache_dtype="fp8_e4m3", platform="gfx942"),
    LayoutCase(id="raw_e5m2", kv_cache_dtype="fp8_e5m2"),
    LayoutCase(id="packed_pow2", kv_cache_dtype="fp8_e4m3", packed=True),
    LayoutCase(id="packed_fp32", kv_cache_dtype="fp8_e4m3", packed=True, scale_mode="fp32"),
)
