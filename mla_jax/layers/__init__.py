"""Flax NNX layers of MLA models."""
