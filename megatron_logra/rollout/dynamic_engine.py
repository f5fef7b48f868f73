"""Continuous batching through megatron-core's dynamic inference engine, with our sampling.

Requests enter the batch as others leave it; their keys and values lie in blocks of a paged cache.
Megatron schedules and runs the model; the tokens are drawn by `rollout.sampling` in place of
Megatron's sampler, so they are those of the static engine: same noise, same log-probabilities,
whatever the batch, its order or the layout. All ranks of a replica run in lockstep, as they draw
the same tokens.

Between calls the engine is suspended: the cache is freed, and nothing that older weights left is
ever read. Weights that change during a call make Megatron compute the cache anew.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megatron.core.inference.config import (
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling.base import Sampling
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_logra.config import DynamicEngineConfig, SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.rollout import cuda_graphs, dynamic_platform
from megatron_logra.rollout.drawing import Drawing, Response
from megatron_logra.rollout.static_engine import generating

# The imports above have SIGINT and SIGTERM print a stack before they do what they are for. Right
# here, for what is taken off gives way to the handlers of when it was put on.
for _number in (signal.SIGINT, signal.SIGTERM):
    faulthandler.unregister(_number)

_PREFILL_TOKENS = 4096  # tokens of one forward pass, at least one sequence of full length


class DynamicEngine:
    """Generates with a GPTModel as `StaticEngine` does; weights may change between calls.

    Args:
        chunks: this rank's GPTModel, or Megatron's wrappers around it, in a list.
        stop_ids: tokens that end a response.
        pad_id: kept for the common interface of engines; nothing is padded here.
        max_sequence_length: most tokens of a prompt and its response together.
        batch_size: sequences that are decoded at once.
        pg: the model's process groups.
        settings: the cache.

    Raises:
        UserError: the cache has no room for one sequence, or CUDA graphs cannot be had here.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        stop_ids: Collection[int],
        pad_id: int,
        max_sequence_length: int,
        batch_size: int,
        pg: ProcessGroupCollection,
        settings: DynamicEngineConfig | None = None,
    ) -> None:
        (self.model,) = unwrap_model(list(chunks))
        self.pg = pg
        self.stop_ids = frozenset(stop_ids)
        self.pad_id = pad_id
        self.max_sequence_length = min(max_sequence_length, self.model.max_sequence_length)
        self.batch_size = batch_size
        self.settings = settings or DynamicEngineConfig()
        dynamic_platform.install()
        self._sampling = _CounterSampling()
        with self._generating():
            self.engine = self._build()
            self.engine.suspend()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        *,
        seed: int,
        update: int,
        stream: str = "rollout",
        first_sample: int = 0,
        stop_token_ids: Collection[int] = (),
        progress: Callable[[int, int], None] | None = None,
        new_weights: Callable[[], int | None] | None = None,
    ) -> list[list[Response]]:
        """Generate `samples_per_prompt` responses to every prompt, as `StaticEngine.generate` does.

        Args:
            new_weights: called between two steps, by all ranks of the replica. It may change the
                model's weights, all ranks alike, and then returns the number of updates they are
                of; keys and values are computed anew before the next token. Else it returns None.
                The other arguments are those of `StaticEngine.generate`.

        Returns:
            One list of responses a prompt, in the order of the prompts. With `new_weights`, each
            has the `versions` of its tokens.

        Raises:
            UserError: a prompt is empty or leaves no room for a response.
            FloatingPointError: the model's logits are not finite.
        """
        drawing = Drawing(
            prompts,
            samples_per_prompt,
            sampling,
            seed=seed,
            update=update,
            stream=stream,
            first_sample=first_sample,
            stops=self.stop_ids | frozenset(stop_token_ids),
            max_sequence_length=self.max_sequence_length,
        )
        drawing.version = update if new_weights is not None else None
        rows = drawing.rows
        finished = 0
        with self._running(drawing):
            for number, row in enumerate(rows):
                self.engine.add_request(number, list(row.prompt), _parameters(row.limit))
            while self.engine.has_unfinished_requests():
                records = self.engine.step_modern()["finished_request_records"]
                for record in records:
                    tokens = [token for part in record.requests for token in part.generated_tokens]
                    if tokens != rows[record.request_id].response.token_ids:
                        raise RuntimeError(f"megatron-core lost tokens of {record.requests[-1]}")
                finished += len(records)
                if records and progress is not None:
                    progress(finished, len(rows))
                if new_weights is not None and finished < len(rows):
                    changed = new_weights()
                    if changed is not None:
                        drawing.version = changed
                        self.engine.suspend()
                        self.engine.resume()
        return drawing.responses

    def _build(self) -> DynamicInferenceEngine:
        config = inference_config(
            self.model,
            self.pg,
            self.settings,
            max_sequence_length=self.max_sequence_length,
            batch_size=self.batch_size,
        )
        context = DynamicInferenceContext(self.model.config, config)
        controller = TextGenerationController(GPTInferenceWrapper(self.model, context), _NoText())
        controller._sampling = self._sampling
        engine = DynamicInferenceEngine(controller, context)
        # Asked for requests that end although neither their one end token nor their length says
        # so, before the token that was just drawn is booked.
        controller.set_stop_word_finished_ids_callback(self._sampling.ended)
        return engine

    def _generating(self) -> AbstractContextManager[None]:
        return generating_from_pages(self.model, self.pg, self.settings)

    @contextmanager
    def _running(self, drawing: Drawing) -> Iterator[None]:
        """The engine with its cache, for one call."""
        self._sampling.drawing = drawing
        with self._generating():
            self.engine.resume()
            try:
                yield
            except BaseException:
                self.engine.reset()
                raise
            finally:
                # What the engine has scheduled for its event loop ends here.
                self.engine._loop.run_until_complete(asyncio.sleep(0))
                self.engine.suspend()
                self._sampling.drawing = None


def inference_config(
    model: GPTModel,
    pg: ProcessGroupCollection,
    settings: DynamicEngineConfig,
    *,
    max_sequence_length: int,
    batch_size: int,
) -> InferenceConfig:
    """Megatron's settings of an engine whose cache is computed anew when it is resumed.

    Args:
        model: this rank's GPTModel.
        pg: its process groups.
        settings: the cache.
        max_sequence_length: most tokens of a prompt and its response together.
        batch_size: sequences that are decoded at once.

    Raises:
        UserError: the cache has no room for one sequence.
    """
    config, tp = model.config, pg.tp.size()
    requests = -(-batch_size // tp) * tp
    groups = max(1, (config.num_query_groups or config.num_attention_heads) // tp)
    layers = len(model.decoder.layers)
    token_bytes = 2 * layers * groups * config.kv_channels * config.params_dtype.itemsize
    block_bytes = token_bytes * settings.block_tokens
    blocks = -(-max_sequence_length // settings.block_tokens)
    # One more block is Megatron's own, and a half makes up for rounding.
    least, size = ((n * blocks + 1.5) * block_bytes / (1 << 30) for n in (1, requests))
    if settings.kv_cache_gb is not None:
        if settings.kv_cache_gb < least:
            raise UserError(
                f"rollout.dynamic.kv_cache_gb={settings.kv_cache_gb}: expected at least "
                f"{least:.3g}, for one sequence of {max_sequence_length} tokens"
            )
        size = min(size, settings.kv_cache_gb)
    return InferenceConfig(
        block_size_tokens=settings.block_tokens,
        buffer_size_gb=size,  # type: ignore[arg-type]
        max_requests=requests,
        max_tokens=max(_PREFILL_TOKENS, max_sequence_length, requests),
        max_sequence_length=max_sequence_length,
        kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,
        num_cuda_graphs=settings.cuda_graphs or None,
        use_cuda_graphs_for_non_decode_steps=False,
        pg_collection=pg,
        enable_prefix_caching=settings.prefix_cache,
        # The other one, LRU, fails in megatron-core 0.19.2 once it has filled the cache.
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.REF_ZERO,
    )


@contextmanager
def generating_from_pages(
    model: GPTModel, pg: ProcessGroupCollection, settings: DynamicEngineConfig
) -> Iterator[None]:
    """The model as it generates with Megatron's engine, and afterwards as it was."""
    graphs = cuda_graphs.capturing(model, pg) if settings.cuda_graphs else nullcontext()
    scale = model.config.softmax_scale
    # Megatron's paged attention reads the scale there, and leaves it out of its configuration.
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    try:
        for layer in layers if scale is not None else []:
            layer.softmax_scale = scale
        with generating(model), graphs:
            yield
    finally:
        for layer in layers if scale is not None else []:
            del layer.softmax_scale


class _CounterSampling(Sampling):
    """Draws the tokens of Megatron's engine from our counter-based noise."""

    def __init__(self) -> None:
        self.drawing: Drawing | None = None

    def sample_kernel(
        self, logits: Tensor, n: int, context: Any, *, output: Tensor, **_options: Any
    ) -> Tensor:
        """Logits [≥ n, vocabulary] of the active requests' last tokens → n tokens in `output`."""
        assert self.drawing is not None
        active = slice(context.paused_request_count, context.total_request_count)
        rows = [self.drawing.rows[number] for number in context.request_ids[active].tolist()]
        output.copy_(self.drawing.draw(logits[:n], rows))
        return output

    def ended(self, active: list[int]) -> set[int]:
        """Which requests' last token was their last one."""
        assert self.drawing is not None
        return {number for number in active if self.drawing.rows[number].ended}

    def log_probs_kernel(self, logits: Tensor, context: Any, **_options: Any) -> Tensor:
        """Not called: log-probabilities are drawn with the tokens."""
        raise NotImplementedError


class _NoText:
    """A tokenizer for an engine whose responses are read as tokens."""

    eod = -1

    def detokenize(self, _tokens: list[int]) -> str:
        return ""


def _parameters(limit: int) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=limit, termination_id=-1)
