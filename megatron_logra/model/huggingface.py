"""Hugging Face checkpoints: reading their configuration and their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_logra.errors import UserError
from megatron_logra.model.families import (
    Fields,
    family_of,
    is_image_model,
    rules,
    text_config,
    text_name,
)
from megatron_logra.model.parameters import EMBEDDING, local_part, named_parameters, whole_shape
from megatron_logra.model.safetensors_io import Entry, read_header, read_tensor


def read_config(directory: str | Path) -> dict[str, Any]:
    """What config.json says about the language model.

    Raises:
        UserError: it is missing or malformed.
    """
    return text_config(read_json(Path(directory) / "config.json"))


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
        key = EMBEDDING if tied and name == "output_layer.weight" else name
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
        files: tensor name → the file that holds it; names as in a model of text alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        self._headers: dict[Path, dict[str, Entry]] = {}
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise UserError(f"{index}: expected a weight_map")
            stored = {str(name): directory / str(file) for name, file in shards.items()}
        elif single.exists():
            self._headers[single] = read_header(single)
            stored = dict.fromkeys(self._headers[single], single)
        else:
            raise UserError(
                f"{directory}: expected model.safetensors or model.safetensors.index.json"
            )
        for name, file in stored.items():
            if file not in self._headers:
                self._headers[file] = read_header(file)
            if name not in self._headers[file]:
                raise UserError(f"{file}: tensor {name} is missing")
        with_images = is_image_model(read_json(directory / "config.json"))
        names = {name: text_name(name) if with_images else name for name in stored}
        self._stored = {name: as_stored for as_stored, name in names.items() if name is not None}
        self.files = {name: stored[as_stored] for name, as_stored in self._stored.items()}

    def entry(self, name: str) -> Entry:
        """Shape and type of the tensor `name`."""
        return self._headers[self.files[name]][self._stored[name]]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor `name`, on the CPU, as it was stored; or so many rows from one on."""
        return read_tensor(self.files[name], self._stored[name], self.entry(name), rows)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Compare a tensor's shape with the one that the configuration gives it.

        Raises:
            UserError: it is another.
        """
        found = self.entry(name).shape
        if found != shape:
            raise UserError(
                f"{self.files[name]}: {name} is {list(found)}, but by config.json {list(shape)}"
            )


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
