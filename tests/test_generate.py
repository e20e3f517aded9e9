"""generate: against transformers' greedy ids, and that batching, chunks, pages and stops change nothing but what they say."""

import importlib

import jax
import numpy as np
import pytest

import mla_jax as mla
from checkpoints import random_checkpoint, reference
from mla_jax import models

module = importlib.import_module("mla_jax.models.generate")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A one-layer model with an indexer, quick to compile."""
    folder = tmp_path_factory.mktemp("tiny")
    changes = {"num_hidden_layers": 1, "n_group": 1, "topk_group": 1, "eos_token_id": [3, 5]}
    random_checkpoint(folder, np.random.default_rng(0), model_type="glm_moe_dsa", **changes)
    return models.from_pretrained(folder)


def test_greedy_ids_equal_transformers():
    model, arrays = reference("glm_moe_dsa")
    ids = models.generate(model, arrays["input_ids"].tolist(), kv_cache_dtype="float32")
    assert ids == arrays["gen_ids"].tolist()


@pytest.mark.slow
def test_greedy_ids_equal_transformers_on_the_smooth_model():
    model, arrays = reference("smooth_glm_moe_dsa")
    ids = models.generate(model, arrays["input_ids"].tolist(), kv_cache_dtype="float32", page_size=16, chunk_size=24)
    assert ids == arrays["gen_ids"].tolist()


PROMPTS = [[1, 2, 3], list(range(20)), [7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


@pytest.fixture(scope="module")
def continued(tiny):
    """Ten greedy ids after each of PROMPTS."""
    return models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=())


def test_greedy_ids_are_those_of_forward(tiny, continued):
    row = PROMPTS[3] + continued[3]
    logits = models.forward(tiny, np.array([row]))
    np.testing.assert_array_equal(np.argmax(logits[0, len(PROMPTS[3]) - 1 : -1], -1), continued[3])


def test_companions_change_nothing(tiny, continued):
    # Rows 0 and 2 become other prompts, and all change places.
    ids = models.generate(tiny, [PROMPTS[3], [40, 41, 42], PROMPTS[1], [63]], max_new_tokens=10, stop_ids=())
    assert (ids[0], ids[2]) == (continued[3], continued[1])
    assert ids[1] != continued[0]


@pytest.mark.slow
def test_a_row_alone_is_as_in_company(tiny, continued):
    for prompt, want in zip(PROMPTS, continued, strict=True):
        assert models.generate(tiny, [prompt], max_new_tokens=10, stop_ids=()) == [want]


@pytest.mark.parametrize("options", [{"chunk_size": 7}, pytest.param({"page_size": 4, "chunk_size": 5}, marks=pytest.mark.slow)])
def test_chunks_and_pages_change_nothing(tiny, continued, options):
    assert models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=(), **options) == continued


def prefill(model, chunk_size):
    """The stream at each prompt's end, and what the cache then holds of all prompts."""
    cache = mla.init_cache(model.cache_config(num_pages=8))
    rows = [np.array(prompt, np.int32) for prompt in PROMPTS]
    allocator = mla.PageAllocator(cache.config)
    pages = [allocator.allocate(len(row)) for row in rows]
    hidden, cache = module._prefill(model, cache, rows, pages, allocator.block_tables(pages), chunk_size, None)
    slots = np.concatenate([own.slots for own in pages])
    return hidden, *mla.read_kv(cache, 0, slots), mla.read_index_k(cache, 0, slots)


@pytest.mark.parametrize("chunk_size", [7, 1])
def test_chunked_prefill_equals_one_shot(tiny, chunk_size):
    for one, many in zip(prefill(tiny, None), prefill(tiny, chunk_size), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-5)


def test_a_stop_id_ends_its_row_and_is_returned(tiny, continued):
    stop = continued[1][4]
    want = [row[: row.index(stop) + 1] if stop in row else row for row in continued]
    assert any(len(row) < 10 for row in want)
    assert models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=[stop, 999]) == want


def test_stop_ids_default_to_the_configs(tiny, continued):
    def cut(row):
        stops = [i for i, token in enumerate(row) if token in (3, 5)]
        return row[: stops[0] + 1] if stops else row

    assert models.generate(tiny, PROMPTS, max_new_tokens=10) == [cut(row) for row in continued]


def test_on_tokens_sees_every_step(tiny, continued):
    stop = continued[1][4]
    seen = []
    ids = models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=[stop], on_tokens=lambda step, new: seen.append((step, new)))
    assert [step for step, _ in seen] == list(range(len(seen)))
    for i, row in enumerate(ids):
        assert [new[i] for _, new in seen if new[i] is not None] == row


def test_the_loop_stops_when_all_rows_have(tiny, continued):
    steps = []
    first = [row[0] for row in continued]
    models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=first, on_tokens=lambda step, new: steps.append(new))
    assert steps == [first]


def test_sampling_follows_its_key(tiny, continued):
    def draw(seed, prompts=PROMPTS, temperature=1.0):
        return models.generate(tiny, prompts, max_new_tokens=10, temperature=temperature, key=jax.random.key(seed), stop_ids=())

    first = draw(0)
    assert first == draw(0) != draw(1)
    assert first[1:3] == draw(0, [[40, 41, 42], *PROMPTS[1:3], PROMPTS[3][::-1]])[1:3]
    assert draw(0, temperature=1e-6) == continued


def test_calls_of_one_size_compile_once(tiny, continued):
    traces = [f._cache_size() for f in (module._prefill_window, module._begin, module._decode)]
    shuffled = [prompt[::-1] for prompt in PROMPTS]
    models.generate(tiny, shuffled, max_new_tokens=9, stop_ids=())
    assert [f._cache_size() for f in (module._prefill_window, module._begin, module._decode)] == traces


def test_few_sizes_little_waste():
    sizes = [module._round_up(n, 8) for n in range(1, 5000)]
    assert all(n <= size <= max(n * 9 / 8, n + 7) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 80


def test_nothing_to_do(tiny):
    assert models.generate(tiny, []) == []
    assert models.generate(tiny, [[1], [2]], max_new_tokens=0) == [[], []]


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[1], []], {}, ValueError, r"prompts\[1\] is empty"),
        ([[1, 64]], {}, ValueError, "got 64"),
        ([[-1]], {}, ValueError, "got -1"),
        ([1, 2], {}, TypeError, "lists of ids"),
        ([[1.5]], {}, TypeError, "integers"),
        ([[1]], {"max_new_tokens": -1}, ValueError, "max_new_tokens"),
        ([[1]], {"temperature": 0.5}, ValueError, "needs key"),
        ([[1]], {"temperature": -1.0}, ValueError, "temperature"),
        ([[1]], {"chunk_size": 0}, ValueError, "chunk_size"),
    ],
)
def test_wrong_requests_are_refused(tiny, prompts, options, error, message):
    with pytest.raises(error, match=message):
        models.generate(tiny, prompts, **options)


@pytest.mark.slow
def test_the_demo_model_does_not_repeat_itself():
    model = models.from_pretrained(models.demo_checkpoint())
    (ids,) = models.generate(model, [list(b"The paged cache ")], max_new_tokens=48, kv_cache_dtype="fp8_e4m3")
    assert len(ids) == 48 and len(set(ids[-32:])) > 8
    assert sum(32 <= i < 127 for i in ids) > 40
