"""Models: checkpoints to Flax modules."""
