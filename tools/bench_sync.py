"""Bringing a rollout worker to new weights: sketches against whole weights, bytes and seconds.

    python tools/bench_sync.py [--hidden 256 512 1024] [--layers 4] [--precision fp32] [--json FILE]

For each size, in one run: a real update of the trainer as a payload, decoded, checked and applied
by a receiver with all threads (two on two cores; copying has two processes); updates and whole
weights as payloads through files and through a process group of gloo, between two threads; and
between two processes over gloo, whole weights by plain broadcasts and by Megatron's
resharding. Beside it, what the arithmetic says for models that do not fit here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from bench_model import model_section

from megatron_logra import platform

platform.install()

from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.resharding import swap_model_weights  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import multiprocessing  # noqa: E402

from megatron_logra import distributed, launcher  # noqa: E402
from megatron_logra.config import Config, ParallelConfig, config_from_dict, load_config  # noqa: E402
from megatron_logra.model.gpt import build_chunks, transformer_config  # noqa: E402
from megatron_logra.optimizer.learner import Learner  # noqa: E402
from megatron_logra.planner import Layout  # noqa: E402
from megatron_logra.planner.shapes import Model  # noqa: E402
from megatron_logra.sync.files import FileSender  # noqa: E402
from megatron_logra.sync.follower import Follower  # noqa: E402
from megatron_logra.sync.payload import assemble  # noqa: E402
from megatron_logra.sync.process_groups import GroupSender  # noqa: E402
from megatron_logra.sync.receiver import Receiver  # noqa: E402
from megatron_logra.sync.sender import Sender  # noqa: E402

RECIPES = ("qwen2.5_7b", "gemma3_27b", "llama3_70b")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
REPEATS = 5


def configuration(hidden: int, layers: int, precision: str) -> Config:
    """A GPT of this width, with a sketch rank of a twelfth of it."""
    return config_from_dict(
        {
            "model": model_section(layers, hidden, 1024),
            "sketch": {"rank": hidden // 12},
            "step_control": {"mode": "lr", "lr": {"lr": 1e-3}},
            "rollout": {"placement": "separate", "sync": "sketch"},
            "train": {"precision": precision, "seq_length": 64},
        }
    )


def median(action: Callable[[], Any]) -> float:
    """Median seconds of a few calls."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def update(learner: Learner) -> None:
    """A real step from random sketches."""
    assert learner.sketch is not None
    learner.zero_grad()
    for target in learner.sketch.capture.targets:
        target.sketch.normal_()
    assert learner.step(None).applied


def measure(hidden: int, layers: int, precision: str, pg: ProcessGroupCollection) -> dict[str, Any]:
    """Bytes and seconds of one size within this process."""
    config = configuration(hidden, layers, precision)
    tconfig, arguments = transformer_config(config)
    learner = Learner(build_chunks(tconfig, arguments, pg), tconfig, config, pg)
    sender = Sender(learner, config.sketch, "bench", audit_interval=0)
    receiver = Receiver(build_chunks(tconfig, arguments, pg), config.sketch, pg)
    refresh = sender.refresh()
    assert refresh is not None
    receiver.refresh(assemble([refresh]))
    times: dict[str, list[float]] = {name: [] for name in ("encode", "decode", "apply", "redraw")}
    piece = b""
    for _ in range(REPEATS):
        update(learner)
        started = time.perf_counter()
        piece = sender.update() or b""
        times["encode"].append(time.perf_counter() - started)
        started = time.perf_counter()
        payload = assemble([piece])
        times["decode"].append(time.perf_counter() - started)
        started = time.perf_counter()
        receiver.apply(payload)  # draws A and applies
        times["apply"].append(time.perf_counter() - started)
        started = time.perf_counter()
        receiver.capture.projections.redraw(payload.header.draw)
        times["redraw"].append(time.perf_counter() - started)
    targets = learner.sketch.capture.targets if learner.sketch else []
    same = all(
        torch.equal(mine.weight, theirs.weight)
        for mine, theirs in zip(receiver.capture.targets, targets, strict=True)
    )
    assert same, "the receiver does not hold the trainer's weights"
    files = transport(FileSender, sender, receiver)
    groups = transport(GroupSender, sender, receiver)
    return {
        "hidden": hidden,
        "layers": layers,
        "rank": config.sketch.rank,
        "target_bytes": sum(t.weight.nbytes for t in targets),
        "model_bytes": sum(p.nbytes for chunk in learner.chunks for p in chunk.parameters()),
        "sketch_bytes": len(piece),
        "refresh_bytes": len(refresh),
        "sketch": {name: statistics.median(values) for name, values in times.items()},
        "sketch_files_s": files[0],
        "dense_files_s": files[1],
        "sketch_groups_s": groups[0],
        "dense_groups_s": groups[1],
    }


def transport(
    kind: type[FileSender] | type[GroupSender], sender: Sender, receiver: Receiver
) -> tuple[float, float]:
    """Median seconds from an update, and from whole weights, to a receiver that has them."""
    with tempfile.TemporaryDirectory() as directory:
        publisher = kind(Path(directory), sender)
        follower = Follower(Path(directory), receiver, "bench")
        publisher.start()
        assert follower.catch_up()
        updates = []
        for _ in range(REPEATS):
            update(sender.learner)
            started = time.perf_counter()
            publisher.publish()
            assert follower.catch_up(sender.learner.update)
            updates.append(time.perf_counter() - started)

        publisher.dense = True  # in the weights' type, and no updates

        def whole() -> None:
            publisher.start()
            receiver.run = None
            assert follower.catch_up()

        whole_s = median(whole)
        publisher.close()
        return statistics.median(updates), whole_s


def over_gloo(rank: int, port: int, sizes: list[tuple[int, int, str]], found: Any) -> None:
    """Whole weights from process 0 to process 1, for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    distributed.initialize(ParallelConfig(), 0)
    alone = [dist.new_group([number]) for number in range(2)]
    groups = ProcessGroupCollection()
    for field in fields(ProcessGroupCollection):
        setattr(groups, field.name, alone[rank])
    for size in sizes:
        config = configuration(*size)
        tconfig, arguments = transformer_config(config)
        (model,) = build_chunks(tconfig, arguments, groups)

        def broadcast(model: torch.nn.Module = model) -> None:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
            dist.barrier()

        def reshard(model: torch.nn.Module = model) -> None:
            swap_model_weights(model if rank == 0 else None, model if rank == 1 else None, "gloo")
            dist.barrier()

        broadcast()
        reshard()  # the first call makes its plan
        result = {"gloo_broadcast_s": median(broadcast), "resharding_s": median(reshard)}
        if rank == 0:
            found.append(result)
    dist.barrier()


def arithmetic(recipe: str) -> dict[str, float]:
    """What a recipe's payload, weights and projections weigh, and the operations to apply one."""
    config = load_config(EXAMPLES / recipe / "train.yaml")
    model = Model(config, Layout())
    targets = [s.size for s in model.stage(0, "logra").targets]
    weights = sum(s.numel for s in model.whole)
    r = config.sketch.rank
    return {
        "sketch_bytes": 2.0 * r * sum(d for d, _ in targets),
        "weights_bytes": 2.0 * weights,
        "projection_bytes": 4.0 * sum(k for _, k in targets) * -(-r // 32),
        "apply_flops": 2.0 * r * sum(d * k for d, k in targets),
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "hidden": lambda row: row["hidden"],
    "rank": lambda row: row["rank"],
    "weights MB": lambda row: row["target_bytes"] / 1e6,
    "sketch MB": lambda row: row["sketch_bytes"] / 1e6,
    "share": lambda row: row["sketch_bytes"] / row["target_bytes"],
    "encode ms": lambda row: 1e3 * row["sketch"]["encode"],
    "check ms": lambda row: 1e3 * row["sketch"]["decode"],
    "redraw ms": lambda row: 1e3 * row["sketch"]["redraw"],
    "apply ms": lambda row: 1e3 * row["sketch"]["apply"],
    "by files ms": lambda row: 1e3 * row["sketch_files_s"],
    "by groups ms": lambda row: 1e3 * row["sketch_groups_s"],
    "whole by files ms": lambda row: 1e3 * row["dense_files_s"],
    "whole by groups ms": lambda row: 1e3 * row["dense_groups_s"],
    "whole by gloo ms": lambda row: 1e3 * row["gloo_broadcast_s"],
    "resharding ms": lambda row: 1e3 * row["resharding_s"],
}
"""What is shown of a size; `apply` has `redraw` in it."""


def show(rows: list[dict[str, Any]]) -> None:
    """Print the measurements as a table."""
    print("  ".join(COLUMNS))
    for row in rows:
        print("  ".join(f"{value(row):>{len(name)}.4g}" for name, value in COLUMNS.items()))


def main() -> None:
    """Measure and print; with --json, write the figures."""
    parser = argparse.ArgumentParser(description="Sketches against whole weights.")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [(hidden, args.layers, args.precision) for hidden in args.hidden]
    pg = distributed.initialize(configuration(*sizes[0]).parallel, 0)
    rows = [measure(*size, pg) for size in sizes]
    with multiprocessing.Manager() as manager:
        found = manager.list()
        multiprocessing.spawn(over_gloo, (launcher.free_port(), sizes, found), nprocs=2)
        for row, result in zip(rows, found, strict=True):
            row |= result
    show(rows)
    print("\nby arithmetic: GB of a payload, of bf16 weights; MB of A; TFLOP to apply")
    paper = {recipe: arithmetic(recipe) for recipe in RECIPES}
    for recipe, a in paper.items():
        print(
            f"{recipe:>12} {a['sketch_bytes'] / 1e9:>6.2f} {a['weights_bytes'] / 1e9:>7.1f} "
            f"{a['projection_bytes'] / 1e6:>6.0f} {a['apply_flops'] / 1e12:>6.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"measured": rows, "arithmetic": paper}, indent=2) + "\n")


if __name__ == "__main__":
    main()
