"""The quickstart's program, on a tiny model in place of the downloaded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import save_tiny_llama

from megatron_logra import quickstart
from megatron_logra.config import load_config
from megatron_logra.memory import KINDS
from megatron_logra.model import smollm2


@pytest.fixture
def tiny_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama with tied embeddings, where the quickstart looks for SmolLM2."""
    directory = save_tiny_llama(tmp_path / "tiny model", 260)
    monkeypatch.setattr(smollm2, "fetch", lambda: directory)
    return directory


CHANGES = [
    *("model.tokenizer=bytes", "sketch.rank=8", "train.steps=2", "train.prompts_per_step=2"),
    *("train.seq_length=256", "eval.problems=3", "eval.samples=2", "logging.tensorboard=false"),
    "environment.scorer=exact",
]


@pytest.mark.usefixtures("tiny_directory")
def test_both_kinds_leave_a_summary_and_one_report_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs" / "quickstart"
    for kind, name in (("adam", "quickstart-adam"), ("logra", "quickstart")):
        command = ["--kind", kind, "--seed", "3", "--run-dir", str(run_dir.with_name(name))]
        assert quickstart.main([*command, *CHANGES]) == 0
        summary = json.loads((run_dir.with_name(name) / "summary.json").read_text())
        for key in ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after"):
            assert 0 <= summary[key] <= 1
        assert summary["seconds"] > 0 and summary["kind"] == kind
        for sizes in summary["memory"].values():
            assert set(sizes) == {*KINDS, "static"}
            assert sizes["static"] == sum(sizes[kind] for kind in KINDS)
        assert summary["memory"]["logra"]["static"] < summary["memory"]["adam"]["static"] / 2
    said = capsys.readouterr().out
    page = run_dir / "report" / "index.html"
    assert str(page) in said and "points)" in said
    assert "quickstart-adam" in page.read_text()


@pytest.mark.usefixtures("tiny_directory")
def test_counted_memory_is_the_planned_one_of_the_other_run(tmp_path: Path) -> None:
    memory = []
    for kind in ("logra", "adam"):
        run_dir = tmp_path / kind
        quickstart.run(kind, 0, run_dir, CHANGES)
        memory.append(json.loads((run_dir / "summary.json").read_text())["memory"])
    assert memory[0] == memory[1]  # each is counted in one run and planned in the other


def test_an_earlier_run_is_kept_under_another_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "quickstart"
    quickstart._put_aside(run_dir)  # nothing there: nothing happens
    for content in ("first", "second"):
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text(content)
        quickstart._put_aside(run_dir)
        assert not run_dir.exists()
    kept = {path.name: (path / "metrics.jsonl").read_text() for path in tmp_path.iterdir()}
    assert kept == {"quickstart.1": "first", "quickstart.2": "second"}


@pytest.mark.usefixtures("tiny_directory")
def test_a_wrong_override_is_exit_2_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert quickstart.main(["--run-dir", str(run_dir), "train.stepz=2"]) == 2
    assert "train.stepz" in capsys.readouterr().err
    assert not run_dir.exists()


def test_the_quickstart_is_a_valid_configuration_for_both_kinds() -> None:
    for kind in quickstart.KINDS:
        config = load_config(quickstart.CONFIG, ["model.hf=x", f"optimizer.kind={kind}"])
        assert config.train.steps * config.train.prompts_per_step == 200
