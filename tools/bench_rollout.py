"""Tokens per second of the rollout engine, against a plain loop that has no cache.

Both get the same prompts and the same sampling noise, so in fp32 they return the same tokens; in
bf16 a rounded logit now and then tips a token over, and the rest of that response differs.

    python tools/bench_rollout.py --json rollout.json
    python tools/bench_rollout.py --hf DIR --precision bf16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_logra import platform

platform.install()

from megatron.core.models.gpt import GPTModel  # noqa: E402

from megatron_logra import distributed  # noqa: E402
from megatron_logra.config import ParallelConfig, SamplingConfig, config_from_dict  # noqa: E402
from megatron_logra.errors import UserError  # noqa: E402
from megatron_logra.model.gpt import (  # noqa: E402
    LogitsFn,
    build_model,
    forward_head,
    transformer_config,
)
from megatron_logra.rollout.dynamic_engine import DynamicEngine  # noqa: E402
from megatron_logra.rollout.sampling import noise, sample  # noqa: E402
from megatron_logra.rollout.static_engine import StaticEngine  # noqa: E402

SMALL_SPEC = {
    "num_layers": 6,
    "hidden_size": 256,
    "ffn_hidden_size": 704,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "vocab_size": 8192,
    "share_embeddings_and_output_weights": True,
}
SEED = 1
"""Seed of weights, prompts and noise."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = measure(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        distributed.shutdown()
    _print(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines and the plain loop; seconds, tokens per second and what bounds them."""
    model, pg = _model(options)
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.vocab_size
    prompts = torch.randint(
        vocabulary, (options.prompts, options.prompt_tokens), generator=generator
    ).tolist()
    sampling = SamplingConfig(max_tokens=options.tokens)
    engines = {
        cls: cls(
            [model],
            stop_ids=frozenset(),
            pad_id=0,
            max_sequence_length=options.prompt_tokens + options.tokens,
            batch_size=options.batch_size,
            pg=pg,
        )
        for cls in (StaticEngine, DynamicEngine)
    }

    def run(cls: type[StaticEngine] | type[DynamicEngine]) -> tuple[list[list[int]], float]:
        """Tokens of the responses, and seconds."""
        engine = engines[cls]
        # The first calls pay for code that is loaded and memory that is mapped.
        engine.generate(prompts[:1], 1, SamplingConfig(max_tokens=2), seed=SEED, update=0)
        start = time.perf_counter()
        responses = engine.generate(prompts, options.samples, sampling, seed=SEED, update=0)
        seconds = time.perf_counter() - start
        return [response.token_ids for group in responses for response in group], seconds

    dynamic_tokens, dynamic_seconds = run(DynamicEngine)
    with _timed_decoding(model) as forward_seconds:
        tokens, seconds = run(StaticEngine)
    count = sum(map(len, tokens))

    start = time.perf_counter()
    expected = plain_loop(model, prompts, options.samples, sampling, options.batch_size)
    plain_seconds = time.perf_counter() - start

    rows = min(options.batch_size, len(tokens))
    floors = _floors(model, rows)
    step = statistics.median(forward_seconds)
    return {
        "engine": {"seconds": seconds, "tokens": count, "tokens_per_s": count / seconds},
        "plain": {
            "seconds": plain_seconds,
            "tokens": sum(map(len, expected)),
            "tokens_per_s": count / plain_seconds,
        },
        "dynamic": {
            "seconds": dynamic_seconds,
            "tokens": sum(map(len, dynamic_tokens)),
            "tokens_per_s": count / dynamic_seconds,
            "same_responses": sum(map(list.__eq__, tokens, dynamic_tokens)) / len(tokens),
        },
        "ratio": plain_seconds / seconds,
        "same_responses": sum(map(list.__eq__, tokens, expected)) / len(tokens),
        "batch": rows,
        "decode_step_s": step,
        "decode_share": sum(forward_seconds) / seconds,
        "weight_products_s": floors["products"],
        "weight_read_s": floors["read"],
        "weight_bytes": floors["bytes"],
        "limit": "arithmetic" if floors["products"] > 2 * floors["read"] else "memory bandwidth",
        "precision": options.precision,
        "threads": torch.get_num_threads(),
    }


def plain_loop(
    model: GPTModel,
    prompts: list[list[int]],
    samples: int,
    sampling: SamplingConfig,
    batch_size: int,
) -> list[list[int]]:
    """Responses, sample by sample, from forward passes over the whole sequences.

    Only the last position's logits are computed. All prompts must have one length.
    """
    device = platform.device()
    prompt = torch.tensor(prompts, device=device).repeat_interleave(samples, dim=0)
    responses: list[list[int]] = []

    def last_logits(hidden: Tensor, logits: LogitsFn) -> Tensor:
        return logits(hidden[-1:])[0]

    model.eval()
    with torch.no_grad():
        for start in range(0, len(prompt), batch_size):
            sequences = prompt[start : start + batch_size]
            index = torch.arange(start, start + len(sequences), device=device)
            for position in range(sampling.max_tokens):
                places = torch.arange(sequences.size(1), device=device).expand_as(sequences)
                logits = forward_head(model, sequences, places, last_logits)
                uniforms = noise(
                    torch.full_like(index, position), index, seed=SEED, update=0, stream="rollout"
                )
                tokens, _ = sample(logits, uniforms, sampling)
                sequences = torch.cat([sequences, tokens[:, None]], dim=1)
            responses += sequences[:, prompt.size(1) :].tolist()
    return responses


@contextmanager
def _timed_decoding(model: GPTModel) -> Iterator[list[float]]:
    """Seconds of every forward pass over one token a row."""
    seconds: list[float] = []
    started = 0.0

    def before(_module: Any, _inputs: Any) -> None:
        nonlocal started
        _synchronize()
        started = time.perf_counter()

    def after(_module: Any, inputs: tuple[Tensor, ...], _output: Any) -> None:
        _synchronize()
        if inputs[0].size(1) == 1:
            seconds.append(time.perf_counter() - started)

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def _floors(model: GPTModel, rows: int) -> dict[str, float]:
    """What one decode step costs at least: its weight products alone, and reading the weights."""
    tied = model.share_embeddings_and_output_weights
    weights = [
        parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and (tied or not name.startswith("embedding."))
    ]
    inputs = [weight.new_zeros(rows, weight.size(1)) for weight in weights]

    def products() -> None:
        for weight, rows_in in zip(weights, inputs, strict=True):
            torch.nn.functional.linear(rows_in, weight)

    big = torch.ones(1 << 26, device=platform.device())  # 256 MiB, larger than the caches
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    bandwidth = big.numel() * big.element_size() / _seconds(lambda: big.sum())
    return {"products": _seconds(products), "read": size / bandwidth, "bytes": size}


def _seconds(function: Any, repeats: int = 5) -> float:
    """Median seconds of one call, after a first one."""
    times = []
    for _ in range(repeats + 1):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _model(options: argparse.Namespace) -> tuple[GPTModel, Any]:
    length = options.prompt_tokens + options.tokens
    source = {"hf": options.hf} if options.hf else {"spec": SMALL_SPEC, "tokenizer": "bytes"}
    config = config_from_dict(
        {
            "model": source,
            "train": {"precision": options.precision, "seq_length": max(2, length), "seed": SEED},
        }
    )
    pg = distributed.initialize(ParallelConfig(), seed=SEED)
    model = build_model(*transformer_config(config), pg)
    if options.hf:
        from megatron_logra.model.huggingface import load_hf_weights

        load_hf_weights(options.hf, model)
    return model.to(platform.device()), pg


def _print(result: dict[str, Any]) -> None:
    engine, plain, dynamic = result["engine"], result["plain"], result["dynamic"]
    print(f"static      {engine['tokens_per_s']:9.1f} tokens/s  ({engine['tokens']} tokens)")
    print(
        f"dynamic     {dynamic['tokens_per_s']:9.1f} tokens/s"
        f"    same responses: {dynamic['same_responses']:.0%}"
    )
    print(f"plain loop  {plain['tokens_per_s']:9.1f} tokens/s")
    print(f"ratio       {result['ratio']:9.2f}    same responses: {result['same_responses']:.0%}")
    print(
        f"decode step {result['decode_step_s'] * 1e3:9.1f} ms at batch {result['batch']} "
        f"({result['decode_share']:.0%} of the time), of which"
    )
    print(f"  weight products alone take {result['weight_products_s'] * 1e3:.1f} ms")
    print(
        f"  reading {result['weight_bytes'] / 1e6:.1f} MB of weights takes "
        f"{result['weight_read_s'] * 1e3:.1f} ms"
    )
    print(f"limit: {result['limit']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", metavar="DIR", help="Hugging Face model (default: small, random)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per response")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
