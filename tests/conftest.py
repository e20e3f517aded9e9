"""Shared set-up: the platform that tests run on, hypothesis' profile, and a seeded generator."""

import os
import re
import sys
import zlib

import hypothesis
import numpy as np
import pytest

# Compiling takes longer than hypothesis' deadline, and a failure has to come back on the next run.
hypothesis.settings.register_profile("mla_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("mla_jax")


def _selects_gpu(config: pytest.Config) -> bool:
    """Whether `-m` asks for the GPU tests by name."""
    return re.search(r"(?<!\bnot )\bgpu\b", config.getoption("markexpr") or "") is not None


def pytest_configure(config: pytest.Config) -> None:
    # The default run is the same on every machine, also on one with a GPU. jax reads the variable when it is first
    # imported, so this has to come before any test module; a plugin may have imported it already.
    if "JAX_PLATFORMS" not in os.environ and not _selects_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import jax

    if jax.default_backend() != "gpu":
        # Whoever asked for the GPU tests must not get a green run out of skips.
        refuse = pytest.fail if _selects_gpu(item.config) else pytest.skip
        refuse(f"needs a GPU; jax's default backend is {jax.default_backend()!r}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name and parameters: repeatable alone, in any order and on any worker."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
