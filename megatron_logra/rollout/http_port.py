"""What comes in by a server's HTTP port: the port itself, and the requests that are let through.

Megatron's engine ends at an argument that it has no use for, and its endpoints pass over what they
do not know. So each request is checked here first: one with an unknown field, or with a value that
cannot be served, is refused. Nothing heavy is imported, so that a wrong address is known at once.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from megatron_logra.config import Section
from megatron_logra.errors import UserError

PACKAGES = {"quart": "quart", "hypercorn": "hypercorn", "zmq": "pyzmq", "msgpack": "msgpack"}
"""What Megatron's server imports, and from which distribution."""

_COLDEST = 0.01
"""Smallest temperature besides 0: below, logits over it may leave the range of their type."""


def require_packages() -> None:
    """Raise `UserError` unless the packages of Megatron's server are here."""
    missing = [
        name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise UserError(
            f"{', '.join(missing)}: not installed, but needed by serve; "
            "pip install 'megatron-logra[serve]'"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port` (0: one that is free).

    Raises:
        UserError: it cannot.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: expected 0 to {2**16 - 1}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there: {error}") from None


def url(listener: socket.socket) -> str:
    """Where a client finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]
Only0 = Annotated[float, Field(ge=0, le=0)]


class _Request(Section):
    """What both endpoints take. Fields that take one value are those that clients like to send."""

    model: str = ""
    user: str = ""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stream: Literal[False] = False
    presence_penalty: Only0 = 0.0
    frequency_penalty: Only0 = 0.0

    def sampling(self, vocabulary: int) -> dict[str, Any]:
        """Megatron's own fields: there, a top_p of 0 is none.

        Raises:
            UserError: a combination that Megatron cannot sample with.
        """
        if 0 < self.temperature < _COLDEST:
            raise UserError(f"temperature: expected 0, or at least {_COLDEST}")
        if self.top_k >= vocabulary:
            raise UserError(f"top_k: expected less than {vocabulary}, the size of the vocabulary")
        if self.top_k and self.top_p < 1:
            raise UserError("top_k: expected 0 where top_p is less than 1")
        top_p = 0.0 if self.top_p == 1 else self.top_p
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": top_p}


class _Completion(_Request):
    """/v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | Tokens | list[Tokens]
    max_tokens: int = Field(16, ge=1)
    stop: Text | list[Text] = Field(default_factory=list)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    n: Literal[1] = 1
    best_of: Literal[1] = 1

    def for_megatron(self, vocabulary: int) -> dict[str, Any]:
        """The body that Megatron's endpoint gets."""
        if self.echo and self.logprobs is not None:
            raise UserError("echo: expected false with logprobs; those of a prompt are not kept")
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        for entry in prompts:
            ids = entry if isinstance(entry, list) else [entry]
            if any(isinstance(i, int) and not 0 <= i < vocabulary for i in ids):
                raise UserError(f"prompt: expected token ids from 0 to {vocabulary - 1}")
        given = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "echo": self.echo,
        }
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return given | self.sampling(vocabulary)


class _TextPart(Section):
    type: Literal["text"]
    text: str


class _Message(Section, extra="ignore"):
    """A turn. Clients send back what the server has said, with fields that play no part here."""

    role: str
    content: str | list[_TextPart]


class _Chat(_Request):
    """/v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    n: int = Field(1, ge=1, le=128)

    def for_megatron(self, vocabulary: int) -> dict[str, Any]:
        """The body that Megatron's endpoint gets."""
        messages = []
        for message in self.messages:
            content = message.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            messages.append({"role": message.role, "content": content})
        given = {
            "messages": messages,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "n": self.n,
            # Else Megatron takes token ids of former turns from the client, unchecked.
            "prevent_retokenization": False,
        }
        if self.max_completion_tokens is not None or self.max_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens or self.max_tokens
        return given | self.sampling(vocabulary)


def checked(path: str, body: Any, vocabulary: int) -> dict[str, Any]:
    """What Megatron's endpoint of `path` gets of a request's body.

    Args:
        path: of the request: that of completions or of chat completions.
        body: what has come as JSON. A field that is null counts as absent.
        vocabulary: number of token ids.

    Raises:
        UserError: the body is not one that can be served; one line that names the field.
    """
    if not isinstance(body, dict):
        raise UserError("expected a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("expected Unicode; half of a surrogate pair is no letter") from None
    kind = _Chat if path.endswith("/chat/completions") else _Completion
    given = {name: value for name, value in body.items() if value is not None}
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise UserError(_one_line(error, kind)) from None
    return request.for_megatron(vocabulary)


def _one_line(error: ValidationError, kind: type[_Request]) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"{name}: not supported; expected one of: {', '.join(kind.model_fields)}"
    if name == "prompt" and first["type"] != "missing":
        return "prompt: expected a text, a list of texts, token ids, or lists of them; none empty"
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg'].replace('Input should be', 'expected')}"
