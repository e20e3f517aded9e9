"""A model's training step: equal to the cached forward pass, trained where it should be, and learning."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import QUICK, TINY, run
from mla_jax import models
from mla_jax.models import train

GLM: dict[str, Any] = {**TINY, "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "kv_lora_rank": 128}


@functools.cache
def model(**changes: Any) -> models.CausalLM:
    spec = models.parse_config({**GLM, **changes})
    return quick(lambda: models.CausalLM(spec, rngs=nnx.Rngs(0)))()


ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
"""A single layer with experts, which compiles in half the time."""


def ids(rng: np.random.Generator, B: int = 2, T: int = 17) -> np.ndarray:
    return rng.integers(0, GLM["vocab_size"], (B, T)).astype(np.int32)


def quick(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(fn, compiler_options=dict(QUICK))


def gradient(**options: Any) -> Callable[..., Any]:
    """(model, tokens) -> ((loss, metrics), gradients)."""
    return quick(jax.value_and_grad(lambda m, tokens: train.loss(m, tokens, **options), has_aux=True))


def largest(grads: Any, *, of_indexer: bool) -> float:
    """The largest magnitude among the gradients of the indexers, or of everything else."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(train.indexer_mask(grads)), strict=True)
    return max(float(jnp.max(jnp.abs(g))) for g, own in pairs if own == of_indexer)


@pytest.mark.slow
def test_logits_are_those_of_the_cached_forward_pass(rng):
    tokens = ids(rng)
    hidden, *_ = run(model(), tokens)
    got = quick(lambda m, t: train.logits(m, t, stage="sparse"))(model(), tokens)
    np.testing.assert_allclose(got.reshape(34, -1), model().logits(hidden), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_pattern": "FSS", "num_hidden_layers": 3},
        {"model_type": "deepseek_v32"},
        {"model_type": "deepseek_v3"},
        {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    ],
    ids=lambda changes: changes.get("model_type", "shared"),
)
def test_logits_of_other_families(changes, rng):
    other = model(**changes)
    stage = "sparse" if other.spec.geometry.indexer else "dense"
    tokens = ids(rng)
    hidden, *_ = run(other, tokens)
    got = quick(lambda m, t: train.logits(m, t, stage=stage))(other, tokens)
    np.testing.assert_allclose(got.reshape(34, -1), other.logits(hidden), atol=1e-4)


@pytest.mark.slow
def test_logits_of_the_demo_model(rng):
    demo = models.from_pretrained(models.demo_checkpoint())
    tokens = rng.integers(0, 256, (2, 50)).astype(np.int32)
    want = models.forward(demo, tokens, kv_cache_dtype="float32")
    np.testing.assert_allclose(quick(lambda m, t: train.logits(m, t, stage="sparse"))(demo, tokens), want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["raw", "packed"])
def test_straight_through_rounds_as_the_cache_does(packed, rng):
    tokens = ids(rng, T=40)
    flags: dict[str, Any] = {"nsa_kv_cache_store_fp8": True} if packed else {"kv_cache_dtype": "fp8_e4m3"}
    want = models.forward(model(), tokens, page_size=8, **flags)
    options: dict[str, Any] = {"stage": "sparse", "straight_through": model().cache_config(num_pages=2, **flags)}
    got = quick(lambda m, t: train.logits(m, t, **options))(model(), tokens)
    plain = quick(lambda m, t: train.logits(m, t, stage="sparse"))(model(), tokens)
    # A number at a tie may get the neighbouring code, as the two multiply in another order; few do.
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(plain - want)
    _, grads = gradient(**options)(model(), tokens)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
    assert largest(grads, of_indexer=True) > 0 and largest(grads, of_indexer=False) > 0


@pytest.mark.slow
def test_each_loss_trains_its_own_part(rng):
    tokens = ids(rng)
    (value, metrics), grads = gradient(stage="dense_warmup")(model(**ONE_LAYER), tokens)
    assert value == metrics.indexer_kl > 0
    assert largest(grads, of_indexer=True) > 0 and largest(grads, of_indexer=False) == 0


def learned(stage: train.Stage, rate: float, tokens: np.ndarray, **options: Any) -> list[train.Metrics]:
    """Metrics over some steps of plain gradient descent on one batch."""

    @quick
    def step(m: models.CausalLM) -> Any:
        (_, metrics), grads = jax.value_and_grad(lambda m: train.loss(m, tokens, stage=stage, **options), has_aux=True)(m)
        return jax.tree.map(lambda p, g: p - rate * g, m, grads), metrics

    current, history = model(**ONE_LAYER), []
    for _ in range(12):
        current, metrics = step(current)
        history.append(metrics)
    return history


@pytest.mark.slow
def test_a_few_sparse_steps_learn_a_batch(rng):
    first, *_, last = learned("sparse", 0.1, ids(rng), balance_weight=0.01)
    assert last.cross_entropy < 0.9 * first.cross_entropy
    assert first.indexer_kl > 0 and 0.8 < first.balance < 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "part"), [("dense", "cross_entropy"), ("dense_warmup", "indexer_kl")])
def test_the_other_stages_learn(stage, part, rng):
    first, *_, last = learned(stage, 0.1, ids(rng))
    assert getattr(last, part) < 0.9 * getattr(first, part)
    if stage == "dense_warmup":
        assert last.cross_entropy == first.cross_entropy


@pytest.mark.slow
def test_mask_and_correct(rng):
    tokens, mask = ids(rng), rng.random((2, 17)) < 0.5
    value, metrics = train.loss(model(), tokens, mask, stage="dense")
    predictions = np.asarray(train.logits(model(), tokens, stage="dense"), np.float64)
    log_p = predictions - np.log(np.exp(predictions).sum(-1, keepdims=True))
    picked = [log_p[b, t - 1, tokens[b, t]] for b in range(2) for t in range(1, 17) if mask[b, t]]
    np.testing.assert_allclose(value, -np.mean(picked), rtol=1e-5)
    assert np.array_equal(metrics.correct[:, 1:], predictions[:, :-1].argmax(-1) == tokens[:, 1:])
    assert not np.any(np.asarray(metrics.correct)[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_segments_do_not_see_each_other(stage, rng):
    tokens = ids(rng, T=16)
    segments = np.repeat([[0, 1]], 2, axis=0).repeat(8, axis=1).astype(np.int32)
    packed = quick(lambda m, t: train.logits(m, t, stage=stage, segment_ids=segments))(model(), tokens)
    alone = quick(lambda m, t: train.logits(m, t, stage=stage))(model(), tokens[:, 8:])
    np.testing.assert_allclose(packed[:, 8:], alone, atol=1e-4)


def test_errors():
    tokens = np.zeros((1, 3), np.int32)
    glm, v3 = (models.abstract_model({**GLM, "model_type": name}) for name in ("glm_moe_dsa", "deepseek_v3"))
    with pytest.raises(ValueError, match="stage must be one of 'dense', 'dense_warmup', 'sparse', got 'warm'"):
        train.loss(glm, tokens, stage="warm")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="deepseek_v3 has none; use stage='dense'"):
        train.loss(v3, tokens, stage="sparse")
    with pytest.raises(ValueError, match="expected mask of shape"):
        train.loss(glm, tokens, np.ones((1, 4), bool), stage="dense")
    with pytest.raises(TypeError, match="tokens must be an array of int32"):
        train.loss(glm, tokens.astype(np.float32), stage="dense")
