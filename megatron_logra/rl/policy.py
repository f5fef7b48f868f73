"""The model with its tokenizer and ranks, as training, evaluation and generation need it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra import checkpoint, distributed
from megatron_logra.config import Config, SamplingConfig
from megatron_logra.errors import UserError, speaking_of
from megatron_logra.model import bridge
from megatron_logra.model.context_parallel import length_multiple
from megatron_logra.model.gpt import GPTArguments, build_chunks, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.model.identity import describe
from megatron_logra.model.tokenizer import Tokenizer, load_tokenizer
from megatron_logra.rollout.static_engine import StaticEngine

if TYPE_CHECKING:
    from megatron_logra.rollout.dynamic_engine import DynamicEngine


@dataclass(frozen=True)
class Policy:
    """This rank's part of a model and what belongs to it."""

    config: Config
    pg: ProcessGroupCollection
    tconfig: TransformerConfig
    arguments: GPTArguments
    chunks: list[GPTModel]
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
        """Padded sequences are as long as a multiple of this: ranks may share their positions."""
        sequence = self.pg.tp.size() if self.tconfig.sequence_parallel else 1
        return length_multiple(self.pg.cp.size(), sequence)

    @property
    def data_rank(self) -> tuple[int, int]:
        """Which share of a batch this rank trains on, and the number of shares."""
        return self.pg.dp.rank(), self.pg.dp.size()

    @property
    def rollout_rank(self) -> tuple[int, int]:
        """Which share of the problems this rank generates for, and the number of shares.

        Context-parallel ranks hold the same weights, and generate for problems of their own.
        """
        return self.pg.dp_cp.rank(), self.pg.dp_cp.size()

    @property
    def first_of_replica(self) -> bool:
        """Whether this rank speaks for the ranks that hold a copy of the model together.

        It is on the last pipeline stage, where losses are.
        """
        return bool(self.pg.tp.rank() == 0 and self.pg.pp.rank() == self.pg.pp.size() - 1)

    @property
    def micro_batch_multiple(self) -> int:
        """Megatron's interleaved schedule wants a multiple of so many micro-batches."""
        return self.pg.pp.size() if len(self.chunks) > 1 else 1

    def require_rollouts(self) -> None:
        """Raise `UserError` if the model has layers that Megatron cannot generate with."""
        variant = self.tconfig.experimental_attention_variant
        if variant is not None:
            raise UserError(
                f"{self.config.model.hf}: Megatron cannot generate with its {variant} layers; "
                "expected algorithm.name=sft"
            )

    def engine(self) -> StaticEngine | DynamicEngine:
        """A generator over this model's own weights, of the kind `rollout.engine`.

        Raises:
            UserError: the dynamic engine does not fit the model's layout, or the model has layers
                that Megatron cannot generate with.
        """
        self.require_rollouts()
        options: dict[str, Any] = {
            "stop_ids": self.tokenizer.stop_ids,
            "pad_id": self.tokenizer.pad_id,
            "max_sequence_length": self.max_length,
            "batch_size": self.config.rollout.batch_size,
            "pg": self.pg,
        }
        if self.config.rollout.engine == "static":
            return StaticEngine(self.chunks, **options)
        unfit = self.config.parallel.unfit_for_inference
        if unfit is not None:
            raise UserError(f"rollout.engine: dynamic cannot have {unfit}; expected 1, or static")
        from megatron_logra.rollout.dynamic_engine import DynamicEngine

        return DynamicEngine(self.chunks, settings=self.config.rollout.dynamic, **options)

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
        loaded = checkpoint.load(path, checkpoint.weights_state(self.chunks))
        checkpoint.set_weights(self.chunks, loaded)
        return description


def join_ranks(config: Config) -> None:
    """Join the run's ranks, so that they can agree on something before there is a model.

    Raises:
        UserError: the layout is not one that rollouts and training run in, or not one of as many
            ranks.
    """
    if config.parallel.expert > 1:
        raise UserError(f"parallel.expert={config.parallel.expert}: expected 1; models are dense")
    distributed.join(config.parallel)


def build_policy(config: Config) -> Policy:
    """Join the ranks, build the model and give it its first weights (random, or of `model.hf`).

    Raises:
        UserError: the configuration does not fit the model, its files, the ranks or the machine.
    """
    join_ranks(config)
    pg = distributed.initialize(config.parallel, config.train.seed)
    policy, bridged = _build(config, pg, random=config.model.hf is None)
    if config.model.hf is not None:
        if (Path(config.model.hf) / checkpoint.DESCRIPTION).exists():
            policy.load_weights(Path(config.model.hf))
        elif bridged:
            bridged.load_hf_weights()
        else:
            for chunk in policy.chunks:
                load_hf_weights(config.model.hf, chunk)
    return policy


def as_generating(config: Config) -> AbstractContextManager[None]:
    """Within: what is wrong with the layout of `config.generating` is said of where it is set."""
    return nullcontext() if config.rollout.layout is None else speaking_of("rollout.layout")


def build_generating(config: Config) -> Policy:
    """`build_policy`, in the layout in which the run generates."""
    with as_generating(config):
        return build_policy(config.generating)


def build_copy(config: Config, pg: ProcessGroupCollection, tokenizer: Tokenizer) -> Policy:
    """The model once more on the run's ranks, with weights that are still to come, to generate.

    Args:
        config: with the copy's own layout as `parallel`.
        pg: the groups of that layout.
        tokenizer: the model's.

    Raises:
        UserError: see `build_policy`.
    """
    policy, _ = _build(config, pg, tokenizer, random=False)
    for chunk in policy.chunks:
        chunk.requires_grad_(False).eval()
    return policy


def _build(
    config: Config, pg: ProcessGroupCollection, tokenizer: Tokenizer | None = None, *, random: bool
) -> tuple[Policy, bridge.BridgedModel | None]:
    """The model without its files' weights; `random`: with random ones, where nothing follows."""
    bridged = None
    if config.model.hf is not None and bridge.serves(config.model.hf):
        bridged = bridge.BridgedModel(config)
        tconfig, arguments = bridged.config, bridged.arguments
    else:
        tconfig, arguments = transformer_config(config)
    tokenizer = tokenizer or load_tokenizer(config.model, arguments.vocab_size)
    chunks = bridged.build(pg) if bridged else build_chunks(tconfig, arguments, pg, random=random)
    return Policy(config, pg, tconfig, arguments, chunks, tokenizer), bridged
