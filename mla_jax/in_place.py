"""Proof that a function updates its caches in place, from what the compiler allocated."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mla_jax.cache import PagedMLACache


def assert_in_place(
    fn: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = (), max_temp_bytes: int = 2**20
) -> None:
    """Compiles ``fn(*args)`` with ``donate_argnums`` and checks that no cache is copied. Runs nothing and consumes nothing.

    Args:
        fn: the function to compile; it takes and returns caches.
        *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
        donate_argnums: as for ``jax.jit``.
        max_temp_bytes: bound on the temporaries of the compiled program, in bytes.

    Raises:
        AssertionError: unless every byte of every cache in ``args`` is aliased to an output and the temporaries stay below
            ``max_temp_bytes``. An undonated cache fails.
        ValueError: if no argument holds a cache.

    Example:
        >>> import jax.numpy as jnp, mla_jax as mla
        >>> config = mla.CacheConfig(geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=3, page_size=4, platform="cpu")
        >>> rows = jnp.array([4, 5]), jnp.ones((2, 512)), jnp.ones((2, 64))
        >>> mla.assert_in_place(lambda cache: mla.write_kv(cache, 0, *rows), mla.init_cache(config), donate_argnums=0)
    """
    leaves, in_cache = [], []
    for arg in args:
        for node in jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, PagedMLACache)):
            pools = jax.tree.leaves(node)
            leaves += pools
            in_cache += [isinstance(node, PagedMLACache)] * len(pools)
    if not any(in_cache):
        raise ValueError("assert_in_place: none of the arguments holds a PagedMLACache")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, args)
    # Unused arguments are kept so that the program's parameters count as the leaves do.
    lowered = jax.jit(fn, donate_argnums=donate_argnums, keep_unused=True).lower(*shapes)
    compiled = lowered.compile()
    aliased = _aliased_parameters(compiled.as_text() or "")
    copied = [
        (tuple(x.shape), str(x.dtype), x.size * x.dtype.itemsize)
        for i, (x, is_pool) in enumerate(zip(leaves, in_cache, strict=True))
        if is_pool and x.size and i not in aliased
    ]
    assert not copied, (
        f"not in place: pools (shape, dtype, bytes) {copied} are aliased to no output; "
        f"is the cache donated ({donate_argnums=}) and returned?"
    )
    memory: Any = compiled.memory_analysis()
    pool_bytes = sum(x.size * x.dtype.itemsize for x, is_pool in zip(leaves, in_cache, strict=True) if is_pool)
    assert memory.alias_size_in_bytes >= pool_bytes, (
        f"not in place: {memory.alias_size_in_bytes} bytes are aliased, the caches have {pool_bytes}"
    )
    assert memory.temp_size_in_bytes < max_temp_bytes, (
        f"not in place: {memory.temp_size_in_bytes} bytes of temporaries for caches of {pool_bytes} bytes, "
        f"allowed are less than {max_temp_bytes}"
    )


def _aliased_parameters(hlo: str) -> set[int]:
    """Numbers of the entry parameters that the compiled module aliases to an output."""
    header = hlo.split("\n", 1)[0]
    start = header.find("input_output_alias={")
    if start < 0:
        return set()
    return {int(n) for n in re.findall(r"\}?: \((\d+), ", header[start:].split("entry_computation_layout")[0])}
