"""The quickstart: SmolLM2-135M-Instruct learns one-digit sums while you watch.

    python -m megatron_logra.quickstart [--kind adam] [--seed N] [--run-dir DIR] [KEY=VALUE ...]

Trains as examples/quickstart/train.yaml says, measures the accuracy on held-out problems before and
after, and leaves summary.json and a report in the run directory (runs/quickstart).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_logra.cli import EXIT_STOPPED, EXIT_USER_ERROR, PROGRAM
from megatron_logra.config import Config, load_config
from megatron_logra.errors import StopRequested, UserError

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "train.yaml"
RUN_DIR = "runs/quickstart"
KINDS: tuple[Literal["logra", "adam"], ...] = ("logra", "adam")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart; returns the exit code, as the command line does."""
    arguments = arguments_parser().parse_intermixed_args(argv)
    run_dir = arguments.run_dir or (RUN_DIR if arguments.kind == "logra" else f"{RUN_DIR}-adam")
    try:
        run(arguments.kind, arguments.seed, Path(run_dir), arguments.overrides)
    except UserError as error:
        print(f"quickstart: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except StopRequested as stop:
        command = f"{_program()} train {run_dir}/config.yaml --resume"
        print(f"quickstart: {stop}; go on with {command}", file=sys.stderr)
        return EXIT_STOPPED
    return 0


def arguments_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, default="logra", help="adam: the dense baseline")
    parser.add_argument("--seed", type=int, default=0, help="of data order, noise and projections")
    parser.add_argument("--run-dir", help=f"default: {RUN_DIR}, with -adam for the baseline")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration changes")
    return parser


def run(kind: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train, compare, write `summary.json` and the report; returns the summary.

    Raises:
        UserError: the model cannot be fetched, or an override is wrong.
    """
    from megatron_logra import platform

    platform.install()  # before anything imports Megatron-Core
    from megatron_logra import planner, report
    from megatron_logra.model import smollm2
    from megatron_logra.rl import trainer

    if not CONFIG.is_file():
        raise UserError(f"{CONFIG}: missing; the quickstart needs the repository's examples")
    model = smollm2.fetch()
    config = load_config(
        CONFIG,
        [
            f"model.hf={json.dumps(str(model))}",
            f"optimizer.kind={kind}",
            f"train.seed={seed}",
            f"sketch.seed={seed}",
            f"logging.run_dir={json.dumps(str(run_dir))}",
            *overrides,
        ],
    )
    run_dir = Path(config.logging.run_dir)
    _put_aside(run_dir)
    _introduce(config)
    started = time.perf_counter()
    trained = trainer.run(config)
    memory = {name: planner.static_memory(config, name) for name in KINDS}
    memory[config.optimizer.kind] = trained["memory"]  # counted, not planned
    summary = {
        "kind": config.optimizer.kind,
        "seed": config.train.seed,
        **_accuracies(trained),
        "updates": trained["updates"],
        "skipped": trained["skipped"],
        "seconds": time.perf_counter() - started,
        "memory": memory,
    }
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    (run_dir / "summary.json").write_text(text, encoding="utf-8")
    page = report.write_report(_runs_of_report(run_dir))
    _conclude(summary, run_dir, page)
    return summary


def _accuracies(trained: dict[str, Any]) -> dict[str, Any]:
    """`accuracy_*` (sampled) and `greedy_*`, each before and after, and the sampled intervals."""
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        measured = trained[when] or {}
        sampled, greedy = measured.get("sampled"), measured.get("greedy")
        found[f"accuracy_{when}"] = sampled["pass@1"] if sampled else None
        found[f"accuracy_{when}_interval"] = sampled["interval"] if sampled else None
        found[f"greedy_{when}"] = greedy["pass@1"] if greedy else None
    return found


def _put_aside(run_dir: Path) -> None:
    """Keep an earlier run under another name, so that the quickstart can always be repeated."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    number = 1
    while (kept := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(kept)
    print(f"the earlier {run_dir} is now {kept}")


def _runs_of_report(run_dir: Path) -> list[Path]:
    """This run, and the one of the other kind beside it if there is one."""
    other = (
        run_dir.with_name(run_dir.name.removesuffix("-adam"))
        if run_dir.name.endswith("-adam")
        else run_dir.with_name(f"{run_dir.name}-adam")
    )
    return [run_dir, other] if (other / "metrics.jsonl").is_file() else [run_dir]


def _introduce(config: Config) -> None:
    train = config.train
    optimizer = (
        f"LoGRA, sketches of rank {config.sketch.rank}"
        if config.optimizer.kind == "logra"
        else "dense Adam"
    )
    print(
        f"SmolLM2-135M-Instruct learns one-digit sums: {train.steps} updates of "
        f"{train.prompts_per_step} problems × {train.responses_per_prompt} responses, "
        f"{optimizer}.\nFirst its accuracy on problems that training never sees, then the updates:",
        flush=True,
    )


def _conclude(summary: dict[str, Any], run_dir: Path, page: Path) -> None:
    print(f"\nAccuracy on held-out problems ({summary['seconds'] / 60:.1f} minutes)")
    for label, key in (("sampled, temperature 1", "accuracy"), ("greedy", "greedy")):
        before, after = summary[f"{key}_before"], summary[f"{key}_after"]
        if before is not None and after is not None:
            gain = 100 * (after - before)
            print(f"  {label:<24}{before:>8.3f} → {after:.3f}   ({gain:+.0f} points)")
    print("\nMemory between steps, MiB")
    print(f"  {'':<14}{'LoGRA':>10}{'dense Adam':>12}")
    logra, adam = summary["memory"]["logra"], summary["memory"]["adam"]
    for kind in logra:
        label = "total" if kind == "static" else kind
        print(f"  {label:<14}{logra[kind] / 2**20:>10.1f}{adam[kind] / 2**20:>12.1f}")
    other = "adam" if summary["kind"] == "logra" else "logra"
    print(
        f"\nLook next at\n"
        f"  {page}\n"
        f"  {run_dir / 'rollouts'}/   what the model answered, with rewards\n"
        f"  {run_dir / 'metrics.jsonl'}\n"
        f"and try\n"
        f"  {_program()} generate {run_dir / 'config.yaml'} --prompt 'What is 3 + 4?'\n"
        f"  tools/quickstart.sh --kind {other}   the same with "
        f"{'dense Adam' if other == 'adam' else 'sketches'}, for comparison"
    )


def _program() -> str:
    """How to call the command line: it need not be on PATH."""
    installed = Path(sys.executable).with_name(PROGRAM)
    if not installed.is_file():
        return f"{sys.executable} -m megatron_logra"
    here = Path.cwd()
    return str(installed.relative_to(here) if installed.is_relative_to(here) else installed)


if __name__ == "__main__":
    sys.exit(main())
