"""Benchmarks and on-device checks of the kernels, on one list of cases; ``mla-jax bench`` runs them and writes JSON."""
