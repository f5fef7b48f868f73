"""Wrong input through the command line: one clear line, exit code 2, and nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import TINY_SPEC

from megatron_logra import checkpoint, cli
from megatron_logra.metrics import read_metrics

ONE_LINE = "megatron-logra: error: "
PYTHON = {"kind": "python", "function": "trainer_environments:Letters"}
VARIES = ("time/", "rollout/tokens_per_s", "memory/peak_bytes", "host/", "gpu/")


def write_config(directory: Path, *, run: str = "run", **sections: Any) -> str:
    """A configuration file of a run of tiny steps; sections override single keys."""
    data: dict[str, Any] = {
        "model": {
            "spec": TINY_SPEC | {"num_layers": 1, "hidden_size": 24, "vocab_size": 260},
            "tokenizer": "bytes",
        },
        "sketch": {"rank": 4},
        "algorithm": {"name": "grpo"},
        "rollout": {"sampling": {"max_tokens": 4}},
        "environment": PYTHON,
        "train": {
            "steps": 2,
            "prompts_per_step": 2,
            "responses_per_prompt": 4,
            "micro_batch_size": 8,
            "seq_length": 64,
            "precision": "fp32",
        },
        "eval": {"problems": 2, "at_start": False, "at_end": False},
        "logging": {"run_dir": str(directory / run), "tensorboard": False},
    }
    for name, values in sections.items():
        whole = name == "environment" or name not in data
        data[name] = values if whole else data[name] | values
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the program, which must end with 2 and one line on stderr; returns the message."""

    def run(*args: str) -> str:
        capfd.readouterr()
        code = cli.main(args)
        stderr = capfd.readouterr().err
        assert code == 2, stderr
        assert stderr.count("\n") == 1 and stderr.startswith(ONE_LINE), stderr
        return stderr.removeprefix(ONE_LINE).rstrip("\n")

    return run


def everything_in(directory: Path) -> dict[str, bytes]:
    """The files' contents, but for the list of starts, in which failed ones have their place."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.name != "attempts.jsonl"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=1"], "train.stepz: unknown configuration key; expected one of: steps, "),
        (["train.steps=1.5"], "train.steps: expected a valid integer"),
        (["sketch.rank=30"], "sketch.rank: 30 exceeds layer decoder.layers.0."),
        (["sketch.targets=[linear_q]"], "sketch.targets: no linear is named 'linear_q'; expected"),
        (["sketch.targets=[output_layer]"], "sketch.targets: no linear is named 'output_layer'"),
        (["sketch.targets=[word_embeddings]"], "sketch.targets: no linear is named 'word_emb"),
        (["environment={kind: reasoning_gym, task: gdc}"], "environment gdc: task: reasoning_gym"),
        (["environment={kind: jsonl, path: none.jsonl}"], "environment.path: none.jsonl: No such"),
        (["environment=[]"], "environment: missing; expected at least one environment"),
        (
            ["environment.params={reward: text}"],
            "environment trainer_environments:Letters: the",
        ),
        (["train.seq_length=8"], "train.seq_length: the prompt of problem "),
        (["train.seq_length=65"], "train.seq_length=65: the model of model.spec takes at most 64"),
        (["model={hf: nowhere}"], "nowhere/config.json: No such file"),
        (["model.tokenizer=nowhere"], "nowhere: expected a directory with a tokenizer, or bytes"),
        (["model.spec.num_query_groups=4"], "model.spec.num_query_groups: expected a divisor of"),
        (["parallel.tensor=2"], "parallel.tensor=2: need a multiple of 2 ranks, but this run has"),
        (["rollout.sampling.top_p=0.5"], "rollout.sampling: training needs the full distribution"),
        (["checkpoint.load=nowhere"], "nowhere: no such checkpoint directory"),
    ],
)
def test_a_wrong_run_is_refused_before_its_first_step(
    tmp_path: Path, refused: Callable[..., str], overrides: list[str], message: str
) -> None:
    assert refused("train", write_config(tmp_path), *overrides).startswith(message)
    run_dir = tmp_path / "run"
    assert not (run_dir / "checkpoints").exists()
    assert not (run_dir / "metrics.jsonl").exists() or not read_metrics(run_dir)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "1+1?"', ":2: "),
        ('{"question": "1+1?"}', ":2: expected answer"),
        ('{"question": 3, "answer": 3}', ":2: question: expected text, got 3"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_malformed_line_of_problems_is_named(
    tmp_path: Path, refused: Callable[..., str], command: str, line: str, message: str
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": 4}) + "\n" + line + "\n")
    config = write_config(tmp_path, environment={"kind": "jsonl", "path": str(path)})
    assert refused(command, config).startswith(f"{path}{message}")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_run_directory_that_cannot_be_one_is_named(
    tmp_path: Path, refused: Callable[..., str], command: str
) -> None:
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/no-run-here")):
        message = refused(command, write_config(tmp_path), f"logging.run_dir={place}")
        assert message.startswith(f"logging.run_dir: {place}: "), message
    assert (tmp_path / "file").read_text() == "precious"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.yaml and its finished run of two steps."""
    directory = tmp_path_factory.mktemp("finished")
    assert cli.main(["train", write_config(directory, checkpoint={"interval": 1})]) == 0
    return directory


@pytest.fixture
def trained(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished`; its config.yaml names the copied run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    write_config(tmp_path, checkpoint={"interval": 1})
    return tmp_path


def test_what_was_trained_is_never_lost_to_a_wrong_command(
    trained: Path, refused: Callable[..., str]
) -> None:
    config, run_dir = str(trained / "config.yaml"), trained / "run"
    before = everything_in(run_dir)
    other = ["model.spec.hidden_size=36", "train.steps=4"]
    for command, message in {
        ("train", config): f"logging.run_dir: {run_dir} already holds a run; go on with it by --re",
        ("train", config, "--resume", *other): "hidden_size 24, here 36",
        ("train", config, "--resume", "optimizer.kind=adam"): "another optimizer: kind logra, here",
        ("train", config, "--resume", "sketch.rank=99"): "sketch.rank: 99 exceeds layer",
        ("eval", config, *other): "hidden_size 24, here 36",
        ("eval", config, "--checkpoint", "nowhere"): "nowhere: no such checkpoint directory",
        ("eval", config, "environment=[]"): "environment: missing",
        ("generate", config, *other, "--prompt", "x"): "hidden_size 24, here 36",
        ("report", str(trained)): "metrics.jsonl: No such file",
    }.items():
        assert message in refused(*command), command
    assert everything_in(run_dir) == before


def test_an_interrupted_checkpoint_is_refused_and_the_one_before_it_named(
    trained: Path, refused: Callable[..., str]
) -> None:
    config, last = str(trained / "config.yaml"), trained / "run" / "checkpoints" / "iter_0000002"
    (last / "checkpoint.json").unlink()
    before = everything_in(trained / "run")
    for command in (["train", config, "--resume"], ["eval", config]):
        message = refused(*command)
        assert message.startswith(f"{last}: not a checkpoint of this program, or an interrupted")
        assert "the newest good one is iter_0000001" in message
    assert everything_in(trained / "run") == before
    last.rename(trained / "away")
    (trained / "run" / "checkpoints" / "latest").write_text("iter_0000001\n")
    weights = next(path for path in last.with_name("iter_0000001").glob("*.distcp"))
    weights.unlink()
    message = refused("train", config, "--resume")
    assert "damaged: " in message and f"{weights.name}'" in message


def test_a_prompt_longer_than_the_model_is_refused(
    trained: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    config = str(trained / "config.yaml")
    message = refused("generate", config, "--prompt", "x" * 64)
    assert "tokens" in message and "expected" in message
    assert cli.main(["generate", config, "--prompt", "x", "rollout.sampling.temperature=0"]) == 0
    said = capfd.readouterr()
    assert said.err == f"weights: {trained / 'run' / 'checkpoints' / 'iter_0000002'}\n"
    assert said.out


@pytest.mark.parametrize(
    ("name", "expected"), [("WORLD_SIZE", "the number of ranks"), ("MASTER_PORT", "a number")]
)
def test_a_launchers_variable_that_is_no_number_is_named(
    name: str,
    expected: str,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for each, value in {**good, name: "two"}.items():
        monkeypatch.setenv(each, value)
    assert refused("train", write_config(tmp_path)) == f"{name}=two: expected {expected}"


def test_a_problem_that_does_not_fit_ends_the_run_after_saving_what_was_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = {**PYTHON, "params": {"long": 20}}
    config = write_config(tmp_path, environment=environment)
    common = ["train.steps=40", "checkpoint.interval=0", "sketch.refresh=2"]
    short = ["train.seq_length=40"]
    assert cli.main(["train", config, *common, *short]) == 2
    said = capfd.readouterr().err.splitlines()
    done = len(read_metrics(tmp_path / "run"))
    assert 0 < done < 40, "another seed: the long problem must not come first"
    saved = tmp_path / "run" / "checkpoints" / f"iter_{done:07d}"
    assert said[-2] == f"saved {saved}; go on from it with --resume"
    assert said[-1].startswith(f"{ONE_LINE}train.seq_length: the prompt of problem ")
    assert checkpoint.latest(saved.parent) == saved
    steps = f"train.steps={done + 2}"
    assert cli.main(["train", config, *common, *short, "--resume"]) == 2
    assert checkpoint.list_checkpoints(saved.parent) == [saved]
    assert cli.main(["train", config, *common, steps, "--resume"]) == 0
    assert cli.main(["train", config, *common, steps, f"logging.run_dir={tmp_path}/whole"]) == 0
    runs = [
        [
            {key: value for key, value in record.items() if not key.startswith(VARIES)}
            for record in read_metrics(tmp_path / name)
        ]
        for name in ("run", "whole")
    ]
    assert runs[0] == runs[1] and len(runs[0]) == done + 2


def test_an_evaluation_that_fails_after_the_last_step_does_not_lose_the_run(tmp_path: Path) -> None:
    environment = {**PYTHON, "params": {"long": 20}}
    last = {"problems": 99, "at_end": True}
    config = write_config(tmp_path, environment=environment, eval=last)
    short = ["train.seq_length=40", "train.steps=1", "train.prompts_per_step=1"]
    assert cli.main(["train", config, *short]) == 2
    assert not read_metrics(tmp_path / "run")
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.name == "iter_0000001"
    assert cli.main(["train", config, "train.steps=1", "--resume"]) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0]
