"""The plots of a report: from runs' records to PNG files. Colours are Okabe and Ito's, which
colour-blind readers can tell apart; several runs also differ in their markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#9A9A9A", "#222222"
RUN_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MEMORY_KINDS = {
    "weights": SKY,
    "master": BLUE,
    "gradients": VERMILION,
    "optimizer": ORANGE,
    "sketches": GREEN,
    "projections": YELLOW,
    "activations": PURPLE,
}
"""The kinds that add up, in the order in which they are stacked."""
PHASES = {
    "rollout": BLUE,
    "reward": PURPLE,
    "forward_backward": ORANGE,
    "reduce": YELLOW,
    "probe": GREEN,
    "apply": VERMILION,
    "sync": SKY,
    "checkpoint": BLACK,
    "eval": "#C4C4C4",
}

_STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.3,
    "axes.formatter.limits": (-3, 5),
}
_WIDTH_IN = 8.0
_SMOOTHED_FROM = 60
"""Steps from which on a rolling mean is drawn over the raw curve."""
_MARKERS_UP_TO = 60
"""Steps up to which each point has a marker."""


@dataclass(frozen=True)
class Run:
    """What a run directory says."""

    name: str
    path: Path
    records: list[dict[str, Any]]
    config: str
    summary: dict[str, Any] = field(default_factory=dict)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps (from 1) and values of a key, both float64 [n]; nulls are left out."""
        points = [
            (record["step"] + 1, record[key])
            for record in self.records
            if isinstance(record.get(key), int | float)
        ]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by kind for each bar: LoGRA and dense Adam of the summary, else the run's own."""
        if self.summary.get("memory"):
            names = {"logra": "LoGRA", "adam": "dense Adam"}
            return {names.get(k, k): _stacked(v) for k, v in self.summary["memory"].items()}
        own = {}
        for kind in MEMORY_KINDS:
            _, values = self.series(f"memory/{kind}_bytes")
            if len(values):
                own[kind] = float(values[-1])
        return {self.name: own} if own else {}


@dataclass(frozen=True)
class Plot:
    """One PNG file."""

    title: str
    caption: str
    path: Path


def draw_all(runs: Sequence[Run], directory: Path, prefix: str = "") -> list[Plot]:
    """Draw every plot for which the runs have data, as `directory/PREFIX…png`."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = []
    with mpl.rc_context(_STYLE):
        for name, title, caption, draw in _PLOTS:
            figure = draw(runs)
            if figure is None:
                continue
            FigureCanvasAgg(figure)
            path = directory / f"{prefix}{name}.png"
            figure.savefig(path)
            plots.append(Plot(title, caption, path))
    return plots


def _stacked(kinds: dict[str, Any]) -> dict[str, float]:
    return {kind: float(kinds[kind]) for kind in MEMORY_KINDS if kinds.get(kind)}


def _figure(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def _step_axis(axes: Axes, runs: Sequence[Run], label: bool = True, ticks: int = 9) -> None:
    """The same step axis on every plot of the same runs, with at most so many ticks."""
    steps = [record["step"] + 1 for run in runs for record in run.records]
    axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))
    if label:
        axes.set_xlabel("update")


def _has(runs: Sequence[Run], *keys: str) -> bool:
    return any(len(run.series(key)[0]) for run in runs for key in keys)


def _curve(axes: Axes, run: Run, key: str, index: int) -> None:
    """One run's curve of a key; a long one thin, under its rolling mean."""
    steps, values = run.series(key)
    colour = RUN_COLOURS[index % len(RUN_COLOURS)]
    if len(steps) > _SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        values = _rolling_mean(values, max(5, len(steps) // 30 | 1))
    marker = MARKERS[index % len(MARKERS)] if len(steps) <= _MARKERS_UP_TO else None
    axes.plot(steps, values, color=colour, marker=marker, label=run.name)


def _rolling_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over an odd number of points [n]; at the ends, over those that are there."""
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _curves(
    runs: Sequence[Run], panels: dict[str, tuple[str, str]], columns: bool
) -> Figure | None:
    """One panel for each key that has data: key → (title, unit)."""
    present = {key: text for key, text in panels.items() if _has(runs, key)}
    if not present:
        return None
    count = len(present)
    shape = (1, count) if columns else (count, 1)
    figure, axes = _figure(*shape, height=2.8 if columns else 1.0 + 1.8 * count)
    for panel, (key, (title, unit)) in zip(axes, present.items(), strict=True):
        for index, run in enumerate(runs):
            if _has([run], key):
                _curve(panel, run, key, index)
        panel.set_title(title)
        panel.set_ylabel(unit)
        _step_axis(
            panel, runs, label=columns or panel is axes[-1], ticks=9 // count if columns else 9
        )
    if len(runs) > 1:
        # From all panels: a run may be missing in the first.
        lines = {str(line.get_label()): line for panel in axes for line in panel.lines}
        names = [run.name for run in runs if run.name in lines]
        figure.legend(
            [lines[name] for name in names], names, loc="outside lower center", ncols=len(names)
        )
    return figure


def _reward(runs: Sequence[Run]) -> Figure | None:
    panels = {
        "reward/mean": ("Mean reward of the batch", "reward"),
        "reward/zero_variance_groups": ("Prompts whose responses all score the same", "fraction"),
    }
    figure = _curves(runs, panels, columns=False)
    if figure is not None and len(figure.axes) > 1:
        figure.axes[1].set_ylim(-0.03, 1.03)
    return figure


def _loss(runs: Sequence[Run]) -> Figure | None:
    if _has(runs, "reward/mean"):  # a policy-gradient loss says nothing as a curve
        return None
    return _curves(runs, {"train/loss": ("Loss", "nats/token")}, columns=False)


_KL: dict[str, tuple[str, dict[str, Any]]] = {
    # Under the step as applied, which mostly meets it.
    "policy/kl_budget": (
        "budget",
        {"color": GREY, "linewidth": 4, "alpha": 0.6, "drawstyle": "steps-mid", "marker": None},
    ),
    "policy/kl_predicted": ("predicted at α = 1", {"color": ORANGE, "linestyle": "--"}),
    "policy/kl_predicted_scaled": ("predicted, as applied", {"color": BLUE}),
    "policy/kl_realised": (
        "realised",
        {"color": VERMILION, "linestyle": "", "marker": "D", "markersize": 5, "zorder": 3},
    ),
    # Without what rounding to bf16 adds, which at small budgets is most of the realised KL.
    "policy/kl_along": (
        "along the prediction",
        {"color": VERMILION, "linestyle": "", "marker": "D", "markersize": 8, "fillstyle": "none"},
    ),
}


def _kl(runs: Sequence[Run]) -> Figure | None:
    runs_with = [run for run in runs if _has([run], *_KL)]
    if not runs_with:
        return None
    figure, axes = _figure(
        len(runs_with), 1, height=0.9 + 2.4 * len(runs_with), sharex=True, sharey=True
    )
    drawn = {}
    for panel, run in zip(axes, runs_with, strict=True):
        for key, (label, style) in _KL.items():
            steps, values = run.series(key)
            shown = values > 0  # a logarithmic axis has no place for 0
            marker = "o" if len(steps) <= _MARKERS_UP_TO else None
            style = {"marker": marker} | style
            if shown.any():
                (drawn[label],) = panel.plot(steps[shown], values[shown], **style)
        panel.set_yscale("log")
        panel.set_ylabel("nats/token")
        title = "KL of a step: predicted, allowed and realised"
        panel.set_title(title if len(runs) == 1 else f"{title} · {run.name}")
        _step_axis(panel, runs, label=panel is axes[-1])
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn))
    return figure


def _alpha(runs: Sequence[Run]) -> Figure | None:
    panels = {
        "policy/alpha": ("Step scale α", "factor"),
        "train/update_ratio": ("Size of the update, ‖ΔW‖ / ‖W‖", "ratio"),
        "policy/kl_ratio": ("Realised over predicted KL", "ratio"),
    }
    figure = _curves(runs, panels, columns=True)
    if figure is not None and _has(runs, "policy/alpha"):
        figure.axes[0].axhline(1.0, color=GREY, linewidth=0.8, zorder=0)
        figure.axes[0].set_ylim(0, max(1.1, figure.axes[0].get_ylim()[1]))
    return figure


def _text(runs: Sequence[Run]) -> Figure | None:
    panels = {
        "policy/entropy": ("Entropy", "nats/token"),
        "rollout/length_mean": ("Mean response length", "tokens"),
        "rollout/truncated": ("Responses cut off", "fraction"),
    }
    return _curves(runs, panels, columns=True)


def memory_bars(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Bytes by kind for each bar of all runs, named so that no two share a name."""
    bars = {}
    for run in runs:
        for name, kinds in run.memory().items():
            alone = name == run.name or len(runs) == 1
            bars[name if alone else f"{run.name}: {name}"] = kinds
    return bars


def _memory(runs: Sequence[Run]) -> Figure | None:
    bars = memory_bars(runs)
    if not bars:
        return None
    figure, (axes,) = _figure(1, 1, height=1.3 + 0.45 * len(bars))
    totals = [sum(kinds.values()) for kinds in bars.values()]
    unit, scale = ("GiB", 2**30) if max(totals) >= 2**30 else ("MiB", 2**20)
    places = np.arange(len(bars))
    left = np.zeros(len(bars))
    for kind, colour in MEMORY_KINDS.items():
        values = np.array([kinds.get(kind, 0.0) for kinds in bars.values()]) / scale
        if values.any():
            axes.barh(
                places,
                values,
                left=left,
                height=0.62,
                color=colour,
                label=kind,
                edgecolor="white",
                linewidth=0.5,
            )
            left += values
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:.3g} {unit}" if total < 1000 else f"{total:.0f} {unit}",
            (total, place),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(places, list(bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, max(left.max() * 1.16, 1e-9))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    axes.set_title("Memory of the training state, by kind")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _time(runs: Sequence[Run]) -> Figure | None:
    keys = {name: f"time/{name}_s" for name in PHASES}
    runs_with = [run for run in runs if _has([run], "time/step_s", *keys.values())]
    if not runs_with:
        return None
    figure, axes = _figure(len(runs_with), 1, height=0.9 + 2.2 * len(runs_with), sharex=True)
    shown: dict[str, Any] = {}
    for panel, run in zip(axes, runs_with, strict=True):
        steps = np.array([record["step"] + 1 for record in run.records], dtype=np.float64)
        edges = np.append(steps - 0.5, steps[-1] + 0.5)
        bottom = np.zeros_like(steps)
        parts = {name: _dense(run, key) for name, key in keys.items()}
        named = np.sum(list(parts.values()), axis=0)
        parts["other" if named.any() else "whole step"] = np.maximum(
            0.0, _dense(run, "time/step_s") - named
        )
        for name, values in parts.items():
            if not values.any():
                continue
            colour = PHASES.get(name, "#E8E8E8")
            shown[name.replace("_", "-")] = panel.stairs(
                bottom + values, edges, baseline=bottom, fill=True, color=colour
            )
            bottom = bottom + values
        panel.set_ylim(bottom=0)
        panel.set_ylabel("seconds")
        title = "Time of a step, by phase"
        panel.set_title(title if len(runs) == 1 else f"{title} · {run.name}")
        _step_axis(panel, runs, label=panel is axes[-1])
    if shown:
        figure.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=len(shown)
        )
    return figure


def _dense(run: Run, key: str) -> np.ndarray:
    """A value for each record, float64 [n]; 0 where there is none."""
    return np.array([record.get(key) or 0.0 for record in run.records], dtype=np.float64)


def accuracy_keys(run: Run) -> list[str]:
    """The run's `eval/*` keys that are shares of right answers."""
    keys = {key for record in run.records for key in record if key.startswith("eval/")}
    return sorted(key for key in keys if ("pass@" in key or "accuracy" in key) and _has([run], key))


def _accuracy(runs: Sequence[Run]) -> Figure | None:
    keys = sorted({key for run in runs for key in accuracy_keys(run)})
    if not keys:
        return None
    figure, (axes,) = _figure(1, 1, height=3.0)
    one = len(runs) == 1
    for run_index, run in enumerate(runs):
        for key_index, key in enumerate(keys):
            steps, values = run.series(key)
            if not len(steps):
                continue
            index = key_index if one else run_index
            name = key.removeprefix("eval/")
            axes.plot(
                steps,
                values,
                color=RUN_COLOURS[index % len(RUN_COLOURS)],
                marker=MARKERS[key_index % len(MARKERS)],
                markersize=5,
                linestyle=("-", "--", ":", "-.")[key_index % 4],
                label=name if one else f"{run.name}: {name}",
            )
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("accuracy")
    axes.set_title("Accuracy on held-out problems")
    _step_axis(axes, runs)
    figure.legend(loc="outside right upper")
    return figure


_PLOTS: tuple[tuple[str, str, str, Callable[[Sequence[Run]], Figure | None]], ...] = (
    ("reward", "Reward", "A prompt whose responses all score the same gives no signal.", _reward),
    ("loss", "Loss", "Mean over the tokens that carry loss.", _loss),
    ("accuracy", "Held-out accuracy", "Problems that training never samples.", _accuracy),
    (
        "kl",
        "KL control",
        "With a budget the step is scaled by α so that its predicted KL meets it; the realised KL "
        "is measured on the same responses after the step, at an interval.",
        _kl,
    ),
    ("alpha", "Step size", "At α = 1 the update has the size that step_control asks for.", _alpha),
    (
        "memory",
        "Memory",
        "Weights, gradients and optimizer state of one rank; no activations.",
        _memory,
    ),
    ("responses", "Responses", "Generated in training.", _text),
    ("time", "Time", "Wall-clock time of each step.", _time),
)
