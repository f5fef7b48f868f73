"""`megatron-logra report`: plots and one self-contained HTML page from run directories."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_logra.errors import UserError
from megatron_logra.figures import MEMORY_KINDS, Plot, Run, accuracy_keys, draw_all, memory_bars
from megatron_logra.metrics import METRICS_FILE, read_metrics
from megatron_logra.progress import format_seconds

_SPAN = 5
"""Steps at each end over which the summary averages."""


def write_report(run_dirs: Sequence[str | Path]) -> Path:
    """Draw each run's plots into its `report/`, and the page into the first one's.

    With several runs, plots that overlay them go beside the page as `compare_*.png`.

    Returns:
        The page, `RUN/report/index.html` of the first run.

    Raises:
        UserError: a directory is no run directory, has no step yet, or holds malformed files.
    """
    if not run_dirs:
        raise UserError("report: expected at least one run directory")
    paths = [Path(run_dir) for run_dir in run_dirs]
    runs = [load_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    report = paths[0] / "report"
    try:
        for run in runs:
            plots = draw_all([run], run.path / "report")
        if len(runs) > 1:
            plots = draw_all(runs, report, prefix="compare_")
        page = report / "index.html"
        page.write_text(_page(runs, plots), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; cannot write the report") from None
    return page


def load_run(path: Path, name: str | None = None) -> Run:
    """Read a run directory; `config.yaml` and `summary.json` may be absent."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; expected a run directory")
    records = read_metrics(path)
    if not records:
        raise UserError(f"{path / METRICS_FILE}: no step is recorded yet")
    config, summary = path / "config.yaml", path / "summary.json"
    try:
        config_text = config.read_text(encoding="utf-8") if config.exists() else ""
        values = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{summary}:{error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: config.yaml or summary.json is not UTF-8 text") from None
    if not _is_memory(values.get("memory", {}) if isinstance(values, dict) else None):
        raise UserError(f"{summary}: memory: expected a mapping of optimizers to bytes by kind")
    return Run(name or path.resolve().name, path, records, config_text, values)


def _is_memory(memory: Any) -> bool:
    """Whether it maps optimizers to numbers of bytes by kind."""
    return isinstance(memory, dict) and all(
        isinstance(kinds, dict) and all(isinstance(value, int | float) for value in kinds.values())
        for kinds in memory.values()
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The directories' names; whole paths if two share one."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _page(runs: Sequence[Run], plots: Sequence[Plot]) -> str:
    title = " · ".join(run.name for run in runs)
    parts = [f"<h1>{html.escape(title)}</h1>", _summary_table(runs)]
    for plot in plots:
        image = base64.b64encode(plot.path.read_bytes()).decode("ascii")
        parts.append(
            f"<section><h2>{html.escape(plot.title)}</h2>"
            f'<img alt="{html.escape(plot.title)}" src="data:image/png;base64,{image}">'
            f"<p>{html.escape(plot.caption)}</p>"
        )
        if plot.title == "Memory":
            parts.append(_memory_table(runs))
        parts.append("</section>")
    parts.append("<h2>Configuration</h2>")
    for run in runs:
        text = html.escape(run.config) if run.config else "no config.yaml in the run directory"
        parts.append(
            f"<details><summary>{html.escape(run.name)}</summary><pre>{text}</pre></details>"
        )
    return _TEMPLATE.format(title=html.escape(title), style=_CSS, body="\n".join(parts))


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _summary_table(runs: Sequence[Run]) -> str:
    rows = []
    for label, tell in (
        ("updates", lambda run: f"{len(run.records)}"),
        ("of these skipped", lambda run: _total(run, "train/skipped", "{:.0f}")),
        (f"reward, first → last {_SPAN}", lambda run: _ends(run, "reward/mean", "{:.3f}")),
        (f"loss, first → last {_SPAN}", _loss_ends),
        ("realised / predicted KL", _kl_ratio),
        ("tokens/s in rollouts", lambda run: _mean(run, "rollout/tokens_per_s", "{:.0f}")),
        ("seconds/step", lambda run: _mean(run, "time/step_s", "{:.2f}")),
        ("time of all steps", _time),
        ("peak memory", _peak),
    ):
        rows.append([label, *(tell(run) for run in runs)])
    for key in sorted({key for run in runs for key in accuracy_keys(run)}):
        label = f"{key.removeprefix('eval/')}, before → after"
        rows.append([label, *(_ends(run, key, "{:.3f}", span=1) for run in runs)])
    for name in ("accuracy", "greedy"):
        keys = (f"{name}_before", f"{name}_after")
        if any(key in run.summary for run in runs for key in keys):
            cells = [
                " → ".join(_number(run.summary.get(key), "{:.3f}") for key in keys)
                if any(key in run.summary for key in keys)
                else "–"
                for run in runs
            ]
            rows.append([f"{name} (summary), before → after", *cells])
    return _table(["", *(run.name for run in runs)], [r for r in rows if set(r[1:]) != {"–"}])


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "–"


def _ends(run: Run, key: str, form: str, span: int = _SPAN) -> str:
    _, values = run.series(key)
    if not len(values):
        return "–"
    return f"{form.format(values[:span].mean())} → {form.format(values[-span:].mean())}"


def _loss_ends(run: Run) -> str:
    # A policy-gradient loss says nothing as a number.
    return "–" if len(run.series("reward/mean")[0]) else _ends(run, "train/loss", "{:.4f}")


def _mean(run: Run, key: str, form: str) -> str:
    _, values = run.series(key)
    return form.format(values.mean()) if len(values) else "–"


def _total(run: Run, key: str, form: str) -> str:
    _, values = run.series(key)
    return form.format(values.sum()) if len(values) else "–"


def _kl_ratio(run: Run) -> str:
    """Median over the steps at which the KL was measured."""
    ratios = [
        record["policy/kl_realised"] / record["policy/kl_predicted_scaled"]
        for record in run.records
        if record.get("policy/kl_realised") is not None
        and (record.get("policy/kl_predicted_scaled") or 0) > 0
    ]
    return f"{np.median(ratios):.3f} ({len(ratios)} measured)" if ratios else "–"


def _time(run: Run) -> str:
    _, values = run.series("time/step_s")
    return format_seconds(values.sum()) if len(values) else "–"


def _peak(run: Run) -> str:
    _, values = run.series("memory/peak_bytes")
    return f"{values.max() / 2**30:.2f} GiB" if len(values) else "–"


def _memory_table(runs: Sequence[Run]) -> str:
    bars = memory_bars(runs)
    kinds = [kind for kind in MEMORY_KINDS if any(kind in bar for bar in bars.values())]
    rows = []
    for name, bar in bars.items():
        values = [*(bar.get(kind, 0.0) for kind in kinds), sum(bar.values())]
        rows.append([name, *(f"{value / 2**20:,.1f}" for value in values)])
    return _table(["MiB", *kinds, "total"], rows)


_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

_CSS = """
body { margin: 0; background: #f6f6f4; color: #222; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
section { background: #fff; border: 1px solid #e2e2de; border-radius: 6px; padding: 1rem;
  margin: 1rem 0; }
section p { color: #666; margin: .4rem 0 0; font-size: .9rem; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #e2e2de; text-align: right; }
th:first-child { text-align: left; font-weight: 500; }
pre { background: #fff; border: 1px solid #e2e2de; padding: 1rem; overflow-x: auto;
  font-size: .8rem; }
summary { cursor: pointer; }
"""
