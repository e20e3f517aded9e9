"""The Triton IR of a lowered kernel: what it loads from where, and the addresses its stores compute.

Nothing runs: the integer arithmetic of a store's address is evaluated in numpy at the width the IR gives it, so an offset that
would wrap on the chip wraps here.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mla_jax.kernels import backend


@dataclasses.dataclass(frozen=True)
class Store:
    """One ``tt.store``.

    Attributes:
        element: type of its elements ("i32", "bf16", ...).
        offset: type of its offsets ("i32" or "i64").
        first: byte addresses of its elements relative to the pool, negative where an offset wrapped.
        itemsize: bytes an element.
    """

    element: str
    offset: str
    first: np.ndarray
    itemsize: int

    @property
    def bytes(self) -> np.ndarray:
        """The address of every byte stored."""
        return np.ravel(self.first[:, None] + np.arange(self.itemsize))


@dataclasses.dataclass(frozen=True)
class Load:
    """One ``tt.load``.

    Attributes:
        shape: of the array that it loads from.
        element: type of its elements ("i32", "bf16", ...).
        offset: type of its offsets ("i32" or "i64").
        numbers: how many are loaded, () for one.
        masked: whether some may be left out.
    """

    shape: tuple[int, ...]
    element: str
    offset: str
    numbers: tuple[int, ...]
    masked: bool


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """The one kernel of a lowered program.

    Attributes:
        module: its IR.
        aliases: the ``output_operand_aliases`` of the custom call that holds it, as text.
        arguments: shapes of its arguments and then of its results.
    """

    module: Any
    aliases: str
    arguments: list[tuple[int, ...]]
    _context: Any

    def loads(self) -> list[Load]:
        """The loads, whatever control flow they stand in."""
        with self._context:
            return [self._load(op) for op in backend.operations(self.module.operation, "tt.load")]

    def _load(self, op: Any) -> Load:
        pointer = op.operands[0].owner
        while pointer.name != "tt.addptr":
            pointer = pointer.operands[0].owner
        base = _base(pointer)
        shape = tuple(int(n) for n in str(op.results[0].type).removeprefix("tensor<").split("x")[:-1])
        offset = _element(pointer.operands[1].type)
        return Load(self.arguments[base.arg_number], _element(op.results[0].type), offset, shape, len(op.operands) > 1)

    def stores(self, layer: int, slot: Callable[[int], int]) -> list[Store]:
        """The stores of the first program, with addresses for ``layer`` and for row t at ``slot(t)``.

        The write kernels take the layer as their first argument and the slots as their second.
        """
        with self._context:
            addresses = _Addresses(layer, slot)
            return [addresses.store(op) for op in backend.operations(self.module.operation, "tt.store")]


def triton_kernel(lowered: Any) -> TritonKernel:
    """The kernel that a lowering embeds."""
    from jaxlib.mlir import ir

    kernel = backend.kernel_ir(lowered)
    values = (*kernel.call.operands, *kernel.call.results)
    return TritonKernel(
        module=kernel.module,
        aliases=str(kernel.call.attributes["output_operand_aliases"]),
        arguments=[tuple(ir.RankedTensorType(value.type).shape) for value in values],
        _context=kernel.context,
    )


def _element(mlir_type: Any) -> str:
    """ "i32" of "tensor<128xi32>" and of "i32"."""
    return str(mlir_type).rsplit("x", 1)[-1].rstrip(">")


def _base(pointer: Any) -> Any:
    """The kernel's argument that an address is computed from."""
    base = pointer.operands[0]
    while not hasattr(base, "arg_number"):
        base = base.owner.operands[0]
    return base


def _int_attribute(op: Any, name: str) -> int:
    return int(str(op.attributes[name]).split(" :")[0])


_BINARY: dict[str, Any] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.shrsi": np.right_shift,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
}


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
"""Signed, in the order of MLIR's predicates."""


def _shape(mlir_type: Any) -> tuple[int, ...]:
    """(16, 64) of "tensor<16x64xi32>", () of "i32"."""
    text = str(mlir_type)
    return tuple(int(n) for n in text.split("<")[1].split("x")[:-1]) if text.startswith("tensor<") else ()


class _Addresses:
    """Evaluates integer values of a kernel for one layer and one choice of slots."""

    def __init__(self, layer: int, slot: Callable[[int], int]) -> None:
        self.layer, self.slot = layer, slot
        self.known: dict[Any, np.ndarray] = {}

    def store(self, op: Any) -> Store:
        pointer = op.operands[0].owner
        assert pointer.name == "tt.addptr"
        element = _element(op.operands[1].type)
        itemsize = int(element.lstrip("bfi")) // 8
        offsets = np.ravel(self.value(pointer.operands[1])).astype(np.int64)
        if len(op.operands) > 2:
            offsets = offsets[np.ravel(self.value(op.operands[2]))]
        return Store(element, _element(pointer.operands[1].type), offsets * itemsize, itemsize)

    def value(self, value: Any) -> np.ndarray:
        if value not in self.known:
            self.known[value] = self._compute(value)
        return self.known[value]

    def _compute(self, value: Any) -> np.ndarray:
        op = value.owner
        width = _element(value.type).removeprefix("i")
        dtype = np.dtype(bool if width == "1" else f"int{width}")
        match op.name:
            case "arith.constant":
                number = re.search(r"-?\d+|true|false", str(op.attributes["value"]))
                assert number is not None
                known = {"true": 1, "false": 0}
                filled = known[number[0]] if number[0] in known else int(number[0])
                return np.broadcast_to(np.asarray(filled).astype(dtype), _shape(value.type))
            case "tt.get_program_id":
                return np.zeros((), dtype)
            case "tt.make_range":
                return np.arange(_int_attribute(op, "start"), _int_attribute(op, "end"), dtype=dtype)
            case "tt.load":
                pointer = op.operands[0].owner
                argument = _base(pointer).arg_number
                assert argument in (0, 1), "only the layer and the slots may enter an address"
                rows = self.value(pointer.operands[1])
                return np.asarray(np.full(rows.shape, self.layer) if argument == 0 else np.vectorize(self.slot)(rows), dtype)
        inputs = [self.value(operand) for operand in op.operands]
        match op.name:
            case "tt.splat" | "tt.broadcast":
                return np.broadcast_to(inputs[0], _shape(value.type))
            case "tt.expand_dims":
                return np.expand_dims(inputs[0], _int_attribute(op, "axis"))
            case "arith.extui":
                return inputs[0].view(f"uint{8 * inputs[0].dtype.itemsize}").astype(dtype)
            case "arith.extsi":
                return inputs[0].astype(dtype)
            case "arith.cmpi":
                return _COMPARISONS[_int_attribute(op, "predicate")](*inputs)
            case "arith.select":
                return np.where(*inputs)
        with np.errstate(over="ignore"):
            return _BINARY[op.name](*inputs, dtype=dtype)
