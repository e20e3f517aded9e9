"""Which chip a call is for: by a concrete array's device, the abstract mesh, the default device, in that order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import devices
from mla_jax.devices import Target
from mla_jax.kernels import backend


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str
    compute_capability: Any = None


@pytest.mark.parametrize(
    ("device", "target"),
    [
        (FakeDevice("cpu", "cpu"), Target("cpu")),
        (FakeDevice("gpu", "NVIDIA H200", "9.0"), Target("cuda", "sm_90")),
        (FakeDevice("cuda", "NVIDIA H100 80GB HBM3", "9.0"), Target("cuda", "sm_90")),
        (FakeDevice("gpu", "NVIDIA B200", "10.0"), Target("cuda", "sm_100")),
        (FakeDevice("gpu", "NVIDIA H200"), Target("cuda", "sm_90")),
        (FakeDevice("gpu", "NVIDIA Something New"), Target("cuda")),
        (FakeDevice("gpu", "AMD Instinct MI300X", "gfx942"), Target("rocm", "gfx942")),
        (FakeDevice("rocm", "AMD Instinct MI355X"), Target("rocm", "gfx950")),
        (FakeDevice("rocm", "AMD Instinct MI325X"), Target("rocm", "gfx942")),
        (FakeDevice("rocm", "gfx950"), Target("rocm", "gfx950")),
        (FakeDevice("rocm", "gfx90a"), Target("rocm", "gfx90a")),
        (FakeDevice("rocm", "unheard of"), Target("rocm")),
        (FakeDevice("tpu", "TPU v5e"), Target("tpu")),
    ],
    ids=lambda v: v.device_kind if isinstance(v, FakeDevice) else "",
)
def test_device_is_recognised(device, target):
    assert devices.target_of_device(device) == target
    assert devices.target_of_device(device).is_gpu == (target.backend in ("cuda", "rocm"))


@pytest.mark.parametrize(
    ("platform", "dialect"), [("cpu", "e4m3fn"), ("cuda", "e4m3fn"), ("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn")]
)
def test_only_mi300_has_the_fnuz_dialect(platform, dialect):
    assert devices.e4m3_dialect(platform) == dialect


def test_default_target_of_this_run_is_the_cpu():
    assert devices.default_target() == Target("cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert devices.default_target() == Target("cpu")
    with jax.default_device("cpu"):  # pyright: ignore[reportArgumentType]
        assert devices.default_target() == Target("cpu")


@pytest.mark.parametrize(
    ("arch", "target"),
    [("gfx942", Target("rocm", "gfx942")), ("gfx950", Target("rocm", "gfx950")), ("sm_90", Target("cuda", "sm_90"))],
)
def test_abstract_mesh_goes_before_the_default_device(arch, target):
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu(arch)), jax.default_device(jax.devices("cpu")[0]):
        assert devices.default_target() == target
    assert devices.default_target() == Target("cpu")


def test_concrete_array_counts_by_its_own_device_and_a_tracer_by_the_default():
    x = jnp.zeros(3)
    seen = []
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu("gfx942")):
        assert devices.target_of(x) == Target("cpu")
        jax.make_jaxpr(lambda y: seen.append(devices.target_of(y)))(jax.ShapeDtypeStruct((3,), jnp.float32))
        assert devices.target_of(np.zeros(3)) == Target("rocm", "gfx942")
    assert seen == [Target("rocm", "gfx942")]


def test_mesh_without_a_device_is_no_device():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        assert devices.default_target() == Target("cpu")


def test_detected_platform_of_this_run_is_the_cpu():
    assert devices.detect_platform() == "cpu"
