"""Scaling studies: a grid of runs, made, run (here or as a Slurm array), gathered and compared.

    python tools/scaling_study.py list STUDY              the runs, by number
    python tools/scaling_study.py count STUDY             how many
    python tools/scaling_study.py run STUDY [--only N]    run what is not done yet
    python tools/scaling_study.py gather STUDY            table.csv, comparison.csv, fits.csv, plots

KEY=VALUE after STUDY is for all runs, but for what the grid says. A study is YAML, such as
examples/scaling/study.yaml:

    base: a configuration's file, beside the study
    directory: where runs and results go
    overrides: {train.steps: 4}        of the base, for all runs; may be left out
    baseline: optimizer=adam           axis and value that all other values are compared with
    grids:                             products of axes; runs that are the same count once
      - optimizer: {adam: {optimizer.kind: adam}, r=64: {sketch.rank: 64}}   value: its overrides
        ranks: {1: {}, 2: {}}          the axis of this name is the number of local ranks
        seed: {0: {train.seed: 0}}     the axis over which intervals are taken
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_logra import stopping
from megatron_logra.config import dump_yaml, load_config, parse_yaml
from megatron_logra.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from megatron_logra.metrics import read_metrics

RANKS, SEED = "ranks", "seed"
DONE = "done.json"
MEASURES = {
    "static_bytes": "bytes between steps, largest rank",
    "state_bytes": "of them gradients, moments, sketches and projections",
    "peak_bytes": "highest memory of a process",
    "step_s": "seconds of a step (median)",
    "train_s": "seconds of it without rollout and scoring (median)",
    "comm_bytes": "bytes sent over data-parallel ranks in a step",
    "reward": "mean reward at equal tokens",
    "kl": "predicted KL, summed over steps",
}
"""Columns of the table, and what they are."""
# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    labels: tuple[tuple[str, str], ...]
    """The value of each axis by name."""
    overrides: tuple[str, ...]
    ranks: int
    directory: Path

    @property
    def name(self) -> str:
        """Its values, in short."""
        return ", ".join(f"{axis} {value}" for axis, value in self.labels)

    @property
    def done(self) -> bool:
        """Whether it has run to its end."""
        return (self.directory / DONE).exists()


class Study:
    """A study's file, checked.

    Args:
        path: the file.
        common: KEY=VALUE for all runs, where the grid does not say otherwise.

    Raises:
        UserError: it cannot be read, or is no study.
    """

    def __init__(self, path: Path, common: Sequence[str] = ()) -> None:
        self.path = path
        try:
            data = parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}; expected a study") from None
        known = {"base", "directory", "baseline", "grids"}
        if not isinstance(data, dict) or set(data) - {"overrides"} != known:
            raise UserError(
                f"{path}: expected the keys {', '.join(sorted(known))}, and overrides if wanted"
            )
        for_all = data.get("overrides") or {}
        if not isinstance(for_all, dict):
            raise UserError(f"{path}: overrides: expected {{KEY: VALUE}}")
        self.common = (*_assignments(for_all), *common)
        self.base = path.parent / str(data["base"])
        self.directory = Path(data["directory"])
        self.baseline_axis, _, self.baseline = str(data["baseline"]).partition("=")
        self.cells = list(dict.fromkeys(self._cells(data["grids"])))
        axes = {axis for cell in self.cells for axis, _ in cell.labels}
        for axis in (self.baseline_axis, SEED):
            if axis not in axes:
                raise UserError(f"{path}: no grid has the axis {axis}")
        for cell in self.cells:  # all of them before any of them runs
            load_config(self.base, list(cell.overrides))

    def _cells(self, grids: Any) -> Iterator[Cell]:
        if not isinstance(grids, list) or not all(
            isinstance(axes, dict) and axes and all(isinstance(v, dict) for v in axes.values())
            for axes in grids
        ):
            raise UserError(f"{self.path}: grids: expected [{{axis: {{value: overrides}}}}, …]")
        for axes in grids:
            for values in itertools.product(*(axis.items() for axis in axes.values())):
                labels = tuple(
                    (str(axis), str(label)) for axis, (label, _) in zip(axes, values, strict=True)
                )
                overrides = [text for _, given in values for text in _assignments(given or {})]
                ranks = dict(labels).get(RANKS, "1")
                if not ranks.isdecimal() or int(ranks) < 1:
                    raise UserError(f"{self.path}: {RANKS} {ranks}: expected a number of ranks")
                slug = hashlib.sha256(repr(sorted(labels)).encode()).hexdigest()[:8]
                text = "_".join(value.replace("/", "-") for _, value in labels)
                directory = self.directory / "cells" / f"{text}_{slug}"
                own = (*self.common, *overrides, f"logging.run_dir={json.dumps(str(directory))}")
                yield Cell(tuple(sorted(labels)), own, int(ranks), directory)


def _assignments(values: dict[str, Any]) -> list[str]:
    """KEY=VALUE, as the command line has it."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run_cell(study: Study, cell: Cell) -> int:
    """Run a cell from where it is; returns its exit code."""
    cell.directory.mkdir(parents=True, exist_ok=True)
    file = cell.directory / "cell.yaml"
    file.write_text(dump_yaml(load_config(study.base, list(cell.overrides))), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_logra", "train", str(file), "--resume"]
    started = time.perf_counter()
    with (cell.directory / "output.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--nproc", str(cell.ranks)], stdout=log, stderr=subprocess.STDOUT
        )
        # Requests to stop go to the run, which saves; this program waits for it.
        with stopping.handled(lambda number, _frame: process.send_signal(number)):
            code = process.wait()
    if code == 0:
        result = {"seconds": time.perf_counter() - started, "labels": dict(cell.labels)}
        (cell.directory / DONE).write_text(json.dumps(result) + "\n")
    return code


def run(study: Study, only: int | None) -> int:
    """Run all cells, or one, that are not done."""
    if only is not None and not 0 <= only < len(study.cells):
        raise UserError(f"--only {only}: expected a number from 0 to {len(study.cells) - 1}")
    failed = 0
    for number, cell in enumerate(study.cells):
        if cell.done or only not in (None, number):
            continue
        print(f"{number + 1}/{len(study.cells)}  {cell.name}", flush=True)
        code = run_cell(study, cell)
        if code:
            log = cell.directory / "output.log"
            said = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            print(f"exit code {code}, {log} says at last: {said}", file=sys.stderr)
            if code in (EXIT_STOPPED, EXIT_USER_ERROR):
                return code
            failed += 1
    return 1 if failed else 0


# --- results --------------------------------------------------------------------------------------


def measures(records: list[dict[str, Any]], tokens: float | None = None) -> dict[str, float | None]:
    """One run's numbers.

    Args:
        records: of `metrics.jsonl`. Times leave out the first step, which warms up.
        tokens: trained tokens up to which rewards count (the last quarter of those steps).
    """
    later = records[1:] or records

    def median(take: Any) -> float | None:
        values = [value for record in later if (value := take(record)) is not None]
        return statistics.median(values) if values else None

    def total(record: dict[str, Any], *keys: str) -> float:
        return float(sum(record.get(key) or 0 for key in keys))

    kinds = ("gradients", "optimizer", "sketches", "projections")
    communication = [f"comm/{kind}_bytes" for kind in ("gradient", "sketch", "parameter")]
    count, within = 0.0, []
    for record in records:
        count += record.get("train/tokens") or 0
        if tokens is not None and count > tokens and within:
            break
        within.append(record)
    rewards = [r["reward/mean"] for r in within[-max(1, len(within) // 4) :] if "reward/mean" in r]
    kls = [r["policy/kl_predicted_scaled"] for r in records if r.get("policy/kl_predicted_scaled")]
    return {
        "static_bytes": records[-1]["memory/static_bytes"],
        "state_bytes": total(records[-1], *(f"memory/{kind}_bytes" for kind in kinds)),
        "peak_bytes": records[-1]["memory/peak_bytes"],
        "step_s": median(lambda r: r["time/step_s"]),
        "train_s": median(
            lambda r: (
                r["time/step_s"]
                - total(r, "time/rollout_s", "time/reward_s", "time/eval_s", "time/checkpoint_s")
            )
        ),
        "comm_bytes": median(lambda r: total(r, *communication)),
        "reward": statistics.fmean(rewards) if rewards else None,
        "kl": sum(kls) if kls else None,
    }


def table(study: Study) -> list[dict[str, Any]]:
    """A row for each cell: its labels, whether it is done, and its measures."""
    found = {cell: read_metrics(cell.directory) for cell in study.cells if cell.done}
    counts = [sum(r.get("train/tokens") or 0 for r in records) for records in found.values()]
    tokens = min(counts, default=0)  # what every run has trained on
    return [
        {**dict(cell.labels), "done": cell in found}
        | (measures(found[cell], tokens) if cell in found else {})
        for cell in study.cells
    ]


def compare(study: Study, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each value against the baseline, all else equal, seed by seed.

    Returns:
        A row for each pair of which all seeds are done on both sides: the mean ratio of each
        measure over seeds, and its 95 % interval; and what is missing of the others.
    """
    axis = study.baseline_axis
    groups: dict[tuple[tuple[str, str], ...], dict[str, dict[str, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell, row in zip(study.cells, rows, strict=True):
        rest = tuple(pair for pair in cell.labels if pair[0] not in (axis, SEED))
        groups[rest][row[axis]][row[SEED]] = row
    found, missing = [], []
    for rest, by_value in groups.items():
        where = ", ".join(f"{name} {value}" for name, value in rest)
        base = by_value.get(study.baseline)
        if base is None:
            continue  # no pair is asked for
        for value, seeds in by_value.items():
            if value == study.baseline:
                continue
            lacking = [
                f"{label} seed {seed}"
                for label, own in ((value, seeds), (study.baseline, base))
                for seed in sorted({*seeds, *base})
                if seed not in own or not own[seed]["done"]
            ]
            if lacking:
                missing.append(f"{where}: {axis} {value} is not compared; missing: {lacking[0]}")
                continue
            row: dict[str, Any] = {**dict(rest), axis: value, "seeds": len(seeds)}
            for measure in MEASURES:
                ratios = [
                    own[measure] / base[seed][measure]
                    for seed, own in seeds.items()
                    if own[measure] is not None and base[seed][measure]
                ]
                if len(ratios) == len(seeds):
                    row[measure], row[f"{measure}_±"] = interval(ratios)
            found.append(row)
    return found, missing


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half of its 95 % interval (Student's t); None with one value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    return mean, student(n - 1) * statistics.stdev(values) / math.sqrt(n)


def number_of(label: str) -> float | None:
    """The number that a label of an axis ends in (`r=16`, `7M`, `1e-2`); None without one."""
    match = re.fullmatch(r"(?:.*=)?(\d+(?:\.\d+)?(?:e-?\d+)?)([KMB]?)", label)
    return float(match[1]) * _UNITS[match[2]] if match else None


def fits(study: Study, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How each measure goes with each axis of numbers, all else equal: two fits over all seeds.

    Returns:
        A row for each axis, setting of the other axes, and measure: of measure = a · axis^exponent
        the exponent, its 95 % interval and R², by least squares of logarithms; and of measure =
        intercept + slope · axis these two and R².
    """
    found = []
    for axis in sorted({axis for cell in study.cells for axis, _ in cell.labels} - {SEED}):
        for measure in MEASURES:
            for setting, by_label in _lines(study, rows, axis, measure).items():
                points = [
                    (x, y)
                    for label, ys in by_label.items()
                    if (x := number_of(label)) is not None
                    for y in ys
                ]
                if len({x for x, _ in points}) < 3 or min(y for _, y in points) <= 0:
                    continue
                slope, intercept, _, linear_r2 = _line(points)
                exponent, _, error, power_r2 = _line(
                    [(math.log(x), math.log(y)) for x, y in points]
                )
                found.append(
                    {"axis": axis, "setting": setting, "measure": measure, "points": len(points)}
                    | {"exponent": exponent, "exponent_±": error, "power_r2": power_r2}
                    | {"intercept": intercept, "slope": slope, "linear_r2": linear_r2}
                )
    return found


def _line(points: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Slope, intercept, half of the slope's 95 % interval, and R² of the least-squares line."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    left = sum((y - intercept - slope * x) ** 2 for x, y in points)
    spread = sum((y - statistics.fmean(ys)) ** 2 for y in ys)
    freedom = len(points) - 2
    width = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    error = student(freedom) * math.sqrt(left / freedom / width)
    return slope, intercept, error, 1 - left / spread if spread else 1.0


def student(freedom: int) -> float:
    """The two-sided 95 % point of Student's t."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96


def gather(study: Study) -> int:
    """Write the tables and plots; exit code 2 if pairs are incomplete."""
    rows = table(study)
    compared, missing = compare(study, rows)
    study.directory.mkdir(parents=True, exist_ok=True)
    _write(study.directory / "table.csv", rows)
    _write(study.directory / "comparison.csv", compared)
    _write(study.directory / "fits.csv", fits(study, rows))
    for name in plot(study, rows):
        print(study.directory / name)
    done = sum(row["done"] for row in rows)
    print(f"{done} of {len(rows)} runs done, {len(compared)} pairs: {study.directory}/table.csv")
    for line in missing:
        print(f"scaling_study: {line}", file=sys.stderr)
    return EXIT_USER_ERROR if missing else 0


def plot(study: Study, rows: list[dict[str, Any]]) -> list[str]:
    """A PNG for each axis of numbers or sizes, with a panel a measure; returns their names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = {axis for cell in study.cells for axis, _ in cell.labels}
    names = []
    for axis in sorted(axes - {SEED}):
        order = list(dict.fromkeys(dict(c.labels).get(axis) for c in study.cells))
        if len(order) < 2:
            continue
        figure, panels = plt.subplots(2, 4, figsize=(16, 7))
        colours: dict[str, str] = {}  # the same in all panels, also where a line is missing
        for panel, (measure, meaning) in zip(panels.flat, MEASURES.items(), strict=True):
            for label, points in _lines(study, rows, axis, measure).items():
                colour = colours.setdefault(label, f"C{len(colours) % 10}")
                shown = [v for v in order if v in points]
                means, errors = zip(*(interval(points[v]) for v in shown), strict=True)
                places = [order.index(v) for v in shown]
                widths = [error or 0.0 for error in errors]
                style = {"marker": "o", "capsize": 3, "color": colour}
                panel.errorbar(places, means, yerr=widths, label=label, **style)
            panel.set_xticks(range(len(order)), [str(v) for v in order])
            panel.set_title(meaning, fontsize=8)
            panel.set_xlabel(axis)
        if panels.flat[0].get_legend_handles_labels()[1]:
            panels.flat[0].legend(fontsize=6)
        figure.tight_layout()
        name = f"{axis}.png"
        figure.savefig(study.directory / name, dpi=110)
        plt.close(figure)
        names.append(name)
    return names


def _lines(
    study: Study, rows: list[dict[str, Any]], axis: str, measure: str
) -> dict[str, dict[str, list[float]]]:
    """Values by seed of a measure at each value of `axis`, for each setting of the other axes."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell, row in zip(study.cells, rows, strict=True):
        labels = dict(cell.labels)
        if row["done"] and row[measure] is not None and axis in labels:
            rest = ", ".join(
                f"{name} {value}" for name, value in cell.labels if name not in (axis, SEED)
            )
            found[rest][labels[axis]].append(row[measure])
    # One point is no line, except where it has nothing else to be compared with.
    return {k: v for k, v in found.items() if len(v) > 1} or found


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("command", choices=("list", "count", "run", "gather"))
    parser.add_argument("study", type=Path, metavar="STUDY")
    parser.add_argument("common", nargs="*", metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--only", type=int, metavar="N", help="run this one alone")
    args = parser.parse_intermixed_args()
    try:
        study = Study(args.study, args.common)
        match args.command:
            case "list":
                for number, cell in enumerate(study.cells):
                    print(f"{number:>4}  {'done' if cell.done else '    '}  {cell.name}")
            case "count":
                print(len(study.cells))
            case "run":
                return run(study, args.only)
            case "gather":
                return gather(study)
    except UserError as error:
        print(f"scaling_study: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
