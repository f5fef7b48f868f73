"""Training order and held-out choice of a finite list of problems."""

from __future__ import annotations

from megatron_logra.errors import UserError
from megatron_logra.rl.environments.base import Problem, Split, draw, question_digest


class ListedProblems:
    """A list divided into training and held-out problems.

    Args:
        name: the environment's name, for errors.
        problems: the list, of which `splits[0]` holds some out.
        seed: of the training order.
        splits: those of all environments of the run, the list's own first.
        held_out: the held-out problems, if they are a list of their own.

    Raises:
        UserError: no problem is left on one of the two sides.
    """

    def __init__(
        self,
        name: str,
        problems: list[Problem],
        seed: int,
        splits: tuple[Split, ...],
        held_out: list[Problem] | None = None,
    ) -> None:
        self._seed = seed
        self._train = [
            problem
            for problem in problems
            if not any(split.holds_out(problem.question) for split in splits)
        ]
        if held_out is None:
            held_out = [problem for problem in problems if splits[0].holds_out(problem.question)]
        distinct = {question_digest(problem.question): problem for problem in held_out}
        self._held_out = list(distinct.values())
        for side, what in ((self._train, "training"), (self._held_out, "held-out")):
            if not side:
                raise UserError(
                    f"environment {name}: none of {len(problems)} problems is left as a {what} "
                    "problem; expected more problems or another held_out_fraction"
                )
        self._order: tuple[int, list[int]] = (-1, [])

    def train_problem(self, index: int) -> Problem:
        """The problem at a data position: each pass over the list has its own random order."""
        epoch, place = divmod(index, len(self._train))
        if self._order[0] != epoch:
            keys = [(draw(64, "epoch", self._seed, epoch, i), i) for i in range(len(self._train))]
            self._order = epoch, [i for _, i in sorted(keys)]
        return self._train[self._order[1][place]]

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """A random choice of `n` held-out problems, or all there are."""
        return sorted(self._held_out, key=lambda problem: draw(64, "held_out", seed, problem.id))[
            :n
        ]
