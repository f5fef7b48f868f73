"""Problems, scores, and which problems training never sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Problem:
    """One problem, ready to become a prompt."""

    id: str
    """Environment name and hash of the question: equal questions have equal ids."""
    environment: str
    """Name of the environment that it comes from and that scores it."""
    question: str
    """The question as its source has it, without system prompt and suffix."""
    messages: list[dict[str, str]]
    """The chat: {"role", "content"} each."""
    answer: Any
    """The reference answer; None where only the verifier knows."""
    response: str | None = None
    """The target of supervised training."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Where it comes from, such as a line number."""
    payload: Any = field(default=None, repr=False)
    """What the environment's scorer wants back; opaque to everyone else."""


@dataclass(frozen=True)
class Score:
    """The score of one response."""

    value: float
    """A finite number; 0.0 if not valid, for which the caller puts its failure reward."""
    valid: bool
    """Whether the response could be scored at all."""
    reason: str | None = None
    """Why it could not."""


class Environment(Protocol):
    """A source of problems that knows how to score responses to them."""

    name: str

    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position: a pure function of seed and `index`."""
        ...

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """`n` distinct problems that training never sees; fewer if there are not so many."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score one response."""
        ...

    def score_all(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Score]:
        """Score `texts[i]` as a response to `problems[i]`; always one score per response."""
        ...

    def close(self) -> None:
        """End the scorer's process, if one runs; the environment may be used again."""
        ...


@dataclass(frozen=True)
class Split:
    """Divides problems into training and held out by the text of the question alone.

    So the same problem is on the same side wherever it comes from and whatever the seed.
    """

    fraction: float
    """Share of all possible questions that is held out."""
    texts: frozenset[str] = frozenset()
    """Digests of further held-out questions, listed in a file."""

    def holds_out(self, question: str) -> bool:
        """Whether training must not see this question."""
        digest = question_digest(question)
        return int(digest[:13], 16) < self.fraction * 16**13 or digest in self.texts


def question_digest(question: str) -> str:
    """32 hexadecimal digits that stand for a question, whatever its white space."""
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=16).hexdigest()


def draw(bits: int, *coordinates: int | str) -> int:
    """An integer in [0, 2^bits), bits ≤ 64: a hash of its coordinates."""
    text = "\0".join(str(coordinate) for coordinate in coordinates)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def chat(question: str, system_prompt: str | None, suffix: str) -> list[dict[str, str]]:
    """The messages of a plain question."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question + suffix}]
