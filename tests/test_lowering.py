"""Every write kernel lowers for AMD and NVIDIA chips on a machine that has neither, as one kernel in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config
from mla_jax.devices import Target
from mla_jax.kernels import backend
from mla_jax.kernels.tuning import write_tuning
from triton_ir import triton_kernel

T = 64
ARCHS = [pytest.param("gfx942", marks=pytest.mark.amd), pytest.param("gfx950", marks=pytest.mark.amd), "sm_90"]


@functools.cache
def lowered_kv(layout: str, arch: str, k_scale: float | None = None, R: int = 512, P: int = 64, dtype=jnp.bfloat16):
    cache = jax.eval_shape(lambda: mla.init_cache(config(layout, R=R, P=P)))
    slots = jax.ShapeDtypeStruct((T,), jnp.int32)
    parts = (jax.ShapeDtypeStruct((T, width), dtype) for width in (R, P))

    def write(cache, slots, c_kv, k_rope, layer):
        return mla.write_kv(cache, layer, slots, c_kv, k_rope, k_scale=k_scale)

    return backend.lower(write, arch, cache, slots, *parts, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)


@functools.cache
def lowered_index(layout: str, arch: str, head_dim: int = 128):
    cache = jax.eval_shape(lambda: mla.init_cache(config(layout, head_dim=head_dim)))
    slots = jax.ShapeDtypeStruct((T,), jnp.int32)
    k = jax.ShapeDtypeStruct((T, head_dim), jnp.bfloat16)
    write = lambda cache, slots, k: mla.write_index_k(cache, 0, slots, k)  # noqa: E731
    return backend.lower(write, arch, cache, slots, k, donate_argnums=0)


def assert_one_kernel_in_place(lowered, pools: int) -> None:
    text = lowered.as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("stablehlo.custom_call") == 1
    # The donated pools keep their buffers, and the kernel writes into the one it is given.
    assert text.count("tf.aliasing_output") == pools
    kernel = triton_kernel(lowered)
    assert "operand_index" in kernel.aliases
    # No operation outside the kernel touches a pool: what is left are scalars and the slots.
    assert "stablehlo.scatter" not in text
    assert "stablehlo.dynamic_update_slice" not in text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_write_lowers_to_one_kernel_in_place(layout, arch):
    # Without a name the kernel is what the chip gets.
    assert_one_kernel_in_place(lowered_kv(layout, arch), pools=1)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_index_write_lowers_to_one_kernel_in_place(layout, arch):
    assert_one_kernel_in_place(lowered_index(layout, arch), pools=2)


@pytest.mark.parametrize("layout", ["raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2"])
@pytest.mark.parametrize("arch", ARCHS)
def test_write_with_k_scale_lowers_to_one_kernel(layout, arch):
    assert_one_kernel_in_place(lowered_kv(layout, arch, k_scale=0.3), pools=1)


@pytest.mark.parametrize(("R", "P"), [(256, 32), (512, 0), (384, 64), (512, 66)])
@pytest.mark.parametrize("layout", ["plain_float16", "raw_e4m3fnuz", "packed_pow2"])
@pytest.mark.amd
def test_unusual_dimensions_lower(layout, R, P):
    assert_one_kernel_in_place(lowered_kv(layout, "gfx942", R=R, P=P), pools=1)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 192])
@pytest.mark.amd
def test_unusual_index_widths_lower(head_dim):
    assert_one_kernel_in_place(lowered_index("index_e4m3fnuz_pow2", "gfx942", head_dim), pools=2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.amd
def test_other_inputs_lower(dtype):
    assert_one_kernel_in_place(lowered_kv("packed_pow2", "gfx950", dtype=dtype), pools=1)


@pytest.mark.parametrize("layout", ["raw_e4m3fn", "raw_e4m3fnuz", "raw_e5m2", "packed_pow2"])
@pytest.mark.amd
def test_amd_kernels_use_the_integer_encoder(layout):
    # Triton's conversions refuse e4m3fnuz, saturate by a mode register, and are software for OCP FP8 on gfx942.
    for arch in ("gfx942", "gfx950"):
        text = str(triton_kernel(lowered_kv(layout, arch)).module)
        assert "tt.fp_to_fp" not in text
        assert "f8E" not in text


def test_a_native_conversion_would_show():
    # The control for the test above: where the tuning asks for it, the conversion is in the text.
    assert write_tuning(Target("cuda", "sm_90"), "raw_fused").native_fp8
    assert "f8E4M3FN" in str(triton_kernel(lowered_kv("raw_e4m3fn", "sm_90")).module)


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_ever_converted_to_fnuz(arch):
    # Pallas refuses that conversion on every chip; a cache of this dialect is still written on every chip.
    assert "FNUZ" not in str(triton_kernel(lowered_kv("raw_e4m3fnuz", arch)).module)


@pytest.mark.amd
def test_amd_targets_get_the_same_bytes_of_a_layout():
    # The layout says which dialect is encoded; the chip it is lowered for must not change the arithmetic.
    constants = []
    for arch in ("gfx942", "gfx950"):
        text = str(triton_kernel(lowered_kv("raw_e4m3fnuz", arch)).module)
        constants.append(sorted({line.split("=", 1)[1] for line in text.splitlines() if "arith.constant" in line}))
    assert constants[0] == constants[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_stores_cover_the_row_exactly(arch):
    # Triton's blocks are powers of two and rows are not: 656 = 512 + 128 + 16. Neither a gap nor a byte beyond.
    for layout in LAYOUTS:
        cache_config = config(layout)
        stores = triton_kernel(lowered_kv(layout, arch)).stores(layer=1, slot=lambda t: 17 + t)
        stored = sorted(address for store in stores for address in store.bytes)
        first = (cache_config.capacity + 17) * cache_config.layout.row_bytes
        assert stored == list(range(first, first + len(stored)))
        assert len(stored) % cache_config.layout.row_bytes == 0


@pytest.mark.parametrize("head_dim", [128, 96, 192])
@pytest.mark.amd
def test_index_stores_cover_the_key_and_its_scales_exactly(head_dim):
    layout = config("index_e4m3fnuz_pow2", head_dim=head_dim).index_layout
    assert layout is not None
    first, scale_bytes = 16 + 5, 4 * layout.groups
    stores = triton_kernel(lowered_index("index_e4m3fnuz_pow2", "gfx942", head_dim)).stores(0, lambda t: first + t)
    stored = sorted(address for store in stores for address in store.bytes)
    want: list[int] = []
    for slot in range(first, first + len(stored) // (head_dim + scale_bytes)):
        page, offset = slot // 16 * layout.page_bytes, slot % 16
        keys, scales = page + offset * head_dim, page + 16 * head_dim + offset * scale_bytes
        want += [*range(keys, keys + head_dim), *range(scales, scales + scale_bytes)]
    assert stored == sorted(want)


def test_layer_is_an_operand_of_the_kernel():
    # A layer that is traced must not become one kernel a layer, nor a slice of the pool.
    text = lowered_kv("raw_e4m3fn", "sm_90").as_text()
    assert "dynamic_slice" not in text
    stores = {layer: triton_kernel(lowered_kv("raw_e4m3fn", "sm_90")).stores(layer, lambda t: 1) for layer in (0, 1)}
    distance = {int(b.first[0] - a.first[0]) for a, b in zip(stores[0], stores[1], strict=True)}
    assert distance == {64 * 576}
