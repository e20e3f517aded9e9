"""PagedMLACache: a pytree of its pools, which survives every JAX transformation it is promised to, and conversion."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mla_jax as mla
from helpers import (
    INDEX_LAYOUTS,
    LAYOUTS,
    assert_same_bytes,
    config,
    filled,
    geometry,
    hard_floats,
    oracle_rows,
    oracle_values,
    pool_bytes,
    row_bytes,
    temporaries,
    with_pages,
    with_rows,
)
from mla_jax import cache as cache_module
from mla_jax import reference

SLOTS = np.array([5, 1, 63, 17, 0], np.int32)


write = jax.jit(mla.write_kv, static_argnames="implementation")
convert = jax.jit(mla.convert, static_argnums=1)


def tokens(rng, R: int = 512, P: int = 64, T: int = len(SLOTS)):
    return rng.standard_normal((T, R)).astype(np.float32), rng.standard_normal((T, P)).astype(np.float32)


# ---- a pytree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, *INDEX_LAYOUTS])
def test_leaves_are_the_pools_and_nothing_else(layout):
    without, with_index = (mla.init_cache(config(layout, head_dim=d)) for d in (None, 128))
    for cache, pools in ((without, 1), (with_index, 2)):
        leaves = jax.tree.leaves(cache)
        assert len(leaves) == pools
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        assert cache.config.capacity * cache.config.bytes_per_token == sum(leaf.nbytes for leaf in leaves)
        assert not any(np.asarray(leaf).view(np.uint8).any() for leaf in leaves)
    assert without.index is None


def test_pools_have_the_shapes_of_the_config():
    cache = mla.init_cache(config("packed_pow2", head_dim=128, num_layers=3, num_index_layers=2, num_pages=5))
    assert cache.kv.shape == (3, 5, 16, 164) and cache.kv.dtype == jnp.uint32
    assert cache.index is not None and cache.index.shape == (2, 5, 16 * 132 // 4)


def test_init_takes_a_config_only():
    with pytest.raises(TypeError, match="CacheConfig"):
        mla.init_cache(geometry())  # pyright: ignore[reportArgumentType]


def test_cache_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        mla.init_cache(config("raw_e4m3fn")).kv = jnp.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]


def test_any_leaf_passes_through_unflatten():
    # JAX itself does this, with objects, None and tracers; validation belongs to the operations.
    cache = mla.init_cache(config("raw_e4m3fn", head_dim=128))
    structure = jax.tree.structure(cache)
    for leaf in (object(), None, 3, "pool", np.zeros(3)):
        again = jax.tree.unflatten(structure, [leaf, leaf])
        assert again.kv is leaf and again.index is leaf and again.config == cache.config
    assert jax.tree.map(lambda pool: None, cache).kv is None
    shapes = jax.tree.map(lambda pool: pool.shape, cache)
    assert shapes.kv == cache.kv.shape
    doubled = jax.tree.map(lambda a, b: a + b, cache, cache)
    assert doubled.config is cache.config


def test_structure_is_hashable_and_depends_on_the_config():
    one, same, other = (
        jax.tree.structure(mla.init_cache(config(layout))) for layout in ("raw_e4m3fn", "raw_e4m3fn", "raw_e4m3fnuz")
    )
    assert one == same and hash(one) == hash(same)
    assert one != other


def test_caches_of_two_configs_do_not_mix():
    # fn and fnuz pools have equal shapes; a select between them must fail while tracing.
    fn, fnuz = (mla.init_cache(config(layout)) for layout in ("raw_e4m3fn", "raw_e4m3fnuz"))
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, fn, fnuz)
    with pytest.raises(TypeError):
        jax.lax.cond(True, lambda: fn, lambda: fnuz)


def test_numpy_leaves_work_eagerly(rng):
    # As after jax.device_get. Under jit JAX converts them, here the operations must.
    c_kv, k_rope = tokens(rng)
    cache = mla.init_cache(config("plain_float16"))
    on_host = jax.device_get(cache)
    assert isinstance(on_host.kv, np.ndarray)
    for implementation in ("xla", "pallas"):
        written = mla.write_kv(on_host, 1, SLOTS, c_kv, k_rope, implementation=implementation)
        want = write(cache, 1, SLOTS, c_kv, k_rope, implementation=implementation)
        np.testing.assert_array_equal(written.kv, want.kv)
        np.testing.assert_array_equal(mla.raw_rows(jax.device_get(want), 1, SLOTS), row_bytes(want)[1, SLOTS])


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain_bfloat16", "raw_e4m3fnuz", "packed_pow2"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_donated_buffer_is_the_buffer_of_the_result(layout, implementation, rng):
    step = jax.jit(lambda cache, *rest: mla.write_kv(cache, 1, *rest, implementation=implementation), donate_argnums=0)
    c_kv, k_rope = tokens(rng)
    cache = mla.init_cache(config(layout, head_dim=128))
    pointers = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)]
    for _ in range(3):
        donated, cache = cache, step(cache, SLOTS, c_kv, k_rope)
        assert all(pool.is_deleted() for pool in jax.tree.leaves(donated))
        assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)] == pointers


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_write_without_donation_leaves_the_old_cache_alone(implementation, rng):
    cache = filled(config("packed_pow2"))
    c_kv, k_rope = tokens(rng)
    written = write(cache, 1, SLOTS, c_kv, k_rope, implementation=implementation)
    assert np.all(row_bytes(cache) == 0xAA)
    assert not np.all(row_bytes(written) == 0xAA)


def test_carry_of_scan_and_while_loop(rng):
    c_kv, k_rope = tokens(rng)
    cache = mla.init_cache(config("packed_pow2", head_dim=128))

    @jax.jit
    def run(cache):
        def layer(cache, i):
            return mla.write_kv(cache, i, SLOTS, c_kv, k_rope), mla.read_kv(cache, i, SLOTS)[0].sum()

        def step(state):
            i, cache = state
            return i + 1, jax.lax.scan(layer, cache, jnp.arange(2))[0]

        return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, cache))[1]

    result = run(cache)
    assert isinstance(result, mla.PagedMLACache) and result.config == cache.config
    want = cache
    for i in range(2):
        want = write(want, i, SLOTS, c_kv, k_rope)
    np.testing.assert_array_equal(result.kv, want.kv)


def test_argument_and_result_of_nnx_jit(rng):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.project = nnx.Linear(8, 576, rngs=rngs)

        def __call__(self, x, cache, slots):
            rows = self.project(x)
            return mla.write_kv(cache, 0, slots, rows[:, :512], rows[:, 512:])

    model = Model(nnx.Rngs(0))
    x = rng.standard_normal((len(SLOTS), 8)).astype(np.float32)
    cache = mla.init_cache(config("raw_e4m3fn", head_dim=128))
    rows = np.asarray(model.project(x))
    want = write(cache, 0, SLOTS, rows[:, :512], rows[:, 512:])
    pointer = cache.kv.unsafe_buffer_pointer()
    got = nnx.jit(lambda model, x, cache, slots: model(x, cache, slots), donate_argnums=2)(model, x, cache, SLOTS)
    assert isinstance(got, mla.PagedMLACache)
    assert got.kv.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(got.kv, want.kv)


def step_over(cache, layer, slots, c_kv, k_rope):
    cache = mla.write_kv(cache, layer, slots, c_kv, k_rope)
    return cache, mla.read_kv(cache, layer, slots)


@pytest.mark.parametrize(
    ("layout", "head_dim", "serialised"),
    [
        pytest.param("raw_e4m3fnuz", 128, False, id="in memory"),
        # A superset of the way through memory, but it needs a package.
        *(
            pytest.param(layout, head_dim, True, id=f"serialised-{layout}")
            for layout, head_dim in (("plain_bfloat16", None), ("raw_e4m3fnuz", 128), ("packed_fp32", 128))
        ),
    ],
)
def test_export_round_trip(layout, head_dim, serialised, rng):
    if serialised:
        pytest.importorskip("flatbuffers", reason="jax.export serialises with the flatbuffers package")
    c_kv, k_rope = tokens(rng)
    cache = mla.init_cache(config(layout, head_dim=head_dim))
    arguments = cache, np.int32(1), SLOTS, c_kv, k_rope
    exported = jax.export.export(jax.jit(step_over))(*arguments)
    if serialised:
        exported = jax.export.deserialize(exported.serialize())
    got, (latent, rope) = exported.call(*arguments)
    assert isinstance(got, mla.PagedMLACache)
    assert got.config == cache.config and hash(got.config) == hash(cache.config)
    want, (want_latent, want_rope) = jax.jit(step_over)(*arguments)
    np.testing.assert_array_equal(got.kv, want.kv)
    np.testing.assert_array_equal(latent, want_latent)
    np.testing.assert_array_equal(rope, want_rope)
    # The config is part of what was exported, not a label that may change.
    other = dataclasses.replace(cache, config=dataclasses.replace(cache.config, platform="gfx950"))
    with pytest.raises(ValueError):
        exported.call(other, *arguments[1:])


@pytest.mark.parametrize("layout", [*LAYOUTS, *INDEX_LAYOUTS])
def test_serialised_config_is_the_config(layout):
    for head_dim in (None, 128):
        want = config(layout, head_dim=head_dim)
        (got,) = cache_module._config_from_json(cache_module._config_to_json((want,)))
        assert got == want and hash(got) == hash(want)
        assert got.geometry.softmax_scale == want.geometry.softmax_scale


# ---- a pool that is not what the config says -------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "label"), [("raw_e4m3fn", "packed_pow2"), ("packed_pow2", "raw_e4m3fn")])
def test_reader_of_another_width_stops_before_computing(pool, label, rng):
    # https://github.com/vllm-project/vllm/issues/48378: a 576-wide buffer given to the reader of 656-byte rows.
    raw, labelled = mla.init_cache(config(pool)), config(label)
    wrong = mla.PagedMLACache(kv=raw.kv, index=None, config=labelled)
    c_kv, k_rope = tokens(rng)
    message = rf"(?s)kv pool is.*{raw.kv.shape[-1]}.*layout {labelled.layout.name} .*{labelled.layout.row_bytes} bytes"
    calls = {
        "write_kv": lambda: mla.write_kv(wrong, 0, SLOTS, c_kv, k_rope),
        "read_kv": lambda: mla.read_kv(wrong, 0, SLOTS),
        "raw_rows": lambda: mla.raw_rows(wrong, 0, SLOTS),
        "convert": lambda: mla.convert(wrong, config("plain_float32")),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert name in str(caught.value)


def test_missing_or_surplus_index_pool_is_refused():
    with_index, without = (mla.init_cache(config("raw_e4m3fn", head_dim=d)) for d in (128, None))
    for wrong in (
        dataclasses.replace(with_index, index=None),
        dataclasses.replace(without, index=with_index.index),
        dataclasses.replace(with_index, index=mla.init_cache(config("raw_e4m3fn", head_dim=64)).index),
    ):
        with pytest.raises(ValueError, match="index pool"):
            mla.read_kv(wrong, 0, SLOTS)


def test_operations_take_a_cache_only():
    with pytest.raises(TypeError, match="PagedMLACache"):
        mla.read_kv({"kv": 1}, 0, SLOTS)  # pyright: ignore[reportArgumentType]


# ---- conversion ------------------------------------------------------------------------------------------------------

R, P, HEAD_DIM = 128, 4, 32


def small(layout: str, **overrides) -> mla.CacheConfig:
    return config(layout, **{"R": R, "P": P, "num_pages": 3, "page_size": 2, **overrides})


def written_by_the_oracle(cache_config: mla.CacheConfig, rng) -> mla.PagedMLACache:
    """A cache full of hard numbers, without the library's writers."""
    layers, capacity = cache_config.num_layers, cache_config.capacity
    c_kv, k_rope = (hard_floats(rng, (layers, capacity, width), np.float32) for width in (R, P))
    cache = with_rows(mla.init_cache(cache_config), oracle_rows(cache_config.layout, c_kv, k_rope))
    if cache_config.index_layout is None:
        return cache
    keys = hard_floats(rng, (layers, cache_config.num_pages, cache_config.page_size, HEAD_DIM), np.float32)
    return with_pages(cache, index_pages(cache_config, keys))


def index_pages(cache_config: mla.CacheConfig, keys: np.ndarray) -> np.ndarray:
    layout = cache_config.index_layout
    assert layout is not None
    encode = functools.partial(reference.encode_index_page, dialect=layout.dialect, scale_mode=layout.scale_mode)
    return np.stack([[encode(page) for page in layer] for layer in keys])


def index_values(cache_config: mla.CacheConfig, pages: np.ndarray) -> np.ndarray:
    layout = cache_config.index_layout
    assert layout is not None
    return reference.decode_index_page(pages, layout.page_size, layout.head_dim, layout.dialect)


def pairs(names, default):
    """Every ordered pair; those outside ``default`` are marked slow."""
    return [pytest.param(*pair, marks=() if pair in default else pytest.mark.slow) for pair in itertools.product(names, repeat=2)]


NAMES = list(LAYOUTS)
RING = {(a, NAMES[(i + step) % len(NAMES)]) for i, a in enumerate(NAMES) for step in (0, 3)}


@pytest.mark.parametrize(("source", "target"), pairs(NAMES, RING))
def test_conversion_decodes_and_encodes_every_slot(source, target, rng):
    old = written_by_the_oracle(small(source), rng)
    new = convert(old, small(target))
    assert new.config == small(target)
    layout = new.config.layout
    if layout == old.config.layout:
        np.testing.assert_array_equal(new.kv, old.kv)
        return
    want = oracle_rows(layout, *oracle_values(old.config.layout, row_bytes(old)))
    assert_same_bytes(row_bytes(new), want, slice(0, R), within_one=layout.scale_mode == "fp32")


INDEX_NAMES = list(INDEX_LAYOUTS)
INDEX_RING = {(a, INDEX_NAMES[(i + step) % 5]) for i, a in enumerate(INDEX_NAMES) for step in (0, 2)}


@pytest.mark.parametrize(("source", "target"), pairs(INDEX_NAMES, INDEX_RING))
def test_conversion_decodes_and_encodes_every_index_key(source, target, rng):
    # The latent layout stays plain_bfloat16, but for the float32 cache.
    old = written_by_the_oracle(small(source, head_dim=HEAD_DIM), rng)
    new = convert(old, small(target, head_dim=HEAD_DIM))
    layout = new.config.index_layout
    assert layout is not None
    if layout == old.config.index_layout:
        np.testing.assert_array_equal(new.index, old.index)
        return
    want = index_pages(new.config, index_values(old.config, pool_bytes(old.index)))
    got = pool_bytes(new.index)
    assert_same_bytes(got, want, slice(0, layout.page_size * HEAD_DIM), within_one=layout.scale_mode == "fp32")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("raw_e4m3fn", "cpu"), ("raw_e4m3fn", "gfx950")),
        (("packed_pow2", "gfx942"), ("packed_pow2", "cuda")),
        (("plain_bfloat16", "gfx942"), ("plain_bfloat16", "cpu")),
        (("raw_e5m2", "cuda"), ("raw_e5m2", "gfx942")),
    ],
)
def test_identical_layout_keeps_whatever_bytes_it_has(source, target, rng):
    old_config, new_config = (small(layout, platform=platform) for layout, platform in (source, target))
    noise = rng.integers(0, 256, (2, old_config.capacity, old_config.layout.row_bytes), np.uint8)
    new = convert(with_rows(mla.init_cache(old_config), noise), new_config)
    np.testing.assert_array_equal(row_bytes(new), noise)
    assert new.config == new_config


def test_latent_bytes_are_kept_where_only_the_index_keys_change(rng):
    # Packed rows hold e4m3fn on every platform, index keys the platform's own dialect.
    old = written_by_the_oracle(small("packed_pow2", platform="gfx942", head_dim=HEAD_DIM), rng)
    new = convert(old, small("packed_pow2", platform="cuda", head_dim=HEAD_DIM))
    np.testing.assert_array_equal(new.kv, old.kv)
    want = index_pages(new.config, index_values(old.config, pool_bytes(old.index)))
    np.testing.assert_array_equal(pool_bytes(new.index), want)


def test_conversion_between_the_e4m3_dialects_keeps_values():
    # https://github.com/sgl-project/sglang/issues/28455: copying the bytes instead gives half, and NaN for -0.
    x = np.zeros((1, R), np.float32)
    x[0, :6] = [1.0, -1e-5, 240, -240, 300, np.nan]
    rope = np.zeros((1, P), np.float32)
    fn = write(mla.init_cache(small("raw_e4m3fn")), 0, np.array([1]), x, rope)
    before = row_bytes(fn)[0, 1, :6]
    fnuz = convert(fn, small("raw_e4m3fnuz"))
    after = row_bytes(fnuz)[0, 1, :6]
    assert before[1] == 0x80 and after[1] == 0x00
    assert after[5] == 0x80
    values = oracle_values(fnuz.config.layout, row_bytes(fnuz))[0][0, 1, :5]
    np.testing.assert_array_equal(values, np.array([1.0, 0.0, 240, -240, 240], np.float32))


def test_conversion_works_eagerly(rng):
    old = written_by_the_oracle(small("plain_float32"), rng)
    target = small("plain_float16")
    np.testing.assert_array_equal(mla.convert(old, target).kv, convert(old, target).kv)


def test_conversion_never_holds_a_dequantised_pool():
    old = config("raw_e4m3fn", num_pages=2048, page_size=64)
    target = dataclasses.replace(old, platform="gfx942")
    cache = jax.eval_shape(lambda: mla.init_cache(old))
    pool = cache.kv.size * cache.kv.dtype.itemsize
    assert pool >= 144 * 2**20
    # In float32 the pool would be four times its size; a copy of the result is what lax.map may need.
    assert temporaries(lambda cache: mla.convert(cache, target), cache) < 1.1 * pool


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"num_pages": 5},
        {"page_size": 4},
        {"head_dim": None},
        {"head_dim": 64},
        {"num_index_layers": 1},
        {"R": 256},
        {"P": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_conversion_to_another_shape_is_refused(change):
    cache = mla.init_cache(small("raw_e4m3fn", head_dim=HEAD_DIM))
    with pytest.raises(ValueError, match="convert"):
        mla.convert(cache, small("packed_pow2", **{"head_dim": HEAD_DIM, **change}))


def test_conversion_takes_a_config_only():
    with pytest.raises(TypeError, match="CacheConfig"):
        mla.convert(mla.init_cache(small("raw_e4m3fn")), "packed")  # pyright: ignore[reportArgumentType]
