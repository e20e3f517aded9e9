"""generate: against transformers' greedy ids, and that batching, chunks, pages and stops change nothing but what they say."""

import importlib

import jax
import numpy as np
import pytest

import mla_jax as mla
from checkpoints import quick_programs, random_checkpoint, reference
from mla_jax import models

module = importlib.import_module("mla_jax.models.generate")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A one-layer model with an indexer, quick to compile."""
    folder = tmp_path_factory.mktemp("tiny")
    changes = {"num_hidden_layers": 1, "n_group": 1, "topk_group": 1, "eos_token_id": [3, 5]}
    random_checkpoint(folder, np.random.default_rng(0), model_type="glm_moe_dsa", **changes)
    return models.from_pretrained(folder)


# That greedy ids are those of transformers is tested with the models, for every family.


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
    for i in (1, 2):
        assert models.generate(tiny, [PROMPTS[i]], max_new_tokens=10, stop_ids=()) == [continued[i]]


@pytest.mark.parametrize("options", [{"chunk_size": 7}, pytest.param({"page_size": 4, "chunk_size": 5}, marks=pytest.mark.slow)])
def test_chunks_and_pages_change_nothing(tiny, continued, options):
    assert models.generate(tiny, PROMPTS, max_new_tokens=10, stop_ids=(), **options) == continued


def prefill(model, chunk_size, prompts=PROMPTS):
    """The stream at each prompt's end, and what the cache then holds of all prompts."""
    cache = mla.init_cache(model.cache_config(num_pages=8, kv_cache_dtype="float32"))
    rows = [np.array(prompt, np.int32) for prompt in prompts]
    allocator = mla.PageAllocator(cache.config)
    pages = [allocator.allocate(len(row)) for row in rows]
    hidden, cache = module._prefill(model, cache, rows, pages, allocator.block_tables(pages), chunk_size, None)
    slots = np.concatenate([own.slots for own in pages])
    return hidden, *mla.read_kv(cache, 0, slots), mla.read_index_k(cache, 0, slots)


@pytest.mark.parametrize("chunk_size", [7, 1])
def test_chunked_prefill_equals_one_shot(tiny, chunk_size):
    for one, many in zip(prefill(tiny, None), prefill(tiny, chunk_size), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-5)


def test_logits_do_not_depend_on_companions(tiny):
    logits = jax.jit(lambda model, hidden: model.logits(hidden))
    want = logits(tiny, prefill(tiny, None)[0])
    # Prompt 3 comes first, beside others, and in pieces that end elsewhere; their shapes are those of another test's.
    got = logits(tiny, prefill(tiny, 7, [PROMPTS[3], [40, 41, 42, 43, 44], PROMPTS[1], [63]])[0])
    np.testing.assert_allclose(got[0], want[3], atol=1e-5)
    np.testing.assert_allclose(got[2], want[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa"])
def test_neither_companions_nor_chunks_nor_pages_change_a_real_model(name):
    # No choice of expert, token or id in these checkpoints is a near tie, so ids have to be equal. A shape costs seconds, so one
    # call changes several things at once; each of them alone is the tiny model's to test.
    model, arrays = reference(name)
    prompts = [arrays["input_ids"][0].tolist(), arrays["input_ids"][1, :23].tolist(), arrays["input_ids"][0, 5:18].tolist()]
    want = model.logits(prefill(model, None, prompts)[0])
    ids = models.generate(model, prompts, kv_cache_dtype="float32")
    np.testing.assert_allclose(model.logits(prefill(model, None, prompts[2:])[0])[0], want[2], atol=1e-5)
    assert models.generate(model, prompts[2:], kv_cache_dtype="float32") == ids[2:]
    np.testing.assert_allclose(model.logits(prefill(model, 7, prompts[::-1])[0]), want[::-1], atol=1e-5)
    assert models.generate(model, prompts[::-1], kv_cache_dtype="float32", chunk_size=7, page_size=4) == ids[::-1]


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


# --- top_p ------------------------------------------------------------------------------------------------------------


def nucleus(logits: np.ndarray, top_p: float) -> tuple[set[int], float]:
    """The ids that stay, and how far the nearest decision was from going the other way."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    kept, total, margin = set(), 0.0, 1.0
    for i in sorted(range(len(p)), key=lambda i: (-logits[i], i)):
        if total >= top_p and kept:
            return kept, min(margin, total - top_p)
        margin = min(margin, top_p - total) if kept else 1.0
        kept.add(i)
        total += p[i]
    return kept, margin


@pytest.mark.parametrize("vocab", [1, 2, 7, 300])
def test_nucleus_is_that_of_numpy(rng, vocab):
    cut = jax.jit(jax.vmap(module._nucleus))
    logits = (rng.normal(size=(60, vocab)) * rng.choice([0.1, 1, 5], (60, 1))).astype(np.float32)
    # Few levels: ids of equal probability, of which some stay and some go.
    logits[::3] = np.round(logits[::3])
    top_p = rng.uniform(0.01, 1, 60).astype(np.float32)
    top_p[:6] = [1e-6, 0.5, 0.25, 0.999, 1e-30, 0.75]
    kept = np.asarray(cut(logits, top_p))
    compared = 0
    for row in range(60):
        want, margin = nucleus(logits[row], float(top_p[row]))
        if margin > 1e-6:
            compared += 1
            assert set(np.flatnonzero(np.isfinite(kept[row]))) == want
        np.testing.assert_array_equal(kept[row][np.isfinite(kept[row])], logits[row][np.isfinite(kept[row])])
    assert compared > 50


def test_ties_go_to_the_smaller_id():
    # Four ids of a quarter each: what is kept depends on their number alone.
    for top_p, kept in [(1e-30, 1), (0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (0.9, 4)]:
        got = np.isfinite(module._nucleus(np.zeros(4, np.float32), np.float32(top_p)))
        assert got.tolist() == [i < kept for i in range(4)], top_p


def test_draws_stay_in_the_nucleus_and_follow_its_distribution():
    # Probabilities 0.4, 0.3, 0.2, 0.1 in a shuffled order; 0.6 keeps the first two.
    ids, p = np.array([2, 0, 3, 1]), np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.empty(4, np.float32)
    logits[ids] = np.log(p)
    sampler = module._Sampler(jax.random.key(1), np.float32(1), np.float32(0.6), np.array([-1], np.int32))
    drawn, _ = jax.jit(sampler.__call__)(np.tile(logits, (4000, 1)), np.int32(0))
    counts = np.bincount(np.asarray(drawn), minlength=4) / 4000
    assert counts[3] == counts[1] == 0
    np.testing.assert_allclose(counts[[2, 0]], [4 / 7, 3 / 7], atol=0.03)


@pytest.mark.slow
def test_top_p_of_a_whole_generation(tiny, continued):
    def draw(top_p, prompts=PROMPTS, **options):
        options = {"temperature": 1.0, "key": jax.random.key(0), **options}
        return models.generate(tiny, prompts, max_new_tokens=10, stop_ids=(), top_p=top_p, **options)

    assert draw(1.0) == models.generate(tiny, PROMPTS, 10, 1.0, jax.random.key(0), ())
    assert draw(1e-6) == continued == draw(0.3, temperature=0.0)
    some = draw(0.7)
    assert some == draw(0.7) and some not in (draw(1.0), continued)
    assert some[1:3] == draw(0.7, [[40, 41, 42], *PROMPTS[1:3], PROMPTS[3][::-1]])[1:3]


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
        ([[1]], {"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
        ([[1]], {"top_p": 1.5}, ValueError, r"top_p .* got 1\.5"),
        ([[1]], {"top_p": float("nan")}, ValueError, "top_p"),
        *(
            ([[1]], {"page_size": size}, ValueError, f"generate: page_size must be .* got {size!r}")
            for size in (0, 3, -4, True, "4")
        ),
        # Nothing to do is no reason to overlook a mistake.
        ([], {"page_size": 3}, ValueError, "power of two"),
        ([], {"implementation": "triton"}, ValueError, "generate: implementation must be None or one of"),
        ([], {"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype must be one of"),
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
