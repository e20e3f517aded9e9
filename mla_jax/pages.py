"""PageAllocator: which pages hold whose tokens. Host side, numpy alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_jax import checks
from mla_jax.config import CacheConfig

Int32Array = NDArray[np.int32]


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free. The allocator is as it was.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> allocator = mla.PageAllocator(config)
        >>> try:
        ...     allocator.allocate(9)
        ... except mla.OutOfPagesError as error:
        ...     print(error)
        9 tokens need 3 more pages of 4 tokens, 2 are free of 2
    """


class Allocation(NamedTuple):
    """The pages of one sequence, and the slot of each of its tokens. The arrays are read-only.

    Attributes:
        pages: int32[M], page ids in order: a row of a block table.
        slots: int32[T], page * page_size + offset of each token, in order.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> pages, slots = mla.PageAllocator(config).allocate(5)
        >>> pages.tolist(), slots.tolist()
        ([1, 2], [4, 5, 6, 7, 8])
    """

    pages: Int32Array
    slots: Int32Array


class PageAllocator:
    """Hands out the pages of a cache, never page 0.

    An allocation is known by what it is, not by the ids in it: one that was freed or extended is refused, even when its pages have
    been handed out again since. Its pages alone will do too, and are known by their ids. An operation that raises has changed
    nothing. Host side, numpy alone: nothing here is traced.

    Args:
        config: the cache's config, of which page_size and num_pages count.

    Raises:
        TypeError: if ``config`` is no CacheConfig.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> allocator = mla.PageAllocator(config)
        >>> prompt = allocator.allocate(4)              # write_kv(cache, layer, prompt.slots, ...)
        >>> grown = allocator.extend(prompt, 1)         # the new token's slot is grown.slots[-1]
        >>> int(grown.slots[-1]), allocator.num_free_pages
        (8, 0)
        >>> allocator.block_tables([grown], num_columns=3).tolist()
        [[1, 2, 0]]
        >>> allocator.free(grown)
        >>> allocator.num_free_pages
        2
    """

    def __init__(self, config: CacheConfig) -> None:
        checks.instance("PageAllocator", "config", config, CacheConfig)
        self._page_size = config.page_size
        self._num_pages = config.num_pages
        self._free = list(range(config.num_pages - 1, 0, -1))
        # First page -> the allocation that holds it. An allocation without pages holds nothing to keep track of.
        self._held: dict[int, Allocation] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    def allocate(self, n_tokens: int) -> Allocation:
        """Pages for a new sequence of ``n_tokens`` tokens; none for 0.

        Args:
            n_tokens: tokens, an int >= 0.

        Returns:
            Its pages, int32[ceil(n_tokens / page_size)], and the slots of its tokens, int32[n_tokens].

        Raises:
            OutOfPagesError: if too few pages are free.
            ValueError: unless n_tokens is an int >= 0.
        """
        return self._take(np.zeros(0, np.int32), 0, _count("allocate", n_tokens))

    def extend(self, allocation: Allocation | Int32Array, n_tokens: int) -> Allocation:
        """The allocation with room for ``n_tokens`` more tokens, the last ``n_tokens`` of its slots.

        The last page is filled before another is taken. The old allocation is used up: only the new one can be extended or freed.

        Args:
            allocation: one that is held, or its pages.
            n_tokens: more tokens, an int >= 0.

        Returns:
            The new allocation, old tokens first.

        Raises:
            OutOfPagesError: if too few pages are free; the old allocation then stays good.
            ValueError: unless n_tokens is an int >= 0, and for an allocation that is not held (any more).
        """
        held = self._check("extend", allocation)
        return self._take(held.pages, held.slots.size, _count("extend", n_tokens))

    def free(self, allocation: Allocation | Int32Array) -> None:
        """Takes the pages back.

        Args:
            allocation: one that is held, or its pages.

        Raises:
            ValueError: for an allocation that is not held (any more).
        """
        pages = self._check("free", allocation).pages
        if pages.size:
            del self._held[int(pages[0])]
            self._free.extend(int(page) for page in reversed(pages))

    def block_tables(self, allocations: Sequence[Allocation], num_columns: int | None = None) -> Int32Array:
        """The pages of each allocation, padded with the null page: the ``block_tables`` of the attentions.

        Args:
            allocations: S of them.
            num_columns: M; None: the pages of the largest.

        Returns:
            int32[S, M].

        Raises:
            ValueError: if M is too small, and for an allocation that is not held (any more).
        """
        pages = [self._check("block_tables", allocation).pages for allocation in allocations]
        needed = max((p.size for p in pages), default=0)
        columns = needed if num_columns is None else _count("block_tables", num_columns, "num_columns")
        if columns < needed:
            raise ValueError(f"block_tables: num_columns must be at least {needed}, the pages of the largest, got {num_columns}")
        tables = np.zeros((len(pages), columns), np.int32)
        for table, own in zip(tables, pages, strict=True):
            table[: own.size] = own
        return tables

    def _check(self, op: str, allocation: Allocation | Int32Array) -> Allocation:
        """The allocation that is held; given as it was handed out, or as its pages."""
        is_whole = isinstance(allocation, Allocation)
        pages = allocation.pages if is_whole else np.asarray(allocation)
        if pages.ndim != 1 or not np.issubdtype(pages.dtype, np.integer):
            raise ValueError(f"{op}: expected an Allocation of this allocator or its pages, got {allocation!r}")
        if not pages.size:
            return allocation if is_whole else Allocation(pages, pages)
        held = self._held.get(int(pages[0]))
        if held is None or not (held.pages is pages or (not is_whole and np.array_equal(held.pages, pages))):
            raise ValueError(f"{op}: the allocation of pages {pages.tolist()} is not held; was it freed or extended before?")
        return held

    def _take(self, pages: Int32Array, old_tokens: int, n_tokens: int) -> Allocation:
        tokens = old_tokens + n_tokens
        more = -(-tokens // self._page_size) - pages.size
        if more > len(self._free):
            raise OutOfPagesError(
                f"{n_tokens} tokens need {more} more pages of {self._page_size} tokens, {len(self._free)} are free "
                f"of {self._num_pages - 1}"
            )
        new = [self._free.pop() for _ in range(more)]
        pages = np.concatenate([pages, np.asarray(new, np.int32)])
        slots = pages[:, None] * np.int32(self._page_size) + np.arange(self._page_size, dtype=np.int32)
        slots = slots.reshape(-1)[:tokens].copy()
        pages.setflags(write=False)
        slots.setflags(write=False)
        allocation = Allocation(pages, slots)
        if pages.size:
            self._held[int(pages[0])] = allocation
        return allocation


def _count(op: str, value: int, name: str = "n_tokens") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{op}: {name} must be an int >= 0, got {value!r}")
    return int(value)
