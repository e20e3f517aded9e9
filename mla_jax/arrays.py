"""The array type that operations accept: jax arrays, traced or not, and numpy arrays."""

import jax
import numpy as np

ArrayIn = jax.Array | np.ndarray
