"""The package as pip sees it: no module forgotten, one version, and `kernels` importable under one name only."""

import importlib.metadata
import importlib.resources
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mla_jax.kernels

ROOT = Path(__file__).resolve().parent.parent
in_tree = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="tests an installed wheel: there is no source tree beside it"
)


@pytest.fixture
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@in_tree
def test_every_package_is_listed(pyproject):
    found = {
        Path(folder).relative_to(ROOT).as_posix().replace("/", ".")
        for folder, _, files in os.walk(ROOT / "mla_jax", followlinks=True)
        if "__init__.py" in files
    }
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)


@in_tree
def test_version_is_that_of_the_installed_distribution(pyproject):
    assert importlib.metadata.version("mla-jax") == pyproject["project"]["version"]


@in_tree
def test_kernels_link_resolves():
    # A checkout without symbolic links leaves a text file here, and imports from the tree fail far from the cause.
    link = ROOT / "mla_jax" / "kernels"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "kernels"


@in_tree
def test_kernels_refuses_its_bare_name():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kernels"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "ImportError: import this package as mla_jax.kernels" in run.stderr


def test_kernels_is_a_subpackage():
    assert mla_jax.kernels.__name__ == "mla_jax.kernels"
    assert "kernels" not in sys.modules


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("mla_jax", "py.typed"),
        ("mla_jax.models", "demo_checkpoint/config.json"),
        ("mla_jax.models", "demo_checkpoint/model.safetensors"),
    ],
)
def test_data_is_installed(package, file):
    assert importlib.resources.files(package).joinpath(file).is_file()


def test_console_script_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="mla-jax")
    assert callable(script.load())
