"""Every kernel of the library at the shapes of the presets, as functions and abstract arguments. Nothing is allocated.

Pools are of the size that the cards are bought for, so that 64-bit addressing is part of what is compiled; one writer and one
reader have a small one too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mla_jax.attention import mla_decode, mla_prefill
from mla_jax.bench.cases import LAYOUTS, LayoutCase
from mla_jax.cache import PagedMLACache, init_cache
from mla_jax.config import CacheConfig, pages_that_fit
from mla_jax.geometry import GEOMETRIES
from mla_jax.indexer import indexer_logits
from mla_jax.rocm.chips import CHIPS
from mla_jax.sparse import sparse_mla
from mla_jax.writes import write_index_k, write_kv

Op = Literal["write", "write_index", "decode", "prefill", "sparse", "indexer"]

PAGE = 64
LAYERS = 4
POOL_BYTES = 16 * 2**30
SMALL_POOL_BYTES = 2**28
ROWS = 4096
"""Tokens of a write."""
SEQUENCES = 128
COLUMNS = 64
"""Pages of a block table: 4096 tokens."""

_BY_ID = {case.id: case for case in LAYOUTS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RocmCase:
    """One kernel at one shape.

    Attributes:
        op: the operation.
        arch: the chip it is compiled for.
        layout: the id of a case of ``mla_jax.bench.cases``.
        preset: whose heads and widths.
        new: new tokens a sequence of a decode.
        pool_bytes: of all pools, about.
    """

    op: Op
    arch: str
    layout: str
    preset: str
    new: int = 1
    pool_bytes: int = POOL_BYTES

    @property
    def name(self) -> str:
        extra = f" Q={self.new}" if self.new > 1 else ""
        return f"{self.op} {self.layout} {self.preset}{extra}" + ("" if self.pool_bytes == POOL_BYTES else " small pool")

    @property
    def layout_case(self) -> LayoutCase:
        return _BY_ID[self.layout]

    @functools.cached_property
    def config(self) -> CacheConfig:
        """The cache of the case."""
        geometry = GEOMETRIES[self.preset]
        # A layout that names a dialect is of the platform whose dialect it is; every other is the same on all of them.
        platform = self.layout_case.platform if self.layout.startswith("raw_e4m3") else self.arch
        case = dataclasses.replace(self.layout_case, platform=platform)
        make = functools.partial(
            case.config, geometry, num_layers=LAYERS, page_size=PAGE, use_nsa=geometry.indexer is not None
        )
        return make(num_pages=pages_that_fit(make(num_pages=2), self.pool_bytes))

    @property
    def writes(self) -> bool:
        return self.op in ("write", "write_index")

    def cache(self) -> PagedMLACache:
        """The abstract cache."""
        return jax.eval_shape(lambda: init_cache(self.config))

    def program(self) -> tuple[Callable[..., Any], dict[str, Any], tuple[int, ...]]:
        """(function, its arguments by name in order, numbers of those donated)."""
        g, cache = self.config.geometry, self.cache()
        R, P, H = g.kv_lora_rank, g.qk_rope_head_dim, g.num_heads

        def of(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        layer = of(())
        bf16 = jnp.bfloat16
        if self.op == "write":
            arguments = {"cache": cache, "layer": layer, "slots": of((ROWS,)), "c_kv": of((ROWS, R), bf16), "k_rope": of((ROWS, P), bf16)}
            return functools.partial(write_kv, implementation="pallas"), arguments, (0,)
        if self.op == "sparse":
            assert g.indexer is not None
            arguments = {
                "q_latent": of((SEQUENCES, H, R), bf16),
                "q_rope": of((SEQUENCES, H, P), bf16),
                "cache": cache,
                "layer": layer,
                "topk_slots": of((SEQUENCES, g.indexer.topk)),
            }
            return functools.partial(sparse_mla, implementation="pallas"), arguments, ()
        tables = {"block_tables": of((SEQUENCES, COLUMNS)), "lengths": of((SEQUENCES,))}
        if self.op == "decode":
            arguments = {
                "q_latent": of((SEQUENCES, self.new, H, R), bf16),
                "q_rope": of((SEQUENCES, self.new, H, P), bf16),
                "cache": cache,
                "layer": layer,
                **tables,
            }
            return functools.partial(mla_decode, implementation="pallas"), arguments, ()
        tables["cu_q_lens"] = of((SEQUENCES + 1,))
        if self.op == "prefill":
            arguments = {"q_latent": of((ROWS, H, R), bf16), "q_rope": of((ROWS, H, P), bf16), "cache": cache, "layer": layer, **tables}
            return functools.partial(mla_prefill, implementation="pallas"), arguments, ()
        assert g.indexer is not None
        heads, width = g.indexer.num_heads, g.indexer.head_dim
        if self.op == "write_index":
            arguments = {"cache": cache, "layer": layer, "slots": of((ROWS,)), "k": of((ROWS, width), bf16)}
            return functools.partial(write_index_k, implementation="pallas"), arguments, (0,)
        arguments = {
            "q_index": of((SEQUENCES, heads, width), bf16),
            "head_weights": of((SEQUENCES, heads), jnp.float32),
            "cache": cache,
            "layer": layer,
            **tables,
        }
        return functools.partial(indexer_logits, implementation="pallas"), arguments, ()


def own_raw(arch: str) -> str:
    """The raw layout in the chip's own dialect."""
    return f"raw_{CHIPS[arch].dialect}"


def cases(arch: str) -> Iterator[RocmCase]:
    """What is compiled for a chip: every layout, every count of heads and every width of the presets."""
    make = functools.partial(RocmCase, arch=arch)
    raw = own_raw(arch)
    for layout in _BY_ID:
        yield make(op="write", layout=layout, preset="glm-5")
    yield make(op="write", layout=raw, preset="minicpm3-4b")
    yield make(op="write", layout=raw, preset="glm-5", pool_bytes=SMALL_POOL_BYTES)
    for layout in (raw, "packed_fp32", "plain_float32"):
        yield make(op="write_index", layout=layout, preset="glm-5")
    usual = ("plain_bfloat16", raw, "raw_e5m2", "packed_pow2")
    for preset in ("deepseek-v2-lite", "glm-4.7-flash", "minicpm3-4b", "kimi-k2.5", "deepseek-v3"):
        for layout in usual:
            yield make(op="decode", layout=layout, preset=preset)
    yield make(op="decode", layout="plain_float16", preset="kimi-k2.5")
    yield make(op="decode", layout="plain_float32", preset="kimi-k2.5")
    yield make(op="decode", layout=raw, preset="kimi-k2.5", new=4)
    yield make(op="decode", layout=raw, preset="deepseek-v2-lite", pool_bytes=SMALL_POOL_BYTES)
    for preset in ("deepseek-v2-lite", "kimi-k2.5", "deepseek-v3"):
        for layout in ("plain_bfloat16", raw, "packed_pow2"):
            yield make(op="prefill", layout=layout, preset=preset)
    for preset in ("glm-5", "deepseek-v3.2"):
        for layout in (*usual, "packed_fp32"):
            yield make(op="sparse", layout=layout, preset=preset)
    for preset in ("glm-5", "deepseek-v3.2"):
        yield make(op="indexer", layout=raw, preset=preset)
    yield make(op="indexer", layout="plain_float32", preset="glm-5")
