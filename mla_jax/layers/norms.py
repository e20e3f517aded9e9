"""RMSNorm and LayerNorm: statistics in float32, the weight applied in the type of x."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """weight * x / sqrt(mean(x^2) + eps); the quotient is rounded to x's type before the weight (transformers' order).

    Args:
        features: width of x.
        eps: added to the mean square.
        dtype: type of the initial weight, which is all ones.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> norm = layers.RMSNorm(4, eps=0.0)
        >>> jax.jit(lambda x: norm(x))(jnp.array([1.0, -1.0, 1.0, 1.0])).tolist()  # its mean square is 1
        [1.0, -1.0, 1.0, 1.0]
    """

    def __init__(self, features: int, *, eps: float, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        """The normalised vectors.

        Args:
            x: [..., features].

        Returns:
            [..., features], in x's type.
        """
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(x.dtype) * (x32 * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """weight * (x - mean) / sqrt(var + eps) + bias, all in float32, rounded once at the end.

    Args:
        features: width of x.
        eps: added to the variance.
        dtype: type of the initial weight (ones) and bias (zeros).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mla_jax import layers
        >>> norm = layers.LayerNorm(2, eps=0.0)
        >>> jax.jit(lambda x: norm(x))(jnp.array([4.0, 6.0])).tolist()  # mean 5, variance 1
        [-1.0, 1.0]
    """

    def __init__(self, features: int, *, eps: float, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        """The normalised vectors.

        Args:
            x: [..., features].

        Returns:
            [..., features], in x's type.
        """
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        y = centred * scale * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
