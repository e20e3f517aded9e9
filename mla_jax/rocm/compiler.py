"""The ROCm XLA compiler on a machine without an AMD GPU: one function compiled for one chip.

This is the only file that knows the plugin and JAX's private names for it. The compiler is the one that users of a card get; it is
given a description of the chip instead of the chip.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mla_jax.kernels import backend
from mla_jax.rocm import code_object, stand_ins
from mla_jax.rocm.chips import CHIPS
from mla_jax.rocm.code_object import CodeObject
from mla_jax.rocm.program import Launch, Program, instruction_key, read_program

_LINES = ("0.10", "0.12")
"""Lines of jax that have a ROCm plugin; the first is the last for Python 3.11."""


_READERS = ("msgpack", "tinygrad")
"""What reads the code objects that the compiler makes."""


class RocmUnavailableError(RuntimeError):
    """The compiler for AMD chips cannot be loaded here; the message says what mends it."""


def install_command() -> str:
    """The pip line that installs what compiling takes: this package's rocm extra, spelled out, for the jax that is here."""
    line = ".".join(versions()["jax"].split(".")[:2])
    if line not in _LINES:
        line = _LINES[sys.version_info >= (3, 12)]
    pinned = " ".join(f"'{name}=={line}.*'" for name in ("jax", "jax-rocm7-plugin", "jax-rocm7-pjrt"))
    return f"pip install {pinned} {' '.join(_READERS)}"


def versions() -> dict[str, str]:
    """Versions of what compiles: jax, jaxlib and the plugin, "none" where one is missing."""
    found = {}
    for name in ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _plugin() -> pathlib.Path:
    """The plugin's library, of the release that fits this jax."""
    have = versions()
    if have["jax-rocm7-pjrt"] == "none":
        raise RocmUnavailableError(f"the ROCm compiler is not installed: {install_command()}")
    line = ".".join(have["jax"].split(".")[:2])
    if line not in _LINES or ".".join(have["jax-rocm7-pjrt"].split(".")[:2]) != line:
        raise RocmUnavailableError(
            f"compiling for AMD chips works with jax {' and '.join(_LINES)} and the jax-rocm7 plugin of the same line, "
            f"got jax {have['jax']} and plugin {have['jax-rocm7-pjrt']}: {install_command()}"
        )
    files = importlib.metadata.files("jax-rocm7-pjrt") or []
    for file in files:
        if file.name == "xla_rocm_plugin.so":
            return pathlib.Path(str(file.locate()))
    raise RocmUnavailableError(
        f"jax-rocm7-pjrt {have['jax-rocm7-pjrt']} holds no xla_rocm_plugin.so: {install_command()} --force-reinstall"
    )


def check_available() -> None:
    """Returns if this machine can compile for AMD chips.

    Raises:
        RocmUnavailableError: with the line that mends it.
    """
    _plugin()
    for module in _READERS:
        try:
            importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            raise RocmUnavailableError(f"reading AMD code objects needs {module}: {install_command()}") from None
    if tools := stand_ins.missing_tools():
        raise RocmUnavailableError(f"the ROCm compiler needs {', '.join(tools)} on this machine, e.g. apt install gcc binutils")


@functools.cache
def _loaded() -> Any:
    """The plugin's C interface. It is not registered as a backend: no device of this process changes."""
    check_available()
    plugin = _plugin()
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]  # the plugin's loader has no public name

    stand_ins.load(plugin)
    try:
        interface = xla_client.load_pjrt_plugin_dynamically("rocm", str(plugin))
        xla_client.initialize_pjrt_plugin("rocm")
    except jax.errors.JaxRuntimeError as error:
        raise RocmUnavailableError(f"the ROCm plugin does not load: {error}") from error
    return interface


@functools.cache
def _device(arch: str) -> Any:
    """A compile-only device of one chip."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]  # the plugin's loader has no public name

    if arch not in CHIPS:
        raise ValueError(f"unknown chip {arch!r}, known are {', '.join(CHIPS)}")
    topology = xla_client.make_c_api_device_topology(_loaded(), arch, topology="1x1x1", target_config=CHIPS[arch].target_config())
    return topology._make_compile_only_devices()[0]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_SEEN: dict[tuple[str, str], CodeObject] = {}
"""Code by chip and instruction. The compiler keeps code within a process and hands it out the first time only."""


def compile_for(arch: str, fn: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = ()) -> Program:
    """Compiles ``jax.jit(fn)`` for a chip. Nothing runs.

    Args:
        arch: "gfx942" or "gfx950".
        fn: a function of arrays and pytrees, jitted or not.
        *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in any pytree.
        donate_argnums: as for ``jax.jit``.

    Returns:
        The compiled program: memory, launches and the code of each.

    Raises:
        RocmUnavailableError: where the compiler cannot be loaded.
        ValueError: for an unknown chip, or where the compiler's reports are not understood.
        jax.errors.JaxRuntimeError: where compiling fails, e.g. for more LDS than the chip has.
    """
    sharding = jax.sharding.SingleDeviceSharding(_device(arch))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if hasattr(x, "shape") else x, args)
    lowered = backend.lower(fn, arch, *placed, donate_argnums=donate_argnums)
    with tempfile.TemporaryDirectory(prefix="mla-jax-rocm-") as name, _environment(TF_ROCM_KEEP_XLA_TEMPFILES="1", TMPDIR=name):
        folder = pathlib.Path(name)
        options = {"xla_dump_to": name, "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        compiled = lowered.compile(compiler_options=options)

        def report(suffix: str) -> str:
            files = sorted(folder.glob(f"*{suffix}"))
            if len(files) != 1:
                raise ValueError(f"the compiler wrote {len(files)} reports *{suffix}, expected 1 ({versions()})")
            return files[0].read_text()

        program = read_program(
            arch,
            report("gpu_after_optimizations.txt"),
            report("gpu_after_optimizations-buffer-assignment.txt"),
            report(".thunk_sequence.txt"),
            report(".thunk_metadata.txt"),
            compiled.memory_analysis(),
        )
        fresh = {}
        for file in folder.glob("*.hsaco"):
            for code in code_object.kernels(file.read_bytes()):
                fresh[code.kernel] = code
    return dataclasses.replace(program, launches=tuple(_with_code(program, launch, fresh) for launch in program.launches))


def _with_code(program: Program, launch: Launch, fresh: dict[str, CodeObject]) -> Launch:
    key = program.arch, instruction_key(program.hlo, launch.name)
    code = fresh.get(launch.kernel) or _SEEN.get(key)
    if code is None:
        return launch
    _SEEN[key] = code
    arguments = launch.arguments
    if len(arguments) != len(code.access):
        # XLA hands a buffer over once where the results of its own kernels take the place of operands.
        arguments = tuple({(b.allocation, b.offset, b.nbytes): b for b in reversed(arguments)}.values())[::-1]
    if len(arguments) != len(code.access):
        raise ValueError(f"{launch.kernel} takes {len(code.access)} pointers, its instruction has {len(arguments)} buffers")
    return dataclasses.replace(launch, code=code, arguments=arguments)
