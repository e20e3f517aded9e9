"""A config in words: the write path, why it and not another, what carries it out, and what a token costs."""

from mla_jax import checks
from mla_jax.config import CacheConfig
from mla_jax.kernels import backend
from mla_jax.layout import WritePath

_REASONS = {
    WritePath.PLAIN: "rows are stored as {layout.name}, a plain IEEE cast",
    WritePath.RAW_FUSED: "rows are FP8 ({layout.dialect}) without scales: one fused kernel encodes and stores",
    WritePath.SCALED: "rows are packed: {layout.dialect} codes, one float32 scale a group of 128, bfloat16 rope",
}
_REJECTIONS = {
    WritePath.PLAIN: "the rows hold FP8 codes, which a cast to a wider type would not produce",
    WritePath.RAW_FUSED: {
        True: "packed rows carry scales that a raw write would leave unwritten",
        False: "the rows hold {layout.name} numbers, not FP8 codes",
    },
    WritePath.SCALED: "the layout has no scales (nsa_kv_cache_store_fp8 is off)",
}


def explain(config: CacheConfig) -> str:
    """The write path a config resolves to and why, why the others were rejected, and what a token costs.

    Args:
        config: the config.

    Returns:
        Lines of text, ending without a newline. Sizes are bytes; GiB are 2^30 of them.

    Raises:
        TypeError: for anything but a CacheConfig.

    Example:
        >>> import mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> print(mla.explain(config))
        write path    PLAIN: rows are stored as plain_bfloat16, a plain IEEE cast
          not RAW_FUSED the rows hold plain_bfloat16 numbers, not FP8 codes
          not SCALED    the layout has no scales (nsa_kv_cache_store_fp8 is off)
        decided by    the layout alone (packed -> SCALED, other FP8 -> RAW_FUSED, else PLAIN), while tracing
        carried out   by XLA; the Pallas kernels are interpreted when named
        platform      cpu: its e4m3 is float8_e4m3fn
        layout        plain_bfloat16, 1152 bytes a row: [0, 1024) latent bfloat16, [1024, 1152) rope bfloat16
        per token     1,152 bytes over 1 layer
        tokens/GiB    932,067
        capacity      12 slots in 3 pages of 4, 0.000 GiB
    """
    checks.instance("explain", "config", config, CacheConfig)
    layout, index = config.layout, config.index_layout
    fields = ", ".join(f"[{f.start}, {f.stop}) {f.name} {f.dtype}" for f in layout.byte_map)
    lines = [
        f"write path    {config.write_path.name}: {_REASONS[config.write_path].format(layout=layout)}",
    ]
    for path in WritePath:
        if path is not config.write_path:
            reason = _REJECTIONS[path]
            reason = reason[layout.is_packed] if isinstance(reason, dict) else reason
            lines.append(f"  not {path.name:<9} {reason.format(layout=layout)}")
    lines += [
        "decided by    the layout alone (packed -> SCALED, other FP8 -> RAW_FUSED, else PLAIN), while tracing",
        f"carried out   {_carried_out(config.platform)}",
        f"platform      {config.platform}: its e4m3 is {config.fp8_dtype.name}",
        f"layout        {layout.name}, {layout.row_bytes} bytes a row: {fields}",
    ]
    if index is not None:
        keys = "float32" if index.dialect is None else f"{index.dialect} with {index.scale_mode} scales"
        lines.append(f"index keys    {index.token_bytes} bytes a token in {_count(config.num_index_layers or 0, 'layer')}: {keys}")
    lines += [
        f"per token     {config.bytes_per_token:,} bytes over {_count(config.num_layers, 'layer')}",
        f"tokens/GiB    {2**30 // config.bytes_per_token:,}",
        f"capacity      {config.capacity:,} slots in {config.num_pages:,} pages of {config.page_size}, "
        f"{config.capacity * config.bytes_per_token / 2**30:.3f} GiB",
    ]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _carried_out(platform: str | None) -> str:
    """Which implementation serves the platform's devices, and why."""
    if platform == "cpu":
        return "by XLA; the Pallas kernels are interpreted when named"
    missing = backend.missing_lowering()
    if missing is None:
        return "by Pallas kernels, which Triton lowers for CUDA and ROCm"
    return f"by XLA (scatter with unique indices, attention a chunk at a time): {missing}"
