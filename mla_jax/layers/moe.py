"""MoE: routed experts, computed group by group over sorted tokens, beside shared experts that see every token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mla_jax.layers.linear import matmul_precision, normal_init
from mla_jax.layers.mlp import MLP
from mla_jax.layers.router import Router, RoutingSpec


class Experts(nnx.Module):
    """E SwiGLU blocks in two stacked arrays, ``gate_up`` [E, D, 2M] (gate first) and ``down`` [E, M, D].

    Rows are sorted by expert and padded to tiles of one expert each; a loop over the tiles multiplies each by its expert's
    weights. Cost follows the rows that exist and experts without rows are hardly read. ``jax.lax.ragged_dot`` states the same
    product but lowers to a dense one with E times the work and memory on CPUs and, by default, on GPUs (jax 0.10 to 0.12).

    The arrays may hold several layers' experts in a row (:class:`mla_jax.layers.LayerStack`); a call says where its own begin.

    Args:
        num_experts: E.
        hidden_size: D.
        intermediate_size: M.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> experts = nnx.eval_shape(lambda: layers.Experts(8, 4, 16, rngs=nnx.Rngs(0)))
        >>> experts.gate_up.shape, experts.down.shape
        ((8, 4, 32), (8, 16, 4))
        >>> ids = jnp.array([[0, 7], [3, 0], [1, 2]])
        >>> jax.eval_shape(lambda experts: experts(jnp.ones((3, 4)), ids), experts).shape
        (3, 2, 4)
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_experts = num_experts
        self.gate_up = normal_init(rngs, (num_experts, hidden_size, 2 * intermediate_size), hidden_size, dtype)
        self.down = normal_init(rngs, (num_experts, intermediate_size, hidden_size), intermediate_size, dtype)

    def __call__(
        self, x: Float[Array, "T D"], ids: Int32[Array, "T k"], first_expert: int | Int32[Array, ""] = 0
    ) -> Float[Array, "T k D"]:
        """The output of each chosen expert for each token, unweighted.

        Args:
            x: [T, D].
            ids: int32[T, k], the experts of each token, in [0, E).
            first_expert: expert i is at ``first_expert + i`` of the arrays.

        Returns:
            [T, k, D], in x's type.
        """
        num_experts = self.num_experts
        (num_tokens, topk), width = ids.shape, x.shape[1]
        num_rows = num_tokens * topk
        tile = _tile_size(num_rows, num_experts)
        places, tile_experts = sort_into_tiles(ids.reshape(-1), num_experts, tile)
        rows = jnp.repeat(x, topk, axis=0)
        tiles = jnp.zeros((tile_experts.shape[0] * tile, width), x.dtype).at[places].set(rows, unique_indices=True)
        gate_up, down = self.gate_up[...], self.down[...]
        precision = matmul_precision(x.dtype)

        def multiply(operands: tuple[Float[Array, "tile D"], Int32[Array, ""]]) -> Float[Array, "tile D"]:
            rows, expert = operands
            hidden = jnp.matmul(rows, gate_up[expert].astype(rows.dtype), precision=precision)
            gate, up = jnp.split(hidden, 2, axis=-1)
            return jnp.matmul(jax.nn.silu(gate) * up, down[expert].astype(rows.dtype), precision=precision)

        out = jax.lax.map(multiply, (tiles.reshape(-1, tile, width), first_expert + tile_experts))
        return out.reshape(-1, width)[places].reshape(num_tokens, topk, width)


def _tile_size(num_rows: int, num_experts: int) -> int:
    """Rows a tile: the power of two near an expert's even share, so that padding stays below the rows themselves."""
    share = -(-num_rows // num_experts)
    return min(max(1 << (share - 1).bit_length(), 8), 128)


def sort_into_tiles(experts: Int32[Array, "N"], num_experts: int, tile: int) -> tuple[Int32[Array, "N"], Int32[Array, "tiles"]]:
    """Places for N rows such that each run of ``tile`` places holds rows of one expert.

    Args:
        experts: int32[N], the expert of each row.
        num_experts: E.
        tile: rows a tile.

    Returns:
        The place of each row, distinct, and the expert of each tile. Their number is the most that N rows can need.
    """
    num_rows = experts.shape[0]
    sizes = jnp.sum(experts[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    tiles = -(-sizes // tile)
    tiles_end = jnp.cumsum(tiles)
    order = jnp.argsort(experts, stable=True)
    sorted_experts = experts[order]
    rank = jnp.arange(num_rows, dtype=jnp.int32) - (jnp.cumsum(sizes) - sizes)[sorted_experts]
    sorted_places = (tiles_end - tiles)[sorted_experts] * tile + rank
    places = jnp.zeros((num_rows,), jnp.int32).at[order].set(sorted_places, unique_indices=True)
    # Sum of ceil(size / tile) <= floor(N / tile) + experts with rows.
    num_tiles = num_rows // tile + min(num_experts, num_rows)
    before = tiles_end <= jnp.arange(num_tiles, dtype=jnp.int32)[:, None]
    return places, jnp.minimum(jnp.sum(before, axis=1, dtype=jnp.int32), num_experts - 1)


class MoE(nnx.Module):
    """Sum over chosen experts of weight * expert(x), plus the shared experts' output, which has no weight.

    Args:
        hidden_size: D.
        intermediate_size: M of one expert.
        num_shared: shared experts, stored as one MLP of width ``num_shared * M``; 0: none.
        routing: the rule of the router.
        dtype: type of the initial weights.
        rngs: source of the initial weights.

    DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from mla_jax import layers
        >>> routing = layers.RoutingSpec(num_experts=8, topk=2, scoring="sigmoid")
        >>> layer = nnx.eval_shape(lambda: layers.MoE(4, 16, num_shared=1, routing=routing, rngs=nnx.Rngs(0)))
        >>> layer.experts.down.shape, layer.shared_experts.down_proj.weight.shape
        ((8, 16, 4), (4, 16))
        >>> jax.eval_shape(lambda layer: layer(jnp.ones((3, 4))), layer).shape
        (3, 4)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_shared: int,
        routing: RoutingSpec,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_experts = routing.num_experts
        self.gate = Router(hidden_size, routing, dtype=dtype, rngs=rngs)
        self.experts = Experts(routing.num_experts, hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.shared_experts = MLP(hidden_size, num_shared * intermediate_size, dtype=dtype, rngs=rngs) if num_shared else None

    def __call__(self, x: Float[Array, "T D"], first_expert: int | Int32[Array, ""] = 0) -> Float[Array, "T D"]:
        """The output for each token.

        Args:
            x: [T, D].
            first_expert: where its experts begin, as in :class:`Experts`.

        Returns:
            [T, D], in x's type; the weighted sum is float32.
        """
        ids, weights = self.gate(x)
        chosen = self.experts(x, ids, first_expert)
        routed = jnp.sum(chosen.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
