"""Batched generation through Megatron's static KV cache, with the trainer's own weights.

The rows of a wave share one length: Megatron's static cache has a single write position. The
prompts are run up to the length of the wave's shortest one, once for rows with the same tokens;
what longer prompts have left is then fed token by token while shorter ones already generate. so no
row is ever padded: positions and attention are those of the training forward pass, whatever the
layers are.

Tensor-parallel ranks generate together. Each gets the logits of the whole vocabulary, the same to
the last bit, and so draws the same tokens. Pipeline stages run one after the other; the last one
draws and tells the others, for which logits are tensors of no columns. Context-parallel ranks
hold the same weights and generate for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch import distributed as dist

from megatron_logra import platform
from megatron_logra.config import SamplingConfig
from megatron_logra.errors import UserError
from megatron_logra.model.stages import through_stages
from megatron_logra.rollout.attention import decodes_quickly, quick_decoding
from megatron_logra.rollout.drawing import Drawing, Response, Row
from megatron_logra.rollout.sampling import sample

_PREFILL_TOKENS = 4096  # prompt tokens of one forward pass, at least one prompt
_MOST_FED = 128  # prompt tokens fed one by one; a longer prompt goes into a later wave


class StaticEngine:
    """Generates with a GPTModel; keeps nothing between calls, so weights may change in between.

    Args:
        chunks: this rank's GPTModels, or Megatron's wrappers around them.
        stop_ids: tokens that end a response.
        pad_id: kept for the common interface of engines; nothing is padded here.
        max_sequence_length: most tokens of a prompt and its response together.
        batch_size: sequences that are decoded at once.
        pg: the model's process groups.
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
    ) -> None:
        self.chunks: list[GPTModel] = unwrap_model(list(chunks))
        if pg.cp.size() > 1 and not all(map(decodes_quickly, self.chunks)):
            raise UserError(
                f"parallel.context={pg.cp.size()}: rollouts with the weights of context-parallel "
                "ranks need model.implementation=local and rotary embeddings in all layers"
            )
        self.pg = pg
        self.stop_ids = frozenset(stop_ids)
        self.pad_id = pad_id
        self.max_sequence_length = min(max_sequence_length, self.chunks[0].max_sequence_length)
        self.batch_size = batch_size

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
    ) -> list[list[Response]]:
        """Generate `samples_per_prompt` responses to every prompt.

        Response j to prompt i has the sample index first_sample + i·samples_per_prompt + j; its
        tokens depend on (seed, update, stream), this index, the weights and the prompt alone.

        Args:
            prompts: token ids.
            samples_per_prompt: responses per prompt.
            sampling: distribution and longest response; `sampling.stop` is not read here.
            seed: seed of the run.
            update: number of applied updates, so that each policy version has its own noise.
            stream: name of the noise, such as `rollout` or `eval`.
            first_sample: sample index of the first response.
            stop_token_ids: further tokens that end a response.
            progress: called with the numbers of finished and of all responses, as they change.

        Returns:
            One list of responses a prompt, in the order of the prompts.

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
        finished = 0

        def choose(logits: Tensor, rows: list[Row]) -> list[bool]:
            """Append a token to every row's response; tells which rows have ended."""
            nonlocal finished
            drawing.draw(logits, rows, self._draw)
            ended = [row.ended for row in rows]
            if progress is not None and any(ended):
                finished += sum(ended)
                progress(finished, len(drawing.rows))
            return ended

        with ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(generating(chunk, self.max_sequence_length))
            for wave in _waves(drawing.rows, self.batch_size):
                self._run(wave, choose)
        return drawing.responses

    def _draw(
        self, logits: Tensor, uniforms: Tensor, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor]:
        """A token for each row and its logprob, on all pipeline stages: [rows] each."""
        group = self.pg.pp
        if group.size() == 1:
            return sample(logits, uniforms, sampling)
        # float64 holds every token id exactly.
        drawn = uniforms.new_full((2, len(uniforms)), float("nan"), dtype=torch.float64)
        if group.rank() == group.size() - 1:
            # Where logits are not finite, the ranks fail together.
            with suppress(FloatingPointError):
                tokens, logprobs = sample(logits, uniforms, sampling)
                drawn = torch.stack((tokens.double(), logprobs.double()))
        dist.broadcast(drawn, group_src=group.size() - 1, group=group)
        if not bool(drawn.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite")
        return drawn[0].long(), drawn[1]

    def _run(self, rows: list[Row], choose: Callable[[Tensor, list[Row]], list[bool]]) -> None:
        """Generate the responses of one wave."""
        length = min(len(row.prompt) for row in rows)
        logits, context = self._prefill(rows, length)
        while True:
            # `logits` are those of the token at position `length` of every row.
            writing = [i for i, row in enumerate(rows) if len(row.prompt) <= length]
            if len(writing) == len(rows):
                ended = choose(logits, rows)
            else:
                ended = [False] * len(rows)
                if writing:
                    chosen = choose(logits[writing], [rows[i] for i in writing])
                    for i, end in zip(writing, chosen, strict=True):
                        ended[i] = end
            rows = _drop(rows, ended, context)
            if not rows:
                return
            tokens = [
                row.prompt[length] if length < len(row.prompt) else row.response.token_ids[-1]
                for row in rows
            ]
            logits = self._forward(torch.tensor(tokens)[:, None], context)
            length += 1

    def _prefill(self, rows: list[Row], length: int) -> tuple[Tensor, StaticInferenceContext]:
        """Run the first `length` prompt tokens, once for rows that agree in them.

        Returns:
            The last position's logits [rows, vocabulary], and a cache of all rows.
        """
        sharers: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            sharers.setdefault(tuple(row.prompt[:length]), []).append(i)
        distinct = list(sharers.items())
        # The last token of a response is never fed.
        capacity = max(len(row.prompt) + row.limit - 1 for row in rows)
        context = StaticInferenceContext(len(rows), capacity)
        logits: Tensor | None = None
        step = max(1, _PREFILL_TOKENS // length)
        for start in range(0, len(distinct), step):
            part = distinct[start : start + step]
            small = StaticInferenceContext(len(part), length)
            result = self._forward(torch.tensor([list(tokens) for tokens, _ in part]), small)
            source = [k for k, (_, users) in enumerate(part) for _ in users]
            target = [i for _, users in part for i in users]
            if logits is None:
                logits = result.new_empty(len(rows), result.size(-1))
            logits[target] = result[source]
            for layer, pair in small.key_value_memory_dict.items():
                if layer not in context.key_value_memory_dict:
                    context.key_value_memory_dict[layer] = tuple(
                        memory.new_empty(capacity, len(rows), *memory.shape[2:]) for memory in pair
                    )
                for memory, filled in zip(context.key_value_memory_dict[layer], pair, strict=True):
                    memory[:length, target] = filled[:, source]
        assert logits is not None
        context.increment_sequence_len_offset(length)
        context.enable_decode_mode()
        return logits, context

    def _forward(self, tokens: Tensor, context: StaticInferenceContext) -> Tensor:
        """Feed tokens [rows, s] (s = 1 unless the cache is empty) → logits [rows, vocabulary].

        On a pipeline stage that is not the last: [rows, 0].
        """
        rows, new = tokens.shape
        device = platform.device()
        start = context.sequence_len_offset
        positions = torch.arange(start, start + new, device=device).expand(rows, new)
        mask = None
        if new > 1:
            mask = torch.ones(1, 1, new, new, dtype=torch.bool, device=device).triu_(1)
        tokens = tokens.to(device)
        logits = through_stages(
            self.chunks,
            self.pg,
            lambda chunk: chunk(
                tokens, positions, mask, inference_context=context, runtime_gather_output=True
            ),
            (rows, new),
        )
        context.increment_sequence_len_offset(new)
        return logits[:, -1] if logits is not None else torch.empty(rows, 0, device=device)


def _waves(rows: list[Row], batch_size: int) -> Iterator[list[Row]]:
    """Split rows into batches of prompts of similar length.

    Feeding the rest of a prompt takes no more steps than its response may take: beyond that, a wave
    of its own costs less.
    """
    wave: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        fed = len(row.prompt) - len(wave[0].prompt) if wave else 0
        if len(wave) == batch_size or fed > min(row.limit, _MOST_FED):
            yield wave
            wave = []
        wave.append(row)
    if wave:
        yield wave


def _drop(rows: list[Row], ended: list[bool], context: StaticInferenceContext) -> list[Row]:
    """Take ended rows out of the batch: the last rows move into their places in the cache.

    Megatron reads only as many rows of the cache as it gets tokens for.
    """
    left = len(rows) - sum(ended)
    holes = [i for i in range(left) if ended[i]]
    movers = [i for i in range(left, len(rows)) if not ended[i]]
    if holes:
        filled = context.sequence_len_offset
        for pair in context.key_value_memory_dict.values():
            for memory in pair:
                memory[:filled, holes] = memory[:filled, movers]
    rows = list(rows)
    for hole, mover in zip(holes, movers, strict=True):
        rows[hole] = rows[mover]
    return rows[:left]


@contextmanager
def generating(model: GPTModel, quick_length: int = 0) -> Iterator[None]:
    """No gradients, evaluation mode, and afterwards every module in the mode it was in.

    Within, `quick_decoding` of so many tokens is on, unless they are 0.
    """
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(InferenceMode.active())
        stack.enter_context(_undivided_positions(model))
        if quick_length:
            stack.enter_context(quick_decoding(model, quick_length))
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def _undivided_positions(model: nn.Module) -> Iterator[None]:
    """Without sequence parallelism: the one position of a decode step cannot be divided.

    Only forward passes without gradients may run within; weights and their marks stay as they are.
    """
    owners = [model.config, *model.modules()]  # the modules read their configuration, too
    switched = [
        (owner, name)
        for owner in owners
        for name in ("sequence_parallel", "reduce_scatter_embeddings")
        if getattr(owner, name, False) is True
    ]
    try:
        for owner, name in switched:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in switched:
            setattr(owner, name, True)
