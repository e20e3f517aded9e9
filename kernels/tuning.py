"""Speed: block sizes and warps by architecture. Nothing here changes a result."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from mla_jax.devices import Target

WriteKernel = Literal["plain", "raw_fused", "scaled", "index"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTuning:
    """How one write kernel is launched.

    Attributes:
        rows: rows each program writes, unrolled, so that their loads are in flight together.
        num_warps: warps a program.
        native_fp8: convert with the device's own OCP FP8 instruction instead of the integer encoder. Only where the two were
            compared bit for bit on the chip.
    """

    rows: int
    num_warps: int
    native_fp8: bool = False


_INTERPRET = WriteTuning(rows=1, num_warps=1)
# One warp owns a row, so a group's maximum needs no shared memory; two rows keep enough bytes in flight. On the H200 more
# warps or rows cost up to four times as much (packed rows: 36 us at 2 rows and 1 warp, 259 us at 16 rows and 4 warps).
_DEFAULT = WriteTuning(rows=2, num_warps=1)

_WRITES: Mapping[str, Mapping[WriteKernel, WriteTuning]] = MappingProxyType(
    {
        "sm_90": {
            "plain": WriteTuning(rows=2, num_warps=1),
            "raw_fused": WriteTuning(rows=2, num_warps=1, native_fp8=True),
            "scaled": WriteTuning(rows=2, num_warps=1, native_fp8=True),
            "index": WriteTuning(rows=4, num_warps=1, native_fp8=True),
        },
    }
)


def write_tuning(target: Target, kernel: WriteKernel) -> WriteTuning:
    """The launch parameters of a write kernel on ``target``."""
    if target.backend == "cpu":
        return _INTERPRET
    return _WRITES.get(target.arch or "", {}).get(kernel, _DEFAULT)
