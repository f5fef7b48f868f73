"""A save in the background is of the moment it began, and whole or not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_logra import checkpoint
from megatron_logra.background_save import BackgroundSave
from megatron_logra.errors import UserError

DESCRIPTION = {"model": {"hidden_size": 48}}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Megatron's writer waits for this event before it writes."""
    release = threading.Event()
    write = FileSystemWriterAsync.write_preloaded_data

    def held_write(*args: Any, **kwargs: Any) -> Any:
        assert release.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(held_write))
    yield release
    release.set()


def begin(root: Path, step: int, model: torch.nn.Module, position: int = 0) -> BackgroundSave:
    state = {**checkpoint.weights_state([model]), "trainer": {"position": position}}
    return BackgroundSave(root, step, state, DESCRIPTION, keep=2)


def test_it_holds_the_state_of_its_beginning(
    tmp_path: Path, pg: ProcessGroupCollection, held: threading.Event
) -> None:
    model = tiny_model(pg, train={"seed": 3})
    held.set()
    earlier = begin(tmp_path, 1, model).finish()
    held.clear()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    save = begin(tmp_path, 2, model, position=17)
    with torch.no_grad():  # training goes on
        for parameter in model.parameters():
            parameter.normal_()
    assert not save.done()
    assert checkpoint.latest(tmp_path) == earlier, "not the latest before it is whole"
    held.set()
    path = save.finish()
    assert checkpoint.latest(tmp_path) == path and path.name == "iter_0000002"
    assert checkpoint.read_description(path) == {"step": 2, **DESCRIPTION}
    loaded = checkpoint.load(path, checkpoint.weights_state([model]))
    checkpoint.set_weights([model], loaded)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert loaded["trainer"] == {"position": 17}


def test_a_failure_in_the_background_is_told_and_the_last_checkpoint_remains(
    tmp_path: Path, pg: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(pg)
    good = begin(tmp_path, 1, model).finish()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(full))
    save = begin(tmp_path, 2, model)
    with pytest.raises(UserError) as error:
        save.finish()
    message = str(error.value)
    assert "\n" not in message and "iter_0000002" in message and "not saved" in message
    assert good.name in message and "No space left" in message
    assert checkpoint.latest(tmp_path) == good
    assert sorted(p.name for p in tmp_path.iterdir()) == [good.name, "latest"]
    monkeypatch.undo()
    assert begin(tmp_path, 2, model).finish() == checkpoint.latest(tmp_path)
