"""Trains the small GLM-5-shaped model of the accuracy check, on one GPU in minutes.

    python scripts/train_accuracy_model.py --out tests/data/accuracy --minutes 6
    python scripts/train_accuracy_model.py --out /tmp/model --smoke      # seconds on a CPU, learns nothing

The three stages of DeepSeek sparse attention (mla_jax.models.train) on the problems of accuracy_problems.py, answers only: dense,
the indexers' warm-up, sparse. bfloat16 products, float32 weights, AdamW, cosine schedules. Documents are made anew for each
step, so nothing is seen twice. The optimiser is spelled out below: it is twenty lines, and the script then needs no package that
the library does not. A stage ends after its steps or when its share of ``--minutes`` is used up, its schedule complete either way.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import accuracy_problems as problems
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mla_jax import models
from mla_jax.layers import MoE
from mla_jax.models import train

SHARD_BYTES = 3 * 2**20

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": problems.STOP,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 192,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 64,
    "intermediate_size": 512,
    "kv_lora_rank": 128,
    "max_position_embeddings": 4096,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 96,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 32,
    "vocab_size": problems.VOCAB_SIZE,
}

SMOKE: dict[str, Any] = {
    "hidden_size": 48,
    "index_topk": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One stage: its steps at most, the share of the time after which it ends, and its rates of learning."""

    stage: train.Stage
    steps: int
    time_share: float
    peak: float
    last: float
    warmup_steps: int


PLANS = (
    Plan("dense", 6000, 0.6, 2e-3, 3e-4, 300),
    Plan("dense_warmup", 500, 0.68, 2e-3, 5e-4, 20),
    Plan("sparse", 2500, 0.97, 6e-4, 1e-5, 50),
)

BETAS, EPSILON, WEIGHT_DECAY, CLIP = (0.9, 0.98), 1e-9, 0.05, 1.0
SOLVED = 0.998
"""The dense stage ends early once every task's share of solved problems is this large in three readings in a row."""


class Adam:
    """AdamW (arXiv 1711.05101) with clipped gradients, over a pytree; the indexers' gradients are clipped by themselves."""

    @staticmethod
    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)

    @staticmethod
    def update(params: Any, grads: Any, state: Any, rate: jax.Array, is_indexer: Any, stage: train.Stage) -> tuple[Any, Any]:
        """New parameters and state. Parameters that the stage does not train stay as they are, undecayed."""
        mean, square, count = state
        count = count + 1
        trained = {"dense": (False,), "dense_warmup": (True,), "sparse": (False, True)}[stage]
        factors = {}
        for group in trained:
            parts = [g for g, own in zip(jax.tree.leaves(grads), jax.tree.leaves(is_indexer), strict=True) if own == group]
            norm = jnp.sqrt(sum((jnp.sum(g * g) for g in parts), jnp.float32(0)))
            factors[group] = jnp.minimum(1.0, CLIP / (norm + 1e-6))
        b1, b2 = BETAS

        def leaf(p: Any, g: Any, m: Any, v: Any, own: bool) -> tuple[Any, Any, Any]:
            if own not in trained:
                return p, m, v
            g = g * factors[own]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            step = (m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + EPSILON)
            decay = WEIGHT_DECAY if p.ndim >= 2 else 0.0
            return p - rate * (step + decay * p), m, v

        leaves, treedef = jax.tree.flatten(params)
        others = [jax.tree.leaves(tree) for tree in (grads, mean, square, is_indexer)]
        new = [leaf(*parts) for parts in zip(leaves, *others, strict=True)]
        params, mean, square = (treedef.unflatten([parts[i] for parts in new]) for i in range(3))
        return params, (mean, square, count)


@functools.partial(jax.jit, static_argnames=("graphdef", "stage", "dtype"), donate_argnames=("params", "state"))
def run_steps(
    graphdef: Any, params: Any, state: Any, tokens: Any, masks: Any, rates: Any, *, stage: train.Stage, dtype: str
) -> Any:
    """Steps over documents [n, B, T]; parameters, optimiser's state, mean cross-entropy and KL, and the last step's ``correct``."""
    is_indexer = train.indexer_mask(params)

    def objective(params: Any, tokens: Any, mask: Any) -> Any:
        model = nnx.merge(graphdef, params)
        return train.loss(model, tokens, mask, stage=stage, balance_weight=0.01, dtype=dtype)

    def step(carry: Any, inputs: Any) -> Any:
        params, state, _ = carry
        tokens, mask, rate = inputs
        (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params, tokens.astype(jnp.int32), mask)
        params, state = Adam.update(params, grads, state, rate, is_indexer, stage)
        return (params, state, metrics.correct), (metrics.cross_entropy, metrics.indexer_kl)

    nothing = jnp.zeros(tokens.shape[1:], jnp.bool_)
    (params, state, correct), losses = jax.lax.scan(step, (params, state, nothing), (tokens, masks, rates))
    return params, state, jax.tree.map(jnp.mean, losses), correct


@functools.partial(jax.jit, static_argnames=("graphdef", "dtype"))
def read_correct(graphdef: Any, params: Any, tokens: Any, *, dtype: str) -> Any:
    """Which tokens of held-out documents [B, T] the sparse model predicts, given the right ones before."""
    model = nnx.merge(graphdef, params)
    return train.loss(model, tokens.astype(jnp.int32), stage="sparse", dtype=dtype)[1].correct


def initial_model(spec: models.ModelSpec, seed: int) -> models.CausalLM:
    """A random model whose stream begins as the tokens themselves: embeddings of order 1, and small steps from every layer.

    Matching a token with an earlier one, which recall needs, is learned far sooner than from the layers' own initial weights.
    """

    def scaled(path: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "embed_tokens" in name:
            return weight * spec.hidden_size**0.5
        if "o_proj" in name or "down" in name:
            return weight * (2 * spec.num_layers) ** -0.5
        return weight

    return jax.tree_util.tree_map_with_path(scaled, models.CausalLM(spec, dtype=jnp.float32, rngs=nnx.Rngs(seed)))


def rate_at(plan: Plan, step: int, progress: float) -> float:
    """Linear warm-up by steps, then a cosine by progress in [0, 1]."""
    cosine = plan.last + (plan.peak - plan.last) * 0.5 * (1 + np.cos(np.pi * min(progress, 1.0)))
    return float(cosine * min((step + 1) / plan.warmup_steps, 1.0))


def compile_steps(stage: train.Stage, args: argparse.Namespace, graphdef: Any, params: Any) -> Any:
    """:func:`run_steps` of a stage, compiled."""
    shape = (args.steps_per_call, args.batch, args.length)
    tokens, masks = jax.ShapeDtypeStruct(shape, jnp.uint8), jax.ShapeDtypeStruct(shape, jnp.bool_)
    rates = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    state = jax.eval_shape(Adam.init, params)
    return run_steps.lower(graphdef, params, state, tokens, masks, rates, stage=stage, dtype=args.dtype).compile()


def run_stage(plan: Plan, args: argparse.Namespace, rng: np.random.Generator, began: float, program: Any, params: Any) -> Any:
    """The parameters after a stage, and how many steps it took. ``program`` is a future of :func:`compile_steps`."""
    steps = program.result()
    limit, entered = began + 60 * args.minutes * plan.time_share, time.monotonic()
    state, done, readings = Adam.init(params), 0, 0
    per_call = args.steps_per_call
    while done < plan.steps and (time.monotonic() < limit or not done):
        documents = problems.make_documents(rng, per_call * args.batch, args.length, held_out=False)
        shape = (per_call, args.batch, args.length)
        elapsed = (time.monotonic() - entered) / max(limit - entered, 1e-9)
        rates = [rate_at(plan, done + i, max((done + i) / plan.steps, elapsed)) for i in range(per_call)]
        tokens, masks = documents.tokens.reshape(shape), documents.answer_mask().reshape(shape)
        params, state, losses, correct = steps(params, state, tokens, masks, np.asarray(rates, np.float32))
        done += per_call
        last = {f.name: getattr(documents, f.name)[-args.batch :] for f in dataclasses.fields(documents)}
        solved = problems.Documents(**last).solved(np.asarray(correct))
        cross_entropy, kl = (float(x) for x in losses)
        shares = " ".join(f"{name} {share:.3f}" for name, share in solved.items())
        clock = f"{time.monotonic() - began:6.1f} s {plan.stage} {done:5d}"
        print(f"{clock} rate {rates[-1]:.1e} loss {cross_entropy:.4f} kl {kl:.4f} {shares}", flush=True)
        readings = readings + 1 if min(solved.values()) >= SOLVED else 0
        if plan.stage == "dense" and readings == 3:
            break
    return params, done


def hub_tensors(model: models.CausalLM) -> dict[str, np.ndarray]:
    """The model's weights under the keys and in the shapes of released checkpoints: bfloat16, but for what decides choices."""

    def linear(key: str, layer: Any) -> dict[str, Any]:
        return {f"{key}.weight": layer.weight}

    def mlp(key: str, layer: Any) -> dict[str, Any]:
        parts = ("gate_proj", "up_proj", "down_proj")
        return {name: w for part in parts for name, w in linear(f"{key}.{part}", getattr(layer, part)).items()}

    tensors = {**linear("model.embed_tokens", model.embed_tokens), **linear("model.norm", model.norm)}
    if model.lm_head is not None:
        tensors |= linear("lm_head", model.lm_head)
    for i, block in enumerate(train.blocks(model)):
        key, attention = f"model.layers.{i}", block.self_attn
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors |= linear(f"{key}.{name}", getattr(block, name))
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj"):
            tensors |= linear(f"{key}.self_attn.{name}", getattr(attention, name))
        up = jnp.concatenate([attention.w_uk[...], attention.w_uv[...]], axis=1)
        tensors[f"{key}.self_attn.kv_b_proj.weight"] = up.reshape(-1, up.shape[-1])
        if attention.indexer is not None:
            for name in ("wq_b", "wk", "k_norm", "weights_proj"):
                tensors |= linear(f"{key}.self_attn.indexer.{name}", getattr(attention.indexer, name))
            tensors[f"{key}.self_attn.indexer.k_norm.bias"] = attention.indexer.k_norm.bias
        if not isinstance(block.mlp, MoE):
            tensors |= mlp(f"{key}.mlp", block.mlp)
            continue
        tensors |= linear(f"{key}.mlp.gate", block.mlp.gate)
        tensors[f"{key}.mlp.gate.e_score_correction_bias"] = block.mlp.gate.e_score_correction_bias
        tensors |= mlp(f"{key}.mlp.shared_experts", block.mlp.shared_experts)
        gate_up, down = block.mlp.experts.gate_up[...], block.mlp.experts.down[...]
        for j in range(len(down)):
            gate, up = jnp.split(gate_up[j], 2, axis=-1)
            for part, w in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[j])):
                tensors[f"{key}.mlp.experts.{j}.{part}.weight"] = w.T
    keeps = ("mlp.gate.weight", "e_score_correction_bias", "weights_proj.weight")
    arrays = {name: np.asarray(w[...]) for name, w in tensors.items()}
    return {name: a.astype(np.float32 if name.endswith(keeps) else jnp.bfloat16) for name, a in arrays.items()}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """config.json, and shards with their index as Hugging Face writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = np.ascontiguousarray(tensor)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # save_file leaves it readable by its owner alone
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": dict(sorted(weight_map.items()))}
    for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0, help="when to stop, compilation included (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256, help="documents a step (default: 256)")
    parser.add_argument("--length", type=int, default=256, help="tokens a document (default: 256)")
    parser.add_argument("--steps-per-call", type=int, default=25)
    parser.add_argument("--dtype", default="bfloat16", help="of products; float32 is faster on a CPU (default: bfloat16)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model for a few steps, to see that everything runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began = time.monotonic()
    config, plans = CONFIG, PLANS
    if args.smoke:
        config = {**CONFIG, **SMOKE}
        plans = tuple(dataclasses.replace(plan, steps=4, warmup_steps=2) for plan in PLANS)
        args.batch, args.length, args.steps_per_call = 4, 96, 2
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is all that takes time
    spec = models.parse_config(config)
    graphdef, params = nnx.split(initial_model(spec, args.seed))
    device = jax.devices()[0].device_kind
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters on {device}, jax {jax.__version__}", flush=True)
    rng = np.random.default_rng(args.seed)
    shapes = jax.eval_shape(lambda: params)
    # The later stages are compiled while the first one runs.
    pool = concurrent.futures.ThreadPoolExecutor(len(plans))
    programs = {plan.stage: pool.submit(compile_steps, plan.stage, args, graphdef, shapes) for plan in plans}
    taken = {}
    for plan in plans:
        params, taken[plan.stage] = run_stage(plan, args, rng, began, programs[plan.stage], params)
        steps = ", ".join(f"{stage} {n}" for stage, n in taken.items())
        provenance = (
            f"trained by scripts/train_accuracy_model.py of mla-jax on problems of scripts/accuracy_problems.py; seed {args.seed}, "
            f"{args.batch} documents of {args.length} tokens a step, steps: {steps}; {device}, jax {jax.__version__}"
        )
        tensors = hub_tensors(nnx.merge(graphdef, params))
        save(args.out, {**config, "mla_jax_provenance": provenance}, tensors)
        print(f"{args.out}: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()):,} bytes", flush=True)
    held_out = problems.make_documents(np.random.default_rng(args.seed + 1), args.batch, args.length, held_out=True)
    solved = held_out.solved(np.asarray(read_correct(graphdef, params, jnp.asarray(held_out.tokens), dtype=args.dtype)))
    print(f"{time.monotonic() - began:6.1f} s held out:", " ".join(f"{name} {share:.3f}" for name, share in solved.items()))


if __name__ == "__main__":
    main()
