"""Choosing an implementation: by name, or the best that can. Decided while tracing, from static facts alone."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from mla_jax.devices import Target

Implementation = Literal["xla", "pallas", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas", "mosaic_gpu")

Result = TypeVar("Result")


def _order(target: Target) -> tuple[Implementation, ...]:
    """Best first. On a CPU Pallas means interpret mode, which is for tests."""
    return ("mosaic_gpu", "pallas", "xla") if target.is_gpu else ("xla", "pallas", "mosaic_gpu")


def check_implementation(op: str, implementation: str | None) -> None:
    """Returns if ``implementation`` is None or a name that some operation may have.

    Raises:
        ValueError: otherwise.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def dispatch(
    op: str,
    implementation: str | None,
    target: Target,
    choices: Mapping[Implementation, Callable[[], Result]],
) -> Result:
    """Calls one of ``choices``; each raises NotImplementedError with its reason where it cannot.

    Args:
        op: name of the operation, for messages.
        implementation: a name, or None for the best that can.
        target: the device the call is lowered for.
        choices: the implementations the operation has.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: if the named implementation cannot.
        ExceptionGroup: of every reason, if None was asked and none can.
    """
    check_implementation(op, implementation)

    def attempt(name: Any) -> Result:
        if name not in choices:
            raise NotImplementedError(f"{op}: there is no {name} implementation; it has {', '.join(choices)}")
        return choices[name]()

    if implementation is not None:
        return attempt(implementation)
    reasons: list[Exception] = []
    for name in _order(target):
        try:
            return attempt(name)
        except NotImplementedError as reason:
            reasons.append(reason)
    raise ExceptionGroup(f"{op}: no implementation can run on {target.backend}", reasons)
