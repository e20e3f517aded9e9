"""``mla-jax info``: devices, the platform's dialect, and what a set of flags resolves to."""

import argparse

import jax
from rich.console import Console
from rich.table import Table

from mla_jax import devices
from mla_jax.config import KV_CACHE_DTYPES, CacheConfig, pages_that_fit
from mla_jax.devices import PLATFORMS
from mla_jax.explain import explain
from mla_jax.geometry import GEOMETRIES, NUM_LAYERS
from mla_jax.layout import SCALE_MODES

NAME = "info"
HELP = "show devices, the FP8 dialect, and the write path and cost that a preset and flags resolve to"


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of CacheConfig."""
    parser.add_argument("--platform", choices=PLATFORMS, help="the chip whose FP8 dialect is stored (default: this device's)")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="type of the numbers in a row; auto: fp8_e4m3 with --packed, else bfloat16 (default: auto)",
    )
    parser.add_argument("--packed", action="store_true", help="packed rows with scales (nsa_kv_cache_store_fp8)")
    parser.add_argument(
        "--scale-mode",
        default="pow2",
        choices=SCALE_MODES,
        help="scales of packed rows and FP8 index keys: pow2 as FlashMLA, fp32 as SGLang (default: pow2)",
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page, a power of two (default: 64)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="glm-5", choices=sorted(GEOMETRIES), help="model geometry (default: glm-5)")
    parser.add_argument("--layers", type=int, help="attention layers (default: the preset's)")
    parser.add_argument("--gib", type=float, default=1.0, help="memory for the pools, in GiB (default: 1)")
    add_cache_flags(parser)


def run(args: argparse.Namespace) -> int:
    console = Console()
    geometry = GEOMETRIES[args.preset]
    layers = NUM_LAYERS[args.preset] if args.layers is None else args.layers
    config = CacheConfig(
        geometry=geometry,
        num_layers=layers,
        num_pages=2,
        page_size=args.page_size,
        platform=args.platform,
        use_nsa=geometry.indexer is not None,
        kv_cache_dtype=args.kv_cache_dtype,
        nsa_kv_cache_store_fp8=args.packed,
        scale_mode=args.scale_mode,
    )
    if not 0 <= args.gib < float("inf"):
        raise ValueError(f"--gib must be finite and positive, got {args.gib}")
    pages = pages_that_fit(config, int(args.gib * 2**30))
    if pages < 2:
        raise ValueError(f"--gib {args.gib:g} holds {pages} pages of {args.page_size} tokens in {layers} layers; a cache needs 2")
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    config = CacheConfig(**{**fields, "num_pages": pages})

    table = Table("device", "kind", "backend", "architecture", title=f"jax {jax.__version__}")
    for device in jax.devices():
        target = devices.target_of_device(device)
        table.add_row(str(device.id), device.device_kind, target.backend, target.arch or "-")
    console.print(table)
    console.print(f"[bold]{args.preset}[/bold], {layers} layer{'s' * (layers != 1)}, {args.gib:g} GiB", highlight=False)
    console.print(explain(config), highlight=False, markup=False, soft_wrap=True)
    return 0
