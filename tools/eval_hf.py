"""Evaluate a Hugging Face model with transformers on the problems of a configuration.

    python tools/eval_hf.py CONFIG [KEY=VALUE ...] --model DIR [--json FILE]

Problems, prompts, scorers and sampling noise are those of `megatron-logra eval`, the model and its
generation transformers' own: for a model exported by `convert to-hf` the accuracies are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_logra import platform

platform.install()

from megatron_logra.config import Config, SamplingConfig, load_config  # noqa: E402
from megatron_logra.errors import EXIT_USER_ERROR, UserError  # noqa: E402
from megatron_logra.model.tokenizer import HuggingFaceTokenizer, load_tokenizer  # noqa: E402
from megatron_logra.rl.environments import build_environment  # noqa: E402
from megatron_logra.rl.evaluate import HELD_OUT_SEED, accuracies  # noqa: E402
from megatron_logra.rl.policy import Policy  # noqa: E402
from megatron_logra.rl.rollouts import RolloutMaker  # noqa: E402
from megatron_logra.rollout.drawing import Drawing, Response, Row  # noqa: E402


class TransformersEngine:
    """Generates as `StaticEngine` does, with a model of transformers and left-padded batches."""

    def __init__(
        self, model: Any, stop_ids: frozenset[int], pad_id: int, batch_size: int, longest: int
    ) -> None:
        self.model, self.stop_ids, self.pad_id = model, stop_ids, pad_id
        self.batch_size, self.longest = batch_size, longest

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        *,
        stop_token_ids: Collection[int] = (),
        progress: Callable[[int, int], None] | None = None,
        **key: Any,
    ) -> list[list[Response]]:
        """Arguments and results as those of `StaticEngine.generate`; it prints its progress."""
        drawing = Drawing(
            prompts,
            samples_per_prompt,
            sampling,
            stops=self.stop_ids | frozenset(stop_token_ids),
            max_sequence_length=self.longest,
            **key,
        )
        rows = drawing.rows
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            self._generate(drawing, batch)
            print(f"\r{start + len(batch)}/{len(rows)} responses", end="", file=sys.stderr)
        print(file=sys.stderr)
        return drawing.responses

    def _generate(self, drawing: Drawing, rows: Sequence[Row]) -> None:
        width = max(len(row.prompt) for row in rows)
        empty = [width - len(row.prompt) for row in rows]
        padded = [[self.pad_id] * n + list(row.prompt) for n, row in zip(empty, rows, strict=True)]
        mask = torch.tensor([[int(i >= n) for i in range(width)] for n in empty])
        tokens, cache = torch.tensor(padded), None
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while True:
            output = self.model(
                input_ids=tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                position_ids=positions.to(self.model.device),
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            active = [place for place, row in enumerate(rows) if not row.ended]
            drawing.draw(output.logits[active, -1].cpu(), [rows[place] for place in active])
            if all(row.ended for row in rows):
                return
            tokens = torch.tensor([[row.response.token_ids[-1]] for row in rows])
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = positions[:, -1:] + 1


@dataclass(frozen=True)
class TransformersPolicy:
    """What `RolloutMaker` needs of a policy."""

    config: Config
    model: Any
    tokenizer: Any
    rollout_rank = (0, 1)
    first_of_replica = True
    stop_tokens = Policy.stop_tokens

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.config.train.seq_length

    def engine(self) -> TransformersEngine:
        """A generator over the model."""
        return TransformersEngine(
            self.model,
            self.tokenizer.stop_ids,
            self.tokenizer.pad_id,
            self.config.rollout.batch_size,
            self.max_length,
        )


def evaluate(config: Config, directory: Path) -> dict[str, Any]:
    """Accuracies of the model in `directory` on the held-out problems of `config`."""
    import transformers

    if not (directory / "config.json").is_file():
        raise UserError(f"--model {directory}: expected a Hugging Face directory")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model = model.to(platform.device()).eval()
    if config.model.tokenizer is not None:
        tokenizer: Any = load_tokenizer(config.model)
    else:
        tokenizer = HuggingFaceTokenizer(directory)  # the exported one
    environment = build_environment(config.environment, config.train.seed)
    try:
        problems = environment.held_out(config.eval.problems, HELD_OUT_SEED)
        maker = RolloutMaker(TransformersPolicy(config, model, tokenizer), environment)  # type: ignore[arg-type]
        found = accuracies(maker, problems, config)
    finally:
        environment.close()
    return {
        **found["sampled"].to_json(),
        "problems": len(problems),
        "samples": config.eval.samples,
        "greedy": found["greedy"].to_json() if "greedy" in found else None,
        "model": str(directory),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the accuracies; 2 after a user error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    parser.add_argument("--model", metavar="DIR", required=True, help="Hugging Face directory")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        result = evaluate(config, Path(arguments.model))
    except UserError as error:
        print(f"eval_hf: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    if arguments.json is not None:
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        Path(arguments.json).write_text(text, encoding="utf-8")
    greedy = result["greedy"]
    print(f"sampled: pass@1 {result['pass@1']:.3f} {result['interval']}  ({result['n']} responses)")
    if greedy is not None:
        print(f" greedy: pass@1 {greedy['pass@1']:.3f} {greedy['interval']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
