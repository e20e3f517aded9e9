"""Bytes: where each field of a row and of an index page lies, what they cost, and which write path follows."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config
from mla_jax.layout import CacheLayout, IndexLayout

DIMS = [(512, 64), (256, 32), (512, 0), (256, 0), (384, 64), (1024, 64)]
ODD_DIMS = [(33, 7), (32, 2), (1, 0), (510, 65), (255, 1)]


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def layouts_of(R: int, P: int):
    for name, fields in LAYOUTS.items():
        if R % 128 == 0 or not name.startswith("packed"):
            yield config(name, R=R, P=P).layout, fields


@pytest.mark.parametrize(("R", "P"), DIMS + ODD_DIMS)
def test_fields_are_contiguous_and_cover_the_row(R, P):
    for layout, _ in layouts_of(R, P):
        starts = [field.start for field in layout.byte_map]
        stops = [field.stop for field in layout.byte_map]
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == layout.row_bytes
        assert all(start < stop for start, stop in zip(starts, stops, strict=True))
        numbers = {field.name: (field.stop - field.start) // itemsize(field.dtype) for field in layout.byte_map}
        assert numbers["latent"] == R
        assert numbers.get("rope", 0) == P
        assert numbers.get("scales", 0) == (R // 128 if layout.is_packed else 0)


@pytest.mark.parametrize(
    ("layout", "R", "P", "row_bytes"),
    [
        ("raw_e4m3fn", 512, 64, 576),
        ("raw_e4m3fnuz", 512, 64, 576),
        ("raw_e5m2", 512, 64, 576),
        ("packed_pow2", 512, 64, 656),
        ("packed_fp32", 512, 64, 656),
        ("raw_e4m3fn", 256, 32, 288),
        ("packed_pow2", 256, 32, 328),
        ("raw_e4m3fn", 512, 0, 512),
        ("packed_pow2", 512, 0, 528),
        ("packed_pow2", 256, 0, 264),
        ("plain_bfloat16", 512, 64, 1152),
        ("plain_float16", 512, 64, 1152),
        ("plain_float32", 512, 64, 2304),
    ],
)
def test_row_takes_the_published_number_of_bytes(layout, R, P, row_bytes):
    assert config(layout, R=R, P=P).layout.row_bytes == row_bytes


def test_packed_row_has_the_interchange_byte_map():
    # SGLang, vLLM (fp8_ds_mla) and FlashMLA agree on these offsets; a reader elsewhere depends on them.
    fields = [(f.name, f.start, f.stop, f.dtype) for f in config("packed_pow2").layout.byte_map]
    assert fields == [
        ("latent", 0, 512, "float8_e4m3fn"),
        ("scales", 512, 528, "float32"),
        ("rope", 528, 656, "bfloat16"),
    ]


def test_row_without_rope_has_no_rope_field():
    for layout, _ in layouts_of(512, 0):
        assert "rope" not in [field.name for field in layout.byte_map]


@pytest.mark.parametrize(
    ("layout", "name", "dialect", "path"),
    [
        ("plain_float32", "plain_float32", None, mla.WritePath.PLAIN),
        ("plain_bfloat16", "plain_bfloat16", None, mla.WritePath.PLAIN),
        ("plain_float16", "plain_float16", None, mla.WritePath.PLAIN),
        ("raw_e4m3fn", "raw_e4m3fn", "e4m3fn", mla.WritePath.RAW_FUSED),
        ("raw_e4m3fnuz", "raw_e4m3fnuz", "e4m3fnuz", mla.WritePath.RAW_FUSED),
        ("raw_e5m2", "raw_e5m2", "e5m2", mla.WritePath.RAW_FUSED),
        ("packed_pow2", "packed", "e4m3fn", mla.WritePath.SCALED),
        ("packed_fp32", "packed", "e4m3fn", mla.WritePath.SCALED),
    ],
)
def test_layout_is_named_and_tagged(layout, name, dialect, path):
    got = config(layout).layout
    assert (got.name, got.dialect, got.write_path) == (name, dialect, path)
    assert [got.is_plain, got.is_raw, got.is_packed].count(True) == 1


def test_layouts_of_equal_width_differ():
    # 576 bytes are three encodings and 1152 bytes two: the width alone identifies nothing.
    all_layouts = [config(name).layout for name in LAYOUTS]
    for one, other in itertools.combinations(all_layouts, 2):
        assert one != other
    assert len(set(all_layouts)) == len(LAYOUTS)


def test_equal_layouts_hash_equal():
    for name in LAYOUTS:
        assert config(name).layout == config(name).layout
        assert hash(config(name).layout) == hash(config(name).layout)
    for name in INDEX_LAYOUTS:
        one, other = (config(name, head_dim=128).index_layout for _ in range(2))
        assert one == other
        assert hash(one) == hash(other)


@pytest.mark.parametrize(("R", "P"), DIMS + ODD_DIMS)
def test_word_never_straddles_two_fields(R, P):
    for layout, _ in layouts_of(R, P):
        size = layout.word_dtype.itemsize
        assert all(field.start % size == 0 and field.stop % size == 0 for field in layout.byte_map)
        assert layout.row_words * size == layout.row_bytes


@pytest.mark.parametrize(("R", "P"), DIMS)
def test_pool_of_a_released_model_is_never_one_of_bytes(R, P):
    # Pools of single bytes between 2 and 4 GiB are addressed wrongly by Pallas' Triton lowering.
    for layout, _ in layouts_of(R, P):
        assert layout.word_dtype.itemsize >= 2


@pytest.mark.parametrize(
    ("R", "P", "word"), [(512, 64, 4), (512, 2, 2), (510, 0, 2), (510, 65, 1), (33, 7, 1), (255, 1, 1), (1, 0, 1)]
)
def test_raw_word_is_the_widest_that_fits(R, P, word):
    assert config("raw_e4m3fn", R=R, P=P).layout.word_dtype.itemsize == word


def test_plain_word_is_as_wide_as_the_number():
    for name, word in (("float32", np.uint32), ("bfloat16", np.uint16), ("float16", np.uint16)):
        layout = config(f"plain_{name}").layout
        assert layout.word_dtype == word
        assert layout.number_dtype == getattr(ml_dtypes, name, name)
    with pytest.raises(ValueError, match="hold codes, not numbers"):
        _ = config("raw_e4m3fn").layout.number_dtype


def test_every_pool_is_of_unsigned_words():
    # XLA on a CPU scatters bfloat16 through a float32 copy of the whole pool, and FP8 pools are worse.
    for name in [*LAYOUTS, *INDEX_LAYOUTS]:
        got = config(name, head_dim=128)
        assert got.index_layout is not None
        assert np.issubdtype(got.layout.word_dtype, np.unsignedinteger)
        assert np.issubdtype(got.index_layout.word_dtype, np.unsignedinteger)


def test_packed_rows_need_whole_groups():
    with pytest.raises(ValueError, match=r"multiple of 128.*got 320"):
        CacheLayout(name="packed", kv_lora_rank=320, qk_rope_head_dim=64, scale_mode="pow2")


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "fp8"},
        {"name": "raw_e4m3"},
        {"kv_lora_rank": 0},
        {"qk_rope_head_dim": -1},
        {"scale_mode": "pow2"},
        {"name": "packed"},
        {"name": "packed", "scale_mode": "e8m0"},
    ],
)
def test_impossible_layout_is_refused(fields):
    with pytest.raises(ValueError):
        CacheLayout(**{"name": "raw_e4m3fn", "kv_lora_rank": 512, "qk_rope_head_dim": 64, **fields})


# ---- index pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "token_bytes"), [(32, 36), (64, 68), (96, 100), (128, 132), (192, 200), (256, 264), (130, 138)]
)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_index_token_costs_its_keys_and_one_scale_for_128_channels(head_dim, token_bytes, page_size):
    layout = config("index_e4m3fn_pow2", head_dim=head_dim, page_size=page_size).index_layout
    assert layout is not None
    assert (layout.token_bytes, layout.page_bytes) == (token_bytes, token_bytes * page_size)
    keys, scales = layout.byte_map
    assert (keys.name, keys.start, keys.stop) == ("keys", 0, page_size * head_dim)
    assert (scales.name, scales.start, scales.stop) == ("scales", keys.stop, layout.page_bytes)
    assert layout.page_shape == (layout.page_bytes // layout.word_dtype.itemsize,)


def test_index_page_of_64_tokens_is_8448_bytes():
    layout = config("index_e4m3fn_pow2", head_dim=128, page_size=64).index_layout
    assert layout is not None
    assert layout.page_bytes == 8448
    assert layout.byte_map[1].start == 8192


@pytest.mark.parametrize(
    ("name", "dialect", "mode"),
    [
        ("index_float32", None, None),
        ("index_e4m3fn_pow2", "e4m3fn", "pow2"),
        ("index_e4m3fn_fp32", "e4m3fn", "fp32"),
        ("index_e4m3fnuz_pow2", "e4m3fnuz", "pow2"),
        ("index_e4m3fnuz_fp32", "e4m3fnuz", "fp32"),
    ],
)
def test_index_keys_are_in_the_platforms_dialect(name, dialect, mode):
    layout = config(name, head_dim=128).index_layout
    assert layout is not None
    assert (layout.dialect, layout.scale_mode) == (dialect, mode)


def test_float32_cache_keeps_float32_keys():
    layout = config("index_float32", head_dim=96, page_size=16).index_layout
    assert layout is not None
    assert (layout.word_dtype, layout.page_shape, layout.token_bytes) == (np.uint32, (16, 96), 384)
    assert [(field.name, field.dtype) for field in layout.byte_map] == [("keys", "float32")]


@pytest.mark.parametrize("latent", [name for name in LAYOUTS if name != "plain_float32"])
def test_every_other_cache_keeps_fp8_keys(latent):
    cache_config = config(latent, head_dim=128)
    assert cache_config.index_layout is not None
    assert cache_config.index_layout.dialect == ("e4m3fnuz" if cache_config.platform == "gfx942" else "e4m3fn")


@pytest.mark.parametrize("head_dim", [1, 3, 7, 32, 66, 96, 128, 130, 192])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_index_word_never_straddles_two_keys(head_dim, page_size):
    layout = IndexLayout(head_dim=head_dim, page_size=page_size, dialect="e4m3fn", scale_mode="pow2")
    size = layout.word_dtype.itemsize
    assert head_dim % size == 0
    assert all(field.start % size == 0 and field.stop % size == 0 for field in layout.byte_map)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "head_dim must be >= 1 and page_size a power of two, got 0 and 16"),
        ({"page_size": 3}, "got 128 and 3"),
        ({"page_size": 0}, "got 128 and 0"),
        ({"dialect": "e4m3"}, "dialect must be one of .* got 'e4m3'"),
        ({"scale_mode": "amax"}, "scale_mode must be one of .* got 'amax'"),
    ],
)
def test_impossible_index_pages_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        IndexLayout(**{"head_dim": 128, "page_size": 16, "dialect": "e4m3fn", "scale_mode": "pow2", **changes})


def test_index_dialect_and_scale_mode_go_together():
    with pytest.raises(ValueError, match="go together"):
        IndexLayout(head_dim=128, page_size=16, dialect="e4m3fn", scale_mode=None)
