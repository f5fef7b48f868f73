"""Several environments as one, each with its share of the problems."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_logra.rl.environments.base import (
    Environment,
    Problem,
    Score,
    draw,
    question_digest,
)


class Mixture:
    """A weighted mixture of environments with different names.

    Which environment a data position belongs to is a pure function of seed and position.
    """

    def __init__(
        self, environments: Sequence[Environment], weights: Sequence[float], seed: int
    ) -> None:
        self.environments = {environment.name: environment for environment in environments}
        assert len(self.environments) == len(weights) == len(environments) > 0
        self.name = "+".join(self.environments)
        self._seed = seed
        self._shares = [weight / sum(weights) for weight in weights]

    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position."""
        left = draw(53, "mixture", self._seed, index) / 2**53
        *firsts, last = self.environments.values()
        for environment, share in zip(firsts, self._shares, strict=False):
            left -= share
            if left < 0:
                return environment.train_problem(index)
        return last.train_problem(index)

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """Up to `n` held-out problems, distinct in their questions, divided by the weights.

        An environment that has fewer than its share gives what it has.
        """
        exact = [n * share for share in self._shares]
        counts = [int(count) for count in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_remainder[: n - sum(counts)]:
            counts[i] += 1
        distinct: dict[str, Problem] = {}
        for environment, count in zip(self.environments.values(), counts, strict=True):
            for problem in environment.held_out(count, seed) if count else []:
                distinct.setdefault(question_digest(problem.question), problem)
        return list(distinct.values())

    def check(self) -> None:
        """Start every environment's worker and make one problem.

        Raises:
            UserError: an unknown task, refused parameters, a function that cannot be called.
        """
        for environment in self.environments.values():
            environment.train_problem(0)

    def score(self, problem: Problem, text: str) -> Score:
        """Score one response by the environment that its problem is from."""
        return self.environments[problem.environment].score(problem, text)

    def score_all(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Score]:
        """Score `texts[i]` as a response to `problems[i]`, each by its own environment."""
        assert len(problems) == len(texts)
        scores: dict[int, Score] = {}
        for name, environment in self.environments.items():
            places = [i for i, problem in enumerate(problems) if problem.environment == name]
            if places:
                given = environment.score_all(
                    [problems[i] for i in places], [texts[i] for i in places]
                )
                scores.update(zip(places, given, strict=True))
        return [scores[i] for i in range(len(problems))]

    def close(self) -> None:
        """End the scorers' processes."""
        for environment in self.environments.values():
            environment.close()
