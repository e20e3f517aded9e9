"""ModelSpec: everything that config.json says about a model, in one spelling. What differs between families is data here."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp

from mla_jax import geometry as geometries
from mla_jax.geometry import IndexerGeometry, MLAGeometry
from mla_jax.layers.attention import AttentionKind
from mla_jax.layers.rope import RopeSpec, YarnSpec
from mla_jax.layers.router import RoutingSpec, Scoring

HF_LATENT_NORM_EPS = 1e-6
"""q_a_layernorm's and kv_a_layernorm's in transformers 5.24.0, which never hands them the config's rms_norm_eps."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model_type decides and its config.json does not say, or says in vain. Read from transformers 5.24.0.

    Attributes:
        scoring: of the router.
        reads_rope_interleave: whether the key counts; where not, pairs are interleaved.
        index_rope_interleaved: pairing in the indexer; None: no indexer.
        dense_layers: which layers have no experts: "first_k" those below first_k_dense_replace; "listed" those that
            mlp_layer_types lists, else as "first_k"; "listed_or_one" listed, else layer 0 alone.
        reads_norm_topk_prob: whether the key counts; where not, weights are not normalised.
        shares_selections: whether layers may reuse the selection of one before them.
        text_prefix: of a model of several parts: its config.json nests the text part's as text_config, whose tensors' keys begin
            so; all others are passed over.
    """

    scoring: Scoring = "sigmoid"
    reads_rope_interleave: bool = True
    index_rope_interleaved: bool | None = None
    dense_layers: Literal["first_k", "listed", "listed_or_one"] = "first_k"
    reads_norm_topk_prob: bool = True
    shares_selections: bool = False
    text_prefix: str = ""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": Family(scoring="softmax", reads_rope_interleave=False, reads_norm_topk_prob=False),
        "deepseek_v3": Family(),
        "deepseek_v32": Family(reads_rope_interleave=False, index_rope_interleaved=False, dense_layers="listed"),
        "glm4_moe_lite": Family(dense_layers="listed_or_one"),
        "glm_moe_dsa": Family(
            reads_rope_interleave=False, index_rope_interleaved=True, dense_layers="listed", shares_selections=True
        ),
        "kimi_k2": Family(),
        "kimi_k25": Family(text_prefix="language_model."),
    }
)
"""By model_type. kimi_k2 is DeepSeek-V3's code under another name; kimi_k25 is a kimi_k2 that also sees.

Example:
    >>> from mla_jax import models
    >>> sorted(models.FAMILIES)
    ['deepseek_v2', 'deepseek_v3', 'deepseek_v32', 'glm4_moe_lite', 'glm_moe_dsa', 'kimi_k2', 'kimi_k25']
"""

_TEXT_TYPES = ("kimi_k2", "deepseek_v3")
"""What the text part of a kimi_k25 may be called: in releases, and by transformers, which rewrites it."""

_SHARED_KEYS = (("dtype", "torch_dtype"), ("eos_token_id",), ("quantization_config",), ("tie_word_embeddings",))
"""Keys, in groups of one meaning, that a text part without them takes from the whole model's config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Sizes of the experts: ``intermediate_size`` of one, and how many are shared; the router's rule counts the others."""

    intermediate_size: int
    num_shared: int
    routing: RoutingSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as data. Hashable; two spellings of one config give equal specs.

    Attributes:
        model_type: a key of FAMILIES.
        vocab_size: tokens.
        hidden_size: D.
        intermediate_size: width of a dense layer's MLP.
        attention_kinds: for each layer "dense", "full" or "shared".
        moe_layers: for each layer whether it has experts.
        geometry: the attention's dimensions and softmax scale.
        rope: the rotation, of the attention and of the indexer.
        rope_interleaved: pairing in the attention.
        index_rope_interleaved: pairing in the indexer.
        moe: the experts, None without any.
        norm_eps: of the norms at layers' inputs and at the end.
        latent_norm_eps: of q_a_layernorm and kv_a_layernorm.
        attention_bias: whether the attention's down- and output projections have one.
        tie_word_embeddings: the head is the embedding.
        dtype: name of the type the model computes in; None where config.json does not say.
        fp8_block: (rows, columns) of one scale of FP8 weights; None: weights are not quantised.
        eos_ids: ids that end a text.
        key_prefix: what the checkpoint's keys begin with, before "model." and "lm_head.".

    Example:
        >>> from mla_jax import models
        >>> spec = models.load_spec(models.demo_checkpoint())
        >>> isinstance(spec, models.ModelSpec), spec.model_type, spec.num_layers, spec.index_layers
        (True, 'glm_moe_dsa', 3, (0, 1, 2))
        >>> spec.layer_kinds  # (attention, has experts)
        (('full', False), ('full', True), ('full', True))
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention_kinds: tuple[AttentionKind, ...]
    moe_layers: tuple[bool, ...]
    geometry: MLAGeometry
    rope: RopeSpec
    rope_interleaved: bool
    index_rope_interleaved: bool
    moe: MoESpec | None
    norm_eps: float
    latent_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: str | None
    fp8_block: tuple[int, int] | None
    eos_ids: tuple[int, ...]
    key_prefix: str = ""

    @property
    def num_layers(self) -> int:
        """Layers that the model runs; multi-token prediction layers are not among them."""
        return len(self.attention_kinds)

    @property
    def layer_kinds(self) -> tuple[tuple[AttentionKind, bool], ...]:
        """For each layer all that tells its block from others; equal kinds have parameters of equal shapes and one program."""
        return tuple(zip(self.attention_kinds, self.moe_layers, strict=True))

    @property
    def index_layers(self) -> tuple[int | None, ...]:
        """For each layer, which index layer of the cache is its own; None for those that have none."""
        numbers, count = [], 0
        for kind in self.attention_kinds:
            numbers.append(count if kind == "full" else None)
            count += kind == "full"
        return tuple(numbers)


def load_spec(folder: str | Path, latent_norm_eps: float | str | None = None) -> ModelSpec:
    """The spec of the checkpoint in ``folder``, from its config.json.

    Args:
        folder: the checkpoint.
        latent_norm_eps: as in :func:`parse_config`.

    Returns:
        The spec.

    Raises:
        FileNotFoundError: without a config.json.
        ValueError: as :func:`parse_config`.

    Example:
        >>> from mla_jax import models
        >>> models.load_spec(models.demo_checkpoint()).geometry.kv_lora_rank
        128
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a checkpoint folder holds config.json and safetensors files")
    return parse_config(json.loads(path.read_text(encoding="utf-8")), latent_norm_eps)


def parse_config(config: Mapping[str, Any], latent_norm_eps: float | str | None = None) -> ModelSpec:
    """The spec that a config.json describes, in the spelling of transformers 5 or in that of releases.

    Args:
        config: the parsed file.
        latent_norm_eps: None: 1e-6, as transformers computes; "config": rms_norm_eps, as vLLM and SGLang do; or a number.

    Returns:
        The spec.

    Raises:
        ValueError: for an unknown model_type, a missing key, or a feature that is not implemented, by name.

    Example:
        >>> import json
        >>> from mla_jax import models
        >>> config = json.loads((models.demo_checkpoint() / "config.json").read_text())
        >>> spec = models.parse_config({**config, "index_topk_pattern": "FSS"}, latent_norm_eps="config")
        >>> spec.attention_kinds, spec.index_layers, spec.latent_norm_eps
        (('full', 'shared', 'shared'), (0, None, None), 1e-05)
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"unknown model_type {model_type!r}; known are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    if family.text_prefix:
        config = _text_config(config)
    keys = _Keys(config)
    if keys.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act must be 'silu', got {config['hidden_act']!r}")
    if keys.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1, got {config['partial_rotary_factor']!r}")
    num_layers = keys.integer("num_hidden_layers")
    norm_eps = float(keys["rms_norm_eps"])
    rope = _rope(keys)
    moe_layers = _moe_layers(keys, family, num_layers)
    return ModelSpec(
        model_type=model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        attention_kinds=_attention_kinds(keys, family, num_layers),
        moe_layers=moe_layers,
        geometry=_geometry(keys, family, rope.yarn),
        rope=rope,
        rope_interleaved=bool(keys.get("rope_interleave", True)) if family.reads_rope_interleave else True,
        index_rope_interleaved=bool(family.index_rope_interleaved),
        moe=_moe(keys, family) if any(moe_layers) else None,
        norm_eps=norm_eps,
        latent_norm_eps=_latent_norm_eps(latent_norm_eps, norm_eps),
        attention_bias=bool(keys.get("attention_bias", False)),
        tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
        dtype=_dtype(keys),
        fp8_block=_fp8_block(keys),
        eos_ids=_eos_ids(keys),
        key_prefix=family.text_prefix,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part, with what it leaves to the whole model's."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: {config['model_type']} needs the key 'text_config', a config of its own, got {text!r}")
    if text.get("model_type") not in _TEXT_TYPES:
        raise ValueError(f"config.json: text_config's model_type must be one of {_TEXT_TYPES}, got {text.get('model_type')!r}")
    text = {key: value for key, value in text.items() if value is not None}
    for group in _SHARED_KEYS:
        if not any(key in text for key in group):
            text |= {key: config[key] for key in group if key in config}
    return text


class _Keys:
    """config.json with null read as absent, and missing keys reported by name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {key: value for key, value in config.items() if value is not None}

    def __getitem__(self, key: str) -> Any:
        if key not in self._config:
            raise ValueError(f"config.json: the key {key!r} is missing")
        return self._config[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._config.get(key, default)

    def integer(self, key: str) -> int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def per_layer(self, key: str, num_layers: int, names: Mapping[str, str]) -> tuple[str, ...] | None:
        """The list at ``key``, one entry a layer, translated by ``names``; None without the key."""
        value = self.get(key)
        if value is None:
            return None
        if len(value) < num_layers:
            raise ValueError(f"config.json: {key} has {len(value)} entries for {num_layers} layers")
        unknown = sorted(set(value[:num_layers]) - set(names))
        if unknown:
            raise ValueError(f"config.json: {key} may hold {sorted(names)}, got {unknown}")
        return tuple(names[entry] for entry in value[:num_layers])


def _rope(keys: _Keys) -> RopeSpec:
    """The rotation from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (releases)."""
    parameters = {**keys.get("rope_scaling", {}), **keys.get("rope_parameters", {})}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    theta = float(parameters.get("rope_theta", keys.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # head_dim is never asked: releases put the rope width there, or the nope width, or nothing.
    dim = keys.integer("qk_rope_head_dim")
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    if kind != "yarn":
        raise ValueError(f"config.json: rope_type must be 'default' or 'yarn', got {kind!r}")
    if not parameters.get("truncate", True):
        raise ValueError("config.json: yarn with truncate=false is not implemented")
    if "factor" not in parameters:
        raise ValueError("config.json: yarn needs the key 'factor'")

    def number(key: str, default: float | None = None) -> float | None:
        return float(parameters[key]) if key in parameters else default

    original = parameters.get("original_max_position_embeddings") or keys["max_position_embeddings"]
    yarn = YarnSpec(
        factor=float(parameters["factor"]),
        original_max_position_embeddings=int(original),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=number("attention_factor"),
    )
    return RopeSpec(dim=dim, theta=theta, yarn=yarn)


def _geometry(keys: _Keys, family: Family, yarn: YarnSpec | None) -> MLAGeometry:
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    indexer = None
    if family.index_rope_interleaved is not None:
        indexer = IndexerGeometry(
            num_heads=keys.integer("index_n_heads"), head_dim=keys.integer("index_head_dim"), topk=keys.integer("index_topk")
        )
        if indexer.head_dim < rope:
            raise ValueError(f"config.json: index_head_dim must be >= qk_rope_head_dim={rope}, got {indexer.head_dim}")
        keys.integer("q_lora_rank")  # The indexer's queries come from the query latent.
    scale = geometries.softmax_scale(nope, rope)
    if yarn is not None:
        scale = geometries.softmax_scale(nope, rope, yarn_factor=yarn.factor, mscale_all_dim=yarn.mscale_all_dim or 0.0)
    return MLAGeometry(
        num_heads=keys.integer("num_attention_heads"),
        q_lora_rank=keys.get("q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.integer("v_head_dim"),
        softmax_scale=scale,
        indexer=indexer,
    )


def _attention_kinds(keys: _Keys, family: Family, num_layers: int) -> tuple[AttentionKind, ...]:
    """``indexer_types``, else ``index_topk_pattern``, else ``index_topk_freq`` with ``index_skip_topk_offset``."""
    if family.index_rope_interleaved is None:
        return ("dense",) * num_layers
    if not family.shares_selections:
        return ("full",) * num_layers
    listed = keys.per_layer("indexer_types", num_layers, {"full": "full", "shared": "shared"})
    if listed is None:
        letters = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        listed = keys.per_layer("index_topk_pattern", num_layers, letters)
    if listed is None:
        frequency, offset = keys.get("index_topk_freq", 1), keys.get("index_skip_topk_offset", 2)
        listed = tuple("shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(num_layers))
    if listed[0] != "full":
        raise ValueError("config.json: layer 0 must have its own indexer, but it is 'shared'")
    return tuple("full" if kind == "full" else "shared" for kind in listed)


def _moe_layers(keys: _Keys, family: Family, num_layers: int) -> tuple[bool, ...]:
    if family.dense_layers != "first_k":
        listed = keys.per_layer("mlp_layer_types", num_layers, {"dense": "dense", "sparse": "sparse"})
        if listed is not None:
            return tuple(kind == "sparse" for kind in listed)
    # glm4_moe_lite ignores first_k_dense_replace (measured in transformers 5.24.0).
    first = 1 if family.dense_layers == "listed_or_one" else keys["first_k_dense_replace"]
    return tuple(i >= first for i in range(num_layers))


def _moe(keys: _Keys, family: Family) -> MoESpec:
    grouped = True
    if family.scoring == "softmax":
        method = keys["topk_method"]
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"config.json: topk_method must be 'greedy' or 'group_limited_greedy', got {method!r}")
        grouped = method == "group_limited_greedy"
    return MoESpec(
        intermediate_size=keys.integer("moe_intermediate_size"),
        num_shared=keys.get("n_shared_experts", 0),
        routing=RoutingSpec(
            num_experts=keys.integer("n_routed_experts"),
            topk=keys.integer("num_experts_per_tok"),
            scoring=family.scoring,
            num_groups=keys.integer("n_group") if grouped else None,
            topk_groups=keys.integer("topk_group") if grouped else None,
            normalise=bool(keys["norm_topk_prob"]) if family.reads_norm_topk_prob else False,
            scaling_factor=float(keys["routed_scaling_factor"]),
        ),
    )


def _latent_norm_eps(value: float | str | None, norm_eps: float) -> float:
    if value is None:
        return HF_LATENT_NORM_EPS
    if value == "config":
        return norm_eps
    if isinstance(value, bool | str) or not value > 0:
        raise ValueError(f"latent_norm_eps must be None (1e-6), 'config' (rms_norm_eps) or a positive float, got {value!r}")
    return float(value)


def _dtype(keys: _Keys) -> str | None:
    name = keys.get("dtype", keys.get("torch_dtype"))
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"config.json: dtype must be float32, bfloat16 or float16, got {name!r}")
    return jnp.dtype(name).name


def _fp8_block(keys: _Keys) -> tuple[int, int] | None:
    quantization = keys.get("quantization_config")
    if quantization is None:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block is None or len(block) != 2:
        raise ValueError(
            "config.json: quantization_config must have quant_method 'fp8' and a weight_block_size of two numbers, "
            f"got quant_method={method!r}, weight_block_size={block!r}"
        )
    return int(block[0]), int(block[1])


def _eos_ids(keys: _Keys) -> tuple[int, ...]:
    value = keys.get("eos_token_id", ())
    return (value,) if isinstance(value, int) else tuple(int(i) for i in value)
