"""What step control prevents: the quickstart's model and task with the controller on and off.

    python examples/ablation_step_control/run.py [--steps 25] [--seeds 0 1 2] [KEY=VALUE ...]

Trains each arm with each seed, one after the other, into runs/ablation_step_control/ARM-seedN, and
draws ablation.png and summary.json there:

    on         the quickstart's controller: α scales the update of size ρ to its KL budget
    fixed      every update of the same size, ρ = ‖ΔW‖ / ‖W‖ as in the configuration
    fixed-10x  every update of ten times that size

Interrupted, it goes on where it was when it is called again; runs that are finished are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "examples" / "quickstart" / "train.yaml"
ARMS = ("on", "fixed", "fixed-10x")

Train = Callable[[list[str]], int]
"""Runs `megatron-logra` with arguments; returns its exit code."""


def arm_settings(arm: str, ratio: float) -> list[str]:
    """What makes an arm, as overrides; `ratio` is ρ."""
    if arm == "on":
        return ["step_control.mode=kl_budget"]
    factor = 10 if arm == "fixed-10x" else 1
    return ["step_control.mode=fixed_ratio", f"step_control.update_ratio={factor * ratio}"]


def main(argv: Sequence[str] | None = None, train: Train | None = None) -> int:
    """Train what is missing and draw; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=25, help="updates of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ratio", type=float, default=6e-5, help="ρ of the arm `fixed`")
    parser.add_argument("--directory", type=Path, default=Path("runs/ablation_step_control"))
    parser.add_argument("--model", help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all runs")
    args = parser.parse_intermixed_args(argv)
    model = args.model
    runs = [(arm, seed) for seed in args.seeds for arm in ARMS]
    for number, (arm, seed) in enumerate(runs, start=1):
        run_dir = args.directory / f"{arm}-seed{seed}"
        if finished(run_dir, args.steps):
            print(f"[{number}/{len(runs)}] {run_dir}: finished before")
            continue
        if model is None:
            model = fetch_model()
        print(f"[{number}/{len(runs)}] {run_dir}", flush=True)
        code = (train or in_a_process)(
            [
                "train",
                str(CONFIG),
                f"model.hf={json.dumps(str(model))}",
                f"train.steps={args.steps}",
                f"train.seed={seed}",
                f"sketch.seed={seed}",
                "step_control.realised_kl_interval=1",
                "checkpoint.interval=10",
                "checkpoint.keep=1",
                f"logging.run_dir={json.dumps(str(run_dir))}",
                *arm_settings(arm, args.ratio),
                *args.overrides,
                "--resume",
            ]
        )
        if code:
            print(f"{run_dir}: stopped with exit code {code}", file=sys.stderr)
            return code
    summary = summarise(args.directory, args.seeds)
    text = json.dumps(summary, indent=2) + "\n"
    (args.directory / "summary.json").write_text(text, encoding="utf-8")
    picture = draw(args.directory, args.seeds)
    print_table(summary)
    print(f"\n{picture}\n{args.directory / 'summary.json'}")
    return 0


def fetch_model() -> Path:
    """The quickstart's model."""
    from megatron_logra.model import smollm2

    return smollm2.fetch()


def in_a_process(arguments: list[str]) -> int:
    """Each run in a process of its own, which gives all its memory back."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_logra", *arguments], check=False
    ).returncode


def finished(run_dir: Path, steps: int) -> bool:
    """Whether the run has made and written all its steps."""
    if not (run_dir / "metrics.jsonl").is_file():
        return False
    records = read(run_dir)
    return bool(records) and records[-1]["step"] >= steps - 1


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The run's records."""
    from megatron_logra.metrics import read_metrics

    return read_metrics(run_dir)


def summarise(directory: Path, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """For each arm, a value a seed: accuracies, and the realised KL of its updates (nats/token)."""
    found: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        runs = [read(directory / f"{arm}-seed{seed}") for seed in seeds]
        kls = [[r["policy/kl_realised"] for r in run if r["policy/kl_realised"]] for run in runs]
        found[arm] = {
            "accuracy_before": [run[0].get("eval/pass@1") for run in runs],
            "accuracy_after": [run[-1].get("eval/pass@1") for run in runs],
            "reward_last": [_mean_reward(run[-5:]) for run in runs],
            "entropy_last": [run[-1]["policy/entropy"] for run in runs],
            "kl_median": [statistics.median(kl) if kl else None for kl in kls],
            "kl_max": [max(kl, default=None) for kl in kls],
            "skipped": [sum(r["train/skipped"] for r in run) for run in runs],
        }
    return found


def _mean_reward(records: list[dict[str, Any]]) -> float:
    return statistics.mean(record["reward/mean"] for record in records)


def print_table(summary: dict[str, dict[str, Any]]) -> None:
    """The summary for people; one value a seed."""
    for key in next(iter(summary.values())):
        print(f"\n{key}")
        for arm, values in summary.items():
            shown = ("–" if v is None else f"{v:.3g}" for v in values[key])
            print(f"  {arm:<12}" + "  ".join(f"{text:>9}" for text in shown))


PANELS = {
    "reward/mean": ("Mean reward of the batch", "reward", False),
    "policy/kl_realised": ("KL of each update, realised", "nats/token", True),
    "policy/entropy": ("Entropy", "nats/token", False),
}


def draw(directory: Path, seeds: Sequence[int]) -> Path:
    """One panel a quantity, one colour an arm, one line a seed, the mean thick."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron_logra.figures import BLUE, ORANGE, VERMILION

    figure = Figure(figsize=(8.0, 7.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for panel, (key, (title, unit, logarithmic)) in zip(axes, PANELS.items(), strict=True):
        for arm, colour in zip(ARMS, (BLUE, ORANGE, VERMILION), strict=True):
            curves = []
            for seed in seeds:
                records = read(directory / f"{arm}-seed{seed}")
                values = [record.get(key) for record in records]
                curves.append(np.array([np.nan if v is None else v for v in values], dtype=float))
                panel.plot(
                    np.arange(1, len(values) + 1), curves[-1], color=colour, alpha=0.35, lw=1
                )
            length = min(map(len, curves))
            table = np.ma.masked_invalid([curve[:length] for curve in curves])
            mean = table.mean(axis=0).filled(np.nan)
            panel.plot(np.arange(1, length + 1), mean, color=colour, lw=2.2, label=arm)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_ylabel(unit)
        panel.grid(color="#E4E4E4", linewidth=0.6)
        if logarithmic:
            panel.set_yscale("log")
    axes[-1].set_xlabel("update")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))
    path = directory / "ablation.png"
    figure.savefig(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
