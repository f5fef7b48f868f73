"""The trainer's end of separate rollout workers: requests go out, responses come in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_logra import distributed
from megatron_logra.config import SamplingConfig
from megatron_logra.errors import StopRequested
from megatron_logra.rollout.drawing import Response
from megatron_logra.rollout.exchange import Exchange, Request, Share


@dataclass(frozen=True)
class Collected:
    """The responses to a request, and what the workers told with them."""

    responses: list[list[Response]]
    """[prompts][samples]; each token has its version."""
    drift: float | None
    """Largest drift of any worker."""


class RemoteEngine:
    """Has separate workers generate. All methods are called by all trainer ranks.

    Args:
        directory: shared with the workers.
        run: names this start of the trainer.
        workers: number of workers.
        timeout_s: longest wait for a response.
        seed: seed of the run.
    """

    def __init__(
        self, directory: Path, run: str, workers: int, *, timeout_s: float, seed: int
    ) -> None:
        self.exchange = Exchange(directory, run)
        self.workers = workers
        self.timeout_s = timeout_s
        self.seed = seed
        self.stop_requested: Callable[[], bool] = lambda: False
        """Asked while waiting for responses, on the first rank."""
        self.wanted: Callable[[], bool] = lambda: False
        """Asked likewise: whether a worker needs whole weights before it can answer."""
        self.refresh: Callable[[], int] = lambda: 0
        """Then called, by all ranks: offers them, and returns bytes."""
        self._next = 0

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: SamplingConfig,
        *,
        version: int,
        update: int,
        stream: str,
        stop_token_ids: Collection[int],
    ) -> int:
        """Have responses generated with weights of `version`; returns the request's number.

        The workers go on while the trainer does something else. Other arguments as of
        `StaticEngine.generate`.
        """
        request = Request(
            number=self._next,
            version=version,
            prompts=[list(prompt) for prompt in prompts],
            samples=samples,
            sampling=sampling,
            seed=self.seed,
            update=update,
            stream=stream,
            stop_token_ids=sorted(stop_token_ids),
        )
        self._next += 1
        distributed.first(lambda: self.exchange.ask(request))
        return request.number

    def collect(self, number: int, progress: Callable[[int, int], None] | None = None) -> Collected:
        """Wait for the responses to a request.

        Raises:
            StopRequested: `stop_requested` has said so before they were there.
            UserError: a worker cannot answer; says why.
            RuntimeError: a worker has not answered in time.
        """
        shares = self._wait(number, progress, lambda: self.stop_requested() or self.wanted())
        # Once: a worker that has no use for whole weights either is told of when its time is up.
        if shares is None and self.refresh():
            shares = self._wait(number, progress, self.stop_requested)
        if shares is None:
            raise StopRequested("stopped while rollout workers were at work")
        responses = []
        for share in shares:
            for group in share.responses:
                for response in group:
                    response.versions = [share.version] * len(response.token_ids)
                responses.append(group)
        drifts = [share.drift for share in shares if share.drift is not None]
        return Collected(responses, max(drifts) if drifts else None)

    def _wait(
        self,
        number: int,
        progress: Callable[[int, int], None] | None,
        stop: Callable[[], bool],
    ) -> list[Share] | None:
        return distributed.first(
            lambda: self.exchange.collect(number, self.workers, self.timeout_s, progress, stop)
        )

    def stop(self) -> None:
        """Let the workers end."""
        if distributed.rank() == 0:
            self.exchange.stop()
