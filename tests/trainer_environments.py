"""Environments of the trainer's tests; functions for `environment.function`."""

from __future__ import annotations

from typing import Any


class Letters:
    """Questions of one letter; a response scores by its share of early letters or digits."""

    def __init__(self, reward: str = "early") -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.problems = [
            {"question": f"{a}{b}?", "answer": a, "response": f"{a}{b} {b}{a}"}
            for a in letters
            for b in letters[:8]
        ]
        self.reward = reward

    def score(self, problem: dict[str, Any], text: str) -> float:
        if self.reward == "equal":
            return 0.25
        return sum(character < "@" for character in text) / max(len(text), 1)
