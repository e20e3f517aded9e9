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
        cos, sin: float32[T, P/2], the rotation of each row.
        block_tables: int32[S, M].
        lengths: int32[S], including the new tokens.
        cu_q_lens: int32[S + 1].
        uniform: the number of new tokens where every sequence has as many (T = S * uniform, no padding); None: ragged.
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

    ``cu_q_lens=None``: each sequence has T / S new tokens.
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
