"""Hugging Face checkpoints: reading their configuration and their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_logra.errors import UserError
from megatron_logra.model.families import Fields, family_of, rules
from megatron_logra.model.parameters import local_part, named_parameters, whole_shape


def read_config(directory: str | Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
        UserError: it is missing or malformed.
    """
    return read_json(Path(directory) / "config.json")


def read_spec(directory: str | Path) -> dict[str, Any]:
    """The model specification (as in `model.spec`) that a checkpoint's config.json describes.

    Raises:
        UserError: config.json is missing, malformed, or describes something unsupported.
    """
    path, hf = Path(directory) / "config.json", read_config(directory)
    return family_of(path, hf).spec(Fields(path, hf))


@torch.no_grad()
def load_hf_weights(directory: str | Path, model: GPTModel) -> None:
    """Copy a checkpoint's weights into `model`, cast to the parameters' type.

    Every tensor of the checkpoint must have its place in the whole model, and every parameter of
    this rank's part of the model is filled.

    Raises:
        UserError: a file is missing or damaged, a tensor is missing, left over or of another shape.
    """
    tied = model.share_embeddings_and_output_weights
    checkpoint = Checkpoint(Path(directory))
    family = family_of(checkpoint.directory / "config.json", read_config(directory))
    table = dict(rules(family, model.config, tied))
    check_names(checkpoint, {source for rule in table.values() for source in rule.sources}, tied)
    tp = model.pg_collection.tp
    for name, parameter in named_parameters(model):
        # On a last pipeline stage the tied output weight is a parameter of its own.
        key = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
        if key not in table:
            raise UserError(f"{directory}: the model's {name} has no counterpart in a checkpoint")
        rule = table[key]
        shape = whole_shape(parameter, tp.size())
        for source, wanted in zip(rule.sources, rule.shapes(shape, model.config), strict=True):
            checkpoint.require(source, wanted)
        whole = rule.join([checkpoint.read(source) for source in rule.sources], model.config)
        parameter.copy_(local_part(whole, parameter, tp.rank(), tp.size()))


def check_names(checkpoint: Checkpoint, expected: set[str], tied: bool) -> None:
    """Compare the tensors that there are with those that there should be.

    Raises:
        UserError: one is missing, or has no place in the model.
    """
    for name in sorted(expected):
        if name not in checkpoint.files:
            raise UserError(f"{checkpoint.directory}: tensor {name} is missing")
    for name in sorted(checkpoint.files.keys() - expected):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # written by old versions; it follows from the configuration
        same = tied and name == "lm_head.weight"
        if same and torch.equal(
            checkpoint.read(name), checkpoint.read("model.embed_tokens.weight")
        ):
            continue
        raise UserError(f"{checkpoint.directory}: tensor {name} has no place in this model")


class Checkpoint:
    """The tensors of a directory with model.safetensors, or shards and their index.

    Attributes:
        files: tensor name → the file that holds it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise UserError(f"{index}: expected a weight_map")
            self.files = {str(name): directory / str(file) for name, file in shards.items()}
        elif single.exists():
            self.files = dict.fromkeys(self._names(single), single)
        else:
            raise UserError(
                f"{directory}: expected model.safetensors or model.safetensors.index.json"
            )
        for file in sorted(set(self.files.values())):
            present = set(self._names(file))
            for name, holder in self.files.items():
                if holder == file and name not in present:
                    raise UserError(f"{file}: tensor {name} is missing")

    def read(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU, as it was stored."""
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type (as safetensors calls it, such as BF16) of the tensor `name`."""
        with self._open(name) as file:
            part = file.get_slice(name)
            return tuple(part.get_shape()), str(part.get_dtype())

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Compare a tensor's shape with the one that the configuration gives it.

        Raises:
            UserError: it is another.
        """
        found, _ = self.header(name)
        if found != shape:
            raise UserError(
                f"{self.files[name]}: {name} is {list(found)}, but by config.json {list(shape)}"
            )

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            with safe_open(self.files[name], framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.files[name]}: cannot read {name}: {error}") from None

    @staticmethod
    def _names(path: Path) -> list[str]:
        if not path.exists():
            raise UserError(f"{path}: missing")
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a complete safetensors file: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is no such file, or something else is in it.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object")
    return data
