"""The command line: what it prints, and how it refuses."""

import re
import subprocess
import sys

import pytest

from mla_jax.cli import main


@pytest.mark.parametrize(
    "argv",
    [
        ["info", "--page-size", "3"],
        ["info", "--preset", "gpt-2"],
        ["info", "--packed", "--kv-cache-dtype", "bfloat16"],
        ["info", "--packed", "--preset", "minicpm3-4b", "--gib", "0"],
        ["demo", ""],
        ["demo", "--max-new-tokens", "0"],
        ["demo", "--model", "no/such/folder"],
        ["bench"],
        ["bench", "no-such-section"],
        ["no-such-command"],
        [],
    ],
    ids=" ".join,
)
def test_bad_flags_exit_with_2_and_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("mla-jax") and error.count("\n") == 1 and len(error) > 20


@pytest.mark.parametrize("command", ["info", "demo", "bench", "verify-rocm"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


def test_info_explains_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--preset", "glm-5", "--platform", "gfx942", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    text = capsys.readouterr().out
    assert "RAW_FUSED" in text and "float8_e4m3fnuz" in text and "55,224 bytes" in text
    assert main(["info", "--packed", "--platform", "gfx950"]) == 0
    text = capsys.readouterr().out
    assert "SCALED" in text and "not RAW_FUSED" in text and "656 bytes a row" in text


def test_info_counts_a_presets_own_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--preset", "deepseek-v2-lite", "--platform", "cuda"]) == 0
    assert "27 layers" in capsys.readouterr().out
    assert main(["info", "--preset", "deepseek-v2-lite", "--platform", "cuda", "--layers", "3"]) == 0
    assert "3 layers" in capsys.readouterr().out


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_jax", "info", "--layers", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"mla-jax info: .*num_layers must be an int >= 1, got 0\n", done.stderr)


@pytest.mark.slow
def test_demo_shows_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "pages of latents", "--max-new-tokens", "4"]) == 0
    text = capsys.readouterr().out
    assert "pages of latents" in text
    for row in ("float32", "bfloat16", "raw e4m3fn ", "raw e4m3fnuz", "packed pow2", "packed fp32"):
        assert re.search(rf"{row}.*\d/4", text), row
    assert re.search(r"float32.*PLAIN.*4/4", text)
