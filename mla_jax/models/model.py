"""CausalLM: embedding, blocks over a paged cache, and the head. One class for every family; the spec says what differs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax import checks
from mla_jax.arrays import ArrayIn
from mla_jax.cache import PagedMLACache, check_cache
from mla_jax.config import CacheConfig
from mla_jax.devices import Platform
from mla_jax.layers.attention import MLAttention
from mla_jax.layers.block import Block, BlockTrace
from mla_jax.layers.indexer import Selection
from mla_jax.layers.linear import Linear, matmul, normal_init
from mla_jax.layers.mlp import MLP
from mla_jax.layers.moe import MoE
from mla_jax.layers.norms import RMSNorm
from mla_jax.layers.stack import LayerStack, Place
from mla_jax.layers.step import Step, make_step
from mla_jax.layout import ScaleMode
from mla_jax.models.spec import ModelSpec


class Embedding(nnx.Module):
    """Rows of a [V, D] table; an id outside the table gives NaN, which shows, rather than some other token's row."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = normal_init(rngs, (vocab_size, hidden_size), hidden_size, dtype)

    def __call__(self, ids: Int32[Array, "T"]) -> Float[Array, "T D"]:
        # Negative ids would count from the end.
        ids = jnp.where(ids < 0, self.weight.shape[0], ids)
        return jnp.take(self.weight[...], ids, axis=0, mode="fill", fill_value=jnp.nan)


class CausalLM(nnx.Module):
    """A decoder of MLA blocks that keeps nothing: the cache comes in as an argument and goes out as a result.

    A pytree like every NNX module, so it can be an argument of ``jax.jit`` and ``nnx.jit``; donate the cache. Layers of one kind
    are compiled once (:class:`mla_jax.layers.LayerStack`); ``model.layers[i]`` is a layer's block.

    Args:
        spec: the model as data.
        dtype: the type it computes in, and of the initial weights; None: the spec's, else float32.
        rngs: source of the initial weights, which are random. :func:`mla_jax.models.from_pretrained` loads a checkpoint.

    Example:
        >>> import jax, jax.numpy as jnp, mla_jax as mla
        >>> from mla_jax import models
        >>> model = models.abstract_model(models.demo_checkpoint())  # a CausalLM of shapes; from_pretrained loads numbers
        >>> config = model.cache_config(num_pages=2, page_size=4, platform="cpu", nsa_kv_cache_store_fp8=True)
        >>> config.layout.name, config.num_layers, config.num_index_layers
        ('packed', 3, 3)
        >>> cache = mla.init_cache(config)
        >>> batch = jnp.array([72, 105]), cache, jnp.array([4, 5]), jnp.array([[1]]), jnp.array([2]), jnp.array([0, 2])
        >>> logits, cache = jax.eval_shape(lambda model: model(*batch), model)  # jax.jit for numbers; donate the cache
        >>> logits.shape, logits.dtype.name
        ((2, 256), 'float32')
        >>> hidden, cache = jax.eval_shape(lambda model: model.stream(*batch), model)
        >>> jax.eval_shape(lambda model, hidden: model.logits(hidden), model, hidden).shape
        (2, 256)
        >>> hidden, cache, traces = jax.eval_shape(lambda model: model.trace(*batch), model)
        >>> hidden.shape, len(traces)
        ((2, 64), 3)
    """

    def __init__(self, spec: ModelSpec, *, dtype: jax.typing.DTypeLike | None = None, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(dtype or spec.dtype or jnp.float32)
        self.spec = spec
        self.dtype = dtype
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = LayerStack(spec.layer_kinds, spec.index_layers, lambda i, rngs: _block(spec, i, dtype, rngs), rngs=rngs)
        self.norm = RMSNorm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)
        is_tied = spec.tie_word_embeddings
        self.lm_head = None if is_tied else Linear(spec.hidden_size, spec.vocab_size, dtype=dtype, rngs=rngs)

    def cache_config(
        self,
        num_pages: int,
        page_size: int = 64,
        kv_cache_dtype: Any = "auto",
        *,
        platform: Platform | None = None,
        scale_mode: ScaleMode = "pow2",
        nsa_kv_cache_store_fp8: bool = False,
    ) -> CacheConfig:
        """The configuration of a cache for this model. Layers that reuse another's selection own no index keys.

        Args:
            num_pages: pages a layer, the null page included; this and all others as in :class:`mla_jax.CacheConfig`.
            page_size: tokens a page.
            kv_cache_dtype: "auto" is FP8 when packed, else the type the model computes in.
            platform: the chip whose FP8 dialect is stored; None: the default device's.
            scale_mode: of packed rows and FP8 index keys.
            nsa_kv_cache_store_fp8: packed rows.

        Returns:
            The config, with ``use_nsa`` if a layer has an indexer.

        Raises:
            ValueError: as :class:`mla_jax.CacheConfig`.
        """
        if kv_cache_dtype == "auto" and not nsa_kv_cache_store_fp8:
            kv_cache_dtype = self.dtype.name
        num_index_layers = self.spec.attention_kinds.count("full")
        return CacheConfig(
            geometry=self.spec.geometry,
            num_layers=self.spec.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_index_layers=num_index_layers or None,
            platform=platform,
            use_nsa=num_index_layers > 0,
            kv_cache_dtype=kv_cache_dtype,
            nsa_kv_cache_store_fp8=nsa_kv_cache_store_fp8,
            scale_mode=scale_mode,
        )

    def __call__(
        self,
        tokens: Int32[ArrayIn, "T"],
        cache: PagedMLACache,
        slots: Int32[ArrayIn, "T"],
        block_tables: Int32[ArrayIn, "S M"],
        lengths: Int32[ArrayIn, "S"],
        cu_q_lens: Int32[ArrayIn, "S1"] | None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T V"], PagedMLACache]:
        """Logits of T new tokens of S sequences, and the cache with their rows written.

        Sequence s owns rows cu_q_lens[s] .. cu_q_lens[s + 1] - 1; the j-th of its n stands at position ``lengths[s] - n + j``.
        Rows from cu_q_lens[S] on are padding: they may hold anything, write nothing, and their logits mean nothing.

        Args:
            tokens: int32[T] ids; one outside the vocabulary gives NaN.
            cache: made from :meth:`cache_config`.
            slots: int32[T], where each row is written; 0 or less: nowhere.
            block_tables: int32[S, M], pages of each sequence, padded with 0 or -1.
            lengths: int32[S], tokens in the cache, the new ones included.
            cu_q_lens: int32[S + 1], 0 and the running sum of new tokens; None: each sequence has T / S, as in a decode step, for
                which dense attention has a better form.
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            float32 [T, V] logits, natural log, and the cache.

        Raises:
            ValueError: for other shapes, or a cache of another model.
            TypeError: for arrays that are no integers.
        """
        tokens_, _, _, lengths_, _ = _check_step(tokens, slots, block_tables, lengths, cu_q_lens)
        if tokens_.size == 0 or lengths_.size == 0:
            self._check_cache(cache)
            return jnp.zeros((tokens_.shape[0], self.spec.vocab_size), jnp.float32), cache
        hidden, cache = self.stream(tokens, cache, slots, block_tables, lengths, cu_q_lens, implementation=implementation)
        return self.logits(hidden), cache

    def stream(
        self,
        tokens: Int32[ArrayIn, "T"],
        cache: PagedMLACache,
        slots: Int32[ArrayIn, "T"],
        block_tables: Int32[ArrayIn, "S M"],
        lengths: Int32[ArrayIn, "S"],
        cu_q_lens: Int32[ArrayIn, "S1"] | None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T D"], PagedMLACache]:
        """As a call, without the head: the stream after the last block.

        Args:
            tokens: int32[T] ids; one outside the vocabulary gives NaN.
            cache: made from :meth:`cache_config`.
            slots: int32[T], where each row is written; 0 or less: nowhere.
            block_tables: int32[S, M], pages of each sequence, padded with 0 or -1.
            lengths: int32[S], tokens in the cache, the new ones included.
            cu_q_lens: int32[S + 1], 0 and the running sum of new tokens; None: each sequence has T / S.
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            [T, D] in the model's type, which :meth:`logits` takes, and the cache.

        Raises:
            ValueError, TypeError: as a call.
        """
        arrays = tokens, slots, block_tables, lengths, cu_q_lens
        return self._run(cache, *arrays, implementation=implementation, keep=lambda trace: None)[:2]

    def trace(
        self,
        tokens: Int32[ArrayIn, "T"],
        cache: PagedMLACache,
        slots: Int32[ArrayIn, "T"],
        block_tables: Int32[ArrayIn, "S M"],
        lengths: Int32[ArrayIn, "S"],
        cu_q_lens: Int32[ArrayIn, "S1"] | None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T D"], PagedMLACache, tuple[BlockTrace, ...]]:
        """As :meth:`stream`, and what happened in each block.

        Args:
            tokens: int32[T] ids; one outside the vocabulary gives NaN.
            cache: made from :meth:`cache_config`.
            slots: int32[T], where each row is written; 0 or less: nowhere.
            block_tables: int32[S, M], pages of each sequence, padded with 0 or -1.
            lengths: int32[S], tokens in the cache, the new ones included.
            cu_q_lens: int32[S + 1], 0 and the running sum of new tokens; None: each sequence has T / S.
            implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

        Returns:
            [T, D] in the model's type, the cache, and each layer's trace.

        Raises:
            ValueError, TypeError: as a call.
        """
        arrays = tokens, slots, block_tables, lengths, cu_q_lens
        return self._run(cache, *arrays, implementation=implementation, keep=lambda trace: trace)

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """The head: float32 logits of rows of the stream after the last block.

        Args:
            hidden: [T, D], of :meth:`stream`.

        Returns:
            float32 [T, V].
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return matmul(self.norm(hidden), head.weight[...], jnp.float32)

    def _run(
        self, cache: PagedMLACache, *arrays: Any, implementation: str | None, keep: Callable[[BlockTrace], Any]
    ) -> tuple[Float[Array, "T D"], PagedMLACache, tuple[Any, ...]]:
        """The stream after the last block, the cache, and for each layer what is to be kept of its trace."""
        ids, places, tables, counts, bounds = _check_step(*arrays)
        self._check_cache(cache)
        step = make_step(places, tables, counts, bounds, self.spec.rope)
        x = self.embed_tokens(jnp.where(step.valid, ids, 0)).astype(self.dtype)

        def layer(block: Block, place: Place, carry: Any) -> tuple[Any, Any]:
            x, cache, selection = carry
            x, cache, trace = block(
                x,
                cache,
                place.layer,
                step,
                index_layer=place.index_layer,
                selection=selection,
                first_expert=place.first_expert,
                implementation=implementation,
            )
            return (x, cache, trace.selection), keep(trace)

        (x, cache, _), kept = self.layers.scan(layer, (x, cache, self._nothing_selected(step, cache)))
        return x, cache, kept

    def _nothing_selected(self, step: Step, cache: PagedMLACache) -> Selection | None:
        """What stands for the selection before the first layer, which makes its own; a scan's carry needs its shape."""
        indexer = self.spec.geometry.indexer
        if indexer is None:
            return None
        width = min(indexer.topk, step.block_tables.shape[1] * cache.config.page_size)
        return Selection(*(jnp.full((step.slots.shape[0], width), -1, jnp.int32) for _ in range(2)))

    def _check_cache(self, cache: PagedMLACache) -> None:
        check_cache("CausalLM", cache)
        config, spec = cache.config, self.spec
        expected = {
            "kv_lora_rank": (config.geometry.kv_lora_rank, spec.geometry.kv_lora_rank),
            "qk_rope_head_dim": (config.geometry.qk_rope_head_dim, spec.geometry.qk_rope_head_dim),
            "num_layers": (config.num_layers, spec.num_layers),
            "num_index_layers": (config.num_index_layers, spec.attention_kinds.count("full")),
            "indexer": (config.geometry.indexer if config.use_nsa else None, spec.geometry.indexer),
        }
        for name, (got, want) in expected.items():
            if got != want:
                raise ValueError(
                    f"CausalLM: the cache has {name}={got}, the model needs {want}; make its config with model.cache_config"
                )


def _check_step(
    tokens: Any, slots: Any, block_tables: Any, lengths: Any, cu_q_lens: Any
) -> tuple[Array, Array, Array, Array, Array | None]:
    op = "CausalLM"
    ids = checks.integers(op, "tokens", tokens, 1)
    places = checks.integers(op, "slots", slots, 1)
    tables = checks.integers(op, "block_tables", block_tables, 2)
    counts = checks.integers(op, "lengths", lengths, 1)
    shapes = {"tokens": ("T",), "slots": ("T",), "lengths": ("S",), "block_tables": ("S", "M"), "cu_q_lens": (len(counts) + 1,)}
    arrays: dict[str, Any] = {"tokens": ids, "slots": places, "lengths": counts, "block_tables": tables}
    bounds = None
    if cu_q_lens is not None:
        arrays["cu_q_lens"] = bounds = checks.integers(op, "cu_q_lens", cu_q_lens, 1)
    elif len(counts) and len(ids) % len(counts):
        raise ValueError(f"{op}: without cu_q_lens each of {len(counts)} sequences has as many new tokens, got {len(ids)} in all")
    checks.check_shapes(op, shapes, **arrays)
    return ids, places, tables, counts, bounds


def _block(spec: ModelSpec, layer: int, dtype: Any, rngs: nnx.Rngs) -> Block:
    attention = MLAttention(
        spec.hidden_size,
        spec.geometry,
        kind=spec.attention_kinds[layer],
        rope_interleaved=spec.rope_interleaved,
        index_rope_interleaved=spec.index_rope_interleaved,
        latent_norm_eps=spec.latent_norm_eps,
        bias=spec.attention_bias,
        dtype=dtype,
        rngs=rngs,
    )
    if spec.moe_layers[layer]:
        assert spec.moe is not None
        mlp = MoE(
            spec.hidden_size,
            spec.moe.intermediate_size,
            num_shared=spec.moe.num_shared,
            routing=spec.moe.routing,
            dtype=dtype,
            rngs=rngs,
        )
    else:
        mlp = MLP(spec.hidden_size, spec.intermediate_size, dtype=dtype, rngs=rngs)
    return Block(attention, mlp, spec.hidden_size, norm_eps=spec.norm_eps, dtype=dtype)
