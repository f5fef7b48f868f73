"""Text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_logra.config import ModelConfig
from megatron_logra.errors import UserError

Message = dict[str, str]
"""One turn of a chat: {"role": …, "content": …}."""


class Tokenizer(Protocol):
    """What the program needs of a tokenizer."""

    stop_ids: frozenset[int]
    """Ids that end a response."""
    eos_id: int
    """The one of them that ends a given response (supervised training)."""
    pad_id: int
    """Id that fills rows up to a common length."""
    vocab_size: int
    """Number of ids; the model may have more rows than this, never fewer."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special tokens around it."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat, up to where the assistant's answer begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are dropped."""


def load_tokenizer(model: ModelConfig, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of `model.tokenizer`, or that of the directory `model.hf`.

    Args:
        model: the model section.
        model_vocab_size: rows of the model's embedding, if they are to be checked.

    Raises:
        UserError: there is no tokenizer, or it has ids that the model does not have.
    """
    source = model.tokenizer or model.hf
    assert source is not None  # the configuration guarantees it
    tokenizer = _tokenizer_of(source)
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"model.tokenizer={source}: has {tokenizer.vocab_size} ids, but the model's vocabulary "
            f"is {model_vocab_size}"
        )
    return tokenizer


def _tokenizer_of(source: str) -> Tokenizer:
    if source == "bytes":
        return BytesTokenizer()
    path = Path(source)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    # A directory with a sentencepiece model, and nothing to tell transformers how to use it.
    if (path / "tokenizer.model").exists() and not (path / "tokenizer_config.json").exists():
        return SentencePieceTokenizer(path / "tokenizer.model")
    return HuggingFaceTokenizer(path)


class BytesTokenizer:
    """One id a byte of UTF-8, and three special ids after them."""

    BOS, EOS, PAD = 256, 257, 258

    def __init__(self) -> None:
        self.stop_ids = frozenset({self.EOS})
        self.eos_id = self.EOS
        self.pad_id = self.PAD
        self.vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A line `role: content` per turn, and `assistant: `."""
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return [self.BOS, *self.encode("".join(turns) + "assistant: ")]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face directory, with its chat template.

    Raises:
        UserError: the directory has no usable tokenizer.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{directory}: expected a directory with a tokenizer, or bytes")
        from transformers import AutoTokenizer  # takes seconds, so not at the top

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{directory}: no usable tokenizer: {reason}") from None
        eos = self._tokenizer.eos_token_id
        self.stop_ids = frozenset({eos} if eos is not None else set())
        self.stop_ids |= _generation_eos(self.directory)
        if not self.stop_ids:
            raise UserError(
                f"{directory}: neither the tokenizer nor generation_config.json has eos"
            )
        self.eos_id = int(eos if eos is not None else min(self.stop_ids))
        pad = self._tokenizer.pad_token_id
        self.pad_id = int(pad if pad is not None else min(self.stop_ids))
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the chat template's text, with the generation prompt.

        Raises:
            UserError: there is no chat template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise UserError(f"{self.directory}: the tokenizer has no chat template")
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"{self.directory}: the chat template failed: {error}") from None
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, exactly as the ids spell it."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class SentencePieceTokenizer:
    """A sentencepiece model, with the chat template that lies beside it (chat_template.jinja).

    Control pieces that a template writes (such as <s>) become their ids; what follows them gets no
    space that is not there.

    Raises:
        UserError: the file is no sentencepiece model, or nothing says what ends a response.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        try:
            model = ModelProto.FromString(self.path.read_bytes())
            self._pieces = SentencePieceProcessor(model_proto=model.SerializeToString())
            model.normalizer_spec.add_dummy_prefix = False
            self._inside = SentencePieceProcessor(model_proto=model.SerializeToString())
        except (OSError, RuntimeError, DecodeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: no usable sentencepiece model: {reason}") from None
        self.vocab_size = self._pieces.get_piece_size()
        ids = range(self.vocab_size)
        self._control = {self._pieces.id_to_piece(i): i for i in ids if self._pieces.is_control(i)}
        eos, pad = self._pieces.eos_id(), self._pieces.pad_id()
        own = frozenset({eos} if eos >= 0 else set())
        self.stop_ids = own | _generation_eos(self.path.parent)
        if not self.stop_ids:
            raise UserError(f"{path}: neither the model nor generation_config.json has eos")
        self.eos_id = eos if eos >= 0 else min(self.stop_ids)
        self.pad_id = pad if pad >= 0 else self.eos_id

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        return list(self._pieces.encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the chat template's text, with the generation prompt.

        Raises:
            UserError: there is no chat template, or it refuses these messages.
        """
        path = self.path.parent / "chat_template.jinja"
        if not path.exists():
            raise UserError(f"{path}: missing; a sentencepiece model has no chat template itself")
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {
            f"{name}_token": self._pieces.id_to_piece(i) if i >= 0 else ""
            for name, i in (("bos", self._pieces.bos_id()), ("eos", self._pieces.eos_id()))
        }
        try:
            (text,), _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=path.read_text(encoding="utf-8"),
                add_generation_prompt=True,
                **special,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"{path}: the chat template failed: {error}") from None
        return self._encode_with_control(text)

    def _encode_with_control(self, text: str) -> list[int]:
        names = sorted(self._control, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        ids: list[int] = []
        for place, part in enumerate(parts):
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids += (self._inside if place else self._pieces).encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text; control pieces are dropped."""
        controls = set(self._control.values())
        return str(self._pieces.decode([int(i) for i in ids if i not in controls]))


def _generation_eos(directory: Path) -> frozenset[int]:
    """The end ids of generation_config.json: models often have more of them there."""
    path = directory / "generation_config.json"
    if not path.exists():
        return frozenset()
    try:
        eos: Any = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError):
        raise UserError(f"{path}: expected a JSON object") from None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise UserError(f"{path}: eos_token_id: expected an integer or a list, got {eos!r}")
    return frozenset(ids)
