"""Speed of the write kernels: device time against the copy rate of the same run, and against the pool's size."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.bench.cases import LAYOUTS, LayoutCase
from mla_jax.bench.timing import copy_time, device_time, make_flush
from mla_jax.cache import PagedMLACache, init_cache
from mla_jax.config import CacheConfig, pages_that_fit
from mla_jax.geometry import GEOMETRIES
from mla_jax.writes import write_index_k, write_kv

TOKENS = (128, 4096, 65536)
POOL_GIB = (1, 60)


@dataclasses.dataclass(frozen=True)
class Rows:
    """One set of inputs: bfloat16 latents [T, R], rope [T, P], index keys [T, d] and slots int32[T] of whole random pages."""

    c_kv: jax.Array
    k_rope: jax.Array
    k: jax.Array
    slots: jax.Array


def random_rows(config: CacheConfig, tokens: int, seed: int) -> Rows:
    """Random inputs for ``tokens`` rows that fill whole pages, drawn over the whole pool."""
    g = config.geometry
    keys = jax.random.split(jax.random.key(seed), 3)
    whole = -(-tokens // config.page_size)
    pages = 1 + np.random.default_rng(seed).choice(config.num_pages - 1, whole, replace=False)
    slots = (pages[:, None] * config.page_size + np.arange(config.page_size)).reshape(-1)[:tokens]
    width = g.indexer.head_dim if g.indexer else 128
    widths = (g.kv_lora_rank, g.qk_rope_head_dim, width)
    c_kv, k_rope, k = (jax.random.normal(key, (tokens, w), jnp.bfloat16) for key, w in zip(keys, widths, strict=True))
    return Rows(c_kv, k_rope, k, jnp.asarray(slots.astype(np.int32)))


def _bytes_moved(config: CacheConfig, op: str, tokens: int) -> int:
    g = config.geometry
    if op == "write_kv":
        read, written = 2 * (g.kv_lora_rank + g.qk_rope_head_dim), config.layout.row_bytes
    else:
        assert g.indexer is not None and config.index_layout is not None
        read, written = 2 * g.indexer.head_dim, config.index_layout.token_bytes
    return tokens * (4 + read + written)


def _measure(config: CacheConfig, op: str, tokens: int, implementation: str, flush: Any, ignore: frozenset[str]) -> dict[str, Any]:
    """One call's device time and the compiled program's temporaries. Inputs are cold in L2: several sets in turn, or a flush."""
    sets = [random_rows(config, tokens, seed) for seed in range(3)]

    def step(cache: PagedMLACache, rows: tuple[jax.Array, ...]) -> PagedMLACache:
        c_kv, k_rope, k, slots = rows
        if op == "write_kv":
            return write_kv(cache, 0, slots, c_kv, k_rope, implementation=implementation)
        return write_index_k(cache, 0, slots, k, implementation=implementation)

    cache = init_cache(config)
    inputs = [(r.c_kv, r.k_rope, r.k, r.slots) for r in sets]
    compiled = jax.jit(step, donate_argnums=0).lower(cache, inputs[0]).compile()
    state = [cache]
    del cache

    def calls() -> PagedMLACache:
        for rows in inputs:
            flush()
            state[0] = compiled(state[0], rows)
        return state[0]

    timing = device_time(calls, calls=len(inputs), ignore=ignore)
    memory: Any = compiled.memory_analysis()
    nbytes = _bytes_moved(config, op, tokens)
    return {
        "op": op,
        "implementation": implementation,
        "tokens": tokens,
        "microseconds": round(timing.microseconds, 2),
        "spread": round(timing.spread, 3),
        "launches": timing.launches,
        "terabytes_per_second": round(nbytes / timing.microseconds / 1e6, 3),
        "bytes_moved": nbytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def _ops(case: LayoutCase) -> tuple[str, ...]:
    """Index keys are stored the same way in all FP8 caches of one dialect, so they are measured once for each."""
    return ("write_kv", "write_index_k") if case.id in ("plain_float32", "raw_e4m3fn", "raw_e4m3fnuz") else ("write_kv",)


def speed(tokens: tuple[int, ...] = TOKENS) -> Iterator[dict[str, Any]]:
    """Every layout, both implementations, at several numbers of rows; each beside a copy of as many bytes in the same run."""
    flush, ignore = make_flush()
    copies: dict[int, float] = {}
    for count in tokens:
        for case in LAYOUTS:
            config = case.config(GEOMETRIES["glm-5"], num_layers=1, num_pages=4 * max(tokens) // 64, page_size=64, use_nsa=True)
            for op in _ops(case):
                for implementation in ("pallas", "xla"):
                    row = _measure(config, op, count, implementation, flush, ignore)
                    nbytes = row["bytes_moved"]
                    if nbytes not in copies:
                        copies[nbytes] = copy_time(nbytes)
                    row["copy_microseconds"] = round(copies[nbytes], 2)
                    row["share_of_copy_rate"] = round(copies[nbytes] / row["microseconds"], 3)
                    yield {"layout": case.id, **row}


def pool_sizes(gibibytes: tuple[int, ...] = POOL_GIB, tokens: int = 65536) -> Iterator[dict[str, Any]]:
    """The same number of whole random pages written into pools of several sizes: time and temporaries must not change."""
    flush, ignore = make_flush()
    for case in LAYOUTS:
        for gib in gibibytes:
            small = case.config(GEOMETRIES["glm-5"], num_layers=1, num_pages=2, page_size=64)
            config = dataclasses.replace(small, num_pages=pages_that_fit(small, gib * 2**30))
            yield {"layout": case.id, "pool_gib": gib, **_measure(config, "write_kv", tokens, "pallas", flush, ignore)}
