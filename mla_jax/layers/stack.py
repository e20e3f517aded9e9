"""LayerStack: a model's blocks, stored and run such that equal ones are compiled once, however many there are."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from mla_jax.layers.block import Block
from mla_jax.layers.moe import MoE


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers whose kinds repeat: ``period`` blocks are compiled and run ``repeats`` times.

    Attributes:
        first: its first layer.
        period: layers of one repetition.
        repeats: how often they come.

    Example:
        >>> from mla_jax import layers
        >>> segment = layers.Segment(first=2, period=4, repeats=2)
        >>> [list(segment.layers(position)) for position in range(2)]
        [[2, 6], [3, 7]]
    """

    first: int
    period: int
    repeats: int

    def layers(self, position: int) -> range:
        """The layers at one place of the period, one for each repetition.

        Args:
            position: the place, in [0, period).

        Returns:
            A range of ``repeats`` layers.
        """
        return range(self.first + position, self.first + self.period * self.repeats, self.period)


@functools.cache
def plan_segments(kinds: tuple[Hashable, ...]) -> tuple[Segment, ...]:
    """The segments that cover ``kinds`` with the fewest blocks to compile, and of those with the fewest segments.

    Args:
        kinds: one entry a layer; layers of equal kind have parameters of equal shapes.

    Returns:
        The segments, first to last.

    Example:
        >>> from mla_jax import layers
        >>> layers.plan_segments(tuple("aa" + "fsss" * 2))
        (Segment(first=0, period=1, repeats=2), Segment(first=2, period=4, repeats=2))
    """
    num_layers = len(kinds)
    best: dict[int, tuple[tuple[int, int], tuple[Segment, ...]]] = {num_layers: ((0, 0), ())}
    for first in reversed(range(num_layers)):
        options = []
        for period in range(1, num_layers - first + 1):
            unit, repeats = kinds[first : first + period], 1
            while kinds[first + period * (repeats - 1) : first + period * repeats] == unit:
                (blocks, segments), rest = best[first + period * repeats]
                options.append(((blocks + period, segments + 1), (Segment(first, period, repeats), *rest)))
                repeats += 1
        best[first] = min(options, key=lambda option: option[0])
    return best[0][1]


class Place(NamedTuple):
    """Where a block stands. In a segment that repeats, all but those that are None are traced.

    Attributes:
        layer: its layer of the cache.
        index_layer: its index layer of the cache; None without an indexer of its own.
        first_expert: where its experts begin among those that it holds, see :class:`mla_jax.layers.Experts`.

    Example:
        >>> from mla_jax import layers
        >>> layers.Place(layer=3, index_layer=None, first_expert=0).layer
        3
    """

    layer: int | Int32[Array, ""]
    index_layer: int | Int32[Array, ""] | None
    first_expert: int | Int32[Array, ""]


Body = Callable[[Block, Place, Any], tuple[Any, Any]]
"""(block, where it stands, carry) -> (carry, output): one step of :meth:`LayerStack.scan`."""


class LayerStack(nnx.Module):
    """The blocks of a model. ``stack[i]`` is layer i's block; :meth:`scan` runs them all.

    Parameters are stored as ``blocks[segment][position]``, a Block whose parameters have a leading axis, one entry for each
    repetition of the segment. Layers of one segment and position are therefore one array, which nothing has to stack at run time.

    Args:
        kinds: for each layer what tells its block from others, as in :func:`plan_segments`.
        index_layers: for each layer its index layer of the cache, or None.
        make_block: (layer, rngs) -> its block; for layers of one kind the same but for the random numbers.
        rngs: source of the initial weights.

    Example:
        >>> import jax
        >>> from mla_jax import layers, models
        >>> stack = models.abstract_model(models.demo_checkpoint()).layers
        >>> isinstance(stack, layers.LayerStack), len(stack), stack.segments
        (True, 3, (Segment(first=0, period=1, repeats=1), Segment(first=1, period=1, repeats=2)))
        >>> [type(block.mlp).__name__ for block in stack], stack[1].mlp.experts.down.shape
        (['MLP', 'MoE', 'MoE'], (8, 24, 64))
        >>> model = models.from_pretrained(models.demo_checkpoint())
        >>> block = model.layers[1]
        >>> block.self_attn.o_proj.weight[...] = 0 * block.self_attn.o_proj.weight[...]
        >>> model.layers[1] = block  # without this line the model keeps its own
        >>> body = lambda block, place, carry: (carry + 1, place.layer)  # what to do with one layer's block
        >>> carry, outputs = jax.eval_shape(lambda stack: stack.scan(body, 0), stack)
        >>> len(outputs)
        3
    """

    def __init__(
        self,
        kinds: tuple[Hashable, ...],
        index_layers: Sequence[int | None],
        make_block: Callable[[int, nnx.Rngs], Block],
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.segments = plan_segments(kinds)
        self.index_layers = tuple(index_layers)

        def stacked(segment: Segment, position: int) -> Block:
            keys = jax.random.split(rngs.params(), segment.repeats)
            return jax.vmap(lambda key: make_block(segment.first + position, nnx.Rngs(key)))(keys)

        self.blocks = nnx.List(
            [nnx.List([stacked(segment, position) for position in range(segment.period)]) for segment in self.segments]
        )

    def __len__(self) -> int:
        return len(self.index_layers)

    def __getitem__(self, layer: int) -> Block:
        """The block of a layer, with parameters of its own, shapes where the stack has shapes.

        They are slices, in jit as outside: changing them does not change the stack until the block is assigned back,
        ``stack[i] = block``.

        Args:
            layer: which one; negative ones count from the end.

        Returns:
            The block.

        Raises:
            IndexError: for a layer that does not exist.
        """
        blocks, repeat = self._find(layer)
        return jax.tree.map(lambda x: _entry(x, repeat), blocks)

    def __setitem__(self, layer: int, block: Block) -> None:
        """Writes a block's parameters into the stack, as ``block = stack[i]; ...; stack[i] = block`` changes a layer.

        Args:
            layer: which one; negative ones count from the end.
            block: of the same kind, with the shapes and dtypes of ``stack[layer]``.

        Raises:
            IndexError: for a layer that does not exist.
            ValueError: for a block of another structure, shape or dtype; nothing is written.
        """
        blocks, repeat = self._find(layer)
        whole, part = (dict(nnx.to_flat_state(nnx.state(x))) for x in (blocks, block))
        expected = {path: (tuple(x.shape[1:]), str(x.dtype)) for path, x in whole.items()}
        got = {path: (tuple(x.shape), str(x.dtype)) for path, x in part.items()}
        for path in sorted(expected.keys() | got.keys(), key=str):
            if expected.get(path) != got.get(path):
                name = ".".join(map(str, path))
                raise ValueError(f"layer {layer}: {name} is {expected.get(path)} in the stack, got {got.get(path)}")
        written = [(path, x.replace(x[...].at[repeat].set(part[path][...]))) for path, x in whole.items()]
        nnx.update(blocks, nnx.from_flat_state(written))

    def _find(self, layer: int) -> tuple[Block, int]:
        """The stacked block that holds a layer, and which repetition it is."""
        layer = range(len(self))[layer]
        for segment, blocks in zip(self.segments, self.blocks, strict=True):
            repeat, position = divmod(layer - segment.first, segment.period)
            if repeat < segment.repeats:
                return blocks[position], repeat
        raise AssertionError(f"layer {layer} is in none of {self.segments}")

    def __iter__(self) -> Iterator[Block]:
        return (self[layer] for layer in range(len(self)))

    def scan(self, body: Body, carry: Any) -> tuple[Any, tuple[Any, ...]]:
        """Runs ``body`` over the layers, first to last.

        Segments that repeat are one ``jax.lax.scan``, so the carry keeps its shapes. A cache in it is updated in place.

        Args:
            body: (block, where it stands, carry) -> (carry, output).
            carry: the first one, a pytree.

        Returns:
            The last carry, and each layer's output.
        """
        outputs: list[Any] = [None] * len(self)
        for segment, blocks in zip(self.segments, self.blocks, strict=True):
            carry, outs = self._scan_segment(segment, blocks, body, carry)
            for position, of_position in enumerate(outs):
                for layer, out in zip(segment.layers(position), of_position, strict=True):
                    outputs[layer] = out
        return carry, tuple(outputs)

    def _scan_segment(self, segment: Segment, blocks: Sequence[Block], body: Body, carry: Any) -> tuple[Any, list[list[Any]]]:
        """:meth:`scan` of one segment; outputs by position and repetition."""
        graphdefs, experts, rests = zip(*(_split_experts(block) for block in blocks), strict=True)

        def repetition(carry: Any, inputs: tuple[int | Array, Any]) -> tuple[Any, list[Any]]:
            repeat, rests = inputs
            outs = []
            for position in range(segment.period):
                block = nnx.merge(graphdefs[position], experts[position], rests[position])
                carry, out = body(block, self._place(segment, position, repeat, block), carry)
                outs.append(out)
            return carry, outs

        if segment.repeats == 1:
            carry, outs = repetition(carry, (0, jax.tree.map(lambda x: x[0], rests)))
            return carry, [[out] for out in outs]
        carry, outs = jax.lax.scan(repetition, carry, (jnp.arange(segment.repeats, dtype=jnp.int32), rests))
        return carry, [[jax.tree.map(lambda y, i=i: y[i], out) for i in range(segment.repeats)] for out in outs]

    def _place(self, segment: Segment, position: int, repeat: int | Array, block: Block) -> Place:
        first = segment.first + position
        index_layer = self.index_layers[first]
        if index_layer is not None:
            own = self.index_layers[segment.first : segment.first + segment.period]
            index_layer = index_layer + repeat * sum(i is not None for i in own)
        num_experts = block.mlp.num_experts if isinstance(block.mlp, MoE) else 0
        return Place(first + repeat * segment.period, index_layer, repeat * num_experts)


def _entry(x: Any, i: int) -> Any:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[i]


def _split_experts(block: Block) -> tuple[Any, Any, Any]:
    """A stacked block as graph, experts of all repetitions in a row, and the other parameters.

    A scan slices what it iterates over: for the experts that would copy all of a layer's to use a few. They stay whole, and each
    layer knows where its own begin.
    """
    graphdef, experts, rest = nnx.split(block, nnx.PathContains("experts"), ...)
    return graphdef, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), experts), rest
