"""Weights over process groups: the same receivers, and no worker that holds up the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import whole_weights
from reference import config_for, make_checkpoint
from sync_runs import (
    LAYOUTS,
    STEP,
    assert_a_bad_update_is_healed,
    assert_follows,
    make_receiver,
    one_update,
    side_by_side,
    wait_until,
)
from torch import distributed as dist
from training import make_learner

from megatron_logra import launcher
from megatron_logra.errors import UserError
from megatron_logra.optimizer.learner import Learner
from megatron_logra.sync.follower import Follower
from megatron_logra.sync.process_groups import LOGGED, GroupSender
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.sender import Sender
from megatron_logra.sync.transport import read_head


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", True)
    return path


@pytest.mark.parametrize(("trainer", "worker"), [("tp2", "one"), ("one", "pp2")])
def test_receivers_of_any_layout_follow(trainer, worker, ranks, directory, tmp_path):
    senders, receivers = LAYOUTS[trainer][0], LAYOUTS[worker][0]
    ports = launcher.free_port(), launcher.free_port()
    found = ranks.run(
        senders + receivers, side_by_side, directory, trainer, worker, tmp_path, 3, ports
    )
    sent, _ = found[0]
    for received, drifts, healed in found[senders:]:
        assert_follows(received, sent, bits=False, sections=STEP)
        assert healed == []
        assert all(drift.ulps <= 1 for drift in drifts[1:])
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"HEAD", "done"}, "weights went through files"


# --- faults, between two threads of one rank ---------------------------------------------------


@dataclass
class Line:
    """A trainer and a receiver that follows it over a process group."""

    learner: Learner
    sender: GroupSender
    receiver: Receiver
    follower: Follower

    def step(self) -> None:
        one_update(self.learner)
        self.sender.publish()

    def same(self) -> bool:
        mine, theirs = whole_weights(self.receiver), whole_weights(self.learner)
        return all(torch.equal(mine[name], weight) for name, weight in theirs.items())


@pytest.fixture
def line(directory, tmp_path, pg):
    cfg = config_for(directory, **STEP)
    learner = make_learner(cfg, pg)
    sender = GroupSender(tmp_path, Sender(learner, cfg.sketch, "first"), timeout_s=2)
    receiver = make_receiver(cfg)
    follower = Follower(tmp_path, receiver, "worker_0", timeout_s=20)
    assert not follower.catch_up(), "there is nothing to follow yet"
    sender.start()
    assert follower.catch_up(0)
    yield Line(learner, sender, receiver, follower)
    sender.close()


def truncated(piece: torch.Tensor, log: Any) -> torch.Tensor:
    return piece[:-100]


def altered(piece: torch.Tensor, log: Any) -> torch.Tensor:
    piece = piece.clone()
    piece[-7] ^= 4
    return piece


def an_older_one(piece: torch.Tensor, log: Any) -> torch.Tensor:
    return log["update", 1]


FAULTS = {truncated: "checksum", altered: "checksum", an_older_one: "applies to version 0"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_update_changes_nothing_and_is_healed_by_whole_weights(fault, line):
    log = line.sender._log

    def spoil() -> None:
        log["update", 2] = fault(log["update", 2], log)

    reason = assert_a_bad_update_is_healed(line, spoil, FAULTS[fault])
    assert "whole weights" in reason


class DamagedOnce(dict):
    """A log whose first update reaches the first to ask with a bit turned."""

    spoiled = False

    def get(self, key: Any, default: Any = None) -> Any:
        piece = super().get(key, default)
        if self.spoiled or key[0] != "update":
            return piece
        self.spoiled = True
        return altered(piece, self)


def test_what_is_damaged_on_the_way_is_replayed_from_the_log(line):
    line.sender._log = line.sender._server._log = DamagedOnce(line.sender._log)
    line.step()
    line.step()
    assert line.follower.catch_up(2) and line.same()
    (reason,) = line.follower.healed
    assert "update_0000001" in reason and "checksum" in reason and "took it again" in reason


def test_a_late_receiver_replays_the_log_which_is_bounded(line, directory, tmp_path):
    line.sender.refresh_interval = 12
    for _ in range(14):
        line.step()
    assert sorted(line.sender._log) == [
        ("refresh", 12),
        *(("update", version) for version in range(12 - LOGGED + 1, 15)),
    ]
    late = make_receiver(config_for(directory, **STEP))
    follower = Follower(tmp_path, late, "worker_1", timeout_s=20)
    assert follower.catch_up() and late.version == 14 and follower.healed == []
    mine = whole_weights(late)
    assert all(torch.equal(mine[name], w) for name, w in whole_weights(line.learner).items())
    assert line.follower.catch_up() and line.same()  # its next update is gone
    assert "no pieces; took whole weights" in line.follower.healed[0]


def test_a_trainer_that_starts_again_brings_receivers_to_its_version(line, directory, pg):
    for _ in range(2):
        line.step()
    assert line.follower.catch_up(2)
    line.sender.close()
    cfg = config_for(directory, **STEP)
    again = make_learner(cfg, pg)  # from an older state than the receiver's
    sender = GroupSender(line.sender.directory, Sender(again, cfg.sketch, "second"))
    sender.start()
    one_update(again)
    sender.publish()
    assert line.follower.catch_up() and line.receiver.version == 1
    assert line.follower.healed == ["run second follows first; took whole weights"]
    mine = whole_weights(line.receiver)
    assert all(torch.equal(mine[name], w) for name, w in whole_weights(again).items())
    sender.close()


KILLED_AMID = """
import datetime, json, os, signal, sys, torch
from torch import distributed as dist
host, _, port = sys.argv[1].rpartition(":")
store = dist.TCPStore(host, int(port), is_master=False)
question = {"worker": "worker_9", "link": "L", "number": 1, "kind": "refresh", "version": 0}
store.queue_push("asked/0", json.dumps(question))
place = dist.PrefixStore("L/0", store)
group = dist.ProcessGroupGloo(place, 1, 2, datetime.timedelta(seconds=60))
answer = torch.empty(2, dtype=torch.int64)
group.recv([answer], 0, 0).wait()
assert answer[0] == 1 and answer[1] > 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_killed_amid_its_weights_is_named_and_holds_up_nobody(line, capfd):
    address = line.sender.address
    killed = subprocess.Popen([sys.executable, "-c", KILLED_AMID, address])
    assert killed.wait(120) == -9
    line.step()
    assert line.follower.catch_up(1) and line.same()
    said = capfd.readouterr().err
    (named,) = [text for text in said.splitlines() if text.startswith("megatron-logra:")]
    assert named.startswith("megatron-logra: rollout worker_9 has not taken refresh_0000000: ")


def test_a_worker_that_asks_and_never_comes_holds_up_others_for_the_time_limit_only(line, capfd):
    host, _, port = line.sender.address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=5))
    store.queue_push("asked/0", b"no question")
    asked = {"worker": "worker_9", "link": "L", "number": 1, "kind": "refresh", "version": 0}
    store.queue_push("asked/0", json.dumps(asked))
    started = time.monotonic()
    line.step()
    published = time.monotonic() - started
    assert line.follower.catch_up(1) and line.same() and line.follower.healed == []
    assert published < 2 <= time.monotonic() - started
    said = capfd.readouterr().err
    assert "not a question for weights, passed over: b'no question'" in said
    assert "rollout worker_9 has not taken refresh_0000000: wait timeout" in said


def test_a_worker_sees_a_trainer_that_is_gone_at_once(line):
    line.step()
    assert read_head(line.follower.directory) is not None
    address = f"127.0.0.1:{launcher.free_port()}"  # nobody listens
    head = json.loads((line.follower.directory / "HEAD").read_text())
    (line.follower.directory / "HEAD").write_text(json.dumps({**head, "address": address}))
    started = time.monotonic()
    assert not line.follower.catch_up(1)
    assert time.monotonic() - started < 5
    line.sender._publish("update")
    assert line.follower.catch_up(1) and line.same()


def test_closing_ends_the_thread(line):
    names = [thread.name for thread in threading.enumerate()]
    assert "weights for rollout workers" in names
    line.sender.close()
    wait_until(lambda: not line.sender._server.is_alive(), 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_one_line(line):
    with pytest.raises(UserError, match="rollout.transport: nccl needs a GPU"):
        GroupSender(line.sender.directory, line.sender.sender, backend="nccl")
