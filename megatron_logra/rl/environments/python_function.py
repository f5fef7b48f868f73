"""Problems and scores from a function of the user's own.

The function runs in the worker process, so that a score that hangs or crashes costs one response,
not the run. Its problems must be picklable, and it is called again if the worker is restarted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError, one_line
from megatron_logra.rl.environments.base import Problem, Split
from megatron_logra.rl.environments.isolated import IsolatedEnvironment
from megatron_logra.rl.environments.listed import ListedProblems
from megatron_logra.rl.environments.process import WorkerProcess
from megatron_logra.rl.environments.scoring import prepare, score_response

_PROBLEMS_LIMIT_S = 300.0


class PythonEnvironment(IsolatedEnvironment):
    """`module:function` with `params`; `splits` are those of the whole run, its own first.

    Raises:
        UserError: the function cannot be imported or called, or its problems are malformed.
    """

    def __init__(
        self, config: EnvironmentConfig, name: str, seed: int, splits: tuple[Split, ...]
    ) -> None:
        arguments = {
            "function": config.function,
            "params": config.params,
            "scorer": config.scorer or "verifier",
        }
        worker = WorkerProcess(
            f"{__name__}:PythonSource", arguments, label=f"environment {name}", quiet=False
        )
        super().__init__(config, name, worker)
        self._seed, self._splits = seed, splits
        self._loaded: ListedProblems | None = None

    @property
    def _listed(self) -> ListedProblems:
        if self._loaded is None:
            entries = self.worker.call("problems", limit_s=_PROBLEMS_LIMIT_S)
            problems = [
                self._problem(
                    entry["question"],
                    entry.get("answer"),
                    response=entry.get("response"),
                    metadata={"place": place},
                    payload=place,
                )
                for place, entry in enumerate(entries)
            ]
            self._loaded = ListedProblems(self.name, problems, self._seed, self._splits)
        return self._loaded

    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position: a new order each time the list is through."""
        return self._listed.train_problem(index)

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """`n` held-out problems, or all there are."""
        return self._listed.held_out(n, seed)


class PythonSource:
    """What the user's function returned; lives in the worker."""

    def __init__(self, function: str, params: dict[str, Any], scorer: str) -> None:
        self.scorer = scorer
        self.made = _call(function, params)
        needed = ["problems", "score"] if scorer in ("verifier", "last_integer") else ["problems"]
        for what in needed:
            if not hasattr(self.made, what):
                raise UserError(
                    f"function: what {function} returns has no {what}; expected an object with "
                    "problems (a list) and score(problem, response_text)"
                )
        self.entries = _checked(list(self.made.problems))
        # No memory limit: the user's code may be large on purpose.
        prepare(scorer, limit_memory=False)

    def problems(self) -> list[dict[str, Any]]:
        """All problems, as the user's object has them."""
        return self.entries

    def score(self, payload: int, answer: Any, text: str) -> tuple[Any, str | None]:
        """Score a response by the user's `score`, or by the scorer chosen instead."""

        def verify(given: str) -> Any:
            return self.made.score(self.entries[payload], given)

        if self.scorer == "verifier":
            return verify(text), None  # the user's function sees the response as it is
        return score_response(self.scorer, text, answer, verify)


def _checked(entries: list[Any]) -> list[dict[str, Any]]:
    for place, entry in enumerate(entries):
        question = entry.get("question") if isinstance(entry, dict) else None
        if not isinstance(question, str) or not question.strip():
            raise UserError(
                f"problems[{place}]: expected a mapping with a question (text) and an answer, "
                f"got {entry!r:.200}"
            )
    return entries


def _call(function: str, params: dict[str, Any]) -> Any:
    module, separator, name = function.partition(":")
    if not separator or not module or not name:
        raise UserError(f"function: {function}: expected module:function")
    try:
        target = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise UserError(f"function: cannot import {function}: {one_line(error)}") from None
    if not callable(target):
        raise UserError(f"function: {function} is not callable")
    try:
        return target(**params)
    except (Exception, SystemExit) as error:
        raise UserError(f"function: {function} failed: {one_line(error)}") from None
