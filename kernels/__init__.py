"""Pallas kernels of `mla_jax`: arrays, a layout and a tuning in, arrays out.

The folder lies at the top of the repository but is the package `mla_jax.kernels`.
"""

# From the root of the repository a plain `import kernels` would find this folder and shadow the distribution that owns
# the name. A loud error is better than half of our package under a second name.
if __name__ == "kernels":
    raise ImportError("import this package as mla_jax.kernels")
