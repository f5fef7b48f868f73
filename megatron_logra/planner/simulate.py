"""Step time for any number of ranks, from FLOPs, bytes, rates and overlap: a model, not a run.

Bytes held and sent are the planner's. With n a rank's tokens of a step and |W| a rank's part of a
weight [d, k], sequences at full length:

    forward          2|W|n a linear, 2·s·q·n for causal attention over s positions
    backward         2|W|n for the input's gradient, and 2|W|n for a dense weight's; a sketch takes
                     2·n·r·k for P and 2·n·r·d for S; attention twice its forward
    bubble           (p - 1)/(v·m) of forward and backward: p stages, v chunks, m micro-batches
    tensor           its bytes over the link, none hidden, and a latency for each collective
    reduce           over data-parallel ranks, hidden behind the last micro-batch's backward pass
    gather           directions, masters' rows, parameters: not hidden
    optimizer        Adam moves 30 bytes a number of its shard; LoGRA applies with 2·r FLOPs (fp32)
                     and 10 bytes a number, on its shard (masters sharded) or all of it
    probe            its tokens' forward pass twice, with the tangents' 2·n·r·(d + k)
    rollout          for each token of `mean_response`: the weights and the cache through memory; in
                     the layout that generates, whose weights pass a link where it is another one

A collective over n ranks takes n - 1 hops. Times are of the slowest stage. What is calibrated and
what is assumed is in `hardware.Efficiency`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from megatron_logra import data_parallel
from megatron_logra.config import Config
from megatron_logra.planner.estimates import PassEstimate
from megatron_logra.planner.hardware import Efficiency, Hardware
from megatron_logra.planner.report import copy_sizes
from megatron_logra.planner.shapes import BYTES, Kind, Model, Shape, Stage, layout_of
from megatron_logra.planner.static import StageBuffers, sketch_rows
from megatron_logra.planner.traffic import step_traffic


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a step."""

    forward: float
    backward: float
    bubble: float
    tensor: float
    reduce: float
    """What is not hidden of it."""
    gather: float
    optimizer: float
    probe: float
    pipeline: float
    context: float
    rollout: float

    @property
    def train(self) -> float:
        """All but the rollout."""
        return sum(asdict(self).values()) - self.rollout

    @property
    def step(self) -> float:
        """Rollout and training, one after the other (colocated)."""
        return self.train + self.rollout


@dataclass(frozen=True)
class Simulated:
    """A step of one optimizer on one number of ranks."""

    times: Times
    tokens: int
    """Of the global batch, at full length."""
    bytes: float
    """Largest memory of a rank, estimated."""
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        """Of training, all ranks together."""
        return self.tokens / self.times.train


def simulate(
    cfg: Config,
    ranks: int,
    kind: Kind,
    hardware: Hardware,
    efficiency: Efficiency,
    *,
    mean_response: float = 0.5,
) -> Simulated:
    """A step on `ranks` ranks.

    Args:
        cfg: the configuration.
        ranks: of the run.
        kind: optimizer.
        hardware: of each rank.
        efficiency: how much of it is reached.
        mean_response: mean length of a response, as a part of `rollout.sampling.max_tokens`.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
    """
    model = Model(cfg, layout_of(cfg, ranks))
    stages = [
        _StageTimes(model, model.stage(number, kind), hardware, efficiency)
        for number in range(model.layout.pipeline)
    ]
    times = max((stage.times(mean_response) for stage in stages), key=lambda t: t.step)
    needed = max(stage.needed for stage in stages)
    if cfg.rollout.layout is not None:
        copy = copy_sizes(cfg, ranks)
        model = Model(cfg.generating, layout_of(cfg.generating, ranks))
        generating = [
            _StageTimes(model, model.stage(number, kind), hardware, efficiency)
            for number in range(model.layout.pipeline)
        ]
        slowest = max(stage.rollout(mean_response) for stage in generating)
        brought = generating[0].seconds(copy["weights"], 1, ranks > hardware.per_node)
        times = replace(times, rollout=slowest + brought)
        needed = max(
            stage.static + copy["weights"] + max(stage.passes.activations(), copy["rollout_cache"])
            for stage in stages
        )
    train = cfg.train
    tokens = train.prompts_per_step * train.responses_per_prompt * train.seq_length
    return Simulated(times, tokens, needed, needed <= hardware.memory)


class _StageTimes:
    def __init__(
        self, model: Model, stage: Stage, hardware: Hardware, efficiency: Efficiency
    ) -> None:
        self.cfg, self.layout, self.config = model.cfg, model.layout, model.config
        self.vocabulary = model.arguments.vocab_size
        self.stage, self.hardware, self.efficiency = stage, hardware, efficiency
        self.passes = PassEstimate(model, stage)
        self.buffers = StageBuffers(model, stage)
        self.sent = step_traffic(model, stage, self.buffers)
        self.rank = self.cfg.sketch.rank
        self.tokens = self.passes.tokens * self.passes.micro_batches
        peak = hardware.bf16_flops if self.cfg.train.precision == "bf16" else hardware.fp32_flops
        self.flops = efficiency.compute * peak
        self.static = max(entry["static"] for entry in self.buffers.static())

    @property
    def needed(self) -> float:
        """Bytes, as `plan` has them."""
        return self.static + max(self.passes.activations(), self.passes.rollout_cache())

    def times(self, mean_response: float) -> Times:
        forward = self._forward_flops(self.tokens) / self.flops
        backward = self._backward_flops() / self.flops
        micro_batches, chunks = self.passes.micro_batches, len(self.stage.chunks)
        bubble = (self.layout.pipeline - 1) / (chunks * micro_batches)
        ranks = self.buffers.shards * self.buffers.instances
        spans_nodes = self.layout.tensor * ranks > self.hardware.per_node
        reduce, gather = self._data(ranks, spans_nodes)
        return Times(
            forward=forward,
            backward=backward,
            bubble=bubble * (forward + backward),
            tensor=self._tensor(),
            reduce=max(0.0, reduce - backward / micro_batches),
            gather=gather,
            optimizer=self._optimizer(),
            probe=self._probe(),
            pipeline=self._send("pipeline/", 2 * micro_batches * chunks, spans_nodes=True)
            if self.layout.pipeline > 1
            else 0.0,
            context=self._send("context/", 3 * self.stage.layers * micro_batches, False),
            rollout=self.rollout(mean_response),
        )

    # --- computation ------------------------------------------------------------------------

    def _linears(self) -> list[Shape]:
        matrices = [s for s in self.stage.all if len(s.size) == 2]
        return [s for s in matrices if s.short_name not in ("word_embeddings", "output_layer")]

    def _attention_flops(self, tokens: float) -> float:
        heads, head = self.config.num_attention_heads, self.config.kv_channels
        assert head is not None
        width = heads * head / self.layout.tensor
        return 2 * self.cfg.train.seq_length * width * tokens * self.stage.layers

    def _head_flops(self, tokens: float) -> float:
        if self.stage.number < self.layout.pipeline - 1:
            return 0.0
        return 2 * self.vocabulary / self.layout.tensor * self.config.hidden_size * tokens

    def _forward_flops(self, tokens: float) -> float:
        linears = 2 * tokens * sum(s.numel for s in self._linears())
        return linears + self._attention_flops(tokens) + self._head_flops(tokens)

    def _sketch_flops(self, tokens: float) -> float:
        """Of P and S, each divided over the tensor-parallel ranks in one way or another."""
        sizes = [
            (
                sketch_rows(s, self.layout.tensor),
                s.size[1] / (1 if s.split == 1 else self.layout.tensor),
            )
            for s in self.stage.targets
        ]
        return 2 * tokens * self.rank * sum(d + k for d, k in sizes)

    def _backward_flops(self) -> float:
        inputs = 2 * self.tokens * sum(s.numel for s in self._linears())
        trained = {s.name for s in self.stage.trained}
        weights = 2 * self.tokens * sum(s.numel for s in self._linears() if s.name in trained)
        head = self._head_flops(self.tokens) * (2 if trained else 1)
        total = inputs + weights + head + 2 * self._attention_flops(self.tokens)
        total += self._sketch_flops(self.tokens)
        match self.cfg.train.recompute:
            case "full":
                total += self._forward_flops(self.tokens) - self._head_flops(self.tokens)
            case "selective":
                total += self._attention_flops(self.tokens)
        return total

    def _probe(self) -> float:
        tokens = self.passes.probe_tokens
        return (2 * self._forward_flops(tokens) + self._sketch_flops(tokens)) / self.flops

    def _optimizer(self) -> float:
        memory = self.efficiency.memory * self.hardware.memory_rate
        total = 30 * sum(s.numel for s in self.stage.trained) / self.buffers.shards / memory
        if not self.stage.targets:
            return total
        numbers: float = sum(s.numel for s in self.stage.targets)
        if self.cfg.optimizer.master == "sharded":
            numbers /= self.buffers.shards
        rows = sum(sketch_rows(s, self.layout.tensor) for s in self.stage.targets)
        columns = sum(s.size[1] for s in self.stage.targets)
        grams = 2 * self.rank**2 * (columns + rows / self.buffers.shards)
        flops = 2 * self.rank * numbers + grams
        # S read and D written thrice in fp32; A made once for the Gram matrix and once to apply.
        moved = 10 * numbers + 24 * self.rank * rows / self.buffers.shards
        moved += 4 * 4 * self.rank * columns
        fp32 = self.efficiency.compute * self.hardware.fp32_flops
        return total + flops / fp32 + moved / memory

    # --- communication ----------------------------------------------------------------------

    def seconds(self, size: float, hops: float, spans_nodes: bool) -> float:
        """To send so many bytes over so many hops, within a node or between nodes."""
        e, h = self.efficiency, self.hardware
        if spans_nodes:
            return size / (e.network * h.network_rate) + hops * e.network_latency_s
        return size / (e.link * h.link_rate) + hops * e.link_latency_s

    def _send(self, prefix: str, messages: float, spans_nodes: bool) -> float:
        size = sum(value for key, value in self.sent.items() if key.startswith(prefix))
        return self.seconds(size, messages, spans_nodes) if size else 0.0

    def _tensor(self) -> float:
        if self.layout.tensor == 1:
            return 0.0
        per_layer, at_once = 8, 0  # activations
        if self.stage.targets:  # P of all layers in two messages; S layer by layer
            per_layer, at_once = (10 if self.layout.sequence else 8), 2
        collectives = (per_layer * self.stage.layers + at_once) * self.passes.micro_batches
        hops = collectives * (self.layout.tensor - 1)
        return self._send("tensor/", hops, self.layout.tensor > self.hardware.per_node)

    def _data(self, ranks: int, spans_nodes: bool) -> tuple[float, float]:
        """Seconds to reduce, and to gather, over `ranks` data- and context-parallel ranks."""
        if ranks == 1:
            return 0.0, 0.0
        reduced = sum(
            size
            for key, size in self.sent.items()
            if key.startswith(("data/reduce_scatter/", "data/all_reduce/"))
        )
        gathered = sum(v for key, v in self.sent.items() if key.startswith("data/all_gather/"))
        elements = self.buffers.gradient_elements + self.buffers.sketch_elements
        bucket = data_parallel.ddp_config(self.cfg.parallel, ranks).bucket_size
        buckets = math.ceil(elements / bucket)
        gathers = len(self.stage.chunks)
        if "data/all_gather/master_rows" in self.sent:
            gathers += len(self.stage.targets)  # each target's rows by themselves
        return (
            self.seconds(reduced, buckets * (ranks - 1), spans_nodes),
            self.seconds(gathered, gathers * (ranks - 1), spans_nodes),
        )

    def rollout(self, mean_response: float) -> float:
        """Seconds to generate a step's responses."""
        cfg = self.cfg
        if cfg.algorithm.name == "sft":
            return 0.0
        replicas = self.layout.data * self.layout.context
        share = math.ceil(cfg.train.prompts_per_step * cfg.train.responses_per_prompt / replicas)
        batch = min(share, cfg.rollout.batch_size)
        length = mean_response * cfg.rollout.sampling.max_tokens
        weights = sum(s.numel for s in self.stage.all) * BYTES[cfg.train.precision]
        full = cfg.rollout.batch_size * cfg.train.seq_length
        cache = self.passes.rollout_cache() * batch * length / 2 / full
        memory = self.efficiency.memory * self.hardware.memory_rate
        compute = self._forward_flops(batch) / self.flops
        overhead = self.efficiency.decode_overhead_s * self.stage.layers
        if self.layout.tensor > 1:
            hops = 2 * self.stage.layers * 2 * (self.layout.tensor - 1)
            overhead += hops * self.efficiency.link_latency_s
        token = max((weights + cache) / memory, compute) + overhead
        rounds = math.ceil(share / batch)
        return rounds * length * token * self.layout.pipeline
