"""From sequences to tokens and from positions to slots: the glue between indexer logits, their top-k and sparse attention."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from mla_jax import checks, ragged
from mla_jax.arrays import ArrayIn


def expand_rows(
    block_tables: Int32[ArrayIn, "S M"], lengths: Int32[ArrayIn, "S"], cu_q_lens: Int32[ArrayIn, "S1"], T: int
) -> tuple[Int32[Array, "T M"], Int32[Array, "T"]]:
    """Per sequence to per token: each token's block table, and how many keys it sees.

    New token j of the n of a sequence sees max(lengths - n + j + 1, 0) keys; the bound M * page_size is left to the readers, as the
    page size is not known here. Tokens past cu_q_lens[-1] see 0 and get a table of null pages.

    Args:
        block_tables: int32[S, M].
        lengths: int32[S], new tokens included.
        cu_q_lens: int32[S + 1], ascending from 0.
        T: how many tokens, a static int.

    Returns:
        block_tables int32[T, M] and visible_lengths int32[T].

    Raises:
        ValueError: for other shapes or a negative T.
        TypeError: for anything but integers.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> tables, lengths, cu_q_lens = jnp.array([[1, 2], [3, 0]]), jnp.array([7, 2]), jnp.array([0, 2, 3])
        >>> of_tokens, visible = jax.jit(mla.expand_rows, static_argnames="T")(tables, lengths, cu_q_lens, T=4)
        >>> of_tokens.tolist(), visible.tolist()
        ([[1, 2], [1, 2], [3, 0], [0, 0]], [6, 7, 2, 0])
    """
    num_tokens = checks.static_int("expand_rows", "T", T, 0)
    tables, lengths, cu = sequences("expand_rows", block_tables, lengths, cu_q_lens)
    if tables.shape[0] == 0:
        return jnp.zeros((num_tokens, tables.shape[1]), jnp.int32), jnp.zeros(num_tokens, jnp.int32)
    owners = ragged.owners(lengths, cu, num_tokens)
    return jnp.where(owners.owned[:, None], tables[owners.sequence], 0), owners.visible


def positions_to_slots(
    positions: Int32[ArrayIn, "T K"], block_tables: Int32[ArrayIn, "T M"], page_size: int, num_pages: int | None = None
) -> Int32[Array, "T K"]:
    """slot = page * page_size + offset of positions in a sequence, -1 where there is none.

    There is none for positions < 0 or >= M * page_size, and on bad pages: ids <= 0, ids >= ``num_pages``, and ids whose slots int32
    cannot hold.

    Args:
        positions: int32[T, K], as :func:`mla_jax.select_topk` gives them; -1 stays -1.
        block_tables: int32[T, M], one row a token, as :func:`mla_jax.expand_rows` gives them.
        page_size: tokens a page, a power of two.
        num_pages: pages of the cache, if they are to be checked here; readers drop slots beyond the cache in any case.

    Returns:
        int32[T, K].

    Raises:
        ValueError: for other shapes, a page_size that is no power of two, num_pages < 1.
        TypeError: for anything but integers.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mla_jax as mla
        >>> to_slots = jax.jit(functools.partial(mla.positions_to_slots, page_size=4))
        >>> to_slots(jnp.array([[0, 5, -1, 8]]), jnp.array([[7, 2]])).tolist()  # 7 * 4 + 0 and 2 * 4 + 1
        [[28, 9, -1, -1]]
    """
    op = "positions_to_slots"
    size = checks.page_size(op, page_size)
    places, tables = checks.integers(op, "positions", positions, 2), checks.integers(op, "block_tables", block_tables, 2)
    checks.check_shapes(op, {"positions": ("T", "K"), "block_tables": ("T", "M")}, positions=places, block_tables=tables)
    limit = 2**31 // size
    if num_pages is not None:
        limit = min(limit, checks.static_int(op, "num_pages", num_pages, 1))
    if tables.shape[1] == 0:
        return jnp.full(places.shape, -1, jnp.int32)
    column = places >> np.int32(size.bit_length() - 1)
    page = jnp.take_along_axis(tables, jnp.clip(column, 0, tables.shape[1] - 1), axis=1)
    # Columns are compared, not positions: M * page_size may exceed int32.
    exists = (places >= 0) & (column < tables.shape[1]) & (page > 0) & (page <= np.int32(limit - 1))
    return jnp.where(exists, page * np.int32(size) + (places & np.int32(size - 1)), -1)


def sequences(
    op: str, block_tables: Int32[ArrayIn, "S M"], lengths: Int32[ArrayIn, "S"], cu_q_lens: Int32[ArrayIn, "S1"]
) -> tuple[Int32[Array, "S M"], Int32[Array, "S"], Int32[Array, "S1"]]:
    """The three arrays that describe a ragged batch, checked."""
    tables = checks.integers(op, "block_tables", block_tables, 2)
    counts = checks.integers(op, "lengths", lengths, 1)
    cu = checks.integers(op, "cu_q_lens", cu_q_lens, 1)
    shapes = {"block_tables": ("S", "M"), "lengths": ("S",), "cu_q_lens": (tables.shape[0] + 1,)}
    checks.check_shapes(op, shapes, block_tables=tables, lengths=counts, cu_q_lens=cu)
    return tables, counts, cu
