"""Ragged batches: which sequence owns a new token, how many keys it sees, and the walk over the keys of blocks of tokens.

Sequence s owns the tokens cu_q_lens[s] .. cu_q_lens[s + 1] - 1. Token j of its n sees the first lengths[s] - n + j + 1 keys.
Whatever ``cu_q_lens`` and ``lengths`` hold, sequences and counts stay in range, so a reader never leaves its tables.

Letters: T tokens, S sequences, G lanes, B tokens of a block. The lanes of a group advance together, each on a block of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped

INT32_MAX = np.int32(2**31 - 1)

Carry = TypeVar("Carry")


class Owners(NamedTuple):
    """For each token its sequence and the number of keys it sees, 0 and 0 for a token of no sequence, and whether it has one."""

    sequence: Int32[Array, "T"]
    visible: Int32[Array, "T"]
    owned: Bool[Array, "T"]


def owners(
    lengths: Int32[Array, "S"], cu_q_lens: Int32[Array, "S1"], num_tokens: int, limit: int | np.integer = INT32_MAX
) -> Owners:
    """The owners of ``num_tokens`` tokens, none of which sees more than ``limit`` keys. S must not be 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Exact for ascending cu_q_lens; for any other something in range, which the comparison below then rejects. Comparing with
    # all of them is one fused kernel; a binary search would be a loop that a GPU's host has to drive.
    sequence = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, np.int32(lengths.shape[0] - 1))
    end = cu_q_lens[sequence + 1]
    owned = (cu_q_lens[sequence] <= token) & (token < end)
    # A negative length sees nothing whatever is subtracted; at 0 the subtraction cannot wrap.
    seen = jnp.clip(jnp.maximum(lengths[sequence], 0) - (end - token - 1), 0, int(limit))
    return Owners(jnp.where(owned, sequence, 0), jnp.where(owned, seen, 0), owned)


# ---- blocks of tokens ----------------------------------------------------------------------------------------------------

MAX_BLOCK = 64
"""Tokens of a group: lanes times tokens a block."""

GROUP_FLOATS = 2**23
"""Numbers of the largest temporary of a step, about: 32 MiB of float32."""

MAX_CHUNK = 1024
MIN_CHUNK = 16


def power_of_two_below(n: int) -> int:
    """The largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


class Plan(NamedTuple):
    """``tokens`` padded to groups * lanes * block; a group is computed at once."""

    tokens: int
    groups: int
    lanes: int
    block: int

    def split(self, x: Shaped[Array, "T *rest"]) -> Shaped[Array, "groups G B *rest"]:
        padding = self.groups * self.lanes * self.block - self.tokens
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(self.groups, self.lanes, self.block, *x.shape[1:])

    def join(self, x: Shaped[Array, "groups G B *rest"]) -> Shaped[Array, "T *rest"]:
        return x.reshape(-1, *x.shape[3:])[: self.tokens]

    def map(self, fn: Callable[..., Any], *arrays: Array) -> Any:
        """``fn`` of each group's [G, B, ...] parts of ``arrays`` [T, ...], one group after another; results [T, ...]."""
        parts = jax.lax.map(lambda group: fn(*group), tuple(self.split(x) for x in arrays))
        return jax.tree.map(self.join, parts)


def plan(num_tokens: int, block: int, max_lanes: int) -> Plan:
    """Blocks of ``block`` tokens in as few groups of at most ``max_lanes`` as there can be, of equal size."""
    blocks = -(-num_tokens // block)
    groups = -(-blocks // max_lanes)
    return Plan(num_tokens, groups, -(-blocks // groups), block)


def block_tokens(num_tokens: int, num_sequences: int) -> int:
    """Tokens a block: about a sequence's share, so that a block meets few sequences and its tokens share most keys."""
    return min(power_of_two_below(max(num_tokens // num_sequences, 1)), MAX_BLOCK)


def chunk_keys(columns: int, floats_per_key: int) -> int:
    """Keys handled together, a power of two: as many as keep a step's temporaries in bounds and the tables can hold."""
    fits = power_of_two_below(max(GROUP_FLOATS // floats_per_key, 1))
    enough = 1 << max(columns - 1, 0).bit_length()
    return min(max(fits, MIN_CHUNK), MAX_CHUNK, enough)


# ---- the walk ------------------------------------------------------------------------------------------------------------


def fold_chunks(visible: Int32[Array, "G B"], chunk: int, visit: Callable[[Carry, Int32[Array, ""]], Carry], carry: Carry) -> Carry:
    """``visit(carry, start)`` for each chunk of keys that any token sees, ``start`` the first position of the chunk."""
    count = ((jnp.max(visible) - 1) >> np.int32(chunk.bit_length() - 1)) + 1
    return jax.lax.fori_loop(jnp.int32(0), count, lambda c, carry: visit(carry, c * np.int32(chunk)), carry)


def fold_sequences(
    sequence: Int32[Array, "G B"],
    visible: Int32[Array, "G B"],
    num_sequences: int,
    visit: Callable[[Carry, Int32[Array, "G"], Int32[Array, "G B"]], Carry],
    carry: Carry,
) -> Carry:
    """``visit(carry, sequences, seen)`` until each lane has met every sequence of its block.

    ``sequences`` is one a lane; ``seen`` is ``visible`` for the tokens that belong to it and 0 for the others, so a lane that is
    done sees nothing while others go on.
    """
    first = jnp.min(jnp.where(visible > 0, sequence, np.int32(num_sequences)), axis=1)
    last = jnp.max(jnp.where(visible > 0, sequence, np.int32(-1)), axis=1)

    def turn(k: Int32[Array, ""], carry: Carry) -> Carry:
        current = first + k
        seen = jnp.where(sequence == current[:, None], visible, 0)
        return visit(carry, jnp.minimum(current, np.int32(num_sequences - 1)), seen)

    return jax.lax.fori_loop(jnp.int32(0), jnp.max(last - first) + 1, turn, carry)
