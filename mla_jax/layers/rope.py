"""Rotary positions: frequencies (plain or yarn), angles, and the two ways of pairing numbers.

A rotation turns pairs of numbers. Which two numbers form a pair, and in which order the results are stored, are separate facts:

- *interleaved*: pair i is (2i, 2i+1); *half-split*: pair i is (i, i + P/2).
- :func:`rotate` stores results where their inputs were. :func:`to_half_split` reorders an interleaved result.

Scores are the same whatever the stored order, as long as queries and keys agree.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnSpec:
    """Yarn's interpolation of frequencies (arXiv 2309.00071), as transformers 5.24.0 ``modeling_rope_utils`` computes it.

    Attributes:
        factor: how far the context is stretched.
        original_max_position_embeddings: the context it is stretched from, in tokens.
        beta_fast: frequencies turning more often than this over the original context stay as they are.
        beta_slow: those turning less often than this are divided by ``factor``.
        mscale: numerator of the amplitude of cos and sin, see :attr:`amplitude`.
        mscale_all_dim: its denominator; it also scales the softmax (``geometry.softmax_scale``).
        attention_factor: the amplitude itself, where a config states it.

    Example:
        >>> from mla_jax import layers
        >>> yarn = layers.YarnSpec(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
        >>> yarn.amplitude
        1.0
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """m(mscale) / m(mscale_all_dim) if both are set and non-zero, else m(1); m(s) = 0.1 s ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor

        def m(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

        return m(self.mscale) / m(self.mscale_all_dim) if self.mscale and self.mscale_all_dim else m(1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Frequencies of a rotation over ``dim`` numbers.

    Attributes:
        dim: P, even.
        theta: base of the frequencies.
        yarn: their interpolation, or None.

    Raises:
        ValueError: for a dim that is odd or negative.

    RoFormer, arXiv 2104.09864, section 3.2.2.

    Example:
        >>> from mla_jax import layers
        >>> rope = layers.RopeSpec(dim=4, theta=10000.0)
        >>> [round(float(radians), 4) for radians in rope.frequencies()], rope.amplitude
        ([1.0, 0.01], 1.0)
    """

    dim: int
    theta: float
    yarn: YarnSpec | None = None

    def __post_init__(self) -> None:
        if self.dim < 0 or self.dim % 2:
            raise ValueError(f"RopeSpec: dim must be even and >= 0, got {self.dim}")

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin; 1 without yarn."""
        return 1.0 if self.yarn is None else self.yarn.amplitude

    def frequencies(self) -> np.ndarray:
        """The angle of each pair for one token, in radians: theta^(-2i/P) before yarn.

        Returns:
            numpy float32 [P/2].
        """
        pairs = self.dim // 2
        inverse = self.theta ** -(np.arange(pairs, dtype=np.float64) * 2 / max(self.dim, 1))
        yarn = self.yarn
        if yarn is None:
            return inverse.astype(np.float32)

        def dimension_turning(turns: float) -> float:
            return self.dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        # The upper clamp is P - 1, not P/2 - 1: transformers clamps the dimension, yet the ramp counts pairs.
        low = max(math.floor(dimension_turning(yarn.beta_fast)), 0)
        high = min(math.ceil(dimension_turning(yarn.beta_slow)), self.dim - 1)
        ramp = np.clip((np.arange(pairs) - low) / ((high - low) or 0.001), 0, 1)
        return (inverse / yarn.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def cos_sin(rope: RopeSpec, positions: Int32[Array, "T"]) -> tuple[Float[Array, "T pairs"], Float[Array, "T pairs"]]:
    """Cosines and sines of each pair's angle, times the amplitude. Angles are float32 products.

    Args:
        rope: the frequencies.
        positions: int32[T], each row's place in its sequence, in tokens.

    Returns:
        Two float32 [T, P/2].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> rope = layers.RopeSpec(dim=4, theta=10000.0)
        >>> cos, sin = jax.jit(lambda positions: layers.cos_sin(rope, positions))(jnp.array([0, 1]))
        >>> cos.shape, cos[0].tolist(), round(float(sin[1, 0]), 4)  # sin 1
        ((2, 2), [1.0, 1.0], 0.8415)
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.frequencies())
    amplitude = np.float32(rope.amplitude)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "T *heads P"], cos: Float[Array, "T pairs"], sin: Float[Array, "T pairs"], *, interleaved: bool
) -> Float[Array, "T *heads P"]:
    """Each pair of ``x`` turned by its angle, stored where it was. Computed in float32.

    Args:
        x: [T, ..., P].
        cos: float32[T, P/2], of :func:`cos_sin`.
        sin: float32[T, P/2].
        interleaved: pairs are (2i, 2i+1), else (i, i + P/2).

    Returns:
        [T, ..., P], in x's type.

    Example:
        >>> import functools, jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> quarter_turn = jnp.zeros((1, 2)), jnp.ones((1, 2))
        >>> turn = jax.jit(layers.rotate, static_argnames="interleaved")
        >>> turn(jnp.array([[1.0, 2.0, 3.0, 4.0]]), *quarter_turn, interleaved=True).tolist()
        [[-2.0, 1.0, -4.0, 3.0]]
        >>> turn(jnp.array([[1.0, 2.0, 3.0, 4.0]]), *quarter_turn, interleaved=False).tolist()
        [[-3.0, -4.0, 1.0, 2.0]]
    """
    x32 = x.astype(jnp.float32)
    wide = (x.shape[0],) + (1,) * (x.ndim - 2) + (-1,)
    cos, sin = cos.reshape(wide), sin.reshape(wide)
    if interleaved:
        first, second = x32[..., 0::2], x32[..., 1::2]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    y = jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return y.astype(x.dtype)


def to_half_split(x: Float[Array, "*lead P"]) -> Float[Array, "*lead P"]:
    """Interleaved order (a0, b0, a1, b1, ...) to half-split order (a0, a1, ..., b0, b1, ...).

    Args:
        x: [..., P].

    Returns:
        [..., P], the same numbers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> jax.jit(layers.to_half_split)(jnp.array([0, 10, 1, 11])).tolist()
        [0, 1, 10, 11]
    """
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
