"""Which chip a cache is for, and which device a call runs on: the two are asked separately and never confused.

The *platform* of a cache names the chip whose FP8 dialect it stores. The *target* of a call is the device it is lowered for.
"""

import dataclasses
import re
from typing import Any, Literal

import jax
import jax.core

from mla_jax.layout import Dialect

Platform = Literal["cpu", "cuda", "gfx942", "gfx950"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "gfx942", "gfx950")

_INSTINCT = {"mi300": "gfx942", "mi325": "gfx942", "mi350": "gfx950", "mi355": "gfx950"}
_NVIDIA = {
    "a100": "sm_80",
    "h100": "sm_90",
    "h200": "sm_90",
    "h800": "sm_90",
    "h20": "sm_90",
    "b100": "sm_100",
    "b200": "sm_100",
}
"""Architectures by product name, for devices that report no capability (abstract devices do not)."""


def e4m3_dialect(platform: Platform) -> Dialect:
    """MI300's matrix units read e4m3fnuz; MI350, NVIDIA and the CPU use the OCP encoding."""
    return "e4m3fnuz" if platform == "gfx942" else "e4m3fn"


@dataclasses.dataclass(frozen=True)
class Target:
    """A device kind: ``backend`` is "cpu", "cuda", "rocm" or another of JAX's; ``arch`` is "sm_90", "gfx942", ... or None."""

    backend: str
    arch: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.backend in ("cuda", "rocm")


def _target(platform: str, device_kind: str, capability: Any) -> Target:
    text = f"{device_kind} {capability or ''}".lower()
    if platform in ("gpu", "cuda", "rocm"):
        gfx = re.search(r"gfx[0-9a-f]+", text)
        arch = gfx.group() if gfx else next((v for k, v in _INSTINCT.items() if k in text), None)
        if arch is not None or platform == "rocm":
            return Target("rocm", arch)
        sm = re.search(r"(\d+)\.(\d+)", str(capability or ""))
        known = next((v for k, v in _NVIDIA.items() if k in text), None)
        return Target("cuda", f"sm_{sm.group(1)}{sm.group(2)}" if sm else known)
    return Target(platform)


def target_of_device(device: Any) -> Target:
    """The target of a ``jax.Device``."""
    return _target(device.platform, device.device_kind, getattr(device, "compute_capability", None))


def default_target() -> Target:
    """The abstract mesh's device if one is set, else ``jax.default_device``, else the default backend's first device."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        platform = abstract.platform
        if platform is None:
            platform = "rocm" if "gfx" in abstract.device_kind else "cuda"
        return _target(platform, abstract.device_kind, None)
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        default = jax.devices()[0]
    elif isinstance(default, str):
        default = jax.devices(default)[0]
    return target_of_device(default)


def target_of(array: Any) -> Target:
    """Where a call on ``array`` runs: a concrete array's own device, else the default target."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return target_of_device(next(iter(array.devices())))
    return default_target()


def detect_platform() -> Platform:
    """The platform of the default device; a ValueError asking for ``platform=`` when it is none of PLATFORMS."""
    target = default_target()
    if target.backend == "cpu":
        return "cpu"
    if target.backend == "cuda":
        return "cuda"
    for platform in PLATFORMS:
        if target.arch == platform:
            return platform
    raise ValueError(
        f"the default device ({target.backend}, {target.arch or 'unknown architecture'}) has no known FP8 dialect; "
        f"say which chip the cache is for with platform=, one of {PLATFORMS}"
    )
