"""Models without weights: shapes and types of every parameter, for counting, planning and compiling ahead."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mla_jax.models.model import CausalLM
from mla_jax.models.spec import ModelSpec, load_spec, parse_config


def abstract_model(source: ModelSpec | Mapping[str, Any] | str | Path, dtype: jax.typing.DTypeLike | None = None) -> CausalLM:
    """A model whose parameters are ``jax.ShapeDtypeStruct``; nothing is allocated, whatever its size.

    It goes wherever shapes are enough: ``jax.eval_shape``, ``jax.jit(step).lower``, :meth:`CausalLM.cache_config`,
    :func:`parameter_count`.

    Args:
        source: a spec, a parsed config.json, or a folder that holds one.
        dtype: the type it computes in, and of its parameters; None: the spec's, else float32.

    Returns:
        The model.

    Raises:
        FileNotFoundError, ValueError: as :func:`load_spec` and :func:`parse_config`.

    Example:
        >>> from mla_jax import models
        >>> model = models.abstract_model(models.demo_checkpoint())
        >>> model.embed_tokens.weight.shape, models.parameter_count(model.embed_tokens)
        ((256, 64), 16384)
    """
    if isinstance(source, str | Path):
        source = load_spec(source)
    spec = source if isinstance(source, ModelSpec) else parse_config(source)
    return nnx.eval_shape(lambda: CausalLM(spec, dtype=dtype, rngs=nnx.Rngs(0)))


def parameter_count(model: nnx.Module) -> int:
    """Numbers in all parameters of a model or layer, abstract or not. Scales of quantised checkpoints are not counted.

    Args:
        model: the model or layer.

    Returns:
        How many numbers; times the bytes of one it is the size of the weights.

    Example:
        >>> from mla_jax import models
        >>> models.parameter_count(models.abstract_model(models.demo_checkpoint()))
        341600
    """
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
