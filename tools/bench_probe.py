"""Time and memory of the KL probe, by both estimators, beside one forward of the same tokens.

    python tools/bench_probe.py [--json FILE] [--responses 4 --sequence 512 --hidden 768 …]

The limit is 2.2 forwards. Peak bytes are of tensors that live during the prediction, beyond what
there was before it, counted from the allocations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_model import model_section

from megatron_logra import platform

platform.install()

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from megatron_logra import distributed  # noqa: E402
from megatron_logra.config import ParallelConfig, config_from_dict  # noqa: E402
from megatron_logra.model.gpt import build_model, transformer_config  # noqa: E402
from megatron_logra.optimizer.learner import Learner  # noqa: E402
from megatron_logra.optimizer.predicted_kl import PredictedKL, ProbeBatch, _select  # noqa: E402

LIMIT = 2.2


def make_predictor(args: argparse.Namespace, pg: Any) -> PredictedKL:
    """The benchmark's model with a random direction in its proxies."""
    cfg = config_from_dict(
        {
            "model": model_section(args.layers, args.hidden, args.vocabulary),
            "sketch": {"rank": args.rank},
            "step_control": {"probe_max_tokens": args.max_tokens},
            "train": {
                "precision": args.precision,
                "seq_length": args.sequence,
                "micro_batch_size": args.rows,
            },
        }
    )
    tconfig, arguments = transformer_config(cfg)
    learner = Learner([build_model(tconfig, arguments, pg)], tconfig, cfg, pg)
    predictor = learner.predictor
    assert predictor is not None
    for target in predictor.capture.targets:
        scale = 6e-5 * float(target.weight.detach().norm()) / target.proxy.numel() ** 0.5
        torch.nn.init.normal_(target.proxy, std=scale)
    return predictor


def plain_forward(predictor: PredictedKL, probe: ProbeBatch) -> None:
    """One forward of the probe, with the logits of its positions."""
    for part in predictor._parts(probe):

        def head(hidden: torch.Tensor, logits_fn: Any, mask: torch.Tensor = part.mask) -> None:
            for positions in _select(hidden, mask).split(predictor.chunk):
                torch.softmax(logits_fn(positions).float(), -1)

        predictor._run(part, head)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that a call's tensors take at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in memory:
        held += change
        peak = max(peak, held)
    return peak


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="responses of one forward")
    parser.add_argument("--max-tokens", type=int, default=4096, help="positions of one forward")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pg = distributed.initialize(ParallelConfig(), seed=0)
    predictor = make_predictor(args, pg)
    shape = (args.responses, args.sequence)
    tokens = torch.randint(0, args.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(args.sequence).expand(shape)
    probe = ProbeBatch(tokens, positions, positions >= args.sequence // 2)
    with torch.no_grad():
        expected = predictor.predict(probe, 1e-6)
        calls: dict[str, Callable[[], Any]] = {
            "forward": lambda: plain_forward(predictor, probe),
            "forward_ad": lambda: predictor._by_forward_mode(probe),
            "finite_difference": lambda: predictor._by_differences(probe, expected),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.times):  # in turn, so that whatever else runs here meets all
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        peaks = {name: peak_bytes(call) for name, call in calls.items()}
    distributed.shutdown()
    figures = {
        "precision": args.precision,
        "tokens": tokens.numel(),
        "seconds": medians,
        "forwards": {name: value / medians["forward"] for name, value in medians.items()},
        "limit": LIMIT,
        "peak_bytes": peaks,
    }
    print(f"{tokens.numel()} tokens, {args.precision}, {args.threads} threads; medians")
    for name, value in medians.items():
        print(
            f"{name:20}{value:>8.3f} s{value / medians['forward']:>7.2f} forwards"
            f"{peaks[name] / 2**20:>9.1f} MiB"
        )
    print(f"limit: {LIMIT} forwards")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
