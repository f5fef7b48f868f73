"""An independent dense reference: transformers' model in float64, and the step written out.

It shares with the package only the projections (checked by themselves) and the table that says
which Hugging Face tensors make a Megatron weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.config import Config, config_from_dict
from megatron_logra.model.families import FAMILIES, rules

VOCABULARY = 131


@dataclass
class Batch:
    """Sequences with a weight on the loss of each position (0 carries none)."""

    tokens: torch.Tensor
    weights: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.tokens.shape[1]).expand_as(self.tokens)

    @property
    def mask(self) -> torch.Tensor:
        """Positions whose next token carries loss."""
        return torch.nn.functional.pad(self.weights[:, 1:] != 0, (0, 1))


def make_batches(generator: torch.Generator, lengths: list[list[int]]) -> list[Batch]:
    """Random batches of right-padded sequences; the last half of each carries loss."""
    batches = []
    for rows in lengths:
        size = max(rows)
        tokens = torch.randint(0, VOCABULARY, (len(rows), size), generator=generator)
        weights = torch.randn(len(rows), size, generator=generator)
        for row, length in enumerate(rows):
            weights[row, : length // 2] = 0
            weights[row, length:] = 0
        batches.append(Batch(tokens, weights))
    return batches


def make_checkpoint(directory: Path, kind: str, tied: bool, layers: int = 2) -> None:
    """A tiny random model of transformers' own class: odd sizes, grouped queries."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    configs = {
        "qwen3": lambda: transformers.Qwen3Config(head_dim=12, **common),  # QK norm
        "qwen2": lambda: transformers.Qwen2Config(**common),  # QKV bias
        "gemma3": lambda: transformers.Gemma3TextConfig(
            head_dim=12,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=9,
            query_pre_attn_scalar=12,
            pad_token_id=0,
            **common,
        ),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)


def config_for(directory: Path, **sections: dict[str, Any]) -> Config:
    """A configuration that loads the checkpoint in fp32."""
    data: dict[str, Any] = {
        "model": {"hf": str(directory), "tokenizer": "bytes"},
        "train": {"precision": "fp32", "seq_length": 64, "micro_batch_size": 2},
        "sketch": {"rank": 16},
        "step_control": {"factor_dtype": "fp32"},
    }
    for name, values in sections.items():
        data.setdefault(name, {}).update(values)
    return config_from_dict(data)


class Reference:
    """The model in float64 with dense gradients and the LoGRA step."""

    def __init__(self, directory: Path, config: TransformerConfig, tied: bool) -> None:
        self.config = config
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )
        self.model = model.eval()
        self.parameters = dict(self.model.named_parameters())
        self.table = dict(rules(FAMILIES[type(model).__name__], config, tied))
        self.moments: dict[str, torch.Tensor] = {}

    def names(self) -> list[str]:
        """Targets in the order of the model."""
        kinds = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")
        return [n for n in self.table if n.rsplit(".", 2)[-2] in kinds and n.endswith(".weight")]

    def weight(self, name: str) -> torch.Tensor:
        """A Megatron weight [d, k], put together from the model's."""
        return self._joined(name, lambda p: p.detach())

    def _joined(self, name: str, of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        rule = self.table[name]
        return rule.join([of(self.parameters[s]) for s in rule.sources], self.config)

    def logits(self, batch: Batch) -> torch.Tensor:
        return self.model(input_ids=batch.tokens).logits

    def gradients(self, batches: list[Batch]) -> dict[str, torch.Tensor]:
        """Dense gradients of Σ weight · (-logprob) / number of loss tokens, by Megatron's names."""
        self.model.zero_grad(set_to_none=True)
        tokens = sum(int(batch.mask.sum()) for batch in batches)
        for batch in batches:
            logprobs = torch.log_softmax(self.logits(batch)[:, :-1], -1)
            picked = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
            (-(batch.weights[:, 1:] * picked).sum() / tokens).backward()
        return {name: self._joined(name, lambda p: p.grad) for name in self.names()}

    def direction(
        self,
        gradients: dict[str, torch.Tensor],
        projections: dict[str, torch.Tensor],
        rule: str,
        t: int,
    ) -> dict[str, torch.Tensor]:
        """D [d, r] of every target; moments move on. beta2 and eps are the defaults."""
        directions = {}
        for name, gradient in gradients.items():
            s = gradient @ projections[name].t()
            v = self.moments.get(name, torch.zeros(len(s), dtype=torch.float64))
            v = self.moments[name] = 0.95 * v + 0.05 * s.square().mean(1)
            m = (v / (1 - 0.95**t)).sqrt()
            if rule == "norm_preserving":
                q = 1 / (m + 1e-8 * m.mean())
                d = (q / q.square().mean().sqrt())[:, None] * s
                d = d * s.norm() / d.norm()
            else:
                d = s / (m + 1e-8)[:, None] if rule == "plain" else s
            directions[name] = d
        return directions

    def scaled_to_ratio(
        self, changes: dict[str, torch.Tensor], ratio: float
    ) -> dict[str, torch.Tensor]:
        """Dense ΔW of every target, scaled together to ‖ΔW‖ = ratio · ‖W‖."""
        weights = math.sqrt(sum(float(self.weight(n).square().sum()) for n in changes))
        norm = math.sqrt(sum(float(c.square().sum()) for c in changes.values()))
        return {name: c * ratio * weights / norm for name, c in changes.items()}

    @torch.no_grad()
    def add(self, changes: dict[str, torch.Tensor], scale: float) -> None:
        """W ← W + scale · ΔW, through the model's own tensors."""
        for name, change in changes.items():
            rule = self.table[name]
            # Find where every element went: join a numbering of the elements.
            sources = [self.parameters[s] for s in rule.sources]
            offsets, numbers = 0, []
            for source in sources:
                numbers.append(torch.arange(offsets, offsets + source.numel()).view_as(source))
                offsets += source.numel()
            place = rule.join(numbers, self.config).flatten()
            flat = torch.empty(offsets, dtype=torch.float64)
            flat[place] = change.flatten()
            for source, part in zip(sources, flat.split([s.numel() for s in sources]), strict=True):
                source.add_(part.view_as(source), alpha=scale)

    @contextmanager
    def moved(self, changes: dict[str, torch.Tensor], scale: float) -> Iterator[None]:
        """Within: the weights are W + scale · ΔW."""
        self.add(changes, scale)
        try:
            yield
        finally:
            self.add(changes, -scale)

    @torch.no_grad()
    def predicted_kl(
        self, changes: dict[str, torch.Tensor], batch: Batch, temperature: float = 1.0
    ) -> float:
        """½ Var_p(ż/T) over the batch's loss positions, ż by central differences."""
        step = 1.0
        with self.moved(changes, step):
            up = self.logits(batch)
        with self.moved(changes, -step):
            down = self.logits(batch)
        tangent = ((up - down) / (2 * step) / temperature)[batch.mask]
        p = torch.softmax(self.logits(batch)[batch.mask] / temperature, -1)
        mean = (p * tangent).sum(-1, keepdim=True)
        return float(0.5 * (p * (tangent - mean).square()).sum(-1).mean())

    @torch.no_grad()
    def realised_kl(
        self, changes: dict[str, torch.Tensor], scale: float, batch: Batch, temperature: float = 1.0
    ) -> float:
        """Mean KL(old ‖ new) of the step scale · ΔW over the batch's loss positions."""
        old = torch.log_softmax(self.logits(batch)[batch.mask] / temperature, -1)
        with self.moved(changes, scale):
            new = torch.log_softmax(self.logits(batch)[batch.mask] / temperature, -1)
        return float((old.exp() * (old - new)).sum(-1).mean())
