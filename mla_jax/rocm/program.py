"""What a compiled program launches, in order, read from the compiler's own reports.

XLA's reports (optimised HLO, buffer assignment, thunk sequence) are text for people; the patterns below fit the releases that
``compiler`` admits, and anything that does not fit is an error rather than a guess.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from mla_jax.rocm.code_object import CodeObject

_DTYPES = {
    "pred": "bool",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2": "float8_e5m2",
    "f8e5m2fnuz": "float8_e5m2fnuz",
}

_VIEWS = ("bitcast", "reshape", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Part of one of the program's allocations.

    Attributes:
        name: of the value that it holds, as the program's text has it.
        dtype: numpy's name.
        shape: of the value.
        allocation: which one.
        offset: where the value begins, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    allocation: int
    offset: int

    @property
    def nbytes(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else 1 if self.dtype.startswith("float8") else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * itemsize


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory of the program.

    Attributes:
        nbytes: its size.
        parameter: which of the program's arguments it is, or None.
        parameter_name: that argument's name.
        constant: the numbers it holds from the start, or None.
        is_result: whether it holds a result when the program ends.
    """

    nbytes: int
    parameter: int | None
    parameter_name: str | None
    constant: list[float] | None
    is_result: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel and its arguments.

    Attributes:
        name: of the instruction.
        kernel: of the kernel.
        grid: work groups in x, y and z.
        block: lanes of a work group in x, y and z.
        lds_bytes: LDS that the launch adds to the code's own.
        arguments: buffers in the order of the kernel's pointers.
        is_pallas: whether it is a kernel of this library rather than of XLA.
        code: the kernel, or None where the compiler did not hand it out.
        operation: the text of the instruction.
    """

    name: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    lds_bytes: int
    arguments: tuple[Buffer, ...]
    is_pallas: bool
    code: CodeObject | None
    operation: str

    @property
    def total_lds_bytes(self) -> int:
        return self.lds_bytes + (self.code.static_lds_bytes if self.code else 0)

    def waves_per_group(self, lanes: int = 64) -> int:
        return -(-math.prod(self.block) // lanes)

    def roles(self) -> list[str]:
        """ "in", "out" or "inout" of each argument: one that shares its place with another one is both."""
        places = [(b.allocation, b.offset) for b in self.arguments]
        operands = len(_operands(self.operation))
        return ["inout" if places.count(place) > 1 else "in" if i < operands else "out" for i, place in enumerate(places)]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function compiled for one chip.

    Attributes:
        arch: the chip.
        launches: in order; operations that launch no kernel (copies) are named in ``others``.
        others: (position among the launches, kind, name) of everything else the program does.
        allocations: by number.
        results: buffers of the results, in order.
        aliased_bytes: results that live in the place of an argument.
        temporary_bytes: memory beyond arguments and results.
        hlo: the optimised program's text.
    """

    arch: str
    launches: tuple[Launch, ...]
    others: tuple[tuple[int, str, str], ...]
    allocations: dict[int, Allocation]
    results: tuple[Buffer, ...]
    aliased_bytes: int
    temporary_bytes: int
    hlo: str

    @property
    def kernels(self) -> list[Launch]:
        """The launches of this library's own kernels."""
        return [launch for launch in self.launches if launch.is_pallas]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str


def _operands(text: str) -> tuple[str, ...]:
    inner = re.search(r" [\w\-]+\(([^)]*)\)", text)
    # "%x#1" is element 1 of the tuple x.
    return tuple(re.findall(r"%([\w.\-]+(?:#\d+)*)", inner.group(1))) if inner else ()


def _entry(hlo: str) -> dict[str, _Instruction]:
    found = {}
    body = hlo[hlo.index("\nENTRY ") :]
    for line in body.splitlines():
        match = re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(", line)
        if match:
            root, name, type_, opcode = match.groups()
            text = line[line.index(" = ") + 2 :]
            found[name] = _Instruction(type_, opcode, _operands(text), text)
            if root:
                found["ROOT"] = found[name]
        if line.startswith("}"):
            break
    return found


def instruction_key(hlo: str, name: str) -> str:
    """The text of an instruction and of the computations it calls, without metadata: equal text is compiled to equal code."""
    text = re.sub(r", (metadata|sharding|frontend_attributes)=\{.*?\}(?=, |$)", "", _entry(hlo)[name].text)
    parts = [text]
    for called in re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", text):
        start = hlo.find(f"\n%{called} ")
        parts.append(re.sub(r", metadata=\{[^}]*\}", "", hlo[start : hlo.find("\n}", start)]))
    # Names count from one within a program; equal code may have other names in another.
    joined = "\n".join(parts)
    numbers: dict[str, str] = {}
    for name in re.findall(r"%([\w.\-]+)", joined):
        numbers.setdefault(name, f"v{len(numbers)}")
    return re.sub(r"[\w.\-]+", lambda word: numbers.get(word[0], word[0]), joined)


def _shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (_DTYPES[dtype], tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", type_)
    ]


def _numbers(text: str) -> list[float] | None:
    """The numbers of a constant, None where the text leaves some out."""
    inner = text[text.index("constant(") + len("constant(") : text.rindex(")") if "metadata" not in text else text.index("), ")]
    if "..." in inner:
        return None
    words = re.findall(r"-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?)|true|false", inner)
    return [1.0 if word == "true" else 0.0 if word == "false" else float(word) for word in words]


class _Buffers:
    """Where values live, by name, through views and tuples."""

    def __init__(self, hlo: str, assignment: str):
        self.entry = _entry(hlo)
        self.places: dict[str, tuple[int, int]] = {}
        self.allocations: dict[int, Allocation] = {}
        number = -1
        for line in assignment.splitlines():
            if match := re.match(r"allocation (\d+): size (\d+), (.*)", line):
                number, size, rest = int(match[1]), int(match[2]), match[3]
                parameter = re.search(r"parameter (\d+)", rest)
                self.allocations[number] = Allocation(
                    size, int(parameter[1]) if parameter else None, None, None, "maybe-live-out" in rest
                )
            elif match := re.match(r" value: <\d+ (\S+) @\d+> \(size=\d+,offset=(\d+)\)", line):
                self.places[match[1]] = (number, int(match[2]))
            elif number >= 0 and not line.strip():
                break
        for name, instruction in self.entry.items():
            if name == "ROOT" or name not in self.places:
                continue
            number = self.places[name][0]
            if instruction.opcode == "constant":
                self.allocations[number] = dataclasses.replace(self.allocations[number], constant=_numbers(instruction.text))
            elif instruction.opcode == "parameter":
                label = re.search(r'op_name="([^"]*)"', instruction.text)
                self.allocations[number] = dataclasses.replace(self.allocations[number], parameter_name=label[1] if label else name)

    def leaves(self, name: str, index: tuple[int, ...] = ()) -> list[Buffer]:
        """The buffers of a value: one, or one a leaf where it is a tuple."""
        name, *elements = name.split("#")
        index = (*map(int, elements), *index)
        instruction = self.entry[name]
        if instruction.opcode == "get-tuple-element":
            number = re.search(r"index=(\d+)", instruction.text)
            assert number is not None
            return self.leaves(instruction.operands[0], (int(number[1]), *index))
        if instruction.opcode == "tuple":
            if index:
                return self.leaves(instruction.operands[index[0]], index[1:])
            return [leaf for operand in instruction.operands for leaf in self.leaves(operand)]
        shapes = _shapes(instruction.type)
        if instruction.opcode in _VIEWS:
            ((dtype, shape),) = shapes
            (source,) = self.leaves(instruction.operands[0], index)
            return [Buffer(source.name, dtype, shape, source.allocation, source.offset)]
        if instruction.type.startswith("("):
            chosen = [index[0]] if index else range(len(shapes))
            return [self._buffer(f"{name}{{{i}}}", shapes[i]) for i in chosen]
        return [self._buffer(name, shapes[0])]

    def _buffer(self, name: str, shape: tuple[str, tuple[int, ...]]) -> Buffer:
        allocation, offset = self.places[name]
        return Buffer(name, *shape, allocation, offset)


def read_program(arch: str, hlo: str, assignment: str, thunks: str, metadata: str, memory: Any) -> Program:
    """A program from the compiler's reports. ``code`` of the launches is left to the caller.

    Raises:
        ValueError: where a report does not have the expected form.
    """
    names = {int(n): name for name, n in re.findall(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)', metadata)}
    buffers = _Buffers(hlo, assignment)
    launches, others = [], []
    for line in thunks.splitlines():
        match = re.match(r"\s*(\d+): (k\w+)\s.*?\]\s+(.*)", line)
        if match is None:
            continue
        name = names.get(int(match[1]), match[3].split()[0] if match[3] else "")
        launch = re.match(r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes", match[3])
        if launch is None:
            others.append((len(launches), match[2], name))
            continue
        if name not in buffers.entry:
            # Inside a loop or branch, which the library's kernels never are.
            others.append((len(launches), match[2], name))
            continue
        instruction = buffers.entry[name]
        operands = [leaf for operand in instruction.operands for leaf in buffers.leaves(operand)]
        launches.append(
            Launch(
                name,
                launch[1],
                tuple(int(n) for n in launch[2].split(",")),
                tuple(int(n) for n in launch[3].split(",")),
                int(launch[4]),
                (*operands, *buffers.leaves(name)),
                "xla.gpu.triton" in instruction.text,
                None,
                instruction.text,
            )
        )
    results = buffers.leaves(next(n for n, i in buffers.entry.items() if n != "ROOT" and i is buffers.entry["ROOT"]))
    return Program(
        arch,
        tuple(launches),
        tuple(others),
        buffers.allocations,
        tuple(results),
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        hlo,
    )
