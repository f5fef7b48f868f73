"""Layouts, and the parameters of a dense GPT that each rank of one holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.config import Config
from megatron_logra.distributed import check_layout
from megatron_logra.errors import UserError
from megatron_logra.model.context_parallel import length_multiple
from megatron_logra.model.gpt import GPTArguments, transformer_config
from megatron_logra.model.vocabulary import padded_size

Kind = Literal["logra", "adam"]
"""Values of `optimizer.kind`."""
BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a number, by the configuration's names of types."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups into which the ranks are divided."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    sequence: bool = False

    @property
    def shards(self) -> int:
        """Ranks that hold the same part of the model: data- times context-parallel ones."""
        return self.data * self.context

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.shards

    @property
    def positions_split(self) -> int:
        """Tensor-parallel ranks over which the positions between linears are divided."""
        return self.tensor if self.sequence else 1

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank; Megatron counts tensor, context, data, then pipeline ranks."""
        return rank // (self.tensor * self.shards)

    def shard(self, rank: int) -> int:
        """Place of a rank among those that hold the same part of the model."""
        return rank // self.tensor % self.shards


def layout_of(cfg: Config, ranks: int | None = None) -> Layout:
    """The layout of `ranks` ranks under `parallel`; None means as few as it takes.

    Raises:
        UserError: the number of ranks does not fit.
    """
    parallel = cfg.parallel
    replica = parallel.tensor * parallel.pipeline * parallel.context
    ranks = max(replica, parallel.expert) if ranks is None else ranks
    check_layout(parallel, ranks)
    return Layout(
        parallel.tensor,
        parallel.pipeline,
        parallel.context,
        ranks // replica,
        parallel.sequence,
    )


@dataclass(frozen=True)
class Shape:
    """One parameter."""

    name: str
    """Name of its module, and `.bias` for a bias."""
    size: tuple[int, ...]
    """Its shape, over all tensor-parallel ranks."""
    split: int | None = None
    """Dimension that is divided over tensor-parallel ranks; None: every rank holds all of it."""
    tied: bool = False
    """Whether first and last pipeline stage hold a copy each."""

    @property
    def short_name(self) -> str:
        """Last component of the module's name."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def numel(self) -> int:
        """Number of elements over all tensor-parallel ranks."""
        return math.prod(self.size)

    def on_rank(self, tensor: int) -> Shape:
        """The part of one of `tensor` tensor-parallel ranks."""
        if self.split is None:
            return self
        size = list(self.size)
        size[self.split] //= tensor
        return Shape(self.name, tuple(size), self.split, self.tied)


def parameter_shapes(
    config: TransformerConfig,
    arguments: GPTArguments,
    stage: int | None = None,
    chunk: int = 0,
) -> list[Shape]:
    """Parameters of a dense GPT in the order of the model.

    Args:
        stage: pipeline stage; None gives those of the whole model.
        chunk: which of the stage's model chunks.
    """
    stages = 1 if stage is None else config.pipeline_model_parallel_size
    last = stage is None or (stage == stages - 1 and chunk == chunks_of(config) - 1)
    hidden, tied = config.hidden_size, arguments.share_embeddings_and_output_weights
    tensor = config.tensor_model_parallel_size
    vocabulary = (padded_size(arguments.vocab_size, tensor), hidden)
    shapes = []
    if not stage and not chunk:
        shapes.append(Shape("embedding.word_embeddings", vocabulary, 0, tied and stages > 1))
    layers = range(config.num_layers) if stage is None else layers_of(config, stage, chunk)
    for index in layers:
        shapes += _layer_shapes(config, f"decoder.layers.{index}", bool(arguments.post_layernorms))
    if last:
        shapes += _norm(config, "decoder.final_layernorm", hidden)
        if not tied or stages > 1:
            shapes.append(Shape("output_layer", vocabulary, 0, tied))
    return shapes


def chunks_of(config: TransformerConfig) -> int:
    """Model chunks on each pipeline rank."""
    return config.virtual_pipeline_model_parallel_size or 1


def layers_of(config: TransformerConfig, stage: int, chunk: int = 0) -> range:
    """Numbers of the layers that Megatron puts into a model chunk of a pipeline stage.

    Raises:
        UserError: the stages do not divide the layers.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    try:
        counts = [
            get_num_layers_to_build(config, number if virtual else None, rank)
            for number in range(chunks_of(config))
            for rank in range(config.pipeline_model_parallel_size)
        ]
    except AssertionError:
        raise UserError(
            f"parallel.pipeline: {config.pipeline_model_parallel_size} does not divide the model's "
            f"num_layers={config.num_layers}"
        ) from None
    place = chunk * config.pipeline_model_parallel_size + stage
    return range(sum(counts[:place]), sum(counts[: place + 1]))


def _layer_shapes(config: TransformerConfig, at: str, post_norms: bool) -> list[Shape]:
    hidden, kv, ffn = config.hidden_size, config.kv_channels, config.ffn_hidden_size
    heads, groups, bias = (
        config.num_attention_heads,
        config.num_query_groups,
        config.add_bias_linear,
    )
    assert kv is not None and ffn is not None and groups is not None
    inner = 2 * ffn if config.gated_linear_unit else ffn
    attention = f"{at}.self_attention"
    shapes = _norm(config, f"{at}.input_layernorm", hidden)
    shapes += _row_parallel(f"{attention}.linear_proj", hidden, heads * kv, bias)
    shapes += _column_parallel(
        f"{attention}.linear_qkv", (heads + 2 * groups) * kv, hidden, bias or config.add_qkv_bias
    )
    if config.qk_layernorm:
        shapes += _norm(config, f"{attention}.q_layernorm", kv)
        shapes += _norm(config, f"{attention}.k_layernorm", kv)
    if post_norms:
        shapes += _norm(config, f"{attention}.post_layernorm", hidden)
    shapes += _norm(config, f"{at}.pre_mlp_layernorm", hidden)
    shapes += _column_parallel(f"{at}.mlp.linear_fc1", inner, hidden, bias)
    shapes += _row_parallel(f"{at}.mlp.linear_fc2", hidden, ffn, bias)
    return shapes + (_norm(config, f"{at}.mlp.post_layernorm", hidden) if post_norms else [])


def _norm(config: TransformerConfig, name: str, size: int) -> list[Shape]:
    shapes = [Shape(name, (size,))]
    if config.normalization == "LayerNorm":
        shapes.append(Shape(f"{name}.bias", (size,)))
    return shapes


def _column_parallel(name: str, out: int, into: int, bias: bool) -> list[Shape]:
    weight = Shape(name, (out, into), 0)
    return [weight, Shape(f"{name}.bias", (out,), 0)] if bias else [weight]


def _row_parallel(name: str, out: int, into: int, bias: bool) -> list[Shape]:
    weight = Shape(name, (out, into), 1)
    return [weight, Shape(f"{name}.bias", (out,))] if bias else [weight]


@dataclass(frozen=True)
class Chunk:
    """The parameters of a model chunk on each of its tensor-parallel ranks."""

    layers: int
    """Transformer layers."""
    targets: list[Shape]
    """Weights that are sketched."""
    trained: list[Shape]
    """Weights that Adam trains."""
    frozen: list[Shape]
    """The rest."""


@dataclass(frozen=True)
class Stage:
    """The parameters of one pipeline stage on each of its tensor-parallel ranks."""

    number: int
    chunks: list[Chunk]
    """One, or several with interleaved stages."""

    @property
    def layers(self) -> int:
        """Transformer layers."""
        return sum(chunk.layers for chunk in self.chunks)

    @property
    def targets(self) -> list[Shape]:
        """Weights that are sketched."""
        return [shape for chunk in self.chunks for shape in chunk.targets]

    @property
    def trained(self) -> list[Shape]:
        """Weights that Adam trains."""
        return [shape for chunk in self.chunks for shape in chunk.trained]

    @property
    def frozen(self) -> list[Shape]:
        """The rest."""
        return [shape for chunk in self.chunks for shape in chunk.frozen]

    @property
    def all(self) -> list[Shape]:
        """All of them, in no particular order."""
        return [*self.targets, *self.trained, *self.frozen]


class Model:
    """The configured model under a layout, with its shapes checked.

    Args:
        cfg: the configuration.
        layout: the layout.

    Raises:
        UserError: the model does not fit the layout, or the sketch section the model.
    """

    def __init__(self, cfg: Config, layout: Layout) -> None:
        self.cfg = cfg
        self.layout = layout
        # A plan needs no GPU, and shapes do not depend on the implementation.
        anywhere = cfg.model.model_copy(update={"implementation": "auto"})
        self.config, self.arguments = transformer_config(cfg.model_copy(update={"model": anywhere}))
        self.whole = parameter_shapes(self.config, self.arguments)
        self._check_layout()
        self._check_sketch()

    def stage(self, number: int, kind: Kind) -> Stage:
        """What a pipeline stage holds when it is trained by `kind`."""
        count = chunks_of(self.config)
        return Stage(number, [self._chunk(number, chunk, kind) for chunk in range(count)])

    def _chunk(self, stage: int, chunk: int, kind: Kind) -> Chunk:
        shapes = [
            shape.on_rank(self.layout.tensor)
            for shape in parameter_shapes(self.config, self.arguments, stage, chunk)
        ]
        targets = [s for s in shapes if kind == "logra" and self._is_target(s)]
        others = [s for s in shapes if s not in targets]
        train_others = kind == "adam" or self.cfg.optimizer.non_targets == "adam"
        return Chunk(
            len(layers_of(self.config, stage, chunk)),
            targets,
            others if train_others else [],
            [] if train_others else others,
        )

    def _is_target(self, shape: Shape) -> bool:
        return len(shape.size) == 2 and shape.short_name in self.cfg.sketch.targets

    def _check_layout(self) -> None:
        config, layout = self.config, self.layout
        divided = {
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.ffn_hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_query_groups,
        }
        for name, size in divided.items():
            if size % layout.tensor:
                raise UserError(
                    f"parallel.tensor: {layout.tensor} does not divide the model's {name}={size}"
                )
        length = self.cfg.train.seq_length
        parts = length_multiple(layout.context, layout.positions_split)
        if length % parts:
            raise UserError(
                f"train.seq_length: {length} cannot be divided over sequence- and context-parallel "
                f"ranks; expected a multiple of {parts}"
            )
        layers_of(config, layout.pipeline - 1)

    def _check_sketch(self) -> None:
        matrices = [shape for shape in self.whole if len(shape.size) == 2]
        known = sorted({shape.short_name for shape in matrices})
        for wanted in self.cfg.sketch.targets:
            if wanted not in known:
                raise UserError(
                    f"sketch.targets: no linear is named {wanted!r}; expected names among: "
                    + ", ".join(known)
                )
        rank = self.cfg.sketch.rank
        for shape in matrices:
            if self._is_target(shape) and rank > min(shape.size):
                d, k = shape.size
                raise UserError(
                    f"sketch.rank: {rank} exceeds layer {shape.name} of {d} × {k}; expected at "
                    f"most {min(d, k)}"
                )
