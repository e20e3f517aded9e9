"""The one seam to Pallas' Triton lowering, the only Pallas route to ROCm. A successor replaces this file.

Kernels receive references and use ``program_id``, ``when`` and ``span`` from here; nothing else in the library imports
``jax.experimental.pallas``. JAX deprecates this lowering (0.11). Where it is gone, :func:`require` says so and the dispatch of each
operation takes XLA: scatters with unique indices, attention a chunk at a time.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as pallas_triton
except ImportError:  # a JAX without this lowering; interpret mode needs none
    pallas_triton: Any = None

from mla_jax.devices import Target

program_id = pl.program_id
when = pl.when
span = pl.ds


def missing_lowering() -> str | None:
    """Why no kernel can be lowered for a GPU by this JAX, or None."""
    return f"JAX {jax.__version__} has no Triton lowering of Pallas" if pallas_triton is None else None


def load(ref: Any, index: tuple[Any, ...], mask: Any, other: Any, *, interpret: bool) -> Any:
    """``ref[index]`` where ``mask`` (broadcast to the result) holds, ``other`` elsewhere; no address is touched there.

    Interpret mode knows no masked gather: it loads everything, so indices must be in range everywhere.
    """
    if interpret:
        return jnp.where(mask, ref[index], other)
    return pallas_triton.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, index: tuple[Any, ...], values: Any, mask: Any) -> None:
    """``ref[index] = values`` where ``mask`` (broadcast to the values) holds. Interpret mode knows no such store."""
    pallas_triton.store(ref.at[index], values, mask=jnp.broadcast_to(mask, values.shape))


def assembly(text: str, constraints: str, pack: int, out: Any, *args: Any) -> Any:
    """One piece of PTX for every ``pack`` elements of ``args``. It cannot be interpreted and binds a kernel to one vendor.

    One result only: the lowering of several is broken in JAX 0.12.
    """
    (result,) = pallas_triton.elementwise_inline_asm(text, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[out])
    return result


def require(op: str, target: Target) -> bool:
    """Whether a kernel for ``target`` is interpreted.

    Raises:
        NotImplementedError: where neither the Triton lowering nor interpret mode applies.
    """
    if target.backend == "cpu":
        return True
    if not target.is_gpu:
        raise NotImplementedError(f"{op}: Pallas' Triton lowering serves CUDA and ROCm, not {target.backend}")
    if (missing := missing_lowering()) is not None:
        raise NotImplementedError(f"{op}: {missing}")
    return False


def require_addressable(op: str, pool: Any) -> None:
    """Refuses pools of single bytes past 2 GiB: the lowering offsets them with signed 32-bit elements up to 4 GiB.

    Such pools exist only where a row has an odd number of bytes; all others are words of 2 or 4 bytes, which are addressed
    correctly at every size.

    Raises:
        NotImplementedError: the XLA implementation has no such limit and takes over.
    """
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        raise NotImplementedError(
            f"{op}: Pallas' Triton lowering addresses pools of single bytes between 2 and 4 GiB wrongly, "
            f"got {pool.size} bytes of {pool.dtype}"
        )


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    aliases: Mapping[int, int],
    num_warps: int,
    num_stages: int = 1,
    interpret: bool,
) -> Callable[..., Any]:
    """``pl.pallas_call`` over whole arrays: the kernel indexes them itself, so pools of any rank and size stay in place.

    Triton parameters are always given: JAX 0.10 would otherwise choose Mosaic GPU, which refuses ROCm.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases),
        compiler_params=None if interpret else pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


def abstract_gpu(arch: str) -> jax.sharding.AbstractMesh:
    """A mesh without devices that stands for one GPU ("gfx942", "gfx950", "sm_90"), for lowering where there is none."""
    is_amd = arch.startswith("gfx")
    device = jax.sharding.AbstractDevice(
        device_kind=arch if is_amd else "NVIDIA H200", num_cores=None, platform="rocm" if is_amd else "cuda"
    )
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


def lower(fn: Callable[..., Any], arch: str, *args: Any, donate_argnums: int | Sequence[int] = ()) -> Any:
    """Lowers ``fn`` for ``arch`` on a machine without that chip; the result's ``as_text()`` holds the kernel."""
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    with jax.sharding.use_abstract_mesh(abstract_gpu(arch)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Pallas Triton.*", category=DeprecationWarning)
        return jax.jit(fn, donate_argnums=donate_argnums).trace(*args).lower(lowering_platforms=(platform,))


@dataclasses.dataclass(frozen=True, eq=False)
class KernelIR:
    """A kernel in Triton's IR.

    Attributes:
        module: the MLIR module; its text is ``str(module)``.
        call: the custom call that holds it, with operands, results and aliases.
        context: of the module; operations on it happen within.
    """

    module: Any
    call: Any
    context: Any


def kernel_ir(lowered: Any) -> KernelIR:
    """The one kernel of a lowered program, from the custom call that embeds it.

    Raises:
        ValueError: for a program of no kernel or several.
    """
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    calls = [
        op
        for op in operations(lowered.compiler_ir().operation, "stablehlo.custom_call")
        if "triton" in str(op.attributes["call_target_name"])
    ]
    if len(calls) != 1:
        raise ValueError(f"expected a program with one Triton kernel, got {len(calls)}")
    code = ir.StringAttr(ir.DictAttr(calls[0].attributes["mhlo.backend_config"])["ir"]).value_bytes
    context = ir.Context()
    with context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        return KernelIR(module=ir.Module.parse(code), call=calls[0], context=context)


def operations(operation: Any, name: str) -> list[Any]:
    """The MLIR operations called ``name`` within another, in order, those of nested regions included."""
    found = []
    for region in operation.regions:
        for block in region:
            for op in block:
                if op.operation.name == name:
                    found.append(op.operation)
                found += operations(op.operation, name)
    return found
