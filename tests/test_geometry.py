"""Model facts: the released presets against published numbers, and what a geometry refuses."""

import dataclasses
import math

import pytest

import mla_jax as mla
from helpers import geometry
from mla_jax.geometry import NUM_LAYERS

# name: (H, q_lora, R, N, P, V, softmax scale to seven digits, indexer (h, d, K)), copied from the models' config.json.
PUBLISHED = {
    "deepseek-v2-lite": (16, None, 512, 128, 64, 128, 0.1147214, None),
    "deepseek-v3": (128, 1536, 512, 128, 64, 128, 0.1352338, None),
    "deepseek-r1": (128, 1536, 512, 128, 64, 128, 0.1352338, None),
    "deepseek-v3.2": (128, 1536, 512, 128, 64, 128, 0.1352338, (64, 128, 2048)),
    "glm-4.7-flash": (20, 768, 512, 192, 64, 256, 0.0625, None),
    "glm-5": (64, 2048, 512, 192, 64, 256, 0.0625, (32, 128, 2048)),
    "glm-5.1": (64, 2048, 512, 192, 64, 256, 0.0625, (32, 128, 2048)),
    "glm-5.2": (64, 2048, 512, 192, 64, 256, 0.0625, (32, 128, 2048)),
    "glm-5.3": (64, 2048, 512, 192, 64, 256, 0.0625, (32, 128, 2048)),
    "kimi-k2": (64, 1536, 512, 128, 64, 128, 0.1308608, None),
    "kimi-k2.5": (64, 1536, 512, 128, 64, 128, 0.1446796, None),
    "minicpm3-4b": (40, 768, 256, 64, 32, 64, 0.1020621, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_dimensions_and_scale(name):
    heads, q_lora, R, N, P, V, scale, indexer = PUBLISHED[name]
    got = mla.GEOMETRIES[name]
    assert (got.num_heads, got.q_lora_rank, got.kv_lora_rank) == (heads, q_lora, R)
    assert (got.qk_nope_head_dim, got.qk_rope_head_dim, got.v_head_dim) == (N, P, V)
    assert got.softmax_scale == pytest.approx(scale, rel=0, abs=0.5e-7)
    assert (got.indexer and (got.indexer.num_heads, got.indexer.head_dim, got.indexer.topk)) == indexer


@pytest.mark.parametrize(
    ("name", "width", "m_squared"),
    [
        ("deepseek-v2-lite", 192, 1.589626),
        ("deepseek-v3", 192, 1.873854),
        ("kimi-k2", 192, 1.813260),
        ("kimi-k2.5", 192, 2.004740),
        ("glm-5", 256, 1.0),
        ("minicpm3-4b", 96, 1.0),
    ],
)
def test_scale_is_the_head_width_times_yarns_amplitude_squared(name, width, m_squared):
    assert mla.GEOMETRIES[name].softmax_scale * math.sqrt(width) == pytest.approx(m_squared, abs=5e-7)


def test_scale_never_uses_the_latent_rank():
    # (R + P)^-0.5 is the mistake of whoever reads the absorbed form first.
    for preset in mla.GEOMETRIES.values():
        assert preset.softmax_scale != pytest.approx((preset.kv_lora_rank + preset.qk_rope_head_dim) ** -0.5, rel=1e-3)


def test_models_that_are_unverified_or_need_pooled_keys_are_left_out():
    assert set(mla.GEOMETRIES) == set(PUBLISHED)
    for absent in ("deepseek-v2", "glm-5.3-flash", "kimi-k3", "kimi-linear-48b"):
        assert absent not in mla.GEOMETRIES
    assert set(NUM_LAYERS) == set(PUBLISHED)
    assert all(name == name.lower() and "_" not in name for name in mla.GEOMETRIES)


def test_presets_are_read_only():
    with pytest.raises(TypeError):
        mla.GEOMETRIES["mine"] = geometry()  # pyright: ignore[reportIndexIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        mla.GEOMETRIES["glm-5"].num_heads = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_geometry_has_exactly_the_promised_fields():
    assert [f.name for f in dataclasses.fields(mla.MLAGeometry)] == [
        "num_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "softmax_scale",
        "indexer",
    ]
    assert [f.name for f in dataclasses.fields(mla.IndexerGeometry)] == ["num_heads", "head_dim", "topk"]


def test_geometry_is_keyword_only():
    with pytest.raises(TypeError):
        mla.MLAGeometry(4, None, 512, 128, 64, 128, 0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        mla.IndexerGeometry(2, 128, 8)  # pyright: ignore[reportCallIssue]


def test_equal_geometries_hash_equal():
    assert geometry(head_dim=128) == geometry(head_dim=128)
    assert hash(geometry(head_dim=128)) == hash(geometry(head_dim=128))
    assert geometry(head_dim=128) != geometry(head_dim=64)
    # An int scale is the same number as a float one and must not be another cache key.
    one = dataclasses.replace(geometry(), softmax_scale=1)
    assert one == dataclasses.replace(geometry(), softmax_scale=1.0)
    assert isinstance(one.softmax_scale, float)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_heads", True),
        ("num_heads", 4.0),
        ("q_lora_rank", 0),
        ("kv_lora_rank", 0),
        ("kv_lora_rank", "512"),
        ("qk_nope_head_dim", 0),
        ("qk_rope_head_dim", -1),
        ("v_head_dim", None),
        ("softmax_scale", 0.0),
        ("softmax_scale", -0.1),
        ("softmax_scale", math.inf),
        ("softmax_scale", math.nan),
        ("softmax_scale", None),
        ("indexer", (2, 128, 8)),
    ],
)
def test_impossible_geometry_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(geometry(), **{field: value})


@pytest.mark.parametrize("field", ["num_heads", "head_dim", "topk"])
@pytest.mark.parametrize("value", [0, -3, True, 2.0])
def test_impossible_indexer_is_refused_by_name(field, value):
    fields = {"num_heads": 2, "head_dim": 128, "topk": 8, field: value}
    with pytest.raises(ValueError, match=field):
        mla.IndexerGeometry(**fields)


def test_model_without_rope_is_a_geometry():
    assert geometry(P=0).qk_rope_head_dim == 0
