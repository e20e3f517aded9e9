"""Dense and sparse MLA attention: queries and stored rows in, output and lse out. Each is blocks of rows for :mod:`attend`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from mla_jax.devices import Target
from mla_jax.kernels import tiles
from mla_jax.kernels.attend import LN_2, LOG2_E, NEG_INF, WEIGHT_SCALE, Keys, arrange_queries, attend
from mla_jax.kernels.keys import ListedKeys, PagedKeys
from mla_jax.kernels.tuning import AttendTuning, attend_tuning, default_splits
from mla_jax.layout import CacheLayout

Attention = tuple[Shaped[Array, "blocks rows R"], Float[Array, "blocks rows"]]


def attend_pages(
    latent: Float[Array, "blocks rows R"],
    rope: Float[Array, "blocks rows P"],
    pool: Shaped[Array, "layers pages page words"],
    layout: CacheLayout,
    layer: Int32[Array, "1"],
    tables: Int32[Array, "S M"],
    sequence: Int32[Array, "blocks rows"],
    seen: Int32[Array, "blocks rows"],
    factor: Float[Array, ""],
    k_scale: Float[Array, ""] | None,
    sinks: Float[Array, "blocks rows"] | None,
    *,
    tokens: int,
    one_sequence: bool,
    num_splits: int | None,
    out_dtype: Any,
    coded: bool,
    target: Target,
) -> Attention:
    """Blocks of rows that see the first ``seen`` keys of their sequences.

    Args:
        latent: [blocks, rows, R].
        rope: [blocks, rows, P].
        pool: all stored rows.
        layout: of the stored rows.
        layer: int32[1], in range.
        tables: int32[S, M].
        sequence: int32[blocks, rows], ascending within a block.
        seen: int32[blocks, rows].
        factor: multiplies the logits.
        k_scale: multiplies the output, or None.
        sinks: logits without a value, one a row, or None.
        tokens: of a block, each with as many rows.
        one_sequence: all rows of a block are of one sequence.
        num_splits: parts the keys are divided into; None: by shapes.
        out_dtype: of the output.
        coded: queries and weights are rounded to the FP8 type of raw rows, and products are made in it.
        target: the device.

    Raises:
        NotImplementedError: where the target has no such kernel, or cannot address the pool or read the layout.
    """
    page_size, num_pages = pool.shape[2], pool.shape[1]
    wide = _wide(latent, rope, layout, coded)
    tuning = attend_tuning(target, "dense", layout, latent.shape[1], wide, coded, tokens)
    padding = -latent.shape[1] % tuning.rows
    sequence, seen = (jnp.pad(x, ((0, 0), (0, padding)), mode="edge") for x in (sequence, seen))
    # A program whose rows are all of one token sees what the token sees.
    differ = tokens > 1 and (latent.shape[1] // tokens) % tuning.rows != 0
    keys = PagedKeys(tables, sequence, seen, page_size, num_pages, mixed=not one_sequence, differ=differ)
    return _run(
        latent,
        rope,
        pool,
        layer,
        keys,
        factor,
        k_scale,
        sinks,
        name="mla_paged",
        layout=layout,
        columns=tables.shape[1] * page_size,
        num_splits=num_splits,
        out_dtype=out_dtype,
        wide=wide,
        coded=coded,
        target=target,
        tuning=tuning,
    )


def attend_slots(
    latent: Float[Array, "T H R"],
    rope: Float[Array, "T H P"],
    pool: Shaped[Array, "layers pages page words"],
    layout: CacheLayout,
    layer: Int32[Array, "1"],
    slots: Int32[Array, "T K"],
    factor: Float[Array, ""],
    k_scale: Float[Array, ""] | None,
    sinks: Float[Array, "T H"] | None,
    *,
    num_splits: int | None,
    out_dtype: Any,
    coded: bool,
    target: Target,
) -> Attention:
    """Tokens whose heads see the rows at ``slots``; arguments as in :func:`attend_pages`."""
    page_size, num_pages = pool.shape[2], pool.shape[1]
    wide = _wide(latent, rope, layout, coded)
    tuning = attend_tuning(target, "sparse", layout, latent.shape[1], wide, coded)
    capacity = page_size * num_pages
    slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % tuning.keys)), constant_values=-1)
    lane = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    needed = jnp.max(jnp.where((slots > 0) & (slots < capacity), lane, 0), axis=1)
    keys = ListedKeys(slots, needed, page_size, capacity)
    return _run(
        latent,
        rope,
        pool,
        layer,
        keys,
        factor,
        k_scale,
        sinks,
        name="mla_sparse",
        layout=layout,
        columns=slots.shape[1],
        num_splits=num_splits,
        out_dtype=out_dtype,
        wide=wide,
        coded=coded,
        target=target,
        tuning=tuning,
    )


def _wide(latent: Array, rope: Array, layout: CacheLayout, coded: bool) -> bool:
    """Whether products are made in float32."""
    if coded:
        return False
    return layout.name == "plain_float32" or jnp.float32 in (latent.dtype, rope.dtype)


@jax.jit(static_argnames=("name", "layout", "columns", "num_splits", "out_dtype", "wide", "coded", "target", "tuning"))
def _run(
    latent: Array,
    rope: Array,
    pool: Array,
    layer: Array,
    keys: Keys,
    factor: Array,
    k_scale: Array | None,
    sinks: Array | None,
    *,
    name: str,
    layout: CacheLayout,
    columns: int,
    num_splits: int | None,
    out_dtype: Any,
    wide: bool,
    coded: bool,
    target: Target,
    tuning: AttendTuning,
) -> Attention:
    """The kernel, what its operands need before it and its results after it. Jitted, so that eager calls compile once."""
    blocks, rows, _ = latent.shape
    fmt = tiles.row_format(
        layout, wide=wide, native=tuning.native_fp8, joined=tuning.join_planes, coded=coded, pieces=tuning.pieces
    )
    q = arrange_queries(latent, rope, factor, fmt, tuning.rows)
    if num_splits is None:
        num_splits = default_splits(tuning, blocks * (q.factor.shape[1] // tuning.rows), columns)
    num_splits = max(1, min(num_splits, -(-columns // tuning.keys)))
    value_factor = jnp.full((1,), fmt.factor / WEIGHT_SCALE if coded else fmt.factor, jnp.float32)
    if k_scale is not None:
        value_factor = value_factor * k_scale
    is_last = num_splits == 1 and sinks is None
    outs, lses = attend(
        q,
        keys,
        pool,
        layout,
        fmt,
        layer,
        value_factor,
        num_splits,
        out_dtype if is_last else jnp.float32,
        name=name,
        tuning=tuning,
        target=target,
    )
    outs, lses = outs[:, :, :, :rows], lses[:, :, :rows]
    out, lse = (outs[0], lses[0]) if num_splits == 1 else _merge(outs, lses)
    if sinks is not None:
        share = np.float32(1) / (np.float32(1) + jnp.exp2((sinks - lse) * LOG2_E))
        out = jnp.where((lse == NEG_INF)[:, None, :, None], np.float32(0), out * share[:, None, :, None])
    return fmt.join_latent(jnp.swapaxes(out, 1, 2)).astype(out_dtype), lse


def _merge(
    outs: Float[Array, "splits blocks planes rows width"], lses: Float[Array, "splits blocks rows"]
) -> tuple[Float[Array, "blocks planes rows width"], Float[Array, "blocks rows"]]:
    """The splits as one, in their order and element by element, so that no other row has a part in a row's bits."""
    parts: Sequence[Any] = [lses[i] for i in range(lses.shape[0])]
    largest = parts[0]
    for part in parts[1:]:
        largest = jnp.maximum(largest, part)
    base = jnp.where(largest == NEG_INF, np.float32(0), largest)
    weights = [jnp.exp2((part - base) * LOG2_E) for part in parts]
    total: Any = weights[0]
    out: Any = outs[0] * weights[0][:, None, :, None]
    for i, weight in enumerate(weights[1:], 1):
        total = total + weight
        out = out + outs[i] * weight[:, None, :, None]
    is_empty = total == 0
    out = out / jnp.where(is_empty, np.float32(1), total)[:, None, :, None]
    return out, jnp.where(is_empty, NEG_INF, base + jnp.log2(total) * LN_2)
