"""megatron-core's OpenAI-compatible server over a policy: what `megatron-logra serve` runs.

    HTTP port → Megatron's endpoints → Megatron's coordinator → engine of a data-parallel replica

The endpoints answer on rank 0; the coordinator is a process of its own that hands out requests and
makes text of tokens; each rank's engine runs in a thread. They talk by sockets of this machine, and
whoever reaches those may pause the engines: so they are bound to 127.0.0.1, wherever HTTP is.

No route changes anything. Weights are the configuration's or a checkpoint's; or they follow a
trainer's, whose updates are applied between two steps, with the engines suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config as HttpConfig
from megatron.core.inference.apis import MegatronAsyncLLM
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_server.dynamic_text_gen_server.endpoints import (
    chat_completions,
    completions,
    health,
)
from megatron.core.utils import unwrap_model
from quart import Quart, Request, current_app
from torch import Tensor
from werkzeug.exceptions import BadRequest, HTTPException

from megatron_logra import distributed
from megatron_logra.config import Config
from megatron_logra.errors import UserError
from megatron_logra.model.tokenizer import Message, Tokenizer
from megatron_logra.rl.evaluate import load_checkpoint, name_of
from megatron_logra.rl.policy import build_generating
from megatron_logra.rollout import dynamic_platform, http_port
from megatron_logra.rollout.dynamic_engine import generating_from_pages, inference_config
from megatron_logra.rollout.worker import catch_up, follower_of
from megatron_logra.sync.follower import Follower
from megatron_logra.sync.transport import Head, read_head

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a server."""
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.5
"""How often rank 0 looks for new weights, and whether the engine is still there."""
_BESIDE_POLL_S = 0.02
"""How often the other ranks look whether rank 0 has suspended the engines."""
_MOST_BYTES = 1 << 24  # of a request


def run(
    config: Config,
    listener: socket.socket | None,
    *,
    checkpoint: str | None = None,
    follow: bool = False,
) -> None:
    """Answer requests until a signal says stop. Called by all ranks.

    Args:
        config: the model and its layout, `rollout.batch_size` and `rollout.dynamic`; one that
            `require_servable` lets through.
        listener: where HTTP is answered, on rank 0.
        checkpoint: a checkpoint directory; default: see `load_checkpoint`.
        follow: take over the weights of the run's trainer, and each of its updates.

    Raises:
        UserError: the configuration does not fit the engine or the machine.
        RuntimeError: the engine or the coordinator has ended by itself.
    """
    policy = build_generating(config)
    policy.require_rollouts()
    if len(set(distributed.each(socket.gethostname))) > 1:
        raise UserError("serve: expected all ranks on one machine")
    source = load_checkpoint(policy, checkpoint)
    follower = follower_of(policy, config, f"server_{os.getpid()}") if follow else None
    if follower is not None:
        catch_up(follower, "serve")
    dynamic_platform.install()
    logging.getLogger(chat_completions.__name__).setLevel(logging.ERROR)  # a warning an answer
    model = unwrap_model(policy.chunks[0])
    with generating_from_pages(model, policy.pg, config.rollout.dynamic):
        settings = inference_config(
            model,
            policy.pg,
            config.rollout.dynamic,
            max_sequence_length=min(policy.max_length, model.max_sequence_length),
            batch_size=config.rollout.batch_size,
        )
        with _quiet_children():
            llm = MegatronAsyncLLM(
                model=model,
                tokenizer=ServedTokenizer(policy.tokenizer),
                inference_config=settings,
                coordinator_host=_LOOPBACK,
            )
        _end_at(llm, policy.tokenizer.stop_ids)
        if listener is None:
            asyncio.run(_accompany(llm, follower))
            return
        print(f"{name_of(source)}: {http_port.url(listener)}", flush=True)
        coordinator = llm.engine.inference_coordinator_process
        try:
            asyncio.run(_Server(llm, policy.tokenizer, coordinator, follower).run(listener))
        finally:
            coordinator.kill()  # it keeps nothing; and this process would wait for it


class ServedTokenizer:
    """A tokenizer as Megatron's endpoints, coordinator and engine call it."""

    bos = None
    eod = -1  # there may be several: see `_end_at`
    chat_template = "the tokenizer's own"  # asked for whether there is one

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Taken out of its pickle: this is the coordinator's process, about to begin."""
        self.__dict__.update(state)
        _become_coordinator()

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        return self._tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens."""
        return self._tokenizer.decode(ids)

    def apply_chat_template(self, messages: Sequence[Message], **_options: Any) -> list[int]:
        """Ids of a chat, up to where the assistant's answer begins."""
        return self._tokenizer.encode_chat(messages)


def _become_coordinator() -> None:
    """Have this process end with the server, also a killed one, and not before: not by Ctrl-C."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # at each end, that the engine has left
    server = os.getppid()

    def watch() -> None:
        while os.getppid() == server:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _quiet_children() -> Iterator[None]:
    """Keep processes that are started within from what `platform.quieten` keeps from this one."""
    former = dict(os.environ)
    logs = [former["TORCH_LOGS"]] if "TORCH_LOGS" in former else []
    os.environ["TORCH_LOGS"] = ",".join([*logs, "-torch.utils.cpp_extension"])
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        yield
    finally:
        for name in ("TORCH_LOGS", "PYTHONWARNINGS"):
            os.environ.pop(name)
            if name in former:
                os.environ[name] = former[name]


class _Sampling(TorchSampling):
    """Megatron's sampler, which notes whose token is one that ends a response."""

    def __init__(self, sampler: TorchSampling, stop_ids: Collection[int]) -> None:
        super().__init__(sampler._rng, sampler._vocab_size)
        self.stop_ids = frozenset(stop_ids)
        self.stopped: set[int] = set()

    def sample_kernel(self, logits: Tensor, n: int, context: Any, **options: Any) -> Tensor:
        """Logits [≥ n, vocabulary] → n tokens."""
        tokens = super().sample_kernel(logits, n, context, **options)
        active = slice(context.paused_request_count, context.total_request_count)
        numbers = context.request_ids[active].tolist()
        drawn = zip(numbers, tokens.tolist(), strict=True)
        self.stopped = {number for number, token in drawn if token in self.stop_ids}
        return tokens


def _end_at(llm: MegatronAsyncLLM, stop_ids: Collection[int]) -> None:
    """End responses at any of `stop_ids`: Megatron knows one such token only."""
    sampling = _Sampling(llm.controller._sampling, stop_ids)
    llm.controller._sampling = sampling
    words_of = llm.engine._get_and_clear_stop_word_finished_ids
    llm.controller.set_stop_word_finished_ids_callback(
        lambda active: words_of(active) | (sampling.stopped & set(active))
    )


class _Server:
    """What rank 0 does while the engine runs in its thread."""

    def __init__(
        self,
        llm: MegatronAsyncLLM,
        tokenizer: Tokenizer,
        coordinator: Any,
        follower: Follower | None,
    ) -> None:
        self.llm = llm
        self.tokenizer = tokenizer
        self.coordinator = coordinator
        self.follower = follower
        self.seen: Head | None = None
        """What the trainer last offered."""

    async def run(self, listener: socket.socket) -> None:
        """Answer until a signal comes.

        Raises:
            RuntimeError: the engine or the coordinator has ended by itself.
        """
        stop = asyncio.Event()
        for number in STOPS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        client = _Client(self.llm._coord_runtime.coord_addr)
        client.start()
        if self.follower is not None and self.follower.receiver.run is not None:
            client.set_generation_epoch(self.follower.receiver.version)
        settings = HttpConfig()
        settings.bind = [f"fd://{listener.detach()}"]
        settings.errorlog = None
        watching = asyncio.create_task(self._watch(stop, client))
        watching.add_done_callback(lambda _: stop.set())
        await serve_http(application(client, self.tokenizer), settings, shutdown_trigger=stop.wait)
        await watching
        client.stop()
        await self.llm.shutdown()

    async def _watch(self, stop: asyncio.Event, client: InferenceClient) -> None:
        while not stop.is_set():
            if self.llm.engine.state == EngineState.STOPPED:
                raise RuntimeError("Megatron's engine has ended")
            if not self.coordinator.is_alive():
                raise RuntimeError("Megatron's coordinator has ended")
            if self.follower is not None:
                await self._follow(self.follower, client)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)

    async def _follow(self, follower: Follower, client: InferenceClient) -> None:
        """Apply what the trainer has new. Requests wait, and go on with the new weights."""
        head, receiver = read_head(follower.directory), follower.receiver
        # What could not be had is asked for, and is there when the trainer offers its next.
        if head is None or head == self.seen:
            return
        self.seen = head
        await self.llm.pause()
        await self.llm.suspend()
        catch_up(follower, "serve")
        await self.llm.resume()
        if receiver.run is not None:
            client.set_generation_epoch(receiver.version)
            while self.llm.engine._generation_epoch != receiver.version:  # before another token
                await asyncio.sleep(0.01)
        await self.llm.unpause()


class _Client(InferenceClient):
    """The endpoints' way to the coordinator."""

    def add_request(
        self, prompt: str | list[int], sampling_params: SamplingParams
    ) -> asyncio.Future[Any]:
        """The reply, with what Megatron's chats look for under a name that no reply has."""
        reply = super().add_request(prompt, sampling_params)
        reply.add_done_callback(_name_logprobs)  # before it reaches who waits for it
        return reply


def _name_logprobs(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        result = reply.result()
        result["log_probs"] = result.get("generated_log_probs")


def application(client: InferenceClient, tokenizer: Tokenizer) -> Quart:
    """Megatron's endpoints for completions, chat completions and the server's health."""
    app = Quart("megatron_logra", static_folder=None)
    app.request_class = _CheckedRequest
    app.config.update(MAX_CONTENT_LENGTH=_MOST_BYTES, VOCABULARY=tokenizer.vocab_size)
    app.config.update(  # read by Megatron's endpoints
        client=client, tokenizer=ServedTokenizer(tokenizer), parsers=None, verbose=False
    )
    # Not the profiler's: anyone could start it, and without a GPU it ends the engine.
    for endpoint in (completions, chat_completions, health):
        app.register_blueprint(endpoint.bp)
    app.register_error_handler(HTTPException, _explain)
    return app


async def _accompany(llm: MegatronAsyncLLM, follower: Follower | None) -> None:
    """What the other ranks do: rank 0 ends them, and has them apply new weights with it."""
    for number in STOPS:
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    ended = asyncio.create_task(llm.wait_for_shutdown())
    while follower is not None and not ended.done():
        # Looked at, since a wait for it would outlive the loop that it is in.
        if llm.engine.state == EngineState.SUSPENDED:
            catch_up(follower, "serve")
            await llm.resume()
        await asyncio.wait((ended,), timeout=_BESIDE_POLL_S)
    await ended
    await llm.shutdown()


class _CheckedRequest(Request):
    """A request whose body is checked before Megatron's endpoints see it."""

    async def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """The body as `http_port.checked` makes it."""
        body = await super().get_json(force=True)
        try:
            return http_port.checked(self.path, body, current_app.config["VOCABULARY"])
        except UserError as error:
            raise BadRequest(str(error)) from None


async def _explain(error: HTTPException) -> tuple[dict[str, Any], int]:
    """An error as OpenAI's clients read it."""
    code = error.code or 500
    return {"error": {"message": error.description, "type": error.name, "code": code}}, code
