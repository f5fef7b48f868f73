"""The model with its tokenizer and ranks, as training, evaluation and generation need it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra import checkpoint, distributed
from megatron_logra.config import Config, SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.model.gpt import GPTArguments, build_model, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.model.identity import describe
from megatron_logra.model.tokenizer import Tokenizer, load_tokenizer
from megatron_logra.rollout.static_engine import StaticEngine


@dataclass(frozen=True)
class Policy:
    """A model on this rank and what belongs to it."""

    config: Config
    pg: ProcessGroupCollection
    tconfig: TransformerConfig
    arguments: GPTArguments
    model: GPTModel
    tokenizer: Tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its response together."""
        return min(self.config.train.seq_length, self.arguments.max_sequence_length)

    def description(self) -> dict[str, Any]:
        """What makes a checkpoint one of this model: plain values, the layout left out."""
        return describe(self.tconfig, self.arguments)

    @property
    def length_multiple(self) -> int:
        """Padded sequences are as long as a multiple of this: positions may be divided over TP."""
        return self.pg.tp.size() if self.tconfig.sequence_parallel else 1

    @property
    def data_rank(self) -> tuple[int, int]:
        """Which share of a batch is this rank's, and the number of shares."""
        return self.pg.dp.rank(), self.pg.dp.size()

    @property
    def first_of_replica(self) -> bool:
        """Whether this rank speaks for the ranks that hold the model together."""
        return bool(self.pg.tp.rank() == 0)

    def engine(self) -> StaticEngine:
        """A generator over this model's own weights."""
        return StaticEngine(
            self.model,
            stop_ids=self.tokenizer.stop_ids,
            pad_id=self.tokenizer.pad_id,
            max_sequence_length=self.max_length,
            batch_size=self.config.rollout.batch_size,
            pg=self.pg,
        )

    def stop_tokens(self, sampling: SamplingConfig) -> frozenset[int]:
        """The ids of `sampling.stop`.

        Raises:
            UserError: a text is not a single token.
        """
        ids = set()
        for text in sampling.stop:
            tokens = self.tokenizer.encode(text)
            if len(tokens) != 1:
                raise UserError(
                    f"rollout.sampling.stop: expected texts of one token each, but {text!r} has "
                    f"{len(tokens)}"
                )
            ids.add(tokens[0])
        return frozenset(ids)

    def load_weights(self, path: Path) -> dict[str, Any]:
        """Take over the weights of a checkpoint of this model; returns its description.

        Raises:
            UserError: the checkpoint is missing, damaged, or of another model.
        """
        description = distributed.first(lambda: checkpoint.read_description(path))
        checkpoint.require_same(path, description["model"], self.description(), "model")
        loaded = checkpoint.load(path, checkpoint.weights_state([self.model]))
        checkpoint.set_weights([self.model], loaded)
        return description


def join_ranks(config: Config) -> None:
    """Join the run's ranks, so that they can agree on something before there is a model.

    Raises:
        UserError: the layout is not one that rollouts and training run in, or not one of as many
            ranks.
    """
    for name in ("pipeline", "context", "expert"):
        size = getattr(config.parallel, name)
        if size > 1:
            raise UserError(
                f"parallel.{name}={size}: not supported here; training, evaluation and generation "
                "run over tensor- and data-parallel ranks; expected 1"
            )
    distributed.join(config.parallel)


def build_policy(config: Config) -> Policy:
    """Join the ranks, build the model and give it its first weights (random, or of `model.hf`).

    Raises:
        UserError: the configuration does not fit the model, its files, the ranks or the machine.
    """
    join_ranks(config)
    pg = distributed.initialize(config.parallel, config.train.seed)
    tconfig, arguments = transformer_config(config)
    tokenizer = load_tokenizer(config.model, arguments.vocab_size)
    model = build_model(tconfig, arguments, pg)
    policy = Policy(config, pg, tconfig, arguments, model, tokenizer)
    if config.model.hf is not None:
        if (Path(config.model.hf) / checkpoint.DESCRIPTION).exists():
            policy.load_weights(Path(config.model.hf))
        else:
            load_hf_weights(config.model.hf, model)
    return policy
