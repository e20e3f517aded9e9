"""The notebooks: what is committed is complete and small, and each runs in a fresh kernel.

    python tests/test_notebooks.py [NAME...]

executes the notebooks again and saves them as they are committed: outputs kept, run times and the kernel's version left out, and
pictures reduced to a palette.
"""

import base64
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = ["01_paged_mla_cache", "02_fp8_anatomy", "03_static_dispatch", "04_sparse_attention", "05_flax_model"]
MAX_BYTES = 400_000

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the notebooks are not beside the tests (they run outside the tree)")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_cells(path) for output in cell["outputs"]]


# ---- what is committed -----------------------------------------------------------------------------------------------


def test_there_are_five() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@each
def test_every_code_cell_was_run_in_order(path: Path) -> None:
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))


@each
def test_outputs_hold_pictures_and_neither_errors_nor_warnings(path: Path) -> None:
    assert not [output["ename"] for output in outputs(path) if output["output_type"] == "error"]
    assert not [output["text"] for output in outputs(path) if output.get("name") == "stderr"]
    for cell in code_cells(path):
        if re.search(r"^plt\.show\(\)", source(cell), re.MULTILINE):  # indented: it depends on a file or a device
            assert [output for output in cell["outputs"] if "image/png" in output.get("data", {})], source(cell)[:200]
    assert any("image/png" in output.get("data", {}) for output in outputs(path))


@each
def test_file_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= MAX_BYTES
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    for place in ("/tmp", "/root", "/home", "/work", "site-packages"):
        assert place not in without_pictures, place
    assert "iopub" not in text, "run times are left out, so that running again changes little"


@each
def test_prose_comes_first_and_links_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and source(cells[0]).startswith("# ")
    prose = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (FOLDER / target).exists(), target


@each
def test_gpu_cells_stand_behind_a_flag(path: Path) -> None:
    code = "\n".join(source(cell) for cell in code_cells(path))
    assert "RUN_ON_GPU = jax.default_backend()" in code


# ---- a fresh run -----------------------------------------------------------------------------------------------------


def nbformat() -> Any:
    # By name: pyright runs without the notebooks extra.
    return importlib.import_module("nbformat")


def execute(path: Path) -> Any:
    """The notebook after a run from top to bottom in a fresh kernel; nbclient raises for a cell that fails."""
    notebook = nbformat().read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = importlib.import_module("nbclient").NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=resources
    )
    return client.execute()


@pytest.mark.slow
@each
# The kernel's client warns of itself: sockets without encryption, an event loop that is set up in another way to come.
@pytest.mark.filterwarnings("ignore")
def test_runs_in_a_fresh_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="needs the notebooks extra; CI runs `jupyter execute` with it besides")
    pytest.importorskip("matplotlib", reason="needs the notebooks extra")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = execute(path)
    fresh = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in fresh if output.get("name") == "stderr"]
    assert not [output for output in fresh if output.output_type == "error"]


# ---- saving ----------------------------------------------------------------------------------------------------------


def tidy(notebook: Any) -> Any:
    """Without what changes from run to run, and with pictures of at most 256 colours."""
    Image = importlib.import_module("PIL.Image")  # matplotlib needs it too
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = {}
            if "image/png" in output.get("data", {}):
                picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
                smaller = io.BytesIO()
                palette = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                palette.save(smaller, "png", optimize=True)
                output.data["image/png"] = base64.b64encode(smaller.getvalue()).decode()
    return notebook


def main(names: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    for path in NOTEBOOKS:
        if not names or any(path.stem.startswith(name) for name in names):
            nbformat().write(tidy(execute(path)), path)
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
