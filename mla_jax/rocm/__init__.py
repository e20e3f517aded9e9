"""Proof for AMD chips on a machine without one: the ROCm XLA compiler's own code, read back and checked.

Rooms: ``chips`` (limits and published rates), ``stand_ins`` (empty ROCm libraries to load the compiler with), ``compiler`` (one
function compiled for one chip), ``program`` (what it launches, from the compiler's report), ``code_object`` (registers, LDS,
instructions of a kernel), ``cases`` (every kernel at the shapes of the presets), ``requirements`` (what its code has to keep),
``roofline`` (an estimate), ``save`` (code objects with all that a launch needs), ``sweep`` (choosing launch parameters).
"""

from mla_jax.rocm.chips import CHIPS as CHIPS
from mla_jax.rocm.chips import Chip as Chip
from mla_jax.rocm.compiler import RocmUnavailableError as RocmUnavailableError
from mla_jax.rocm.compiler import compile_for as compile_for
