"""Models that Megatron-Bridge builds and converts: architectures that are no family of ours.

Megatron-Bridge (extra `bridge`) knows many more Hugging Face models, each with a model provider (a
TransformerConfig that builds the model) and a table of weights. It imports Transformer Engine and
builds that library's layers, so it is for machines with a GPU. What it builds are GPT models of
Megatron, and they are trained like any other: sketches find their linears by name. Of a model of
images and text, the language model alone is trained. Directories are local; nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_logra.config import Config
from megatron_logra.errors import UserError, one_line
from megatron_logra.model.families import FAMILIES, architecture
from megatron_logra.model.gpt import GPTArguments, check_length, prepared, run_fields
from megatron_logra.model.huggingface import read_config


def lack() -> str | None:
    """Why Megatron-Bridge cannot be used here, in one line; None if it can."""
    if importlib.util.find_spec("megatron.bridge") is None:
        return "megatron-bridge is not installed"
    try:
        with redirect_stdout(sys.stderr):
            import megatron.bridge  # noqa: F401
    except Exception as error:  # without Transformer Engine, or broken, it raises anything
        return f"megatron-bridge cannot be imported: {one_line(error)}"
    return None


def serves(directory: str | Path) -> bool:
    """Whether the model in a Hugging Face directory is for Megatron-Bridge: no family of ours.

    Where Megatron-Bridge is not installed nothing is, and the table of families refuses the model.

    Raises:
        UserError: config.json is missing or malformed, or Megatron-Bridge, which is installed,
            cannot be imported or does not know the model either.
    """
    name = architecture(read_config(directory))
    if name in FAMILIES or importlib.util.find_spec("megatron.bridge") is None:
        return False
    problem = lack()
    if problem is None:
        known = _auto_bridge().list_supported_models()
        if name in known:
            return True
        problem = f"supported through Megatron-Bridge: {', '.join(known)}"
    raise UserError(
        f"{directory}/config.json: architecture {name}; supported: {', '.join(FAMILIES)}; {problem}"
    )


class BridgedModel:
    """A model of Megatron-Bridge, laid out as the run wants it.

    Args:
        cfg: the whole configuration; `model.hf` is a directory that `serves`.

    Attributes:
        config: the model provider, which is the model's TransformerConfig.
        arguments: what our checkpoints say of a model beyond that.

    Raises:
        UserError: Megatron-Bridge refuses the directory, or the run wants what such models lack.
    """

    def __init__(self, cfg: Config) -> None:
        assert cfg.model.hf is not None
        source, fields = cfg.model.hf, run_fields(cfg)
        if fields["transformer_impl"] != "transformer_engine":
            raise UserError(
                f"{source}: built through Megatron-Bridge, which needs a GPU, Transformer Engine "
                "and model.implementation=auto"
            )
        with _refusals_of(source):
            self._bridge = _auto_bridge().from_hf_pretrained(source)
            provider = self._bridge.to_megatron_provider(load_weights=False)
            # No heads for tokens further ahead, and no dropout: an unchanged policy has ratio 1.
            fields |= {"mtp_num_layers": None, "hidden_dropout": 0.0, "attention_dropout": 0.0}
            # Rows of the vocabulary as `vocabulary` has them.
            fields |= {"should_pad_vocab": True, "make_vocab_size_divisible_by": 1}
            for name, value in fields.items():
                setattr(provider, name, value)
            provider.finalize()
        if provider.num_moe_experts:
            raise UserError(f"{source}: has experts; expected a dense model")
        given = {
            field.name: getattr(provider, field.name)
            for field in dataclasses.fields(GPTArguments)
            if getattr(provider, field.name, None) is not None
        }
        given |= {"max_sequence_length": provider.seq_length, "seed": cfg.train.seed}
        self.config: Any = provider
        self.arguments = GPTArguments(**given)
        check_length(source, self.arguments, cfg)
        self._source = source
        self._whole: list[Any] = []

    def build(self, pg: ProcessGroupCollection, *, on_cpu: bool = False) -> list[GPTModel]:
        """This rank's chunks of the language model, whose weights are still to be loaded.

        Parameters have `config.params_dtype` and lie on this rank's GPU, unless `on_cpu`.

        Raises:
            UserError: Megatron-Bridge refuses the layout, or the model is no GPT model.
        """
        with _refusals_of(self._source), redirect_stdout(sys.stderr):  # it prints its sizes
            self._whole = self.config.provide_distributed_model(
                wrap_with_ddp=False,
                mixed_precision_wrapper=None,
                use_cpu_initialization=on_cpu,
                pg_collection=pg,
            )
        chunks = [getattr(chunk, "language_model", chunk) for chunk in self._whole]
        if not all(isinstance(chunk, GPTModel) for chunk in chunks):
            raise UserError(
                f"{self._source}: Megatron-Bridge makes a {type(chunks[0]).__name__} of it; "
                "expected a GPTModel"
            )
        stages = pg.pp.rank() == 0, pg.pp.rank() == pg.pp.size() - 1
        if (chunks[0].pre_process, chunks[-1].post_process) != stages:
            raise UserError(
                f"{self._source}: Megatron-Bridge makes other stages than were asked for"
            )
        if chunks[0] is not self._whole[0] and (pg.cp.size() > 1 or self.config.sequence_parallel):
            # The whole model divides positions before its language model gets them.
            raise UserError(
                f"{self._source}: the language model of a model of images and text; expected "
                "parallel.context=1 and parallel.sequence=false"
            )
        return [prepared(chunk, self.arguments) for chunk in chunks]

    def load_hf_weights(self) -> None:
        """Fill what `build` has made with the weights in the directory. Called by all ranks.

        Raises:
            UserError: they do not fit the model.
        """
        with _refusals_of(self._source), redirect_stdout(sys.stderr):  # it shows its progress
            self._bridge.load_hf_weights(self._whole)

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the model by their Hugging Face names, on the CPU.

        Without tensor parallelism, under which they would have the vocabulary's padding.

        Raises:
            UserError: Megatron-Bridge cannot convert them.
        """
        assert self.config.tensor_model_parallel_size == 1
        with _refusals_of(self._source):
            yield from self._bridge.export_hf_weights(self._whole, cpu=True, show_progress=False)


def _auto_bridge() -> Any:
    from megatron.bridge import AutoBridge

    return AutoBridge


@contextmanager
def _refusals_of(source: str) -> Iterator[None]:
    """What Megatron-Bridge and Megatron raise about a model, as a `UserError`."""
    try:
        yield
    except (OSError, ValueError, AssertionError, TypeError, LookupError, ImportError,
            NotImplementedError) as error:  # fmt: skip
        raise UserError(f"{source}: refused by Megatron-Bridge: {one_line(error)}") from error
