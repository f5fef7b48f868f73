"""A rollout worker: a process (or a group of tensor- and pipeline-parallel ones) that generates.

It follows the trainer's weights and answers its share of every request, until it is told to stop.
It keeps nothing that matters: a worker that is started again takes up where its files are.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.errors import UserError
from megatron_logra.rl.policy import Policy, build_policy, join_ranks
from megatron_logra.rollout.exchange import POLL_S, Exchange, Request, Share
from megatron_logra.sync.follower import Follower
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.transport import read_head

SYNC = "sync"
"""Directory of the weights within the exchange directory."""


def exchange_directory(config: Config) -> Path:
    """Where trainer and workers of a run meet."""
    given = config.rollout.exchange_dir
    return Path(given) if given is not None else Path(config.logging.run_dir) / "exchange"


def follower_of(policy: Policy, config: Config, name: str) -> Follower:
    """What brings a model to the versions of the run's trainer; `name` names it there.

    Args:
        policy: the model, under a layout of its own.
        config: the run's configuration.
    """
    receiver = Receiver(
        policy.chunks, config.sketch, policy.pg, exactness=config.rollout.workers.exactness
    )
    directory = exchange_directory(config) / SYNC
    return Follower(directory, receiver, name, timeout_s=config.parallel.timeout_s)


def catch_up(follower: Follower, who: str, version: int | None = None) -> bool:
    """`Follower.catch_up`, which also says, as `who`, what is or was wrong with a version."""
    known, failure = len(follower.healed), follower.failure
    caught_up = follower.catch_up(version)
    reasons = follower.healed[known:]
    if follower.failure not in (None, failure):  # once, however often it is tried
        reasons.append(f"{follower.failure}; asked for whole weights")
    for reason in reasons:
        if distributed.rank() == 0:
            print(f"{who}: {reason}", file=sys.stderr, flush=True)
    return caught_up


def run(config: Config, index: int) -> None:
    """Answer requests as worker `index` until the trainer says stop. Called by the worker's ranks.

    Raises:
        UserError: the configuration has no such worker, or does not fit the machine.
    """
    if config.rollout.placement != "separate":
        raise UserError("rollout.placement: a rollout worker needs separate, got colocated")
    workers = config.rollout.workers
    if not 0 <= index < workers.count:
        raise UserError(f"--index {index}: expected 0 to {workers.count - 1} (rollout.workers)")
    own = config.model_copy(update={"parallel": config.worker_parallel})
    join_ranks(own)
    policy = build_policy(own)
    Worker(policy, config, index).run()


class Worker:
    """One worker.

    Args:
        policy: the model under the worker's own layout.
        config: the run's configuration.
        index: which of the workers.
    """

    def __init__(self, policy: Policy, config: Config, index: int) -> None:
        self.index = index
        self.count = config.rollout.workers.count
        self.timeout_s = config.rollout.timeout_s
        self.directory = exchange_directory(config)
        self.follower = follower_of(policy, config, f"worker_{index}")
        self.engine = policy.engine()

    def run(self) -> None:
        """Answer until there will be no more requests.

        Raises:
            UserError: there has been none for `rollout.timeout_s`.
        """
        asked = time.monotonic()
        while True:
            found = distributed.first(self._look)
            if found is None:
                return
            run, request = found
            if request is not None:
                self._answer(Exchange(self.directory, run), request)
                asked = time.monotonic()
            elif distributed.any_rank(time.monotonic() - asked > self.timeout_s):
                raise UserError(
                    f"{self.directory}: no trainer has asked for anything in "
                    f"{self.timeout_s:.0f} s (rollout.timeout_s)"
                )

    def _look(self) -> tuple[str, Request | None] | None:
        """The oldest request without this worker's share; None if there will be none.

        Waits a moment for one, so that all ranks of the worker look up together now and then.
        """
        deadline = time.monotonic() + 1.0
        run = ""
        while time.monotonic() < deadline:
            head = read_head(self.directory / SYNC)
            if head is not None:
                run = head.run
                exchange = Exchange(self.directory, run)
                for number in exchange.numbers():
                    if not exchange.answered(number, self.index):
                        request = exchange.request(number)
                        if request is not None:
                            return run, request
                # A run that was over before this worker came is no reason to go: the trainer that
                # goes on with it may not have begun yet.
                if exchange.stopped() and self.follower.receiver.run == run:
                    return None
            time.sleep(POLL_S)
        return run, None

    def _answer(self, exchange: Exchange, request: Request) -> None:
        # Not a newer version: what is sampled would depend on who is faster.
        if not catch_up(self.follower, f"rollout worker {self.index}", request.version):
            time.sleep(POLL_S)
            return
        receiver = self.follower.receiver
        share = request.share(self.index, self.count)
        try:
            responses = self.engine.generate(
                request.prompts[share],
                request.samples,
                request.sampling,
                seed=request.seed,
                update=request.update,
                stream=request.stream,
                first_sample=share.start * request.samples,
                stop_token_ids=request.stop_token_ids,
            )
            result = Share(
                version=receiver.version,
                responses=responses,
                drift=receiver.drift.largest if receiver.drift else None,
            )
        except (UserError, FloatingPointError) as error:
            result = Share(error=str(error))
        if distributed.rank() == 0:
            exchange.answer(request.number, self.index, result)
