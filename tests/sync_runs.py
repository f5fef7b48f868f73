"""What each rank does in the synchronisation tests: train and send, or receive."""

from __future__ import annotations

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
from megatron_logra.sync.files import FileFollower, FileSender
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.sender import Sender


def one_update(learner: Learner) -> None:
    """A real step on data of its own."""
    generator = torch.Generator().manual_seed(learner.update)
    batches = make_batches(generator, [[16, 8], [12, 24]])
    backward(learner, batches)
    assert learner.step(probe_of(batches[0])).applied


def send(directory: Path, sections: dict[str, Any], shared: Path, updates: int, **options: int):
    """Train, publishing each update; the whole weights before and after each, and bytes sent."""
    cfg = config_for(directory, **sections)
    learner = make_learner(cfg, distributed.initialize(cfg.parallel, 0))
    audit = options.pop("audit_interval", 1)
    sender = FileSender(
        shared, Sender(learner, cfg.sketch, "first", audit_interval=audit), **options
    )
    sizes = [sender.start()]
    weights = [{name: w.clone() for name, w in whole_weights(learner).items()}]
    for _ in range(updates):
        one_update(learner)
        sizes.append(sender.publish())
        weights.append({name: w.clone() for name, w in whole_weights(learner).items()})
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
    follower = FileFollower(shared, receiver, "worker")
    weights, drifts = [], []
    for version in range(updates + 1):
        assert follower.catch_up(version), version
        weights.append({k: w.clone() for k, w in whole_weights(receiver).items()})
        drifts.append(receiver.drift)
    return weights, drifts, follower.healed
