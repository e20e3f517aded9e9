"""Specs, loading, and whole models against transformers' arrays and against a plain numpy model of every family."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import mla_jax as mla
import model_reference as ref
from checkpoints import DATA, TINY, YARN, config_of, kimi_k25, quick_programs, random_checkpoint, reference, reference_run, run
from helpers import assert_same_choice
from mla_jax import layers, models

LOGITS_ATOL = 2e-4
"""float32 against float32 in another order of operations: transformers differs from itself by 3e-5, a real fault by 1 or more."""

FAMILIES = ["glm_moe_dsa", "deepseek_v32_fp8_ckpt", "deepseek_v2", "glm4_moe_lite", "deepseek_v3", "kimi_k2"]
"""A checkpoint of each family; one has FP8 weights in blocks."""

NAMES = [*FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES[2:], "smooth_glm_moe_dsa"))]


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


gate = jax.jit(lambda router, x: router(x))


def relative_rms(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_model_equals_transformers(name):
    model, arrays = reference(name)
    hidden, cache, slots, traces = reference_run(name)
    np.testing.assert_allclose(model.logits(hidden), arrays["logits"].reshape(80, 256), atol=LOGITS_ATOL)
    for layer in range(3):
        c_kv, k_rope = mla.read_kv(cache, layer, slots)
        np.testing.assert_allclose(c_kv, arrays[f"c_kv_l{layer}"].reshape(80, 32), atol=2e-5)
        np.testing.assert_allclose(k_rope, arrays[f"k_pe_interleaved_l{layer}"].reshape(80, 16), atol=2e-5)
        if f"index_k_l{layer}" in arrays:
            index_k = mla.read_index_k(cache, layer, slots)
            np.testing.assert_allclose(index_k, arrays[f"index_k_l{layer}"].reshape(80, 32), atol=2e-5)
        if f"topk_l{layer}" in arrays:
            positions = traces[layer].selection.positions
            np.testing.assert_array_equal(positions, arrays[f"topk_l{layer}"].reshape(80, 8))
        if f"router_ids_l{layer}" in arrays:
            ids, weights = gate(model.layers[layer].mlp.gate, traces[layer].mlp_in)
            want = arrays[f"router_ids_l{layer}"].reshape(80, -1)
            np.testing.assert_array_equal(np.sort(ids, axis=1), np.sort(want, axis=1))
            if f"router_weights_l{layer}" in arrays:
                assert_same_choice((ids, weights), (want, arrays[f"router_weights_l{layer}"].reshape(80, -1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_ids_equal_transformers(name):
    model, arrays = reference(name)
    prompts = arrays["input_ids"].tolist()
    assert models.generate(model, prompts, max_new_tokens=16, stop_ids=(), kv_cache_dtype="float32") == arrays["gen_ids"].tolist()


def test_blocks_equal_transformers():
    _, arrays = reference("glm_moe_dsa")
    hidden, _, _, traces = reference_run("glm_moe_dsa")
    for layer in range(3):
        np.testing.assert_allclose(traces[layer].attn_out, arrays[f"attn_out_l{layer}"].reshape(80, 64), atol=1e-4)
    np.testing.assert_allclose(traces[1].mlp_out, arrays["mlp_out_l1"].reshape(80, 64), atol=1e-4)
    np.testing.assert_allclose(hidden, arrays["hidden_l2"].reshape(80, 64), atol=1e-4)


def test_forward_equals_transformers():
    model, arrays = reference("glm_moe_dsa")
    logits = models.forward(model, arrays["input_ids"], kv_cache_dtype="float32", page_size=16)
    assert logits.shape == (2, 40, 256) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, arrays["logits"], atol=LOGITS_ATOL)


FP8_RMS = {"fp8_e4m3": 0.025, "fp8_e5m2": 0.05}
"""Bounds on the logits' relative RMS error. transformers with latents rounded to e4m3 by row has 1.4 %; here the rope is rounded
too and no scale centres the range, which gives 1.7 %; e5m2 has one bit less, twice the error."""


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_fp8_caches_round_little(kv_cache_dtype):
    model, arrays = reference("smooth_glm_moe_dsa")
    hidden, _, _, traces = reference_run("smooth_glm_moe_dsa", kv_cache_dtype=kv_cache_dtype)
    logits, want = model.logits(hidden), arrays["logits"].reshape(80, 256)
    # Rounding shows, so it is FP8 that was attended to, and it is no more than rounding.
    assert 0.005 < relative_rms(logits, want) < FP8_RMS[kv_cache_dtype]
    assert np.mean(np.argmax(logits, -1) == np.argmax(want, -1)) >= 0.95
    attn_out, attn_want = traces[0].attn_out, arrays["attn_out_l0"].reshape(80, 64)
    theirs = relative_rms(arrays["attn_out_kvfp8_row_l0"], arrays["attn_out_l0"])
    assert relative_rms(attn_out, attn_want) < theirs * (1.4 if kv_cache_dtype == "fp8_e4m3" else 2.8)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_give_one_spec(name):
    new, released = (models.parse_config(config_of(name, file)) for file in ("config.json", "config_release.json"))
    # transformers runs Kimi-K2 as the DeepSeek-V3 that it is; the released name is Kimi's.
    assert dataclasses.replace(new, model_type=released.model_type) == released


def test_latent_norm_eps_is_a_choice():
    model, arrays = reference("glm_moe_dsa")
    assert model.spec.latent_norm_eps == 1e-6
    as_config, _ = reference("glm_moe_dsa", "config")
    assert as_config.spec.latent_norm_eps == 1e-5
    assert models.parse_config(config_of("glm_moe_dsa"), 3e-4).latent_norm_eps == 3e-4
    # The file's latents are small before their norm, so the choice shows in the cache.
    tensors, key = load_file(DATA / "glm_moe_dsa" / "model.safetensors"), "model.layers.0.self_attn.kv_a_"
    x = arrays["attn_in_l0"].reshape(80, 64)
    raw = (x @ tensors[key + "proj_with_mqa.weight"].T)[:, :32]
    want = ref.rms_norm(raw, tensors[key + "layernorm.weight"], 1e-5)
    step = layers.make_step(jnp.zeros(80, jnp.int32), jnp.int32([[1]]), jnp.int32([80]), jnp.int32([0, 80]), as_config.spec.rope)
    c_kv, _ = as_config.layers[0].self_attn.rows(jnp.asarray(x), step)
    np.testing.assert_allclose(c_kv, want, atol=2e-5)
    assert np.abs(want - arrays["c_kv_l0"].reshape(80, 32)).max() > 0.01
    with pytest.raises(ValueError, match="latent_norm_eps"):
        models.parse_config(config_of("glm_moe_dsa"), "hf")


@pytest.mark.slow
def test_a_bfloat16_model_is_near_the_float32_one():
    _, arrays = reference("smooth_glm_moe_dsa")
    model = models.from_pretrained(DATA / "smooth_glm_moe_dsa", "bfloat16")
    logits = models.forward(model, arrays["input_ids"])
    assert logits.dtype == jnp.float32
    assert relative_rms(logits, arrays["logits"]) < 0.03


# --- every family against numpy ---------------------------------------------------------------------------------------

FAMILIES = {
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "attention_bias": True,
        "rope_interleave": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v32": {"model_type": "deepseek_v32", "rope_interleave": False, "rope_scaling": YARN},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_interleave": False,
        "indexer_rope_interleave": False,
        "tie_word_embeddings": True,
    },
}
"""A config of each family, with the keys that it must obey and those that it must not."""


SLOW_FAMILIES = ("glm4_moe_lite", "kimi_k2")
"""What they add to the others is in their specs, which have tests of their own."""


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW_FAMILIES else f for f in FAMILIES])
def test_family_equals_numpy(family, tmp_path, rng):
    config, tensors = random_checkpoint(tmp_path, rng, **FAMILIES[family])
    model = models.from_pretrained(tmp_path)
    ids = rng.integers(0, 64, (1, 21))
    hidden, cache, slots, traces = run(model, ids)
    logits, records = ref.run(config, tensors, ids[0])
    np.testing.assert_allclose(model.logits(hidden), logits, atol=LOGITS_ATOL)
    for layer, record in enumerate(records):
        c_kv, k_rope = mla.read_kv(cache, layer, slots)
        np.testing.assert_allclose(c_kv, record.c_kv, atol=2e-5)
        np.testing.assert_allclose(k_rope, record.k_rope, atol=2e-5)
        index_layer = model.spec.index_layers[layer]
        assert (index_layer is None) == (record.index_k is None)
        if index_layer is not None and record.index_k is not None:
            np.testing.assert_allclose(mla.read_index_k(cache, index_layer, slots), record.index_k, atol=2e-5)
        if record.selected is not None:
            positions = np.asarray(traces[layer].selection.positions)
            chosen = [np.flatnonzero(row).tolist() for row in record.selected]
            assert [row[row >= 0].tolist() for row in positions] == chosen


# --- specs ------------------------------------------------------------------------------------------------------------


def test_an_unknown_model_type_names_the_known():
    with pytest.raises(ValueError, match=r"unknown model_type 'llama'; known are deepseek_v2, .*glm_moe_dsa"):
        models.parse_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be 'default' or 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "'factor'"),
        ({"indexer_types": ["shared", "full"]}, "layer 0"),
        ({"indexer_types": ["full", "none"]}, "indexer_types may hold"),
        ({"mlp_layer_types": ["dense"]}, "1 entries for 2 layers"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"index_head_dim": 8}, "index_head_dim must be >= qk_rope_head_dim"),
    ],
)
def test_a_config_that_cannot_be_obeyed_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config({**TINY, "model_type": "glm_moe_dsa", **changes})


def test_which_layers_share_a_selection():
    config = {**TINY, "model_type": "glm_moe_dsa", "num_hidden_layers": 78}
    by_frequency = models.parse_config({**config, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    full = [i for i, kind in enumerate(by_frequency.attention_kinds) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)] and len(full) == 21
    assert [by_frequency.index_layers[i] for i in full] == list(range(21))
    assert set(models.parse_config(config).attention_kinds) == {"full"}
    by_pattern = models.parse_config({**config, "num_hidden_layers": 3, "index_topk_pattern": "FSF", "index_topk_freq": 4})
    assert by_pattern.attention_kinds == ("full", "shared", "full")


def test_which_layers_have_experts():
    config = {**TINY, "num_hidden_layers": 4, "first_k_dense_replace": 2, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}

    def sparse(model_type, **changes):
        layers = models.parse_config({**config, "model_type": model_type, **changes}).moe_layers
        return [i for i, has_experts in enumerate(layers) if has_experts]

    assert sparse("deepseek_v3") == sparse("kimi_k2") == [2, 3]
    assert sparse("glm_moe_dsa") == sparse("deepseek_v32") == sparse("glm4_moe_lite") == [1, 3]
    assert sparse("glm_moe_dsa", mlp_layer_types=None) == sparse("deepseek_v32", mlp_layer_types=None) == [2, 3]
    assert sparse("glm4_moe_lite", mlp_layer_types=None) == [1, 2, 3]


def test_kimi_k2_is_deepseek_v3():
    specs = [models.parse_config({**TINY, "model_type": name}) for name in ("kimi_k2", "deepseek_v3")]
    assert dataclasses.replace(specs[0], model_type="deepseek_v3") == specs[1]


def test_kimi_k25_nests_a_kimi_k2():
    spec = models.parse_config(kimi_k25())
    alone = models.parse_config({**kimi_k25()["text_config"], "dtype": "bfloat16", "eos_token_id": 9})
    assert spec.key_prefix == "language_model." and alone.key_prefix == ""
    assert dataclasses.replace(spec, model_type="kimi_k2", key_prefix="") == alone
    # What the text part says itself comes first, in either spelling.
    own = models.parse_config(kimi_k25(torch_dtype="float16", eos_token_id=[1, 2]))
    assert (own.dtype, own.eos_ids) == ("float16", (1, 2))
    assert models.parse_config(kimi_k25(model_type="deepseek_v3")) == spec
    with pytest.raises(ValueError, match=r"text_config's model_type must be one of .*got 'llama'"):
        models.parse_config(kimi_k25(model_type="llama"))
    with pytest.raises(ValueError, match="needs the key 'text_config'"):
        models.parse_config({**TINY, "model_type": "kimi_k25"})
    with pytest.raises(ValueError, match="quant_method='compressed-tensors'"):
        models.parse_config(kimi_k25(quantization_config={"quant_method": "compressed-tensors"}))


def test_a_spec_is_hashable_data():
    spec = models.parse_config({**TINY, "model_type": "deepseek_v3"})
    again = models.parse_config({**TINY, "model_type": "deepseek_v3"})
    assert hash(spec) == hash(again) and spec == again


def test_head_dim_is_not_the_rope_width():
    spec = models.parse_config({**TINY, "model_type": "glm_moe_dsa", "head_dim": 20})
    assert spec.rope.dim == 16


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([7, 8, 9], (7, 8, 9))])
def test_eos_ids(value, ids):
    assert models.parse_config({**TINY, "model_type": "deepseek_v3", "eos_token_id": value}).eos_ids == ids


# --- the call ---------------------------------------------------------------------------------------------------------


def test_cache_config_follows_the_model():
    model, _ = reference("glm_moe_dsa")
    config = model.cache_config(num_pages=4, page_size=16)
    assert (config.kv_cache_dtype, config.num_layers, config.num_index_layers) == ("float32", 3, 3)
    assert config.use_nsa and config.geometry == model.spec.geometry
    demo = models.from_pretrained(models.demo_checkpoint())
    packed = demo.cache_config(num_pages=4, nsa_kv_cache_store_fp8=True, platform="gfx942")
    assert (packed.kv_cache_dtype, packed.layout.name) == ("fp8_e4m3", "packed")
    dense = models.parse_config({**TINY, "model_type": "deepseek_v3"})
    config = nnx.eval_shape(lambda: models.CausalLM(dense, rngs=nnx.Rngs(0))).cache_config(num_pages=4)
    assert not config.use_nsa and config.num_index_layers == 0


def arguments(model, T=6):
    cache = mla.init_cache(model.cache_config(num_pages=3, page_size=16))
    tokens = jnp.arange(T, dtype=jnp.int32)
    tables, lengths, cu_q_lens = jnp.int32([[1], [2]]), jnp.int32([4, 2]), jnp.int32([0, 4, 6])
    return [tokens, cache, jnp.int32([16, 17, 18, 19, 32, 33, 0, 0][:T]), tables, lengths, cu_q_lens]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, jnp.zeros((1, 6), jnp.int32), "tokens must have 1 axes"),
        (0, jnp.zeros(5, jnp.int32), "slots"),
        (2, jnp.zeros(5, jnp.int32), "slots"),
        (3, jnp.zeros((3, 1), jnp.int32), "expected block_tables|expected lengths"),
        (5, jnp.int32([0, 6]), "cu_q_lens"),
    ],
)
def test_wrong_shapes_are_refused(place, value, message):
    model, _ = reference("glm_moe_dsa")
    call = arguments(model)
    call[place] = value
    with pytest.raises(ValueError, match=message):
        model(*call)
    with pytest.raises(TypeError, match="tokens"):
        model(jnp.zeros(6), *arguments(model)[1:])


def test_another_models_cache_is_refused():
    model, _ = reference("glm_moe_dsa")
    call = arguments(model)
    call[1] = mla.init_cache(mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=3, num_pages=3, use_nsa=True))
    with pytest.raises(ValueError, match="kv_lora_rank=512, the model needs 32"):
        model(*call)


def test_padding_rows_are_safe_and_the_cache_is_donated(tmp_path, rng):
    # Two equal layers, which are a scan.
    random_checkpoint(tmp_path, rng, model_type="glm_moe_dsa", first_k_dense_replace=0, n_group=1, topk_group=1)
    model = models.from_pretrained(tmp_path)
    step = jax.jit(lambda model, *call: model(*call), donate_argnums=2)
    want, want_cache = step(model, *arguments(model, T=8))
    call = arguments(model, T=8)
    # Whatever padding rows hold, they write nothing, not even where a slot says so, and change no other row.
    call[0], call[2] = call[0].at[6:].set(jnp.int32([-7, 2**30])), call[2].at[6:].set(17)
    got, got_cache = step(model, *call)
    assert call[1].kv.is_deleted()
    np.testing.assert_array_equal(got[:6], want[:6])
    jax.tree.map(np.testing.assert_array_equal, got_cache, want_cache)
    # A pool far larger than what the step needs: nothing of its size is copied.
    call = arguments(model, T=8)
    call[1] = mla.init_cache(model.cache_config(num_pages=5000, page_size=16))
    mla.assert_in_place(lambda model, *call: model(*call), model, *call, donate_argnums=(2,), max_temp_bytes=2**20)


@pytest.mark.slow
def test_the_step_runs_under_nnx_jit():
    model, _ = reference("glm_moe_dsa")
    want, _ = jax.jit(lambda model, *call: model(*call))(model, *arguments(model))
    logits, _ = nnx.jit(lambda model, *call: model(*call), donate_argnums=2)(model, *arguments(model))
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_a_step_of_nothing():
    model, _ = reference("glm_moe_dsa")
    tokens, cache, slots, tables, lengths, cu_q_lens = arguments(model)
    logits, _ = model(tokens[:0], cache, slots[:0], tables, lengths, jnp.zeros_like(cu_q_lens))
    assert logits.shape == (0, 256)
    logits, _ = model(tokens, cache, slots, tables[:0], lengths[:0], cu_q_lens[:1])
    assert logits.shape == (6, 256)


def test_an_id_outside_the_vocabulary_shows():
    model, _ = reference("glm_moe_dsa")
    for bad in (-1, 256):
        assert np.isnan(model.embed_tokens(jnp.int32([bad]))).all()
    with pytest.raises(ValueError, match=r"ids must be in 0\.\.255, got 256"):
        models.forward(model, np.array([[1, 256]]))


@pytest.mark.parametrize(
    ("tokens", "error"), [(np.zeros(3, int), ValueError), (np.zeros((1, 2, 3), int), ValueError), (np.zeros((1, 3)), TypeError)]
)
def test_forward_wants_a_table_of_ids(tokens, error):
    with pytest.raises(error, match="tokens"):
        models.forward(reference("glm_moe_dsa")[0], tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"page_size": size}, f"forward: page_size must be .* got {size!r}") for size in (0, 3, -4, True, "4")),
        ({"implementation": "triton"}, "forward: implementation must be None or one of .* got 'triton'"),
    ],
)
def test_forward_refuses_wrong_options(options, message):
    for tokens in (np.ones((1, 1), np.int32), np.zeros((2, 0), np.int32)):
        with pytest.raises(ValueError, match=message):
            models.forward(reference("glm_moe_dsa")[0], tokens, **options)


def test_forward_of_nothing():
    assert models.forward(reference("glm_moe_dsa")[0], np.zeros((2, 0), np.int32)).shape == (2, 0, 256)


# --- the demo checkpoint ----------------------------------------------------------------------------------------------


def test_demo_checkpoint():
    folder = models.demo_checkpoint()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_500_000
    spec = models.load_spec(folder)
    assert (spec.model_type, spec.vocab_size, spec.geometry.kv_lora_rank) == ("glm_moe_dsa", 256, 128)
    assert "random weights" in json.loads((folder / "config.json").read_text())["mla_jax_provenance"]


def test_the_demo_checkpoint_is_what_its_script_makes(tmp_path):
    script = DATA.parent.parent / "scripts" / "make_demo_checkpoint.py"
    if not script.is_file():
        pytest.skip("tests an installed wheel: there is no source tree beside it")
    namespace: dict[str, Any] = {"__file__": str(script), "__name__": "make_demo_checkpoint"}
    exec(compile(script.read_text(), script, "exec"), namespace)
    namespace["main"](tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((models.demo_checkpoint() / "config.json").read_text())
    made, committed = load_file(tmp_path / "model.safetensors"), load_file(models.demo_checkpoint() / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, made, committed)


@pytest.mark.slow
@pytest.mark.parametrize("scale_mode", ["pow2", "fp32"])
def test_packed_rows_serve_the_demo_model(rng, scale_mode):
    model = models.from_pretrained(models.demo_checkpoint())
    # As many tokens as the indexer selects: FP8 keys then change no selection, and what is left in layer 0 is rounding.
    ids = rng.integers(0, 256, (2, 16))
    _, _, _, want = run(model, ids)
    _, _, _, got = run(model, ids, kv_cache_dtype="auto", nsa_kv_cache_store_fp8=True, scale_mode=scale_mode)
    assert 0.002 < relative_rms(got[0].attn_out, want[0].attn_out) < 0.04
