"""FlashMLA's SM90 kernels at the shapes of ``mla-jax bench reads``: device microseconds by case name, as JSON.

    pip download --no-deps sgl-flash-mla
    python benchmarks/flash_mla_peer.py sgl_flash_mla-*.whl > peer.json
    mla-jax bench reads --peer peer.json --json benchmarks/h200_reads.json

Needs torch with CUDA on a Hopper GPU. The wheel's library is loaded from the archive and its operators are called directly.
"""

import ctypes
import json
import os
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SCALE = 0.0625
WIDTH, VALUE_WIDTH, PAGE = 576, 512, 64


def load(wheel: str) -> Any:
    """The operators of the wheel's library for SM90."""
    folder = pathlib.Path(tempfile.mkdtemp())
    zipfile.ZipFile(wheel).extractall(folder)
    (library,) = folder.glob("flash_mla/_C_legacy*.so")
    # Lazily: it names symbols of newer torch releases that these kernels never call.
    ctypes.CDLL(str(library), mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
    return torch.ops.flash_mla_legacy


def device_microseconds(call: Callable[[], Any], reps: int = 10) -> float:
    """Time of the kernels of one call, with the L2 cache flushed before each."""
    flush = torch.empty(2**28 // 4, device="cuda")
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(reps):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.key_averages() if "fill" not in event.key.lower() and "Memset" not in event.key]
    return sum(event.device_time_total for event in kernels) / reps


def dense(ops: Any, batch: int, heads: int, length: int, *, fp8: bool) -> float:
    """Decode of one token a sequence over bfloat16 or FP8 rows."""
    columns = length // PAGE
    q = torch.randn(batch, 1, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(batch * columns + 1, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    tables = (torch.randperm(batch * columns, device="cuda") + 1).int().view(batch, columns)
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    if fp8:
        q, kv = q.to(torch.float8_e4m3fn), kv.to(torch.float8_e4m3fn)
        plan, splits = ops.get_mla_decoding_metadata_dense_fp8(lengths, heads, 1)
        one = torch.ones(1, device="cuda")
        call = lambda: ops.fwd_kvcache_mla_fp8(q, kv, VALUE_WIDTH, lengths, tables, SCALE, False, plan, splits, one, one)  # noqa: E731
    else:
        _, _, plan, splits = ops.dense_decode_fwd(q, kv, VALUE_WIDTH, lengths, tables, SCALE, False, None, None)
        call = lambda: ops.dense_decode_fwd(q, kv, VALUE_WIDTH, lengths, tables, SCALE, False, plan, splits)  # noqa: E731
    return device_microseconds(call)


def sparse(ops: Any, batch: int, heads: int, length: int, listed: int) -> float:
    """Decode of one token a sequence over listed packed rows."""
    pages = batch * length // PAGE + 1
    q = torch.randn(batch, 1, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    codes = torch.randn(pages, PAGE, 1, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.ones(pages, PAGE, 1, 4, device="cuda").view(torch.uint8)
    rope = torch.randn(pages, PAGE, 1, 64, device="cuda", dtype=torch.bfloat16).view(torch.uint8)
    kv = torch.cat([codes, scales, rope], dim=-1).view(torch.float8_e4m3fn)
    slots = torch.randint(PAGE, pages * PAGE, (batch, 1, listed), device="cuda", dtype=torch.int32)
    none = (None,) * 3

    def run(plan: Any, splits: Any) -> Any:
        return ops.sparse_decode_fwd(q, kv, slots, None, None, plan, splits, *none, VALUE_WIDTH, SCALE, None)

    _, _, plan, splits = run(None, None)
    return device_microseconds(lambda: run(plan, splits))


def main() -> None:
    ops = load(sys.argv[1])
    times = {}
    for layout, fp8 in (("plain_bfloat16", False), ("raw_e4m3fn", True)):
        for batch, heads, length in ((128, 16, 4096), (128, 128, 4096), (8, 128, 16384)):
            times[f"decode {layout} B={batch} H={heads} S={length}"] = dense(ops, batch, heads, length, fp8=fp8)
    for heads in (64, 128):
        times[f"sparse packed_pow2 B=128 H={heads} S=4096 K=2048"] = sparse(ops, 128, heads, 4096, 2048)
    print(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
