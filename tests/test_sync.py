"""Receivers hold the trainer's weights after every update, whatever their layout and the faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    receive,
    send,
    wait_until,
)
from training import make_learner

from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.master_weights import Remainder
from megatron_logra.rollout.exchange import Share
from megatron_logra.rollout.remote import RemoteEngine
from megatron_logra.sync.files import FileSender
from megatron_logra.sync.follower import Follower
from megatron_logra.sync.payload import Payload, PayloadError, assemble, decode
from megatron_logra.sync.receiver import OutOfOrder, Receiver, RoundedWeight
from megatron_logra.sync.sender import Sender
from megatron_logra.sync.transport import read_head

UPDATES = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {**STEP},
    "bf16": {**STEP, "train": {"precision": "bf16"}},
    "non-targets": {**STEP, "optimizer": {"non_targets": "adam", "adam": {"lr": 1e-3}}},
    "decay": {"step_control": {"mode": "lr", "lr": {"lr": 0.1, "weight_decay": 0.5}}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", True)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("trainer", "worker"), [("tp2", "tp2"), ("tp2", "one"), ("one", "pp2"), ("tp2-dp2", "pp2")]
)
def test_receivers_of_any_layout_follow(trainer, worker, variant, ranks, directory, tmp_path):
    sections = VARIANTS[variant]
    size, parallel = LAYOUTS[trainer]
    sent, _ = ranks.run(
        size, send, directory, {**sections, "parallel": parallel}, tmp_path, UPDATES
    )[0]
    size, parallel = LAYOUTS[worker]
    for received, drifts, healed in ranks.run(
        size, receive, directory, {**sections, "parallel": parallel}, tmp_path, UPDATES
    ):
        assert_follows(received, sent, bits=trainer == worker, sections=sections)
        assert healed == []
        assert all(drift.ulps <= 1 for drift in drifts[1:])
        assert trainer != worker or all(drift.largest == 0 for drift in drifts[1:])


# --- faults, on one rank ----------------------------------------------------------------------


@dataclass
class Line:
    """A trainer and a receiver that follows it through a directory."""

    learner: Learner
    sender: FileSender
    receiver: Receiver
    follower: Follower

    def step(self) -> None:
        one_update(self.learner)
        self.sender.publish()

    def piece(self, version: int) -> Path:
        return self.follower.directory / f"update_{version:07d}" / "piece_000"

    def same(self) -> bool:
        mine, theirs = whole_weights(self.receiver), whole_weights(self.learner)
        return all(torch.equal(mine[name], weight) for name, weight in theirs.items())


@pytest.fixture
def line(directory, tmp_path, pg) -> Line:
    cfg = config_for(directory, **STEP)
    learner = make_learner(cfg, pg)
    sender = FileSender(tmp_path / "shared", Sender(learner, cfg.sketch, "first"))
    receiver = make_receiver(cfg)
    follower = Follower(tmp_path / "shared", receiver, "worker")
    assert not follower.catch_up(), "there is nothing to follow yet"
    sender.start()
    assert follower.catch_up(0)
    return Line(learner, sender, receiver, follower)


def test_dense_weights_travel_in_the_type_that_the_model_computes_with(directory, tmp_path, pg):
    cfg = config_for(directory, **VARIANTS["bf16"])
    learner, receiver = make_learner(cfg, pg), make_receiver(cfg)
    sender = FileSender(tmp_path, Sender(learner, cfg.sketch, "first"), dense=True)
    weights = sum(p.nbytes for chunk in learner.chunks for p in chunk.parameters())
    line = Line(learner, sender, receiver, Follower(tmp_path, receiver, "worker"))
    sender.start()
    for version in range(1, 4):
        one_update(learner)
        assert weights < sender.publish() < 1.1 * weights + 10_000
        assert line.follower.catch_up(version) and line.same()
    assert line.follower.healed == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(bytes(data))


def drop(path: Path) -> None:
    path.unlink()


def put_an_older_one_in_its_place(path: Path) -> None:
    path.write_bytes((path.parent.parent / "update_0000001" / path.name).read_bytes())


FAULTS = {
    truncate: "checksum",
    corrupt: "checksum",
    drop: "no pieces",
    put_an_older_one_in_its_place: "applies to version 0",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_update_changes_nothing_and_is_healed(fault, line):
    assert_a_bad_update_is_healed(line, lambda: fault(line.piece(2)), FAULTS[fault])
    line.step()
    assert line.follower.catch_up(4) and line.same()
    assert len(line.follower.healed) == 1


def test_a_repeated_or_skipped_update_is_refused_by_name(line):
    line.step()
    line.step()
    first, second = (assemble([line.piece(version).read_bytes()]) for version in (1, 2))
    with pytest.raises(OutOfOrder, match="update 2 applies to version 1 .* has version 0"):
        line.receiver.apply(second)
    line.receiver.apply(first)
    with pytest.raises(OutOfOrder, match="update 1 applies to version 0 .* has version 1"):
        line.receiver.apply(first)
    line.receiver.apply(second)
    assert line.same()


def test_an_update_that_moves_no_target_is_an_error(line):
    line.step()
    payload = assemble([line.piece(1).read_bytes()])
    with pytest.raises(PayloadError, match="nothing for"):
        line.receiver.apply(Payload(payload.header, {}, 0))
    assert line.receiver.version == 0


def test_a_late_or_restarted_receiver_catches_up_by_replay(line, directory):
    for _ in range(4):
        line.step()
    late = make_receiver(config_for(directory, **STEP))
    follower = Follower(line.follower.directory, late, "late")
    assert follower.catch_up() and late.version == 4 and follower.healed == []
    mine = whole_weights(late)
    assert all(torch.equal(mine[name], w) for name, w in whole_weights(line.learner).items())


def test_old_updates_are_pruned_and_late_receivers_still_find_a_way(line, directory):
    line.sender.refresh_interval = 2
    for _ in range(7):
        line.step()
    names = sorted(path.name for path in line.follower.directory.iterdir() if path.is_dir())
    assert names[0] == "refresh_0000004" and "update_0000003" not in names
    assert line.follower.catch_up() and line.receiver.version == 7 and line.same()
    assert len(line.follower.healed) == 1  # its next update is gone: whole weights instead


def test_a_trainer_that_starts_again_brings_receivers_to_its_version(line, directory, pg):
    for _ in range(3):
        line.step()
    assert line.follower.catch_up(3)
    cfg = config_for(directory, **STEP)
    again = make_learner(cfg, pg)  # from an older state than the receiver's
    sender = FileSender(line.follower.directory, Sender(again, cfg.sketch, "second"))
    sender.start()
    one_update(again)
    sender.publish()
    assert line.follower.catch_up() and line.receiver.version == 1
    mine = whole_weights(line.receiver)
    assert all(torch.equal(mine[name], w) for name, w in whole_weights(again).items())


def test_a_sender_killed_between_two_pieces_announces_nothing(ranks, directory, tmp_path):
    """One of two trainer ranks has written its piece; readers stay at the version before."""
    sections = {**STEP, "parallel": {"tensor": 2}}
    ranks.run(2, send, directory, sections, tmp_path, 2)
    (tmp_path / "update_0000002" / "piece_001").unlink()
    head = json.loads((tmp_path / "HEAD").read_text())
    (tmp_path / "HEAD").write_text(json.dumps({**head, "version": 1}))
    ((weights, _, healed),) = ranks.run(1, receive, directory, STEP, tmp_path, 1)
    assert len(weights) == 2 and healed == []


@pytest.mark.parametrize("text", ['{"run": "cut', "[]", '{"run": "a"}'])
def test_what_no_trainer_has_written_is_refused_by_the_files_name(text, tmp_path):
    assert read_head(tmp_path) is None
    (tmp_path / "HEAD").write_text(text)
    with pytest.raises(UserError, match="HEAD: expected what a trainer offers"):
        read_head(tmp_path)


def test_a_full_disk_is_one_line_and_readers_find_the_version_before(directory, tmp_path, pg):
    shared = tmp_path / "small"
    shared.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(shared)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        cfg = config_for(directory, **STEP)
        learner = make_learner(cfg, pg)
        sender = FileSender(shared, Sender(learner, cfg.sketch, "first"))
        sender.start()

        def fill() -> None:
            for _ in range(50):
                one_update(learner)
                sender.publish()

        with pytest.raises(UserError, match=r"not written \(No space left on device; 0 MiB free"):
            fill()
        receiver = make_receiver(cfg)
        assert Follower(shared, receiver, "worker").catch_up()
        assert receiver.version == learner.update - 1
    finally:
        subprocess.run(["umount", str(shared)], check=True)


@pytest.mark.parametrize("length", [0, 7, 40, 60, 200])
def test_no_truncated_piece_is_read(line, length):
    line.step()
    with pytest.raises(PayloadError):
        decode(line.piece(1).read_bytes()[:length])


def test_a_bf16_receiver_drifts_where_an_exact_one_does_not(directory, tmp_path, pg):
    sections = {"train": {"precision": "bf16"}, "step_control": {"update_ratio": 1e-4}}
    cfg = config_for(directory, **sections)
    learner = make_learner(cfg, pg)
    sender = FileSender(tmp_path, Sender(learner, cfg.sketch, "first", audit_interval=1))
    sender.start()
    followers = [Follower(tmp_path, make_receiver(cfg, kind), kind) for kind in ("fp32", "bf16")]
    drift = {"fp32": 0.0, "bf16": 0.0}
    for version in range(1, 31):
        one_update(learner)
        sender.publish()
        for follower in followers:
            assert follower.catch_up(version)
            found = follower.receiver.drift
            assert found is not None and found.compared
            drift[follower.name] = max(drift[follower.name], found.largest)
    assert drift["fp32"] == 0.0 < drift["bf16"]


def test_the_drift_curve_is_zero_with_all_bits_and_after_a_refresh(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "tools"))
    import drift_curve

    rows = drift_curve.measure(20, 10)
    assert [row["update"] for row in rows] == list(range(1, 21))
    assert all(row[drift_curve.EXACT]["largest"] == 0 for row in rows)
    rounded, refreshed = rows[-1][drift_curve.ROUNDED], rows[-1][drift_curve.REFRESHED]
    assert 0 == refreshed["largest"] < rounded["largest"]
    assert 0 == refreshed["kl"] < rounded["kl"]
    assert rows[-2][drift_curve.REFRESHED]["relative"] > 0
    drift_curve.plot(rows, 10, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_whole_weights_are_rounded_as_the_trainer_rounds_them(generator):
    high = torch.randn(1000, 8, generator=generator).bfloat16()
    value = (high.view(torch.int16).int() << 16 | 0x8000).view(torch.float32)  # halfway, all
    trainer, receiver = torch.empty_like(high), torch.empty_like(high)
    Remainder(trainer).load(value)
    RoundedWeight(receiver).load(value)
    assert torch.equal(trainer, receiver)
    assert not torch.equal(trainer, value.bfloat16()), "ties to even would differ"


def test_the_benchmark_measures_every_way_of_one_size(tmp_path):
    root = Path(__file__).resolve().parents[1]
    file = tmp_path / "sync.json"
    command = [sys.executable, str(root / "tools" / "bench_sync.py"), "--json", str(file)]
    subprocess.run(
        [*command, "--hidden", "128", "--layers", "1"],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        timeout=200,
    )
    (row,) = json.loads(file.read_text())["measured"]
    assert row["sketch_bytes"] < row["target_bytes"] < row["refresh_bytes"]
    ways = ("dense_files", "sketch_groups", "dense_groups", "gloo_broadcast", "resharding")
    assert all(row[f"{way}_s"] > 0 for way in ways)


def test_a_trainer_that_waits_for_responses_heals_who_cannot_use_its_update(line, tmp_path):
    engine = RemoteEngine(tmp_path, "run", 1, timeout_s=60, seed=0)
    engine.wanted, engine.refresh = line.sender.wanted, line.sender.refresh_if_wanted
    line.step()
    line.piece(1).write_bytes(b"")
    number = engine.ask(
        [[1]], 1, SamplingConfig(), version=1, update=1, stream="rollout", stop_token_ids=()
    )

    def work() -> None:
        wait_until(lambda: line.follower.catch_up(1), 60)
        engine.exchange.answer(number, 0, Share(version=1))

    with ThreadPoolExecutor() as pool:
        worker = pool.submit(work)
        engine.collect(number)
        worker.result()
    assert line.receiver.version == 1 and line.same()
    assert all("update_0000001" in reason for reason in line.follower.healed)


def test_a_wish_that_is_being_written_is_left_to_its_writer(line):
    unfinished = line.follower.directory / "wanted" / ".worker_0.17"
    unfinished.parent.mkdir()
    unfinished.touch()
    assert not line.sender.wanted() and line.sender.refresh_if_wanted() == 0
    line.step()
    assert unfinished.exists()
    unfinished.rename(unfinished.with_name("worker_0"))
    assert line.sender.wanted() and line.sender.refresh_if_wanted() > 0
    assert not line.sender.wanted()
