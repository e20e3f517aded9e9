"""AMD Instinct chips: what a kernel may use of them, and what their maker publishes.

Sources: AMD Instinct MI300X data sheet (2023) and MI355X data sheet (2025) for units, clocks, memory, bandwidth and dense matrix
rates; AMD CDNA 3 and CDNA 4 white papers and ISA guides (2024, 2025) for LDS (64 and 160 KiB a compute unit), the 512 registers a
lane that architectural and accumulation registers share, and 8 waves a SIMD.
"""

import dataclasses
from typing import Literal

from mla_jax.devices import Platform, e4m3_dialect
from mla_jax.layout import Dialect

Arch = Literal["gfx942", "gfx950"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, as its instruction set and its data sheet describe it.

    Attributes:
        arch: name of the instruction set.
        product: the product whose units and rates these are.
        compute_units: active compute units.
        clock_ghz: peak engine clock, GHz.
        lds_bytes: local data share of a compute unit, which is also the most that one work group may use.
        memory_bytes: device memory.
        bandwidth: peak memory bandwidth, bytes a second.
        l2_bytes: second-level cache of one die.
        matrix_rates: dense multiply-adds counted as two operations a second, by operand type.
    """

    arch: Arch
    product: str
    compute_units: int
    clock_ghz: float
    lds_bytes: int
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    matrix_rates: dict[str, float]

    wave_lanes: int = 64
    simds: int = 4
    waves_per_simd: int = 8
    registers_per_lane: int = 512
    register_granule: int = 8

    @property
    def dialect(self) -> Dialect:
        """The e4m3 encoding that its matrix units read."""
        platform: Platform = self.arch
        return e4m3_dialect(platform)

    def waves(self, registers: int, lds_bytes: int, waves_per_group: int) -> int:
        """Waves that one compute unit holds at a time, at most ``simds * waves_per_simd``.

        Args:
            registers: vector registers of a lane, accumulation registers included.
            lds_bytes: local data share of a work group.
            waves_per_group: waves of a work group.
        """
        granules = -(-max(registers, 1) // self.register_granule) * self.register_granule
        by_registers = self.simds * min(self.waves_per_simd, self.registers_per_lane // granules)
        groups = by_registers // waves_per_group
        if lds_bytes:
            groups = min(groups, self.lds_bytes // lds_bytes)
        return groups * waves_per_group

    def target_config(self) -> str:
        """XLA's description of the chip (``GpuTargetConfigProto``), for compiling where it is not attached.

        Limits of blocks and registers are those that HIP reports for the product (hipDeviceProp_t).
        """
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: {self.wave_lanes}
  shared_memory_per_block: {self.lds_bytes}
  shared_memory_per_core: {self.lds_bytes}
  shared_memory_per_block_optin: {self.lds_bytes}
  threads_per_core_limit: {self.wave_lanes * self.simds * self.waves_per_simd}
  core_count: {self.compute_units}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65536
  block_dim_limit_z: 65536
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  rocm_compute_capability {{ gcn_arch_name: "{self.arch}:sramecc+:xnack-" }}
}}
platform_name: "ROCM"
device_description_str: "{self.product}"
"""


CHIPS: dict[str, Chip] = {
    chip.arch: chip
    for chip in (
        Chip(
            arch="gfx942",
            product="AMD Instinct MI300X",
            compute_units=304,
            clock_ghz=2.1,
            lds_bytes=64 * 1024,
            memory_bytes=192 * 10**9,
            bandwidth=5.3e12,
            l2_bytes=4 * 2**20,
            matrix_rates={"float32": 163.4e12, "float16": 1307.4e12, "bfloat16": 1307.4e12, "float8": 2614.9e12},
        ),
        Chip(
            arch="gfx950",
            product="AMD Instinct MI355X",
            compute_units=256,
            clock_ghz=2.4,
            lds_bytes=160 * 1024,
            memory_bytes=288 * 10**9,
            bandwidth=8.0e12,
            l2_bytes=4 * 2**20,
            matrix_rates={"float32": 157.3e12, "float16": 2516.6e12, "bfloat16": 2516.6e12, "float8": 5033.2e12},
        ),
    )
}
"""By instruction set: the chips that the kernels are tuned for."""
