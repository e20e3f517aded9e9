"""The stack of layers: what is compiled once, that scanning changes no result, and that nothing is copied for it."""

import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mla_jax as mla
from checkpoints import TINY, quick_programs, random_checkpoint
from helpers import equations
from mla_jax import layers, models

generation = importlib.import_module("mla_jax.models.generate")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


# --- the plan ---------------------------------------------------------------------------------------------------------


def covered(segments: tuple[layers.Segment, ...], kinds: tuple[str, ...]) -> bool:
    """Whether the segments hold every layer once, in order, and one kind at each position."""
    first = 0
    for segment in segments:
        if segment.first != first or min(segment.period, segment.repeats) < 1:
            return False
        first += segment.period * segment.repeats
        if any(len({kinds[layer] for layer in segment.layers(position)}) != 1 for position in range(segment.period)):
            return False
    return first == len(kinds)


@pytest.mark.parametrize(
    ("kinds", "plan"),
    [
        ("", []),
        ("a", [(0, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("abcd", [(0, 4, 1)]),
        ("aaab", [(0, 1, 3), (3, 1, 1)]),
        ("abababa", [(0, 1, 1), (1, 2, 3)]),
        # GLM-5.2 begins with three dense layers, then three that share, then eighteen times one full and three that share.
        ("ddd" + "sssf" * 18 + "sss", [(0, 1, 3), (3, 1, 3), (6, 4, 18)]),
    ],
)
def test_plans(kinds, plan):
    segments = layers.plan_segments(tuple(kinds))
    assert [(s.first, s.period, s.repeats) for s in segments] == plan
    assert covered(segments, tuple(kinds))


def fewest_blocks(kinds: tuple[str, ...]) -> int:
    """By trying every way to cut off a first segment."""
    if not kinds:
        return 0
    cuts = [(p, n) for n in range(1, len(kinds) + 1) for p in range(1, n + 1) if n % p == 0 and kinds[:n] == kinds[:p] * (n // p)]
    return min(p + fewest_blocks(kinds[n:]) for p, n in cuts)


def test_plans_are_the_shortest():
    for length in range(1, 8):
        for kinds in itertools.product("ab", repeat=length):
            segments = layers.plan_segments(kinds)
            assert covered(segments, kinds)
            assert sum(segment.period for segment in segments) == fewest_blocks(kinds), kinds


# --- results ----------------------------------------------------------------------------------------------------------

DEEP = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "indexer_types": ["full", "full", *["shared", "full"] * 2],
    "n_group": 1,
    "topk_group": 1,
}
"""Every sort of segment: a run, and a period whose first layer takes the selection of the segment before."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Any:
    """The model of DEEP."""
    folder = tmp_path_factory.mktemp("deep")
    random_checkpoint(folder, np.random.default_rng(0), **DEEP)
    return models.from_pretrained(folder)


def test_the_deep_model_has_every_sort_of_segment(deep):
    assert [(s.period, s.repeats) for s in deep.layers.segments] == [(1, 2), (2, 2)]
    assert deep.spec.layer_kinds[2] == ("shared", True)


def arguments(model: models.CausalLM, num_pages: int = 3, **cache: Any) -> list[Any]:
    """A ragged batch of two sequences, longer than the selection."""
    T = 14
    made = mla.init_cache(model.cache_config(num_pages=num_pages, page_size=16, **cache))
    slots = jnp.concatenate([16 + jnp.arange(9), 32 + jnp.arange(5)]).astype(jnp.int32)
    return [jnp.arange(T, dtype=jnp.int32), made, slots, jnp.int32([[1], [2]]), jnp.int32([9, 5]), jnp.int32([0, 9, 14])]


def one_by_one(model, tokens, cache, slots, tables, lengths, cu_q_lens):
    """What a model's trace says, one block after another with parameters of its own."""
    step = layers.make_step(slots, tables, lengths, cu_q_lens, model.spec.rope)
    x, selection, traces = model.embed_tokens(tokens), None, []
    for i, block in enumerate(model.layers):
        x, cache, trace = block(x, cache, i, step, index_layer=model.spec.index_layers[i], selection=selection)
        selection = trace.selection
        traces.append(trace)
    return x, cache, tuple(traces)


@pytest.mark.slow
def test_scanning_layers_changes_nothing(deep):
    want = jax.jit(one_by_one)(deep, *arguments(deep))
    got = jax.jit(lambda model, *call: model.trace(*call))(deep, *arguments(deep))
    assert len(got[2]) == 6
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The shared layers do share, and the full ones differ.
    positions = [np.asarray(trace.selection.positions) for trace in got[2]]
    assert np.array_equal(positions[1], positions[2]) and not np.array_equal(positions[2], positions[3])
    assert np.array_equal(positions[3], positions[4])


def test_a_layer_is_taken_out_of_its_stack(deep):
    spec, blocks = deep.spec, deep.layers
    assert len(blocks) == 6
    for i in (0, 1, 2, 5):
        block = blocks[i]
        assert block.self_attn.kind == spec.attention_kinds[i] and isinstance(block.mlp, layers.MoE) == spec.moe_layers[i]
        assert block.self_attn.o_proj.weight.shape == (40, 3 * 18)
    np.testing.assert_array_equal(blocks[-1].input_layernorm.weight[...], list(blocks)[5].input_layernorm.weight[...])
    assert not np.array_equal(blocks[2].input_layernorm.weight[...], blocks[4].input_layernorm.weight[...])
    with pytest.raises(IndexError):
        blocks[6]


def test_a_layer_is_put_back_into_its_stack():
    def make(seed: int) -> Any:
        # Two segments, the second with two positions and two repetitions.
        kinds = tuple("a" + "bc" * 2)
        sizes = {0: 5, 1: 6, 2: 7, 3: 6, 4: 7}
        block: Any = lambda layer, rngs: layers.Linear(4, sizes[layer], rngs=rngs)  # noqa: E731
        return layers.LayerStack(kinds, (None,) * 5, block, rngs=nnx.Rngs(seed))

    stack, other = make(0), make(1)
    before = [np.asarray(block.weight[...]) for block in stack]
    for i in (0, 3, -1):
        stack[i] = other[i]
    for i, block in enumerate(stack):
        np.testing.assert_array_equal(block.weight[...], other[i].weight[...] if i in (0, 3, 4) else before[i])
    with pytest.raises(ValueError, match=r"layer 1: weight is \(\(6, 4\), 'float32'\) in the stack, got \(\(7, 4\), 'float32'\)"):
        stack[1] = other[2]
    np.testing.assert_array_equal(stack[1].weight[...], before[1])
    with pytest.raises(IndexError):
        stack[5] = other[0]


def test_random_layers_differ():
    stack: Any = layers.LayerStack(tuple("aab"), (None,) * 3, lambda _, rngs: layers.Linear(64, 64, rngs=rngs), rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
    weights = [np.asarray(block.weight[...]) for block in stack]
    assert all(not np.allclose(a, b) for a, b in itertools.combinations(weights, 2))
    assert np.std(weights) == pytest.approx(64**-0.5, rel=0.05)


def test_every_layer_has_its_place():
    pattern = {"num_hidden_layers": 6, "index_topk_pattern": "FFSFSF"}
    spec = models.parse_config({**TINY, "model_type": "glm_moe_dsa", **pattern})
    bodies = []

    def body(block: layers.Block, place: layers.Place, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        bodies.append(block.self_attn.kind)
        index_layer = -1 if place.index_layer is None else place.index_layer
        return count + 1, jnp.stack([jnp.asarray(n, jnp.int32) for n in (place.layer, index_layer, place.first_expert)])

    # Nothing depends on the weights, so none are made.
    count, places = jax.jit(lambda: models.CausalLM(spec, rngs=nnx.Rngs(0)).layers.scan(body, jnp.int32(0)))()
    assert int(count) == 6 and bodies == ["full", "full", "shared", "full"]
    # Eight experts a layer: those of layers 2 and 4 are in one array, and so are those of layers 3 and 5.
    assert [place.tolist() for place in places] == [[0, 0, 0], [1, 1, 0], [2, -1, 0], [3, 2, 0], [4, -1, 8], [5, 3, 8]]


# --- programs ---------------------------------------------------------------------------------------------------------


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.slow
def test_in_place_over_many_layers(deep):
    call = jax.eval_shape(lambda: arguments(deep, num_pages=3000))
    mla.assert_in_place(lambda model, *call: model(*call), deep, *call, donate_argnums=2)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_generation_is_in_place(packed):
    model = models.abstract_model({**TINY, **DEEP, "kv_lora_rank": 128})
    cache_config = model.cache_config(num_pages=1000, nsa_kv_cache_store_fp8=packed, platform="cpu")
    ids, table = jnp.zeros(2, jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    done, cache = jnp.zeros(2, bool), jax.eval_shape(lambda: mla.init_cache(cache_config))
    state = generation._Decoding(jnp.int32(1), ids, ids, done, ids, jnp.zeros((2, 8), jnp.int32), cache)
    sampler = generation._Sampler(key=None, temperature=jnp.float32(0), top_p=None, stop_ids=ids)
    compiled = generation._decode.lower(model, shapes(state), table, sampler, 5, implementation=None).compile()
    memory: Any = compiled.memory_analysis()
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= pool_bytes > 50 * 2**20
    assert memory.temp_size_in_bytes < 2**20


def scans_of(fn, *args: Any) -> list[Any]:
    """The scans over layers in the program of ``fn``: those that carry a pool."""
    traced = jax.jit(fn).trace(*args)
    found = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "scan"]
    return [eqn for eqn in found if any(v.aval.ndim == 4 and v.aval.shape[2] == 16 for v in eqn.outvars)]


def test_a_step_keeps_nothing_of_its_layers(deep):
    call = jax.eval_shape(lambda: arguments(deep))
    scans = scans_of(lambda model, *call: model(*call), shapes(deep), *call)
    # The stream, both pools, and the selection's positions and slots go round; nothing else comes out.
    assert [len(eqn.outvars) for eqn in scans] == [5, 5]
    traced = scans_of(lambda model, *call: model.trace(*call), shapes(deep), *call)
    assert all(len(eqn.outvars) > 5 for eqn in traced)


@pytest.mark.slow
def test_traces_that_go_unused_are_not_kept(deep):
    call = jax.eval_shape(lambda: arguments(deep))

    def temporaries(fn) -> int:
        compiled = jax.jit(fn, donate_argnums=2).lower(shapes(deep), *call).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    traced, plain = temporaries(lambda model, *call: model.trace(*call)[:2]), temporaries(lambda model, *call: model.stream(*call))
    assert traced == plain


def test_experts_are_not_iterated_over(deep):
    scans = scans_of(lambda model, *call: model(*call), shapes(deep), *jax.eval_shape(lambda: arguments(deep)))
    seen_by_one_layer = [aval.shape for aval in scans[1].params["jaxpr"].in_avals]
    # The up-projection is sliced, the experts of both layers are not.
    assert (3, 20, 32) in seen_by_one_layer and (2, 3, 20, 32) not in seen_by_one_layer
    assert (16, 40, 24) in seen_by_one_layer and (8, 40, 24) not in seen_by_one_layer


@pytest.mark.slow
def test_experts_are_not_copied():
    # All of a layer's experts are 12 times as large as everything else in the program.
    config = {**TINY, "model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 256, "moe_intermediate_size": 64}
    model: Any = models.abstract_model(config)
    call = jax.eval_shape(lambda: arguments(model))
    compiled = jax.jit(lambda model, *call: model(*call), donate_argnums=2).lower(model, *call).compile()
    memory: Any = compiled.memory_analysis()
    experts = model.layers.blocks[1][0].mlp.experts
    assert experts.gate_up.shape == (3, 256, 40, 128)
    of_one_layer = 256 * 40 * 128 * 4
    assert memory.temp_size_in_bytes < of_one_layer / 4
