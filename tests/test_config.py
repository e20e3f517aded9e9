"""CacheConfig: which layout and write path each combination resolves to, what is refused, and what is said about it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from helpers import INDEX_LAYOUTS, LAYOUTS, config, geometry
from mla_jax.kernels import backend

PLAIN, RAW_FUSED, SCALED = mla.WritePath.PLAIN, mla.WritePath.RAW_FUSED, mla.WritePath.SCALED
FN, FNUZ, E5M2, BF16, F16 = jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.bfloat16, jnp.float16


def make(**fields) -> mla.CacheConfig:
    return mla.CacheConfig(**{"geometry": mla.GEOMETRIES["glm-5"], "num_layers": 3, "num_pages": 8, "platform": "cpu", **fields})


# ---- dispatch --------------------------------------------------------------------------------------------------------

# The combinations that SGLang's writer meets, one a line: number, platform, use_nsa, pool dtype, packed flag -> path, bytes
# a row and name of the layout. SGLang chooses by platform first; here the layout alone decides, so every FP8 row without
# scales takes the fused writer, and rows 10, 14 and 18 take the scaled one.
TABLE = [
    (1, "cuda", True, FN, True, SCALED, 656, "packed"),
    (2, "cuda", True, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (3, "cuda", True, "fp8_e4m3", False, RAW_FUSED, 576, "raw_e4m3fn"),
    (4, "cuda", True, BF16, False, PLAIN, 1152, "plain_bfloat16"),
    (5, "cuda", False, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (6, "cuda", False, E5M2, False, RAW_FUSED, 576, "raw_e5m2"),
    (7, "cuda", False, BF16, False, PLAIN, 1152, "plain_bfloat16"),
    (7, "cuda", False, F16, False, PLAIN, 1152, "plain_float16"),
    (8, "gfx942", True, FNUZ, False, RAW_FUSED, 576, "raw_e4m3fnuz"),
    (9, "gfx942", True, BF16, False, PLAIN, 1152, "plain_bfloat16"),
    (10, "gfx942", True, FN, True, SCALED, 656, "packed"),
    (11, "gfx942", True, FN, False, RAW_FUSED, 576, "raw_e4m3fnuz"),
    (12, "gfx942", False, FNUZ, False, RAW_FUSED, 576, "raw_e4m3fnuz"),
    (13, "gfx950", True, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (14, "gfx950", True, FN, True, SCALED, 656, "packed"),
    (15, "gfx950", True, BF16, False, PLAIN, 1152, "plain_bfloat16"),
    (16, "gfx950", False, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (17, "cpu", False, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (17, "cpu", True, FN, False, RAW_FUSED, 576, "raw_e4m3fn"),
    (18, "cpu", True, FN, True, SCALED, 656, "packed"),
]


@pytest.mark.parametrize(
    ("platform", "use_nsa", "dtype", "packed", "path", "row_bytes", "name"),
    [row[1:] for row in TABLE],
    ids=[f"row{row[0]}-{row[7]}-nsa{int(row[2])}" for row in TABLE],
)
def test_row_of_the_dispatch_table(platform, use_nsa, dtype, packed, path, row_bytes, name):
    got = make(platform=platform, use_nsa=use_nsa, kv_cache_dtype=dtype, nsa_kv_cache_store_fp8=packed)
    assert (got.write_path, got.layout.row_bytes, got.layout.name) == (path, row_bytes, name)


def test_row_19_of_the_dispatch_table_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of.*float4_e2m1fn"):
        make(platform="cuda", kv_cache_dtype=jnp.float4_e2m1fn)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        make(platform="cuda", kv_cache_dtype="fp4_e2m1")


def test_mi300_with_fp8_and_no_scales_takes_the_fused_writer():
    # https://github.com/sgl-project/sglang/pull/22314: the fused branch was guarded by the packed flag, which is off here.
    got = make(platform="gfx942", use_nsa=True, kv_cache_dtype="fp8_e4m3", nsa_kv_cache_store_fp8=False)
    assert got.write_path is RAW_FUSED
    assert got.layout.row_bytes == 576
    assert got.layout.dialect == "e4m3fnuz"
    assert got.fp8_dtype == FNUZ


def test_packed_flag_beats_the_platform():
    # https://github.com/sgl-project/sglang/pull/31338: a HIP test before the packed test half-wrote 656-byte rows.
    for platform in ("cpu", "cuda", "gfx942", "gfx950"):
        for use_nsa in (False, True):
            got = make(platform=platform, use_nsa=use_nsa, nsa_kv_cache_store_fp8=True)
            assert (got.write_path, got.layout.row_bytes, got.layout.dialect) == (SCALED, 656, "e4m3fn")


def test_use_nsa_never_changes_the_latent_layout():
    for platform, (_, fields) in itertools.product(("cuda", "gfx942", "gfx950", "cpu"), LAYOUTS.items()):
        with_nsa, without = (make(**{**fields, "platform": platform, "use_nsa": nsa}) for nsa in (True, False))
        assert with_nsa.layout == without.layout


def expected_path(platform: str, dtype: str, packed: bool) -> tuple[str, str, str | None]:
    """(path, layout, dialect) by the contract's rule, written without the library's own tables."""
    if packed:
        return "SCALED", "packed", "e4m3fn"
    if dtype == "fp8_e5m2":
        return "RAW_FUSED", "raw_e5m2", "e5m2"
    if dtype == "fp8_e4m3":
        dialect = {"gfx942": "e4m3fnuz"}.get(platform, "e4m3fn")
        return "RAW_FUSED", f"raw_{dialect}", dialect
    return "PLAIN", "plain_" + ("bfloat16" if dtype == "auto" else dtype), None


def test_every_combination_resolves_by_the_rule():
    dtypes = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
    seen = set()
    for platform, use_nsa, dtype, packed, mode in itertools.product(
        ("cpu", "cuda", "gfx942", "gfx950"), (False, True), dtypes, (False, True), ("pow2", "fp32")
    ):
        fields = {
            "platform": platform,
            "use_nsa": use_nsa,
            "kv_cache_dtype": dtype,
            "nsa_kv_cache_store_fp8": packed,
            "scale_mode": mode,
        }
        if packed and dtype not in ("auto", "fp8_e4m3"):
            with pytest.raises(ValueError, match="nsa_kv_cache_store_fp8"):
                make(**fields)
            continue
        got = make(**fields)
        assert (got.write_path.name, got.layout.name, got.layout.dialect) == expected_path(platform, dtype, packed), fields
        assert got.fp8_dtype == (FNUZ if platform == "gfx942" else FN)
        assert (got.index_layout is not None) == use_nsa
        if packed:
            assert got.layout.scale_mode == mode
        seen.add((got.write_path.name, got.layout.name))
    assert len(seen) == 7


@pytest.mark.parametrize("name", ["glm-4.7-flash", "minicpm3-4b"])
@pytest.mark.parametrize("packed", [False, True])
def test_unusual_dimensions_have_layouts(name, packed):
    # https://github.com/vllm-project/vllm/issues/35577 (nope 192); rank 256 with rope 32.
    widths = {"glm-4.7-flash": (576, 656), "minicpm3-4b": (288, 328)}
    got = make(geometry=mla.GEOMETRIES[name], kv_cache_dtype="fp8_e4m3", nsa_kv_cache_store_fp8=packed)
    assert got.layout.row_bytes == widths[name][packed]


def test_auto_is_bfloat16_or_packed_fp8():
    assert make().kv_cache_dtype == "bfloat16"
    assert make(nsa_kv_cache_store_fp8=True).kv_cache_dtype == "fp8_e4m3"


# ---- equality and hashing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spellings",
    [
        ("auto", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        ("float32", np.float32, jnp.float32, np.dtype("f4")),
        ("float16", np.float16, jnp.float16),
        ("fp8_e4m3", FN, FNUZ, jnp.dtype(FN), "float8_e4m3fn"),
        ("fp8_e5m2", E5M2, jnp.dtype(E5M2)),
    ],
    ids=lambda s: str(s[1]),
)
def test_spellings_of_a_dtype_give_equal_configs(spellings):
    # jnp.bfloat16 and jnp.dtype("bfloat16") are equal and hash differently; a config must not inherit that.
    configs = [make(kv_cache_dtype=spelling) for spelling in spellings]
    assert all(other == configs[0] for other in configs)
    assert len({hash(other) for other in configs}) == 1


def test_what_is_resolved_compares_equal_to_what_is_said():
    assert make(use_nsa=True) == make(use_nsa=True, num_index_layers=3)
    assert make(platform=None) == make(platform="cpu")
    assert make(num_pages=np.int64(8)) == make(num_pages=8)
    assert hash(make(num_pages=np.int64(8))) == hash(make(num_pages=8))
    assert make(use_nsa=np.bool_(True)) == make(use_nsa=True)
    assert make(platform="gfx942") != make(platform="gfx950")


def test_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().num_pages = 9  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        mla.CacheConfig(geometry(), 2, 4)  # pyright: ignore[reportCallIssue]


def test_replace_of_a_resolved_config_resolves_again():
    got = dataclasses.replace(make(kv_cache_dtype="fp8_e4m3"), platform="gfx942")
    assert got.layout.name == "raw_e4m3fnuz"


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nsa_kv_cache_store_fp8": True, "kv_cache_dtype": "bfloat16"}, "nsa_kv_cache_store_fp8"),
        ({"nsa_kv_cache_store_fp8": True, "kv_cache_dtype": "float32"}, "nsa_kv_cache_store_fp8"),
        ({"nsa_kv_cache_store_fp8": True, "kv_cache_dtype": "fp8_e5m2"}, "nsa_kv_cache_store_fp8"),
        ({"nsa_kv_cache_store_fp8": True, "geometry": geometry(R=320)}, "multiple of 128"),
        ({"use_nsa": True, "geometry": mla.GEOMETRIES["kimi-k2"]}, "indexer"),
        ({"page_size": 48}, "page_size.*power of two.*48"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -64}, "page_size"),
        ({"num_pages": 1}, "num_pages"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": 2**25, "page_size": 64}, r"2\^31"),
        ({"num_pages": 2**31, "page_size": 1}, r"2\^31"),
        ({"platform": "rocm"}, "platform.*gfx942.*rocm"),
        ({"platform": "tpu"}, "platform"),
        ({"platform": "gfx90a"}, "platform"),
        ({"platform": ["cpu"]}, "platform"),
        ({"kv_cache_dtype": "float64"}, "kv_cache_dtype.*float64"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": jnp.int8}, "kv_cache_dtype.*int8"),
        ({"kv_cache_dtype": jnp.float8_e4m3b11fnuz}, "kv_cache_dtype"),
        ({"kv_cache_dtype": jnp.float8_e5m2fnuz}, "kv_cache_dtype"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype"),
        ({"kv_cache_dtype": object()}, "kv_cache_dtype"),
        ({"scale_mode": "e8m0"}, "scale_mode.*e8m0"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"use_nsa": 1}, "use_nsa"),
        ({"nsa_kv_cache_store_fp8": "yes"}, "nsa_kv_cache_store_fp8"),
        ({"use_nsa": True, "num_index_layers": 0}, "num_index_layers"),
        ({"use_nsa": False, "num_index_layers": 2}, "num_index_layers"),
        ({"geometry": {"kv_lora_rank": 512}}, "geometry"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_config_without_a_layout_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_largest_pool_of_int32_slots_is_accepted():
    assert make(num_pages=2**31 - 1, page_size=1).capacity == 2**31 - 1
    assert make(num_pages=2**25 - 1, page_size=64).capacity == 2**31 - 64


# ---- the platform ----------------------------------------------------------------------------------------------------


def abstract(platform: str, kind: str) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_platform_none_is_the_device_of_the_moment(arch):
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu(arch)):
        got = make(platform=None, kv_cache_dtype="fp8_e4m3")
    assert got.platform == arch
    assert got.layout.dialect == {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}[arch]
    # Resolved once: outside the mesh it is still that chip's cache.
    assert dataclasses.replace(got, num_layers=1).platform == arch


def test_platform_none_on_nvidia_is_cuda():
    with jax.sharding.use_abstract_mesh(backend.abstract_gpu("sm_90")):
        assert make(platform=None).platform == "cuda"


@pytest.mark.parametrize(("platform", "kind"), [("rocm", "gfx90a"), ("tpu", "TPU v5e"), ("rocm", "AMD Instinct MI250X")])
def test_unknown_default_device_asks_for_the_platform(platform, kind):
    with jax.sharding.use_abstract_mesh(abstract(platform, kind)):
        with pytest.raises(ValueError, match="platform="):
            make(platform=None)
        assert make(platform="cuda").platform == "cuda"


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_bytes_per_token_counts_rows_and_index_keys_of_all_layers():
    # GLM-5, 78 layers, index keys included: raw, packed and bfloat16.
    sizes = {"raw_e4m3fn": 55_224, "packed_pow2": 61_464, "plain_bfloat16": 100_152}
    for layout, nbytes in sizes.items():
        fields = LAYOUTS[layout]
        assert make(num_layers=78, use_nsa=True, **fields).bytes_per_token == nbytes
    v32 = mla.GEOMETRIES["deepseek-v3.2"]
    got = make(geometry=v32, num_layers=61, use_nsa=True, kv_cache_dtype="fp8_e4m3")
    assert got.bytes_per_token == 43_188


def test_index_layers_may_be_fewer_than_layers():
    got = make(num_layers=78, use_nsa=True, num_index_layers=10, kv_cache_dtype="fp8_e4m3")
    assert got.bytes_per_token == 78 * 576 + 10 * 132
    assert got.index_shape is not None and got.index_shape[0] == 10


@pytest.mark.parametrize("layout", [*LAYOUTS, *INDEX_LAYOUTS])
@pytest.mark.parametrize(("R", "P", "head_dim", "page_size"), [(512, 64, 128, 64), (256, 32, 96, 1), (384, 0, 192, 2)])
def test_capacity_times_bytes_per_token_is_the_size_of_the_pools(layout, R, P, head_dim, page_size):
    got = config(layout, R=R, P=P, head_dim=head_dim, page_size=page_size, num_pages=5)
    pools = jax.eval_shape(lambda: mla.init_cache(got))
    nbytes = sum(pool.size * pool.dtype.itemsize for pool in jax.tree.leaves(pools))
    assert got.capacity == 5 * page_size
    assert got.capacity * got.bytes_per_token == nbytes


@pytest.mark.parametrize("layout", ["raw_e4m3fn", "packed_pow2", "plain_float32", "index_e4m3fn_pow2"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("nbytes", [1_000_000, 2**30, 10**10 + 7])
def test_pages_that_fit_is_maximal(layout, page_size, nbytes):
    got = config(layout, head_dim=128, page_size=page_size)
    pages = mla.pages_that_fit(got, nbytes)
    assert pages * page_size * got.bytes_per_token <= nbytes < (pages + 1) * page_size * got.bytes_per_token
    # The answer is of use as it stands, and does not depend on the pages the config happens to have.
    assert dataclasses.replace(got, num_pages=pages).capacity == pages * page_size
    assert mla.pages_that_fit(dataclasses.replace(got, num_pages=pages), nbytes) == pages


def test_pages_that_fit_is_exact_at_the_boundary():
    got = config("packed_pow2", page_size=64)
    page = 64 * got.bytes_per_token
    assert mla.pages_that_fit(got, 1000 * page) == 1000
    assert mla.pages_that_fit(got, 1000 * page - 1) == 999


def test_pages_that_fit_never_exceeds_int32_slots():
    pages = mla.pages_that_fit(config("raw_e4m3fn", num_layers=1, page_size=64), 2**60)
    assert pages * 64 < 2**31 <= (pages + 1) * 64


def test_pages_that_fit_counts_down_to_none():
    got = config("raw_e4m3fn", page_size=64)
    page = 64 * got.bytes_per_token
    assert [mla.pages_that_fit(got, nbytes) for nbytes in (0, page - 1, page, 2 * page)] == [0, 0, 1, 2]
    for bad in (-1, "1", None, True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"nbytes must be a number >= 0, got {bad!r}"):
            mla.pages_that_fit(got, bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "call",
    [
        mla.explain,
        mla.init_cache,
        mla.PageAllocator,
        lambda x: mla.pages_that_fit(x, 1),
        lambda x: mla.convert(mla.init_cache(make(num_layers=1)), x),
        lambda x: mla.straight_through(np.ones((2, 512), np.float32), np.ones((2, 64), np.float32), x),
        lambda x: mla.straight_through_index(np.ones((2, 128), np.float32), x),
        lambda x: mla.raw_rows(x, 0, np.zeros(1, np.int32)),
        lambda x: mla.read_kv(x, 0, np.zeros(1, np.int32)),
    ],
)
def test_what_is_no_config_layout_or_cache_is_said(call):
    for bad in (3, None, mla.GEOMETRIES["glm-5"]):
        with pytest.raises(TypeError, match=rf"\w+: (config|layout|cache) must be a \w+, got {type(bad).__name__}"):
            call(bad)


def test_a_presets_name_in_place_of_its_geometry_gets_a_hint():
    with pytest.raises(ValueError, match=r"must be an MLAGeometry, got 'glm-5'; mla_jax.GEOMETRIES\['glm-5'\] is one"):
        make(geometry="glm-5")
    with pytest.raises(ValueError, match=r"must be an MLAGeometry, got 'gpt-2'$"):
        make(geometry="gpt-2")


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_names_the_path_and_rejects_the_others(layout):
    got = config(layout, head_dim=128)
    text = mla.explain(got)
    chosen = next(line for line in text.splitlines() if got.write_path.name in line)
    assert "write path" in chosen
    for path in mla.WritePath:
        line = next(line for line in text.splitlines() if path.name in line)
        assert line.strip().startswith("not ") == (path is not got.write_path)
        # Name and reason, not the name alone.
        assert len(line.split(path.name, 1)[1].split()) >= 5
    assert got.layout.name in text
    assert str(got.layout.row_bytes) in text


def test_explain_says_what_a_token_costs():
    text = mla.explain(make(num_layers=78, use_nsa=True, kv_cache_dtype="fp8_e4m3"))
    assert "55,224" in text
    assert f"{math.floor(2**30 / 55_224):,}" in text


def test_explain_names_the_dialect_of_the_platform():
    fields = {"use_nsa": True, "kv_cache_dtype": "fp8_e4m3"}
    assert "e4m3fnuz" in mla.explain(make(platform="gfx942", **fields))
    assert "e4m3fnuz" not in mla.explain(make(platform="gfx950", **fields))
