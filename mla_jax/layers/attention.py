"""MLAttention: multi-head latent attention in absorbed form over the paged cache, dense or sparse."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax import mla_decode, mla_prefill, sparse_mla, write_kv
from mla_jax.cache import PagedMLACache
from mla_jax.geometry import MLAGeometry
from mla_jax.layers.indexer import Indexer, Selection
from mla_jax.layers.linear import Linear, matmul_precision, normal_init
from mla_jax.layers.norms import RMSNorm
from mla_jax.layers.rope import rotate
from mla_jax.layers.step import Step

AttentionKind = Literal["dense", "full", "shared"]
"""Attends to all visible tokens; to those its own indexer selects; to those the last "full" layer before it selected."""


class MLAttention(nnx.Module):
    """Attention over latent rows (DeepSeek-V2, arXiv 2405.04434, section 2.1, with the up-projections absorbed).

    Per head, with query [nope | rope] and the cache's row [c | k]: score = (q_nope W_UK) . c + q_rope . k, and the output is
    W_UV applied to the weighted sum of c. The cache row is the latent after its norm, and the rotated key, in the order in
    which the projection pairs numbers.

    Args:
        hidden_size: D.
        geometry: dimensions and softmax scale.
        kind: which tokens a row attends to.
        rope_interleaved: pairs are (2i, 2i+1), else (i, i + P/2).
        index_rope_interleaved: the same for the indexer.
        latent_norm_eps: of q_a_layernorm and kv_a_layernorm, which need not be the model's.
        bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have one; the others never do.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Raises:
        ValueError: for an unknown kind, and for kind "full" without ``geometry.indexer`` or ``geometry.q_lora_rank``.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> geometry = mla.MLAGeometry(
        ...     num_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        ...     softmax_scale=(8 + 4) ** -0.5,
        ... )
        >>> layer = nnx.eval_shape(lambda: layers.MLAttention(32, geometry, rngs=nnx.Rngs(0)))
        >>> layer.w_uk.shape, layer.kv_a_proj_with_mqa.weight.shape
        ((2, 8, 16), (20, 32))
        >>> cache = mla.init_cache(mla.CacheConfig(geometry=geometry, num_layers=1, num_pages=2, page_size=4, platform="cpu"))
        >>> def attend(layer, x, cache):
        ...     batch = jnp.array([4, 5, 6]), jnp.array([[1]]), jnp.array([3]), jnp.array([0, 3])
        ...     step = layers.make_step(*batch, layers.RopeSpec(dim=4, theta=10000.0))
        ...     return layer.queries(x)[1], layer.rows(x, step), layer(x, cache, 0, step)[0]
        >>> queries, rows, out = jax.eval_shape(attend, layer, jnp.ones((3, 32)), cache)
        >>> queries.shape, [part.shape for part in rows], out.shape
        ((3, 2, 12), [(3, 16), (3, 4)], (3, 32))
    """

    def __init__(
        self,
        hidden_size: int,
        geometry: MLAGeometry,
        *,
        kind: AttentionKind = "dense",
        rope_interleaved: bool = True,
        index_rope_interleaved: bool = False,
        latent_norm_eps: float = 1e-6,
        bias: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if kind not in get_args(AttentionKind):
            raise ValueError(f"MLAttention: kind must be one of {get_args(AttentionKind)}, got {kind!r}")
        heads, R, Q = geometry.num_heads, geometry.kv_lora_rank, geometry.q_lora_rank
        N, P, V = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim
        if Q is None:
            self.q_proj = Linear(hidden_size, heads * (N + P), dtype=dtype, rngs=rngs)
        else:
            self.q_a_proj = Linear(hidden_size, Q, bias=bias, dtype=dtype, rngs=rngs)
            self.q_a_layernorm = RMSNorm(Q, eps=latent_norm_eps, dtype=dtype)
            self.q_b_proj = Linear(Q, heads * (N + P), dtype=dtype, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(hidden_size, R + P, bias=bias, dtype=dtype, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(R, eps=latent_norm_eps, dtype=dtype)
        self.w_uk = normal_init(rngs, (heads, N, R), R, dtype)
        self.w_uv = normal_init(rngs, (heads, V, R), R, dtype)
        self.o_proj = Linear(heads * V, hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        indexer = None
        if kind == "full":
            if geometry.indexer is None or Q is None:
                raise ValueError(f"MLAttention: an indexer needs geometry.indexer and q_lora_rank, got {geometry}")
            indexer = Indexer(
                hidden_size, Q, geometry.indexer, rope_dim=P, interleaved=index_rope_interleaved, dtype=dtype, rngs=rngs
            )
        self.indexer = indexer
        self.geometry = geometry
        self.kind = kind
        self.rope_interleaved = rope_interleaved

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedMLACache,
        layer: int | Int32[Array, ""],
        step: Step,
        *,
        index_layer: int | Int32[Array, ""] | None = None,
        selection: Selection | None = None,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T D"], PagedMLACache, Selection | None]:
        """Writes the rows of x into the cache and attends to all that is visible, the new rows included.

        Args:
            x: [T, D], the block's input after its norm.
            cache: the cache.
            layer: which of its layers.
            step: the batch.
            index_layer: which of its index layers; needed by kind "full".
            selection: that of the layer before; needed by kind "shared".
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            The output [T, D], the cache, and the selection for the next layer: a new one from kind "full", else the one given.

        Raises:
            ValueError: without an index_layer or a selection where one is needed.
        """
        q_latent, q = self.queries(x)
        q_nope, q_rope = jnp.split(q, [self.geometry.qk_nope_head_dim], axis=-1)
        q_rope = rotate(q_rope, step.cos, step.sin, interleaved=self.rope_interleaved)
        cache = write_kv(cache, layer, step.slots, *self.rows(x, step))
        precision = matmul_precision(x.dtype)
        q_absorbed = jnp.einsum("thn,hnr->thr", q_nope, self.w_uk[...].astype(x.dtype), precision=precision)
        options: dict[str, Any] = {"softmax_scale": self.geometry.softmax_scale, "implementation": implementation}
        if self.kind == "dense" and step.uniform is not None:
            q_absorbed, q_rope = (q.reshape(-1, step.uniform, *q.shape[1:]) for q in (q_absorbed, q_rope))
            out, _ = mla_decode(q_absorbed, q_rope, cache, layer, step.block_tables, step.lengths, **options)
            out = out.reshape(x.shape[0], *out.shape[2:])
        elif self.kind == "dense":
            out, _ = mla_prefill(q_absorbed, q_rope, cache, layer, step.block_tables, step.lengths, step.cu_q_lens, **options)
        else:
            if self.indexer is not None:
                assert q_latent is not None
                if index_layer is None:
                    raise ValueError("MLAttention: a layer with an indexer needs index_layer")
                selection, cache = self.indexer(x, q_latent, cache, index_layer, step, implementation=implementation)
            if selection is None:
                raise ValueError("MLAttention: a layer of kind 'shared' needs the selection of a 'full' layer before it")
            out, _ = sparse_mla(q_absorbed, q_rope, cache, layer, selection.slots, **options)
        heads_out = jnp.einsum("thr,hvr->thv", out, self.w_uv[...].astype(x.dtype), precision=precision)
        return self.o_proj(heads_out.reshape(x.shape[0], -1)), cache, selection

    def queries(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T Q"] | None, Float[Array, "T H N+P"]]:
        """The query latent (None without one) and the heads' queries before rotation, nope numbers first.

        Args:
            x: [T, D], the block's input after its norm.

        Returns:
            [T, Q] after its norm, or None; and [T, H, N + P].
        """
        geometry = self.geometry
        width = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        if geometry.q_lora_rank is None:
            q_latent, q = None, self.q_proj(x)
        else:
            q_latent = self.q_a_layernorm(self.q_a_proj(x))
            q = self.q_b_proj(q_latent)
        return q_latent, q.reshape(-1, geometry.num_heads, width)

    def rows(self, x: Float[Array, "T D"], step: Step) -> tuple[Float[Array, "T R"], Float[Array, "T P"]]:
        """What the cache holds of each row: the normalised latent, and the rotated key, which no norm touches.

        Args:
            x: [T, D], the block's input after its norm.
            step: the batch, of which the rotation counts.

        Returns:
            [T, R] and [T, P], in x's type.
        """
        c_kv, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.geometry.kv_lora_rank], axis=-1)
        return self.kv_a_layernorm(c_kv), rotate(k_rope, step.cos, step.sin, interleaved=self.rope_interleaved)
