"""What every attention is asked with, checked: queries, scales, sinks and the dtype of the answer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax import checks, quantize
from mla_jax.cache import PagedMLACache
from mla_jax.kernels.attend import QUERY_SCALE
from mla_jax.kernels.tiles import fit_float16
from mla_jax.layout import CacheLayout, Dialect
from mla_jax.quantize import FP8_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """The arguments that attentions share.

    Attributes:
        latent: [..., H, R], float32, bfloat16 or float16; read :meth:`float32` for numbers to compute with.
        rope: [..., H, P], likewise.
        factor: float32 scalar, multiplies the logits: softmax scale times ``k_scale``.
        k_scale: float32 scalar that multiplies the values, or None.
        sinks: float32[H], or None.
        dtype: of the output.
        precision: of products: HIGHEST where the cache or a query is float32, else the default.
        coded: the FP8 encoding of the rows where queries and weights are rounded to it, or None.
    """

    latent: Float[Array, "*lead H R"]
    rope: Float[Array, "*lead H P"]
    factor: Float[Array, ""]
    k_scale: Float[Array, ""] | None
    sinks: Float[Array, "H"] | None
    dtype: np.dtype
    precision: jax.lax.Precision | None
    coded: Dialect | None

    def rounded(self) -> "Queries":
        """Themselves, or float32 queries that hold only what their FP8 codes hold: each row with a power of two of its own."""
        if self.coded is None:
            return self
        latent, rope = self.latent.astype(jnp.float32), self.rope.astype(jnp.float32)
        amax = quantize.finite_amax(latent)
        if rope.shape[-1]:
            amax = quantize.larger(amax, quantize.finite_amax(rope))
        power, reciprocal = fit_float16(amax)
        parts = []
        for part in (latent, rope):
            codes = quantize.encode(part * (reciprocal * np.float32(QUERY_SCALE))[..., None], self.coded)
            parts.append(quantize.decode(codes, self.coded) * (power * np.float32(1 / QUERY_SCALE))[..., None])
        return dataclasses.replace(self, latent=parts[0], rope=parts[1])

    def nothing(self) -> tuple[Float[Array, "*lead H R"], Float[Array, "*lead H"]]:
        """The result for queries that see no key at all."""
        return jnp.zeros(self.latent.shape, self.dtype), jnp.full(self.latent.shape[:-1], -np.inf, jnp.float32)


def queries(
    op: str,
    cache: PagedMLACache,
    lead: tuple[int | str, ...],
    q_latent: Any,
    q_rope: Any,
    *,
    softmax_scale: Any,
    k_scale: Any,
    sinks: Any,
    out_dtype: Any,
    compute: Any,
) -> Queries:
    """The checked arguments; ``lead`` are the queries' axes before heads, as in ``checks.check_shapes``.

    Raises:
        TypeError: for queries that are not float32, bfloat16, float16 or an FP8 type, and sinks that are no floats.
        ValueError: for other shapes or values.
    """
    layout = cache.config.layout
    shapes = {
        "q_latent": (*lead, "H", layout.kv_lora_rank),
        "q_rope": (*lead, "H", layout.qk_rope_head_dim),
        "sinks": ("H",),
    }
    arrays = {"q_latent": upcast_fp8(q_latent), "q_rope": upcast_fp8(q_rope)}
    if sinks is not None:
        arrays["sinks"] = sinks
    latent, rope, *rest = checks.floats(op, shapes, **arrays)
    scale = checks.k_scale_array(op, k_scale, layout)
    factor = _softmax_scale(op, softmax_scale, cache)
    is_f32 = layout.name == "plain_float32" or jnp.float32 in (latent.dtype, rope.dtype)
    return Queries(
        latent=latent,
        rope=rope,
        factor=factor if scale is None else factor * scale,
        k_scale=scale,
        sinks=rest[0].astype(jnp.float32) if rest else None,
        dtype=checks.float_dtype(op, "out_dtype", out_dtype, latent.dtype),
        precision=jax.lax.Precision.HIGHEST if is_f32 else None,
        coded=_coded(op, compute, layout),
    )


def _coded(op: str, compute: Any, layout: CacheLayout) -> Dialect | None:
    if compute is None:
        return None
    if compute != "fp8":
        raise ValueError(f'{op}: compute must be None or "fp8", got {compute!r}')
    if not layout.is_raw:
        raise ValueError(f'{op}: compute="fp8" multiplies the codes of raw FP8 rows, got rows of layout {layout.name}')
    return layout.dialect


def upcast_fp8(array: Any) -> Any:
    """FP8 arrays as bfloat16, which holds every FP8 number; anything else as it is."""
    dtype = getattr(array, "dtype", None)
    if dtype is not None and jnp.dtype(dtype) in FP8_DTYPES.values():
        return jnp.asarray(array).astype(jnp.bfloat16)
    return array


def _softmax_scale(op: str, softmax_scale: Any, cache: PagedMLACache) -> Float[Array, ""]:
    if softmax_scale is None:
        softmax_scale = cache.config.geometry.softmax_scale
    elif isinstance(softmax_scale, jax.Array | np.ndarray):
        if softmax_scale.shape != () or not jnp.issubdtype(softmax_scale.dtype, jnp.floating):
            raise ValueError(
                f"{op}: softmax_scale must be a float or a float32 scalar, "
                f"got {jnp.dtype(softmax_scale.dtype).name}{list(softmax_scale.shape)}"
            )
    elif (
        isinstance(softmax_scale, bool)
        or not isinstance(softmax_scale, int | float | np.number)
        or not 0 < float(softmax_scale) < math.inf
    ):
        raise ValueError(f"{op}: softmax_scale must be finite and positive, got {softmax_scale!r}")
    return jnp.asarray(softmax_scale, jnp.float32)
