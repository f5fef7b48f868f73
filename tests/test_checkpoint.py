"""Checkpoints: whole or not there, of this model or refused."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_config, tiny_model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_logra import checkpoint
from megatron_logra.errors import UserError
from megatron_logra.rl.policy import build_policy

SAVE_FOREVER = """
import sys
from pathlib import Path
from megatron_logra import checkpoint, distributed
from megatron_logra.config import ParallelConfig
from helpers import tiny_model

if __name__ == "__main__":
    pg = distributed.initialize(ParallelConfig(), 0)
    model = tiny_model(pg)
    step = 1
    while True:
        state = checkpoint.weights_state([model])
        checkpoint.save(Path(sys.argv[1]), step, state, {"model": {}}, keep=2)
        print(step, flush=True)
        step += 1
"""


def _save(root: Path, step: int, model: torch.nn.Module, keep: int = 3, **extra: Any) -> Path:
    state = {**checkpoint.weights_state([model]), **extra}
    return checkpoint.save(root, step, state, {"model": {"hidden_size": 48}}, keep)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _same(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


def _load(path: Path, model: torch.nn.Module) -> None:
    checkpoint.read_description(path)
    checkpoint.set_weights([model], checkpoint.load(path, checkpoint.weights_state([model])))


@pytest.fixture
def models(pg: ProcessGroupCollection) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two models of one shape with different fresh weights."""
    first, second = (tiny_model(pg, train={"seed": random.randrange(2**31)}) for _ in range(2))
    assert not _same(first, _weights(second))
    return first, second


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_plain_state_come_back_bit_for_bit(
    tmp_path: Path, pg: ProcessGroupCollection, precision: str
) -> None:
    model, other = (
        tiny_model(pg, train={"seed": random.randrange(2**31), "precision": precision})
        for _ in range(2)
    )
    plain = {"position": 17, "baseline": 0.1 + 0.2, "record": {"a": None, "b": [1, 2.5, "c"]}}
    path = _save(tmp_path, 12, model, trainer=plain)
    assert path.name == "iter_0000012" and checkpoint.latest(tmp_path) == path
    assert checkpoint.read_description(path) == {"step": 12, "model": {"hidden_size": 48}}
    loaded = checkpoint.load(path, checkpoint.weights_state([other]))
    checkpoint.set_weights([other], loaded)
    assert _same(other, _weights(model))
    assert loaded["trainer"] == plain


def test_random_states_come_back(
    tmp_path: Path, pg: ProcessGroupCollection, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(()).item()
        return [random.random(), float(np.random.rand()), torch.rand(()).item(), inside]

    path = _save(tmp_path, 1, models[0], rng=checkpoint.rng_state(pg))
    expected = [draw() for _ in range(3)]
    loaded = checkpoint.load(path, {"rng": checkpoint.rng_state(pg)})
    checkpoint.set_rng_state(loaded["rng"])
    assert [draw() for _ in range(3)] == expected


def test_older_checkpoints_are_deleted_and_later_ones_never(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    for step in (1, 2, 3, 9, 4):  # 9 is of a run that was taken up again from 3
        _save(tmp_path, step, models[0], keep=2)
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["iter_0000003", "iter_0000004", "iter_0000009"]
    assert (tmp_path / "latest").read_text() == "iter_0000004\n"


def test_saving_a_step_again_replaces_it(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    first, second = models
    _save(tmp_path, 5, first)
    path = _save(tmp_path, 5, second)
    expected = _weights(second)
    _load(path, first)
    assert _same(first, expected)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "metadata.json", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(
    tmp_path: Path,
    models: tuple[torch.nn.Module, torch.nn.Module],
    file: str,
    harm: str,
) -> None:
    first, second = models
    good = _save(tmp_path, 3, first)
    bad = _save(tmp_path, 6, second)
    assert checkpoint.latest(tmp_path) == bad
    content = bytearray((bad / file).read_bytes())
    if harm == "delete":
        (bad / file).unlink()
    elif harm == "flip":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        (bad / file).write_bytes(content)
    else:
        (bad / file).write_bytes(content[: random.randrange(len(content))])
    before = _weights(second)
    with pytest.raises(UserError, match=r"iter_0000006.*iter_0000003") as error:
        checkpoint.latest(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="iter_0000006"):
        checkpoint.read_description(bad)
    assert _same(second, before)
    (tmp_path / "latest").write_text("iter_0000003\n")  # what the message says
    assert checkpoint.latest(tmp_path) == good


def test_a_checkpoint_without_hashes_is_refused(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    path = _save(tmp_path, 1, models[0])
    (path / "integrity.json").unlink()
    with pytest.raises(UserError, match=r"iter_0000001: damaged.*no good one"):
        checkpoint.latest(tmp_path)


def test_latest_that_names_nothing_is_an_error_and_no_latest_is_none(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    path = _save(tmp_path, 2, models[0])
    shutil.rmtree(path)
    with pytest.raises(UserError, match=r"iter_0000002.*no good one"):
        checkpoint.latest(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(UserError, match="not the name of a checkpoint"):
        checkpoint.latest(tmp_path)


def test_what_a_killed_save_leaves_is_ignored_and_cleaned_up(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    path = _save(tmp_path, 1, models[0])
    unfinished = tmp_path / ".unfinished-iter_0000002"
    unfinished.mkdir()
    shutil.copy(path / "__0_0.distcp", unfinished)
    (tmp_path / ".unfinished-latest").write_text("iter_0000002")
    shutil.copytree(path, tmp_path / "iter_0000003")  # renamed, but `latest` not yet written
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.list_checkpoints(tmp_path) == [path, tmp_path / "iter_0000003"]
    _save(tmp_path, 2, models[0])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_process_killed_while_saving_leaves_a_checkpoint_that_loads(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    program = tmp_path / "save_forever.py"
    program.write_text(SAVE_FOREVER)
    root = tmp_path / "checkpoints"
    tests = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(program), str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"},
    )
    assert process.stdout is not None
    done = 0
    while done < 3:  # the first saves are through
        done = int(process.stdout.readline())
    deadline = time.monotonic() + 20
    while not list(root.glob(".unfinished-iter*")):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    path = checkpoint.latest(root)
    assert path is not None and int(path.name.removeprefix("iter_")) >= 3
    first, second = models
    _load(path, first)
    _load(path, second)
    assert _same(first, _weights(second))


def test_a_full_disk_is_reported_and_the_last_checkpoint_remains(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    first, second = models
    path = _save(tmp_path, 1, first)
    size = (path / "__0_0.distcp").stat().st_size
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, former[1]))
    try:
        with pytest.raises(UserError, match=r"iter_0000002.*not saved.*iter_0000001") as error:
            _save(tmp_path, 2, second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.list_checkpoints(tmp_path) == [path]
    expected = _weights(first)
    _load(path, second)
    assert _same(second, expected)
    _save(tmp_path, 2, second)  # and with room again it goes on


def test_a_directory_that_cannot_be_written_is_a_user_error(
    tmp_path: Path, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/checkpoints/iter_0000001.*Errno"):
        _save(tmp_path / "file" / "checkpoints", 1, models[0])


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    tmp_path: Path, pg: ProcessGroupCollection
) -> None:
    policy = build_policy(_policy_config(hidden_size=48, num_layers=2))
    path = checkpoint.save(
        tmp_path,
        1,
        checkpoint.weights_state(policy.chunks),
        {"model": policy.description()},
        1,
    )
    other = build_policy(_policy_config(hidden_size=24, num_layers=1))
    before = _weights(other.chunks[0])
    with pytest.raises(UserError, match=r"num_layers 2, here 1; hidden_size 48, here 24"):
        other.load_weights(path)
    assert _same(other.chunks[0], before)
    same = build_policy(_policy_config(hidden_size=48, num_layers=2, max_sequence_length=32))
    with torch.no_grad():
        for parameter in same.chunks[0].parameters():
            parameter.zero_()
    same.load_weights(path)
    assert _same(same.chunks[0], _weights(policy.chunks[0]))


def test_asking_for_more_than_a_checkpoint_holds_is_a_user_error(
    tmp_path: Path, pg: ProcessGroupCollection, models: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    path = _save(tmp_path, 1, models[0])
    state = {**checkpoint.weights_state([models[0]]), "rng": checkpoint.rng_state(pg)}
    with pytest.raises(UserError, match="does not fit this run"):
        checkpoint.load(path, state)


def _policy_config(**spec: Any) -> Any:
    length = {"seq_length": spec.get("max_sequence_length", 64)}
    return tiny_config({"vocab_size": 260, **spec}, train=length)
