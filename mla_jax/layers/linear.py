"""Linear: a matrix product over PyTorch's [out, in] weights, with the one precision rule of all layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def matmul_precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """HIGHEST for float32, where the default would round operands to bfloat16 or TF32 on accelerators; else the default."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def normal_init(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """A parameter of variance 1 / ``fan_in``."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(fan_in**-0.5, dtype))


def matmul(
    x: Float[Array, "*lead i"], weight: Float[Array, "o i"], out_dtype: jax.typing.DTypeLike | None = None
) -> Float[Array, "*lead o"]:
    """x W^T in x's type, accumulated and returned in ``out_dtype`` where given (float32 logits of a bfloat16 model)."""
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=None if out_dtype is None else jnp.dtype(out_dtype),
    )


class Linear(nnx.Module):
    """y = x W^T + b, computed in x's type; weights of another type are cast at use.

    Args:
        in_features: width of x.
        out_features: width of y.
        bias: whether there is a b.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> layer = nnx.eval_shape(lambda: layers.Linear(3, 2, bias=True, rngs=nnx.Rngs(0)))
        >>> layer.weight.shape
        (2, 3)
        >>> layer.weight, layer.bias = nnx.Param(jnp.ones((2, 3))), nnx.Param(jnp.array([0.0, 1.0]))
        >>> layer(jnp.array([1.0, 2.0, 3.0])).tolist()
        [6.0, 7.0]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.weight = normal_init(rngs, (out_features, in_features), in_features, dtype)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*lead i"]) -> Float[Array, "*lead o"]:
        """The product.

        Args:
            x: [..., in_features].

        Returns:
            [..., out_features], in x's type.
        """
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)
