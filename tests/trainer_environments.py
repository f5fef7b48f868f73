"""Environments of the trainer's tests; functions for `environment.function`."""

from __future__ import annotations

import random
import time
from typing import Any


class Letters:
    """Questions of two letters; a response scores by its share of early letters or digits.

    Args:
        reward: `early`; `equal` for all; or `text`, which is no number.
        long: characters added to one question in twenty.
        pause: seconds that scoring a response takes.
    """

    def __init__(self, reward: str = "early", long: int = 0, pause: float = 0.0) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.problems = [
            {"question": f"{a}{b}?", "answer": a, "response": f"{a}{b} {b}{a}"}
            for a in letters
            for b in letters[:8]
        ]
        for problem in self.problems[::20]:
            problem["question"] += "!" * long
        self.reward = reward
        self.pause = pause

    def score(self, problem: dict[str, Any], text: str) -> Any:
        time.sleep(self.pause)
        if self.reward == "text":
            return "high"
        if self.reward == "equal":
            return 0.25
        return sum(character < "@" for character in text) / max(len(text), 1)


class Delayed(Letters):
    """Scores like `Letters`, after a random while."""

    def score(self, problem: dict[str, Any], text: str) -> Any:
        time.sleep(random.random() * 0.01)
        return super().score(problem, text)
