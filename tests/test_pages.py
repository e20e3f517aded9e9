"""PageAllocator: what it hands out, what it refuses, and that a refusal changes nothing."""

import copy

import numpy as np
import pytest

import mla_jax as mla
from helpers import config


def allocator(num_pages: int = 8, page_size: int = 4) -> mla.PageAllocator:
    return mla.PageAllocator(config("raw_e4m3fn", num_pages=num_pages, page_size=page_size))


def slots_of(pages: np.ndarray, n_tokens: int, page_size: int = 4) -> list[int]:
    return [int(pages[i // page_size]) * page_size + i % page_size for i in range(n_tokens)]


def test_allocation_is_pages_and_slots():
    a = allocator().allocate(6)
    pages, slots = a
    assert pages is a.pages and slots is a.slots
    assert pages.dtype == slots.dtype == np.int32 and pages.shape == (2,) and slots.shape == (6,)
    assert slots.tolist() == slots_of(pages, 6)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_every_page_but_the_null_page_is_handed_out_once(page_size):
    pages = allocator(page_size=page_size)
    assert pages.num_free_pages == 7
    held = [pages.allocate(page_size) for _ in range(7)]
    assert pages.num_free_pages == 0
    assert sorted(int(a.pages[0]) for a in held) == list(range(1, 8))
    with pytest.raises(mla.OutOfPagesError):
        pages.allocate(1)


@pytest.mark.parametrize(("old", "new"), [(6, 1), (6, 2), (6, 3), (4, 1), (3, 14), (0, 5), (6, 0), (0, 0)])
def test_extend_fills_the_last_page_first(old, new):
    pages = allocator()
    other = pages.allocate(1)
    before = pages.allocate(old)
    pages.allocate(1)
    after = pages.extend(before, new)
    assert after.slots.tolist() == slots_of(after.pages, old + new)
    np.testing.assert_array_equal(after.slots[:old], before.slots)
    np.testing.assert_array_equal(after.pages[: len(before.pages)], before.pages)
    assert len(after.pages) == -(-(old + new) // 4)
    assert int(other.pages[0]) not in after.pages
    assert pages.num_free_pages == 7 - 2 - len(after.pages)


def test_free_pages_are_handed_out_again():
    pages = allocator()
    a, b = pages.allocate(8), pages.allocate(12)
    pages.free(a)
    assert pages.num_free_pages == 4
    again = pages.allocate(16)
    assert set(a.pages.tolist()) < set(again.pages.tolist()) and not set(again.pages.tolist()) & set(b.pages.tolist())


def test_nothing_takes_no_page():
    pages = allocator()
    empty = pages.allocate(0)
    assert empty.pages.shape == empty.slots.shape == (0,) and empty.pages.dtype == empty.slots.dtype == np.int32
    pages.free(empty)
    assert pages.num_free_pages == 7
    assert pages.allocate(28).pages.size == 7
    assert pages.allocate(0).slots.size == 0


def test_block_tables():
    pages = allocator()
    a, b, c = pages.allocate(9), pages.allocate(0), pages.allocate(4)
    tables = pages.block_tables([a, b, c])
    assert tables.dtype == np.int32 and tables.shape == (3, 3)
    assert tables.tolist() == [a.pages.tolist(), [0, 0, 0], [int(c.pages[0]), 0, 0]]
    wide = pages.block_tables([c, a], num_columns=5)
    assert wide.shape == (2, 5) and not wide[0, 1:].any() and not wide[1, 3:].any()
    assert pages.block_tables([]).shape == (0, 0) and pages.block_tables([], num_columns=2).shape == (0, 2)
    with pytest.raises(ValueError, match=r"num_columns must be at least 3, .*got 2"):
        pages.block_tables([c, a], num_columns=2)


# ---- refusals change nothing -----------------------------------------------------------------------------------------


def test_too_few_pages_changes_nothing():
    pages = allocator()
    held = pages.allocate(20)
    for ask in (lambda: pages.allocate(9), lambda: pages.extend(held, 9)):
        with pytest.raises(mla.OutOfPagesError, match=r"need 3 more pages of 4 tokens, 2 are free of 7"):
            ask()
        assert pages.num_free_pages == 2
    assert issubclass(mla.OutOfPagesError, RuntimeError)
    grown = pages.extend(held, 8)  # still good
    pages.free(grown)
    assert pages.num_free_pages == 7


def test_an_allocation_is_used_once():
    pages = allocator()
    freed, extended = pages.allocate(3), pages.allocate(3)
    pages.free(freed)
    grown = pages.extend(extended, 1)
    for stale in (freed, extended):
        for use in (pages.free, lambda a: pages.extend(a, 1), lambda a: pages.extend(a, 0), lambda a: pages.block_tables([a])):
            with pytest.raises(ValueError, match="is not held"):
                use(stale)
    assert pages.num_free_pages == 6
    pages.free(grown)
    assert pages.num_free_pages == 7


def test_a_stale_allocation_does_not_free_its_successor():
    # The same pages and as many tokens, but another allocation.
    pages = allocator()
    first = pages.allocate(3)
    pages.free(first)
    second = pages.allocate(3)
    assert second.pages.tolist() == first.pages.tolist()
    with pytest.raises(ValueError, match="is not held"):
        pages.free(first)
    pages.free(second)
    assert pages.num_free_pages == 7


def test_allocations_of_others_are_refused():
    pages, other = allocator(), allocator()
    pages.allocate(3)
    theirs = other.allocate(3)
    with pytest.raises(ValueError, match="is not held"):
        pages.free(theirs)
    with pytest.raises(ValueError, match="expected an Allocation"):
        pages.free(np.zeros((1, 2), np.int32))
    assert pages.num_free_pages == other.num_free_pages == 6


def test_allocations_cannot_be_changed():
    a = allocator().allocate(3)
    for array in a:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_copies_know_their_own_allocations():
    pages = allocator()
    held = pages.allocate(3)
    pages_copy, held_copy = copy.deepcopy((pages, held))
    pages_copy.free(held_copy)
    assert (pages_copy.num_free_pages, pages.num_free_pages) == (7, 6)
    pages.free(held)


@pytest.mark.parametrize("wrong", [-1, 1.0, "3", None, True])
def test_counts_are_whole_numbers(wrong):
    pages = allocator()
    held = pages.allocate(1)
    for ask in (pages.allocate, lambda n: pages.extend(held, n)):
        with pytest.raises(ValueError, match="n_tokens must be an int >= 0"):
            ask(wrong)
    assert pages.num_free_pages == 6
    pages.free(held)


def test_config_is_required():
    with pytest.raises(TypeError, match="CacheConfig"):
        mla.PageAllocator(8)  # pyright: ignore[reportArgumentType]


def test_a_random_history_keeps_pages_apart(rng):
    pages = allocator(num_pages=20, page_size=4)
    held: list[mla.Allocation] = []
    for _ in range(400):
        free = pages.num_free_pages
        action = rng.integers(3) if held else 0
        n = int(rng.integers(0, 12))
        try:
            if action == 0:
                held.append(pages.allocate(n))
            else:
                a = held.pop(int(rng.integers(len(held))))
                if action == 1:
                    pages.free(a)
                else:
                    held.append(a)
                    held[-1] = pages.extend(a, n)
        except mla.OutOfPagesError:
            assert pages.num_free_pages == free
        ids = [int(page) for a in held for page in a.pages]
        assert len(set(ids)) == len(ids) and 0 not in ids
        assert len(ids) + pages.num_free_pages == 19
        for a in held:
            assert a.slots.tolist() == slots_of(a.pages, len(a.slots))


def test_the_pages_alone_stand_for_their_allocation():
    pages = allocator()
    own, slots = pages.allocate(3)
    grown = pages.extend(own, 2)
    assert grown.slots[:3].tolist() == slots.tolist()
    pages.free(grown.pages.tolist())
    with pytest.raises(ValueError, match="is not held"):
        pages.free(grown.pages)
