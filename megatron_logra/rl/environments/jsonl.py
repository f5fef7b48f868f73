"""Problems from a file with one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.environments.base import Problem, Split
from megatron_logra.rl.environments.isolated import IsolatedEnvironment
from megatron_logra.rl.environments.listed import ListedProblems
from megatron_logra.rl.environments.process import WorkerProcess

_ROLES = ("system", "user", "assistant", "tool")


class JsonlEnvironment(IsolatedEnvironment):
    """A file's problems; `splits` are those of all environments of the run, its own first.

    Raises:
        UserError: a file is missing, a line is malformed, or one side of the split is empty.
    """

    def __init__(
        self, config: EnvironmentConfig, name: str, seed: int, splits: tuple[Split, ...]
    ) -> None:
        if config.scorer == "verifier":
            raise UserError(
                f"environment {name}: scorer: verifier: a jsonl file has none; "
                "expected math_verify, exact or last_integer"
            )
        worker = WorkerProcess(
            "megatron_logra.rl.environments.scoring:AnswerSource",
            {"scorer": config.scorer or "math_verify"},
            label=f"environment {name}",
        )
        super().__init__(config, name, worker)
        assert config.path is not None
        problems = [self._from_line(*line) for line in read_lines(config.path)]
        held_out = None
        if config.held_out_path is not None:
            held_out = [self._from_line(*line) for line in read_lines(config.held_out_path)]
        self._listed = ListedProblems(name, problems, seed, splits, held_out)

    def train_problem(self, index: int) -> Problem:
        """The training problem at a data position: a new order each time the file is through."""
        return self._listed.train_problem(index)

    def held_out(self, n: int, seed: int) -> list[Problem]:
        """`n` held-out problems, or all there are."""
        return self._listed.held_out(n, seed)

    def _from_line(self, where: str, data: dict[str, Any]) -> Problem:
        messages = data.get("messages")
        problem = self._problem(
            question_of(data),
            data.get("answer"),
            response=data.get("response"),
            metadata={"line": where},
            payload=where,
        )
        if messages is None:
            return problem
        system = self.config.system_prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        last = {**messages[-1], "content": messages[-1]["content"] + self.config.suffix}
        return replace(problem, messages=[*messages[:-1], last])


def read_lines(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The checked objects of a file, each with `file:line`; empty lines are passed over.

    Raises:
        UserError: naming the file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise UserError(f"environment.path: {path}: {what}; expected a JSONL file") from None
    lines = [
        (f"{path}:{number}", _checked(f"{path}:{number}", line))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise UserError(f"environment.path: {path}: is empty; expected JSON objects, one a line")
    return lines


def question_of(data: dict[str, Any]) -> str:
    """The text that identifies a line's problem: its question, or the whole chat."""
    if "question" in data:
        return data["question"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in data["messages"])


def _checked(where: str, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg}") from None
    if not isinstance(data, dict) or ("question" in data) == ("messages" in data):
        raise UserError(f"{where}: expected an object with either question or messages")
    if "question" in data and not _is_text(data["question"]):
        raise UserError(f"{where}: question: expected text, got {data['question']!r}")
    if "messages" in data:
        _check_messages(where, data["messages"])
    answer, response = data.get("answer"), data.get("response")
    if answer is None and response is None:
        raise UserError(f"{where}: expected answer (to score against) or response (to learn)")
    if answer is not None and (
        isinstance(answer, bool)
        or not isinstance(answer, str | int | float)
        or not str(answer).strip()
    ):
        raise UserError(f"{where}: answer: expected text or a number, got {answer!r}")
    if response is not None and not _is_text(response):
        raise UserError(f"{where}: response: expected text, got {response!r}")
    return data


def _check_messages(where: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages: expected a list of {{role, content}}")
    for message in messages:
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or message["role"] not in _ROLES
            or not isinstance(message["content"], str)
        ):
            raise UserError(
                f"{where}: messages: expected {{role, content}} with a role of "
                f"{', '.join(_ROLES)}, got {message!r}"
            )
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: messages: the last one is the assistant's; put it in response")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
