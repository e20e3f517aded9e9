"""The demo checkpoint that ships with the package."""

from pathlib import Path


def demo_checkpoint() -> Path:
    """Folder of a small GLM-5-style model over bytes with random weights, for trying things out on a CPU.

    Its README.md says what it is. ``list(text.encode())`` is a prompt.

    Returns:
        The folder, inside the installed package.

    Example:
        >>> from mla_jax import models
        >>> sorted(path.name for path in models.demo_checkpoint().iterdir())
        ['README.md', 'config.json', 'model.safetensors']
    """
    return Path(__file__).parent / "demo_checkpoint"
