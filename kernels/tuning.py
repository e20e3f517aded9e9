"""Speed: block sizes and warps by architecture. Nothing here changes a result."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from mla_jax.devices import Target
from mla_jax.layout import WritePath


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTuning:
    """How one write kernel is launched.

    Attributes:
        rows: rows each program writes, unrolled, so that their loads are in flight together.
        num_warps: warps a program.
        native_fp8: convert to OCP FP8 with the device's own instruction instead of the integer encoder (NVIDIA, sm_89 on).
    """

    rows: int
    num_warps: int
    native_fp8: bool = False


_INTERPRET = WriteTuning(rows=1, num_warps=1)
_DEFAULT = WriteTuning(rows=4, num_warps=4)

_WRITES: Mapping[str, Mapping[WritePath, WriteTuning]] = MappingProxyType(
    {
        "sm_90": {
            WritePath.PLAIN: WriteTuning(rows=4, num_warps=4),
            WritePath.RAW_FUSED: WriteTuning(rows=4, num_warps=4, native_fp8=True),
            WritePath.SCALED: WriteTuning(rows=4, num_warps=4, native_fp8=True),
        },
    }
)


def write_tuning(target: Target, path: WritePath) -> WriteTuning:
    """The launch parameters of the write kernel for ``path`` on ``target``. Index keys are tuned as SCALED."""
    if target.backend == "cpu":
        return _INTERPRET
    return _WRITES.get(target.arch or "", {}).get(path, _DEFAULT)
