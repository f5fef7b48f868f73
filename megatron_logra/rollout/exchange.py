"""Requests and responses between trainer and rollout workers, as files in a shared directory.

    sync/                             the trainer's weights (see `sync.transport`)
    RUN/request_0000003.json          what to generate, and with which version of the weights
    RUN/response_0000003_001.json     the second worker's share
    RUN/stop                          there will be no more

RUN is one start of the trainer: after a restart, nobody answers what the former one has asked.
A request stays until it is answered by all, so a worker that died and was started again finds it.
Files are JSON, written under another name and renamed: a reader sees whole ones only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_logra import whole_file
from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rollout.drawing import Response

POLL_S = 0.02
"""How often a reader looks for a file."""


@dataclass(frozen=True)
class Request:
    """What all workers together are to generate; arguments as of `StaticEngine.generate`."""

    number: int
    version: int
    """Version of the weights: not an older one."""
    prompts: list[list[int]]
    samples: int
    sampling: SamplingConfig
    seed: int
    update: int
    stream: str
    stop_token_ids: list[int]

    def share(self, worker: int, workers: int) -> slice:
        """The prompts that a worker answers."""
        count = len(self.prompts)
        return slice(count * worker // workers, count * (worker + 1) // workers)


@dataclass(frozen=True)
class Share:
    """One worker's answer."""

    version: int = -1
    """Version of the weights that all its tokens were sampled from."""
    responses: list[list[Response]] = field(default_factory=list)
    """[prompts of the share][samples]"""
    drift: float | None = None
    """Largest difference from the trainer's weights that the worker's last audit found."""
    error: str | None = None
    """Why there are no responses."""


class Exchange:
    """One trainer start's requests and responses.

    Args:
        directory: shared by trainer and workers.
        run: names the trainer's start.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self.directory = directory / run

    def ask(self, request: Request) -> None:
        """Publish a request. Called by one process of the trainer.

        Raises:
            UserError: it cannot be written.
        """
        data = {**asdict(request), "sampling": request.sampling.model_dump()}
        self._write(self._request(request.number), data)

    def request(self, number: int) -> Request | None:
        """A request; None if it has not been asked yet."""
        try:
            data = json.loads(self._request(number).read_text())
        except FileNotFoundError:
            return None
        return Request(**{**data, "sampling": SamplingConfig(**data["sampling"])})

    def answer(self, number: int, worker: int, share: Share) -> None:
        """Publish a worker's share. Called by one process of the worker.

        Raises:
            UserError: it cannot be written.
        """
        self._write(self._response(number, worker), asdict(share))

    def answered(self, number: int, worker: int) -> bool:
        """Whether a worker has published its share."""
        return self._response(number, worker).exists()

    def collect(
        self,
        number: int,
        workers: int,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Share] | None:
        """Wait for the shares of all workers, and forget the request. Called by one process.

        Returns:
            None if `stop` has said so before they were there.

        Raises:
            UserError: a worker reports that it cannot answer.
            RuntimeError: a share has not come in time.
        """
        deadline = time.monotonic() + timeout_s
        missing = list(range(workers))
        while missing:
            missing = [worker for worker in missing if not self.answered(number, worker)]
            if progress is not None:
                progress(workers - len(missing), workers)
            if missing and time.monotonic() > deadline:
                raise RuntimeError(
                    f"rollout worker {missing[0]} has not answered request {number} in "
                    f"{timeout_s:.0f} s (rollout.timeout_s)"
                )
            if missing and stop():
                return None
            if missing:
                time.sleep(POLL_S)
        shares = [_read_share(self._response(number, worker)) for worker in range(workers)]
        for worker, share in enumerate(shares):
            if share.error is not None:
                raise UserError(f"rollout worker {worker}: {share.error}")
        self._request(number).unlink(missing_ok=True)
        for worker in range(workers):
            self._response(number, worker).unlink()
        return shares

    def stop(self) -> None:
        """Tell the workers that there will be no more."""
        self._write(self.directory / "stop", {})

    def stopped(self) -> bool:
        """Whether there will be no more."""
        return (self.directory / "stop").exists()

    def numbers(self) -> list[int]:
        """Numbers of the requests that are not collected yet, the oldest first."""
        return sorted(int(path.stem.rsplit("_", 1)[1]) for path in self.directory.glob("request_*"))

    def _write(self, path: Path, data: object) -> None:
        # Asked or answered again after a crash of the machine: nothing need be on disk.
        with whole_file.explained(self.directory, "what trainer and rollout workers exchange is"):
            whole_file.write(path, json.dumps(data, allow_nan=False).encode(), flush=False)

    def _request(self, number: int) -> Path:
        return self.directory / f"request_{number:07d}.json"

    def _response(self, number: int, worker: int) -> Path:
        return self.directory / f"response_{number:07d}_{worker:03d}.json"


def _read_share(path: Path) -> Share:
    data = json.loads(path.read_text())
    groups: Sequence[Sequence[dict[str, object]]] = data["responses"]
    responses = [[Response(**response) for response in group] for group in groups]  # type: ignore[arg-type]
    return Share(**{**data, "responses": responses})
