"""Step: what is the same in every layer of one call, computed once."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mla_jax.layers.rope import RopeSpec, cos_sin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Where T new tokens of S sequences stand: sequence s owns rows cu_q_lens[s] .. cu_q_lens[s + 1] - 1, in order.

    Attributes:
        slots: int32[T], where each row is written; 0 (dropped by writes) for padding rows.
        positions: int32[T], each row's place in its sequence; 0 for padding rows.
        valid: bool[T], False for padding rows, those from cu_q_lens[S] on.
        cos: float32[T, P/2], the rotation of each row.
        sin: float32[T, P/2], likewise.
        block_tables: int32[S, M], page ids of each sequence in order.
        lengths: int32[S], including the new tokens.
        cu_q_lens: int32[S + 1].
        uniform: the number of new tokens where every sequence has as many (T = S * uniform, no padding); None: ragged.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> batch = jnp.array([4, 8]), jnp.array([[1], [2]]), jnp.array([1, 1])
        >>> step = jax.jit(lambda: layers.make_step(*batch, None, layers.RopeSpec(dim=4, theta=10000.0)))()
        >>> isinstance(step, layers.Step), step.uniform, step.cu_q_lens.tolist()
        (True, 1, [0, 1, 2])
    """

    slots: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    valid: Bool[Array, "T"]
    cos: Float[Array, "T pairs"]
    sin: Float[Array, "T pairs"]
    block_tables: Int32[Array, "S M"]
    lengths: Int32[Array, "S"]
    cu_q_lens: Int32[Array, "S1"]
    uniform: int | None = dataclasses.field(default=None, metadata={"static": True})


def make_step(
    slots: Int32[Array, "T"],
    block_tables: Int32[Array, "S M"],
    lengths: Int32[Array, "S"],
    cu_q_lens: Int32[Array, "S1"] | None,
    rope: RopeSpec,
) -> Step:
    """The step of a batch: token j of the n new ones of a sequence stands at position ``lengths - n + j``.

    Args:
        slots: int32[T], where each row is written.
        block_tables: int32[S, M], page ids of each sequence in order, padded with 0 or -1.
        lengths: int32[S], tokens of each sequence, the new ones included.
        cu_q_lens: int32[S + 1], 0 and the running sum of new tokens; None: each sequence has T / S.
        rope: the rotation.

    Returns:
        The step. Rows from cu_q_lens[S] on are padding.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> batch = jnp.array([4, 5, 8, 9]), jnp.array([[1], [2]]), jnp.array([7, 1]), jnp.array([0, 2, 3])
        >>> step = jax.jit(lambda: layers.make_step(*batch, layers.RopeSpec(dim=4, theta=10000.0)))()
        >>> step.positions.tolist(), step.slots.tolist(), step.valid.tolist()
        ([5, 6, 0, 0], [4, 5, 8, 0], [True, True, True, False])
    """
    num_rows, num_sequences = slots.shape[0], lengths.shape[0]
    uniform = None
    if cu_q_lens is None:
        uniform = num_rows // num_sequences
        cu_q_lens = jnp.arange(num_sequences + 1, dtype=jnp.int32) * uniform
    row = jnp.arange(num_rows, dtype=jnp.int32)
    valid = row < cu_q_lens[-1]
    before = cu_q_lens[1:] <= row[:, None]
    sequence = jnp.minimum(jnp.sum(before, axis=1, dtype=jnp.int32), num_sequences - 1)
    positions = jnp.where(valid, lengths[sequence] - cu_q_lens[sequence + 1] + row, 0)
    cos, sin = cos_sin(rope, positions)
    return Step(
        slots=jnp.where(valid, slots, 0),
        positions=positions,
        valid=valid,
        cos=cos,
        sin=sin,
        block_tables=block_tables,
        lengths=lengths,
        cu_q_lens=cu_q_lens,
        uniform=uniform,
    )
