"""Accuracy on problems that training never sees, and responses to a user's prompts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_logra import checkpoint as checkpoints
from megatron_logra import distributed
from megatron_logra.config import Config, SamplingConfig
from megatron_logra.metrics import make_run_dir
from megatron_logra.rl.environments import Problem, build_environment
from megatron_logra.rl.policy import Policy, as_generating, build_generating, join_ranks
from megatron_logra.rl.rollouts import RolloutMaker

HELD_OUT_SEED = 0
"""Which held-out problems: the same for every run, so that runs can be compared."""
PASSES = 0.999
"""Score from which a response counts as right; verifiers give less for a wrong one."""
_Z = 1.959963984540054  # 95 % of a normal distribution lie within ± this many deviations

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Accuracy:
    """How many responses were right."""

    pass_at_1: float
    """Fraction of right responses: the chance that one response is right."""
    low: float
    high: float
    """95 % interval."""
    n: int
    """Responses."""
    reward: float
    """Mean score."""
    truncated: float
    """Fraction of responses that were cut off."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in `eval.json`."""
        return {
            "pass@1": self.pass_at_1,
            "interval": [self.low, self.high],
            "n": self.n,
            "reward_mean": self.reward,
            "truncated": self.truncated,
        }


def evaluate(
    maker: RolloutMaker,
    problems: Sequence[Problem],
    samples: int,
    sampling: SamplingConfig,
    progress: Told | None = None,
) -> Accuracy:
    """Measure a policy on `problems`, `samples` responses each.

    The noise is the same whenever it is called, so that a difference between two policies is not
    one between two draws.
    """
    rollouts = maker.make(problems, samples, sampling, update=0, stream="eval", progress=progress)
    right = [[r.score.valid and r.score.value >= PASSES for r in g] for g in rollouts.groups]
    every = rollouts.all
    low, high = interval([sum(group) / len(group) for group in right])
    return Accuracy(
        pass_at_1=sum(map(sum, right)) / len(every),
        low=low,
        high=high,
        n=len(every),
        reward=sum(rollout.reward for rollout in every) / len(every),
        truncated=sum(r.response.finish_reason == "length" for r in every) / len(every),
    )


def interval(fractions: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of `fractions`, one per problem.

    Wilson's interval, with the number of independent responses that the spread between problems
    shows: responses to one problem are alike, so they count for less than their number. With one
    response to a problem it is Wilson's interval itself.
    """
    n = float(len(fractions))
    mean = sum(fractions) / n
    variance = sum((fraction - mean) ** 2 for fraction in fractions) / n / n
    if variance > 0:
        n = mean * (1 - mean) / variance
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def sampled(config: Config) -> SamplingConfig:
    """Sampling as in training, from the full distribution at temperature 1."""
    return config.rollout.sampling.model_copy(update={"temperature": 1.0, "top_p": 1.0, "top_k": 0})


def greedy(config: Config) -> SamplingConfig:
    """The most likely token each time."""
    return sampled(config).model_copy(update={"temperature": 0.0})


def accuracies(
    maker: RolloutMaker,
    problems: Sequence[Problem],
    config: Config,
    progress: Told | None = None,
) -> dict[str, Accuracy]:
    """`sampled`, and `greedy` if `eval.greedy` asks for it."""
    result = {"sampled": evaluate(maker, problems, config.eval.samples, sampled(config), progress)}
    if config.eval.greedy:
        result["greedy"] = evaluate(maker, problems, 1, greedy(config), progress)
    return result


def run(config: Config, checkpoint: str | Path | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint on the held-out problems and write `eval.json` into the run directory.

    Args:
        config: the model, its environment, and `eval`.
        checkpoint: a checkpoint directory; default: see `load_checkpoint`.

    Returns:
        What has been written.

    Raises:
        UserError: no such checkpoint, or one of another model; a faulty environment.
    """
    with as_generating(config):
        join_ranks(config.generating)
    environment = build_environment(config.environment, config.train.seed)
    try:
        distributed.first(environment.check)
        problems = distributed.first(
            lambda: environment.held_out(config.eval.problems, HELD_OUT_SEED)
        )
        distributed.first(lambda: make_run_dir(Path(config.logging.run_dir)))
        policy = build_generating(config)
        source = load_checkpoint(policy, checkpoint)
        found = accuracies(RolloutMaker(policy, environment), problems, config)
    finally:
        environment.close()
    result = {
        **found["sampled"].to_json(),
        "problems": len(problems),
        "samples": config.eval.samples,
        "temperature": 1.0,
        "greedy": found["greedy"].to_json() if "greedy" in found else None,
        "checkpoint": str(source) if source else None,
        "model": config.model.hf or "model.spec",
        "environment": [
            entry.name or entry.task or entry.path or entry.function for entry in config.environment
        ],
    }
    if distributed.rank() > 0:
        return result
    path = Path(config.logging.run_dir) / "eval.json"
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"{name_of(source)}, {len(problems)} held-out problems")
    for name, accuracy in found.items():
        print(
            f"{name:>8}: pass@1 {accuracy.pass_at_1:.3f}  "
            f"[{accuracy.low:.3f}, {accuracy.high:.3f}]  ({accuracy.n} responses)"
        )
    print(path)
    return result


def generate(
    config: Config, prompts: Sequence[str], checkpoint: str | Path | None = None
) -> list[str]:
    """Print a response to each prompt, sampled as `rollout.sampling` says; returns them.

    Which weights they are from is said on standard error.
    """
    policy = build_generating(config)
    source = load_checkpoint(policy, checkpoint)
    sampling = config.rollout.sampling
    tokens = [policy.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
    responses = policy.engine().generate(
        tokens,
        1,
        sampling,
        seed=config.train.seed,
        update=0,
        stream="generate",
        stop_token_ids=policy.stop_tokens(sampling),
    )
    texts = [policy.tokenizer.decode(response.token_ids) for (response,) in responses]
    print(f"weights: {name_of(source)}", file=sys.stderr)
    for prompt, text in zip(prompts, texts, strict=True):
        if distributed.rank() > 0:
            break
        if len(prompts) > 1:
            print(f"> {prompt}")
        print(text)
    return texts


def name_of(source: Path | None) -> str:
    """What people are told of the weights that `load_checkpoint` has loaded."""
    return str(source) if source else "the first weights of the configuration"


def load_checkpoint(policy: Policy, checkpoint: str | Path | None) -> Path | None:
    """Give `policy` the weights to be looked at.

    Those of `checkpoint`; without it, of the run directory's latest checkpoint; without one, of
    `checkpoint.load`; else those it has: the configuration's.

    Returns:
        The checkpoint that was loaded.
    """
    config = policy.config
    source = Path(checkpoint) if checkpoint is not None else None
    if source is None:
        root = Path(config.logging.run_dir) / "checkpoints"
        source = distributed.first(lambda: checkpoints.latest(root))
    if source is None and config.checkpoint.load is not None:
        source = Path(config.checkpoint.load)
    if source is not None:
        policy.load_weights(source)
    return source
