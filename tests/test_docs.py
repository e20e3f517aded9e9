"""The documentation: its Python runs, its tables are those of the code, its reference is complete, and it builds without warnings.

Beside it what CONTRIBUTING.md promises: that a format, a model or a chip that is half there is noticed.
"""

import ast
import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
import typing

import ml_dtypes
import numpy as np
import pytest

import mla_jax as mla
from mla_jax import devices, layout, models, quantize
from mla_jax.bench import cases
from mla_jax.kernels import tuning
from mla_jax.rocm import chips
from test_docstrings import PUBLIC

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"] if DOCS.exists() else []

pytestmark = pytest.mark.skipif(not PAGES, reason="docs/ is not beside the tests (they run outside the tree)")

GLM = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


# ---- pages -----------------------------------------------------------------------------------------------------------


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_python_blocks_run(page: pathlib.Path) -> None:
    """In order, each with the names of those before it."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


def test_pages_have_no_code_that_is_not_run():
    for page in PAGES:
        fences = set(re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE))
        assert fences <= {"python", "sh", "{toctree}", "{include}"}, page


@functools.cache
def tables(name: str) -> dict[str, list[list[str]]]:
    """The tables of a page by their first line, cells without markup; an empty first cell means that of the row above."""
    found: dict[str, list[list[str]]] = {}
    for text in re.findall(r"(?:^\|.*\|\n)+", (ROOT / name).read_text(), re.MULTILINE):
        head, _, *rows = ([cell.strip().strip("`") for cell in line[1:-1].split("|")] for line in text.splitlines())
        for above, row in itertools.pairwise(rows):
            row[0] = row[0] or above[0]
        found[" | ".join(head)] = rows
    return found


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def fields_of(name: str, byte_map: tuple[layout.Field, ...]) -> list[list[str]]:
    return [[name, str(f.start), str(f.stop), f.name, str((f.stop - f.start) // itemsize(f.dtype)), f.dtype] for f in byte_map]


def rows_of(name: str, **widths: int) -> mla.CacheLayout:
    return mla.CacheLayout(name=name, scale_mode="pow2" if name == "packed" else None, **widths)


def test_every_byte_of_a_row_is_documented():
    want = [row for name in layout.LAYOUT_NAMES for row in fields_of(name, rows_of(name, **GLM).byte_map)]
    assert tables("docs/layouts.md")["layout | start | end | field | numbers | dtype"] == want


def test_every_byte_of_an_index_page_is_documented():
    want = []
    for dialect in ("e4m3fn", "e4m3fnuz", None):
        page = mla.IndexLayout(head_dim=128, page_size=64, dialect=dialect, scale_mode="pow2" if dialect else None)
        want += fields_of(dialect or "float32", page.byte_map)
    assert tables("docs/layouts.md")["keys | start | end | field | numbers | dtype"] == want


@pytest.mark.parametrize(("R", "P"), [(512, 64), (256, 32), (128, 0)])
def test_sizes_and_paths_of_rows_are_documented(R, P):
    table = tables("docs/layouts.md")["layout | bytes a row | latent | scales | rope | written by"]
    assert [row[0] for row in table] == list(layout.LAYOUT_NAMES)
    for name, size, latent, scales, rope, path in table:
        got = rows_of(name, kv_lora_rank=R, qk_rope_head_dim=P)
        assert eval(re.sub(r"(\d) ([(P])", r"\1 * \2", size), {"R": R, "P": P}) == got.row_bytes
        assert path == got.write_path.name
        dtypes = {field.name: field.dtype.removeprefix("float8_") for field in got.byte_map}
        assert latent == dtypes["latent"] and rope == dtypes.get("rope", rope) and bool(scales) == ("scales" in dtypes)


def test_encodings_are_documented():
    table = tables("docs/layouts.md")["dialect | exponent bits | mantissa bits | bias | largest | its code | NaN | NaN of sign 1"]
    want = []
    for dialect, fmt in quantize.FORMATS.items():
        codes = [fmt.max_code, fmt.nan_code, fmt.nan_code | 0x80]
        sizes = [7 - fmt.mantissa_bits, fmt.mantissa_bits, fmt.bias, int(fmt.max_finite)]
        want.append([dialect, *map(str, sizes), *(f"0x{code:02X}" for code in codes)])
    assert table == want


# ---- reference -------------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference_once():
    documented = []
    for page in (DOCS / "api").glob("*.rst"):
        module = ""
        for directive, argument in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if directive == "currentmodule":
                module = argument
            elif directive != "automodule":
                documented.append(argument if argument.startswith("mla_jax.") else f"{module}.{argument}")
    extra = {"mla_jax.layout.Field", "mla_jax.models.spec.Family", "mla_jax.models.spec.MoESpec"}
    assert sorted(documented) == sorted({*PUBLIC, *extra})


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "cache")]
    result = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    html = (tmp_path / "html" / "api" / "attention.html").read_text()
    assert 'id="mla_jax.mla_decode"' in html
    assert "q_latent: Float[ArrayIn, 'S Q H R']" in re.sub("<.*?>", "", html).replace("&#39;", "'").replace("\xa0", " ")


# ---- what CONTRIBUTING.md promises -----------------------------------------------------------------------------------


def test_the_house_is_described_as_it_stands():
    described = {name for row in tables("CONTRIBUTING.md")["room | what it holds"] for name in re.findall(r"[\w/]+(?=/)", row[0])}
    rooms = {"mla_jax", *(f"mla_jax/{folder.parent.name}" for folder in (ROOT / "mla_jax").glob("*/__init__.py"))}
    assert described >= rooms - {"mla_jax/kernels"} | {"kernels", "tests", "docs"}
    assert all((ROOT / name).is_dir() for name in described)


def test_files_and_names_of_the_recipes_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = [ROOT, ROOT / "tests", ROOT / "mla_jax", ROOT / "mla_jax" / "bench"]
    for name in set(re.findall(r"`([\w./]+\.(?:py|json|md|toml))`", text)):
        assert any((place / name).exists() for place in places), name
    code = "\n".join(path.read_text() for folder in ("mla_jax", "kernels", "tests") for path in (ROOT / folder).rglob("*.py"))
    for name in set(re.findall(r"`(_?[A-Za-z]+_\w+|[A-Z_]{3,})`", text)):
        assert re.search(rf"\b{name}\b", code), name


def test_every_format_is_in_the_list_that_tests_and_benchmarks_share():
    listed = {case.config(num_layers=1, num_pages=2).layout.name for case in cases.LAYOUTS}
    assert listed == set(layout.LAYOUT_NAMES)


def test_every_tuning_table_serves_every_kernel():
    for name, table in tuning.tables().items():
        assert set(table["write"]) == set(typing.get_args(tuning.WriteKernel)), name
        assert set(table) == {"write", *typing.get_args(tuning.ReadKernel), "index"}, name


def test_every_family_is_named_by_a_model_test():
    tree = ast.parse((ROOT / "tests" / "test_models.py").read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(models.FAMILIES) <= strings


def test_every_platform_is_documented_tuned_and_described():
    table = tables("docs/layouts.md")["platform | e4m3 | chips"]
    assert [row[:2] for row in table] == [[platform, devices.e4m3_dialect(platform)] for platform in devices.PLATFORMS]
    amd = {platform for platform in devices.PLATFORMS if platform.startswith("gfx")}
    assert amd <= set(json.loads(tuning.TABLES.read_text()))
    assert amd == set(chips.CHIPS)
