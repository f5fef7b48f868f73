"""GPT models out of the configuration, and the one way to run them with a head of one's own."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from megatron_logra import platform
from megatron_logra.config import Config
from megatron_logra.errors import UserError
from megatron_logra.model import gemma3, huggingface
from megatron_logra.model.parameters import initialise
from megatron_logra.model.specs import Implementation, block_spec, choose_implementation
from megatron_logra.model.vocabulary import hide_padding, padded_size

LogitsFn = Callable[[Tensor], Tensor]
"""Hidden states [n, 1, h] or [s, b, h] → logits [n, 1, vocab/tp] or [s, b, vocab/tp]."""
Head = Callable[[Tensor, LogitsFn], Any]
"""Called on the last stage with the final hidden states [s, b, h] and the way to their logits."""


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": nn.functional.relu,
}
"""Values of `activation_func`."""

MODERN_DEFAULTS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""What today's decoder models use; taken where the spec does not say otherwise."""

SET_ELSEWHERE: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "sequence_parallel": "parallel.sequence",
    "params_dtype": "train.precision",
    "pipeline_dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "recompute_granularity": "train.recompute",
    "recompute_method": "train.recompute",
    "recompute_num_layers": "train.recompute",
    "transformer_impl": "model.implementation",
}
"""Fields of TransformerConfig that follow from another key of the configuration."""

UNSUPPORTED = (
    "num_moe_experts",
    "multi_latent_attention",
    "mtp_num_layers",
    "qk_l2_norm",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "heterogeneous_block_specs",
    "is_hybrid_model",
    "fused_residual_rmsnorm",
    "use_kitchen",
    "fp8",
    "fp4",
    "pipeline_model_parallel_layout",
)
"""Fields that would need other layers than the dense ones of `specs`."""


@dataclasses.dataclass(frozen=True)
class GPTArguments:
    """What GPTModel needs beyond Megatron's TransformerConfig; field names as in Megatron."""

    vocab_size: int
    """Rows of the embedding, without padding."""
    max_sequence_length: int
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    """Llama 3's scaling of the low frequencies, by `rope_scaling_factor`."""
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    """Linear scaling: positions are divided by it."""
    yarn_rotary_scaling_factor: float | None = None
    """YaRN: factor s by which the low frequencies are divided; None is no YaRN."""
    yarn_original_max_position_embeddings: int | None = None
    """YaRN: sequence length of the training before."""
    yarn_beta_fast: float = 32.0
    """YaRN: frequencies of more rotations over that length are kept."""
    yarn_beta_slow: float = 1.0
    """YaRN: frequencies of fewer are divided by s."""
    yarn_mscale: float | None = None
    """YaRN: m of the factor (0.1 m ln s + 1)/(0.1 m' ln s + 1) on queries and keys."""
    yarn_mscale_all_dim: float | None = None
    """YaRN: m'; with both None the factor is 0.1 ln s + 1."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: whether the bounds between frequencies are rounded outwards."""
    rotary_base_local: float | None = None
    """Rotary base of the layers with a sliding window, which no scaling reaches (Gemma 3)."""
    post_layernorms: bool | None = None
    """Norms after attention and MLP, too, before their outputs are added (Gemma 3)."""
    scale_embeddings: bool | None = None
    """Embeddings are multiplied by √hidden_size, rounded to their type (Gemma 3)."""
    share_embeddings_and_output_weights: bool = False
    seed: int = 0
    """Seed of the random weights (train.seed)."""


def transformer_config(cfg: Config) -> tuple[TransformerConfig, GPTArguments]:
    """Megatron's configuration of the model in `cfg`: from `model.spec` or `model.hf`.

    Raises:
        UserError: a key is unknown or unsupported, a value is of the wrong type or impossible.
    """
    if cfg.model.hf is not None:
        source, given = cfg.model.hf, huggingface.read_spec(cfg.model.hf)
    else:
        source, given = "model.spec", dict(cfg.model.spec or {})
    fields = _split(source, given)
    arguments = _gpt_arguments(source, given, cfg)
    fields |= run_fields(cfg)
    chunks = cfg.parallel.pipeline * cfg.parallel.virtual_pipeline
    if fields["num_layers"] % chunks and not _sets_stages(fields):
        name = "pipeline" if cfg.parallel.virtual_pipeline == 1 else "pipeline · virtual_pipeline"
        raise UserError(
            f"parallel.{name}: {chunks} does not divide the model's "
            f"num_layers={fields['num_layers']}"
        )
    try:
        config = TransformerConfig(**fields)
    except (ValueError, AssertionError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from None
    if arguments.yarn_rotary_scaling_factor is not None:
        # Megatron's dense layers look for these on the configuration, which has no such fields.
        for name, value in dataclasses.asdict(arguments).items():
            if name.startswith("yarn_"):
                setattr(config, name, value)
    return config, arguments


def run_fields(cfg: Config) -> dict[str, Any]:
    """Fields of TransformerConfig that follow from the run, whatever the model: see SET_ELSEWHERE.

    Raises:
        UserError: the wanted implementation cannot run here.
    """
    precision = torch.bfloat16 if cfg.train.precision == "bf16" else torch.float32
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": cfg.parallel.tensor,
        "pipeline_model_parallel_size": cfg.parallel.pipeline,
        "virtual_pipeline_model_parallel_size": (
            cfg.parallel.virtual_pipeline if cfg.parallel.virtual_pipeline > 1 else None
        ),
        "context_parallel_size": cfg.parallel.context,
        "expert_model_parallel_size": cfg.parallel.expert,
        "sequence_parallel": cfg.parallel.sequence,
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        # Sequences differ in length from one micro-batch to the next. Between two ranks with
        # several chunks each, Megatron cannot tell the announced lengths of both directions apart.
        "variable_seq_lengths": cfg.parallel.pipeline > 1 and cfg.parallel.virtual_pipeline == 1,
        # For the same reason it sends tensors of the interleaved schedule in a fixed order.
        "overlap_p2p_comm": cfg.parallel.virtual_pipeline > 1,
        "batch_p2p_comm": cfg.parallel.virtual_pipeline == 1,
        # Of no use without experts, but the default does not go with the line above.
        "moe_token_dispatcher_type": "alltoall",
        # Losses and gradients are normalised by the tokens of the whole global batch.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        # Weights are filled by `parameters.initialise` or from a file, the same for every layout.
        "perform_initialization": False,
        "use_cpu_initialization": platform.device().type == "cpu",
        "transformer_impl": choose_implementation(cfg.model.implementation),
    }
    if cfg.train.recompute != "none":
        fields["recompute_granularity"] = cfg.train.recompute
    if cfg.train.recompute == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return fields


def build_chunks(
    config: TransformerConfig,
    arguments: GPTArguments,
    pg: ProcessGroupCollection,
    *,
    random: bool = True,
) -> list[GPTModel]:
    """This rank's part of the model: one chunk, or several with interleaved pipeline stages.

    The random weights depend on the seed alone; without `random`, for weights that are still to
    come, matrices are zero. Parameters have `config.params_dtype`; the chunks are in training mode.
    """
    count = config.virtual_pipeline_model_parallel_size
    return [
        build_model(config, arguments, pg, vp_stage=number if count else None, random=random)
        for number in range(count or 1)
    ]


def build_model(
    config: TransformerConfig,
    arguments: GPTArguments,
    pg: ProcessGroupCollection,
    implementation: Implementation | None = None,
    vp_stage: int | None = None,
    random: bool = True,
) -> GPTModel:
    """One chunk of this rank's part of the model (see `build_chunks`).

    Args:
        implementation: overrides the layer implementation chosen in `config`.
        vp_stage: which chunk, where there are several.
        random: fill the matrices with random numbers, which takes a while, and not with zeros.
    """
    chosen = implementation or typing.cast(Implementation, config.transformer_impl)
    stage, stages = pg.pp.rank(), pg.pp.size()
    last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
    model = GPTModel(
        config,
        block_spec(config, chosen, stage, vp_stage, gemma3=gemma3.wanted(arguments)),
        vocab_size=padded_size(arguments.vocab_size, pg.tp.size()),
        max_sequence_length=arguments.max_sequence_length,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == stages - 1 and (vp_stage or 0) == last_chunk,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=arguments.share_embeddings_and_output_weights,
        position_embedding_type="rope" if arguments.yarn_rotary_scaling_factor is None else "yarn",
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        rope_scaling=arguments.rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        seq_len_interpolation_factor=arguments.seq_len_interpolation_factor,
        pg_collection=pg,
    )
    gemma3.complete(model, arguments)
    initialise(prepared(model, arguments), arguments.seed if random else None)
    return model


def prepared(model: GPTModel, arguments: GPTArguments) -> GPTModel:
    """A chunk that has just been built, with the hooks that training with sketches needs."""
    hide_padding(model, arguments.vocab_size)
    if model.pre_process and model.config.recompute_granularity == "full":
        model.embedding.register_forward_hook(_require_gradient)
    return model


def forward_head(model: nn.Module, tokens: Tensor, position_ids: Tensor, head: Head) -> Any:
    """Run a model chunk with a causal mask and hand the final hidden states to `head`.

    Rows may be padded on the right: what comes after a position never changes it. Positions count
    from 0 in every row (Megatron's rotary embedding knows no others). Under context parallelism a
    rank feeds, and gets, its own positions (see `context_parallel`).

    Args:
        model: a GPTModel, or a wrapper that forwards its arguments to one (such as DDP).
        tokens: [b, s] int64.
        position_ids: [b, s] int64.
        head: called with the hidden states [s, b, h] in the parameters' type.

    Returns:
        What `head` returns; on a pipeline stage that is not the last, the hidden states [s, b, h].
    """
    return model(
        tokens, position_ids, None, output_processor=_call_head, output_processor_context=head
    )


def _call_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    context: Head,
    **_: Any,
) -> Any:
    """Megatron's output_processor: `context` is the head."""
    split = bool(output_layer.sequence_parallel)
    if split:
        # The head picks positions, so it sees all of them; the output layer's own backward then
        # sums the ranks' gradients, and each keeps those of its positions.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )

    def logits(hidden: Tensor) -> Tensor:
        output_layer.sequence_parallel = False
        try:
            result, _bias = output_layer(hidden, weight=output_weight)
        finally:
            output_layer.sequence_parallel = split
        return scale_logits(result)

    return context(hidden_states, logits)


def _require_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    """Make the embedding's output ask for a gradient.

    Megatron's full recomputation runs each layer inside an autograd function, which only takes part
    in the backward pass if its input does. With all weights frozen for autograd nothing would.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _split(source: str, given: dict[str, Any]) -> dict[str, Any]:
    """The checked fields of TransformerConfig in `given`."""
    hints = typing.get_type_hints(TransformerConfig)
    own = {field.name for field in dataclasses.fields(GPTArguments)} - {"seed"}
    known = {field.name for field in dataclasses.fields(TransformerConfig)} | own
    for key in given:
        if key in SET_ELSEWHERE:
            raise UserError(f"{source}.{key}: set it by {SET_ELSEWHERE[key]} instead")
        if key in UNSUPPORTED and given[key]:
            raise UserError(f"{source}.{key}: not supported; expected a dense GPT without it")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see TransformerConfig"
            raise UserError(f"{source}.{key}: unknown key; {hint}")
    for key in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if key not in given:
            raise UserError(f"{source}.{key}: missing")
        if type(given[key]) is not int or given[key] < 1:
            raise UserError(f"{source}.{key}: expected a positive integer, got {given[key]!r}")
    fields = MODERN_DEFAULTS | {
        key: _as_tuple(hints[key], value) for key, value in given.items() if key not in own
    }
    heads, groups = fields["num_attention_heads"], fields.get("num_query_groups")
    if groups is not None and (type(groups) is not int or groups < 1 or heads % groups):
        raise UserError(
            f"{source}.num_query_groups: expected a divisor of num_attention_heads={heads}, "
            f"got {groups!r}"
        )
    activation = fields["activation_func"]
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise UserError(f"{source}.activation_func: expected {expected}, got {activation!r}")
    for key in fields.keys() - {"activation_func"}:
        _check_type(f"{source}.{key}", hints[key], fields[key])
    return fields | {"activation_func": ACTIVATIONS[activation]}


def _gpt_arguments(source: str, given: dict[str, Any], cfg: Config) -> GPTArguments:
    hints = typing.get_type_hints(GPTArguments)
    own = {key: given[key] for key in hints if key in given}
    own.setdefault("max_sequence_length", cfg.train.seq_length)
    for key, value in own.items():
        _check_type(f"{source}.{key}", hints[key], value)
    arguments = GPTArguments(**own, seed=cfg.train.seed)
    check_length(source, arguments, cfg)
    return arguments


def check_length(source: str, arguments: GPTArguments, cfg: Config) -> None:
    """Raise `UserError` if the run's sequences are longer than the model of `source` takes."""
    if cfg.train.seq_length > arguments.max_sequence_length:
        raise UserError(
            f"train.seq_length={cfg.train.seq_length}: the model of {source} takes at most "
            f"{arguments.max_sequence_length} tokens"
        )


def _sets_stages(fields: dict[str, Any]) -> bool:
    """Whether the model says itself how its layers are laid out over pipeline stages."""
    return any(
        fields.get(name)
        for name in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    )


def _as_tuple(hint: Any, value: Any) -> Any:
    """A list as a tuple where that is wanted and a list is not: YAML has no tuples."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    wanted = {typing.get_origin(kind) for kind in (typing.get_args(hint) if union else (hint,))}
    as_tuple = isinstance(value, list) and tuple in wanted and list not in wanted
    return tuple(value) if as_tuple else value


def _check_type(key: str, hint: Any, value: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{key}: {error.errors()[0]['msg']}, got {value!r}") from None
