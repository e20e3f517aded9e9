"""The Pallas attention kernels on random geometry, batches and splits; and the faults that the check of that has to reject."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax as mla
from batches import (
    LAYER,
    Batch,
    batch,
    decode_oracle,
    interpreted,
    listed,
    poisons,
    prefill_oracle,
    queries,
    relative_error,
    sparse_oracle,
    sums,
    tolerances,
)
from helpers import LAYOUTS, config, oracle_values

decode, prefill, sparse = interpreted(mla.mla_decode), interpreted(mla.mla_prefill), interpreted(mla.sparse_mla)

FEW = hypothesis.settings(max_examples=6)
MANY = hypothesis.settings(max_examples=16)


def agrees(got: Any, want: tuple[np.ndarray, np.ndarray], layout: str, dtype: Any) -> bool:
    """The check: output and lse within the tolerances of the layout."""
    return all(relative_error(a, b) <= bound for a, b, bound in zip(got, want, tolerances(layout, dtype), strict=True))


@dataclasses.dataclass(frozen=True)
class Example:
    """A call, in numbers.

    Attributes:
        op: "decode", "prefill" or "sparse".
        layout: name of the layout.
        R: latent rank.
        P: rope dims.
        page_size: tokens a page.
        lengths: of the sequences.
        new: new tokens of each sequence; a decode takes the largest for all.
        heads: of a token.
        num_splits: of a decode.
        wide: float32 queries.
        seed: of everything else: numbers, the order of pages, junk in unused table columns.
    """

    op: str
    layout: str
    R: int
    P: int
    page_size: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    heads: int
    num_splits: int | None
    wide: bool
    seed: int


@st.composite
def examples(draw: st.DrawFn) -> Example:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    lengths = tuple(draw(st.lists(st.integers(0, 100), min_size=1, max_size=4)))
    return Example(
        op=draw(st.sampled_from(["decode", "prefill", "sparse"])),
        layout=layout,
        R=draw(st.sampled_from([128, 256] if layout.startswith("packed") else [16, 32, 36, 128, 200])),
        P=draw(st.sampled_from([0, 2, 16, 32] if layout.startswith("packed") else [0, 4, 12, 16, 32])),
        page_size=draw(st.sampled_from([1, 2, 4, 16, 32, 64])),
        lengths=lengths,
        new=tuple(draw(st.integers(0, min(length, 12))) for length in lengths),
        heads=draw(st.sampled_from([1, 2, 3, 5, 8, 17, 20])),
        num_splits=draw(st.sampled_from([None, 1, 2, 5, 50])),
        wide=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def is_right(example: Example) -> bool:
    """Whether the kernel gives what the oracle does, with poison in whatever is not seen."""
    rng = np.random.default_rng(example.seed)
    case = batch(rng, example.layout, example.lengths, page_size=example.page_size, R=example.R, P=example.P)
    dtype = np.float32 if example.wide else jnp.bfloat16
    cache = case.cache(poisons(example.layout)[-1])

    def ask(*lead: int) -> tuple[Any, Any]:
        return queries(rng, *lead, example.heads, R=example.R, P=example.P, dtype=dtype)

    if example.op == "decode":
        q = ask(len(example.lengths), max(1, min(max(example.new), 8)))
        got = decode(*q, cache, LAYER, case.tables, case.lengths, num_splits=example.num_splits, out_dtype="float32")
        want = decode_oracle(case, q)
    elif example.op == "prefill":
        cu = sums(example.new)
        q = ask(int(cu[-1]) + 2)
        got, want = prefill(*q, cache, LAYER, case.tables, case.lengths, cu, out_dtype="float32"), prefill_oracle(case, q, cu)
    else:
        slots = listed(rng, case, 3, 23) if case.used.any() else np.full((3, 23), -1, np.int32)
        q = ask(3)
        got, want = sparse(*q, cache, LAYER, slots, out_dtype="float32"), sparse_oracle(case, q, slots)
    return agrees(got, want, example.layout, dtype)


@FEW
@hypothesis.given(examples())
def test_kernels_agree_with_the_oracle(example):
    assert is_right(example)


@pytest.mark.slow
@MANY
@hypothesis.given(examples())
def test_kernels_agree_with_the_oracle_at_length(example):
    assert is_right(example)


# ---- what the check is worth -------------------------------------------------------------------------------------------
#
# A fault is put into what the kernel is given or what the oracle is asked; the check has to notice, for any numbers.

LENGTHS = [17, 40, 64]
Fault = Callable[[np.random.Generator, Batch], tuple[Any, Batch]]
"""From a batch: the cache and the batch of tables and lengths that the kernel gets."""


def scale_dropped(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """The scales of packed rows read as 1."""
    rows = case.rows.copy()
    rows[:, 128:132] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    return dataclasses.replace(case, rows=rows).cache(0xFF), case


def length_one_short(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """The newest token is not seen."""
    return case.cache(0xFF), dataclasses.replace(case, lengths=case.lengths - 1)


def length_one_more(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """One key too many is seen: a row of zeros, the mildest there is."""
    return case.cache(0), dataclasses.replace(case, lengths=case.lengths + 1)


def mask_missing(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """Whatever the last page holds is seen."""
    return case.cache(poisons("fnuz")[0]), dataclasses.replace(case, lengths=-(-case.lengths // 16) * 16)


def mask_missing_over_zeros(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """Likewise, on a pool without poison."""
    return case.cache(0), dataclasses.replace(case, lengths=-(-case.lengths // 16) * 16)


def other_dialect(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """The codes of one dialect read as those of the other."""
    layout = "raw_e4m3fn" if case.config.layout.dialect == "e4m3fnuz" else "raw_e4m3fnuz"
    other = config(layout, R=128, P=16, num_pages=case.config.num_pages)
    return dataclasses.replace(case.cache(0), config=other), case


def pages_swapped(rng: np.random.Generator, case: Batch) -> tuple[Any, Batch]:
    """Two sequences with each other's first page."""
    tables = case.tables.copy()
    tables[[0, 1], 0] = tables[[1, 0], 0]
    return case.cache(0xFF), dataclasses.replace(case, tables=tables)


FAULTS: list[tuple[Fault, str]] = [
    (scale_dropped, "packed_pow2"),
    (length_one_short, "raw_e4m3fn"),
    (length_one_more, "raw_e4m3fn"),
    (mask_missing, "raw_e4m3fnuz"),
    (mask_missing_over_zeros, "raw_e4m3fn"),
    (other_dialect, "raw_e4m3fn"),
    (other_dialect, "raw_e4m3fnuz"),
    (pages_swapped, "raw_e4m3fn"),
]


@pytest.mark.parametrize(("fault", "layout"), FAULTS, ids=[f"{fault.__name__}-{layout}" for fault, layout in FAULTS])
def test_the_check_rejects(fault, layout, rng):
    for _ in range(2):
        case = batch(rng, layout, LENGTHS)
        q = queries(rng, 3, 1, 5, dtype=jnp.bfloat16)
        want = decode_oracle(case, q)

        def run(cache: Any, asked: Batch, q: Any = q) -> Any:
            return decode(*q, cache, LAYER, asked.tables, asked.lengths, num_splits=2, out_dtype="float32")

        assert agrees(run(case.cache(0xFF if layout != "raw_e4m3fnuz" else 0x80), case), want, layout, jnp.bfloat16)
        assert not agrees(run(*fault(rng, case)), want, layout, jnp.bfloat16), f"{fault.__name__} goes unnoticed"


def test_a_dropped_scale_is_wrong_for_the_oracle_too(rng):
    # The control of the control: rows without their scales are other numbers, not the same ones in another form.
    case = batch(rng, "packed_pow2", LENGTHS)
    rows = case.rows.copy()
    rows[:, 128:132] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    a, b = (oracle_values(case.config.layout, r)[0][case.used] for r in (case.rows, rows))
    assert relative_error(a, b) > 0.5
