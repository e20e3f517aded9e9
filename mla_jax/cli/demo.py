"""``mla-jax demo``: a GLM-5-style checkpoint generating through the paged cache, and what each storage format costs."""

import argparse
import dataclasses
import pathlib
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
    # The model is tiny and each format is compiled for itself: on a CPU compiling is nearly all that the demo waits for.
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", unoptimised or jax.default_backend() == "cpu")
    try:
        return _run(args)
    finally:
        jax.config.update("jax_disable_most_optimizations", unoptimised)


def _run(args: argparse.Namespace) -> int:
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
        f"[bold]{model.spec.model_type}[/bold] from {folder}: {model.spec.num_layers} layers, "
        f"R={geometry.kv_lora_rank}, P={geometry.qk_rope_head_dim}, H={geometry.num_heads}, "
        f"top-k {geometry.indexer.topk if geometry.indexer else 'all'} of {len(tokens)} prompt tokens, "
        f"on {jax.devices()[0].device_kind}",
        highlight=False,
    )
    formats = [f for f in FORMATS if geometry.kv_lora_rank % 128 == 0 or not f.flags.get("nsa_kv_cache_store_fp8")]
    if len(formats) < len(FORMATS):
        console.print(f"packed rows are left out: they need kv_lora_rank % 128 == 0, this model has {geometry.kv_lora_rank}")

    results: list[tuple[Format, np.ndarray]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("float32: prefill and greedy decode", total=len(formats) + 1)
        (continuation,) = models.generate(
            model, [tokens], max_new_tokens=args.max_new_tokens, stop_ids=(), page_size=args.page_size, kv_cache_dtype="float32"
        )
        progress.advance(task)
        # One pass over prompt and continuation scores every format on the same text: after a first different byte two free
        # continuations could no longer be compared.
        text = jnp.asarray([tokens + continuation[:-1]], jnp.int32)
        for form in formats:
            progress.update(task, description=f"{form.label}: the same text")
            results.append((form, np.asarray(models.forward(model, text, page_size=args.page_size, **form.flags))[0]))
            progress.advance(task)

    reference = results[0][1]
    console.print(f"prompt     {_visible(tokens)}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"continued  {_visible(continuation)}", highlight=False, markup=False, soft_wrap=True)
    table = Table(title="one model, one text, every storage format")
    for column in ("format", "write path"):
        table.add_column(column, no_wrap=True)
    for column in ("bytes/token", "tokens/GiB", "error", "tokens agreeing"):
        table.add_column(column, justify="right")
    for form, logits in results:
        config = model.cache_config(num_pages=2, page_size=args.page_size, **form.flags)
        error = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
        agreeing = int((logits[len(tokens) - 1 :].argmax(axis=-1) == continuation).sum())
        table.add_row(
            form.label,
            config.write_path.name,
            f"{config.bytes_per_token:,}",
            f"{2**30 // config.bytes_per_token:,}",
            f"{error:.1e}" if form is not results[0][0] else "-",
            f"{agreeing}/{len(continuation)}",
        )
    console.print(table)
    console.print(
        "Bytes count latent rows and index keys of all layers. Error: ||a - b|| / ||b|| of the logits against the float32 cache. "
        "Tokens agreeing: how many bytes of the continuation stay the likeliest, given the same text before. Index keys are FP8 "
        "in every format but float32, so a changed top-k choice is part of both.",
        highlight=False,
    )
    return 0
