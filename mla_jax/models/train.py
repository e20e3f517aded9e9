"""The training step of a model: next-token loss and the indexer's loss, without a cache.

A :class:`~mla_jax.models.CausalLM`'s own modules run over whole token arrays, with the attention and the indexer of
``mla_jax.training``. What a cache would round can be rounded here too, with straight-through gradients.

DeepSeek sparse attention is trained in stages (DeepSeek-V3.2 report, section 2.1.1): a dense model; a warm-up that trains the
indexers alone towards the dense attention; then everything, each query attending to what its indexer selects. The indexer learns
from its own loss alone and the rest of the model from the next-token loss alone: the indexer's inputs are detached.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

import mla_jax as mla
from mla_jax import checks
from mla_jax.arrays import ArrayIn
from mla_jax.config import CacheConfig
from mla_jax.layers.attention import MLAttention
from mla_jax.layers.block import Block
from mla_jax.layers.linear import matmul_precision
from mla_jax.layers.mlp import MLP
from mla_jax.layers.moe import MoE
from mla_jax.layers.rope import rotate
from mla_jax.layers.router import Router
from mla_jax.layers.step import Step, make_step
from mla_jax.models.model import CausalLM

Stage = Literal["dense", "dense_warmup", "sparse"]
"""A dense model; the warm-up that trains its indexers alone; everything, under sparse attention. See :func:`loss`."""
STAGES: tuple[Stage, ...] = ("dense", "dense_warmup", "sparse")
"""The values of :data:`Stage`, in the order of training."""


class Metrics(NamedTuple):
    """What a loss is made of.

    Attributes:
        cross_entropy: mean over the tokens that count, natural log.
        indexer_kl: sum over the layers that have an indexer of :func:`mla_jax.indexer_kl`; 0 in the dense stage.
        balance: mean over the layers with experts of sum_i f_i P_i, 1 where experts are used evenly; 0 without experts.
        correct: bool[B, T], whether token t is the likeliest one after those before it; False at t = 0.

    Example:
        >>> from mla_jax.models import train
        >>> train.Metrics(cross_entropy=2.0, indexer_kl=0.0, balance=1.0, correct=[[False, True]]).cross_entropy
        2.0
    """

    cross_entropy: Float[Array, ""]
    indexer_kl: Float[Array, ""]
    balance: Float[Array, ""]
    correct: Bool[Array, "B T"]


def loss(
    model: CausalLM,
    tokens: Int32[ArrayIn, "B T"],
    mask: Bool[ArrayIn, "B T"] | None = None,
    *,
    stage: Stage,
    straight_through: CacheConfig | None = None,
    segment_ids: Int32[ArrayIn, "B T"] | None = None,
    balance_weight: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a stage, to be differentiated in ``model``, and its parts.

    "dense": cross-entropy, every query attends to all it sees. "dense_warmup": the indexers' KL alone, under the same attention;
    every other gradient is exactly 0, but a decaying optimiser must leave those parameters alone (:func:`indexer_mask`).
    "sparse": cross-entropy plus the KL over selected keys, under sparse attention.

    Args:
        model: the model; float32 parameters with ``dtype=bfloat16`` are mixed precision.
        tokens: int32[B, T].
        mask: bool[B, T], the tokens whose prediction counts (answers only, no padding); None: all. The first never counts.
        stage: the stage.
        straight_through: a config of :meth:`~mla_jax.models.CausalLM.cache_config`: rows and index keys are rounded as its
            cache would, with straight-through gradients. None: not rounded.
        segment_ids: int32[B, T], for sequences packed one behind another; a query sees its own segment alone. Mask the first token
            of each.
        balance_weight: of ``Metrics.balance`` (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, taken over the batch).
        dtype: the type to compute in; None: the model's.

    Returns:
        float32 scalar, and its parts.

    Raises:
        ValueError: for an unknown stage, one that needs an indexer where there is none, or other shapes.
        TypeError: for tokens that are no integers.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from mla_jax import models
        >>> model, tokens = models.abstract_model(models.demo_checkpoint()), jnp.array([[72, 105, 33]])
        >>> step = jax.value_and_grad(functools.partial(models.train.loss, stage="dense"), has_aux=True)
        >>> (value, metrics), gradients = jax.eval_shape(step, model, tokens)  # jax.jit(step) and a loaded model for numbers
        >>> value.shape, metrics.correct.shape, gradients.embed_tokens.weight.shape
        ((), (1, 3), (256, 64))
    """
    ids = _check_tokens("loss", model, tokens, stage)
    if mask is not None:
        checks.check_shapes("loss", {"mask": ids.shape}, mask=mask)
    predictions, indexer_kl, balance = _run(model, ids, stage, straight_through, segment_ids, dtype)
    counts = jnp.ones(ids.shape, jnp.bool_) if mask is None else jnp.asarray(mask, jnp.bool_)
    counts = counts.at[:, :1].set(False)
    log_p = jax.nn.log_softmax(predictions[:, :-1], axis=-1)
    of_tokens = jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1)[..., 0]
    total = jnp.sum(jnp.where(counts[:, 1:], of_tokens, np.float32(0)))
    cross_entropy = -total / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
    correct = jnp.pad(jnp.argmax(predictions[:, :-1], axis=-1) == ids[:, 1:], ((0, 0), (1, 0)))
    value = indexer_kl if stage == "dense_warmup" else cross_entropy + indexer_kl + np.float32(balance_weight) * balance
    return value, Metrics(cross_entropy, indexer_kl, balance, correct)


def logits(
    model: CausalLM,
    tokens: Int32[ArrayIn, "B T"],
    *,
    stage: Stage,
    straight_through: CacheConfig | None = None,
    segment_ids: Int32[ArrayIn, "B T"] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "B T V"]:
    """Logits as :func:`loss` sees them.

    In the sparse stage (dense, for a model without an indexer) they are those of :func:`mla_jax.models.forward`.

    Args:
        model: the model.
        tokens: int32[B, T].
        stage: the stage.
        straight_through: a config of :meth:`~mla_jax.models.CausalLM.cache_config`, or None, as in :func:`loss`.
        segment_ids: int32[B, T], for sequences packed one behind another.
        dtype: the type to compute in; None: the model's.

    Returns:
        float32 [B, T, V].

    Raises:
        ValueError, TypeError: as :func:`loss`.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from mla_jax import models
        >>> model, tokens = models.abstract_model(models.demo_checkpoint()), jnp.array([[72, 105, 33]])
        >>> jax.eval_shape(functools.partial(models.train.logits, stage="dense"), model, tokens).shape
        (1, 3, 256)
    """
    return _run(model, _check_tokens("logits", model, tokens, stage), stage, straight_through, segment_ids, dtype)[0]


def indexer_mask(model: Any) -> Any:
    """True for the indexers' parameters and False for all others: what the dense warm-up may change.

    Args:
        model: the model, its state, or gradients of it.

    Returns:
        A pytree of the same structure, of bools; the mask of an optimiser, say ``optax.masked``.

    Example:
        >>> import jax
        >>> from mla_jax import models
        >>> mask = models.train.indexer_mask(models.abstract_model(models.demo_checkpoint()))
        >>> any(jax.tree.leaves(mask.embed_tokens)), all(jax.tree.leaves(mask.layers.blocks[0][0].self_attn.indexer))
        (False, True)
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: "indexer" in jax.tree_util.keystr(path), model)


def blocks(model: CausalLM) -> Iterator[Block]:
    """The model's blocks, first to last, each with parameters of its own; gradients flow through to the model's.

    Args:
        model: the model.

    Returns:
        An iterator over them.

    Example:
        >>> from mla_jax import models
        >>> model = models.abstract_model(models.demo_checkpoint())
        >>> [type(block.mlp).__name__ for block in models.train.blocks(model)]
        ['MLP', 'MoE', 'MoE']
    """
    return iter(model.layers)


def _check_tokens(op: str, model: CausalLM, tokens: Any, stage: str) -> Int32[Array, "B T"]:
    if stage not in STAGES:
        raise ValueError(f"{op}: stage must be one of {', '.join(map(repr, STAGES))}, got {stage!r}")
    if stage != "dense" and model.spec.geometry.indexer is None:
        raise ValueError(f"{op}: stage {stage!r} trains an indexer, and {model.spec.model_type} has none; use stage='dense'")
    return checks.integers(op, "tokens", tokens, 2)


def _run(
    model: CausalLM, ids: Int32[Array, "B T"], stage: Stage, rounding: CacheConfig | None, segment_ids: Any, dtype: Any
) -> tuple[Float[Array, "B T V"], Float[Array, ""], Float[Array, ""]]:
    """Logits, the sum of the indexers' losses, and the mean of the experts' balance."""
    B, T = ids.shape
    nowhere = jnp.zeros((B * T,), jnp.int32)
    step = make_step(nowhere, jnp.zeros((B, 1), jnp.int32), jnp.full((B,), T, jnp.int32), None, model.spec.rope)
    x = model.embed_tokens(ids.reshape(-1)).astype(dtype or model.dtype)
    run = _Attending((B, T), step, stage, rounding, segment_ids)
    positions, kls, balances = None, [], []
    for block in blocks(model):
        attended, positions, kl = run(block.self_attn, block.input_layernorm(x), positions)
        x = x + attended
        out, balance = _feed_forward(block.mlp, block.post_attention_layernorm(x))
        x = x + out
        kls += [] if kl is None else [kl]
        balances += [] if balance is None else [balance]
    predictions = model.logits(x).reshape(B, T, -1)
    return predictions, sum(kls, jnp.float32(0)), sum(balances, jnp.float32(0)) / np.float32(max(len(balances), 1))


class _Attending(NamedTuple):
    """Attention over B sequences of T tokens: what is the same in every layer."""

    shape: tuple[int, int]
    step: Step
    stage: Stage
    rounding: CacheConfig | None
    segment_ids: Any

    def __call__(
        self, attention: MLAttention, x: Float[Array, "N D"], positions: Int32[Array, "B T K"] | None
    ) -> tuple[Float[Array, "N D"], Int32[Array, "B T K"] | None, Float[Array, ""] | None]:
        """The output, the selection for the next layer, and the indexer's loss, None without an indexer."""
        step, geometry = self.step, attention.geometry
        q_latent, q = attention.queries(x)
        q_nope, q_rope = jnp.split(q, [geometry.qk_nope_head_dim], axis=-1)
        q_rope = rotate(q_rope, step.cos, step.sin, interleaved=attention.rope_interleaved)
        precision = matmul_precision(x.dtype)
        q_absorbed = jnp.einsum("thn,hnr->thr", q_nope, attention.w_uk[...].astype(x.dtype), precision=precision)
        c_kv, k_rope = attention.rows(x, step)
        if self.rounding is not None:
            c_kv, k_rope = mla.straight_through(c_kv, k_rope, self.rounding.layout)
        q_absorbed, q_rope, c_kv, k_rope = (a.reshape(*self.shape, *a.shape[1:]) for a in (q_absorbed, q_rope, c_kv, k_rope))
        options: dict[str, Any] = {"softmax_scale": geometry.softmax_scale}
        seen: dict[str, Any] = {"segment_ids": self.segment_ids}
        scores = None
        if attention.indexer is not None and self.stage != "dense":
            assert q_latent is not None
            scores = self._scores(attention, jax.lax.stop_gradient(x), jax.lax.stop_gradient(q_latent))
        if self.stage == "sparse":
            if scores is not None:
                assert geometry.indexer is not None
                positions = self._select(scores, geometry.indexer.topk)
            assert positions is not None
            out, _ = mla.sparse_attention(q_absorbed, q_rope, c_kv, k_rope, positions, **options)
        else:
            out, _ = mla.attention(q_absorbed, q_rope, c_kv, k_rope, **options, **seen)
        kl = None
        if scores is not None:
            seen = {"positions": positions} if self.stage == "sparse" else seen
            target = mla.attention_distribution(q_absorbed, q_rope, c_kv, k_rope, **options, **seen)
            kl = mla.indexer_kl(scores, target, positions=positions)
        out = out.reshape(-1, *out.shape[2:])
        heads_out = jnp.einsum("thr,hvr->thv", out, attention.w_uv[...].astype(x.dtype), precision=precision)
        return attention.o_proj(heads_out.reshape(x.shape[0], -1)), positions, kl

    def _scores(self, attention: MLAttention, x: Float[Array, "N D"], q_latent: Float[Array, "N Q"]) -> Float[Array, "B T T"]:
        assert attention.indexer is not None
        q, weights = attention.indexer.queries(x, q_latent, self.step)
        keys = attention.indexer.keys(x, self.step)
        if self.rounding is not None and self.rounding.index_layout is not None:
            keys = mla.straight_through_index(keys, self.rounding.index_layout)
        arrays = (a.reshape(*self.shape, *a.shape[1:]) for a in (q, weights, keys))
        return mla.indexer_scores(*arrays, segment_ids=self.segment_ids)

    def _select(self, scores: Float[Array, "B T T"], topk: int) -> Int32[Array, "B T K"]:
        B, T = self.shape
        rows = jax.lax.stop_gradient(scores).reshape(B * T, T)
        visible = jnp.tile(jnp.arange(1, T + 1, dtype=jnp.int32), B)
        return mla.select_topk(rows, visible, min(topk, T)).reshape(B, T, -1)


def _feed_forward(mlp: MLP | MoE, x: Float[Array, "N D"]) -> tuple[Float[Array, "N D"], Float[Array, ""] | None]:
    """The output, and for a layer with experts its balance."""
    if not isinstance(mlp, MoE):
        return mlp(x), None
    ids, weights = mlp.gate(x)
    num_experts = mlp.num_experts
    is_chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32)
    routed = _all_experts(mlp, x, jnp.sum(is_chosen * weights[..., None], axis=1))
    share = jnp.mean(jnp.sum(is_chosen, axis=1), axis=0) * np.float32(num_experts / ids.shape[1])
    balance = jnp.sum(share * jnp.mean(_scores_of_all(mlp.gate, x), axis=0))
    return routed if mlp.shared_experts is None else routed + mlp.shared_experts(x), balance


def _all_experts(mlp: MoE, x: Float[Array, "N D"], weights: Float[Array, "N E"]) -> Float[Array, "N D"]:
    """Every expert applied to every token, times its weight, 0 where not chosen.

    That is E/k times the products of a sorted form, which however is a loop over tiles: its gradient would add up one array
    of all experts' weights a tile. Meant for the few experts of models that fit on one device.
    """
    precision = matmul_precision(x.dtype)
    gate_up, down = mlp.experts.gate_up[...].astype(x.dtype), mlp.experts.down[...].astype(x.dtype)
    gate, up = jnp.split(jnp.einsum("td,edm->tem", x, gate_up, precision=precision), 2, axis=-1)
    hidden = jax.nn.silu(gate) * up * weights[..., None].astype(x.dtype)
    return jnp.einsum("tem,emd->td", hidden, down, precision=precision)


def _scores_of_all(gate: Router, x: Float[Array, "N D"]) -> Float[Array, "N E"]:
    """The router's scores of all experts, divided by their sum."""
    products = jnp.einsum("td,ed->te", x.astype(jnp.float32), gate.weight[...].astype(jnp.float32))
    scores = jax.nn.softmax(products, axis=-1) if gate.spec.scoring == "softmax" else jax.nn.sigmoid(products)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + np.float32(1e-20))
