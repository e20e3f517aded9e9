"""MLP: the SwiGLU feed-forward block of a dense layer, and of shared experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.layers.linear import Linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        hidden_size: D, width of x and of the result.
        intermediate_size: width between.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> layer = nnx.eval_shape(lambda: layers.MLP(4, 8, rngs=nnx.Rngs(0)))
        >>> layer.gate_proj.weight.shape, jax.eval_shape(lambda layer: layer(jnp.ones((3, 4))), layer).shape
        ((8, 4), (3, 4))
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, dtype: jax.typing.DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The output for each token.

        Args:
            x: [T, D].

        Returns:
            [T, D], in x's type.
        """
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
