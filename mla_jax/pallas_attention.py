"""Attention by the Pallas kernels: checked arguments arranged as blocks of rows, one row a head of a token."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mla_jax import ragged
from mla_jax.devices import Target
from mla_jax.kernels import mla
from mla_jax.kernels.backend import require_addressable
from mla_jax.paged_attention import LatentRows
from mla_jax.queries import Queries

Attention = tuple[Float[Array, "*lead H R"], Float[Array, "*lead H"]]

PREFILL_ROWS = 64
"""Rows of a block of prefill tokens, about: as many as fill a matrix unit."""


_CODED = {"gfx942": ("e4m3fnuz",), "gfx950": ("e4m3fn", "e5m2")}
"""FP8 types that an AMD chip's matrix units read; NVIDIA's read the OCP ones from sm_89 on."""


def _coded(op: str, q: Queries, target: Target) -> bool:
    """Whether products are made in FP8.

    Raises:
        NotImplementedError: where the chip has no such products.
    """
    if q.coded is None:
        return False
    arch = target.arch or ""
    if target.backend == "rocm":
        reads = _CODED.get(arch, ())
    elif target.backend == "cuda":
        capability = arch.removeprefix("sm_")
        reads = ("e4m3fn", "e5m2") if capability.isdigit() and int(capability) >= 89 else ()
    else:
        return True
    if q.coded not in reads:
        raise NotImplementedError(
            f'{op}: compute="fp8" needs matrix units that read {q.coded}; those of {arch or target.backend} read '
            f"{', '.join(reads) or 'no FP8 type'}"
        )
    return True


def decode(
    q: Queries,
    source: LatentRows,
    tables: Int32[Array, "S M"],
    lengths: Int32[Array, "S"],
    num_splits: int | None,
    target: Target,
) -> Attention:
    """A block is a sequence with its Q tokens."""
    require_addressable("mla_decode", source.pool)
    S, Q, H, R = q.latent.shape
    seen = source.decode_visible(tables, lengths, Q)
    sequence = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[:, None], (S, Q * H))
    out, lse = mla.attend_pages(
        q.latent.reshape(S, Q * H, R),
        q.rope.reshape(S, Q * H, -1),
        source.pool,
        source.layout,
        source.layer[None],
        tables,
        sequence,
        jnp.repeat(seen, H, axis=1),
        q.factor,
        q.k_scale,
        None if q.sinks is None else jnp.broadcast_to(jnp.tile(q.sinks, Q), (S, Q * H)),
        tokens=Q,
        one_sequence=True,
        num_splits=num_splits,
        out_dtype=q.dtype,
        coded=_coded("mla_decode", q, target),
        target=target,
    )
    return out.reshape(S, Q, H, R), lse.reshape(S, Q, H)


def prefill(
    q: Queries,
    source: LatentRows,
    tables: Int32[Array, "S M"],
    lengths: Int32[Array, "S"],
    cu_q_lens: Int32[Array, "S1"],
    target: Target,
) -> Attention:
    """A block is a few tokens, of one sequence or of several; a few heads make many tokens a block, many heads one."""
    require_addressable("mla_prefill", source.pool)
    T, H, R = q.latent.shape
    S = tables.shape[0]
    owners = ragged.owners(lengths, cu_q_lens, T, source.columns(tables))
    seen = jnp.where(source.layer_exists, owners.visible, 0)
    # Tokens of no sequence come last; counted to the last sequence they keep the order within a block.
    sequence = jnp.where(owners.owned, owners.sequence, np.int32(S - 1))
    tokens = max(1, PREFILL_ROWS // H)
    padding = -T % tokens
    blocks = (T + padding) // tokens

    def rows(x: Array) -> Array:
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), mode="edge" if x.ndim == 1 else "constant")
        return jnp.repeat(x, H, axis=0).reshape(blocks, tokens * H) if x.ndim == 1 else x.reshape(blocks, tokens * H, -1)

    out, lse = mla.attend_pages(
        rows(q.latent),
        rows(q.rope),
        source.pool,
        source.layout,
        source.layer[None],
        tables,
        rows(sequence),
        rows(seen),
        q.factor,
        q.k_scale,
        None if q.sinks is None else jnp.broadcast_to(jnp.tile(q.sinks, tokens), (blocks, tokens * H)),
        tokens=tokens,
        one_sequence=tokens == 1,
        num_splits=1,
        out_dtype=q.dtype,
        coded=_coded("mla_prefill", q, target),
        target=target,
    )
    return out.reshape(-1, H, R)[:T], lse.reshape(-1, H)[:T]


def sparse(q: Queries, source: LatentRows, slots: Int32[Array, "T K"], target: Target) -> Attention:
    """A block is a token."""
    require_addressable("sparse_mla", source.pool)
    T, H, _ = q.latent.shape
    return mla.attend_slots(
        q.latent,
        q.rope,
        source.pool,
        source.layout,
        source.layer[None],
        jnp.where(source.layer_exists, slots, -1),
        q.factor,
        q.k_scale,
        None if q.sinks is None else jnp.broadcast_to(q.sinks, (T, H)),
        num_splits=None,
        out_dtype=q.dtype,
        coded=_coded("sparse_mla", q, target),
        target=target,
    )
