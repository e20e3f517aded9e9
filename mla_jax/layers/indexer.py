"""Indexer: the lightning indexer of DeepSeek sparse attention (DSA), which picks the tokens each query attends to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax import expand_rows, indexer_logits, positions_to_slots, select_topk, write_index_k
from mla_jax.cache import PagedMLACache
from mla_jax.geometry import IndexerGeometry
from mla_jax.layers.linear import Linear
from mla_jax.layers.norms import LayerNorm
from mla_jax.layers.rope import rotate, to_half_split
from mla_jax.layers.step import Step

K_NORM_EPS = 1e-6
"""Whatever the config says (transformers 5.24.0, DeepSeek's code)."""


class Selection(NamedTuple):
    """The tokens that each row attends to.

    Attributes:
        positions: int32[T, K], ascending, -1 where fewer than K are visible.
        slots: int32[T, K], their places in the cache.

    Example:
        >>> import jax.numpy as jnp
        >>> from mla_jax import layers
        >>> chosen = layers.Selection(positions=jnp.array([[0, 2, -1]]), slots=jnp.array([[4, 6, -1]]))
        >>> chosen.slots.shape
        (1, 3)
    """

    positions: Int32[Array, "T K"]
    slots: Int32[Array, "T K"]


class Indexer(nnx.Module):
    """logit[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]); the K largest visible win (DeepSeek-V3.2, transformers 5.24.0).

    The first P numbers of queries and keys are rotated, with the attention's angles. Both are kept in half-split order, also
    where the pairs come interleaved (GLM-5). No Hadamard transform: it is orthogonal and leaves every product as it is.

    Args:
        hidden_size: D.
        q_lora_rank: Q, width of the query latent.
        geometry: heads h, width d and K.
        rope_dim: P, at most d.
        interleaved: how the projections pair numbers.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> from flax import nnx
        >>> from mla_jax import layers, models
        >>> model = models.abstract_model(models.demo_checkpoint())
        >>> indexer = nnx.eval_shape(
        ...     lambda: layers.Indexer(64, 48, model.spec.geometry.indexer, rope_dim=32, interleaved=True, rngs=nnx.Rngs(0))
        ... )
        >>> cache = mla.init_cache(model.cache_config(num_pages=2, page_size=4, platform="cpu"))
        >>> def select(indexer, x, q_latent, cache):
        ...     batch = jnp.array([4, 5]), jnp.array([[1]]), jnp.array([2]), jnp.array([0, 2])
        ...     step = layers.make_step(*batch, model.spec.rope)
        ...     return indexer.keys(x, step), indexer.queries(x, q_latent, step), indexer(x, q_latent, cache, 0, step)[0]
        >>> keys, (queries, weights), selection = jax.eval_shape(select, indexer, jnp.ones((2, 64)), jnp.ones((2, 48)), cache)
        >>> keys.shape, queries.shape, weights.shape, selection.slots.shape  # a page of 4 cannot hold 32 tokens
        ((2, 64), (2, 4, 64), (2, 4), (2, 4))
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        geometry: IndexerGeometry,
        *,
        rope_dim: int,
        interleaved: bool,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.wq_b = Linear(q_lora_rank, geometry.num_heads * geometry.head_dim, dtype=dtype, rngs=rngs)
        self.wk = Linear(hidden_size, geometry.head_dim, dtype=dtype, rngs=rngs)
        self.k_norm = LayerNorm(geometry.head_dim, eps=K_NORM_EPS, dtype=dtype)
        self.weights_proj = Linear(hidden_size, geometry.num_heads, dtype=dtype, rngs=rngs)
        self.geometry = geometry
        self.rope_dim = rope_dim
        self.interleaved = interleaved

    def keys(self, x: Float[Array, "T D"], step: Step) -> Float[Array, "T d"]:
        """The key of each row, as the cache is given it: normalised, and rotated in its first P numbers.

        Args:
            x: [T, D], the input of the attention, after its norm.
            step: the batch, of which the rotation counts.

        Returns:
            [T, d], in x's type.
        """
        return self._rotate(self.k_norm(self.wk(x)), step)

    def queries(
        self, x: Float[Array, "T D"], q_latent: Float[Array, "T Q"], step: Step
    ) -> tuple[Float[Array, "T h d"], Float[Array, "T h"]]:
        """Queries, and float32 head weights that carry both constants, h^-0.5 and d^-0.5; weights may be negative.

        Args:
            x: [T, D], the input of the attention, after its norm.
            q_latent: [T, Q], the attention's query latent, after its norm.
            step: the batch, of which the rotation counts.

        Returns:
            [T, h, d] in x's type, and float32 [T, h].
        """
        heads, width = self.geometry.num_heads, self.geometry.head_dim
        q = self._rotate(self.wq_b(q_latent).reshape(-1, heads, width), step)
        return q, self.weights_proj(x.astype(jnp.float32)) * (heads * width) ** -0.5

    def __call__(
        self,
        x: Float[Array, "T D"],
        q_latent: Float[Array, "T Q"],
        cache: PagedMLACache,
        index_layer: int | Int32[Array, ""],
        step: Step,
        *,
        implementation: str | None = None,
    ) -> tuple[Selection, PagedMLACache]:
        """Writes the rows' keys, then selects among all visible ones, the new included.

        Args:
            x: [T, D], the input of the attention, after its norm.
            q_latent: [T, Q], the attention's query latent, after its norm.
            cache: a cache with index keys.
            index_layer: which of the cache's index layers is this one's.
            step: the batch.
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            The selection, of min(K, M * page_size) tokens a row, and the cache.
        """
        cache = write_index_k(cache, index_layer, step.slots, self.keys(x, step))
        q, weights = self.queries(x, q_latent, step)
        logits = indexer_logits(
            q, weights, cache, index_layer, step.block_tables, step.lengths, step.cu_q_lens, implementation=implementation
        )
        tables, visible = expand_rows(step.block_tables, step.lengths, step.cu_q_lens, x.shape[0])
        # A table that cannot hold K tokens selects all it holds.
        positions = select_topk(logits, visible, min(self.geometry.topk, logits.shape[1]))
        return Selection(positions, positions_to_slots(positions, tables, cache.config.page_size)), cache

    def _rotate(self, x: Float[Array, "T *heads d"], step: Step) -> Float[Array, "T *heads d"]:
        rope, rest = x[..., : self.rope_dim], x[..., self.rope_dim :]
        rope = rotate(rope, step.cos, step.sin, interleaved=self.interleaved)
        return jnp.concatenate([to_half_split(rope) if self.interleaved else rope, rest], axis=-1)
