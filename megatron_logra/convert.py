"""Hugging Face checkpoints to Megatron's distributed ones and back, without a GPU.

What is made of a Hugging Face directory is a checkpoint like those of a run (`checkpoint.load`, and
`model.hf` too: config.json and the tokenizer lie in it). It fits any layout. The way back takes any
checkpoint of this program; configuration and tokenizer come from the Hugging Face directory that
the model was. Both hold one layer at a time, and write under another name first: what has the right
name is whole. Models of Megatron-Bridge (`model.bridge`) are held whole in host memory, and need
the libraries of a GPU machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from torch import Tensor

from megatron_logra import checkpoint as checkpoints
from megatron_logra import distributed
from megatron_logra.config import Config, ParallelConfig, config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.model import bridge, torch_dist_io
from megatron_logra.model.families import Rule, family_of, rules, text_config
from megatron_logra.model.gpt import transformer_config
from megatron_logra.model.huggingface import Checkpoint, check_names, read_config, read_json
from megatron_logra.model.identity import describe
from megatron_logra.model.safetensors_io import DTYPES, NAMES, Writer
from megatron_logra.model.specs import FUSED_NAMES
from megatron_logra.model.torch_dist_io import Piece, Place, Reader
from megatron_logra.planner.shapes import parameter_shapes

RECORD = "conversion.json"
"""File in both kinds of results: where they came from, hashes of what was read and written."""
CONFIGURATION = ("config.json", "generation_config.json", "LICENSE*", "NOTICE*")
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken"),
)
"""The small files of a Hugging Face directory, which are copied as they are."""
_UNFINISHED = ".unfinished-"
_WEIGHTS = "model.safetensors"
_SPARE = 2**20  # bytes for headers, hashes and descriptions


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model and the Hugging Face tensors that make it."""

    name: str
    shape: tuple[int, ...]
    rule: Rule
    place: Place


class Model:
    """The model that a Hugging Face directory's config.json describes.

    Args:
        directory: the directory.

    Raises:
        UserError: it describes none that is supported.
    """

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        family = family_of(directory / "config.json", config)
        self.config, self.arguments = transformer_config(_config(directory))
        self.tied = self.arguments.share_embeddings_and_output_weights
        shapes = {
            shape.name if shape.name.endswith(".bias") else f"{shape.name}.weight": shape.size
            for shape in parameter_shapes(self.config, self.arguments)
        }
        self.parameters = [
            Parameter(name, shapes.pop(name), rule, _place(name))
            for name, rule in rules(family, self.config, self.tied)
        ]
        assert not shapes, shapes

    def blocks(self, parameter: Parameter) -> list[tuple[int, int]]:
        """First rows and numbers of rows in which a parameter is handled: all at once, if it is
        made of several tensors, else at most a quarter of a layer's numbers."""
        rows, *rest = parameter.shape
        if len(parameter.rule.sources) > 1:
            return [(0, rows)]
        layer = sum(math.prod(p.shape) for p in self.parameters if p.place[1] == 0)
        step = max(1, layer // 4 // math.prod(rest))
        return [(first, min(step, rows - first)) for first in range(0, rows, step)]


def from_hf(source: Path, target: Path) -> None:
    """Make a distributed checkpoint of a Hugging Face directory; types stay as they are.

    Raises:
        UserError: a file is missing or damaged, a tensor contradicts config.json, the target exists
            or cannot be written. Nothing is left behind.
    """
    if bridge.serves(source):
        _from_hf_by_bridge(source, target)
        return
    model, files = Model(source), Checkpoint(source)
    layers = model.config.num_layers
    check_names(files, {s for p in model.parameters for s in p.rule.sources}, model.tied)
    types: dict[str, torch.dtype] = {}
    pieces = []
    for parameter in model.parameters:
        key, config = parameter.place[0], model.config
        shapes = parameter.rule.shapes(parameter.shape, config)
        for name, shape in zip(parameter.rule.sources, shapes, strict=True):
            files.require(name, shape)
            dtype = DTYPES.get(files.entry(name).dtype)
            if dtype is None or types.setdefault(key, dtype) != dtype:
                expected = NAMES[types[key]] if key in types else ", ".join(DTYPES)
                found = files.entry(name).dtype
                raise UserError(f"{files.files[name]}: {name} is {found}; expected {expected}")

        def make(first: int, rows: int, parameter: Parameter = parameter) -> Tensor:
            if first == 0:
                _tell(model.parameters.index(parameter), len(model.parameters), parameter.name)
            if len(parameter.rule.sources) == 1:
                return files.read(parameter.rule.sources[0], (first, rows))
            parts = [files.read(name) for name in parameter.rule.sources]
            return parameter.rule.join(parts, model.config)

        for first, rows in model.blocks(parameter):
            build = partial(make, first, rows)
            piece = Piece(parameter.place, parameter.shape, first, rows, types[key], build)
            pieces.append(piece)
    size = sum(math.prod(p.shape) * types[p.place[0]].itemsize for p in model.parameters)
    with _written(target, size) as unfinished:
        hashes = _hashes(source, files)
        torch_dist_io.write(unfinished, pieces, layers)
        _complete(unfinished, source, hashes, describe(model.config, model.arguments))


def _from_hf_by_bridge(source: Path, target: Path) -> None:
    """`from_hf` of a model of Megatron-Bridge, which is built whole on the CPU."""
    files = Checkpoint(source)
    model = bridge.BridgedModel(_config(source, _precision(source)))
    chunks = model.build(distributed.initialize(ParallelConfig(), 0), on_cpu=True)
    model.load_hf_weights()
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    with _written(target, sum(w.numel() * w.element_size() for w in weights)) as unfinished:
        hashes = _hashes(source, files)
        checkpoints.write_weights(chunks, unfinished)
        _complete(unfinished, source, hashes, describe(model.config, model.arguments))


def _complete(
    unfinished: Path, source: Path, hashes: dict[str, str], description: dict[str, Any]
) -> None:
    """Put what a checkpoint has besides weights beside them."""
    _copy(source, unfinished, CONFIGURATION + TOKENIZER)
    _write_json(unfinished / checkpoints.DESCRIPTION, {"step": 0, "model": description})
    _record(unfinished, source, hashes)
    save_integrity_manifest(str(unfinished))


def _hashes(source: Path, files: Checkpoint) -> dict[str, str]:
    """The hashes of what is read of a Hugging Face directory."""
    read = sorted({*files.files.values(), source / "config.json"})
    return {path.name: _hash(path) for path in read}


def to_hf(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Make a Hugging Face directory of the weights in a checkpoint.

    Args:
        source: a checkpoint, or a run directory, whose latest one is taken.
        like: Hugging Face directory of the model, for configuration and tokenizer. Default: the
            checkpoint itself, if it was made of one, or the `model.hf` of the run.
        dtype: of the tensors; default: as they are.
        shard_bytes: most bytes of tensors in a file.

    Raises:
        UserError: as for `from_hf`, or the checkpoint is of another model than `like`.
    """
    source = _checkpoint_of(source)
    description = checkpoints.read_description(source)
    like = like or _origin(source, description)
    if bridge.serves(like):
        _to_hf_by_bridge(source, description, target, like, dtype, shard_bytes)
        return
    model = Model(like)
    ours = describe(model.config, model.arguments)
    checkpoints.require_same(source, description["model"], ours, f"model than {like}")
    reader, layers = Reader(source), model.config.num_layers
    tensors: list[tuple[Parameter, list[tuple[str, tuple[int, ...], torch.dtype]]]] = []
    for parameter in model.parameters:
        found = reader.require(parameter.place, parameter.shape, layers)
        shapes = parameter.rule.shapes(parameter.shape, model.config)
        pairs = zip(parameter.rule.sources, shapes, strict=True)
        tensors.append((parameter, [(name, shape, dtype or found) for name, shape in pairs]))
    shards = _shards(tensors, shard_bytes)
    sizes = {name: math.prod(s) * d.itemsize for _, made in tensors for name, s, d in made}
    with _written(target, sum(sizes.values())) as unfinished:
        number = 0
        for path, shard in zip(_shard_names(len(shards)), shards, strict=True):
            writer = Writer(unfinished / path, [made for _, parts in shard for made in parts])
            for parameter, parts in shard:
                _tell(number, len(tensors), parameter.name)
                for part in _read(reader, model, parameter):
                    writer.write(part.to(parts[0][2]))
                number += 1
            writer.close()
        files = zip(_shard_names(len(shards)), shards, strict=True)
        places = {m[0]: path for path, shard in files for _, made in shard for m in made}
        _write_index(unfinished, places, sum(sizes.values()))
        _complete_hf(unfinished, source, description, like, tensors[0][1][0][2])


def _to_hf_by_bridge(
    source: Path,
    description: dict[str, Any],
    target: Path,
    like: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> None:
    """`to_hf` of a model of Megatron-Bridge, which is built whole on the CPU.

    What the checkpoint does not have, such as what sees images, stays as it is in `like`, after
    whose tensors Megatron-Bridge names those that it makes.
    """
    if not any(like.glob("*.safetensors")):
        raise UserError(
            f"{like}: has no tensors; name the Hugging Face directory that the model was by --like"
        )
    files = Checkpoint(like)
    model = bridge.BridgedModel(_config(like, _precision(like)))
    ours = describe(model.config, model.arguments)
    checkpoints.require_same(source, description["model"], ours, f"model than {like}")
    chunks = model.build(distributed.initialize(ParallelConfig(), 0), on_cpu=True)
    model.load_hf_weights()
    state = checkpoints.load(source, checkpoints.weights_state(chunks))
    checkpoints.set_weights(chunks, state)
    dtype = dtype or model.config.params_dtype
    entries = map(files.entry, files.files)
    size = sum(math.prod(entry.shape) for entry in entries) * dtype.itemsize
    with _written(target, size) as unfinished:
        tensors = ((name, tensor.to(dtype)) for name, tensor in model.hf_weights())
        places = _write_stream(unfinished, tensors, shard_bytes)
        for name in files.files.keys() - places.keys():
            tied = name == "lm_head.weight" and model.arguments.share_embeddings_and_output_weights
            # Heads for tokens further ahead are not built; inv_freq follows from config.json.
            if not tied and not name.startswith("mtp.") and not name.endswith("inv_freq"):
                raise UserError(f"{like}: Megatron-Bridge does not make tensor {name}")
        _complete_hf(unfinished, source, description, like, dtype)


def _write_stream(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], most: int
) -> dict[str, Path]:
    """Write tensors as they come, in files of at most `most` bytes; the file of each.

    How many files there are is in their names, so they get these at the end.
    """
    shards: list[dict[str, Tensor]] = []
    filled = total = 0

    def write() -> None:
        shard = shards[-1]
        writer = Writer(
            directory / f"part-{len(shards)}",
            [(n, tuple(t.shape), t.dtype) for n, t in shard.items()],
        )
        for name in shard:
            writer.write(shard[name])
            shard[name] = shard[name].new_empty(0)
        writer.close()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not shards or filled + size > most:
            if shards:
                write()
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    write()
    places: dict[str, Path] = {}
    for number, (file, shard) in enumerate(zip(_shard_names(len(shards)), shards, strict=True), 1):
        (directory / f"part-{number}").rename(directory / file)
        places |= dict.fromkeys(shard, directory / file)
    _write_index(directory, {name: path.name for name, path in places.items()}, total)
    return places


def _write_index(directory: Path, places: dict[str, str], size: int) -> None:
    """Say in which file each tensor lies, if there are several."""
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        _write_json(directory / f"{_WEIGHTS}.index.json", index)


def _complete_hf(
    unfinished: Path, source: Path, description: dict[str, Any], like: Path, dtype: torch.dtype
) -> None:
    """Put what a Hugging Face directory has besides weights beside them."""
    _copy(like, unfinished, CONFIGURATION + TOKENIZER)
    _copy_own_tokenizer(description, unfinished)
    _set_dtype(unfinished / "config.json", dtype)
    _record(unfinished, source, read_json(source / "integrity.json")["files"])


def _config(directory: Path, precision: str = "bf16") -> Config:
    train = {"seq_length": 2, "precision": precision}
    return config_from_dict({"model": {"hf": str(directory)}, "train": train})


def _precision(directory: Path) -> str:
    """The precision that keeps a Hugging Face directory's numbers."""
    config = read_json(directory / "config.json")
    text = config.get("text_config") or {}
    names = [
        part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if key in part
    ]
    return "bf16" if names and set(names) == {"bfloat16"} else "fp32"


def _place(name: str) -> Place:
    """Where Megatron's checkpoints have the parameter `name`: all layers share a key."""
    head, _, rest = name.partition("decoder.layers.")
    if head or not rest:
        return name, None
    number, _, inner = rest.partition(".")
    for ours, stored in FUSED_NAMES.items():
        if inner.startswith(ours):
            inner = stored + inner.removeprefix(ours)
    return f"decoder.layers.{inner}", int(number)


def _read(reader: Reader, model: Model, parameter: Parameter) -> Iterator[Tensor]:
    """A parameter's Hugging Face tensors in their order; large ones in blocks of rows."""
    for first, rows in model.blocks(parameter):
        block = reader.read(parameter.place, (rows, *parameter.shape[1:]), first)
        if len(parameter.rule.sources) == 1:
            yield block
        else:
            yield from parameter.rule.split(block, model.config)


def _shards(tensors: Sequence[Any], most: int) -> list[list[Any]]:
    """Parameters in files of at most `most` bytes, in their order."""
    shards: list[list[Any]] = [[]]
    filled = 0
    for parameter, made in tensors:
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in made)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append((parameter, made))
        filled += size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [_WEIGHTS]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _checkpoint_of(source: Path) -> Path:
    root = source / "checkpoints"
    if not root.is_dir():
        return source
    latest = checkpoints.latest(root)
    if latest is None:
        raise UserError(f"{root}: expected a checkpoint")
    return latest


def _origin(source: Path, description: dict[str, Any]) -> Path:
    """The Hugging Face directory that a checkpoint's model was."""
    if (source / "config.json").is_file():
        return source
    named = description.get("config", {}).get("model", {}).get("hf")
    if named is None or not Path(named).is_dir():
        known = f"{named}, which is not there" if named else "none"
        raise UserError(
            f"{source}: its model came from {known}; name a Hugging Face directory of the same "
            "model by --like, for its configuration and tokenizer"
        )
    return Path(named)


def _copy_own_tokenizer(description: dict[str, Any], target: Path) -> None:
    """In place of the model's tokenizer, that by which it was trained, if it was another."""
    named = description.get("config", {}).get("model", {}).get("tokenizer")
    if named is not None and Path(named).is_dir():
        for pattern in TOKENIZER:
            for path in target.glob(pattern):
                path.unlink()
        _copy(Path(named), target, TOKENIZER)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = text_config(read_json(path))  # what is exported knows no images
    name = str(dtype).removeprefix("torch.")
    config |= {key: name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": name}
    _write_json(path, config)


def _copy(source: Path, target: Path, patterns: Sequence[str]) -> None:
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def _record(directory: Path, source: Path, read: dict[str, str]) -> None:
    """Note where a result came from, with the hashes of all files."""
    written = {p.name: _hash(p) for p in sorted(directory.iterdir()) if p.name != RECORD}
    record = {"source": str(source), "algorithm": "sha256", "read": read, "written": written}
    _write_json(directory / RECORD, record)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _written(target: Path, size: int) -> Iterator[Path]:
    """A directory to write into, which has the name of `target` once all is on disk.

    Raises:
        UserError: the target exists, the disk has no room for `size` bytes, or writing fails.
    """
    if target.exists():
        raise UserError(f"{target}: exists; expected a name that is free")
    unfinished = target.parent / (_UNFINISHED + target.name)
    done = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)  # of a conversion that was killed
        free = shutil.disk_usage(target.parent).free
        if free < size + _SPARE:
            raise UserError(
                f"{target}: needs {size / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free "
                "there"
            )
        unfinished.mkdir()
        yield unfinished
        checkpoints.flush(unfinished)
        unfinished.rename(target)
        checkpoints.flush(target.parent)
        done = True
    except (OSError, RuntimeError, CheckpointingException) as error:
        # torch reports the failed write of a tensor as a RuntimeError.
        reason = str(error).splitlines()[0]
        raise UserError(f"{target}: cannot be written: {reason}") from None
    finally:
        if not done:
            shutil.rmtree(unfinished, ignore_errors=True)


def _tell(done: int, total: int, name: str) -> None:
    """Say on standard error how far it is: in place on a terminal, else every tenth."""
    live = sys.stderr.isatty()
    if not live and done * 10 // total == (done - 1) * 10 // total:
        return
    line = f"{done * 100 // total:3d} % {name}"
    print(f"\r\033[K{line}" if live else line, end="" if live else "\n", file=sys.stderr)
