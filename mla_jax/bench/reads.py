"""Speed of the reading kernels: device time of each shape, its rates, and a peer's time at the same shape when one is given.

The bytes of a call are the stored rows, each once; its operations are those of the products, 2 H (2 R + P) for each row seen.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import rows
from mla_jax.attention import mla_decode, mla_prefill
from mla_jax.bench.cases import LAYOUTS
from mla_jax.bench.timing import device_time, make_flush
from mla_jax.cache import PagedMLACache
from mla_jax.config import CacheConfig, pages_that_fit
from mla_jax.geometry import GEOMETRIES
from mla_jax.indexer import indexer_logits
from mla_jax.sparse import sparse_mla
from mla_jax.topk import select_topk

POOL_GIB = (1, 60)
PAGE = 64
GEOMETRY = GEOMETRIES["glm-5"]
_CASES = {case.id: case for case in LAYOUTS}


@dataclasses.dataclass(frozen=True)
class ReadCase:
    """One shape: B sequences of S tokens, H heads, K listed slots a token; a prefill's S tokens are all new."""

    op: str
    layout: str
    B: int
    H: int
    S: int
    K: int = 0

    @property
    def name(self) -> str:
        return f"{self.op} {self.layout} B={self.B} H={self.H} S={self.S}" + (f" K={self.K}" if self.K else "")


CASES: tuple[ReadCase, ...] = (
    *(ReadCase("decode", layout, 128, H, 4096) for layout in ("plain_bfloat16", "raw_e4m3fn") for H in (16, 128)),
    *(ReadCase("decode", layout, 8, 128, 16384) for layout in ("plain_bfloat16", "raw_e4m3fn")),
    ReadCase("sparse", "packed_pow2", 128, 128, 4096, 2048),
    ReadCase("sparse", "packed_pow2", 128, 64, 4096, 2048),
    *(ReadCase("decode", layout, 128, 16, 4096) for layout in ("plain_float16", "raw_e4m3fnuz", "raw_e5m2", "packed_pow2")),
    *(ReadCase("sparse", layout, 128, 16, 4096, 2048) for layout in ("plain_bfloat16", "raw_e4m3fn", "packed_pow2")),
    ReadCase("prefill", "plain_bfloat16", 1, 128, 2048),
    ReadCase("prefill", "raw_e4m3fn", 1, 16, 2048),
    ReadCase("indexer", "raw_e4m3fn", 128, 32, 4096),
    ReadCase("indexer", "raw_e4m3fn", 1, 32, 2048),
)


def filled_cache(config: CacheConfig, seed: int = 0) -> PagedMLACache:
    """A cache of one layer whose rows are random; 64 pages of them, repeated, as drawing them all would take long."""
    keys = jax.random.split(jax.random.key(seed), 3)
    g = config.geometry

    @jax.jit
    def pages() -> tuple[Any, Any]:
        c_kv = jax.random.normal(keys[0], (64 * PAGE, g.kv_lora_rank))
        k_rope = jax.random.normal(keys[1], (64 * PAGE, g.qk_rope_head_dim))
        kv = rows.encode_rows(config.layout, c_kv, k_rope).reshape(64, PAGE, -1)
        if config.index_layout is None:
            return kv, None
        k = jax.random.normal(keys[2], (64, PAGE, config.index_layout.head_dim))
        codes, scales = rows.encode_index_keys(config.index_layout, k)
        return kv, jnp.concatenate([codes.reshape(64, -1), scales.reshape(64, -1)], axis=1)

    @jax.jit  # as one program, so that a large pool is made once
    def repeat(x: Any) -> Any:
        return x[jnp.arange(config.num_pages) % 64][None]

    kv, index = pages()
    return PagedMLACache(kv=repeat(kv), index=None if index is None else repeat(index), config=config)


def prepare(
    case: ReadCase, num_pages: int | None = None, implementation: str = "pallas"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of the case and its arguments; pages lie in random order over the whole pool."""
    columns = -(-case.S // PAGE)
    config = _CASES[case.layout].config(
        GEOMETRY, num_layers=1, num_pages=num_pages or case.B * columns + 1, page_size=PAGE, use_nsa=case.op == "indexer"
    )
    rng = np.random.default_rng(0)
    cache = filled_cache(config)
    ids = 1 + rng.choice(config.num_pages - 1, case.B * columns, replace=False)
    tables = jnp.asarray(ids.reshape(case.B, columns).astype(np.int32))
    lengths = jnp.full((case.B,), case.S, jnp.int32)
    tokens = case.S if case.op == "prefill" or (case.op == "indexer" and case.B == 1) else case.B
    new = tokens // case.B
    bounds = jnp.arange(case.B + 1, dtype=jnp.int32) * new
    keys = jax.random.split(jax.random.key(1), 3)
    R, P = config.layout.kv_lora_rank, config.layout.qk_rope_head_dim
    latent = jax.random.normal(keys[0], (tokens, case.H, R), jnp.bfloat16)
    rope = jax.random.normal(keys[1], (tokens, case.H, P), jnp.bfloat16)
    if case.op == "decode":

        def decode(cache: Any, latent: Any, rope: Any, tables: Any, lengths: Any) -> Any:
            return mla_decode(latent[:, None], rope[:, None], cache, 0, tables, lengths, implementation=implementation)

        return decode, (cache, latent, rope, tables, lengths)
    if case.op == "sparse":
        slots = jnp.asarray(rng.integers(PAGE, config.capacity, (tokens, case.K)).astype(np.int32))

        def sparse(cache: Any, latent: Any, rope: Any, slots: Any) -> Any:
            return sparse_mla(latent, rope, cache, 0, slots, implementation=implementation)

        return sparse, (cache, latent, rope, slots)
    if case.op == "prefill":

        def prefill(cache: Any, latent: Any, rope: Any, tables: Any, lengths: Any, bounds: Any) -> Any:
            return mla_prefill(latent, rope, cache, 0, tables, lengths, bounds, implementation=implementation)

        return prefill, (cache, latent, rope, tables, lengths, bounds)
    assert config.index_layout is not None
    q = jax.random.normal(keys[0], (tokens, case.H, config.index_layout.head_dim), jnp.bfloat16)
    weights = jax.random.normal(keys[2], (tokens, case.H))

    def indexer(cache: Any, q: Any, weights: Any, tables: Any, lengths: Any, bounds: Any) -> Any:
        return indexer_logits(q, weights, cache, 0, tables, lengths, bounds, implementation=implementation)

    return indexer, (cache, q, weights, tables, lengths, bounds)


def rates(case: ReadCase, config: CacheConfig, microseconds: float) -> dict[str, float]:
    """Terabytes a second of stored rows, and teraflops."""
    is_prefill = case.op == "prefill" or (case.op == "indexer" and case.B == 1)
    pairs = case.S * (case.S + 1) // 2 if is_prefill else case.B * (case.K or case.S)
    stored = case.S if is_prefill else case.B * (case.K or case.S)
    if case.op == "indexer":
        assert config.index_layout is not None
        row_bytes, flops = config.index_layout.token_bytes, 2 * case.H * config.index_layout.head_dim
    else:
        row_bytes, flops = config.layout.row_bytes, 2 * case.H * (2 * config.layout.kv_lora_rank + config.layout.qk_rope_head_dim)
    return {
        "terabytes_per_second": round(stored * row_bytes / microseconds / 1e6, 3),
        "teraflops": round(pairs * flops / microseconds / 1e6, 1),
    }


def compile_case(case: ReadCase, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The case compiled, and its arguments."""
    fn, args = prepare(case, **options)
    return jax.jit(fn).lower(*args).compile(), args


def measure(case: ReadCase, compiled: Any, args: tuple[Any, ...], flush: Any, ignore: frozenset[str]) -> dict[str, Any]:
    """Device time of one call with L2 cold, and the compiled program's temporaries."""

    def step() -> Any:
        flush()
        return compiled(*args)

    timing = device_time(step, calls=1, ignore=ignore)
    memory: Any = compiled.memory_analysis()
    return {
        "case": case.name,
        "layout": case.layout,
        "microseconds": round(timing.microseconds, 1),
        "spread": round(timing.spread, 3),
        **rates(case, args[0].config, timing.microseconds),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def speed(peer: Mapping[str, float] | None = None) -> Iterator[dict[str, Any]]:
    """Every shape; ``peer`` gives microseconds by case name, of a run on the same machine."""
    flush, ignore = make_flush()
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compile_case, CASES))
    for case, (compiled, args) in zip(CASES, programs, strict=True):
        row = measure(case, compiled, args, flush, ignore)
        theirs = (peer or {}).get(case.name)
        row["peer_microseconds"] = None if theirs is None else round(theirs, 1)
        row["share_of_peer_speed"] = None if theirs is None else round(theirs / row["microseconds"], 3)
        yield row


def pool_sizes(gibibytes: tuple[int, ...] = POOL_GIB) -> Iterator[dict[str, Any]]:
    """The same sequences, on random pages of pools of several sizes."""
    flush, ignore = make_flush()
    for layout in ("plain_bfloat16", "raw_e4m3fn", "packed_pow2"):
        case = ReadCase("decode", layout, 128, 16, 4096)
        for gib in gibibytes:
            two = _CASES[layout].config(GEOMETRY, num_layers=1, num_pages=2, page_size=PAGE)
            row = measure(case, *compile_case(case, num_pages=pages_that_fit(two, gib * 2**30)), flush, ignore)
            yield {"pool_gib": gib, **row}


def topk(k: int = 2048) -> Iterator[dict[str, Any]]:
    """select_topk beside lax.top_k, which leaves signed zeros and NaN to chance and does not sort positions."""
    flush, ignore = make_flush()
    choices = (jax.jit(lambda x, n: select_topk(x, n, k)), jax.jit(lambda x, n: jax.lax.top_k(x, k)))
    for tokens, columns in ((128, 4096), (128, 65536), (1, 131072)):
        logits = jax.random.normal(jax.random.key(0), (tokens, columns))
        visible = jnp.full((tokens,), columns, jnp.int32)
        times = []
        for fn in choices:

            def step(fn: Any = fn, logits: Any = logits, visible: Any = visible) -> Any:
                flush()
                return fn(logits, visible)

            times.append(device_time(step, calls=1, ignore=ignore).microseconds)
        yield {
            "case": f"top-{k} of [{tokens}, {columns}]",
            "layout": "float32",
            "microseconds": round(times[0], 1),
            "lax_top_k_microseconds": round(times[1], 1),
            "ratio": round(times[0] / times[1], 2),
        }
