"""What a forward-backward pass and rollouts keep: an estimate, unlike `static`.

The accounting is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models"): the tensors that the backward pass of a layer reads. They give
s·b·h·(10 + 24/t + 5·a·s/(h·t)) bytes for a GPT with GELU, dropout and one head a key; here are a
gated MLP, grouped queries, and linears that keep P = X Aᵀ instead of their input. With n tokens in
a micro-batch on a rank, e bytes a number, t tensor-parallel ranks (t' = t under sequence
parallelism, else 1), widths h (hidden), q (heads · head size), g (groups · head size), f (MLP), and
sketch rank r, a layer keeps n times

    2·h/t'·e                     inputs of the two norms
    (2q + 3g)/t·e                queries and keys with their positions; qkv's output, of which the
                                 values are a view [+ q/t·e for the norm of queries]
    q/t·e + 4·heads/t            output and log-sum-exp of fused attention
    2f/t·e                       gate and up [+ 2f/t·e where SwiGLU is not fused]
    h/t'·e, q/t·e, h/t'·e, f/t·e    inputs of qkv, proj, fc1, fc2: dense
    r·e, r/t'·e, r·e, r/t'·e        P of the same: sketched

Attention counts as fused unless `model.implementation` is local: plans are made for GPUs, wherever
they are made. If it is not fused it keeps 3q/t·e (keys and values are repeated) [+ (2q + 2g)/t·e
for norms] and heads/t·s probabilities, in fp32 and in e bytes, instead of the lines about attention
above.

Selective recomputation drops what attention keeps besides its inputs; full recomputation keeps the
layer's input (h/t'·e) alone, and one layer's whole amount while it is recomputed. Stage i of p
pipeline stages keeps min(p - i, micro-batches) micro-batches; with v chunks a stage (interleaved)
2(p - i - 1) + (v - 1)p + 1 passes through a chunk. The last stage adds the final norm's
input, the hidden states that the loss sees, and `logprob_chunk` rows of logits (fp32, and their
gradient in e bytes). Left out: temporary gradients, communication buffers, the allocator's
fragmentation.
"""

from __future__ import annotations

import math
from typing import Literal

from megatron_logra.model.vocabulary import padded_size
from megatron_logra.planner.shapes import BYTES, Model, Stage

Use = Literal["sketched", "dense", "frozen"]


class PassEstimate:
    """Memory of forward-backward passes on one stage.

    Args:
        model: the model under its layout.
        stage: one of its stages, under the optimizer in question.
    """

    def __init__(self, model: Model, stage: Stage) -> None:
        self.cfg, self.layout, self.config = model.cfg, model.layout, model.config
        self.vocabulary = padded_size(model.arguments.vocab_size, model.layout.tensor)
        self.post_norms = bool(model.arguments.post_layernorms)
        self.stage = stage
        self.bytes = BYTES[self.cfg.train.precision]
        self.tokens = self.cfg.train.micro_batch_size * (
            self.cfg.train.seq_length // self.layout.context
        )
        """Tokens of a micro-batch on this rank, at full length."""

    @property
    def micro_batches(self) -> int:
        """Forward-backward passes of a step on this rank."""
        train = self.cfg.train
        sequences = train.prompts_per_step * train.responses_per_prompt
        count = math.ceil(sequences / (self.layout.data * train.micro_batch_size))
        # The interleaved schedule takes a multiple of its stages.
        multiple = self.layout.pipeline if len(self.stage.chunks) > 1 else 1
        return -(-count // multiple) * multiple

    @property
    def probe_tokens(self) -> int:
        """Tokens of this rank's share of the KL probe."""
        cfg = self.cfg
        if not self.stage.targets or cfg.step_control.mode != "kl_budget":
            return 0
        batch = cfg.train.prompts_per_step * cfg.train.responses_per_prompt
        responses = min(cfg.step_control.probe_responses, batch)
        length = min(cfg.step_control.probe_max_tokens, cfg.train.seq_length)
        return math.ceil(responses / self.layout.data) * (length // self.layout.context)

    def activations(self) -> int:
        """Most bytes of activations at a time, estimated."""
        total = round(self._in_flight() * self.kept())
        if self.stage.layers:
            total += self._layer() - self._kept_by_layer()  # what is recomputed of one layer
        if self.stage.number == self.layout.pipeline - 1:
            rows = min(self.cfg.algorithm.logprob_chunk, self.tokens)
            total += rows * (self.vocabulary // self.layout.tensor) * (4 + self.bytes)
        return total

    def _in_flight(self) -> float:
        """Micro-batches of this stage whose backward pass is still to come, at most."""
        after = self.layout.pipeline - 1 - self.stage.number
        chunks = len(self.stage.chunks)
        if chunks == 1:
            return min(after + 1, self.micro_batches)
        warmup = 2 * after + (chunks - 1) * self.layout.pipeline  # passes through one chunk
        return min(warmup + 1, chunks * self.micro_batches) / chunks

    def kept(self) -> int:
        """Bytes that the forward pass of a micro-batch leaves for the backward pass."""
        total = self.stage.layers * self._kept_by_layer()
        if self.stage.number == self.layout.pipeline - 1:
            # The final norm's input, and the hidden states of all positions that carry loss.
            hidden = self.config.hidden_size * self.bytes
            total += self.tokens * (self._per_token(hidden=1) + hidden)
        return total

    def _kept_by_layer(self) -> int:
        match self.cfg.train.recompute:
            case "none":
                return self._layer()
            case "selective":
                return self._layer(attention_recomputed=True)
            case "full":
                return self.tokens * self._per_token(hidden=1)

    def rollout_cache(self) -> int:
        """Bytes of keys and values of `rollout.batch_size` sequences at full length.

        No bytes where workers generate, and these ranks do not.
        """
        if self.cfg.rollout.placement == "separate":
            return 0
        kv = self._widths()[2]
        tokens = self.cfg.rollout.batch_size * self.cfg.train.seq_length
        return tokens * self.stage.layers * 2 * (kv // self.layout.tensor) * self.bytes

    def _widths(self) -> tuple[int, int, int, int]:
        """h, q, g and f of the whole model."""
        config = self.config
        head, ffn, groups = config.kv_channels, config.ffn_hidden_size, config.num_query_groups
        assert head is not None and ffn is not None and groups is not None
        return config.hidden_size, config.num_attention_heads * head, groups * head, ffn

    def _per_token(self, *, hidden: float = 0, split: float = 0) -> int:
        """Bytes a token: `hidden` residual widths, and `split` numbers divided over ranks."""
        positions = self.layout.positions_split
        numbers = hidden * self.config.hidden_size / positions + split / self.layout.tensor
        return math.ceil(numbers * self.bytes)

    def _layer(self, *, attention_recomputed: bool = False) -> int:
        """What a layer keeps if nothing, or only its core attention, is recomputed."""
        _, query, kv, ffn = self._widths()
        heads = self.config.num_attention_heads
        size = self._per_token(hidden=4 if self.post_norms else 2)
        if self.config.hidden_dropout:
            size += math.ceil(2 * self.config.hidden_size / self.layout.positions_split)  # masks
        fused = self.cfg.model.implementation != "local"
        norms = bool(self.config.qk_layernorm)
        output_kept = fused and not attention_recomputed
        if fused or attention_recomputed:
            size += self._per_token(split=2 * query + 3 * kv + norms * query)
        else:
            size += self._per_token(split=3 * query + norms * (2 * query + 2 * kv))
            probabilities = self.cfg.train.seq_length * (heads // self.layout.tensor)
            size += probabilities * (4 if self.bytes == 4 else 4 + self.bytes)
        if output_kept:
            size += self._per_token(split=query) + 4 * heads // self.layout.tensor
        gated = self.config.gated_linear_unit
        size += self._per_token(split=2 * ffn if gated else ffn)
        if gated and not self.config.bias_activation_fusion:
            size += self._per_token(split=2 * ffn)
        size += self._inputs(query, ffn, attention_output_kept=output_kept)
        return size * self.tokens

    def _inputs(self, query: int, ffn: int, *, attention_output_kept: bool) -> int:
        """Bytes a token that the four linears keep to make a gradient or a sketch."""
        projected = self.cfg.sketch.rank * self.bytes
        split_projected = math.ceil(projected / self.layout.positions_split)
        size = 0
        for name in ("linear_qkv", "linear_fc1"):
            use = self._use(name)
            if use != "frozen":
                size += self._per_token(hidden=1) if use == "dense" else projected
        for name, width in (("linear_proj", query), ("linear_fc2", ffn)):
            use = self._use(name)
            if use == "sketched":
                size += split_projected
            elif use == "dense" and not (name == "linear_proj" and attention_output_kept):
                size += self._per_token(split=width)
        return size

    def _use(self, name: str) -> Use:
        if any(s.short_name == name for s in self.stage.targets):
            return "sketched"
        return "dense" if any(s.short_name == name for s in self.stage.trained) else "frozen"
