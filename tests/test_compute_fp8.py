"""Attention whose queries and weights are rounded to the rows' FP8 type, on both implementations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from helpers import config
from mla_jax.kernels import backend

# Rounding to 3 or 2 bits of mantissa errs by up to 1/16 or 1/8, uniformly over a binade: 2.6 or 5.2 % RMS for weights, and as much
# again for the logits of queries of unit variance.
BOUNDS = {"raw_e4m3fn": 0.05, "raw_e4m3fnuz": 0.05, "raw_e5m2": 0.1}
LENGTHS = np.array([90, 17, 0], np.int32)
TABLES = np.array([[1, 2, 3, 4, 5, 6], [7, 8, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0]], np.int32)


def filled(layout, rng):
    cache = mla.init_cache(config(layout, R=128, P=32, num_pages=16))
    n = 8 * 16
    rows = (rng.standard_normal((n, width), np.float32) for width in (128, 32))
    return mla.write_kv(cache, 0, np.arange(16, 16 + n, dtype=np.int32), *rows)


def error(a, b):
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("layout", BOUNDS)
def test_error_is_that_of_rounding_queries_and_weights(layout, implementation, rng):
    cache = filled(layout, rng)
    q, r = rng.standard_normal((3, 2, 20, 128), np.float32), rng.standard_normal((3, 2, 20, 32), np.float32)
    args = (q, r, cache, 0, TABLES, LENGTHS)
    exact, exact_lse = mla.mla_decode(*args, implementation="xla")
    out, lse = mla.mla_decode(*args, implementation=implementation, compute="fp8")
    assert 0.005 < error(out, exact) < BOUNDS[layout]
    seen = np.isfinite(np.asarray(exact_lse))
    assert np.array_equal(seen, np.isfinite(np.asarray(lse))) and not np.any(np.asarray(out)[~seen])
    assert np.max(np.abs(np.asarray(lse)[seen] - np.asarray(exact_lse)[seen])) < 6 * BOUNDS[layout]


def test_prefill_and_sparse_take_it_too(rng):
    cache = filled("raw_e4m3fn", rng)
    q, r = rng.standard_normal((5, 16, 128), np.float32), rng.standard_normal((5, 16, 32), np.float32)
    cu = np.array([0, 3, 5, 5], np.int32)
    slots = np.tile(np.arange(16, 80, dtype=np.int32), (5, 1))
    for implementation in ("xla", "pallas"):
        options: Any = {"implementation": implementation, "compute": "fp8"}
        exact, _ = mla.mla_prefill(q, r, cache, 0, TABLES, LENGTHS, cu)
        assert 0.005 < error(mla.mla_prefill(q, r, cache, 0, TABLES, LENGTHS, cu, **options)[0], exact) < 0.05
        exact, _ = mla.sparse_mla(q, r, cache, 0, slots)
        assert 0.005 < error(mla.sparse_mla(q, r, cache, 0, slots, **options)[0], exact) < 0.05


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_what_is_not_seen_changes_no_bit(implementation, rng):
    cache = filled("raw_e4m3fnuz", rng)
    q, r = rng.standard_normal((3, 2, 4, 128), np.float32), rng.standard_normal((3, 2, 4, 32), np.float32)
    step = lambda cache: mla.mla_decode(q, r, cache, 0, TABLES, LENGTHS, implementation=implementation, compute="fp8")  # noqa: E731
    rows = np.asarray(cache.kv).copy()
    # The row of a sequence that only its second token sees, and everything past the lengths, hold NaN.
    rows[0, 6, 10:] = 0x80808080
    rows[0, 8, 1:] = 0x80808080
    poisoned = step(jax.tree.unflatten(jax.tree.structure(cache), [jnp.asarray(rows)]))
    for got, want in zip(poisoned, step(cache), strict=True):
        assert np.array_equal(np.asarray(got), np.asarray(want))


def test_what_cannot_be_multiplied_is_refused(rng):
    q = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, 16, 32), jnp.bfloat16)
    rest = 0, np.ones((1, 2), np.int32), np.ones(1, np.int32)

    def ask(layout, **options):
        cache = jax.eval_shape(lambda: mla.init_cache(config(layout, R=128, P=32)))
        return jax.eval_shape(lambda c, a, b: mla.mla_decode(a, b, c, *rest, **options), cache, *q)

    for layout in ("plain_bfloat16", "packed_pow2"):
        with pytest.raises(ValueError, match=f"raw FP8 rows, got rows of layout {layout.removesuffix('_pow2')}"):
            ask(layout, compute="fp8")
    with pytest.raises(ValueError, match="compute must be None or \"fp8\", got 'fp16'"):
        ask("raw_e4m3fn", compute="fp16")
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu("gfx942")):
        with pytest.raises(NotImplementedError, match="read e4m3fn; those of gfx942 read e4m3fnuz"):
            ask("raw_e4m3fn", compute="fp8", implementation="pallas")
        # Without a name XLA takes over, which rounds in float32.
        assert ask("raw_e4m3fn", compute="fp8")[0].shape == (1, 1, 16, 128)
