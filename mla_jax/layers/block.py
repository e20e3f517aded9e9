"""Block: one transformer layer, attention and feed-forward, each behind a norm and added to the stream."""

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax.cache import PagedMLACache
from mla_jax.layers.attention import MLAttention
from mla_jax.layers.indexer import Selection
from mla_jax.layers.mlp import MLP
from mla_jax.layers.moe import MoE
from mla_jax.layers.norms import RMSNorm
from mla_jax.layers.step import Step


class BlockTrace(NamedTuple):
    """What happened inside a block, for tests and study. Nothing that goes unused is computed under jit.

    Attributes:
        attn_in, attn_out: [T, D], the attention's input after its norm, its output before the addition.
        mlp_in, mlp_out: [T, D], the same of the feed-forward block.
        selection: the tokens attended to, None for dense attention.
    """

    attn_in: Float[Array, "T D"]
    attn_out: Float[Array, "T D"]
    mlp_in: Float[Array, "T D"]
    mlp_out: Float[Array, "T D"]
    selection: Selection | None


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: its attention.
        mlp: its feed-forward block.
        hidden_size: D.
        norm_eps: of both norms.
        dtype: type of the norms' initial weights.
    """

    def __init__(
        self, attention: MLAttention, mlp: MLP | MoE, hidden_size: int, *, norm_eps: float, dtype: jax.typing.DTypeLike
    ) -> None:
        self.input_layernorm = RMSNorm(hidden_size, eps=norm_eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=norm_eps, dtype=dtype)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedMLACache,
        layer: int | Int32[Array, ""],
        step: Step,
        *,
        index_layer: int | Int32[Array, ""] | None = None,
        selection: Selection | None = None,
        first_expert: int | Int32[Array, ""] = 0,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T D"], PagedMLACache, BlockTrace]:
        """The stream after the block, the cache with the rows written, and the trace, whose selection the next block takes.

        Arguments as in :class:`MLAttention`; ``first_expert`` as in :class:`mla_jax.layers.Experts`.
        """
        attn_in = self.input_layernorm(x)
        attn_out, cache, selection = self.self_attn(
            attn_in, cache, layer, step, index_layer=index_layer, selection=selection, implementation=implementation
        )
        x = x + attn_out
        mlp_in = self.post_attention_layernorm(x)
        mlp_out = self.mlp(mlp_in, first_expert) if isinstance(self.mlp, MoE) else self.mlp(mlp_in)
        return x + mlp_out, cache, BlockTrace(attn_in, attn_out, mlp_in, mlp_out, selection)
