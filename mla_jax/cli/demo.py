"""``mla-jax demo``: a GLM-5-style checkpoint generating through the paged cache, and what each storage format costs."""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NAME = "demo"
HELP = "generate with a GLM-5-style checkpoint through the paged cache and compare the storage formats (runs on a CPU)"

PROMPT = "Multi-head latent attention stores one small vector for each token, shared by all heads."


@dataclasses.dataclass(frozen=True)
class Format:
    """One storage format: a label and the flags that select it."""

    label: str
    flags: dict[str, Any]


FORMATS = (
    Format("float32", {"kv_cache_dtype": "float32"}),
    Format("bfloat16", {"kv_cache_dtype": "bfloat16"}),
    Format("raw e4m3fn", {"kv_cache_dtype": "fp8_e4m3", "platform": "cuda"}),
    Format("raw e4m3fnuz", {"kv_cache_dtype": "fp8_e4m3", "platform": "gfx942"}),
    Format("packed pow2", {"nsa_kv_cache_store_fp8": True, "scale_mode": "pow2"}),
    Format("packed fp32", {"nsa_kv_cache_store_fp8": True, "scale_mode": "fp32"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="prompt text, one token a byte")
    parser.add_argument(
        "--model", type=pathlib.Path, metavar="FOLDER", help="a glm_moe_dsa checkpoint folder (default: the packaged one)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens to generate (default: 32)")
    parser.add_argument("--page-size", type=int, default=16, metavar="S", help="tokens a page, a power of two (default: 16)")


def _visible(ids: list[int]) -> str:
    """Bytes as text; those that are no printable ASCII as escapes."""
    return "".join(chr(i) if 32 <= i < 127 else f"\\x{i:02x}" for i in ids)


def run(args: argparse.Namespace) -> int:
    from mla_jax import models  # flax takes seconds to import, which the other commands can do without

    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    tokens = list(args.prompt.encode())
    if not tokens:
        raise ValueError("the prompt is empty")
    console = Console()
    folder = args.model or models.demo_checkpoint()
    model = models.from_pretrained(folder)
    vocab = model.spec.vocab_size
    if vocab < 256:
        raise ValueError(f"the demo writes one token a byte and needs a vocabulary of 256, {folder} has {vocab}")
    geometry = model.cache_config(num_pages=2).geometry
    console.print(
        f"[bold]{model.spec.model_type}[/bold] from {folder}: {model.spec.num_hidden_layers} layers, "
        f"R={geometry.kv_lora_rank}, P={geometry.qk_rope_head_dim}, H={geometry.num_heads}, "
        f"top-k {geometry.indexer.topk if geometry.indexer else 'all'} of {len(tokens)} prompt tokens, "
        f"on {jax.devices()[0].device_kind}",
        highlight=False,
    )
    formats = [f for f in FORMATS if geometry.kv_lora_rank % 128 == 0 or not f.flags.get("nsa_kv_cache_store_fp8")]
    if len(formats) < len(FORMATS):
        console.print(f"packed rows are left out: they need kv_lora_rank % 128 == 0, this model has {geometry.kv_lora_rank}")

    prompt = jnp.asarray([tokens], jnp.int32)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("formats", total=len(formats))
        for form in formats:
            progress.update(task, description=f"{form.label}: prefill")
            logits = np.asarray(models.forward(model, prompt, page_size=args.page_size, **form.flags))
            progress.update(task, description=f"{form.label}: decode")
            began = time.perf_counter()
            (ids,) = models.generate(
                model, [tokens], max_new_tokens=args.max_new_tokens, stop_ids=(), page_size=args.page_size, **form.flags
            )
            results.append((form, logits, ids, time.perf_counter() - began))
            progress.advance(task)

    _, reference, reference_ids, _ = results[0]
    console.print(f"prompt     {_visible(tokens)}", highlight=False, markup=False)
    console.print(f"continued  {_visible(reference_ids)}", highlight=False, markup=False)
    table = Table(title="one model, one prompt, every storage format")
    for column in ("format", "write path"):
        table.add_column(column)
    for column in ("bytes/token", "tokens/GiB", "logits error", "tokens agreeing"):
        table.add_column(column, justify="right")
    for form, logits, ids, _ in results:
        config = model.cache_config(num_pages=2, page_size=args.page_size, **form.flags)
        error = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
        agreeing = sum(a == b for a, b in zip(ids, reference_ids, strict=False))
        table.add_row(
            form.label,
            config.write_path.name,
            f"{config.bytes_per_token:,}",
            f"{2**30 // config.bytes_per_token:,}",
            f"{error:.1e}" if form is not results[0][0] else "-",
            f"{agreeing}/{len(reference_ids)}",
        )
    console.print(table)
    console.print(
        "Bytes count latent rows and index keys of all layers. The error is ||a - b|| / ||b|| of the prompt's logits against the "
        "float32 cache; index keys are FP8 in every other format, so a changed top-k choice is part of it.",
        highlight=False,
    )
    return 0
