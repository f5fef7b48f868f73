"""The report: one self-contained page and readable plots, from long, short and odd runs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_logra import cli
from megatron_logra.errors import UserError
from megatron_logra.figures import MEMORY_KINDS, _rolling_mean
from megatron_logra.metrics import MetricsWriter
from megatron_logra.report import _names, load_run, write_report

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"


def make_run(directory: Path, steps: int, *, control: bool = True) -> Path:
    rng = random.Random()
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("model:\n  hf: <script>&\n")
    with MetricsWriter(directory, tensorboard=False) as writer:
        for step in range(steps):
            record = {
                "reward/mean": rng.random(),
                "reward/zero_variance_groups": rng.random(),
                "policy/entropy": rng.random(),
                "rollout/length_mean": rng.uniform(1, 20),
                "rollout/truncated": rng.random(),
                "time/rollout_s": rng.uniform(1, 2),
                "time/probe_s": rng.random() if control else None,
                "time/step_s": 4.0,
                "memory/weights_bytes": 300,
                "memory/sketches_bytes": 20,
                "memory/static_bytes": 320,
                "train/skipped": step == 1,
            }
            if control:
                record |= {
                    "policy/kl_predicted": rng.uniform(1e-4, 1e-2),
                    "policy/kl_predicted_scaled": 2e-3,
                    "policy/kl_budget": 2e-3,
                    "policy/kl_realised": 2.2e-3 if step % 2 == 0 else None,
                    "policy/alpha": rng.uniform(0.3, 3),
                }
            if step in (0, steps - 1):
                record |= {"eval/pass@1": (step + 1) / steps, "eval/loss": 0.5}
            writer.write(step, record)
    return directory


class Page(HTMLParser):
    """What a page shows, and everything it would have to load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        source = values.get("src") or values.get("href")
        if tag == "img" and source.startswith("data:image/png;base64,"):
            self.images.append(base64.b64decode(source.partition(",")[2]))
        elif source or tag in ("script", "link", "iframe"):
            self.loads.append(f"{tag} {source}")

    def handle_data(self, data):
        self.text += data


def pngs(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "report").glob("*.png")}


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> Path:
    """A run with everything, and its report made by the command."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", 20)
    memory = {
        "logra": {"weights": 100 * MIB, "gradients": 0, "sketches": 5 * MIB, "static": 105 * MIB},
        "adam": {"weights": 100 * MIB, "gradients": 200 * MIB, "optimizer": 400 * MIB},
    }
    (run / "summary.json").write_text(json.dumps({"accuracy_before": 0.2, "memory": memory}))
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert cli.main(["report", str(run)]) == 0
    assert stdout.getvalue() == f"{run / 'report' / 'index.html'}\n"
    return run


def test_the_page_holds_every_plot_and_loads_nothing(reported):
    page = reported / "report" / "index.html"
    parsed = Page(page)
    assert parsed.loads == []
    assert not re.search(r"url\(|@import", page.read_text())
    files = pngs(reported)
    assert set(files) == {
        f"{name}.png"
        for name in ("reward", "accuracy", "kl", "alpha", "memory", "responses", "time")
    }
    assert sorted(parsed.images) == sorted(files.values())
    assert all(image.startswith(PNG) for image in parsed.images)
    assert "hf: <script>&" in parsed.text


def test_the_summary_tells_the_numbers_of_the_run(reported):
    rewards = [record["reward/mean"] for record in load_run(reported).records]
    text = Page(reported / "report" / "index.html").text
    assert f"{np.mean(rewards[:5]):.3f} → {np.mean(rewards[-5:]):.3f}" in text
    assert "pass@1, before → after0.050 → 1.000" in text
    assert "loss, before" not in text  # eval/loss is no accuracy
    assert "accuracy (summary), before → after0.200 → –" in text
    assert "realised / predicted KL1.100 (10 measured)" in text
    assert "of these skipped1" in text
    assert "time of all steps1:20" in text


def test_the_memory_table_sets_logra_beside_dense_adam(reported):
    text = Page(reported / "report" / "index.html").text
    assert "LoGRA100.00.00.05.0105.0" in text
    assert "dense Adam100.0200.0400.00.0700.0" in text
    memory = load_run(reported).memory()
    assert memory["LoGRA"] == {"weights": 100.0 * MIB, "sketches": 5.0 * MIB}


@pytest.mark.parametrize("steps", [1, 70])
def test_runs_of_any_length_are_drawn(tmp_path, steps):
    run = make_run(tmp_path / "run", steps)
    write_report([run])
    assert len(pngs(run)) == 7


def test_plots_without_data_are_left_out(tmp_path):
    run = make_run(tmp_path / "adam", 3, control=False)
    write_report([run])
    assert "kl.png" not in pngs(run)
    bare = tmp_path / "bare"
    with MetricsWriter(bare, tensorboard=False) as writer:
        writer.write(0, {"train/loss": 1.5})
        writer.write(1, {"train/loss": None})
    write_report([bare])
    assert set(pngs(bare)) == {"loss.png"}


def test_several_runs_are_overlaid_on_the_first_ones_page(tmp_path):
    runs = [make_run(tmp_path / name, 8, control=name != "adam") for name in ("logra", "adam")]
    page = write_report(runs)
    assert page.parent.parent == runs[0]
    assert not (runs[1] / "report" / "index.html").exists()
    assert len(pngs(runs[1])) == 5  # neither KL nor α
    compare = {name: data for name, data in pngs(runs[0]).items() if name.startswith("compare_")}
    assert sorted(Page(page).images) == sorted(compare.values())
    assert len(compare) == 7


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [tmp_path / parent / "run" for parent in ("a", "b")]
    assert _names(paths) == [str(path) for path in paths]
    assert _names([paths[0], tmp_path / "other"]) == ["run", "other"]


def test_stacked_kinds_hold_no_sum_of_others():
    assert not {"static", "peak", "total"} & set(MEMORY_KINDS)


def test_the_rolling_mean_is_the_mean_of_what_lies_under_the_window():
    values = np.random.default_rng().normal(size=97)
    width = 9
    expected = [
        values[max(0, i - width // 2) : i + width // 2 + 1].mean() for i in range(len(values))
    ]
    np.testing.assert_allclose(_rolling_mean(values, width), expected, rtol=1e-12, atol=1e-12)


def test_what_is_no_run_directory_is_named(tmp_path):
    with pytest.raises(UserError, match="no such directory; expected a run directory"):
        write_report([tmp_path / "none"])
    with pytest.raises(UserError, match=r"metrics\.jsonl: No such file"):
        write_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl: no step is recorded yet"):
        write_report([tmp_path])
    with pytest.raises(UserError, match="at least one run directory"):
        write_report([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"summary\.json:1: not valid JSON"),
        ("[]", "memory: expected a mapping"),
        ('{"memory": {"logra": 3}}', "memory: expected a mapping"),
        ('{"memory": {"logra": {"weights": "3"}}}', "memory: expected a mapping"),
    ],
)
def test_a_malformed_summary_is_named(tmp_path, text, message):
    run = make_run(tmp_path / "run", 2)
    (run / "summary.json").write_text(text)
    with pytest.raises(UserError, match=message):
        write_report([run])


def test_one_bad_run_leaves_no_page_behind(tmp_path):
    good = make_run(tmp_path / "good", 2)
    with pytest.raises(UserError):
        write_report([good, tmp_path / "none"])
    assert not (good / "report").exists()
