"""Responses that are being generated, and the drawing of their tokens: what engines share.

An engine brings the logits; whose turn it is, with which noise, and when a response is over, is
decided here, alike for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rollout.sampling import noise, sample

Sampler = Callable[[Tensor, Tensor, SamplingConfig], tuple[Tensor, Tensor]]
"""As `sampling.sample`: logits and uniforms → tokens and their logprobs."""


@dataclass
class Response:
    """What was generated after a prompt."""

    token_ids: list[int] = field(default_factory=list)
    """Generated tokens; a token that ended the response is the last one."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token under the distribution it was drawn from, in nats."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that each token was drawn from, where they are not the trainer's own:
    from separate workers, or where weights changed meanwhile."""
    finish_reason: Literal["stop", "length"] = "length"
    """`stop`: a stop token; `length`: the largest number of tokens was reached."""


@dataclass
class Row:
    """A response that is being generated."""

    prompt: Sequence[int]
    sample: int
    """Its index, which keys the noise."""
    limit: int
    """Tokens it may have."""
    response: Response

    @property
    def ended(self) -> bool:
        """Whether its last token was its last one."""
        response = self.response
        return response.finish_reason == "stop" or len(response.token_ids) == self.limit


class Drawing:
    """The responses of one call of an engine; arguments as of `StaticEngine.generate`.

    Args:
        stops: all tokens that end a response.
        max_sequence_length: most tokens of a prompt and its response together.

    Raises:
        UserError: a prompt is empty or leaves no room for a response.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        *,
        seed: int,
        update: int,
        stream: str,
        first_sample: int = 0,
        stops: frozenset[int],
        max_sequence_length: int,
    ) -> None:
        _check(prompts, max_sequence_length)
        self.sampling = sampling
        self.stops = stops
        self.version: int | None = None
        """Noted with each token, unless it is None."""
        self._seed, self._update, self._stream = seed, update, stream
        self.responses = [[Response() for _ in range(samples_per_prompt)] for _ in prompts]
        """[prompts][samples_per_prompt]"""
        self.rows = [
            Row(
                prompt=prompt,
                sample=first_sample + i * samples_per_prompt + j,
                limit=min(sampling.max_tokens, max_sequence_length - len(prompt)),
                response=response,
            )
            for i, prompt in enumerate(prompts)
            for j, response in enumerate(self.responses[i])
        ]
        """One a response, in their order."""

    def draw(self, logits: Tensor, rows: Sequence[Row], sampler: Sampler = sample) -> Tensor:
        """Append a token to each row's response; [n, vocabulary] → [n] tokens."""
        places = torch.tensor([[len(row.response.token_ids), row.sample] for row in rows])
        uniforms = noise(
            *places.to(logits.device).T, seed=self._seed, update=self._update, stream=self._stream
        )
        tokens, logprobs = sampler(logits, uniforms, self.sampling)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.response.token_ids.append(token)
            row.response.logprobs.append(logprob)
            if self.version is not None:
                row.response.versions.append(self.version)
            if token in self.stops:
                row.response.finish_reason = "stop"
        return tokens


def _check(prompts: Sequence[Sequence[int]], max_sequence_length: int) -> None:
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_sequence_length:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens: expected 1 to {max_sequence_length - 1}, "
                f"since prompt and response together may have {max_sequence_length}"
            )
