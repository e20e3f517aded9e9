"""README.md: its code blocks run, and its figures are those of the committed measurements."""

import json
import pathlib
import re
import shlex
import tomllib
from typing import Any

import pytest

from mla_jax import cli
from mla_jax.cli import bench

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="README.md is not beside the tests (they run outside the tree)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL) if README.exists() else []


@pytest.mark.parametrize(
    # Those that run a model take a while to compile.
    "number",
    [pytest.param(i, marks=[pytest.mark.slow] * ("models" in block)) for i, block in enumerate(blocks("python"))],
)
def test_python_blocks_run(number: int) -> None:
    exec(compile(blocks("python")[number], f"README block {number}", "exec"), {})


def commands() -> dict[str, str]:
    """Every ``mla-jax`` command line of the README, the documentation and the notebooks, with the file that has it."""
    pages = [README, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    found = {}
    for page in filter(pathlib.Path.exists, pages):
        text = page.read_text()
        spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^[^`\n]*\.venv/bin/[^`\n]+", text, re.MULTILINE)
        for span in spans:
            for line in re.findall(r"(?:^|/| )mla-jax ([a-z][^#&\n]*)", span):
                found[line.strip()] = page.name
    return found


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for command in cli.COMMANDS:
        monkeypatch.setattr(command, "run", lambda args, name=command.NAME: ran.append((name, args)) or 0)
    assert cli.main(shlex.split(line)) == 0
    ((name, args),) = ran
    assert name != "bench" or set(args.sections) <= set(bench.SECTIONS)


def test_the_example_of_info_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in commands() if line.startswith("info --"))
    assert cli.main(shlex.split(line)) == 0
    assert "RAW_FUSED" in capsys.readouterr().out


def test_what_is_to_be_installed_and_opened_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in (README, ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        named = re.findall(r"pip install (?:-e )?['\"]?\.\[([\w,]+)\]", " ".join(text.split()))
        assert named and all(extra in extras for names in named for extra in names.split(",")), page
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:scripts|benchmarks|tests|docs|notebooks|kernels|mla_jax)/[\w./-]+)`", text)
        missing = [path for path in (*links, *paths) if not (ROOT / path).exists()]
        assert not missing, f"{page.name} names {missing}"


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


def test_reading_table_quotes_the_committed_measurement() -> None:
    results = json.loads((ROOT / "benchmarks" / "h200_reads.json").read_text())
    rows: dict[str, Any] = {r["case"]: r for r in results["reads"]["rows"]}
    line = r"^\| (\w+ \w+ B=[^|]+) \| ([\d.]+) us \| (?:([\d.]+) TB/s|-) \| (\d+) TFLOP/s \| (?:([\d.]+) us|-) \| ([\d.]+|-) \|$"
    quoted = re.findall(line, README.read_text(), re.MULTILINE)
    assert len(quoted) == len(rows)
    for case, microseconds, rate, products, peer, share in quoted:
        row = rows[case]
        assert float(microseconds) == row["microseconds"], case
        assert float(rate or 0) == round(row["terabytes_per_second"], 2), case
        assert float(products) == round(row["teraflops"]), case
        assert (float(peer) if peer else None) == row["peer_microseconds"], case
        assert (None if share == "-" else float(share)) == (row["share_of_peer_speed"] and round(row["share_of_peer_speed"], 2)), (
            case
        )


def test_profile_table_quotes_the_committed_measurement() -> None:
    results = json.loads((ROOT / "benchmarks" / "h200_profile.json").read_text())
    line = (
        r"^\| (\w+ \w+ B=[^|]+) \| (?:(\d+) %|-) \| (\d+) % \| (\d+) % \| (\d+) % \| (\d+) % \| ([\d.]+) of ([\d.]+) \| (\d+) \|$"
    )
    quoted = {case: numbers for case, *numbers in re.findall(line, README.read_text(), re.MULTILINE)}
    assert quoted.keys() == {row["case"] for row in results["profile"]["rows"]}
    names = ("tensor_pipe", "l1", "l2", "dram", "issue_slots")
    for row in results["profile"]["rows"]:
        *shares, eligible, warps, registers = quoted[row["case"]]
        assert [share and int(share) for share in shares] == [round(row[f"{name}_percent"] or 0) or "" for name in names]
        assert float(eligible) == row["eligible_warps_per_scheduler"] and float(warps) == round(row["warps_per_scheduler"], 1)
        assert int(registers) == row["registers_per_thread"]
    assert all(row["errors"] == 0 for row in results["sanitizer"]["rows"])
    assert results["sanitizer"]["rows"]
    for row in results["tried"]["rows"]:
        assert f"{row['microseconds']:.0f} us" in README.read_text(), row


def test_reading_ratios_are_the_committed_ones() -> None:
    results = json.loads((ROOT / "benchmarks" / "h200_reads.json").read_text())
    ratios = [row["ratio"] for row in results["topk"]["rows"]]
    assert "costs {}, {} and {} times `lax.top_k`".format(*ratios) in README.read_text()
    times: dict[str, list[float]] = {}
    for row in results["read_pool_sizes"]["rows"]:
        times.setdefault(row["case"], []).append(row["microseconds"])
    quoted = re.search(r"differs by at most (\d+) % between a pool", README.read_text())
    assert quoted is not None
    worst = max(max(pair) / min(pair) - 1 for pair in times.values())
    assert int(quoted[1]) - 1 < 100 * worst <= int(quoted[1])


def test_accuracy_table_quotes_the_committed_measurement() -> None:
    results = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())["results"]
    quoted = re.findall(r"^\| ([\w ]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    got = [(name, int(size), float(share), [float(low), float(high)]) for name, size, share, low, high in quoted]
    want = [(r["format"], r["bytes_per_token"], round(r["accuracy"], 3), r["wilson_95"]) for r in results]
    assert got == want
