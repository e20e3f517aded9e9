"""Models: checkpoints to Flax modules, whole forward passes and generation over a paged cache.

Models and layers are NNX modules. Inside a Linen module they are called through Flax's bridge, the cache an argument and a result
as ever; a loaded model's weights become the variables:

    >>> import jax, jax.numpy as jnp, mla_jax as mla
    >>> from flax import nnx
    >>> from flax.nnx import bridge
    >>> from mla_jax import models
    >>> model = models.abstract_model(models.demo_checkpoint())  # or models.from_pretrained(folder)
    >>> linen = bridge.to_linen(models.CausalLM, model.spec, dtype=model.dtype)
    >>> variables = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    >>> cache = mla.init_cache(model.cache_config(num_pages=2, page_size=4, platform="cpu"))
    >>> batch = jnp.array([4, 5]), jnp.array([[1]]), jnp.array([2]), jnp.array([0, 2])
    >>> logits, cache = jax.eval_shape(linen.apply, variables, jnp.array([72, 105]), cache, *batch)
    >>> logits.shape
    (2, 256)
"""

from mla_jax.models import train as train
from mla_jax.models.abstract import abstract_model as abstract_model
from mla_jax.models.abstract import parameter_count as parameter_count
from mla_jax.models.demo import demo_checkpoint as demo_checkpoint
from mla_jax.models.forward import forward as forward
from mla_jax.models.generate import generate as generate
from mla_jax.models.loading import from_pretrained as from_pretrained
from mla_jax.models.model import CausalLM as CausalLM
from mla_jax.models.spec import FAMILIES as FAMILIES
from mla_jax.models.spec import ModelSpec as ModelSpec
from mla_jax.models.spec import load_spec as load_spec
from mla_jax.models.spec import parse_config as parse_config

__all__ = [
    "FAMILIES",
    "CausalLM",
    "ModelSpec",
    "abstract_model",
    "demo_checkpoint",
    "forward",
    "from_pretrained",
    "generate",
    "load_spec",
    "parameter_count",
    "parse_config",
    "train",
]
