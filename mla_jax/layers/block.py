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
        attn_in: [T, D], the attention's input after its norm.
        attn_out: [T, D], its output before the addition.
        mlp_in: [T, D], the feed-forward block's input after its norm.
        mlp_out: [T, D], its output before the addition.
        selection: the tokens attended to, None for dense attention.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> from mla_jax import layers, models
        >>> model = models.abstract_model(models.demo_checkpoint())
        >>> cache = mla.init_cache(model.cache_config(num_pages=2, page_size=4, platform="cpu"))
        >>> batch = jnp.array([1, 2]), cache, jnp.array([4, 5]), jnp.array([[1]]), jnp.array([2]), jnp.array([0, 2])
        >>> _, _, traces = jax.eval_shape(lambda model: model.trace(*batch), model)
        >>> isinstance(traces[0], layers.BlockTrace), traces[0].mlp_out.shape, traces[0].selection.slots.shape
        (True, (2, 64), (2, 4))
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

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> from mla_jax import layers, models
        >>> model = models.abstract_model(models.demo_checkpoint())
        >>> block = model.layers[0]
        >>> isinstance(block, layers.Block), block.self_attn.kind, type(block.mlp).__name__
        (True, 'full', 'MLP')
        >>> cache = mla.init_cache(model.cache_config(num_pages=2, page_size=4, platform="cpu"))
        >>> def run(block, x, cache):
        ...     batch = jnp.array([4, 5]), jnp.array([[1]]), jnp.array([2]), jnp.array([0, 2])
        ...     return block(x, cache, 0, layers.make_step(*batch, model.spec.rope), index_layer=0)
        >>> x, cache, trace = jax.eval_shape(run, block, jnp.ones((2, 64)), cache)
        >>> x.shape, trace.selection.positions.shape
        ((2, 64), (2, 4))
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

        Args:
            x: [T, D], the stream.
            cache: the cache.
            layer: which of its layers.
            step: the batch.
            index_layer: which of its index layers; needed by attention of kind "full".
            selection: that of the block before; needed by attention of kind "shared".
            first_expert: where its experts begin, as in :class:`Experts`.
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            The stream [T, D], the cache, and the trace.

        Raises:
            ValueError: as :class:`MLAttention`.
        """
        attn_in = self.input_layernorm(x)
        attn_out, cache, selection = self.self_attn(
            attn_in, cache, layer, step, index_layer=index_layer, selection=selection, implementation=implementation
        )
        x = x + attn_out
        mlp_in = self.post_attention_layernorm(x)
        mlp_out = self.mlp(mlp_in, first_expert) if isinstance(self.mlp, MoE) else self.mlp(mlp_in)
        return x + mlp_out, cache, BlockTrace(attn_in, attn_out, mlp_in, mlp_out, selection)
