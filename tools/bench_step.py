"""Time and memory of a training step: sketches against dense Adam, with the FLOP floor beside it.

Both programs run in this one process on the same weights and batches, step for step in turn, so
that whatever else the machine does meets both. Dense is Megatron's DDP and DistributedOptimizer.

    python tools/bench_step.py [--json FILE] [--hidden 768 --layers 7 --rank 64 --threads 2 …]
    python -m torch.distributed.run --nproc-per-node 2 tools/bench_step.py [--tensor 2 …]

Ranks that are not needed for `--tensor` share the data; each then has as many micro-batches as one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_model import model_section

from megatron_logra import platform

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402

from megatron_logra import distributed, memory, planner  # noqa: E402
from megatron_logra.config import Config, config_from_dict  # noqa: E402
from megatron_logra.model.gpt import build_model, forward_head, transformer_config  # noqa: E402
from megatron_logra.optimizer.learner import Learner  # noqa: E402
from megatron_logra.optimizer.predicted_kl import ProbeBatch  # noqa: E402

PHASES = ("forward", "backward", "optimizer", "step")
PROBE_LIMIT = 0.05
"""Most of a step that its probe may take, with 8 sequences or more on each rank."""


def configuration(args: argparse.Namespace, kind: str) -> Config:
    """The benchmark's model: a GPT with grouped queries and SwiGLU."""
    return config_from_dict(
        {
            "model": model_section(args.layers, args.hidden, args.vocabulary),
            "optimizer": {"kind": kind, "master": args.master},
            "sketch": {"rank": args.rank},
            "parallel": {"tensor": args.tensor, "sequence": args.sequence_parallel},
            "step_control": {"mode": args.mode, "realised_kl_interval": 0},
            "train": {
                "precision": args.precision,
                "seq_length": args.sequence,
                "micro_batch_size": args.batch,
            },
        }
    )


class Program:
    """One of the two programs, with the times of its phases."""

    def __init__(self, args: argparse.Namespace, kind: str, pg: Any) -> None:
        self.args = args
        self.cfg = configuration(args, kind)
        tconfig, arguments = transformer_config(self.cfg)
        self.learner = Learner([build_model(tconfig, arguments, pg)], tconfig, self.cfg, pg)
        self.forget()

    def forget(self) -> None:
        """Begin with no times."""
        self.times: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "probe")}

    def step(self, batches: list[torch.Tensor]) -> None:
        """Forward and backward of all micro-batches, then the optimizer's step."""
        positions = torch.arange(self.args.sequence).expand_as(batches[0])
        forward_seconds = 0.0

        def forward_step(iterator: Any, model: torch.nn.Module) -> Any:
            nonlocal forward_seconds
            tokens = next(iterator)
            started = time.perf_counter()

            def head(hidden: torch.Tensor, logits_fn: Any) -> torch.Tensor:
                logits, targets = logits_fn(hidden[:-1]).float(), tokens[:, 1:].t().contiguous()
                group = self.learner.pg.tp
                return vocab_parallel_cross_entropy(logits, targets, 0.0, group).sum()

            loss = forward_head(model, tokens, positions, head)
            forward_seconds += time.perf_counter() - started
            count = torch.tensor(tokens[:, 1:].numel(), dtype=torch.int)
            return loss, lambda loss: (loss, count, {})

        begun = time.perf_counter()
        self.learner.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.learner.chunks,
            num_microbatches=len(batches),
            seq_length=self.args.sequence,
            micro_batch_size=self.args.batch,
            forward_only=False,
        )
        passed = time.perf_counter()
        probe = ProbeBatch(
            batches[0][: self.args.probe],
            positions[: self.args.probe],
            torch.ones_like(batches[0][: self.args.probe], dtype=torch.bool),
        )
        result = self.learner.step(probe if self.args.mode == "kl_budget" else None)
        assert result.applied, result.reason
        ended = time.perf_counter()
        self.times["probe"].append(result.seconds.get("probe", 0.0))
        for phase, seconds in zip(
            PHASES,
            (forward_seconds, passed - begun - forward_seconds, ended - passed, ended - begun),
            strict=True,
        ):
            self.times[phase].append(seconds)

    def medians(self) -> dict[str, float]:
        """Median seconds of each phase."""
        return {phase: statistics.median(times) for phase, times in self.times.items()}


def floor(cfg: Config) -> float:
    """(2 + r/d + r/k)/3 of the targets' FLOPs, and 1 for what both do: attention and the head."""
    tconfig, arguments = transformer_config(cfg)
    rank, dense, ours = cfg.sketch.rank, 0.0, 0.0
    for shape in planner.parameter_shapes(tconfig, arguments):
        if shape.name.rsplit(".", 1)[-1] in cfg.sketch.targets:
            d, k = shape.size
            dense += 3 * d * k
            ours += (2 + rank / d + rank / k) * d * k
    return ours / dense


def draw_seconds(learner: Learner, times: int = 10) -> float:
    """Median seconds to draw the projections of all targets."""
    assert learner.sketch is not None
    projections, found = learner.sketch.capture.projections, []
    for number in range(times):
        started = time.perf_counter()
        projections.redraw(number + 1000)
        found.append(time.perf_counter() - started)
    projections.redraw(learner.update)
    return statistics.median(found)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's, or `argv`'s."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--probe", type=int, default=1, help="responses of the KL probe")
    parser.add_argument("--mode", choices=("kl_budget", "lr"), default="lr")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--master", choices=("sharded", "replicated"), default="replicated")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark and print its table."""
    args = arguments()
    torch.set_num_threads(args.threads)
    pg = distributed.initialize(configuration(args, "logra").parallel, seed=0)
    programs = {
        name: Program(args, kind, pg) for name, kind in (("dense", "adam"), ("logra", "logra"))
    }
    parameters = sum(p.numel() for p in programs["dense"].learner.chunks[0].parameters())
    generator = torch.Generator().manual_seed(pg.dp.rank())
    shape = (args.batch, args.sequence)
    for number in range(args.steps + 1):
        batches = [
            torch.randint(0, args.vocabulary, shape, generator=generator)
            for _ in range(args.micro_batches)
        ]
        for program in programs.values():
            program.step(batches)
        if number == 0:  # warm-up
            for program in programs.values():
                program.forget()
    dense, logra = programs["dense"].medians(), programs["logra"].medians()
    sizes = {name: program.learner.memory_bytes() for name, program in programs.items()}
    sent = {name: sum(p.learner.comm_bytes().values()) for name, p in programs.items()}
    state = {
        n: s["gradients"] + s["optimizer"] + s["sketches"] + s["projections"]
        for n, s in sizes.items()
    }
    figures = {
        "parameters": parameters,
        "rank": args.rank,
        "precision": args.precision,
        "mode": args.mode,
        "threads": args.threads,
        "tokens_per_step": args.batch * args.sequence * args.micro_batches,
        "ranks": {"tensor": pg.tp.size(), "data": pg.dp.size()},
        "dense": dense | {"bytes": sizes["dense"], "comm": sent["dense"]},
        "logra": logra | {"bytes": sizes["logra"], "comm": sent["logra"]},
        "ratio": logra["step"] / dense["step"],
        "floor": floor(programs["logra"].cfg),
        "gradient_and_optimizer_bytes_saved": 1 - state["logra"] / state["dense"],
        "draw_seconds": draw_seconds(programs["logra"].learner),
        "peak_bytes": memory.peak_bytes(),
    }
    figures["draw_share_of_step"] = figures["draw_seconds"] / logra["step"]
    first = distributed.rank() == 0
    distributed.shutdown()
    if not first:
        return
    print_table(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def print_table(figures: dict[str, Any]) -> None:
    """The figures for people."""
    dense, logra = figures["dense"], figures["logra"]
    print(
        f"{figures['parameters'] / 1e6:.1f} M parameters, rank {figures['rank']}, "
        f"{figures['precision']}, mode {figures['mode']}, {figures['threads']} threads, "
        f"{figures['tokens_per_step']} tokens a step; medians"
    )
    print(f"{'':12}{'dense':>10}{'logra':>10}{'ratio':>8}")
    for phase in PHASES:
        print(
            f"{phase:12}{dense[phase]:>9.3f}s{logra[phase]:>9.3f}s"
            f"{logra[phase] / dense[phase]:>8.2f}"
        )
    if figures["mode"] == "kl_budget":
        seconds = logra["probe"]
        print(
            f"probe       {'':10}{seconds:>9.3f}s: {100 * seconds / logra['step']:.1f} % of a step "
            f"(limit: {100 * PROBE_LIMIT:.0f} %)"
        )
    print(f"FLOP floor of the sketched linears, (2 + r/d + r/k)/3: {figures['floor']:.3f}")
    for kind in (*memory.KINDS, "static"):
        a, b = dense["bytes"][kind], logra["bytes"][kind]
        print(f"{kind:12}{a / 2**20:>8.1f}Mi{b / 2**20:>8.1f}Mi")
    ranks, sent, dense_sent = figures["ranks"], logra["comm"], dense["comm"]
    if dense_sent:
        print(
            f"sent over {ranks['data']} data-parallel ranks a step: {sent / 2**20:.1f} MiB, "
            f"{100 * sent / dense_sent:.1f} % of dense's {dense_sent / 2**20:.1f} MiB"
        )
    print(
        "gradients, moments, sketches and projections: "
        f"{100 * figures['gradient_and_optimizer_bytes_saved']:.1f} % fewer bytes than dense"
    )
    print(
        f"drawing all projections: {1000 * figures['draw_seconds']:.1f} ms, "
        f"{100 * figures['draw_share_of_step']:.2f} % of a step"
    )


if __name__ == "__main__":
    main()
