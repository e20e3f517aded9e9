"""Bytes: what one cached token looks like in memory, and which write path that implies.

A layout is an explicit tag, never inferred from a row's width: 576 bytes are e4m3fn, e4m3fnuz, e5m2 or half of bfloat16.

Latent rows of R latent and P rope numbers, one row a token:

=================  ==================  =====================================================================
name               row bytes           byte map
=================  ==================  =====================================================================
plain_float32      4 (R + P)           latent, rope as IEEE numbers, little endian
plain_bfloat16     2 (R + P)           likewise
plain_float16      2 (R + P)           likewise
raw_e4m3fn         R + P               latent codes, rope codes; no scales
raw_e4m3fnuz       R + P               likewise
raw_e5m2           R + P               likewise
packed             R + R/32 + 2 P      R e4m3fn codes | one float32 scale for each 128 of them | P bfloat16
=================  ==================  =====================================================================

``packed`` is the interchange row of SGLang, vLLM (fp8_ds_mla) and FlashMLA: 656 bytes for 512 + 64.

Index-key pages hold all keys of a page, then all its scales (SGLang 0.5.23 ``index_k_with_scale_buffer``): for page size S
and key width d, S*d codes token-major, then S * ceil(d/128) float32 scales token-major; 132 bytes a token for d = 128.
A float32 cache keeps float32 keys, S*d numbers a page.
"""

import dataclasses
import enum
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

GROUP = 128
"""Numbers that share one scale, in packed rows and in index keys."""

Dialect = Literal["e4m3fn", "e4m3fnuz", "e5m2"]
ScaleMode = Literal["pow2", "fp32"]

DIALECTS: tuple[Dialect, ...] = ("e4m3fn", "e4m3fnuz", "e5m2")
SCALE_MODES: tuple[ScaleMode, ...] = ("pow2", "fp32")
PLAIN_DTYPES = ("float32", "bfloat16", "float16")
LAYOUT_NAMES = (*(f"plain_{d}" for d in PLAIN_DTYPES), *(f"raw_{d}" for d in DIALECTS), "packed")


class WritePath(enum.Enum):
    """The three ways a row is written. The layout decides; neither the platform nor any flag is asked again.

    Attributes:
        PLAIN: an IEEE cast.
        RAW_FUSED: one kernel encodes FP8 codes and stores them.
        SCALED: one kernel writes codes, scales and rope of packed rows.

    Example:
        >>> import mla_jax as mla
        >>> mla.CacheLayout(name="raw_e5m2", kv_lora_rank=512, qk_rope_head_dim=64).write_path
        <WritePath.RAW_FUSED: 'raw_fused'>
    """

    PLAIN = "plain"
    RAW_FUSED = "raw_fused"
    SCALED = "scaled"


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a row or page: bytes ``[start, stop)`` holding numbers of ``dtype``.

    Attributes:
        name: what it holds: "latent", "scales", "rope" or "keys".
        start: its first byte.
        stop: the byte behind its last.
        dtype: name of the numbers' type, as ``jnp.dtype`` and ``ml_dtypes`` spell it.
    """

    name: str
    start: int
    stop: int
    dtype: str


def _word_dtype(divisor: int) -> np.dtype:
    """The widest unsigned word (4, 2 or 1 bytes) that divides ``divisor``.

    Wide words load faster, and a pool of 32-bit words is immune to the 32-bit byte offsets that Pallas' Triton lowering
    uses for pools of single bytes between 2 and 4 GiB.
    """
    for dtype in (np.uint32, np.uint16):
        if divisor % np.dtype(dtype).itemsize == 0:
            return np.dtype(dtype)
    return np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The bytes of a latent row.

    Attributes:
        name: one of LAYOUT_NAMES.
        kv_lora_rank: R.
        qk_rope_head_dim: P, may be 0.
        scale_mode: how a packed row's scales are chosen; None in every other layout.

    Raises:
        ValueError: for an unknown name, impossible widths, or a scale_mode that does not go with the name.

    Example:
        >>> import mla_jax as mla
        >>> packed = mla.CacheLayout(name="packed", kv_lora_rank=512, qk_rope_head_dim=64, scale_mode="pow2")
        >>> [(field.name, field.start, field.stop) for field in packed.byte_map]
        [('latent', 0, 512), ('scales', 512, 528), ('rope', 528, 656)]
        >>> packed.row_bytes, packed.row_words, packed.word_dtype.name, packed.dialect, packed.write_path.name
        (656, 164, 'uint32', 'e4m3fn', 'SCALED')
        >>> packed.is_packed, packed.is_raw, packed.is_plain
        (True, False, False)
        >>> mla.CacheLayout(name="plain_float16", kv_lora_rank=512, qk_rope_head_dim=64).number_dtype.name
        'float16'
    """

    name: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    scale_mode: ScaleMode | None = None

    def __post_init__(self) -> None:
        if self.name not in LAYOUT_NAMES:
            raise ValueError(f"CacheLayout: name must be one of {LAYOUT_NAMES}, got {self.name!r}")
        if self.kv_lora_rank < 1 or self.qk_rope_head_dim < 0:
            raise ValueError(
                f"CacheLayout: kv_lora_rank must be >= 1 and qk_rope_head_dim >= 0, "
                f"got {self.kv_lora_rank} and {self.qk_rope_head_dim}"
            )
        if self.is_packed and self.kv_lora_rank % GROUP:
            raise ValueError(f"packed rows need kv_lora_rank to be a multiple of {GROUP}, got {self.kv_lora_rank}")
        if self.is_packed != (self.scale_mode is not None):
            raise ValueError(f"CacheLayout: scale_mode belongs to packed rows alone, got {self.scale_mode!r} for {self.name}")
        if self.scale_mode is not None and self.scale_mode not in SCALE_MODES:
            raise ValueError(f"CacheLayout: scale_mode must be one of {SCALE_MODES}, got {self.scale_mode!r}")

    @property
    def is_packed(self) -> bool:
        """Codes with scales, and bfloat16 rope."""
        return self.name == "packed"

    @property
    def is_raw(self) -> bool:
        """FP8 codes without scales, rope among them."""
        return self.name.startswith("raw_")

    @property
    def is_plain(self) -> bool:
        """IEEE numbers."""
        return self.name.startswith("plain_")

    @property
    def write_path(self) -> WritePath:
        """Packed -> SCALED, any other FP8 -> RAW_FUSED, else PLAIN."""
        if self.is_packed:
            return WritePath.SCALED
        return WritePath.RAW_FUSED if self.is_raw else WritePath.PLAIN

    @property
    def dialect(self) -> Dialect | None:
        """The FP8 encoding of the codes; None for plain rows."""
        if self.is_packed:
            return "e4m3fn"
        for dialect in DIALECTS:
            if self.name == f"raw_{dialect}":
                return dialect
        return None

    @property
    def byte_map(self) -> tuple[Field, ...]:
        """The fields of a row in order, covering every byte; empty fields are left out."""
        R, P = self.kv_lora_rank, self.qk_rope_head_dim
        if self.is_packed:
            parts = (("latent", R, "float8_e4m3fn"), ("scales", R // GROUP * 4, "float32"), ("rope", 2 * P, "bfloat16"))
        elif self.is_raw:
            parts = (("latent", R, f"float8_{self.dialect}"), ("rope", P, f"float8_{self.dialect}"))
        else:
            dtype, size = self.number_dtype.name, self.number_dtype.itemsize
            parts = (("latent", R * size, dtype), ("rope", P * size, dtype))
        fields, start = [], 0
        for name, size, dtype in parts:
            if size:
                fields.append(Field(name, start, start + size, dtype))
            start += size
        return tuple(fields)

    @property
    def row_bytes(self) -> int:
        """W, bytes of one token in one layer. Rows are never padded."""
        return self.byte_map[-1].stop

    @property
    def word_dtype(self) -> np.dtype:
        """The pool's element type, an unsigned word, as wide as the number in plain rows and as the fields allow elsewhere.

        A word never straddles two fields, so each field is written and read as whole words. Plain rows are words too: XLA on a CPU
        scatters bfloat16 through a float32 copy of the whole pool, and words keep every bit.
        """
        if self.is_plain:
            return np.dtype(f"uint{8 * self.number_dtype.itemsize}")
        return _word_dtype(int(np.gcd.reduce([field.stop for field in self.byte_map])))

    @property
    def number_dtype(self) -> np.dtype:
        """The numbers a plain row holds; a ValueError for every other layout."""
        if not self.is_plain:
            raise ValueError(f"{self.name} rows hold codes, not numbers of one dtype")
        return jnp.dtype(self.name.removeprefix("plain_"))

    @property
    def row_words(self) -> int:
        """Elements of the pool in one row."""
        return self.row_bytes // self.word_dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexLayout:
    """The bytes of one page of index keys.

    Attributes:
        head_dim: d, the key's width.
        page_size: S, tokens a page.
        dialect: the FP8 encoding of the codes; None for float32 keys.
        scale_mode: how scales are chosen; None for float32 keys.

    Raises:
        ValueError: for sizes below 1, a page_size that is no power of two, an unknown dialect or scale_mode, or one of these two
            without the other.

    SGLang 0.5.23 ``index_k_with_scale_buffer``.

    Example:
        >>> import mla_jax as mla
        >>> pages = mla.IndexLayout(head_dim=128, page_size=64, dialect="e4m3fn", scale_mode="pow2")
        >>> [(field.name, field.start, field.stop) for field in pages.byte_map]
        [('keys', 0, 8192), ('scales', 8192, 8448)]
        >>> pages.token_bytes, pages.page_bytes, pages.groups, pages.page_shape, pages.word_dtype.name
        (132, 8448, 1, (2112,), 'uint32')
    """

    head_dim: int
    page_size: int
    dialect: Dialect | None
    scale_mode: ScaleMode | None

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"IndexLayout: head_dim must be >= 1 and page_size a power of two, got {self.head_dim} and {self.page_size}"
            )
        if (self.dialect is None) != (self.scale_mode is None):
            raise ValueError(f"IndexLayout: dialect and scale_mode go together, got {self.dialect!r}, {self.scale_mode!r}")
        for name, allowed in (("dialect", get_args(Dialect)), ("scale_mode", SCALE_MODES)):
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"IndexLayout: {name} must be one of {allowed} or None, got {getattr(self, name)!r}")

    @property
    def groups(self) -> int:
        """Scales a token, one for each 128 channels or part."""
        return -(-self.head_dim // GROUP)

    @property
    def byte_map(self) -> tuple[Field, ...]:
        """The fields of a page in order."""
        keys = self.page_size * self.head_dim
        if self.dialect is None:
            return (Field("keys", 0, 4 * keys, "float32"),)
        scales = self.page_size * self.groups * 4
        return (Field("keys", 0, keys, f"float8_{self.dialect}"), Field("scales", keys, keys + scales, "float32"))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one index layer. Pages are never padded."""
        return self.byte_map[-1].stop

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one index layer, its scales included."""
        return self.page_bytes // self.page_size

    @property
    def word_dtype(self) -> np.dtype:
        """Element type of the pool, an unsigned word; none straddles two keys or a key and a scale."""
        return np.dtype(np.uint32) if self.dialect is None else _word_dtype(int(np.gcd(self.head_dim, 4)))

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page in words, ``[S, d]`` for float32 keys, else one run of keys, then scales."""
        if self.dialect is None:
            return (self.page_size, self.head_dim)
        return (self.page_bytes // self.word_dtype.itemsize,)
