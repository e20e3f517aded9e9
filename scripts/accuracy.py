"""Scores the accuracy model with its cache in each storage format: the same held-out problems, generated greedily.

    python scripts/accuracy.py --model tests/data/accuracy --out benchmarks/accuracy.json

An answer counts if every token of it is right and it ends where it should. The results hold one digit a problem, so that a run on
another machine can be compared problem by problem.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy_problems as problems
import jax

from mla_jax import models
from mla_jax.cli.demo import FORMATS as DEMO_FORMATS
from mla_jax.cli.demo import Format

ROOT = Path(__file__).resolve().parent.parent
FORMATS = tuple(form for form in DEMO_FORMATS if form.label != "float32")
SEED, COUNT, LENGTH = 20_000, 1_000, 256
MAX_NEW_TOKENS = 12
"""Longer than any answer, so that one that does not end is wrong."""


def wilson(correct: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927), which stays sensible near 1."""
    share, spread = correct / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # At the ends the bounds are exact, and rounding must not leave a share of 0 or 1 outside its own interval.
    return (0.0 if correct == 0 else centre - half), (1.0 if correct == count else centre + half)


def answers(model: models.CausalLM, prompts: Sequence[list[int]], form: Format, batch: int) -> list[list[int]]:
    """What the model generates after each prompt, ``batch`` prompts at a time."""
    out = []
    for begin in range(0, len(prompts), batch):
        out += models.generate(model, prompts[begin : begin + batch], max_new_tokens=MAX_NEW_TOKENS, **form.flags)
    return out


def score(
    model: models.CausalLM, tests: Sequence[tuple[str, list[int], list[int]]], form: Format, batch: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """The results of one format, and the texts it gave."""
    texts = answers(model, [prompt for _, prompt, _ in tests], form, batch)
    solved = [text == answer for text, (_, _, answer) in zip(texts, tests, strict=True)]
    tasks = {}
    for name in problems.TASKS:
        of_task = [ok for ok, (task, _, _) in zip(solved, tests, strict=True) if task == name]
        tasks[name] = {"correct": sum(of_task), "count": len(of_task)}
    low, high = wilson(sum(solved), len(solved))
    config = model.cache_config(num_pages=2, **form.flags)
    result = {
        "format": form.label,
        "layout": config.layout.name,
        "bytes_per_token": config.bytes_per_token,
        "correct": sum(solved),
        "count": len(solved),
        "accuracy": sum(solved) / len(solved),
        "wilson_95": [round(low, 4), round(high, 4)],
        "tasks": tasks,
        "solved": "".join(str(int(ok)) for ok in solved),
    }
    return result, texts


def environment() -> dict[str, str]:
    packages = ("mla-jax", "jax", "jaxlib", "flax", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "data" / "accuracy", help="checkpoint folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "accuracy.json", help="results")
    parser.add_argument("--count", type=int, default=COUNT, help=f"problems (default: {COUNT})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of a prompt and its answer at most (default: {LENGTH})")
    parser.add_argument("--batch", type=int, default=250, help="prompts of one call (default: 250)")
    args = parser.parse_args()
    model = models.from_pretrained(args.model)
    tests = problems.make_problems(SEED, args.count, args.length)
    results: list[dict[str, Any]] = []
    baseline: list[list[int]] = []
    for form in FORMATS:
        began = time.monotonic()
        result, texts = score(model, tests, form, args.batch)
        baseline = baseline or texts
        result["answers_unlike_bfloat16"] = sum(a != b for a, b in zip(texts, baseline, strict=True))
        results.append(result)
        low, high = result["wilson_95"]
        print(
            f"{form.label:14} {result['correct']:4d}/{result['count']} = {result['accuracy']:.4f} [{low:.4f}, {high:.4f}], "
            f"{result['answers_unlike_bfloat16']} answers unlike bfloat16's, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    files = sorted(args.model.glob("*.safetensors"))
    report = {
        "environment": environment(),
        "model": json.loads((args.model / "config.json").read_text(encoding="utf-8"))["mla_jax_provenance"],
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "parameters": models.parameter_count(model),
        "problems": {"count": args.count, "seed": SEED, "length": args.length, "max_new_tokens": MAX_NEW_TOKENS},
        "prompt_tokens": {"mean": sum(len(p) for _, p, _ in tests) / len(tests), "max": max(len(p) for _, p, _ in tests)},
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
