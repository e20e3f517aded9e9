"""Attention of lanes of tokens over the rows of a pool, in XLA: what decode, prefill and sparse attention share.

Rows are gathered a chunk at a time by (layer, page, offset) and decoded then: nothing is as large as the pool, and what is read
grows with the keys that are seen, not with the pool.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from mla_jax import checks, ragged, rows
from mla_jax.cache import PagedMLACache
from mla_jax.layout import CacheLayout
from mla_jax.online_softmax import Partial, attend
from mla_jax.queries import Queries


@dataclasses.dataclass(frozen=True, eq=False)
class LatentRows:
    """One layer of the latent pool, to gather from.

    Attributes:
        pool: [layers, pages, page, words], the whole pool.
        layer: int32 scalar in range.
        layer_exists: whether the layer asked for is in range; readers show no key otherwise.
        layout: the rows' layout.
        page_size: tokens a page.
    """

    pool: Shaped[Array, "layers pages page words"]
    layer: Int32[Array, ""]
    layer_exists: Bool[Array, ""]
    layout: CacheLayout
    page_size: int

    @property
    def num_pages(self) -> int:
        return self.pool.shape[1]

    def columns(self, tables: Int32[Array, "S M"]) -> int:
        """Keys that a table has room for, as far as int32 counts."""
        return min(tables.shape[1] * self.page_size, int(ragged.INT32_MAX))

    def decode_visible(self, tables: Int32[Array, "S M"], lengths: Int32[Array, "S"], Q: int) -> Int32[Array, "S Q"]:
        """How many keys each of Q new tokens a sequence sees."""
        later = jnp.arange(Q, dtype=jnp.int32) - np.int32(Q - 1)
        visible = jnp.clip(jnp.maximum(lengths, 0)[:, None] + later, 0, self.columns(tables))
        return jnp.where(self.layer_exists, visible, 0)

    def gather(
        self, pages: Int32[Array, "G C"], offsets: Int32[Array, "G C"]
    ) -> tuple[Float[Array, "G C R"], Float[Array, "G C P"]]:
        """Decoded rows; the indices must be in range."""
        words = self.pool.at[self.layer, pages, offsets].get(mode="promise_in_bounds")
        return rows.decode_rows(self.layout, words)


def latent_rows(cache: PagedMLACache, layer: Int32[Array, "1"]) -> LatentRows:
    """The rows of ``layer``, as ``checks.layer_index`` gives it."""
    config = cache.config
    pool = checks.refuse_vmap(cache.kv)
    safe = jnp.clip(layer[0], 0, config.num_layers - 1)
    return LatentRows(pool, safe, layer[0] == safe, config.layout, config.page_size)


def lane_floats(config_width: int, block: int, heads: int) -> int:
    """Numbers that one key costs in one lane: its row, or a logit for each query of the lane."""
    return max(config_width, block * heads)


def attend_pages(
    partial: Partial,
    q: tuple[Float[Array, "G B H R"], Float[Array, "G B H P"]],
    asked: Queries,
    source: LatentRows,
    tables: Int32[Array, "S M"],
    sequences: Int32[Array, "G"],
    visible: Int32[Array, "G B"],
    chunk: int,
) -> Partial:
    """``partial`` with the visible keys of one sequence a lane, found through its block table. M must not be 0."""
    lane = jnp.arange(chunk, dtype=jnp.int32)
    shift, last_column = np.int32(source.page_size.bit_length() - 1), np.int32(tables.shape[1] - 1)

    def visit(partial: Partial, start: Int32[Array, ""]) -> Partial:
        position = start + lane
        column = jnp.clip(position >> shift, 0, last_column)
        pages = tables[sequences[:, None], column[None, :]]
        good = (pages > 0) & (pages < source.num_pages)
        offsets = jnp.broadcast_to(position & np.int32(source.page_size - 1), pages.shape)
        # Counted from the start of the chunk: a position may wrap beyond the largest int32.
        mask = good[:, None, :] & (lane < (visible - start)[:, :, None])
        keys = source.gather(jnp.where(good, pages, 0), offsets)
        return attend(partial, *q, *keys, mask, asked.factor, asked.precision, asked.coded)

    return ragged.fold_chunks(visible, chunk, visit, partial)
