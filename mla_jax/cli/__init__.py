"""The mla-jax command line."""
