"""Problems to train on, problems held out, and scores for responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.environments.base import (
    Environment,
    Problem,
    Score,
    Split,
    question_digest,
)
from megatron_logra.rl.environments.jsonl import JsonlEnvironment, question_of, read_lines
from megatron_logra.rl.environments.mixture import Mixture
from megatron_logra.rl.environments.python_function import PythonEnvironment
from megatron_logra.rl.environments.reasoning_gym import ReasoningGymEnvironment

__all__ = ["Environment", "Mixture", "Problem", "Score", "build_environment"]

_KINDS = {
    "reasoning_gym": (ReasoningGymEnvironment, "task"),
    "jsonl": (JsonlEnvironment, "path"),
    "python": (PythonEnvironment, "function"),
}


def build_environment(configs: Sequence[EnvironmentConfig], seed: int) -> Mixture:
    """The environments of a run as one.

    A question that one environment holds out is not trained on in any other either.

    Args:
        configs: the section `environment`.
        seed: of the order of training problems.

    Raises:
        UserError: the section is empty, a key that the kind needs is missing, two environments
            have one name, or a file is missing or malformed. Errors of reasoning-gym tasks and of
            the user's functions come at the first use, which starts their worker processes.
    """
    if not configs:
        raise UserError("environment: missing; expected at least one environment")
    names = [_name(place, config) for place, config in enumerate(configs)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"environment: two are called {name}; expected a different name each")
    splits = [_split(config) for config in configs]
    environments: list[Environment] = []
    for place, (config, name) in enumerate(zip(configs, names, strict=True)):
        own_first = (splits[place], *splits[:place], *splits[place + 1 :])
        environments.append(_KINDS[config.kind][0](config, name, seed, own_first))
    return Mixture(environments, [config.weight for config in configs], seed)


def _name(place: int, config: EnvironmentConfig) -> str:
    for kind, (_, key) in _KINDS.items():
        given = getattr(config, key)
        if kind == config.kind and not given:
            raise UserError(f"environment.{place}.{key}: missing; kind {kind} needs it")
        if kind != config.kind and given:
            raise UserError(f"environment.{place}.{key}: not a key of kind {config.kind}")
    if config.kind != "jsonl" and config.held_out_path:
        raise UserError(f"environment.{place}.held_out_path: not a key of kind {config.kind}")
    if config.kind == "jsonl" and config.params:
        raise UserError(f"environment.{place}.params: not a key of kind jsonl")
    source = config.task or config.function or Path(config.path or "").stem
    return config.name or source


def _split(config: EnvironmentConfig) -> Split:
    if config.held_out_path is None:
        return Split(config.held_out_fraction)
    lines = read_lines(config.held_out_path)
    return Split(0.0, frozenset(question_digest(question_of(data)) for _, data in lines))
