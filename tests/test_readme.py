"""README.md: its code blocks run, and its figures are those of the committed measurements."""

import json
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="README.md is not beside the tests (they run outside the tree)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL) if README.exists() else []


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(number: int) -> None:
    exec(compile(blocks("python")[number], f"README block {number}", "exec"), {})


def test_speed_table_quotes_the_committed_measurement() -> None:
    results = json.loads((ROOT / "benchmarks" / "h200_writes.json").read_text())
    rows: dict[tuple[str, str, str], Any] = {
        (r["layout"], r["op"], r["implementation"]): r for r in results["speed"]["rows"] if r["tokens"] == 65536
    }
    quoted = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| ([\d.]+) us \| ([\d.]+) TB/s \| ([\d.]+) \| ([\d.]+) us \|$", README.read_text(), re.MULTILINE
    )
    assert len(quoted) >= 6
    for layout, op, microseconds, rate, share, xla in quoted:
        pallas = rows[layout, op, "pallas"]
        assert float(microseconds) == round(pallas["microseconds"], 1), layout
        assert float(rate) == round(pallas["terabytes_per_second"], 2), layout
        assert float(share) == round(pallas["share_of_copy_rate"], 2), layout
        assert float(xla) == round(rows[layout, op, "xla"]["microseconds"], 1), layout
