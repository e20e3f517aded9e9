"""generate: continue prompts, greedily or by sampling. Pages are handed out up front; the decode loop runs inside one jit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from mla_jax import Allocation, PageAllocator, checks
from mla_jax.cache import PagedMLACache, init_cache
from mla_jax.devices import Platform
from mla_jax.dispatch import check_implementation
from mla_jax.layout import ScaleMode
from mla_jax.models.forward import check_ids
from mla_jax.models.model import CausalLM

OnTokens = Callable[[int, list[int | None]], None]
"""Called with the step and, for each row, its new id, or None once the row has ended."""


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 16,
    temperature: float = 0.0,
    key: jax.Array | None = None,
    stop_ids: Sequence[int] | None = None,
    kv_cache_dtype: Any = "auto",
    page_size: int = 64,
    *,
    top_p: float = 1.0,
    chunk_size: int | None = None,
    on_tokens: OnTokens | None = None,
    platform: Platform | None = None,
    scale_mode: ScaleMode = "pow2",
    nsa_kv_cache_store_fp8: bool = False,
    implementation: str | None = None,
) -> list[list[int]]:
    """New ids for each prompt.

    Prompts of any lengths are filled in together, ragged, without padding one to another. Shapes are rounded up to few sizes, so
    that calls of similar size share their compiled programs.

    Args:
        model: the model.
        prompts: ids of each prompt, none empty.
        max_new_tokens: ids a row at most.
        temperature: 0: the likeliest id; above, a draw from p = softmax(logits / temperature), which needs ``key``.
        key: of the draws. Row i's depend on the key, i and its own logits alone.
        stop_ids: ids that end a row; None: eos_token_id of config.json; (): none.
        kv_cache_dtype: as in :meth:`CausalLM.cache_config`, as are page_size, platform, scale_mode, nsa_kv_cache_store_fp8.
        page_size: tokens a page.
        top_p: draws are from the fewest likeliest ids whose p sum up to this much, of equal ones the smaller first; 1: from all.
        chunk_size: tokens of a prefill call, all prompts together; None: all at once.
        on_tokens: called after each step, from Python; the loop then returns to the host after every step.
        platform: whose FP8 dialect the cache stores.
        scale_mode: of packed rows and FP8 index keys.
        nsa_kv_cache_store_fp8: packed rows.
        implementation: "xla" or "pallas", for every operation on the cache; None: the best that can.

    Returns:
        For each prompt its new ids, the stop id that ended it included.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a negative max_new_tokens or temperature, a temperature above
            0 without a key, a top_p outside (0, 1], a chunk_size below 1, a page_size that is no power of two, an unknown
            implementation.
        TypeError: for prompts that are no lists of integers.

    Example:
        >>> import json, jax, jax.numpy as jnp
        >>> from mla_jax import models
        >>> config = json.loads((models.demo_checkpoint() / "config.json").read_text())
        >>> spec = models.parse_config({**config, "model_type": "deepseek_v3", "num_hidden_layers": 1})  # one dense layer
        >>> zeros = lambda parameter: jnp.zeros(parameter.shape, parameter.dtype)
        >>> model = jax.tree.map(zeros, models.abstract_model(spec))  # from_pretrained loads a real one
        >>> models.generate(model, [[72, 105], [72]], max_new_tokens=2, page_size=4, platform="cpu")  # a tie: the smaller id
        [[0, 0], [0, 0]]
    """
    rows = _check_prompts(prompts, model.spec.vocab_size)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens must be an int >= 0, got {max_new_tokens!r}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature must be finite and >= 0, got {temperature!r}")
    if temperature > 0 and key is None:
        raise ValueError(f"generate: temperature={temperature!r} draws at random and needs key=jax.random.key(...)")
    page_size = checks.page_size("generate", page_size)
    check_implementation("generate", implementation)
    if not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must be above 0 and at most 1, got {top_p!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"generate: chunk_size must be None or >= 1, got {chunk_size!r}")
    # The last id is returned but never fed back, so it takes no place in the cache.
    sizes = [len(row) + max_new_tokens - 1 for row in rows]
    config = model.cache_config(
        num_pages=_round_up(1 + sum(-(-size // page_size) for size in sizes), 8),
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        platform=platform,
        scale_mode=scale_mode,
        nsa_kv_cache_store_fp8=nsa_kv_cache_store_fp8,
    )
    if not rows or max_new_tokens == 0:
        return [[] for _ in rows]
    allocator = PageAllocator(config)
    pages = [allocator.allocate(size) for size in sizes]
    tables = allocator.block_tables(pages, _round_up(max(len(own.pages) for own in pages), 1))
    hidden, cache = _prefill(model, init_cache(config), rows, pages, tables, chunk_size, implementation)
    sampler = _Sampler(
        key=key if temperature > 0 else None,
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=None if temperature == 0 or top_p == 1 else jnp.asarray(top_p, jnp.float32),
        stop_ids=_stop_array(model.spec.eos_ids if stop_ids is None else tuple(stop_ids)),
    )
    state = _begin(model, hidden, np.array([len(row) for row in rows], np.int32), sampler, cache, _round_up(max_new_tokens, 8))
    block_tables = jnp.asarray(tables)
    if on_tokens is None:
        state = _decode(model, state, block_tables, sampler, max_new_tokens, implementation=implementation)
    else:
        ended = np.zeros(len(rows), bool)
        for step in range(max_new_tokens):
            if step:
                state = _decode(model, state, block_tables, sampler, step + 1, implementation=implementation)
            new = np.asarray(state.out[:, step])
            on_tokens(step, [None if end else int(i) for i, end in zip(new, ended, strict=True)])
            ended = np.asarray(state.done)
            if ended.all():
                break
    out, counts = np.asarray(state.out), np.asarray(state.counts)
    return [row[:count].tolist() for row, count in zip(out, counts, strict=True)]


class _Sampler(NamedTuple):
    """How the next id is chosen (key None: the likeliest; top_p None: among all), and which ids end a row."""

    key: jax.Array | None
    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None
    stop_ids: Int32[Array, "stops"]

    def __call__(self, logits: Float[Array, "S V"], step: Int32[Array, ""]) -> tuple[Int32[Array, "S"], Bool[Array, "S"]]:
        """The next id of each row, and whether it ends the row."""
        if self.key is None:
            ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            key, top_p = self.key, self.top_p

            def draw(row: Int32[Array, ""], row_logits: Float[Array, "V"]) -> Int32[Array, ""]:
                if top_p is not None:
                    row_logits = _nucleus(row_logits, top_p)
                return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row), step), row_logits)

            ids = jax.vmap(draw)(jnp.arange(logits.shape[0]), logits / self.temperature).astype(jnp.int32)
        return ids, jnp.any(ids[:, None] == self.stop_ids, axis=-1)


def _nucleus(logits: Float[Array, "V"], top_p: Float[Array, ""]) -> Float[Array, "V"]:
    """The logits with -inf for every id before which ids of probability ``top_p`` come, likeliest first, equal ones by id."""
    order = jnp.argsort(-logits, stable=True)
    sums = jnp.cumsum(jax.nn.softmax(logits)[order])
    # The likeliest stays even where top_p rounds to 0.
    kept = jnp.concatenate([jnp.ones(1, bool), sums[:-1] < top_p])
    return jnp.where(jnp.zeros(logits.shape, bool).at[order].set(kept, unique_indices=True), logits, -jnp.inf)


class _Decoding(NamedTuple):
    """The loop's carry.

    Attributes:
        step: ids chosen so far.
        ids: the last id of each row, not yet in the cache.
        lengths: tokens of each row in the cache.
        done: rows that a stop id has ended.
        counts: ids of each row, its stop id included.
        out: int32[S, N].
        cache: the cache.
    """

    step: Int32[Array, ""]
    ids: Int32[Array, "S"]
    lengths: Int32[Array, "S"]
    done: Bool[Array, "S"]
    counts: Int32[Array, "S"]
    out: Int32[Array, "S N"]
    cache: PagedMLACache


def _prefill(
    model: CausalLM,
    cache: PagedMLACache,
    rows: list[np.ndarray],
    pages: list[Allocation],
    tables: np.ndarray,
    chunk_size: int | None,
    implementation: str | None,
) -> tuple[Float[Array, "S D"], PagedMLACache]:
    """Fills in the prompts, one window of their concatenation after another; the stream at each one's last token.

    A window may begin and end inside a prompt and may hold nothing of some: ragged calls need no more than that.
    """
    prompt_lengths = np.array([len(row) for row in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(prompt_lengths)]).astype(np.int32)
    window = chunk_size or _round_up(int(starts[-1]), 8)
    padded = -(-int(starts[-1]) // window) * window
    tokens, slots = np.zeros(padded, np.int32), np.zeros(padded, np.int32)
    tokens[: starts[-1]] = np.concatenate(rows)
    slots[: starts[-1]] = np.concatenate([own.slots[: len(row)] for row, own in zip(rows, pages, strict=True)])
    hidden = jnp.zeros((len(rows), model.spec.hidden_size), model.dtype)
    for begin in range(0, padded, window):
        end = begin + window
        hidden, cache = _prefill_window(
            model,
            cache,
            hidden,
            tokens[begin:end],
            slots[begin:end],
            tables,
            np.clip(end - starts[:-1], 0, prompt_lengths),
            np.clip(starts - begin, 0, window),
            prompt_lengths,
            implementation=implementation,
        )
    return hidden, cache


@jax.jit(donate_argnames=("cache", "hidden"), static_argnames=("implementation",))
def _prefill_window(
    model: CausalLM,
    cache: PagedMLACache,
    hidden: Array,
    tokens: Array,
    slots: Array,
    tables: Array,
    lengths: Array,
    cu_q_lens: Array,
    prompt_lengths: Array,
    *,
    implementation: str | None,
) -> tuple[Array, PagedMLACache]:
    stream, cache = model.stream(tokens, cache, slots, tables, lengths, cu_q_lens, implementation=implementation)
    ends_here = (cu_q_lens[1:] > cu_q_lens[:-1]) & (lengths == prompt_lengths)
    last = stream[jnp.maximum(cu_q_lens[1:] - 1, 0)]
    return jnp.where(ends_here[:, None], last, hidden), cache


@jax.jit(donate_argnames=("cache",), static_argnames=("width",))
def _begin(model: CausalLM, hidden: Array, lengths: Array, sampler: _Sampler, cache: PagedMLACache, width: int) -> _Decoding:
    """The carry after the first id of each row."""
    ids, done = sampler(model.logits(hidden), jnp.int32(0))
    out = jnp.zeros((hidden.shape[0], width), jnp.int32).at[:, 0].set(ids)
    return _Decoding(jnp.int32(1), ids, lengths, done, jnp.ones_like(lengths), out, cache)


@jax.jit(donate_argnames=("state",), static_argnames=("implementation",))
def _decode(
    model: CausalLM,
    state: _Decoding,
    tables: Int32[Array, "S M"],
    sampler: _Sampler,
    limit: Int32[Array, ""] | int,
    *,
    implementation: str | None,
) -> _Decoding:
    """Steps until ``limit`` ids are chosen or every row has ended. Ended rows write nothing and see nothing."""
    num_rows = tables.shape[0]
    page_size = state.cache.config.page_size
    row = jnp.arange(num_rows, dtype=jnp.int32)

    def step(state: _Decoding) -> _Decoding:
        page = jnp.clip(state.lengths // page_size, 0, tables.shape[1] - 1)
        slots = jnp.where(state.done, 0, tables[row, page] * page_size + state.lengths % page_size)
        lengths = jnp.where(state.done, state.lengths, state.lengths + 1)
        stream, cache = model.stream(
            state.ids,
            state.cache,
            slots,
            tables,
            jnp.where(state.done, 0, lengths),
            None,
            implementation=implementation,
        )
        ids, stops = sampler(model.logits(stream), state.step)
        return _Decoding(
            step=state.step + 1,
            ids=ids,
            lengths=lengths,
            done=state.done | stops,
            counts=state.counts + jnp.where(state.done, 0, 1),
            out=state.out.at[:, state.step].set(ids),
            cache=cache,
        )

    return jax.lax.while_loop(lambda state: (state.step < limit) & ~jnp.all(state.done), step, state)


def _check_prompts(prompts: Any, vocab_size: int) -> list[np.ndarray]:
    rows = []
    for i, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.ndim != 1:
            raise TypeError(f"generate: prompts must be lists of ids, one for each prompt; prompts[{i}] is {prompt!r}")
        if row.size == 0:
            raise ValueError(f"generate: prompts[{i}] is empty; a prompt needs at least one id")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"generate: prompts[{i}] must hold integers, got {row.dtype.name}")
        check_ids(f"generate: prompts[{i}]", row, vocab_size)
        rows.append(row.astype(np.int32))
    return rows


def _stop_array(ids: tuple[int, ...]) -> Int32[Array, "stops"]:
    """The ids, filled up to few sizes with one that no row ever holds."""
    return jnp.asarray(ids + (-1,) * (_round_up(max(len(ids), 1), 4) - len(ids)), jnp.int32)


def _round_up(n: int, least: int) -> int:
    """n rounded up to a multiple of an eighth of the power of two below it, ``least`` at least: few sizes, little waste."""
    step = max(least, 1 << max(n.bit_length() - 4, 0))
    return -(-n // step) * step
