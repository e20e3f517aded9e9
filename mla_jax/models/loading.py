"""Checkpoints to models: which tensors a parameter is made of, and reading them one at a time."""

import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress

from mla_jax.layers.stack import plan_segments
from mla_jax.models.abstract import abstract_model
from mla_jax.models.model import CausalLM
from mla_jax.models.safetensors_file import open_checkpoint
from mla_jax.models.spec import ModelSpec, load_spec

_FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
_SCALE_SUFFIX = "_scale_inv"

_FLOAT32_NAMES = ("gate.weight", "gate.e_score_correction_bias", "indexer.weights_proj.weight")
"""Parameters that stay float32 whatever ``dtype`` is asked for: they decide which expert or token is taken (transformers too)."""


HOST_BYTES = 2**26
"""Parameters of many tensors are put together on the host up to this size, and larger ones on the device: there no more than one
tensor is held twice, but each kind of tensor needs a small program of its own."""


def from_pretrained(
    folder: str | Path,
    dtype: jax.typing.DTypeLike | None = None,
    latent_norm_eps: float | str | None = None,
    *,
    progress: bool | None = None,
) -> CausalLM:
    """The model in a checkpoint folder: config.json beside model.safetensors, or beside shards and their index.

    Keys are those of the hub. Layers from num_hidden_layers on (multi-token prediction) are skipped. FP8 weights with
    ``weight_scale_inv`` are dequantised block by block to the type the model computes in. Files are mapped, and tensors are read
    one at a time: beyond the model itself, loading holds the largest of them.

    Args:
        folder: the checkpoint.
        dtype: the type the model computes in, and to which its weights are cast; None: config.json's type (where it names none,
            the embedding's), weights as stored. The router's and the indexer's gate stay float32.
        latent_norm_eps: of q_a_layernorm and kv_a_layernorm; None: 1e-6, as transformers computes; "config": rms_norm_eps, as
            vLLM and SGLang do; or a number.
        progress: show a bar on stderr; None: if that is a terminal.

    Returns:
        The model, on the default device.

    Raises:
        FileNotFoundError: without config.json, weights, or a shard.
        ValueError: for a config that :func:`mla_jax.models.parse_config` refuses, or tensors that are missing, unexpected or of
            another shape, by name.

    Example:
        >>> from mla_jax import models
        >>> model = models.from_pretrained(models.demo_checkpoint())
        >>> model.dtype.name, model.embed_tokens.weight.shape, len(model.layers)
        ('float32', (256, 64), 3)
    """
    spec = load_spec(folder, latent_norm_eps)
    tensors = open_checkpoint(folder)
    compute_dtype = _compute_dtype(dtype, spec, tensors)
    graphdef, state = nnx.split(abstract_model(spec, compute_dtype))
    variables = list(nnx.to_flat_state(state))
    sources = [_source(spec, path, tuple(variable.shape)) for path, variable in variables]
    reader = _Reader(tensors, spec.fp8_block, compute_dtype)
    _check_keys(folder, spec, sources, reader)
    loaded = []
    with _bar(progress, str(folder), sum(len(source.parts) for source in sources)) as advance:
        for (path, variable), source in zip(variables, sources, strict=True):
            own_dtype = reader.common_dtype(source.shapes)
            if dtype is not None:
                own_dtype = jnp.dtype(jnp.float32) if source.keeps_float32 else compute_dtype
            loaded.append((path, variable.replace(_assemble(source, reader, own_dtype, advance))))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def checkpoint_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The keys that a checkpoint of ``spec`` has, with their shapes, before any quantisation."""
    state = nnx.state(abstract_model(spec))
    sources = [_source(spec, path, tuple(variable.shape)) for path, variable in nnx.to_flat_state(state)]
    return {key: shape for source in sources for key, shape in source.shapes.items()}


class _Reader:
    """Tensors by key, FP8 ones dequantised."""

    def __init__(self, tensors: Mapping[str, np.ndarray], fp8_block: tuple[int, int] | None, dtype: Any) -> None:
        self.tensors = tensors
        self._fp8_block = fp8_block
        self._dtype = dtype

    def __call__(self, key: str) -> np.ndarray:
        tensor = self.tensors[key]
        if tensor.dtype not in _FP8:
            return tensor
        assert self._fp8_block is not None
        scale = self.tensors[key + _SCALE_SUFFIX].astype(np.float32)
        rows, columns = self._fp8_block
        scale = scale.repeat(rows, 0)[: tensor.shape[0]].repeat(columns, 1)[:, : tensor.shape[1]]
        return (tensor.astype(np.float32) * scale).astype(self._dtype)

    def common_dtype(self, keys: Iterable[str]) -> Any:
        """The type that holds the tensors at ``keys`` without loss."""
        dtypes = {self.tensors[key].dtype for key in keys}
        return functools.reduce(jnp.promote_types, (self._dtype if dtype in _FP8 else dtype for dtype in dtypes))

    def problem(self, key: str, shape: tuple[int, ...]) -> str | None:
        """What is wrong with the tensor at ``key``, which is there."""
        tensor = self.tensors[key]
        if tensor.shape != shape:
            return f"{key} has shape {list(tensor.shape)}, expected {list(shape)}"
        if tensor.dtype not in _FP8:
            return None
        if self._fp8_block is None:
            return f"{key} is {tensor.dtype.name}, but config.json has no quantization_config"
        scales = tuple(-(-size // block) for size, block in zip(shape, self._fp8_block, strict=True))
        name = key + _SCALE_SUFFIX
        if name not in self.tensors:
            return f"{name} is missing, {key} is {tensor.dtype.name}"
        if self.tensors[name].shape != scales:
            return f"{name} has shape {list(self.tensors[name].shape)}, expected {list(scales)} for blocks {self._fp8_block}"
        return None


class _Part(NamedTuple):
    """A piece of a parameter: the tensor at ``key``, changed by ``change``, belongs at ``start`` (whose tail is 0 if left out)."""

    key: str
    start: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a parameter comes from: its own shape, the shapes of its tensors by key, and how they are put together."""

    shape: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    parts: Sequence[_Part]

    @property
    def keeps_float32(self) -> bool:
        return any(key.endswith(_FLOAT32_NAMES) for key in self.shapes)


def _source(spec: ModelSpec, path: tuple[Any, ...], shape: tuple[int, ...]) -> _Source:
    """The source of the parameter at ``path`` of the module tree, whose names are the keys' but for what is fused or split.

    Parameters of layers have a leading axis, one entry for each layer that the stack keeps together.
    """
    names = [str(part) for part in path]
    if names[0] != "layers":
        prefix = "" if names[0] == "lm_head" else "model."
        key = f"{spec.key_prefix}{prefix}{'.'.join(names)}"
        return _Source(shape, {key: shape}, [_Part(key, (), _unchanged)])
    segment, position, inner = int(names[2]), int(names[3]), names[4:]
    layers = plan_segments(spec.layer_kinds)[segment].layers(position)
    shapes, parts = {}, []
    for repeat, layer in enumerate(layers):
        of_layer = _of_layer(spec, f"{spec.key_prefix}model.layers.{layer}.", inner, shape[1:])
        shapes |= of_layer.shapes
        parts += [_Part(part.key, (repeat, *part.start), part.change) for part in of_layer.parts]
    return _Source(shape, shapes, parts)


def _of_layer(spec: ModelSpec, prefix: str, names: list[str], shape: tuple[int, ...]) -> _Source:
    """The source of one layer's entry."""
    parent = prefix + ".".join(names[:-1])
    if names[-1] in ("w_uk", "w_uv"):
        return _up_projection(spec, f"{parent}.kv_b_proj.weight", names[-1], shape)
    if names[-2] == "experts":
        return _experts(parent, names[-1], shape)
    key = f"{parent}.{names[-1]}"
    return _Source(shape, {key: shape}, [_Part(key, (), _unchanged)])


def _up_projection(spec: ModelSpec, key: str, name: str, shape: tuple[int, ...]) -> _Source:
    """W_UK or W_UV, [H, N or V, R], out of kv_b_proj [H * (N + V), R], where each head has its nope rows, then its value rows."""
    geometry = spec.geometry
    heads, nope, R = geometry.num_heads, geometry.qk_nope_head_dim, geometry.kv_lora_rank
    own = slice(None, nope) if name == "w_uk" else slice(nope, None)
    stored = (heads * (nope + geometry.v_head_dim), R)
    return _Source(shape, {key: stored}, [_Part(key, (), lambda tensor: tensor.reshape(heads, -1, R)[:, own])])


def _experts(parent: str, name: str, shape: tuple[int, ...]) -> _Source:
    """The stacked experts' ``gate_up`` [E, D, 2M] or ``down`` [E, M, D]: each the transpose of the checkpoint's [out, in]."""
    num_experts, rows, columns = shape
    projections = ("gate_proj", "up_proj") if name == "gate_up" else ("down_proj",)
    width = columns // len(projections)
    parts = [
        _Part(f"{parent}.{expert}.{projection}.weight", (expert, 0, i * width), np.transpose)
        for expert in range(num_experts)
        for i, projection in enumerate(projections)
    ]
    return _Source(shape, {part.key: (width, rows) for part in parts}, parts)


def _unchanged(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _assemble(source: _Source, reader: _Reader, dtype: Any, advance: Callable[[], None]) -> jax.Array:
    """The parameter on the default device, made of one tensor after another."""
    shape = source.shape

    def read(part: _Part) -> np.ndarray:
        tensor = part.change(reader(part.key)).astype(dtype, copy=False)
        return tensor.reshape((1,) * (len(shape) - tensor.ndim) + tensor.shape)

    def start(part: _Part) -> tuple[int, ...]:
        return part.start + (0,) * (len(shape) - len(part.start))

    if len(source.parts) == 1:
        array = jnp.array(read(source.parts[0]))
        advance()
        return array
    if math.prod(shape) * dtype.itemsize <= HOST_BYTES:
        host = np.empty(shape, dtype)
        for part in source.parts:
            tensor = read(part)
            host[tuple(slice(i, i + size) for i, size in zip(start(part), tensor.shape, strict=True))] = tensor
            advance()
        return jnp.array(host)
    array = jnp.zeros(shape, dtype)
    for part in source.parts:
        # Waited for, because a transfer that is under way keeps its tensor.
        array = _put(array, read(part), start(part)).block_until_ready()
        advance()
    return array


@jax.jit(donate_argnums=0)
def _put(array: jax.Array, tensor: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, tensor, start)


def _check_keys(folder: str | Path, spec: ModelSpec, sources: list[_Source], reader: _Reader) -> None:
    """Raises with everything that is wrong, so that one attempt shows it all."""
    shapes = {key: shape for source in sources for key, shape in source.shapes.items()}
    present = set(reader.tensors)
    misshapen = [reader.problem(key, shape) for key, shape in shapes.items() if key in present]
    scales = {key + _SCALE_SUFFIX for key in shapes}
    problems = {
        "missing": [key for key in shapes if key not in present],
        "unexpected": sorted(key for key in present - set(shapes) - scales if not _is_ignored(key, spec)),
        "wrong": [text for text in misshapen if text is not None],
    }
    shown = [
        f"{len(found)} {name}: {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
        for name, found in problems.items()
        if found
    ]
    if shown:
        raise ValueError(f"{folder}: tensors do not fit the {spec.model_type} model of config.json; {'; '.join(shown)}")


def _is_ignored(key: str, spec: ModelSpec) -> bool:
    """Other parts of the model, multi-token-prediction layers, frequencies that are computed anyway, and a head that is tied."""
    if not key.startswith(spec.key_prefix):
        return True
    key = key.removeprefix(spec.key_prefix)
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    if layer is not None and int(layer.group(1)) >= spec.num_layers:
        return True
    return key.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and key == "lm_head.weight")


def _compute_dtype(dtype: Any, spec: ModelSpec, tensors: Mapping[str, np.ndarray]) -> Any:
    floats = [jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)]
    if dtype is not None:
        if jnp.dtype(dtype) not in floats:
            raise ValueError(f"from_pretrained: dtype must be float32, bfloat16, float16 or None, got {dtype!r}")
        return jnp.dtype(dtype)
    if spec.dtype is not None:
        return jnp.dtype(spec.dtype)
    table = tensors.get(f"{spec.key_prefix}model.embed_tokens.weight")
    return table.dtype if table is not None and table.dtype in floats else jnp.dtype(jnp.float32)


@contextlib.contextmanager
def _bar(progress: bool | None, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of ``total`` tensors; it moves a bar on stderr, where one is wanted."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda: None
        return
    console = Console(stderr=True)
    # A terminal is left clean; anything else gets the finished bar, once.
    with Progress(console=console, transient=console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
