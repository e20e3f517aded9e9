"""Which stored rows the queries of a block see: pages of sequences in order, or listed slots."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from mla_jax.kernels import backend
from mla_jax.kernels.tiles import Place


def _static() -> Any:
    """A field that is part of a pytree's structure."""
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedKeys:
    """The first keys of one sequence or more a block, found through block tables.

    Attributes:
        tables: int32[S, M].
        sequence: int32[blocks, rows], whose keys a row sees; rows that widen a block repeat its last.
        seen: int32[blocks, rows], how many of them.
        page_size: tokens a page.
        num_pages: ids from there on are bad.
        mixed: whether a block may hold tokens of several sequences.
        differ: whether the rows of a program may be of different tokens.
    """

    tables: Int32[Array, "S M"]
    sequence: Int32[Array, "blocks rows"]
    seen: Int32[Array, "blocks rows"]
    page_size: int = _static()
    num_pages: int = _static()
    mixed: bool = _static()
    differ: bool = _static()

    @property
    def operands(self) -> Sequence[Any]:
        return (self.tables, self.sequence, self.seen)

    def walks(self, refs: Sequence[Any], block: Any, rows: Any) -> tuple[Any, Any] | None:
        """Sequences of the rows, where a block may hold tokens of several."""
        if not self.mixed:
            return None
        own = refs[1][block, rows]
        return jnp.min(own), jnp.max(own) + 1

    def visible(self, refs: Sequence[Any], block: Any, rows: Any, walk: Any) -> Int32[Array, "M"]:
        seen = refs[2][block, rows]
        return seen if walk is None else jnp.where(refs[1][block, rows] == walk, seen, 0)

    def fetch(self, refs: Sequence[Any], block: Any, walk: Any, tile: Any, size: int) -> Any:
        """Page ids: one where a tile lies within a page, else one a row."""
        sequence = refs[1][block, 0] if walk is None else walk
        shift, last = np.int32(self.page_size.bit_length() - 1), np.int32(self.tables.shape[1] - 1)
        position = tile * size
        if self.page_size < size:
            position = position + jnp.arange(size, dtype=jnp.int32)
        # Within the table also for the tile after the last, which is fetched and not used.
        return refs[0][sequence, jnp.clip(position >> shift, 0, last)]

    def place(self, located: Any, layer: Any, tile: Any, size: int, limit: Any) -> Place:
        start = tile * size
        lane = jnp.arange(size, dtype=jnp.int32)
        good = (located > 0) & (located < self.num_pages)
        page = jnp.where(good, located, 0)
        in_page = np.int32(self.page_size - 1)
        offset = (start & in_page) if self.page_size >= size else (start + lane) & in_page
        return Place(layer, page, offset, good & (lane < limit - start))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ListedKeys:
    """The slots listed for each block, one block a token.

    Attributes:
        slots: int32[blocks, K]; those outside 1..capacity-1 are passed over.
        needed: int32[blocks], lanes up to the last valid slot.
        page_size: tokens a page.
        capacity: slots of the cache.
    """

    slots: Int32[Array, "blocks K"]
    needed: Int32[Array, "blocks"]
    page_size: int = _static()
    capacity: int = _static()

    @property
    def differ(self) -> bool:
        """All rows of a program are heads of one token."""
        return False

    @property
    def operands(self) -> Sequence[Any]:
        return (self.slots, self.needed)

    def walks(self, refs: Sequence[Any], block: Any, rows: Any) -> None:
        return None

    def visible(self, refs: Sequence[Any], block: Any, rows: Any, walk: Any) -> Int32[Array, "1"]:
        return refs[1][backend.span(block, 1)]

    def fetch(self, refs: Sequence[Any], block: Any, walk: Any, tile: Any, size: int) -> Any:
        # The tile after the last is fetched too, and not used.
        tile = jnp.minimum(tile, np.int32(self.slots.shape[1] // size - 1))
        return refs[0][block, backend.span(tile * size, size)]

    def place(self, located: Any, layer: Any, tile: Any, size: int, limit: Any) -> Place:
        good = (located > 0) & (located < self.capacity)
        slot = jnp.where(good, located, 0)
        return Place(layer, slot >> np.int32(self.page_size.bit_length() - 1), slot & np.int32(self.page_size - 1), good)
