"""Models: checkpoints to Flax modules, whole forward passes and generation over a paged cache."""

from mla_jax.models.demo import demo_checkpoint as demo_checkpoint
from mla_jax.models.forward import forward as forward
from mla_jax.models.generate import generate as generate
from mla_jax.models.loading import from_pretrained as from_pretrained
from mla_jax.models.model import CausalLM as CausalLM
from mla_jax.models.spec import FAMILIES as FAMILIES
from mla_jax.models.spec import ModelSpec as ModelSpec
from mla_jax.models.spec import load_spec as load_spec
from mla_jax.models.spec import parse_config as parse_config
