"""Argument checks shared by the operations: everything that can be known while tracing, said before anything is computed."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from mla_jax.layout import CacheLayout

FLOAT_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


def floats(
    op: str, shapes: dict[str, tuple[int | str, ...]], *, dtypes: tuple[np.dtype, ...] = FLOAT_DTYPES, **arrays: Any
) -> tuple[Array, ...]:
    """The arrays as jax arrays, after checking dtype and shape.

    Args:
        op: the operation, for messages.
        shapes: for each array its expected shape; a letter binds a size and must agree everywhere.
        dtypes: what is accepted.
        **arrays: the arrays by name.

    Raises:
        TypeError: for another dtype.
        ValueError: for another shape.
    """
    out = []
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or jnp.dtype(dtype) not in dtypes:
            names = ", ".join(d.name for d in dtypes)
            raise TypeError(f"{op}: {name} must be an array of one of {names}, got {_kind(array)}")
        out.append(jnp.asarray(array))
    check_shapes(op, shapes, **arrays)
    return tuple(out)


def integers(op: str, name: str, array: Any, rank: int) -> Int32[Array, "..."]:
    """``array`` as int32; wider values are clipped to int32's range, which no valid slot, page or length leaves.

    Raises:
        TypeError: for anything but integers.
        ValueError: for another rank, or an eager numpy array or list with values beyond int32 while jax_enable_x64 is off (jax
            would silently wrap them).
    """
    if isinstance(array, list | tuple | int):
        array = np.asarray(array, np.int64) if np.size(array) else np.zeros(np.shape(array), np.int32)
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be an array of int32 (or int64 with jax_enable_x64), got {_kind(array)}")
    if np.ndim(array) != rank:
        raise ValueError(f"{op}: {name} must have {rank} axes, got {name}.shape={tuple(array.shape)}")
    info = np.iinfo(np.int32)
    if isinstance(array, np.ndarray) and array.size and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        low, high = int(array.min()), int(array.max())
        if low < info.min or high > info.max:
            raise ValueError(f"{op}: {name} holds values beyond int32 ({low} to {high}); enable jax_enable_x64 or keep them int32")
    array = jnp.asarray(array)
    if array.dtype.itemsize > 4 or array.dtype == jnp.uint32:
        low = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else info.min
        array = jnp.clip(array, jnp.asarray(low, array.dtype), jnp.asarray(info.max, array.dtype))
    return array.astype(jnp.int32)


def static_int(op: str, name: str, value: int, minimum: int) -> int:
    """``value`` as an int.

    Raises:
        ValueError: for anything but an int >= ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{op}: {name} must be an int >= {minimum}, got {value!r}")
    return int(value)


def float_dtype(op: str, name: str, value: Any, default: Any) -> np.dtype:
    """The dtype that ``value`` names, ``default`` for None.

    Raises:
        ValueError: for anything but float32, bfloat16 or float16.
    """
    try:
        dtype = jnp.dtype(default if value is None else value)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in FLOAT_DTYPES:
        raise ValueError(f"{op}: {name} must be None, float32, bfloat16 or float16, got {value!r}")
    return dtype


def instance(op: str, name: str, value: Any, expected: type) -> None:
    """Returns if ``value`` is an ``expected``.

    Raises:
        TypeError: otherwise.
    """
    if not isinstance(value, expected):
        raise TypeError(f"{op}: {name} must be a {expected.__name__}, got {type(value).__name__}")


def page_size(op: str, value: int) -> int:
    """``value`` as an int.

    Raises:
        ValueError: for anything but a power of two.
    """
    size = static_int(op, "page_size", value, 1)
    if size & (size - 1):
        raise ValueError(f"{op}: page_size must be a power of two, got {value}")
    return size


def check_shapes(op: str, shapes: dict[str, tuple[int | str, ...]], **arrays: Any) -> dict[str, int]:
    """Checks each array against its expected shape, one letter one size. Returns the sizes bound to letters.

    Raises:
        ValueError: naming the array, the shape it has and the one it should have.
    """
    bound: dict[str, int] = {}
    for name, array in arrays.items():
        got, want = tuple(np.shape(array)), shapes[name]
        if len(got) != len(want):
            # Before letters are bound to sizes, which would be those of other axes.
            letters = ", ".join(map(str, want))
            raise ValueError(f"{op}: expected {name} of shape [{letters}], {len(want)} axes, got {name}.shape={got}")
        agrees = True
        for size, expected in zip(got, want, strict=False):
            if isinstance(expected, str):
                expected = bound.setdefault(expected, size)
            agrees = agrees and size == expected
        if not agrees:
            spelled = ", ".join(f"{w}={bound[w]}" if isinstance(w, str) and w in bound else str(w) for w in want)
            raise ValueError(f"{op}: expected {name} of shape [{spelled}], got {name}.shape={got}")
    return bound


def layer_index(op: str, layer: Any, num_layers: int) -> Int32[Array, "1"]:
    """``layer`` as an int32 array of one element.

    Raises:
        ValueError: for a static layer out of range, or an array that is no scalar.
        TypeError: for anything that is neither an int nor an integer scalar.
    """
    if isinstance(layer, jax.Array):
        if not jnp.issubdtype(layer.dtype, jnp.integer):
            raise TypeError(f"{op}: layer must be an int or an int32 scalar, got {_kind(layer)}")
        if layer.shape != ():
            raise ValueError(f"{op}: layer must be a scalar, got {layer.shape=}")
        return integers(op, "layer", layer, 0).reshape(1)
    if isinstance(layer, bool):
        raise TypeError(f"{op}: layer must be an int or an int32 scalar, got {layer!r}")
    try:
        index = operator.index(layer)
    except TypeError:
        raise TypeError(f"{op}: layer must be an int or an int32 scalar, got {_kind(layer)}") from None
    if not 0 <= index < num_layers:
        raise ValueError(f"{op}: layer {index} is out of range, the cache has {num_layers} layers of this kind")
    return jnp.full((1,), index, jnp.int32)


def k_scale_array(op: str, k_scale: Any, layout: CacheLayout) -> Float[Array, ""] | None:
    """``k_scale`` as a float32 scalar, or None where nothing is scaled.

    Raises:
        ValueError: for packed and plain rows unless None or a static 1.0; for a static value that is not finite and positive;
            for an array that is no scalar.
        TypeError: for anything that is no number.
    """
    if k_scale is None:
        return None
    if isinstance(k_scale, jax.Array | np.ndarray):
        if not layout.is_raw:
            raise ValueError(f"{op}: k_scale applies to raw FP8 rows; {layout.name} takes None or a static 1.0, got an array")
        if not jnp.issubdtype(k_scale.dtype, jnp.floating):
            raise TypeError(f"{op}: k_scale must be a float or a float32 scalar, got {_kind(k_scale)}")
        if k_scale.shape != ():
            raise ValueError(f"{op}: k_scale must be a scalar, got {k_scale.shape=}")
    else:
        if isinstance(k_scale, bool) or not isinstance(k_scale, int | float | np.number):
            raise TypeError(f"{op}: k_scale must be a float or a float32 scalar, got {_kind(k_scale)}")
        with np.errstate(over="ignore", under="ignore"):
            value = float(np.float32(k_scale))
        if not 0 < value < math.inf:
            raise ValueError(f"{op}: k_scale must be finite and positive in float32, got {k_scale!r}")
        if value == 1.0:
            return None
        if not layout.is_raw:
            raise ValueError(f"{op}: k_scale applies to raw FP8 rows; {layout.name} takes None or a static 1.0, got {k_scale!r}")
    # Hidden from the compiler's constant folding, which would multiply by a rounded reciprocal instead of dividing.
    return jax.lax.optimization_barrier(jnp.asarray(k_scale, jnp.float32))


def _kind(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return f"{type(value).__name__} {value!r}" if dtype is None else f"{jnp.dtype(dtype).name}{list(shape or ())}"


def refuse_vmap(arrays: Any) -> Any:
    """The arrays as jax arrays; under vmap a clear error. A batched cache would be a copy of the pool for each element."""
    return _unbatched(jax.tree.map(jnp.asarray, arrays))


@jax.custom_batching.custom_vmap
def _unbatched(arrays: Any) -> Any:
    return arrays


@_unbatched.def_vmap
def _refuse(axis_size: int, in_batched: Any, arrays: Any) -> Any:
    del axis_size, in_batched, arrays
    raise NotImplementedError(
        "a PagedMLACache cannot be batched with vmap: each element would own a copy of the pool. Give all sequences to one call "
        "(slots, block_tables and lengths are already batched), or use lax.scan with the cache as its carry"
    )
