"""Paged batches for the tests of what reads a cache: random tokens on scattered pages, poison in every byte that nobody may see."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mla_jax as mla
from helpers import config, equations, filled, oracle_rows, oracle_values, pool_bytes, row_bytes, with_pages, with_rows
from mla_jax import reference

LAYER = 1
"""The layer that holds tokens; the others hold poison alone."""

JUNK_IDS = (-1, 0, -(2**31), 2**31 - 1)
"""Page ids that stand for no page, beside those from num_pages on."""


def poisons(layout: str) -> tuple[int, ...]:
    """Bytes that, repeated, are NaN in every field of a row; for e4m3fnuz also the one that is NaN elsewhere."""
    return (0x80, 0xFF) if "fnuz" in layout else (0xFF,)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences in a cache.

    Attributes:
        config: of the cache.
        tables: int32[S, M]; columns beyond a sequence's need hold junk or pages of other sequences.
        lengths: int32[S].
        used: bool[capacity], slots that hold a token of some sequence.
        rows: uint8 [capacity, W], the bytes of LAYER; only those in ``used`` count.
        pages: uint8 [num_pages, bytes a page] of the index keys of LAYER, or None.
    """

    config: mla.CacheConfig
    tables: np.ndarray
    lengths: np.ndarray
    used: np.ndarray
    rows: np.ndarray
    pages: np.ndarray | None

    def cache(self, byte: int = 0) -> mla.PagedMLACache:
        """The cache, with ``byte`` in every byte that holds no token's."""
        cache = filled(self.config, byte)
        rows = row_bytes(cache).copy()
        rows[LAYER, self.used] = self.rows[self.used]
        cache = with_rows(cache, rows)
        index = self.config.index_layout
        if self.pages is not None and index is not None:
            pages = pool_bytes(cache.index).copy()
            for slot in np.flatnonzero(self.used):
                page, offset = divmod(int(slot), index.page_size)
                for part in reference.index_ranges(offset, index.page_size, index.head_dim, index.dialect):
                    pages[LAYER, page, part] = self.pages[page, part]
            cache = with_pages(cache, pages)
        return cache

    def values(self, k_scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What is stored, dequantised: latent [num_pages, page_size, R] and rope; NaN where no token is."""
        parts = oracle_values(self.config.layout, self.rows, k_scale)
        latent, rope = (np.where(self.used[:, None], part, np.float32(np.nan)) for part in parts)
        shape = self.config.num_pages, self.config.page_size
        return latent.reshape(*shape, latent.shape[-1]), rope.reshape(*shape, rope.shape[-1])

    def keys(self) -> np.ndarray:
        """Index keys [num_pages, page_size, d], dequantised; NaN where no token is."""
        index = self.config.index_layout
        assert index is not None and self.pages is not None
        keys = reference.decode_index_page(self.pages, index.page_size, index.head_dim, index.dialect)
        return np.where(self.used.reshape(keys.shape[:2])[..., None], keys, np.float32(np.nan))

    def visible_slots(self, s: int) -> np.ndarray:
        """Slots of the tokens of sequence ``s``, in order."""
        position = np.arange(max(int(self.lengths[s]), 0))
        return self.tables[s, position // self.config.page_size] * self.config.page_size + position % self.config.page_size


def batch(
    rng: np.random.Generator,
    layout: str,
    lengths: Any,
    *,
    page_size: int = 16,
    R: int = 128,
    P: int = 16,
    head_dim: int | None = None,
    spare_columns: int = 2,
    spare_pages: int = 3,
    k_scale: float | None = None,
) -> Batch:
    """Sequences of ``lengths`` tokens of order 1, on pages in random order among spare ones."""
    lengths = np.asarray(lengths, np.int32)
    need = -(-lengths // page_size)
    num_pages = 1 + int(need.sum()) + spare_pages
    cache_config = config(layout, R=R, P=P, head_dim=head_dim, num_pages=num_pages, page_size=page_size)
    ids = rng.permutation(np.arange(1, num_pages))
    junk = np.array([*JUNK_IDS, num_pages, num_pages + 1, int(ids[0])])
    tables = rng.choice(junk, (len(lengths), int(need.max(initial=0)) + spare_columns)).astype(np.int32)
    used = np.zeros(cache_config.capacity, bool)
    first = 0
    for s, count in enumerate(need):
        own = tables[s, :count] = ids[first : first + count]
        position = np.arange(lengths[s])
        used[own[position // page_size] * page_size + position % page_size] = True
        first += count
    c_kv, k_rope = (rng.standard_normal((cache_config.capacity, width)).astype(np.float32) for width in (R, P))
    rows = oracle_rows(cache_config.layout, c_kv, k_rope, k_scale)
    index, pages = cache_config.index_layout, None
    if index is not None:
        keys = rng.standard_normal((num_pages, page_size, index.head_dim)).astype(np.float32)
        pages = np.stack([reference.encode_index_page(page, index.dialect, index.scale_mode) for page in keys])
    return Batch(cache_config, tables, lengths, used, rows, pages)


def queries(rng: np.random.Generator, *lead: int, R: int = 128, P: int = 16, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Random q_latent [*lead, R] and q_rope [*lead, P]; the last of ``lead`` are the heads."""
    parts = (rng.standard_normal((*lead, width)).astype(np.float32) for width in (R, P))
    # Rounded by numpy: each shape would be a program of its own.
    latent, rope = (jnp.asarray(part.astype(jnp.dtype(dtype))) for part in parts)
    return latent, rope


def relative_error(got: Any, want: np.ndarray) -> float:
    """||got - want|| / ||want|| over the finite numbers; infinite unless NaN and infinities stand in the same places."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    if (
        got.shape != want.shape
        or not np.array_equal(got[~finite], want[~finite], equal_nan=True)
        or not np.isfinite(got[finite]).all()
    ):
        return float("inf")
    norm = float(np.linalg.norm(want[finite]))
    return float(np.linalg.norm(got[finite] - want[finite])) / (norm or 1.0)


def check(got: tuple[Any, Any], want: tuple[np.ndarray, np.ndarray], tolerance: float = 1e-6, lse_tolerance: float = 1e-6) -> None:
    """Output and lse against the oracle's; ``tolerance`` is for the output; lse gets float32's 1e-6 by default."""
    assert jnp.asarray(got[1]).dtype == jnp.float32
    for name, a, b, bound in zip(("out", "lse"), got, want, (tolerance, lse_tolerance), strict=True):
        error = relative_error(a, b)
        assert error <= bound, f"{name}: relative error {error:.1e}"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two (out, lse) pairs are equal bit for bit."""
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True))


def call_cost(fn: Callable[..., Any], *args: Any) -> tuple[tuple[Any, ...], int]:
    """What a call costs as lowered and as compiled, and the size of its largest intermediate."""
    traced = jax.jit(fn).trace(*args)
    lowered = traced.lower()
    compiled = lowered.compile()
    before: Any = lowered.cost_analysis()
    after: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    # Bytes are those of the program as lowered: for the compiled one XLA on a CPU counts a fused gather as all of its operand.
    cost = before["bytes accessed"], before["flops"], after["flops"], memory.temp_size_in_bytes
    # Refusing vmap passes the pool through; whatever else is of its size would be a copy.
    made = [v.aval.size for eqn in equations(traced.jaxpr) if eqn.primitive.name != "custom_vmap_call" for v in eqn.outvars]
    return cost, max(made)


# ---- the operations by name, and the oracle of each --------------------------------------------------------------------


def interpreted(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` by its Pallas kernel, jitted. Hardly optimised: interpreted kernels take seconds to compile and no time to run."""
    names = [name for name in ("num_splits", "out_dtype") if name in inspect.signature(op).parameters]
    fn = functools.partial(op, implementation="pallas")
    return jax.jit(fn, static_argnames=names, compiler_options={"xla_backend_optimization_level": 0})


def tolerances(layout: str, query_dtype: Any) -> tuple[float, float]:
    """Relative errors allowed for output and lse against the oracle on dequantised rows.

    Products with float32 on either side are made in float32. Others round each softmax weight to the 8 bits of a bfloat16 or the 11
    of a float16 before it meets the values, which puts the output up to 2^-9 off; scales that are no powers of two may round the
    logits as well.
    """
    if layout == "plain_float32" or jnp.dtype(query_dtype) == jnp.float32:
        return 1e-5, 1e-6
    return 3e-3, 1e-3


def sums(new: Any) -> np.ndarray:
    """cu_q_lens of the numbers of new tokens."""
    return np.concatenate([[0], np.cumsum(new)]).astype(np.int32)


def floats(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as float32 of numpy, which the oracle takes."""
    return np.asarray(a, np.float32), np.asarray(b, np.float32)


def decode_oracle(case: Batch, q: tuple[Any, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What decoding ``q`` has to give."""
    scale = options.pop("softmax_scale", case.config.geometry.softmax_scale)
    return reference.decode(*floats(*q), *case.values(), case.tables, case.lengths, scale, **options)


def prefill_oracle(case: Batch, q: tuple[Any, Any], cu: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What prefilling ``q`` has to give."""
    scale = case.config.geometry.softmax_scale
    return reference.dense(*floats(*q), *case.values(), case.tables, case.lengths, cu, scale, **options)


def sparse_oracle(
    case: Batch, q: tuple[Any, Any], slots: Any, lengths: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What attending to ``slots`` has to give."""
    return reference.sparse(*floats(*q), *case.values(), slots, lengths, case.config.geometry.softmax_scale, **options)


def logits_oracle(case: Batch, q: Any, weights: Any, cu: np.ndarray) -> np.ndarray:
    """The indexer's logits."""
    return reference.indexer_logits(*floats(q, weights), case.keys(), case.tables, case.lengths, cu)


def listed(rng: np.random.Generator, case: Batch, num_tokens: int, lanes: int) -> np.ndarray:
    """Slots of stored tokens, some twice, with a third of the lanes no slot at all; the first token has none."""
    slots = rng.choice(np.flatnonzero(case.used), (num_tokens, lanes))
    ugly = [-1, 0, -7, -(2**31), 2**31 - 1, case.config.capacity]
    slots = np.where(rng.random(slots.shape) < 0.3, rng.choice(ugly, slots.shape), slots)
    slots[0] = -1
    return slots.astype(np.int32)
