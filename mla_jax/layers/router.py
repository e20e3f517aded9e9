"""Router: which experts a token visits, and with what weight."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax.layers.linear import matmul_precision, normal_init

Scoring = Literal["sigmoid", "softmax"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """How tokens choose experts.

    Attributes:
        num_experts: E.
        topk: experts a token visits.
        scoring: "sigmoid" (DeepSeek-V3, arXiv 2412.19437, section 2.1.2: choose by score + bias, weigh by the score alone) or
            "softmax" (DeepSeek-V2: one score for both, no bias).
        num_groups: experts are split into this many groups of equal size; None: no groups.
        topk_groups: groups a token may choose from.
        normalise: divide the weights by their sum.
        scaling_factor: multiplies the weights at the end.

    Raises:
        ValueError: for a topk that does not fit, an unknown scoring, or groups that do not divide the experts.

    Example:
        >>> from mla_jax import layers
        >>> layers.RoutingSpec(num_experts=8, topk=2, scoring="sigmoid", num_groups=4, topk_groups=2).normalise
        False
    """

    num_experts: int
    topk: int
    scoring: Scoring
    num_groups: int | None = None
    topk_groups: int | None = None
    normalise: bool = False
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(f"RoutingSpec: topk must be in 1..{self.num_experts} (num_experts), got {self.topk}")
        if self.scoring not in ("sigmoid", "softmax"):
            raise ValueError(f"RoutingSpec: scoring must be 'sigmoid' or 'softmax', got {self.scoring!r}")
        if self.num_groups is None:
            return
        least = 2 if self.scoring == "sigmoid" else 1  # A sigmoid group's score is the sum of its two largest.
        if self.num_groups < 1 or self.num_experts % self.num_groups or self.num_experts // self.num_groups < least:
            raise ValueError(
                f"RoutingSpec: num_groups must divide num_experts into groups of at least {least}, "
                f"got {self.num_experts} experts in {self.num_groups} groups"
            )
        if self.topk_groups is None or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"RoutingSpec: topk_groups must be in 1..{self.num_groups} (num_groups), got {self.topk_groups}")
        if self.topk > self.topk_groups * (self.num_experts // self.num_groups):
            raise ValueError(
                f"RoutingSpec: topk={self.topk} experts do not fit in {self.topk_groups} groups of "
                f"{self.num_experts // self.num_groups}"
            )


class Router(nnx.Module):
    """Scores every expert in float32 and keeps the best.

    Args:
        hidden_size: D.
        spec: the rule.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> spec = layers.RoutingSpec(num_experts=4, topk=2, scoring="sigmoid", normalise=True, scaling_factor=2.5)
        >>> router = nnx.eval_shape(lambda: layers.Router(4, spec, rngs=nnx.Rngs(0)))
        >>> router.weight, router.e_score_correction_bias = nnx.Param(jnp.eye(4)), nnx.Param(jnp.zeros(4))
        >>> ids, weights = jax.jit(lambda x: router(x))(jnp.array([[0.0, 3.0, 1.0, 3.0]]))
        >>> sorted(ids[0].tolist()), weights.tolist()
        ([1, 3], [[1.25, 1.25]])
    """

    def __init__(self, hidden_size: int, spec: RoutingSpec, *, dtype: jax.typing.DTypeLike = jnp.float32, rngs: nnx.Rngs) -> None:
        self.weight = normal_init(rngs, (spec.num_experts, hidden_size), hidden_size, dtype)
        has_bias = spec.scoring == "sigmoid"
        self.e_score_correction_bias = nnx.Param(jnp.zeros((spec.num_experts,), jnp.float32)) if has_bias else None
        self.spec = spec

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
        """The experts that each token visits, and their weights.

        Rules of transformers 5.24.0 ``DeepseekV3TopkRouter`` / ``DeepseekV2Moe`` (the latter never normalises).

        Args:
            x: [T, D].

        Returns:
            Ids int32 [T, k] of the chosen experts, in no promised order, and their float32 weights [T, k].
        """
        spec = self.spec
        x32, weight = x.astype(jnp.float32), self.weight[...].astype(jnp.float32)
        logits = jnp.einsum("td,ed->te", x32, weight, precision=matmul_precision(jnp.float32))
        if self.e_score_correction_bias is None:
            scores = choice = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
            choice = scores + self.e_score_correction_bias[...].astype(jnp.float32)
        choice = self._within_groups(choice)
        ids = jax.lax.top_k(choice, spec.topk)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if spec.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return ids, weights * spec.scaling_factor

    def _within_groups(self, choice: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Scores of experts outside the best groups replaced by one that loses: -inf, or 0 for softmax as in DeepSeek-V2."""
        spec = self.spec
        if spec.num_groups is None or spec.topk_groups is None:
            return choice
        grouped = choice.reshape(choice.shape[0], spec.num_groups, -1)
        if spec.scoring == "sigmoid":
            group_scores, loser = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1), -jnp.inf
        else:
            group_scores, loser = jnp.max(grouped, axis=-1), 0.0
        best = jax.lax.top_k(group_scores, spec.topk_groups)[1]
        kept = jnp.any(best[:, :, None] == jnp.arange(spec.num_groups), axis=1)
        return jnp.where(kept[:, :, None], grouped, loser).reshape(choice.shape)
