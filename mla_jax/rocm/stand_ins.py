"""Empty stand-ins for ROCm's shared libraries, so that the compiler in JAX's ROCm plugin loads on a machine without them.

The compiler needs none of their code. What is missing is found with the loader's own list, every symbol that the plugin wants is
defined to return an error, and the libraries live in a temporary folder until the process ends. Where ROCm is installed nothing is
missing and nothing is made.
"""

import atexit
import ctypes
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict

_ROCM = re.compile(r"(__hip|hip|hsa|nccl|roc|miopen|amdsmi|rsmi|drm|amdgpu|numa|mbind|_ZN?K?\w*hip|_ZT\w*hip)")
_NAMES = re.compile(r"(?i)error_?(string|name)|get_string")

_TOOLS = ("gcc", "nm", "ldd")


def missing_tools() -> list[str]:
    """Programs that making stand-ins needs and this machine lacks."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _symbols(library: pathlib.Path | str, which: str) -> list[str]:
    """Dynamic symbols with their versions: ``which`` is "--undefined-only" or "--defined-only"."""
    return [line.split()[-1] for line in _output("nm", "-D", which, str(library)).splitlines() if line.strip()]


def _needed(library: pathlib.Path) -> tuple[set[str], set[str]]:
    """(names of libraries not found, paths of those found)."""
    missing, found = set(), set()
    for line in _output("ldd", str(library)).splitlines():
        name, _, place = line.strip().partition(" => ")
        if "not found" in place:
            missing.add(name)
        elif place.startswith("/"):
            found.add(place.split()[0])
    return missing, found


def _source(symbols: list[str]) -> str:
    lines = []
    for i, symbol in enumerate(symbols):
        if symbol.startswith(("_ZTV", "_ZTI", "_ZTS")):
            lines.append(f'void *d{i}[64] __asm__("{symbol}") = {{0}};')
        elif _NAMES.search(symbol):
            lines.append(f'const char *f{i}(void) __asm__("{symbol}"); const char *f{i}(void) {{ return "stand-in"; }}')
        else:
            # Registering a module must look like a success, any call like a failure.
            status = 0 if symbol.startswith("__hip") else 1
            lines.append(f'int f{i}(void) __asm__("{symbol}"); int f{i}(void) {{ return {status}; }}')
    return "\n".join(lines) + "\n"


def load(plugin: pathlib.Path) -> list[str]:
    """Makes and loads stand-ins for the libraries that ``plugin`` misses. Returns their names.

    Loaded before the plugin, they satisfy its references by name, without any search path.

    Raises:
        FileNotFoundError: if gcc, nm or ldd is missing.
        subprocess.CalledProcessError: if the compiler fails.
    """
    if tools := missing_tools():
        raise FileNotFoundError(f"stand-ins for ROCm's libraries need {', '.join(tools)}")
    missing, found = _needed(plugin)
    if not missing:
        return []
    undefined = _symbols(plugin, "--undefined-only")
    defined = {symbol.split("@")[0] for path in sorted(found) for symbol in _symbols(path, "--defined-only")}
    wanted = sorted({s.split("@")[0] for s in undefined} - defined)
    wanted = [symbol for symbol in wanted if _ROCM.match(symbol)]
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if version and name in set(wanted):
            versions[version.lstrip("@")].append(name)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-jax-rocm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "stand_in.c").write_text(_source(wanted))
    (folder / "versions.map").write_text(
        "\n".join(f"{version} {{ global: " + " ".join(f'"{n}";' for n in names) + " };" for version, names in versions.items())
    )
    objects = ["-o", str(folder / "stand_in.o")]
    subprocess.run(["gcc", "-c", "-fPIC", "-w", str(folder / "stand_in.c"), *objects], check=True, capture_output=True)
    script = [f"-Wl,--version-script={folder / 'versions.map'}"] if versions else []
    for name in sorted(missing):
        command = ["gcc", "-shared", "-o", str(folder / name), f"-Wl,-soname,{name}", *script, str(folder / "stand_in.o")]
        subprocess.run(command, check=True, capture_output=True)
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return sorted(missing)
