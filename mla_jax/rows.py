"""Rows and index pages in jnp: numbers to the pool's words and back. The XLA implementations are built from these."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, Shaped, UInt8, UInt32

from mla_jax.layout import GROUP, CacheLayout, IndexLayout
from mla_jax.quantize import decode, divide, encode_bits, encode_group, finite_amax, index_scale, packed_scale, plain_bits


def to_bytes(values: Shaped[Array, "*lead n"]) -> UInt8[Array, "*lead nbytes"]:
    """The bytes of the last axis, little endian."""
    if values.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(values, jnp.uint8)
    split = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return split.reshape(*values.shape[:-1], values.shape[-1] * values.dtype.itemsize)


def from_bytes(data: UInt8[Array, "*lead nbytes"], dtype: jax.typing.DTypeLike) -> Shaped[Array, "*lead n"]:
    """Numbers of ``dtype`` from the bytes of the last axis."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        data = data.reshape(*data.shape[:-1], data.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(data, dtype)


def encode_rows(
    layout: CacheLayout,
    c_kv: Num[Array, "*lead R"],
    k_rope: Num[Array, "*lead P"],
    k_scale: Float[Array, ""] | None = None,
) -> Shaped[Array, "*lead words"]:
    """Rows of ``layout`` as the pool's words. Latent and rope are cast independently, whatever their dtypes."""
    dialect = layout.dialect
    if dialect is None:
        parts = [plain_bits(part, layout.number_dtype).astype(layout.word_dtype) for part in (c_kv, k_rope)]
        return jnp.concatenate(parts, axis=-1)
    if layout.is_raw:
        codes = []
        for part in (c_kv, k_rope):
            scaled = part if k_scale is None else divide(part.astype(jnp.float32), k_scale)
            codes.append(encode_bits(scaled, dialect, source=part).astype(jnp.uint8))
        return from_bytes(jnp.concatenate(codes, axis=-1), layout.word_dtype)
    assert layout.scale_mode is not None
    groups = c_kv.reshape(*c_kv.shape[:-1], c_kv.shape[-1] // GROUP, GROUP)
    amax = finite_amax(groups)
    scale = packed_scale(amax, layout.scale_mode)
    codes = encode_group(groups, amax, scale, layout.scale_mode, dialect).astype(jnp.uint8)
    rope = plain_bits(k_rope, jnp.bfloat16).astype(jnp.uint16)
    return from_bytes(jnp.concatenate([codes.reshape(c_kv.shape), to_bytes(scale), to_bytes(rope)], axis=-1), layout.word_dtype)


def decode_rows(
    layout: CacheLayout, words: Shaped[Array, "*lead words"], k_scale: Float[Array, ""] | None = None
) -> tuple[Float[Array, "*lead R"], Float[Array, "*lead P"]]:
    """float32 latent and rope of rows given as the pool's words."""
    R = layout.kv_lora_rank
    dialect = layout.dialect
    if dialect is None:
        values = jax.lax.bitcast_convert_type(words, layout.number_dtype).astype(jnp.float32)
        return values[..., :R], values[..., R:]
    data = to_bytes(words)
    if layout.is_raw:
        values = decode(data, dialect)
        if k_scale is not None:
            values = values * k_scale
        return values[..., :R], values[..., R:]
    scales_end = R + R // GROUP * 4
    scale = from_bytes(data[..., R:scales_end], jnp.float32)
    groups = decode(data[..., :R], dialect).reshape(*data.shape[:-1], R // GROUP, GROUP) * scale[..., None]
    rope = from_bytes(data[..., scales_end:], jnp.bfloat16).astype(jnp.float32)
    return groups.reshape(*data.shape[:-1], R), rope


def encode_index_keys(
    layout: IndexLayout, k: Num[Array, "*lead d"]
) -> tuple[Shaped[Array, "*lead key_words"], Shaped[Array, "*lead scale_words"]]:
    """Codes and scales of index keys, both as the pool's words; float32 keys have no scales."""
    if layout.dialect is None or layout.scale_mode is None:
        words = plain_bits(k, jnp.float32)
        return words, words[..., :0]
    codes, scales = [], []
    for start in range(0, layout.head_dim, GROUP):
        group = k[..., start : start + GROUP]
        amax = finite_amax(group)
        scale = index_scale(amax, layout.scale_mode, layout.dialect)
        codes.append(encode_group(group, amax, scale, layout.scale_mode, layout.dialect).astype(jnp.uint8))
        scales.append(scale)
    key_bytes = jnp.concatenate(codes, axis=-1)
    scale_bytes = to_bytes(jnp.stack(scales, axis=-1))
    return from_bytes(key_bytes, layout.word_dtype), from_bytes(scale_bytes, layout.word_dtype)


def decode_index_pages(layout: IndexLayout, pages: Shaped[Array, "*lead words"]) -> Float[Array, "*lead S d"]:
    """float32 keys of whole pages (``layout.page_shape`` trailing)."""
    if layout.dialect is None:
        return jax.lax.bitcast_convert_type(pages, jnp.float32)
    data = to_bytes(pages)
    keys_end = layout.page_size * layout.head_dim
    lead = data.shape[:-1]
    codes = data[..., :keys_end].reshape(*lead, layout.page_size, layout.head_dim)
    scale = from_bytes(data[..., keys_end:], jnp.float32).reshape(*lead, layout.page_size, layout.groups)
    scale = jnp.repeat(scale, GROUP, axis=-1)[..., : layout.head_dim]
    return decode(codes, layout.dialect) * scale


def index_columns(layout: IndexLayout, offsets: Shaped[Array, "T"]) -> tuple[UInt32[Array, "T kw"], UInt32[Array, "T sw"]]:
    """Columns, within a page's words, of the keys and scales of the tokens at ``offsets`` in the page."""
    size = layout.word_dtype.itemsize
    key_words, scale_words = layout.head_dim // size, layout.groups * 4 // size
    keys = offsets[:, None] * key_words + jnp.arange(key_words, dtype=offsets.dtype)[None, :]
    first = layout.page_size * key_words
    return keys, first + offsets[:, None] * scale_words + jnp.arange(scale_words, dtype=offsets.dtype)[None, :]
