"""From problems to scored responses, and the samples of them that are kept on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_logra import distributed
from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.advantages import zero_variance_fraction
from megatron_logra.rl.environments import Environment, Problem, Score
from megatron_logra.rl.policy import Policy
from megatron_logra.rollout.drawing import Response
from megatron_logra.rollout.remote import RemoteEngine
from megatron_logra.rollout.static_engine import StaticEngine

if TYPE_CHECKING:
    from megatron_logra.rollout.dynamic_engine import DynamicEngine


@dataclass(frozen=True)
class Rollout:
    """One response to a problem, with the tokens and logprobs exactly as they were sampled."""

    problem: Problem
    prompt_ids: list[int]
    response: Response
    text: str
    """The response as its scorer reads it: decoded, without special tokens."""
    score: Score
    reward: float
    """The score, or the failure reward where there is none."""


@dataclass(frozen=True)
class Rollouts:
    """The scored responses of one batch."""

    groups: list[list[Rollout]]
    """[problems][samples]"""
    generation_s: float
    scoring_s: float
    drift: float | None = None
    """Largest difference of separate workers' weights from the trainer's, where it was measured."""

    @property
    def all(self) -> list[Rollout]:
        """Problem by problem."""
        return [rollout for group in self.groups for rollout in group]

    def rewards(self) -> list[list[float]]:
        """[problems][samples]"""
        return [[rollout.reward for rollout in group] for group in self.groups]


@dataclass(frozen=True)
class _Share:
    """What one data-parallel rank contributes: [problems][samples], and seconds."""

    responses: list[list[Response]]
    texts: list[list[str]]
    scores: list[list[Score]]
    generation_s: float
    scoring_s: float


class RolloutMaker:
    """Has responses generated and has the environment score them.

    Each data-parallel rank answers its share of the problems, and scores it; tensor-parallel ranks
    generate together, and the first of them has the responses scored. With separate workers these
    generate. All ranks end up with all of it.

    Args:
        policy: the model.
        environment: scores.
        remote: separate workers; None if the policy itself generates.
    """

    def __init__(
        self, policy: Policy, environment: Environment, remote: RemoteEngine | None = None
    ) -> None:
        self.policy = policy
        self.environment = environment
        self.remote = remote
        self.version = 0
        """Version of the weights from which separate workers, or a copy, are to sample."""
        self._asked: dict[tuple[str, int], int] = {}
        if remote is None and policy.config.algorithm.name != "sft":
            _ = self.engine  # what it refuses is refused now, not at the first rollout

    @cached_property
    def engine(self) -> StaticEngine | DynamicEngine:
        """What the policy itself generates with."""
        return self.policy.engine()

    def has_asked(self, stream: str, update: int) -> bool:
        """Whether separate workers have been asked for this, and it has not been made yet."""
        return (stream, update) in self._asked

    def ask(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: SamplingConfig,
        *,
        update: int,
        stream: str,
    ) -> None:
        """Have separate workers begin with what `make` will be called for."""
        assert self.remote is not None
        self._asked[stream, update] = self.remote.ask(
            [self.prompt(problem) for problem in problems],
            samples,
            sampling,
            version=self.version,
            update=update,
            stream=stream,
            stop_token_ids=self.policy.stop_tokens(sampling),
        )

    def make(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: SamplingConfig,
        *,
        update: int,
        stream: str,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollouts:
        """Sample `samples` responses to each problem and score them.

        Args:
            problems: the prompts.
            samples: responses per problem.
            sampling: how to sample.
            update: step index; with the seed, it keys the noise.
            stream: name of the noise's stream.
            progress: told the numbers of finished and of all responses of this rank (of all
                workers).

        Returns:
            The responses to all problems, on every rank; times are the slowest rank's.

        Raises:
            UserError: a prompt leaves no room for a response; names the problem. Like all of the
                environment's, it is raised on all ranks.
        """
        started = time.perf_counter()
        prompts = [self.prompt(problem) for problem in problems]
        number, shares = self.policy.rollout_rank
        own = slice(*(len(problems) * place // shares for place in (number, number + 1)))
        drift = None
        if self.remote is None:
            own_responses = self.engine.generate(
                prompts[own],
                samples,
                sampling,
                seed=self.policy.config.train.seed,
                update=update,
                stream=stream,
                first_sample=own.start * samples,
                stop_token_ids=self.policy.stop_tokens(sampling),
                progress=progress,
            )
        else:
            if not self.has_asked(stream, update):
                self.ask(problems, samples, sampling, update=update, stream=stream)
            collected = self.remote.collect(self._asked.pop((stream, update)), progress)
            own_responses, drift = collected.responses[own], collected.drift
        generation_s = time.perf_counter() - started
        found = distributed.each(lambda: self._scored(problems[own], own_responses, generation_s))
        parts = [share for share in found if share is not None]
        failure = self.policy.config.algorithm.failure_reward
        groups = []
        for problem, prompt, responses, texts, scores in zip(
            problems,
            prompts,
            [group for share in parts for group in share.responses],
            [group for share in parts for group in share.texts],
            [group for share in parts for group in share.scores],
            strict=True,
        ):
            group = []
            for response, text, score in zip(responses, texts, scores, strict=True):
                reward = score.value if score.valid else failure
                group.append(Rollout(problem, prompt, response, text, score, reward))
            groups.append(group)
        return Rollouts(
            groups,
            max(share.generation_s for share in parts),
            max(share.scoring_s for share in parts),
            drift,
        )

    def _scored(
        self, problems: Sequence[Problem], responses: list[list[Response]], generation_s: float
    ) -> _Share | None:
        """This rank's responses with their scores; None if another rank contributes them."""
        if not self.policy.first_of_replica:
            return None
        started = time.perf_counter()
        decode = self.policy.tokenizer.decode
        texts = [[decode(response.token_ids) for response in group] for group in responses]
        asked = [problem for problem, group in zip(problems, responses, strict=True) for _ in group]
        scores = iter(
            self.environment.score_all(asked, [text for group in texts for text in group])
        )
        by_group = [[next(scores) for _ in group] for group in texts]
        return _Share(responses, texts, by_group, generation_s, time.perf_counter() - started)

    def prompt(self, problem: Problem) -> list[int]:
        """The tokens of a problem.

        Raises:
            UserError: they leave no room for a response.
        """
        tokens = self.policy.tokenizer.encode_chat(problem.messages)
        longest = self.policy.max_length - 1
        if len(tokens) > longest:
            raise UserError(
                f"train.seq_length: the prompt of problem {problem.id} has {len(tokens)} tokens; "
                f"expected at most {longest}, so that a response fits in"
            )
        return tokens


def metrics(rollouts: Rollouts) -> dict[str, float | None]:
    """The `reward/*` and `rollout/*` figures of a batch, and its `time/*`."""
    every = rollouts.all
    rewards = [rollout.reward for rollout in every]
    tokens = sum(len(rollout.response.token_ids) for rollout in every)
    mean = sum(rewards) / len(rewards)
    result: dict[str, float | None] = {
        "time/rollout_s": rollouts.generation_s,
        "time/reward_s": rollouts.scoring_s,
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "reward/zero_variance_groups": zero_variance_fraction(torch.tensor(rollouts.rewards())),
        "reward/invalid": _fraction(not rollout.score.valid for rollout in every),
        "rollout/tokens": tokens,
        "rollout/tokens_per_s": tokens / max(rollouts.generation_s, 1e-9),
        "rollout/length_mean": tokens / len(every),
        "rollout/truncated": _fraction(
            rollout.response.finish_reason == "length" for rollout in every
        ),
    }
    names = sorted({rollout.problem.environment for rollout in every})
    if len(names) > 1:
        for name in names:
            own = [rollout.reward for rollout in every if rollout.problem.environment == name]
            result[f"reward/{name}/mean"] = sum(own) / len(own)
    return result


class SampleLog:
    """`rollouts/step_NNNNNNN.jsonl`: a few sampled texts of each step, and of so many steps.

    The first rank writes them.
    """

    def __init__(self, run_dir: Path, per_step: int, kept: int) -> None:
        self.directory = run_dir / "rollouts"
        self.per_step = per_step if distributed.rank() == 0 else 0
        self.kept = kept
        if self.per_step:
            self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rollouts: Rollouts, advantages: Sequence[float]) -> None:
        """Keep responses that are evenly spaced over the batch; `advantages` are in its order."""
        if not self.per_step:
            return
        every = rollouts.all
        lines = []
        for place in evenly_spaced(len(every), self.per_step):
            rollout = every[place]
            lines.append(json.dumps(_sample(rollout, advantages[place], step), ensure_ascii=False))
        path = self.directory / f"step_{step:07d}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for old in sorted(self.directory.glob("step_*.jsonl"))[: -self.kept]:
            old.unlink()


def evenly_spaced(length: int, count: int) -> list[int]:
    """At most `count` places out of `length`, the first one first."""
    count = min(length, count)
    return [place * length // count for place in range(count)]


def _sample(rollout: Rollout, advantage: float, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "problem": rollout.problem.id,
        "environment": rollout.problem.environment,
        "messages": rollout.problem.messages,
        "answer": rollout.problem.answer
        if isinstance(rollout.problem.answer, str | int | float | None)
        else repr(rollout.problem.answer),
        "response": rollout.text,
        "finish_reason": rollout.response.finish_reason,
        "tokens": len(rollout.response.token_ids),
        "reward": rollout.reward,
        "valid": rollout.score.valid,
        "advantage": advantage,
    }


def _fraction(flags: Any) -> float:
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values)
