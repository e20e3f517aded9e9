"""Attention, the indexer and their glue, in float64 over dequantised pools."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mla_jax.reference.stored import read_rows

Array = NDArray[Any]
Ints = ArrayLike  # of whole numbers
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]


def expand_rows(block_tables: Ints, lengths: Ints, cu_q_lens: Ints, T: int) -> tuple[Int32, Int32]:
    """Per sequence to per token: tables int [S, M] -> [T, M], and how many keys each token sees, [T].

    New token j of n sees max(length - n + j + 1, 0) keys; the page size, which bounds that above, is not known here.
    Rows past cu_q_lens[-1] see 0 and get a table of null pages. lengths is int [S], cu_q_lens int [S + 1].
    """
    block_tables, lengths, cu = np.asarray(block_tables), np.asarray(lengths), np.asarray(cu_q_lens)
    rows, visible = np.zeros((T, block_tables.shape[1]), np.int32), np.zeros(T, np.int32)
    for s in range(len(lengths)):
        first, end = int(cu[s]), int(cu[s + 1])
        n = end - first
        for t in range(first, min(end, T)):
            rows[t] = block_tables[s]
            visible[t] = max(int(lengths[s]) - n + (t - first) + 1, 0)
    return rows, visible


def visible_keys(lengths: Ints, cu_q_lens: Ints, T: int, M: int, page_size: int) -> Int32:
    """How many keys each token sees, [T]: clip(length - n + j + 1, 0, M * page_size), 0 past cu_q_lens[-1]."""
    tables = np.zeros((len(np.asarray(lengths)), M), np.int32)
    return np.minimum(expand_rows(tables, lengths, cu_q_lens, T)[1], M * page_size)


def _visible_slots(pool: Array, block_tables: Ints, lengths: Ints, cu: Ints, T: int) -> list[list[tuple[int, int]]]:
    """For each token the (position, slot) pairs that it sees of pool [pages, page_size, .]; bad pages are left out."""
    pages, page_size = pool.shape[:2]
    tables, _ = expand_rows(block_tables, lengths, cu, T)
    visible = visible_keys(lengths, cu, T, tables.shape[1], page_size)
    seen: list[list[tuple[int, int]]] = [[] for _ in range(T)]
    for t in range(T):
        for p in range(visible[t]):
            page = int(tables[t, p // page_size])
            if 0 < page < pages:
                seen[t].append((p, page * page_size + p % page_size))
    return seen


def _with_sinks(out: Float64, lse: Float64, sinks: Array | None) -> Float64:
    """out [*, H, R] * exp(lse) / (exp(lse) + exp(sinks)), with lse [*, H] and sinks [H]; empty rows stay 0."""
    if sinks is None:
        return out
    share = 1 / (1 + np.exp(np.asarray(sinks, np.float64) - lse))
    return np.where(np.isneginf(lse)[..., None], 0.0, out * share[..., None])  # -inf against -inf has no share


@np.errstate(all="ignore")
def attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope: Array,
    valid: Array,
    softmax_scale: float,
    k_scale: float = 1.0,
    sinks: Array | None = None,
) -> tuple[Float64, Float64]:
    """Softmax attention over latent keys whose latent part is the value, too.

    Invalid keys are dropped and may hold anything; a NaN in a valid key reaches the token's output.

    Args:
        q_latent: [T, H, R], any float type, like the next three.
        q_rope: [T, H, P].
        latent: [T, K, R] or what broadcasts to it.
        rope: [T, K, P] or what broadcasts to it.
        valid: bool [T, K].
        softmax_scale: factor of the logits.
        k_scale: what the keys were divided by when written: a factor of logits and output.
        sinks: [H], logits without a value, which enter the denominator; None for none.

    Returns:
        out [T, H, R] and lse [T, H], natural log, without sinks; 0 and -inf for a token with no valid key.
    """
    T, H, R = q_latent.shape
    latent = np.broadcast_to(latent, (T, valid.shape[1], R))
    rope = np.broadcast_to(rope, (T, valid.shape[1], q_rope.shape[2]))
    out, lse = np.zeros((T, H, R)), np.full((T, H), -np.inf)
    for t in range(T):
        if not valid[t].any():
            continue
        keys, rope_keys = latent[t][valid[t]].astype(np.float64), rope[t][valid[t]].astype(np.float64)
        logits = q_latent[t].astype(np.float64) @ keys.T + q_rope[t].astype(np.float64) @ rope_keys.T
        logits *= float(softmax_scale) * float(k_scale)
        largest = np.max(logits, axis=1, keepdims=True)
        weights = np.exp(logits - largest)
        total = np.sum(weights, axis=1, keepdims=True)
        out[t] = weights @ keys / total * float(k_scale)
        lse[t] = (largest + np.log(total))[:, 0]
    return _with_sinks(out, lse, sinks), lse


def sparse(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope: Array,
    topk_slots: Ints,
    topk_lengths: Ints | None,
    softmax_scale: float,
    k_scale: float = 1.0,
    sinks: Array | None = None,
) -> tuple[Float64, Float64]:
    """``attention`` of each token over the slots listed for it, of pools [num_pages, page_size, R] and [., ., P].

    topk_slots int [T, K] are valid iff 0 < id < capacity, and one listed twice counts twice; lanes from topk_lengths
    (int [T], or None) on are ignored. The other arguments and what is returned are those of ``attention``.
    """
    ids = np.asarray(topk_slots, np.int64)
    T, K = ids.shape
    lanes = np.full(T, K) if topk_lengths is None else np.asarray(topk_lengths)
    valid = (ids > 0) & (ids < latent.shape[0] * latent.shape[1]) & (np.arange(K) < lanes[:, None])
    out, lse = np.zeros(q_latent.shape), np.full(q_latent.shape[:2], -np.inf)
    for t in range(T):  # one token at a time, so that the gathered keys stay small
        row = slice(t, t + 1)
        keys = read_rows(latent, ids[t]), read_rows(rope, ids[t])
        out[row], lse[row] = attention(q_latent[row], q_rope[row], *keys, valid[row], softmax_scale, k_scale, sinks)
    return out, lse


def dense(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope: Array,
    block_tables: Ints,
    lengths: Ints,
    cu_q_lens: Ints,
    softmax_scale: float,
    k_scale: float = 1.0,
    sinks: Array | None = None,
) -> tuple[Float64, Float64]:
    """``attention`` of ragged new tokens, causal, over the pages of their sequences (``mla_prefill``).

    Pools [num_pages, page_size, R] and [., ., P], block_tables int [S, M] (keys on pages <= 0 or >= num_pages are
    invisible), lengths int [S] with the new tokens, cu_q_lens int [S + 1]; otherwise as in ``attention``.
    """
    T = len(q_latent)
    seen = _visible_slots(latent, block_tables, lengths, cu_q_lens, T)
    ids = np.full((T, max([len(pairs) for pairs in seen], default=0)), -1)
    for t, pairs in enumerate(seen):
        ids[t, : len(pairs)] = [slot for _, slot in pairs]
    return sparse(q_latent, q_rope, latent, rope, ids, None, softmax_scale, k_scale, sinks)


def decode(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    rope: Array,
    block_tables: Ints,
    lengths: Ints,
    softmax_scale: float,
    k_scale: float = 1.0,
    sinks: Array | None = None,
) -> tuple[Float64, Float64]:
    """``dense`` of Q new tokens a sequence (``mla_decode``): q [S, Q, H, .] -> out [S, Q, H, R], lse [S, Q, H]."""
    S, Q, H, R = q_latent.shape
    flat = q_latent.reshape(S * Q, H, R), q_rope.reshape(S * Q, H, q_rope.shape[3])
    cu_q_lens = np.arange(S + 1) * Q
    out, lse = dense(*flat, latent, rope, block_tables, lengths, cu_q_lens, softmax_scale, k_scale, sinks)
    return out.reshape(S, Q, H, R), lse.reshape(S, Q, H)


@np.errstate(all="ignore")
def merge_lse(outs: ArrayLike, lses: ArrayLike, sinks: Array | None = None) -> tuple[Float64, Float64]:
    """One attention from N over disjoint keys, outs [N, *, H, R] and lses [N, *, H]: sum out e^lse / sum e^lse.

    A part with lse -inf is empty and its out may hold anything. sinks [H] enter once, here, if no part has them.

    Returns:
        out [*, H, R] and lse [*, H] without sinks; 0 and -inf where every part is empty.
    """
    lses = np.asarray(lses, np.float64)
    outs = np.where(np.isneginf(lses)[..., None], 0.0, np.asarray(outs, np.float64))
    largest = np.max(lses, axis=0)
    largest = np.where(np.isneginf(largest), 0.0, largest)  # -inf minus -inf would be NaN
    weights = np.exp(lses - largest)
    total = np.sum(weights, axis=0)
    out = np.sum(outs * weights[..., None], axis=0) / np.where(total == 0, 1.0, total)[..., None]
    lse = largest + np.log(total)
    return _with_sinks(out, lse, sinks), lse


@np.errstate(all="ignore")
def indexer_logits(
    q_index: Array,
    head_weights: Array,
    keys: Array,
    block_tables: Ints,
    lengths: Ints,
    cu_q_lens: Ints,
) -> Float64:
    """Logits [T, M * page_size], column p for position p: sum_h w_h relu(q_h . k) of visible keys, -inf elsewhere.

    q_index [T, h, d], head_weights [T, h] with all constants in them, keys [num_pages, page_size, d] dequantised; the
    rest as in ``dense``.
    """
    page_size = keys.shape[1]
    logits = np.full((len(q_index), np.shape(block_tables)[1] * page_size), -np.inf)
    for t, pairs in enumerate(_visible_slots(keys, block_tables, lengths, cu_q_lens, len(q_index))):
        for p, slot in pairs:
            key = keys[slot // page_size, slot % page_size].astype(np.float64)
            scores = np.maximum(q_index[t].astype(np.float64) @ key, 0.0)  # lets NaN through
            logits[t, p] = head_weights[t].astype(np.float64) @ scores
    return logits


def select_topk(logits: ArrayLike, visible_lengths: Ints, k: int) -> Int32:
    """Positions [T, k] of the k largest logits [T, C] of each row, ascending, then -1.

    Only positions below visible_lengths (int [T], clipped to [0, C]) count, and of those none at -inf. NaN stands above
    +inf, -0 equals +0, and ties go to the smaller position.
    """
    logits = np.asarray(logits)
    selected = np.full((len(logits), k), -1, np.int32)
    for t, visible in enumerate(np.asarray(visible_lengths)):
        row = [float(x) for x in logits[t, : max(int(visible), 0)]]
        candidates = [p for p, x in enumerate(row) if x != -np.inf]
        candidates.sort(key=lambda p, row=row: (0, 0.0, p) if np.isnan(row[p]) else (1, -row[p], p))
        best = sorted(candidates[:k])
        selected[t, : len(best)] = best
    return selected


def positions_to_slots(positions: Ints, block_tables: Ints, page_size: int, num_pages: int | None = None) -> Int32:
    """Slots [T, K] of positions int [T, K] by block_tables int [T, M]; -1 off the table and on bad pages.

    Pages <= 0 are bad, and those >= num_pages; without num_pages, those whose slots int32 cannot hold, as no cache has
    them.
    """
    positions, tables = np.asarray(positions, np.int64), np.asarray(block_tables, np.int64)
    limit = 2**31 // page_size if num_pages is None else num_pages
    slots = np.full(positions.shape, -1, np.int32)
    for t, lane in np.ndindex(*positions.shape):
        p = int(positions[t, lane])
        if 0 <= p < tables.shape[1] * page_size and 0 < tables[t, p // page_size] < limit:
            slots[t, lane] = tables[t, p // page_size] * page_size + p % page_size
    return slots
