"""What all environments share: problems from a source, scores from a worker process."""

from __future__ import annotations

import logging
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.environments.base import Problem, Score, chat, question_digest
from megatron_logra.rl.environments.process import Failure, WorkerProcess

logger = logging.getLogger(__name__)


class IsolatedEnvironment(ABC):
    """Base of the environments: scoring in a worker, and how a question becomes a problem.

    The worker's object has `score(payload, answer, text) -> (value, reason | None)`.
    """

    def __init__(self, config: EnvironmentConfig, name: str, worker: WorkerProcess) -> None:
        self.config = config
        self.name = name
        self.worker = worker
        self._warned = False

    @abstractmethod
    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position."""

    @abstractmethod
    def held_out(self, n: int, seed: int) -> list[Problem]:
        """`n` held-out problems, or all there are."""

    def score(self, problem: Problem, text: str) -> Score:
        """Score one response; raises UserError if the scorer gives something but a number."""
        return self.score_all([problem], [text])[0]

    def score_all(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Score]:
        """Score `texts[i]` as a response to `problems[i]`, all in one message to the worker.

        A response whose scoring fails or takes longer than `score_time_limit` is not valid.

        Raises:
            UserError: a score is not a finite number.
        """
        calls = [
            (problem.payload, problem.answer, text)
            for problem, text in zip(problems, texts, strict=True)
        ]
        results = self.worker.map("score", calls, limit_s=self.config.score_time_limit)
        return [
            self._checked(problem, result)
            for problem, result in zip(problems, results, strict=True)
        ]

    def close(self) -> None:
        """End the worker process; the next use starts it again."""
        self.worker.close()

    def _checked(self, problem: Problem, result: Any) -> Score:
        if isinstance(result, Failure):
            if not self._warned:
                self._warned = True
                logger.warning(
                    "environment %s: scoring failed (%s); such responses get the failure reward",
                    self.name,
                    result.reason,
                )
            return Score(0.0, valid=False, reason=result.reason)
        value, reason = result
        if reason is not None:
            return Score(0.0, valid=False, reason=reason)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(
                f"environment {self.name}: the scorer gave {value!r} for problem {problem.id}; "
                "expected a finite number"
            )
        return Score(float(value), valid=True)

    def _problem(
        self,
        question: str,
        answer: Any,
        *,
        messages: list[dict[str, str]] | None = None,
        response: str | None = None,
        metadata: dict[str, Any] | None = None,
        payload: Any = None,
    ) -> Problem:
        config = self.config
        return Problem(
            id=f"{self.name}/{question_digest(question)[:16]}",
            environment=self.name,
            question=question,
            messages=messages or chat(question, config.system_prompt, config.suffix),
            answer=answer,
            response=response,
            metadata=metadata or {},
            payload=payload,
        )
