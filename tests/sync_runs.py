"""What each rank does in the synchronisation tests: train and send, or receive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layout_runs import backward, whole_weights
from reference import config_for, make_batches
from training import make_learner, probe_of

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.model.gpt import build_chunks, transformer_config
from megatron_logra.optimizer.learner import Learner
from megatron_logra.sync.files import FileSender
from megatron_logra.sync.follower import Follower
from megatron_logra.sync.process_groups import GroupSender
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.sender import Sender

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
}
STEP = {"step_control": {"update_ratio": 0.01, "kl_budget": 0.1, "kl_budget_final": 0.1}}


def assert_a_bad_update_is_healed(line: Any, spoil: Callable[[], None], words: str) -> str:
    """A second update that is spoilt changes nothing, until whole weights come; what was said."""
    line.step()
    assert line.follower.catch_up(1)
    line.step()
    spoil()
    before = {name: w.clone() for name, w in whole_weights(line.receiver).items()}
    assert not line.follower.catch_up(2), "there is no refresh yet"
    assert all(torch.equal(w, before[name]) for name, w in whole_weights(line.receiver).items())
    assert line.receiver.version == 1
    line.step()  # sees that whole weights are wanted
    assert line.follower.catch_up()
    assert line.receiver.version == 3 and line.same()
    (reason,) = line.follower.healed
    assert "update_0000002" in reason and words in reason
    return reason


def assert_follows(received: Any, sent: Any, *, bits: bool, sections: dict[str, Any]) -> None:
    """Weights of every version are the trainer's: all bits, or within one unit of bf16."""
    bf16 = sections.get("train", {}).get("precision") == "bf16"
    assert len(received) == len(sent)
    for mine, theirs in zip(received, sent, strict=True):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            if bits:
                assert torch.equal(mine[name], weight), name
            else:
                room = weight.abs() * (2**-7 if bf16 else 2**-20) + 1e-7
                assert bool(((mine[name] - weight).abs() <= room).all()), name
    first, last = sent[0], sent[-1]
    moved = [n for n in first if not torch.equal(first[n], last[n])]
    assert any("linear_fc1" in name for name in moved), "training moved nothing"


DONE = "done"
"""File that a worker makes when it needs the trainer no more."""


def one_update(learner: Learner) -> None:
    """A real step on data of its own."""
    generator = torch.Generator().manual_seed(learner.update)
    batches = make_batches(generator, [[16, 8], [12, 24]])
    backward(learner, batches)
    assert learner.step(probe_of(batches[0])).applied


def send(
    directory: Path,
    sections: dict[str, Any],
    shared: Path,
    updates: int,
    publisher: type[FileSender] | type[GroupSender] = FileSender,
    **options: int,
):
    """Train, publishing each update; the whole weights before and after each, and bytes sent."""
    cfg = config_for(directory, **sections)
    learner = make_learner(cfg, distributed.initialize(cfg.parallel, 0))
    audit = options.pop("audit_interval", 1)
    sender = publisher(
        shared, Sender(learner, cfg.sketch, "first", audit_interval=audit), **options
    )
    sizes = [sender.start()]
    weights = [{name: w.clone() for name, w in whole_weights(learner).items()}]
    for _ in range(updates):
        one_update(learner)
        sizes.append(sender.publish())
        weights.append({name: w.clone() for name, w in whole_weights(learner).items()})
    if publisher is GroupSender:
        wait_until((shared / DONE).exists)
    sender.close()
    return weights, sizes


def make_receiver(cfg: Config, exactness: str = "fp32") -> Receiver:
    """A receiver whose weights are random until its first refresh."""
    pg = distributed.initialize(cfg.parallel, 0)
    tconfig, arguments = transformer_config(cfg)
    chunks = build_chunks(tconfig, arguments, pg)
    return Receiver(chunks, cfg.sketch, pg, exactness=exactness)  # type: ignore[arg-type]


def receive(
    directory: Path, sections: dict[str, Any], shared: Path, updates: int, exactness: str = "fp32"
):
    """Follow version by version: whole weights after each, audits, and what had to be healed."""
    receiver = make_receiver(config_for(directory, **sections), exactness)
    follower = Follower(shared, receiver, "worker")
    weights, drifts = [], []
    for version in range(updates + 1):
        wait_until(lambda version=version: follower.catch_up(version))
        weights.append({k: w.clone() for k, w in whole_weights(receiver).items()})
        drifts.append(receiver.drift)
    distributed.first((shared / DONE).touch)
    return weights, drifts, follower.healed


def side_by_side(
    directory: Path, trainer: str, worker: str, shared: Path, updates: int, ports: tuple[int, int]
):
    """A trainer and a worker of these layouts, each a world of its own; what each returns."""
    rank, senders = int(os.environ["RANK"]), LAYOUTS[trainer][0]
    trains = rank < senders
    size, parallel = LAYOUTS[trainer if trains else worker]
    os.environ |= {
        "RANK": str(rank if trains else rank - senders),
        "WORLD_SIZE": str(size),
        "MASTER_PORT": str(ports[0] if trains else ports[1]),
    }
    sections = {**STEP, "parallel": parallel}
    if trains:
        return send(directory, sections, shared, updates, GroupSender)
    return receive(directory, sections, shared, updates)


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
