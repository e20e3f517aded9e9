"""A JAX without Pallas' Triton lowering: every operation takes XLA on a GPU, and says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from helpers import config
from mla_jax.kernels import backend


@pytest.fixture
def without_lowering(monkeypatch):
    monkeypatch.setattr(backend, "pallas_triton", None)


def write(layout, **options):
    cache = jax.eval_shape(lambda: mla.init_cache(config(layout)))
    rows = (jax.ShapeDtypeStruct((8, width), jnp.bfloat16) for width in (512, 64))
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    return backend.lower(lambda c, s, a, b: mla.write_kv(c, 0, s, a, b, **options), "gfx942", cache, slots, *rows, donate_argnums=0)


@pytest.mark.parametrize("layout", ["plain_bfloat16", "raw_e4m3fnuz", "packed_pow2"])
def test_writes_become_one_scatter_with_unique_indices(layout, without_lowering):
    text = write(layout).as_text()
    assert "custom_call" not in text.replace("custom_call @Sharding", "")
    assert text.count('"stablehlo.scatter"(') == 1 and "unique_indices = true" in text
    assert "tf.aliasing_output" in text


def test_attention_and_the_indexer_become_xla(without_lowering):
    cache = jax.eval_shape(lambda: mla.init_cache(config("index_e4m3fnuz_pow2", head_dim=128)))
    q = (jax.ShapeDtypeStruct((2, 1, 16, width), jnp.bfloat16) for width in (512, 64))
    tables, lengths, cu = np.ones((2, 3), np.int32), np.ones(2, np.int32), np.array([0, 1, 2], np.int32)
    decode = backend.lower(lambda c, a, b: mla.mla_decode(a, b, c, 0, tables, lengths), "gfx942", cache, *q)
    asked = jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 32), jnp.float32)
    index = backend.lower(lambda c, a, b: mla.indexer_logits(a, b, c, 0, tables, lengths, cu), "gfx942", cache, *asked)
    for lowered in (decode, index):
        assert "triton" not in lowered.as_text()


def test_a_named_kernel_says_why_it_cannot(without_lowering):
    with pytest.raises(NotImplementedError, match=r"write_kv.*: JAX .* has no Triton lowering of Pallas"):
        write("raw_e4m3fnuz", implementation="pallas")


def test_interpret_mode_needs_no_lowering(without_lowering):
    cache = mla.init_cache(config("raw_e4m3fnuz"))
    rows = jnp.ones((1, 512)), jnp.ones((1, 64))
    written = mla.write_kv(cache, 0, jnp.array([5], jnp.int32), *rows, implementation="pallas")
    assert float(mla.read_kv(written, 0, jnp.array([5]))[0][0, 0]) == 1


def test_explain_says_what_carries_a_config_out(monkeypatch):
    amd = config("raw_e4m3fnuz")
    assert "carried out   by Pallas kernels" in mla.explain(amd)
    monkeypatch.setattr(backend, "pallas_triton", None)
    assert "carried out   by XLA (scatter with unique indices, attention a chunk at a time): JAX" in mla.explain(amd)
