"""Any task of the reasoning-gym library, by name and parameters.

The library's data sets live in the worker process: some generators hang, print, use the global
random state or iterate over sets, and importing the library takes seconds. There, every item is a
pure function of the task, its parameters and its number.
"""

from __future__ import annotations

import difflib
import pickle
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.environments.base import Problem, Split, draw, question_digest
from megatron_logra.rl.environments.isolated import IsolatedEnvironment
from megatron_logra.rl.environments.process import WorkerProcess
from megatron_logra.rl.environments.scoring import prepare, score_response

_ITEM_BITS = 31  # some generators hand the item's number to numpy, whose seeds have 32 bits
_DEFAULT_SIZE = 10_000  # of the few tasks that draw their items up front
_TRIES = 2_000  # items generated for one training problem before the split counts as empty
_GENERATE_LIMIT_S = 300.0


class ReasoningGymEnvironment(IsolatedEnvironment):
    """A reasoning-gym task; `splits` are those of all environments of the run, its own first.

    Raises:
        UserError: unknown task or parameters (when first used).
    """

    def __init__(
        self, config: EnvironmentConfig, name: str, seed: int, splits: tuple[Split, ...]
    ) -> None:
        arguments = {
            "task": config.task,
            "params": config.params,
            "scorer": config.scorer or "verifier",
            "splits": splits,
        }
        worker = WorkerProcess(
            f"{__name__}:ReasoningGymSource", arguments, label=f"environment {name}"
        )
        super().__init__(config, name, worker)
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position."""
        entry = self.worker.call("train_problem", self._seed, index, limit_s=_GENERATE_LIMIT_S)
        return self._from_entry(*entry)

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """`n` held-out problems, or all that turned up in a long search."""
        problems: list[Problem] = []
        state: Any = None
        while state is None or state["more"]:
            # Bit by bit, so that the time limit is one of generating, not of how many.
            entries, state = self.worker.call(
                "held_out_problems", n, seed, state, limit_s=_GENERATE_LIMIT_S
            )
            problems += [self._from_entry(*entry) for entry in entries]
        if not problems:
            raise UserError(
                f"environment {self.name}: no held-out problem found; expected a larger "
                "held_out_fraction or a task with more problems"
            )
        return problems

    def _from_entry(self, item: int, question: str, answer: Any, payload: bytes) -> Problem:
        return self._problem(question, answer, metadata={"item": item}, payload=payload)


class ReasoningGymSource:
    """A data set of the library; lives in the worker."""

    def __init__(
        self, task: str, params: dict[str, Any], scorer: str, splits: tuple[Split, ...]
    ) -> None:
        self.scorer, self.splits = scorer, splits
        self.dataset = create_dataset(task, params)
        self.size = len(self.dataset)
        self.bounded = self._is_bounded()
        prepare(scorer)

    def _is_bounded(self) -> bool:
        try:
            self.dataset[(1 << _ITEM_BITS) - 1]
        except IndexError:
            return True
        except Exception:  # this item failed; others need not
            return False
        return False

    def _generate(self, item: int) -> dict[str, Any]:
        # Some generators use the global random state, and one shrinks its data set by a failure.
        random.seed(item)
        self.dataset.size = self.size
        return self.dataset[item]

    def _candidates(self, *coordinates: int | str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Endless pseudo-random items; those whose generation fails are left out."""
        attempt = failures = 0
        while True:
            item = draw(_ITEM_BITS, *coordinates, attempt)
            attempt += 1
            if self.bounded:
                item %= self.size
            try:
                entry = self._generate(item)
            except Exception as error:
                failures += 1
                if failures > _TRIES:
                    raise UserError(f"the task's generator fails: {error!r}") from None
                continue
            failures = 0
            yield item, entry

    def train_problem(self, seed: int, index: int) -> tuple[int, str, Any, bytes]:
        """(item, question, answer, pickled entry) of the training problem at a data position."""
        for tries, (item, entry) in enumerate(self._candidates("train", seed, index), start=1):
            if not any(split.holds_out(entry["question"]) for split in self.splits):
                return _packed(item, entry)
            if tries == _TRIES:
                break
        raise UserError(
            f"none of {_TRIES} problems is left for training; expected a smaller "
            "held_out_fraction or a task with more problems"
        )

    def held_out_problems(
        self, n: int, seed: int, state: dict[str, Any] | None
    ) -> tuple[list[tuple[int, str, Any, bytes]], dict[str, Any]]:
        """The held-out problems among the next items, and where to go on."""
        state = state or {"round": 0, "seen": set(), "barren": 0, "more": True}
        found: list[tuple[int, str, Any, bytes]] = []
        candidates = self._candidates("held_out", seed, state["round"])
        state["round"] += 1
        for _ in range(32):
            item, entry = next(candidates)
            digest = question_digest(entry["question"])
            if not self.splits[0].holds_out(entry["question"]) or digest in state["seen"]:
                state["barren"] += 1
            else:
                state["barren"] = 0
                state["seen"].add(digest)
                found.append(_packed(item, entry))
            # With k of equally likely problems found, one more would show up among so many items
            # but for a chance of about e⁻¹⁰ ≈ 5·10⁻⁵.
            patience = 300 + 10 * (len(state["seen"]) + 1) / self.splits[0].fraction
            state["more"] = len(state["seen"]) < n and state["barren"] < patience
            if not state["more"]:
                break
        return found, state

    def score(self, payload: bytes, answer: Any, text: str) -> tuple[Any, str | None]:
        """Score a response by the task's own verifier, or by the scorer chosen instead."""

        def verify(given: str) -> Any:
            return self.dataset.score_answer(given, pickle.loads(payload))

        return score_response(self.scorer, text, answer, verify)


def _packed(item: int, entry: dict[str, Any]) -> tuple[int, str, Any, bytes]:
    # The entry stays pickled outside the worker: it may hold the library's own classes.
    return item, entry["question"], entry["answer"], pickle.dumps(entry)


def create_dataset(task: str, params: dict[str, Any]) -> Any:
    """The library's data set of a task, with a fixed seed.

    Raises:
        UserError: no such task or parameter, or the task refuses a value.
    """
    import reasoning_gym
    from reasoning_gym import composite
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise UserError(
            f"task: reasoning_gym has no task {task!r}; expected one such as {', '.join(near)}"
        )
    known = [field.name for field in fields(DATASETS[task][1]) if field.name != "seed"]
    for key in params:
        if key not in known:
            raise UserError(
                f"params.{key}: task {task} has no such parameter; "
                f"expected one of: {', '.join(known)}"
            )
    settings: dict[str, Any] = {"size": _DEFAULT_SIZE, **params}
    try:
        if task == "composite":
            specs = params.get("datasets") or []
            settings["datasets"] = [composite.DatasetSpec(**spec) for spec in specs]
        return reasoning_gym.create_dataset(task, seed=0, **settings)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in params.items())
        raise UserError(
            f"params: task {task} refuses {given}: {' '.join(str(error).split())}"
        ) from None
