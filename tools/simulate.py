"""Simulated step times for 8 to 4,096 GPUs, and a check of the model against measured steps.

    python tools/simulate.py scale CONFIG [KEY=VALUE …] --hardware H100 --ranks 8,64,512,4096 \\
        [--growing] [--json FILE] [--plot FILE]
    python tools/simulate.py check [--steps 7]

`scale` holds the global batch, or with --growing the sequences of a replica. `check` runs
tools/bench_step.py: two constants of this machine (its rate of computation and that of its memory)
are fitted to dense Adam at one size; all other times are predicted with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_logra import platform

platform.quieten()

from megatron_logra.config import Config, load_config  # noqa: E402
from megatron_logra.errors import EXIT_USER_ERROR, UserError  # noqa: E402
from megatron_logra.planner.hardware import TABLE, Efficiency, Hardware  # noqa: E402
from megatron_logra.planner.shapes import Kind, layout_of  # noqa: E402
from megatron_logra.planner.simulate import Simulated, simulate  # noqa: E402

KINDS: tuple[Kind, Kind] = ("adam", "logra")
PARTS = {
    "compute": ("forward", "backward"),
    "bubble": ("bubble", "pipeline"),
    "tensor": ("tensor", "context"),
    "data": ("reduce", "gather"),
    "optimizer": ("optimizer",),
    "probe": ("probe",),
}
"""Parts of a training step as they are shown."""


def with_batch(cfg: Config, prompts: int) -> Config:
    """The configuration with another number of prompts a step."""
    return cfg.model_copy(
        update={"train": cfg.train.model_copy(update={"prompts_per_step": prompts})}
    )


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate all numbers of ranks."""
    cfg = load_config(args.config, args.overrides)
    hardware, efficiency = TABLE[args.hardware], Efficiency()
    first = layout_of(cfg, args.ranks[0]).data
    rows = []
    for ranks in args.ranks:
        data = layout_of(cfg, ranks).data
        own = cfg
        if args.growing:
            own = with_batch(cfg, cfg.train.prompts_per_step * data // first)
        elif data > cfg.train.prompts_per_step * cfg.train.responses_per_prompt:
            break  # more replicas than sequences
        row: dict[str, Any] = {"ranks": ranks, "data": data}
        for kind in KINDS:
            found = simulate(own, ranks, kind, hardware, efficiency)
            row[kind] = {
                **asdict(found.times),
                "train": found.times.train,
                "step": found.times.step,
                "tokens_per_s": found.tokens_per_s,
                "bytes": found.bytes,
                "fits": found.fits,
            }
        row["ratio"] = row["logra"]["train"] / row["adam"]["train"]
        rows.append(row)
    return rows


def print_scale(rows: list[dict[str, Any]]) -> None:
    """A line for each number of ranks and optimizer."""
    print(
        f"{'ranks':>6} {'kind':6}{'step s':>8}{'train s':>9}{'ratio':>7}"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"{'tokens/s':>11}{'GiB':>7}"
    )
    for row in rows:
        for kind in KINDS:
            own = row[kind]
            shares = "".join(
                f"{100 * sum(own[p] for p in parts) / own['train']:>9.1f}%"
                for parts in PARTS.values()
            )
            ratio = f"{row['ratio']:.2f}" if kind == "logra" else ""
            print(
                f"{row['ranks']:>6} {kind:6}{own['step']:>8.2f}{own['train']:>9.3f}{ratio:>7}"
                f"{shares}{own['tokens_per_s']:>11.0f}{own['bytes'] / 2**30:>7.1f}"
                + ("" if own["fits"] else "  does not fit")
            )


def plot_scale(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    """Shares of a training step against the number of ranks, one panel an optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    places = range(len(rows))
    for axis, kind in zip(axes, KINDS, strict=True):
        bottom = [0.0] * len(rows)
        for part, names in PARTS.items():
            heights = [sum(row[kind][name] for name in names) for row in rows]
            axis.bar(places, heights, bottom=bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axis.set_xticks(list(places), [str(row["ranks"]) for row in rows])
        axis.set_xlabel("GPUs")
        axis.set_title({"adam": "dense Adam", "logra": "LoGRA"}[kind])
    axes[0].set_ylabel("seconds of a training step (simulated)")
    axes[1].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


# --- the check against this machine ---------------------------------------------------------------

SIZES: tuple[dict[str, int], ...] = (
    {"hidden": 512, "layers": 4, "rank": 64},
    {"hidden": 512, "layers": 4, "rank": 16},
    {"hidden": 768, "layers": 3, "rank": 64},
    {"hidden": 256, "layers": 8, "rank": 64},
)
"""What is measured; the constants are fitted to the first."""


def _options(size: dict[str, int]) -> list[str]:
    return [word for name, value in size.items() for word in (f"--{name}", str(value))]


def measure(size: dict[str, int], steps: int) -> dict[str, Any]:
    """Median seconds of tools/bench_step.py at one size."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "bench.json"
        program = str(Path(__file__).with_name("bench_step.py"))
        command = [sys.executable, program, *_options(size)]
        subprocess.run(
            [*command, "--steps", str(steps), "--json", str(file)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def bench_config(size: dict[str, int], kind: Kind) -> Config:
    """What tools/bench_step.py trains."""
    sys.path.insert(0, str(Path(__file__).parent))
    import bench_step

    args = bench_step.arguments(_options(size))
    cfg = with_batch(bench_step.configuration(args, kind), args.batch * args.micro_batches)
    return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"name": "sft"})})


def predict(size: dict[str, int], kind: Kind, hardware: Hardware) -> Simulated:
    """The model's step at one size."""
    full = Efficiency(compute=1, memory=1)
    return simulate(bench_config(size, kind), 1, kind, hardware, full)


def fitted(size: dict[str, int], measured: dict[str, Any]) -> Hardware:
    """The machine for which dense Adam's passes and its optimizer come out as measured."""
    unit = Hardware("this machine", 1e12, 1e12, 1e12, 1e15, 1e9, 1e9)
    times = predict(size, "adam", unit).times
    dense = measured["dense"]
    passes = (times.forward + times.backward) / (dense["forward"] + dense["backward"])
    moved = times.optimizer / dense["optimizer"]
    return dataclasses.replace(
        unit, bf16_flops=1e12 * passes, fp32_flops=1e12 * passes, memory_rate=1e12 * moved
    )


def check(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all sizes, fit to the first, predict the rest."""
    rows: list[dict[str, Any]] = []
    hardware: Hardware | None = None
    for size in SIZES:
        measured = measure(size, args.steps)
        hardware = hardware or fitted(size, measured)
        for kind, name in zip(KINDS, ("dense", "logra"), strict=True):
            predicted = predict(size, kind, hardware).times.train
            rows.append(
                {**size, "kind": kind, "measured": measured[name]["step"], "predicted": predicted}
            )
    assert hardware is not None
    print(
        f"fitted to dense Adam at the first size: {hardware.fp32_flops / 1e9:.0f} GFLOP/s, "
        f"{hardware.memory_rate / 1e9:.1f} GB/s"
    )
    print(f"{'hidden':>7}{'layers':>7}{'rank':>5} {'kind':6}{'measured':>10}{'predicted':>10}")
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        print(
            f"{row['hidden']:>7}{row['layers']:>7}{row['rank']:>5} {row['kind']:6}"
            f"{row['measured']:>9.3f}s{row['predicted']:>9.3f}s{100 * error:>+6.0f} %"
        )
    return rows


def _ranks(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = commands.add_parser("scale", help="step times against the number of GPUs")
    scaling.add_argument("config", metavar="CONFIG")
    scaling.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[])
    scaling.add_argument("--hardware", choices=TABLE, default="H100")
    scaling.add_argument("--ranks", type=_ranks, default=[8, 16, 32, 64, 128, 256, 512, 1024])
    scaling.add_argument("--growing", action="store_true", help="sequences of a replica stay")
    scaling.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    checking = commands.add_parser("check", help="compare with measured steps on this machine")
    checking.add_argument("--steps", type=int, default=7)
    for each in (scaling, checking):
        each.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    args = parser.parse_args()
    try:
        rows = scale(args) if args.command == "scale" else check(args)
    except UserError as error:
        print(f"simulate: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if args.command == "scale":
        print_scale(rows)
        if args.plot:
            plot_scale(rows, f"{args.config}, {args.hardware}", args.plot)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
