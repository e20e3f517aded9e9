"""Model facts: the dimensions of one multi-head latent attention (MLA) block and of its indexer.

Letters used everywhere: R latent rank (kv_lora_rank), P rope width, N nope width, V value width, H heads.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType


def _require_int(owner: object, name: str, minimum: int) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{type(owner).__name__}: {name} must be an int >= {minimum}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerGeometry:
    """The lightning indexer of DeepSeek-V3.2 and GLM-5: ``num_heads`` query heads over one key of ``head_dim``.

    Attributes:
        num_heads: indexer query heads (h).
        head_dim: width of the one indexer key a token (d).
        topk: tokens each query attends to (K).

    Raises:
        ValueError: unless all three are ints >= 1.

    DeepSeek-V3.2 report, section 2.1; ``index_n_heads``, ``index_head_dim`` and ``index_topk`` of config.json.

    Example:
        >>> import mla_jax as mla
        >>> mla.IndexerGeometry(num_heads=32, head_dim=128, topk=2048) == mla.GEOMETRIES["glm-5"].indexer
        True
    """

    num_heads: int
    head_dim: int
    topk: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "topk"):
            _require_int(self, name, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAGeometry:
    """Dimensions of one MLA block (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        num_heads: H, the attention heads that share one latent.
        q_lora_rank: width of the query's low-rank bottleneck, None where the model has none.
        kv_lora_rank: R, the latent stored in the cache.
        qk_nope_head_dim: N, the part of each query and key head without position.
        qk_rope_head_dim: P, the rotated part, shared by all heads in the cache; 0 in models without rope.
        v_head_dim: V, the width of each head's value.
        softmax_scale: multiplies the logits; (N + P)^-0.5 times the square of yarn's amplitude, never (R + P)^-0.5.
        indexer: the sparse-attention indexer, or None.

    Raises:
        ValueError: unless the dimensions are ints >= 1 (P: >= 0) and the scale is finite and positive.

    Example:
        >>> import mla_jax as mla
        >>> geometry = mla.MLAGeometry(
        ...     num_heads=4, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=32,
        ...     softmax_scale=(48 + 16) ** -0.5,
        ... )
        >>> geometry.softmax_scale, geometry.indexer
        (0.125, None)
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    indexer: IndexerGeometry | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            _require_int(self, name, 1)
        _require_int(self, "qk_rope_head_dim", 0)
        if self.q_lora_rank is not None:
            _require_int(self, "q_lora_rank", 1)
        if not (isinstance(self.softmax_scale, int | float) and 0 < self.softmax_scale < math.inf):
            raise ValueError(f"MLAGeometry: softmax_scale must be finite and positive, got {self.softmax_scale!r}")
        object.__setattr__(self, "softmax_scale", float(self.softmax_scale))
        if self.indexer is not None and not isinstance(self.indexer, IndexerGeometry):
            raise ValueError(f"MLAGeometry: indexer must be an IndexerGeometry or None, got {self.indexer!r}")


def softmax_scale(qk_nope_head_dim: int, qk_rope_head_dim: int, *, yarn_factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """(N + P)^-0.5 * m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1 (yarn, arXiv 2309.00071; DeepSeek-V2's code)."""
    m = 0.1 * mscale_all_dim * math.log(yarn_factor) + 1.0 if yarn_factor > 1.0 else 1.0
    return (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * m * m


def _preset(
    heads: int,
    q_lora: int | None,
    kv_lora: int,
    nope: int,
    rope: int,
    v: int,
    *,
    yarn: tuple[float, float] = (1.0, 0.0),
    indexer: tuple[int, int, int] | None = None,
) -> MLAGeometry:
    factor, mscale = yarn
    return MLAGeometry(
        num_heads=heads,
        q_lora_rank=q_lora,
        kv_lora_rank=kv_lora,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        softmax_scale=softmax_scale(nope, rope, yarn_factor=factor, mscale_all_dim=mscale),
        indexer=None if indexer is None else IndexerGeometry(num_heads=indexer[0], head_dim=indexer[1], topk=indexer[2]),
    )


_DEEPSEEK_V3 = _preset(128, 1536, 512, 128, 64, 128, yarn=(40.0, 1.0))
_GLM_5 = _preset(64, 2048, 512, 192, 64, 256, indexer=(32, 128, 2048))

GEOMETRIES: Mapping[str, MLAGeometry] = MappingProxyType(
    {
        "deepseek-v2-lite": _preset(16, None, 512, 128, 64, 128, yarn=(40.0, 0.707)),
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-r1": _DEEPSEEK_V3,
        "deepseek-v3.2": _preset(128, 1536, 512, 128, 64, 128, yarn=(40.0, 1.0), indexer=(64, 128, 2048)),
        "glm-4.7-flash": _preset(20, 768, 512, 192, 64, 256),
        "glm-5": _GLM_5,
        "glm-5.1": _GLM_5,
        "glm-5.2": _GLM_5,
        "glm-5.3": _GLM_5,
        "kimi-k2": _preset(64, 1536, 512, 128, 64, 128, yarn=(32.0, 1.0)),
        "kimi-k2.5": _preset(64, 1536, 512, 128, 64, 128, yarn=(64.0, 1.0)),
        "minicpm3-4b": _preset(40, 768, 256, 64, 32, 64),
    }
)
"""Released models by lower-case name, from their published ``config.json``. The table is read-only.

Example:
    >>> import mla_jax as mla
    >>> sorted(mla.GEOMETRIES)[:3], mla.GEOMETRIES["glm-5"].kv_lora_rank, mla.GEOMETRIES["glm-5"].indexer.topk
    (['deepseek-r1', 'deepseek-v2-lite', 'deepseek-v3'], 512, 2048)
"""

NUM_LAYERS: Mapping[str, int] = MappingProxyType(
    {
        "deepseek-v2-lite": 27,
        "deepseek-v3": 61,
        "deepseek-r1": 61,
        "deepseek-v3.2": 61,
        "glm-4.7-flash": 47,
        "glm-5": 78,
        "glm-5.1": 78,
        "glm-5.2": 78,
        "glm-5.3": 78,
        "kimi-k2": 61,
        "kimi-k2.5": 61,
        "minicpm3-4b": 62,
    }
)
"""Attention layers of the same models, from the same files.

Example:
    >>> from mla_jax.geometry import NUM_LAYERS
    >>> NUM_LAYERS["glm-5"]
    78
"""
