"""Every kernel of the library at the shapes of the presets, as functions and abstract arguments. Nothing is allocated."""

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
from mla_jax.devices import Target
from mla_jax.geometry import GEOMETRIES
from mla_jax.indexer import indexer_logits
from mla_jax.kernels.tuning import AttendTuning, IndexTuning, WriteTuning, attend_tuning, index_tuning, write_tuning
from mla_jax.pallas_attention import PREFILL_ROWS
from mla_jax.rocm.chips import CHIPS
from mla_jax.sparse import sparse_mla
from mla_jax.writes import write_index_k, write_kv

Op = Literal["write", "write_index", "decode", "prefill", "sparse", "indexer"]

PAGE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything about a case that the preset does not say.

    Attributes:
        layers: of the cache.
        pool_bytes: of all pools, about.
        rows: tokens of a write.
        tokens: of a prefill.
        sequences: of a decode, an indexer call and a prefill; tokens of a sparse call.
        columns: pages of a block table.
        topk: slots listed a token, at most.
    """

    layers: int
    pool_bytes: int
    rows: int
    tokens: int
    sequences: int
    columns: int
    topk: int


PRESET = Sizes(layers=4, pool_bytes=16 * 2**30, rows=65536, tokens=4096, sequences=128, columns=64, topk=2048)
"""As the cards are used: pools that need 64-bit addresses, batches that fill a chip."""

SMALL_POOL = dataclasses.replace(PRESET, pool_bytes=2**28)
"""The same with a pool that 32-bit offsets reach."""

TINY = Sizes(layers=2, pool_bytes=3 * 2**20, rows=21, tokens=24, sequences=3, columns=4, topk=192)
"""For running the code in an emulator: a few work groups, with last tiles that are not full. Attention returns float32."""

SIZES = {"preset": PRESET, "small pool": SMALL_POOL, "tiny": TINY}

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
        compute: of an attention, "fp8" or None.
        size: of everything else, a key of SIZES.
    """

    op: Op
    arch: str
    layout: str
    preset: str
    new: int = 1
    compute: str | None = None
    size: str = "preset"

    @property
    def name(self) -> str:
        extra = (f" Q={self.new}" if self.new > 1 else "") + (f" compute={self.compute}" if self.compute else "")
        return f"{self.op} {self.layout} {self.preset}{extra}" + ("" if self.size == "preset" else f", {self.size}")

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.size]

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
            case.config, geometry, num_layers=self.sizes.layers, page_size=PAGE, use_nsa=geometry.indexer is not None
        )
        return make(num_pages=pages_that_fit(make(num_pages=2), self.sizes.pool_bytes))

    @property
    def writes(self) -> bool:
        return self.op in ("write", "write_index")

    @property
    def topk(self) -> int:
        """Slots that each token of a sparse call lists."""
        indexer = self.config.geometry.indexer
        return min(self.sizes.topk, PRESET.topk if indexer is None else indexer.topk)

    @property
    def block_tokens(self) -> int:
        """Tokens whose heads make the rows of a block of attention."""
        if self.op == "prefill":
            return max(1, PREFILL_ROWS // self.config.geometry.num_heads)
        return self.new

    def tuning(self) -> WriteTuning | AttendTuning | IndexTuning:
        """The launch parameters in force for the case."""
        target, layout = Target("rocm", self.arch), self.config.layout
        if self.op == "write":
            return write_tuning(target, layout.write_path.value)
        index = self.config.index_layout
        if self.op == "write_index":
            return write_tuning(target, "plain" if index is None or index.dialect is None else "index")
        if self.op == "indexer":
            return index_tuning(target)
        wide = layout.is_plain and str(layout.number_dtype) == "float32"
        kernel = "sparse" if self.op == "sparse" else "dense"
        rows = self.config.geometry.num_heads * self.block_tokens
        return attend_tuning(target, kernel, layout, rows, wide, self.compute == "fp8", self.block_tokens)

    def cache(self) -> PagedMLACache:
        """The abstract cache."""
        return jax.eval_shape(lambda: init_cache(self.config))

    def program(self) -> tuple[Callable[..., Any], dict[str, Any], tuple[int, ...]]:
        """(function, its arguments by name in order, numbers of those donated)."""
        g, cache, sizes = self.config.geometry, self.cache(), self.sizes
        R, P, H = g.kv_lora_rank, g.qk_rope_head_dim, g.num_heads

        def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def queries(*lead: int) -> dict[str, Any]:
            return {"q_latent": of(*lead, H, R, dtype=jnp.bfloat16), "q_rope": of(*lead, H, P, dtype=jnp.bfloat16)}

        stored = {"cache": cache, "layer": of()}
        tables = {"block_tables": of(sizes.sequences, sizes.columns), "lengths": of(sizes.sequences)}
        bounds = {"cu_q_lens": of(sizes.sequences + 1)}
        options: dict[str, Any] = {"implementation": "pallas"}
        attention = {**options, "compute": self.compute, "out_dtype": jnp.float32 if self.size == "tiny" else None}
        if self.op == "write":
            rows = {"c_kv": of(sizes.rows, R, dtype=jnp.bfloat16), "k_rope": of(sizes.rows, P, dtype=jnp.bfloat16)}
            return functools.partial(write_kv, **options), {**stored, "slots": of(sizes.rows), **rows}, (0,)
        if self.op == "sparse":
            listed = {"topk_slots": of(sizes.sequences, self.topk)}
            return functools.partial(sparse_mla, **attention), {**queries(sizes.sequences), **stored, **listed}, ()
        if self.op == "decode":
            return functools.partial(mla_decode, **attention), {**queries(sizes.sequences, self.new), **stored, **tables}, ()
        if self.op == "prefill":
            return functools.partial(mla_prefill, **attention), {**queries(sizes.tokens), **stored, **tables, **bounds}, ()
        assert g.indexer is not None
        heads, width = g.indexer.num_heads, g.indexer.head_dim
        if self.op == "write_index":
            keys = {"k": of(sizes.rows, width, dtype=jnp.bfloat16)}
            return functools.partial(write_index_k, **options), {**stored, "slots": of(sizes.rows), **keys}, (0,)
        asked = {
            "q_index": of(sizes.sequences, heads, width, dtype=jnp.bfloat16),
            "head_weights": of(sizes.sequences, heads, dtype=jnp.float32),
        }
        return functools.partial(indexer_logits, **options), {**asked, **stored, **tables, **bounds}, ()


def own_raw(arch: str) -> str:
    """The raw layout in the chip's own dialect."""
    return f"raw_{CHIPS[arch].dialect}"


def cases(arch: str, size: str = "preset") -> Iterator[RocmCase]:
    """What is compiled for a chip: every layout, every count of heads and every width of the presets.

    Args:
        arch: the chip.
        size: of every case, a key of SIZES.
    """
    make = functools.partial(RocmCase, arch=arch, size=size)
    raw = own_raw(arch)
    for layout in _BY_ID:
        yield make(op="write", layout=layout, preset="glm-5")
    yield make(op="write", layout=raw, preset="minicpm3-4b")
    for layout in (raw, "packed_fp32", "plain_float32"):
        yield make(op="write_index", layout=layout, preset="glm-5")
    usual = ("plain_bfloat16", raw, "raw_e5m2", "packed_pow2")
    for preset in ("deepseek-v2-lite", "glm-4.7-flash", "minicpm3-4b", "kimi-k2.5", "deepseek-v3"):
        for layout in usual:
            yield make(op="decode", layout=layout, preset=preset)
    yield make(op="decode", layout="plain_float16", preset="kimi-k2.5")
    yield make(op="decode", layout="plain_float32", preset="kimi-k2.5")
    yield make(op="decode", layout=raw, preset="kimi-k2.5", new=4)
    for preset in ("deepseek-v2-lite", "kimi-k2.5", "deepseek-v3"):
        for layout in ("plain_bfloat16", raw, "packed_pow2"):
            yield make(op="prefill", layout=layout, preset=preset)
        yield make(op="decode", layout=raw, preset=preset, compute="fp8")
    yield make(op="prefill", layout=raw, preset="kimi-k2.5", compute="fp8")
    yield make(op="sparse", layout=raw, preset="deepseek-v3.2", compute="fp8")
    for preset in ("glm-5", "deepseek-v3.2"):
        for layout in (*usual, "packed_fp32"):
            yield make(op="sparse", layout=layout, preset=preset)
    for preset in ("glm-5", "deepseek-v3.2"):
        yield make(op="indexer", layout=raw, preset=preset)
    yield make(op="indexer", layout="plain_float32", preset="glm-5")
    if size == "preset":
        yield make(op="write", layout=raw, preset="glm-5", size="small pool")
        yield make(op="decode", layout=raw, preset="deepseek-v2-lite", size="small pool")
