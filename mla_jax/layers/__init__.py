"""Flax NNX layers of MLA models. Attribute names follow the keys of released checkpoints."""

from mla_jax.layers.attention import AttentionKind as AttentionKind
from mla_jax.layers.attention import MLAttention as MLAttention
from mla_jax.layers.block import Block as Block
from mla_jax.layers.block import BlockTrace as BlockTrace
from mla_jax.layers.indexer import Indexer as Indexer
from mla_jax.layers.indexer import Selection as Selection
from mla_jax.layers.linear import Linear as Linear
from mla_jax.layers.mlp import MLP as MLP
from mla_jax.layers.moe import Experts as Experts
from mla_jax.layers.moe import MoE as MoE
from mla_jax.layers.norms import LayerNorm as LayerNorm
from mla_jax.layers.norms import RMSNorm as RMSNorm
from mla_jax.layers.rope import RopeSpec as RopeSpec
from mla_jax.layers.rope import YarnSpec as YarnSpec
from mla_jax.layers.rope import cos_sin as cos_sin
from mla_jax.layers.rope import rotate as rotate
from mla_jax.layers.rope import to_half_split as to_half_split
from mla_jax.layers.router import Router as Router
from mla_jax.layers.router import RoutingSpec as RoutingSpec
from mla_jax.layers.stack import LayerStack as LayerStack
from mla_jax.layers.stack import Place as Place
from mla_jax.layers.stack import Segment as Segment
from mla_jax.layers.stack import plan_segments as plan_segments
from mla_jax.layers.step import Step as Step
from mla_jax.layers.step import make_step as make_step

__all__ = [
    "MLP",
    "AttentionKind",
    "Block",
    "BlockTrace",
    "Experts",
    "Indexer",
    "LayerNorm",
    "LayerStack",
    "Linear",
    "MLAttention",
    "MoE",
    "Place",
    "RMSNorm",
    "RopeSpec",
    "Router",
    "RoutingSpec",
    "Segment",
    "Selection",
    "Step",
    "YarnSpec",
    "cos_sin",
    "make_step",
    "plan_segments",
    "rotate",
    "to_half_split",
]
