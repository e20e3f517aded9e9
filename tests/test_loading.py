"""Checkpoints on disk: keys, shards, types and FP8 scales, what is held while one is read, and the progress bar."""

import gc
import json
import shutil
import sys
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import DATA, config_of, kimi_k25, random_checkpoint, reference, write_checkpoint
from mla_jax import models
from mla_jax.models import loading
from mla_jax.models.safetensors_file import open_checkpoint


@pytest.fixture
def copy(tmp_path):
    """A copy of glm_moe_dsa to break, and its tensors."""
    folder = tmp_path / "copy"
    shutil.copytree(DATA / "glm_moe_dsa", folder)
    return folder, load_file(folder / "model.safetensors")


def leaves(model) -> dict:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def test_missing_unexpected_and_misshapen_tensors_are_named(copy):
    folder, tensors = copy
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        models.from_pretrained(folder)
    for text in (
        "1 missing: model.layers.1.mlp.experts.3.up_proj.weight",
        "1 unexpected: model.layers.0.self_attn.o_proj.bias",
        "model.norm.weight has shape [63], expected [64]",
    ):
        assert text in str(error.value)


def test_layers_beyond_the_last_are_skipped(copy):
    folder, tensors = copy
    for key in [key for key in tensors if key.startswith("model.layers.2.")]:
        tensors[key.replace("layers.2.", "layers.3.")] = tensors[key] * 2
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert models.from_pretrained(folder).spec.num_layers == 3


def test_kimi_k25_loads_its_text_part(tmp_path, rng):
    config = kimi_k25()
    _, tensors = random_checkpoint(tmp_path / "text", rng, **config["text_config"])
    nested = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    nested["vision_tower.encoder.blocks.0.wqkv.weight"] = np.zeros((12, 4), np.float32)
    nested["mm_projector.proj.0.bias"] = np.zeros(4, np.float32)
    write_checkpoint(tmp_path / "all", config, nested)
    want, got = models.from_pretrained(tmp_path / "text", "float32"), models.from_pretrained(tmp_path / "all", "float32")
    assert got.dtype == jnp.float32 and models.from_pretrained(tmp_path / "all").dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, leaves(got), leaves(want))
    nested["language_model.model.layers.1.mlp.extra.weight"] = np.zeros(4, np.float32)
    del nested["language_model.lm_head.weight"]
    write_checkpoint(tmp_path / "all", config, nested)
    with pytest.raises(ValueError) as error:
        models.from_pretrained(tmp_path / "all")
    assert "1 missing: language_model.lm_head.weight; 1 unexpected: language_model.model.layers.1.mlp.extra.weight" in str(
        error.value
    )


ON_HOST = pytest.param(loading.HOST_BYTES, marks=pytest.mark.slow, id="on the host")


@pytest.mark.parametrize("host_bytes", [pytest.param(0, id="on the device"), ON_HOST])
def test_loading_holds_one_tensor_beside_the_model(tmp_path, rng, monkeypatch, host_bytes):
    # A projection of one expert is the largest tensor; the model has 96 of them.
    config = {"num_hidden_layers": 3, "n_routed_experts": 16, "moe_intermediate_size": 256, "hidden_size": 256, "dtype": "bfloat16"}
    random_checkpoint(tmp_path, rng, model_type="deepseek_v3", **config)
    largest, held, on_device = 256 * 256 * 4, [], []
    read = loading._Reader.__call__

    def watched(self: Any, key: str) -> np.ndarray:
        held.append(tracemalloc.get_traced_memory()[0])
        on_device.append(sum(x.nbytes for x in jax.live_arrays()))
        return read(self, key)

    monkeypatch.setattr(loading, "HOST_BYTES", host_bytes)
    models.from_pretrained(tmp_path)
    monkeypatch.setattr(loading._Reader, "__call__", watched)
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    tracemalloc.start()
    try:
        # Types are changed on the way, which needs memory for the tensor at hand.
        model = models.from_pretrained(tmp_path, "float32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert size > 90 * largest and len(held) > 96
    # jax lets go of what it has copied at its next call: of the tensor before, or of the parameter before if made on the host.
    pieces = max(x.nbytes for x in jax.tree.leaves(model)) if host_bytes else largest
    assert peak - held[0] < 2 * pieces + largest
    assert max(on_device) - before <= size


def test_a_bar_is_shown_where_it_is_wanted(capfd, monkeypatch):
    folder = DATA / "glm_moe_dsa"
    models.from_pretrained(folder)
    assert capfd.readouterr() == ("", "")
    models.from_pretrained(folder, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "glm_moe_dsa" in err and "100%" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    models.from_pretrained(folder)
    assert "glm_moe_dsa" in capfd.readouterr().err
    models.from_pretrained(folder, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), "bfloat16"])
def test_assembling_on_the_device_gives_the_same(monkeypatch, dtype):
    want = leaves(models.from_pretrained(DATA / "glm_moe_dsa", dtype))
    monkeypatch.setattr(loading, "HOST_BYTES", 0)
    jax.tree.map(np.testing.assert_array_equal, leaves(models.from_pretrained(DATA / "glm_moe_dsa", dtype)), want)


def test_a_stack_of_mixed_types_loads_without_loss(copy):
    folder, tensors = copy
    # Layers 1 and 2 are one stack; a tensor in a narrower type does not round its neighbours.
    for part in ("input_layernorm.weight", "mlp.experts.0.gate_proj.weight"):
        tensors[f"model.layers.1.{part}"] = tensors[f"model.layers.1.{part}"].astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    model: Any = models.from_pretrained(folder)
    for layer in (1, 2):
        got = model.layers[layer]
        np.testing.assert_array_equal(
            got.input_layernorm.weight[...], np.float32(tensors[f"model.layers.{layer}.input_layernorm.weight"])
        )
        want = np.float32(tensors[f"model.layers.{layer}.mlp.experts.0.gate_proj.weight"]).T
        np.testing.assert_array_equal(got.mlp.experts.gate_up[0][:, :16], want)


def test_shards_load_like_one_file(copy):
    folder, tensors = copy
    weight_map = {key: f"model-{1 + i % 3:05}-of-00003.safetensors" for i, key in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({key: tensors[key] for key in tensors if weight_map[key] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    one, _ = reference("glm_moe_dsa")
    jax.tree.map(np.testing.assert_array_equal, leaves(models.from_pretrained(folder)), leaves(one))
    weight_map["model.norm.weight"] = weight_map[sorted(tensors)[sorted(tensors).index("model.norm.weight") - 1]]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        open_checkpoint(folder)


def test_a_folder_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.from_pretrained(tmp_path)
    shutil.copy(DATA / "glm_moe_dsa" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        models.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a safetensors file"):
        models.from_pretrained(tmp_path)


def quantise(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales of block x block numbers, and the values they stand for."""
    rows, columns = weight.shape
    scales = np.empty((-(-rows // block), -(-columns // block)), np.float32)
    codes = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    values = np.empty_like(weight)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
        scales[i, j] = np.abs(weight[part]).max() / 448
        codes[part] = (weight[part] / scales[i, j]).astype(codes.dtype)
        values[part] = codes[part].astype(np.float32) * scales[i, j]
    return codes, scales, values


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_fp8_weights_are_dequantised(copy, dtype):
    folder, tensors = copy
    stored, plain = dict(tensors), dict(tensors)
    kept = ("embed_tokens", "lm_head", "norm", "gate.weight", "weights_proj")
    for key, weight in tensors.items():
        if weight.ndim == 2 and not any(name in key for name in kept):
            # Blocks of 24 leave part blocks at both edges.
            stored[key], stored[key + "_scale_inv"], plain[key] = quantise(weight, 24)
    assert len(stored) > len(tensors) + 20
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 24]}
    write_checkpoint(folder, {**config_of("glm_moe_dsa"), "quantization_config": quantization}, stored)
    write_checkpoint(folder / "plain", config_of("glm_moe_dsa"), plain)
    got, want = (leaves(models.from_pretrained(f, dtype)) for f in (folder, folder / "plain"))
    jax.tree.map(np.testing.assert_array_equal, got, want)

    del stored["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"]
    stored["model.layers.0.self_attn.o_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
    write_checkpoint(folder, {**config_of("glm_moe_dsa"), "quantization_config": quantization}, stored)
    with pytest.raises(ValueError) as error:
        models.from_pretrained(folder, dtype)
    assert "kv_b_proj.weight_scale_inv is missing" in str(error.value)
    assert "o_proj.weight_scale_inv has shape [2, 2], expected [3, 4]" in str(error.value)


def test_dtype(copy):
    folder, tensors = copy
    assert reference("glm_moe_dsa")[0].dtype == jnp.float32
    model: Any = models.from_pretrained(folder, "bfloat16")
    assert model.dtype == jnp.bfloat16 and model.cache_config(num_pages=2).kv_cache_dtype == "bfloat16"
    assert model.layers[0].self_attn.o_proj.weight.dtype == jnp.bfloat16
    # What decides about experts and tokens stays as exact as it is stored.
    moe, indexer = model.layers[1].mlp, model.layers[1].self_attn.indexer
    for parameter in (moe.gate.weight, moe.gate.e_score_correction_bias, indexer.weights_proj.weight):
        assert parameter.dtype == jnp.float32
    with pytest.raises(ValueError, match="dtype must be"):
        models.from_pretrained(folder, "float8_e4m3fn")
    # config.json's type is what the model computes in; the weights stay as they are stored.
    config = config_of("glm_moe_dsa")
    write_checkpoint(folder, {**config, "dtype": "bfloat16"}, tensors)
    model = models.from_pretrained(folder)
    assert model.dtype == jnp.bfloat16 and model.lm_head.weight.dtype == jnp.float32
    del config["dtype"]
    write_checkpoint(folder, config, {key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items()})
    assert models.from_pretrained(folder).dtype == jnp.bfloat16
