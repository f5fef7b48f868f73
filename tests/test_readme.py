"""README.md: its commands are real, its files exist, and its configuration trains."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_logra import cli, quickstart
from megatron_logra.config import config_from_dict, load_config
from megatron_logra.metrics import read_metrics

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
# Of a run or an environment, not of the repository.
MADE = ("runs/", "RUN/", "report/", "bin/", "iter_NNNNNNN/")

# What turns the example into one tiny step. Wrong integers score more than none at all, so that the
# random model's responses differ in their rewards.
TINY = [
    "model.hf=null",
    "model.tokenizer=bytes",
    "model.spec={num_layers: 1, hidden_size: 32, num_attention_heads: 2, vocab_size: 260}",
    *("sketch.rank=8", "rollout.sampling.max_tokens=8", "train.steps=1", "train.seq_length=192"),
    *("train.prompts_per_step=2", "train.responses_per_prompt=8", "eval.problems=2"),
    *("environment.scorer=last_integer", "algorithm.failure_reward=-1.0"),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The commands of bash blocks and of `code` in the text, without comments and brackets."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", PROSE)
    starts = ("megatron-logra ", "tools/", "python ")
    lines += [span for span in spans if span.startswith(starts) and " " in span]
    words = [shlex.split(re.sub(r"[\[\]]", "", line), comments=True) for line in lines]
    return [command for command in words if command]


COMMANDS = commands()


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The README's configuration as a file."""
    text = blocks("yaml")[0]
    path = tmp_path / "CONFIG.yaml"
    path.write_text(text)
    return path


def test_parts_of_configurations_fit_the_whole_one(example: Path) -> None:
    whole = yaml.safe_load(example.read_text())
    for part in map(yaml.safe_load, blocks("yaml")[1:]):
        config_from_dict({**whole, **part})


def test_every_command_of_the_program_is_shown() -> None:
    shown = {command[1] for command in COMMANDS if command[0] == "megatron-logra"}
    assert shown == set(cli.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_one_that_can_be_given(
    command: list[str],
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *arguments = command
    if program == "megatron-logra":
        _parse(arguments, example, monkeypatch, capsys)
        return
    if program == "python":
        program = arguments.pop(0)
    else:
        assert os.access(REPO / program, os.X_OK), f"{program} cannot be executed"
    assert (REPO / program).is_file()
    if program == "tools/quickstart.sh":
        given = ["1" if word == "N" else word for word in arguments]
        quickstart.arguments_parser().parse_intermixed_args(given)
        return
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert re.search(rf"{flag}\b", (REPO / program).read_text()), f"{program} has no {flag}"


def _parse(
    arguments: list[str],
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """See that the command line gets as far as the command's own work."""
    reached: list[str] = []

    def stop(*given: Any, **options: Any) -> None:
        reached.append(arguments[0])
        raise KeyboardInterrupt

    for function in ("require_trainable", "require_servable"):
        monkeypatch.setattr(cli, function, stop)
    for function in (
        *("rl.evaluate.run", "rl.evaluate.generate", "rollout.worker.run"),
        *("report.write_report", "planner.report.run", "convert.from_hf", "convert.to_hf"),
    ):
        monkeypatch.setattr(f"megatron_logra.{function}", stop)
    monkeypatch.setattr("megatron_logra.doctor.run", stop)
    filled = {"CONFIG.yaml": str(example), "KEY=VALUE": "train.steps=2"}
    filled |= {"N": "1", "GIB": "80"}
    given = [
        filled.get(w, w)
        for w, last in zip(arguments, ["", *arguments], strict=False)
        if w != "…" or last == "--prompt"
    ]
    if arguments[0] == "rollout-worker":  # of a run that has some
        given += ["rollout.placement=separate", "rollout.sync=sketch"]
    cli.main(given)
    assert reached == [arguments[0]], capsys.readouterr().err


def test_every_file_that_is_named_exists() -> None:
    spans = re.findall(r"`([^`\s]+)`", PROSE) + re.findall(r"\]\(([^)]+)\)", PROSE)
    named = [
        span
        for span in spans
        if re.fullmatch(r"[\w./-]+(\.py|\.sh|\.md|\.yaml|\.png|/)", span)
        and not span.startswith(MADE)
    ]
    assert len(named) > 15
    places = (REPO, REPO / "megatron_logra")
    assert [n for n in named if not any((place / n).exists() for place in places)] == []


def test_every_option_that_is_named_exists() -> None:
    sections = set(load_config(quickstart.CONFIG, ["model.hf=x"]).model_dump())
    dotted = re.findall(r"`(\w+(?:\.\w+)+)`", PROSE)
    keys = [key for key in dotted if key.split(".")[0] in sections and not key.endswith(".py")]
    assert keys
    for key in keys:
        node: Any = load_config(quickstart.CONFIG, ["model.hf=x"]).model_dump()
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_the_example_trains_and_the_other_commands_read_its_run(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_config(example)  # as it stands, but for the model
    run_dir = tmp_path / "run"
    config = [str(example), *TINY, f"logging.run_dir={run_dir}"]
    assert cli.main(["train", *config]) == 0
    (record,) = read_metrics(run_dir)
    assert record["train/skipped"] == 0 and record["policy/alpha"] > 0
    saved = run_dir / "checkpoints" / "iter_0000001"
    assert saved.is_dir() and str(saved) in capsys.readouterr().out
    assert cli.main(["train", *config, "train.steps=2", "--resume"]) == 0
    assert len(read_metrics(run_dir)) == 2
    assert cli.main(["eval", *config]) == 0
    found = json.loads((run_dir / "eval.json").read_text())
    assert 0 <= found["pass@1"] <= 1 and found["checkpoint"].endswith("iter_0000002")
    capsys.readouterr()
    assert cli.main(["generate", *config, "--prompt", "What is the GCD of 4 and 6?"]) == 0
    assert capsys.readouterr().out.strip("\n")
    assert cli.main(["report", str(run_dir)]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/latest", "tensorboard", "rollouts"):
        assert (run_dir / name).exists(), name
