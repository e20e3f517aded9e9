"""Whole models in numpy float64, from config.json and tensors by key: no cache, no absorption, nothing of the library.

Written from the facts of transformers 5.24.0's model code. Keys and values are expanded per head and every score is computed;
sparse attention masks. Slow, small and plain.
"""

import math
from typing import Any, NamedTuple

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


class LayerRecord(NamedTuple):
    """What a layer does to one sequence of T tokens."""

    c_kv: np.ndarray  # [T, R]
    k_rope: np.ndarray  # [T, P], in the order of the projection's pairs
    index_k: np.ndarray | None  # [T, d], half-split
    selected: np.ndarray | None  # bool [T, T]


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rope_settings(config: Config) -> tuple[np.ndarray, float, float]:
    """Frequencies, amplitude of cos and sin, and the factor on the softmax scale."""
    settings = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    kind = settings.get("rope_type", settings.get("type", "default"))
    dim, theta = config["qk_rope_head_dim"], settings.get("rope_theta", 10000.0)
    inv = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    if kind == "default":
        return inv, 1.0, 1.0
    factor = settings["factor"]
    original = settings.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def m(scale):
        return 0.1 * scale * math.log(factor) + 1

    def correction(beta):
        return dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(settings.get("beta_fast", 32))), 0)
    high = min(math.ceil(correction(settings.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    inv = inv / factor * ramp + inv * (1 - ramp)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    amplitude = m(mscale) / m(all_dim) if mscale and all_dim else m(1)
    return inv, amplitude, m(all_dim) ** 2 if all_dim else 1.0


def rotate(x, angles, amplitude, interleaved):
    """x [..., T, P] with pairs turned, in place of their inputs."""
    turns = np.exp(1j * angles) * amplitude
    half = x.shape[-1] // 2
    z = (x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]) * turns
    out = np.empty_like(x)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., :half], out[..., half:] = z.real, z.imag
    return out


def linear(tensors: Tensors, key: str, x):
    y = x @ tensors[key + ".weight"].T
    return y + tensors[key + ".bias"] if key + ".bias" in tensors else y


def mlp(tensors: Tensors, key: str, x):
    hidden = silu(linear(tensors, key + ".gate_proj", x)) * linear(tensors, key + ".up_proj", x)
    return linear(tensors, key + ".down_proj", hidden)


def route(config: Config, tensors: Tensors, key: str, x) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T, k] of the chosen experts and their weights."""
    v2 = config["model_type"] == "deepseek_v2"
    logits = x @ tensors[key + ".gate.weight"].T
    all_ids, all_weights = [], []
    for row in logits:
        if v2:
            score = choice = softmax(row)
            limited = config["topk_method"] == "group_limited_greedy"
        else:
            score = sigmoid(row)
            choice, limited = score + tensors[key + ".gate.e_score_correction_bias"], True
        if limited:
            groups = choice.reshape(config["n_group"], -1).copy()
            strength = groups.max(-1) if v2 else np.sort(groups, -1)[:, -2:].sum(-1)
            lost = np.argsort(strength)[: config["n_group"] - config["topk_group"]]
            groups[lost] = 0.0 if v2 else -np.inf
            choice = groups.reshape(-1)
        ids = np.argsort(choice)[-config["num_experts_per_tok"] :]
        weights = score[ids]
        if config["norm_topk_prob"] and not v2:
            weights = weights / (weights.sum() + 1e-20)
        all_ids.append(ids)
        all_weights.append(weights * config["routed_scaling_factor"])
    return np.array(all_ids), np.array(all_weights)


def moe(config: Config, tensors: Tensors, key: str, x):
    out = mlp(tensors, key + ".shared_experts", x) if config["n_shared_experts"] else np.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(*route(config, tensors, key, x), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            out[t] += weight * mlp(tensors, f"{key}.experts.{expert}", x[t])
    return out


def has_experts(config: Config, layer: int) -> bool:
    listed = config.get("mlp_layer_types")
    if listed and config["model_type"] not in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        return listed[layer] == "sparse"
    return layer >= (1 if config["model_type"] == "glm4_moe_lite" else config["first_k_dense_replace"])


def attention(config: Config, tensors: Tensors, key: str, x, angles, amplitude, scale_factor, selected, latent_eps):
    heads, R = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, T = config["qk_nope_head_dim"], config["qk_rope_head_dim"], len(x)
    always = config["model_type"] in ("deepseek_v2", "deepseek_v32", "glm_moe_dsa")
    interleaved = always or config.get("rope_interleave", True)
    if config.get("q_lora_rank") is None:
        latent, q = None, linear(tensors, key + ".q_proj", x)
    else:
        latent = rms_norm(linear(tensors, key + ".q_a_proj", x), tensors[key + ".q_a_layernorm.weight"], latent_eps)
        q = linear(tensors, key + ".q_b_proj", latent)
    q = q.reshape(T, heads, nope + rope).swapaxes(0, 1)
    kv = linear(tensors, key + ".kv_a_proj_with_mqa", x)
    c_kv = rms_norm(kv[:, :R], tensors[key + ".kv_a_layernorm.weight"], latent_eps)
    k_rope = rotate(kv[:, R:], angles, amplitude, interleaved)
    q_rope = rotate(q[..., nope:], angles, amplitude, interleaved)
    expanded = (c_kv @ tensors[key + ".kv_b_proj.weight"].T).reshape(T, heads, -1).swapaxes(0, 1)
    scores = q[..., :nope] @ expanded[..., :nope].swapaxes(1, 2) + q_rope @ k_rope.T
    scores = scores * (nope + rope) ** -0.5 * scale_factor
    visible = np.tril(np.ones((T, T), bool))
    index_k = None
    if key + ".indexer.wk.weight" in tensors:
        index_k, selected = select(config, tensors, key + ".indexer", x, latent, angles, amplitude)
    if selected is not None:
        visible = visible & selected
    p = softmax(np.where(visible, scores, -np.inf))
    out = (p @ expanded[..., nope:]).swapaxes(0, 1).reshape(T, -1)
    return linear(tensors, key + ".o_proj", out), LayerRecord(c_kv, k_rope, index_k, selected)


def select(config: Config, tensors: Tensors, key: str, x, latent, angles, amplitude):
    heads, width, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    T = len(x)
    interleaved = config["model_type"] == "glm_moe_dsa"
    q = (latent @ tensors[key + ".wq_b.weight"].T).reshape(T, heads, width).swapaxes(0, 1)
    k = layer_norm(x @ tensors[key + ".wk.weight"].T, tensors[key + ".k_norm.weight"], tensors[key + ".k_norm.bias"], 1e-6)

    def turn(y):
        turned = rotate(y[..., :rope], angles, amplitude, interleaved)
        if interleaved:
            turned = np.concatenate([turned[..., 0::2], turned[..., 1::2]], -1)
        return np.concatenate([turned, y[..., rope:]], -1)

    q, k = turn(q), turn(k)
    weights = x @ tensors[key + ".weights_proj.weight"].T
    scores = np.einsum("th,hts->ts", weights, np.maximum(q @ k.T, 0))
    selected = np.zeros((T, T), bool)
    for t in range(T):
        order = np.argsort(-scores[t, : t + 1], kind="stable")
        selected[t, order[: config["index_topk"]]] = True
    return k, selected


def run(config: Config, tensors: Tensors, ids, latent_eps: float = 1e-6) -> tuple[np.ndarray, list[LayerRecord]]:
    """Logits [T, V] of one sequence, and what each layer did."""
    tensors = {key: np.asarray(value, np.float64) for key, value in tensors.items()}
    eps = config["rms_norm_eps"]
    inv, amplitude, scale_factor = rope_settings(config)
    angles = np.arange(len(ids))[:, None] * inv
    x = tensors["model.embed_tokens.weight"][np.asarray(ids)]
    selected, records = None, []
    for layer in range(config["num_hidden_layers"]):
        key = f"model.layers.{layer}"
        normed = rms_norm(x, tensors[key + ".input_layernorm.weight"], eps)
        out, record = attention(config, tensors, key + ".self_attn", normed, angles, amplitude, scale_factor, selected, latent_eps)
        selected = record.selected
        records.append(record)
        x = x + out
        normed = rms_norm(x, tensors[key + ".post_attention_layernorm.weight"], eps)
        x = x + (moe if has_experts(config, layer) else mlp_of)(config, tensors, key + ".mlp", normed)
    x = rms_norm(x, tensors["model.norm.weight"], eps)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return x @ tensors[head + ".weight"].T, records


def mlp_of(config: Config, tensors: Tensors, key: str, x):
    del config
    return mlp(tensors, key, x)
