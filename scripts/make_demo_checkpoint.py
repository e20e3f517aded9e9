"""Writes mla_jax/models/demo_checkpoint: a small GLM-5-style model over bytes, with random weights.

    python scripts/make_demo_checkpoint.py [folder]

The weights depend on the seed and on each tensor's name alone. They are scaled so that each part of the model moves the logits,
and the head's rows are such that the likeliest byte is nearly always printable.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mla_jax.models.loading import checkpoint_shapes
from mla_jax.models.spec import parse_config

SEED = 5
"""Of the first eight the one whose greedy text repeats itself least."""

FOLDER = Path(__file__).resolve().parent.parent / "mla_jax" / "models" / "demo_checkpoint"
PROVENANCE = f"random weights, seed {SEED}, made by scripts/make_demo_checkpoint.py of mla-jax; not trained on anything"

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 32,
    "intermediate_size": 96,
    "kv_lora_rank": 128,
    "max_position_embeddings": 8192,
    "mla_jax_provenance": PROVENANCE,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 20,
    "vocab_size": 256,
}


def make_tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 tensor of this name."""
    rng = np.random.default_rng([SEED, zlib.crc32(key.encode())])
    noise = rng.standard_normal(shape, dtype=np.float32)
    if key.endswith(("norm.bias", "e_score_correction_bias")):
        return 0.1 * noise
    if len(shape) == 1:
        return 1 + 0.1 * noise
    if key == "model.embed_tokens.weight":
        return noise
    weight = noise * np.float32(shape[1] ** -0.5)
    # Small steps on the residual stream, so that a changed top-k or expert choice does not drown what a storage format costs.
    if key.endswith("o_proj.weight"):
        weight *= 0.25
    if key.endswith("down_proj.weight"):
        weight *= 0.3
    if key == "lm_head.weight":
        printable = np.array([32 <= byte < 127 for byte in range(shape[0])])
        weight *= np.where(printable, 4, 1).astype(np.float32)[:, None]
    return weight


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: make_tensor(key, shape) for key, shape in checkpoint_shapes(parse_config(CONFIG)).items()}
    weights = folder / "model.safetensors"
    # What transformers asks for. One entry only: their order in the file changes from run to run.
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it readable by its owner alone
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    print(f"{folder}: {len(tensors)} tensors, {sum(t.size for t in tensors.values()):,} numbers")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
