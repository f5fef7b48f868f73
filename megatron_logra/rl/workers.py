"""What a trainer with separate rollout workers does: publish its weights, and ask for responses."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.optimizer.learner import Learner
from megatron_logra.rollout.remote import RemoteEngine
from megatron_logra.rollout.worker import SYNC, exchange_directory
from megatron_logra.sync.files import FileSender
from megatron_logra.sync.process_groups import GroupSender
from megatron_logra.sync.sender import Sender
from megatron_logra.sync.transport import Publisher

_RUN = re.compile("run_[0-9a-f]{8}")


class Workers:
    """The workers of one trainer start. All methods are called by all trainer ranks.

    The workers get the weights as they are now: a trainer that goes on from a checkpoint brings
    them all to its version.

    Args:
        config: the run's configuration.
        learner: what is trained.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        rollout = config.rollout
        directory = exchange_directory(config)
        run = distributed.first(lambda: _new_run(directory))
        self.engine = RemoteEngine(
            directory,
            run,
            rollout.workers.count,
            timeout_s=rollout.timeout_s,
            seed=config.train.seed,
        )
        sender = Sender(learner, config.sketch, run, audit_interval=rollout.audit_interval)
        interval, dense = rollout.refresh_interval, rollout.sync == "dense"
        self._sender: Publisher
        if rollout.transport == "files":
            self._sender = FileSender(
                directory / SYNC, sender, refresh_interval=interval, dense=dense
            )
        else:
            self._sender = GroupSender(
                directory / SYNC,
                sender,
                backend=rollout.transport,
                refresh_interval=interval,
                dense=dense,
            )
        self._sender.start()
        self.engine.wanted = self._sender.wanted
        self.engine.refresh = self._sender.refresh_if_wanted

    def publish(self) -> int:
        """Send the update that has just been applied; returns bytes."""
        return self._sender.publish()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the workers end, unless the run goes on elsewhere or after a restart."""
        if kind is None:
            self.engine.stop()
        self._sender.close()


def _new_run(directory: Path) -> str:
    """A name for this start of the trainer; what others have asked is deleted."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _RUN.fullmatch(path.name):
                # A worker may be writing there; nobody reads what stays.
                shutil.rmtree(path, ignore_errors=True)
    return f"run_{secrets.token_hex(4)}"
