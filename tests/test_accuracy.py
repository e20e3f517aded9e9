"""The accuracy check: its problems, its training script, and the committed results scored again."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import models
from mla_jax.layers import MoE

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CHECKPOINT = Path(__file__).parent / "data" / "accuracy"
RESULTS = ROOT / "benchmarks" / "accuracy.json"

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="tests an installed wheel: the scripts are in the source tree only")


@pytest.fixture
def script(monkeypatch):
    """Imports a script by name, with its neighbours importable as they are when it runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for file in SCRIPTS.glob("*.py"):
        sys.modules.pop(file.stem, None)


def answer_of(prompt: str) -> str:
    """The right answer, from the text alone."""
    table = {entry[0]: entry[1:] for entry in prompt[:60].split(";")[:10]}
    question = prompt.rsplit(";", 1)[1]
    if question[0] == "?":
        return table[question[1]] + ";"
    if question[0] in "<>":
        word = question[1:-1]
        return (word if question[0] == ">" else word[::-1]) + ";"
    a, b = question[:-1].split("+")
    return f"{int(a) + int(b):04d}"[::-1] + ";"


def test_problems_have_their_answers(script):
    problems = script("accuracy_problems")
    tests = problems.make_problems(7, 80, 256)
    assert [task for task, _, _ in tests] == list(problems.TASKS) * 20
    for task, prompt, answer in tests:
        text = bytes(prompt).decode()
        assert bytes(answer).decode() == answer_of(text), (task, text)
        assert len(prompt) >= 0.6 * 256 and len(prompt) + len(answer) <= 256
        if task == "addition":
            a, b = text.rsplit(";", 1)[1][:-1].split("+")
            assert problems.is_held_out(int(a), int(b))
    assert tests == problems.make_problems(7, 80, 256) != problems.make_problems(8, 80, 256)


def test_held_out_sums_are_never_trained_on(script):
    problems = script("accuracy_problems")
    a, b = np.divmod(np.arange(10**6), 1000)
    assert 0.09 < problems.is_held_out(a, b).mean() < 0.11
    for held_out in (False, True):
        documents = problems.make_documents(np.random.default_rng(0), 200, 256, held_out=held_out)
        rows, columns = np.nonzero((documents.tasks == 1) & (documents.stops <= 256))
        starts = documents.starts[rows, columns]
        sums = [bytes(documents.tokens[r, s : s + 7].tolist()).decode().split("+") for r, s in zip(rows, starts, strict=True)]
        assert len(sums) > 100 and all(problems.is_held_out(int(a), int(b)) == held_out for a, b in sums)


def test_answers_are_masked_and_counted(script):
    problems = script("accuracy_problems")
    documents = problems.make_documents(np.random.default_rng(0), 50, 256, held_out=False)
    mask = documents.answer_mask()
    for row in range(50):
        marked = np.zeros(256, bool)
        for begin, end in zip(documents.answers[row], documents.stops[row], strict=True):
            marked[begin:end] = True
        assert np.array_equal(mask[row], marked)
    assert set(documents.solved(mask).values()) == {1.0}
    assert set(documents.solved(~mask).values()) == {0.0}
    # One wrong token spoils one answer.
    correct, copies = np.ones_like(mask), ((documents.tasks == 2) & (documents.stops <= 256)).sum()
    row, column = np.argwhere((documents.tasks == 2) & (documents.stops <= 256))[0]
    correct[row, documents.stops[row, column] - 1] = False
    assert documents.solved(correct) == {"recall": 1.0, "addition": 1.0, "copy": pytest.approx(1 - 1 / copies), "reverse": 1.0}


def test_wilson_interval(script):
    wilson = script("accuracy").wilson
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    low, high = wilson(1000, 1000)
    assert low == pytest.approx(0.99617, abs=1e-5) and high == 1
    assert wilson(0, 10)[0] == 0


def test_saved_models_load_as_they_were(script, tmp_path, monkeypatch):
    trainer = script("train_accuracy_model")
    monkeypatch.setattr(trainer, "SHARD_BYTES", 2**17)
    config = {**trainer.CONFIG, **trainer.SMOKE}
    spec = models.parse_config(config)
    model = nnx.eval_shape(lambda: models.CausalLM(spec, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    graphdef, shapes = nnx.split(model)
    leaves: Any = [(path, leaf.replace(rng.standard_normal(leaf.shape, np.float32))) for path, leaf in nnx.to_flat_state(shapes)]
    model = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    trainer.save(tmp_path, config, trainer.hub_tensors(model))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = models.from_pretrained(tmp_path)
    assert loaded.dtype == jnp.bfloat16
    got, want = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (loaded, model))
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        value = np.asarray(got[path][...])
        assert np.array_equal(value, np.asarray(leaf[...]).astype(value.dtype)), path
    gate = next(block.mlp.gate for block in loaded.layers if isinstance(block.mlp, MoE))
    assert gate.weight.dtype == jnp.float32


@pytest.mark.slow
def test_training_script_runs(tmp_path):
    command = [sys.executable, str(SCRIPTS / "train_accuracy_model.py"), "--smoke", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    spec = models.load_spec(tmp_path)
    assert spec.model_type == "glm_moe_dsa" and spec.eos_ids == (ord(";"),)
    assert models.generate(models.from_pretrained(tmp_path), [list(b"Q4821;?Q")], max_new_tokens=2)


committed = pytest.mark.skipif(
    not (CHECKPOINT / "config.json").is_file(), reason=f"{CHECKPOINT} does not exist; scripts/train_accuracy_model.py makes it"
)


@committed
def test_committed_files_fit_together():
    results = json.loads(RESULTS.read_text())
    files = sorted(CHECKPOINT.glob("*.safetensors"))
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == results["sha256"]
    assert all(file.stat().st_size < 4 * 2**20 for file in files) and sum(f.stat().st_size for f in files) <= 8 * 2**20
    assert results["problems"]["count"] == 1000 and len(results["results"]) == 5
    first = results["results"][0]
    assert first["format"] == "bfloat16" and first["accuracy"] >= 0.95
    for result in results["results"]:
        assert len(result["solved"]) == 1000 and result["correct"] == result["solved"].count("1")
        assert result["correct"] == sum(task["correct"] for task in result["tasks"].values())


@pytest.mark.slow
@committed
def test_committed_results_are_scored_again(script):
    """40 problems in a format of each write path. Another device rounds otherwise: an answer may change, and hardly more."""
    results, accuracy, problems = json.loads(RESULTS.read_text()), script("accuracy"), script("accuracy_problems")
    about = results["problems"]
    tests = problems.make_problems(about["seed"], about["count"], about["length"])[:40]
    model = models.from_pretrained(CHECKPOINT)
    assert [form.label for form in accuracy.FORMATS] == [stored["format"] for stored in results["results"]]
    for i in (0, 1, 3):
        form, stored = accuracy.FORMATS[i], results["results"][i]
        again, _ = accuracy.score(model, tests, form, 40)
        changed = sum(a != b for a, b in zip(again["solved"], stored["solved"][:40], strict=True))
        assert changed <= 1, f"{form.label}: {changed} of 40 answers changed between right and wrong"
        low, high = accuracy.wilson(again["correct"], 40)
        assert low <= stored["accuracy"] <= high
