"""Bytes that a rank sends in a step, by collective.

Ring convention: of S bytes in all, an all-gather or reduce-scatter over n ranks sends S·(n-1)/n
from each rank, and an all-reduce twice that. Keys are `group/collective/what`. Sequences count
at full length (`train.seq_length`). N is a rank's tokens of a step, e the bytes of an
activation; the rest is named as in `estimates`.

    data/reduce_scatter/gradients     4 · buffer of the weights that Adam trains
    data/all_gather/parameters        e · the same buffer
    data/reduce_scatter/sketches      4 · sketch buffer, d·r numbers a target
    data/all_reduce/*                 a rank's share of either, over optimizer instances
    data/all_gather/directions        bytes of `factor_dtype` · sketch buffer
    data/all_gather/master_rows       e · targets' weights, if bf16 masters are sharded
    tensor/*/activations              N·h·e at both ends of attention and MLP, forward and backward
                                      (an all-reduce; all-gather or reduce-scatter under sequence
                                      parallelism, and one more all-gather for a dense weight
                                      gradient of qkv and fc1); embedding, output layer
    tensor/*/projected                N·r·e for P of each target, qkv and fc1 gathered
    tensor/reduce_scatter/sketches    4·d·r a micro-batch for proj, fc2 under sequence parallelism
    tensor/all_gather/directions      d·r of `factor_dtype` for proj, fc2
    tensor/all_reduce/grams           4·r·r for proj, fc2
    tensor/all_reduce/norm_gradients  4 bytes a number, where norms are trained
    tensor/*/probe                    the KL probe: forward traffic twice (values and tangents), P
    pipeline/send/activations         N·h·e forward and backward, the probe's included
    pipeline/all_reduce/embedding     4·vocabulary·h, a tied embedding that is trained
    context/*/keys_values             ring attention: keys and values forward, with gradients back;
                                      of local layers an all-gather forward, reduce-scatter back

Left out, being small: scalars a layer or a token, and what happens outside of a step (rollouts,
evaluation, the realised KL, checkpoints).
"""

from __future__ import annotations

from collections import Counter

from megatron_logra.model.vocabulary import padded_size
from megatron_logra.planner.estimates import PassEstimate
from megatron_logra.planner.shapes import BYTES, Model, Shape, Stage
from megatron_logra.planner.static import StageBuffers, sketch_rows

TOTAL = "total"
"""Key of the sum."""


def step_traffic(model: Model, stage: Stage, buffers: StageBuffers) -> dict[str, int]:
    """Bytes sent per step by each rank of a stage, by collective; and their sum `total`."""
    count = _Count(model, stage, buffers)
    count.data()
    count.tensor()
    count.pipeline()
    count.context()
    sent = {key: size for key, size in count.sent.items() if size}
    return sent | {TOTAL: sum(sent.values())}


class _Count:
    def __init__(self, model: Model, stage: Stage, buffers: StageBuffers) -> None:
        self.cfg, self.layout, self.config = model.cfg, model.layout, model.config
        self.vocabulary = padded_size(model.arguments.vocab_size, model.layout.tensor)
        self.stage, self.buffers = stage, buffers
        self.sent: Counter[str] = Counter()
        passes = PassEstimate(model, stage)
        self.micro_batches = passes.micro_batches
        self.tokens = passes.tokens * passes.micro_batches
        self.probe_tokens = passes.probe_tokens
        self.bytes = BYTES[self.cfg.train.precision]
        self.factor_bytes = BYTES[self.cfg.step_control.factor_dtype]
        self.first = stage.number == 0
        self.last = stage.number == self.layout.pipeline - 1

    def add(self, group: str, collective: str, what: str, size: float, ranks: int) -> None:
        """Count a collective over `ranks` ranks whose whole tensor has `size` bytes."""
        passes = 2 if collective == "all_reduce" else 1
        self.sent[f"{group}/{collective}/{what}"] += round(passes * size * (ranks - 1) / ranks)

    # --- data- and context-parallel ranks ---------------------------------------------------

    def data(self) -> None:
        """Gradients, sketches and what is made of them."""
        ranks, buffers = self.buffers.shards, self.buffers
        dense, sketches = buffers.gradient_elements, buffers.sketch_elements
        for what, elements in (("gradients", dense), ("sketches", sketches)):
            self.add("data", "all_reduce", what, 4 * elements / ranks, buffers.instances)
        self.add("data", "reduce_scatter", "gradients", 4 * dense, ranks)
        self.add("data", "all_gather", "parameters", self.bytes * dense, ranks)
        self.add("data", "reduce_scatter", "sketches", 4 * sketches, ranks)
        self.add("data", "all_gather", "directions", self.factor_bytes * sketches, ranks)
        if self.cfg.train.precision == "bf16" and self.cfg.optimizer.master == "sharded":
            weights = sum(s.numel for s in self.stage.targets)
            self.add("data", "all_gather", "master_rows", self.bytes * weights, ranks)

    # --- tensor-parallel ranks --------------------------------------------------------------

    def tensor(self) -> None:
        """Megatron's own activations, and what sketches add."""
        if self.layout.tensor == 1:
            return
        full = self.cfg.train.recompute == "full"
        self._forward("activations", self.tokens, layers=2 if full else 1)
        self._backward()
        self._projected("projected", self.tokens, gathered=True)
        rank, row_parallel = self.cfg.sketch.rank, self._row_targets()
        whole_rows = self.layout.tensor * sum(
            sketch_rows(s, self.layout.tensor) for s in row_parallel
        )
        if self.layout.sequence:
            size = 4 * whole_rows * rank * self.micro_batches
            self._add("reduce_scatter", "sketches", size)
        self._add("all_gather", "directions", self.factor_bytes * whole_rows * rank)
        # In mode `lr` the gradient's norm is reconstructed as well as the update's.
        uses = 2 if self.cfg.step_control.mode == "lr" else 1
        self._add("all_reduce", "grams", uses * 4 * rank * rank * len(row_parallel))
        summed = sum(s.numel for s in self.stage.trained if self._is_summed(s))
        self._add("all_reduce", "norm_gradients", 4 * summed)
        if self.probe_tokens:
            self._forward("probe", self.probe_tokens)
            self._forward("probe", self.probe_tokens, tangents=True)
            self._projected("probe", self.probe_tokens, gathered=self.layout.sequence)

    def _add(self, collective: str, what: str, size: float) -> None:
        self.add("tensor", collective, what, size, self.layout.tensor)

    def _row_targets(self) -> list[Shape]:
        return [s for s in self.stage.targets if s.split == 1]

    def _is_summed(self, shape: Shape) -> bool:
        """Whether the ranks' gradients of a norm have to be summed."""
        if "q_layernorm" in shape.name or "k_layernorm" in shape.name:
            return True
        return self.layout.sequence and shape.split is None

    def _forward(self, what: str, tokens: int, layers: int = 1, tangents: bool = False) -> None:
        """A forward pass, in which the layers run `layers` times.

        Args:
            tangents: a forward-mode pass's tangents, which begin at the first linear's output.
        """
        size = tokens * self.config.hidden_size * self.bytes
        in_layers = 2 * self.stage.layers * layers
        embedding = self.first and not tangents
        if self.layout.sequence:
            gathers = in_layers + self.last - (self.first and tangents)
            self._add("all_gather", what, size * gathers)
            self._add("reduce_scatter", what, size * (in_layers + embedding))
        else:
            self._add("all_reduce", what, size * (in_layers + embedding))

    def _backward(self) -> None:
        size = self.tokens * self.config.hidden_size * self.bytes
        layers, trained = self.stage.layers, self.stage.trained
        # Where nothing before the first linear is trained, its input needs no gradient.
        first = self.first and not trained and self.cfg.train.recompute != "full"
        inputs = max(0, 2 * layers - first)
        self._add("all_reduce", "activations", size * self.last)  # of the output layer
        if not self.layout.sequence:
            self._add("all_reduce", "activations", size * inputs)
            return
        dense = [s.short_name for s in trained if len(s.size) == 2]
        again = sum(dense.count(name) for name in ("linear_qkv", "linear_fc1", "word_embeddings"))
        self._add("all_gather", "activations", size * (2 * layers + again))
        self._add("reduce_scatter", "activations", size * inputs)

    def _projected(self, what: str, tokens: int, *, gathered: bool) -> None:
        """P: of column-parallel targets gathered or made by each rank, of the others summed."""
        size = tokens * self.cfg.sketch.rank * self.bytes
        row_parallel = len(self._row_targets())
        if gathered:
            self._add("all_gather", what, size * (len(self.stage.targets) - row_parallel))
        summed = "reduce_scatter" if self.layout.sequence else "all_reduce"
        self._add(summed, what, size * row_parallel)

    # --- pipeline- and context-parallel ranks -----------------------------------------------

    def pipeline(self) -> None:
        """Activations onwards, gradients back."""
        if self.layout.pipeline == 1:
            return
        width = self.config.hidden_size * self.bytes // self.layout.positions_split
        chunks = len(self.stage.chunks)
        onwards = (chunks - self.last) * (self.tokens + 2 * self.probe_tokens)
        back = (chunks - self.first) * self.tokens
        self.sent["pipeline/send/activations"] += width * (onwards + back)
        tied = sum(s.numel for s in self.stage.trained if s.tied)
        self.add("pipeline", "all_reduce", "embedding", 4 * tied, 2)

    def context(self) -> None:
        """Ring attention: n - 1 hops of keys and values, and on the way back of gradients too."""
        ranks = self.layout.context
        head, groups = self.config.kv_channels, self.config.num_query_groups
        assert head is not None and groups is not None
        width = 2 * groups * head // self.layout.tensor * self.bytes
        hop = self.tokens * width * self.stage.layers
        if self.cfg.model.implementation != "local":
            self.sent["context/send/keys_values"] += (ranks - 1) * hop * 3
            return
        # Both kinds of recomputation run attention once more; the probe gathers tangents, too.
        passes = 1 if self.cfg.train.recompute == "none" else 2
        probe = 2 * self.probe_tokens * width * self.stage.layers
        self.add("context", "all_gather", "keys_values", ranks * (passes * hop + probe), ranks)
        self.add("context", "reduce_scatter", "keys_values", ranks * hop, ranks)
