"""A kernel's code object: the resources that its compiler noted, and the instructions that a chip would run.

The format is LLVM's AMDGPU code object version 5 (User Guide for AMDGPU Backend, "Code Object Metadata"): an ELF file whose note
holds a MessagePack map. Instructions are decoded by tinygrad's tables for CDNA, generated from AMD's machine-readable ISA.
"""

import dataclasses
import functools
import re
import struct
from collections import Counter
from typing import Any

_NOTE = b"AMDGPU\0\0"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: where it is in the code, its mnemonic, and where it branches to, or None."""

    at: int
    name: str
    target: int | None


@dataclasses.dataclass(frozen=True)
class CodeObject:
    """One kernel, compiled.

    Attributes:
        binary: the ELF file.
        kernel: name of the kernel.
        notes: the compiler's notes of it, e.g. ".vgpr_count".
    """

    binary: bytes
    kernel: str
    notes: dict[str, Any]

    @property
    def registers(self) -> int:
        """Vector registers of a lane, accumulation registers included."""
        return self.notes[".vgpr_count"]

    @property
    def accumulators(self) -> int:
        """Accumulation registers of a lane."""
        return self.notes[".agpr_count"]

    @property
    def scalars(self) -> int:
        """Scalar registers of a wave."""
        return self.notes[".sgpr_count"]

    @property
    def spills(self) -> int:
        """Registers that were moved to memory or to other registers for want of room, vector and scalar."""
        return self.notes[".vgpr_spill_count"] + self.notes[".sgpr_spill_count"]

    @property
    def scratch_bytes(self) -> int:
        """Private memory of a lane."""
        return self.notes[".private_segment_fixed_size"]

    @property
    def static_lds_bytes(self) -> int:
        """LDS reserved by the code itself; a launch may add to it."""
        return self.notes[".group_segment_fixed_size"]

    @property
    def access(self) -> list[str | None]:
        """How each argument is used as far as the compiler knows: "read_only", "write_only", "read_write" or None."""
        return [argument.get(".actual_access") for argument in self.notes[".args"]]

    @functools.cached_property
    def code(self) -> "list[Instruction]":
        """Its instructions in order."""
        return disassemble(self.binary)

    @functools.cached_property
    def instructions(self) -> "Counter[str]":
        """How often each instruction occurs, by mnemonic in lower case."""
        return Counter(instruction.name for instruction in self.code)

    def loops(self) -> "list[list[Instruction]]":
        """Bodies of the innermost loops: what lies between a backward branch and its target, and holds no other."""
        spans = [(i.target, i.at) for i in self.code if i.target is not None and i.target <= i.at]
        inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
        return [[i for i in self.code if a <= i.at <= b] for a, b in inner]

    def count(self, pattern: str) -> int:
        """Instructions whose mnemonic matches the regular expression ``pattern`` whole."""
        compiled = re.compile(pattern)
        return sum(n for name, n in self.instructions.items() if compiled.fullmatch(name))


def _sections(binary: bytes) -> dict[str, bytes]:
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    size, number, names_at = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, offset + i * size) for i in range(number)]
    names = binary[headers[names_at][4] :]
    return {
        names[header[0] : names.index(b"\0", header[0])].decode(): binary[header[4] : header[4] + header[5]] for header in headers
    }


def kernels(binary: bytes) -> list[CodeObject]:
    """The kernels of an ELF file; none if it holds only data.

    Raises:
        ValueError: if it is no 64-bit ELF file.
    """
    import msgpack

    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("a code object is a 64-bit ELF file, got one that starts with " + binary[:5].hex())
    note = _sections(binary).get(".note", b"")
    at = note.find(_NOTE)
    if at < 0:
        return []
    (length,) = struct.unpack_from("<I", note, at - 8)
    metadata = msgpack.unpackb(note[at + len(_NOTE) : at + len(_NOTE) + length])
    return [CodeObject(binary, kernel[".name"], kernel) for kernel in metadata["amdhsa.kernels"]]


def disassemble(binary: bytes) -> list[Instruction]:
    """The code of an ELF file in order; mnemonics are in lower case.

    Raises:
        ValueError: on bytes that are no instruction.
    """
    from tinygrad.renderer.amd import decode_inst  # pyright: ignore[reportMissingImports]  # of the rocm extra

    code = _sections(binary)[".text"]
    found, at = [], 0
    while at < len(code):
        # 16 bytes hold the longest instruction.
        decoded = decode_inst(code[at : at + 16], "cdna")
        name, size = decoded.op_name.lower(), decoded.size()
        target = None
        if name == "s_branch" or name.startswith("s_cbranch"):
            (distance,) = struct.unpack_from("<h", code, at)
            target = at + size + 4 * distance
        found.append(Instruction(at, name, target))
        at += size
        if name == "s_endpgm" and not code[at:].strip(b"\0"):
            break
    return found
