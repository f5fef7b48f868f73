"""Saving while training goes on: Megatron's asynchronous checkpoints, written by a thread.

The state is copied to host memory first, so that later updates do not reach it. Each rank's thread
then writes its part; once those of all ranks are done, the ranks finish the checkpoint together
between two steps. Until then `latest` names the previous one: what a killed run leaves behind is
an unfinished directory that the next save deletes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_logra import distributed
from megatron_logra.checkpoint import Draft


class BackgroundSave:
    """One save that has been started. All ranks make one and call its methods alike.

    Args:
        root, step, state, description, keep: as `checkpoint.save` has them. `state` may change
            once this is made.

    Raises:
        UserError: it cannot be started.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        state: ShardedStateDict,
        description: dict[str, Any],
        keep: int,
    ) -> None:
        self._draft = Draft(root, step, description, keep)
        self._failure: Exception | None = None
        try:
            self._draft.begin()
            self._request = self._draft.guarded(lambda: self._plan(state))
            arguments = self._draft.guarded(lambda: _staged(self._request))
        except BaseException:
            self._draft.__exit__()
            raise
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _plan(self, state: ShardedStateDict) -> AsyncRequest:
        request = dist_checkpointing.save(
            state, str(self._draft.path), async_sharded_save=True, async_strategy="mcore"
        )
        assert isinstance(request, AsyncRequest)
        return request

    def _write(self, *arguments: Any) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*arguments, **self._request.async_fn_kwargs)
        except Exception as error:  # reported by `finish`
            self._failure = error

    def done(self) -> bool:
        """Whether all ranks have written their parts; then `finish` does not wait."""
        return not distributed.any_rank(self._thread.is_alive())

    def finish(self) -> Path:
        """Wait for all parts, and make the checkpoint the latest one.

        Raises:
            UserError: a part could not be written. Earlier checkpoints and `latest` are untouched.
        """
        self._thread.join()
        with self._draft:
            distributed.each(lambda: self._draft.guarded(self._raise_failure))
            for complete in self._request.finalize_fns:
                self._draft.guarded(complete)
            self._draft.publish()
        return self._draft.final

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure


def _staged(request: AsyncRequest) -> list[Any]:
    """The arguments of the request's writer, with copies of all tensors in host memory."""
    arguments = list(request.async_fn_args)
    if request.async_fn is None:  # nothing to write on this rank
        return arguments
    buckets = arguments[1]
    arguments[1] = [
        (file, key, (objects, [(item, _copy(tensor)) for item, tensor in tensors]))
        for file, key, (objects, tensors) in buckets
    ]
    return arguments


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
