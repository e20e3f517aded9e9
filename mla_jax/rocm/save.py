"""Code objects on disk, with everything that a launch elsewhere needs.

One folder a case: ``program.json`` and one ELF file (``*.hsaco``) a kernel. ``program.json`` has the program's allocations (size,
which argument or constant it is), its steps in order (kernel, file, grid, block, LDS, arguments with name, dtype, shape, role,
allocation and offset) and its results. Running the steps in order over those allocations is what the card's runtime does.
"""

import json
import pathlib
import re
from typing import Any

from mla_jax.rocm.cases import RocmCase
from mla_jax.rocm.program import Buffer, Launch, Program


def folder_name(case: RocmCase) -> str:
    """The case's name as a folder."""
    return f"{case.arch}-" + re.sub(r"[^\w.=]+", "-", case.name)


def describe(case: RocmCase, program: Program) -> dict[str, Any]:
    """What ``program.json`` holds.

    Raises:
        ValueError: where a step is no kernel, or its code is missing: then the steps are not the whole program.
    """
    if program.others:
        raise ValueError(f"{case.name}: the program copies or branches between its kernels ({program.others})")
    names = _parameter_names(case)
    return {
        "case": case.name,
        "arch": case.arch,
        "parameters": names,
        "allocations": {
            str(number): {
                "bytes": a.nbytes,
                "parameter": a.parameter,
                "name": None if a.parameter is None else names[a.parameter],
                "constant": a.constant,
                "result": a.is_result,
            }
            for number, a in program.allocations.items()
        },
        "steps": [_step(program, launch, names) for launch in program.launches],
        "results": [_buffer(buffer) for buffer in program.results],
        "aliased_bytes": program.aliased_bytes,
        "temporary_bytes": program.temporary_bytes,
    }


def _parameter_names(case: RocmCase) -> list[str]:
    """Names of the program's parameters: its arguments in order, a cache as its pools."""
    names: list[str] = []
    for name, value in case.program()[1].items():
        if name != "cache":
            names.append(name)
            continue
        names += ["cache.kv"] if value.index is None else ["cache.kv", "cache.index"]
    return names


def _buffer(buffer: Buffer) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "dtype": buffer.dtype,
        "shape": list(buffer.shape),
        "bytes": buffer.nbytes,
        "allocation": buffer.allocation,
        "offset": buffer.offset,
    }


def _step(program: Program, launch: Launch, names: list[str]) -> dict[str, Any]:
    if launch.code is None:
        raise ValueError(f"the compiler did not hand out the code of {launch.kernel}; save from a fresh process")
    arguments = []
    for buffer, role in zip(launch.arguments, launch.roles(), strict=True):
        allocation = program.allocations[buffer.allocation]
        described = _buffer(buffer)
        if allocation.parameter is not None:
            described["name"] = names[allocation.parameter]
        arguments.append({**described, "role": role})
    places = [(b.allocation, b.offset) for b in launch.arguments]
    return {
        "kernel": launch.kernel,
        "symbol": launch.code.notes[".symbol"],
        "file": f"{launch.kernel}.hsaco",
        "library": launch.is_pallas,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "lds_bytes": launch.lds_bytes,
        "static_lds_bytes": launch.code.static_lds_bytes,
        "kernarg_bytes": launch.code.notes[".kernarg_segment_size"],
        "arguments": arguments,
        "aliases": [[places.index(place), i] for i, place in enumerate(places) if places.index(place) < i],
    }


def save(case: RocmCase, program: Program, folder: pathlib.Path) -> pathlib.Path:
    """Writes a compiled case below ``folder``. Returns its own folder."""
    described = describe(case, program)
    own = folder / folder_name(case)
    own.mkdir(parents=True, exist_ok=True)
    for launch in program.launches:
        assert launch.code is not None
        (own / f"{launch.kernel}.hsaco").write_bytes(launch.code.binary)
    (own / "program.json").write_text(json.dumps(described, indent=1) + "\n")
    return own
