"""Models: checkpoints to Flax modules, whole forward passes and generation over a paged cache.

Models and layers are NNX modules. Inside a Linen module they are called through Flax's bridge, the cache an argument and a result
as ever; a loaded model's weights become the variables::

    from flax import nnx
    from flax.nnx import bridge

    model = models.from_pretrained(folder)
    linen = bridge.to_linen(models.CausalLM, model.spec, dtype=model.dtype)
    variables = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    logits, cache = linen.apply(variables, tokens, cache, slots, block_tables, lengths, cu_q_lens)
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
