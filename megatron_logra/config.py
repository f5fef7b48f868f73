"""The whole configuration as typed objects: read from YAML, checked once, passed on.

An unknown key, a wrong type or an impossible combination raises `UserError` with one line that
names the key. Defaults are the LoGRA paper's where it has one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_logra.errors import UserError


class Section(BaseModel):
    """Base of all sections: no unknown keys, no silent conversions, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Section):
    """Which model is trained: either `hf` or `spec`."""

    hf: str | None = None
    """A Hugging Face directory (config.json, safetensors, tokenizer); its weights are loaded."""
    spec: dict[str, Any] | None = None
    """A randomly initialised model: Megatron's TransformerConfig field names, and GPTModel's
    vocab_size, max_sequence_length, rotary_base and share_embeddings_and_output_weights."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer directory, or `bytes` (one token a byte). Default: that of `hf`."""
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation; `auto` takes Transformer Engine where it and a GPU are present."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.hf is None) == (self.spec is None):
            raise ValueError("exactly one of model.hf and model.spec must be given")
        if self.spec is not None and self.tokenizer is None:
            raise ValueError("model.spec needs model.tokenizer (a directory, or bytes)")
        return self


class ParallelConfig(Section):
    """How the model is laid out over ranks."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel stages."""
    context: int = Field(1, ge=1)
    """Context-parallel ranks."""
    expert: int = Field(1, ge=1)
    """Expert-parallel ranks."""
    sequence: bool = False
    """Sequence parallelism; needs tensor > 1."""


class ScheduleConfig(Section):
    """A learning-rate schedule and what goes with it."""

    lr: float = Field(1e-6, ge=0)
    """Highest learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate after the decay."""
    warmup_steps: int = Field(0, ge=0)
    """Updates of linear warm-up from 0."""
    decay_steps: int | None = Field(None, ge=1)
    """Updates over which the rate decays, the warm-up included. Default: train.steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay λ."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class AdamConfig(ScheduleConfig):
    """Adam: for all parameters (`optimizer.kind: adam`) or the non-targets only."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""


class OptimizerSection(Section):
    """What turns sketches (or gradients) into weight updates."""

    kind: Literal["logra", "adam"] = "logra"
    """`logra`: sketches and RowAdam; `adam`: Megatron's dense DistributedOptimizer."""
    rule: Literal["norm_preserving", "plain", "sgd"] = "norm_preserving"
    """Row-wise rule that makes a direction out of a sketch (method, section 2)."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of RowAdam's second moment."""
    eps: float = Field(1e-8, gt=0)
    """RowAdam's ε."""
    master: Literal["sharded", "replicated"] = "sharded"
    """How bf16 targets keep fp32 precision: an fp32 master, or a 16-bit remainder."""
    non_targets: Literal["freeze", "adam"] = "freeze"
    """What happens to norms, embeddings, biases and the output layer."""
    adam: AdamConfig = AdamConfig()
    """Adam's settings."""


class SketchConfig(Section):
    """Low-rank sketches of the targets' gradients."""

    rank: int = Field(256, ge=1)
    """Sketch rank r."""
    distribution: Literal["rademacher", "gaussian"] = "rademacher"
    """Entries of the projection A: ±1/√r, or N(0, 1/r)."""
    refresh: int = Field(1, ge=1)
    """Updates between two draws of A."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the projections."""
    targets: list[str] = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    """Last components of the module names of the linears that are sketched."""


class StepControlConfig(Section):
    """How far a step goes (method, sections 3 and 4)."""

    mode: Literal["kl_budget", "lr"] = "kl_budget"
    """`kl_budget`: predicted-KL control; `lr`: learning rate, weight decay and clipping."""
    update_ratio: float = Field(6e-5, gt=0)
    """ρ: ‖ΔW‖ / ‖W‖ over all targets before α."""
    kl_budget: float = Field(2e-4, gt=0)
    """KL budget of the first update, nats per token."""
    kl_budget_final: float = Field(2e-5, gt=0)
    """KL budget from update `schedule_steps` on."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the budget between the two; `constant` keeps `kl_budget`."""
    schedule_steps: int = Field(300, ge=1)
    """Updates over which the budget falls."""
    alpha_max: float = Field(3.0, gt=0)
    """Largest α."""
    estimator: Literal["forward_ad"] = "forward_ad"
    """How the change of the logits is predicted: a forward-mode (JVP) pass."""
    probe_responses: int = Field(8, ge=1)
    """Responses of the global batch on which the KL is predicted, evenly spaced by place."""
    probe_max_tokens: int = Field(4096, ge=1)
    """Tokens of each probe response that count; the rest is cut off."""
    mismatch_subtraction: bool = True
    """Subtract the rollout-trainer mismatch from the budget."""
    mismatch_ema: float = Field(0.3, gt=0, le=1)
    """Weight of the newest mismatch in its moving average."""
    budget_floor: float = Field(0.5, gt=0, le=1)
    """Fraction of the budget that the subtraction always leaves."""
    factor_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type to which α·D is rounded before it is applied or sent."""
    realised_kl_interval: int = Field(10, ge=0)
    """Updates between two measurements of the realised KL; 0 never measures."""
    lr: ScheduleConfig = ScheduleConfig()
    """Learning rate, weight decay and clipping of mode `lr`."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    name: Literal["reinforce", "grpo", "sft"] = "reinforce"
    """`reinforce`: running baseline; `grpo`: group-relative; `sft`: supervised."""
    baseline_ema: float = Field(0.1, gt=0, le=1)
    """Weight of the newest batch in REINFORCE's running baseline."""
    failure_reward: float = 0.0
    """Reward of a response whose answer could not be scored at all (empty, cut off, invalid)."""
    normalise_std: bool = True
    """GRPO: divide by the group's standard deviation."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Policy ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Policy ratio is clipped above at 1 + clip_high."""
    importance_truncation: float | None = Field(2.0, gt=0)
    """Truncated importance sampling: largest weight π_trainer/π_rollout; null turns it off."""
    logprob_chunk: int = Field(1024, ge=1)
    """Positions whose logits exist at once (memory: this many rows of the vocabulary)."""


class SamplingConfig(Section):
    """The sampling distribution."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Smallest set of tokens with at least this mass."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    max_tokens: int = Field(1024, ge=1)
    """Largest number of generated tokens."""
    stop: list[str] = []
    """Texts of single tokens that end a response, besides the tokenizer's end tokens."""


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["static"] = "static"
    """`static`: batched generation with a KV cache."""
    placement: Literal["colocated"] = "colocated"
    """`colocated`: the training ranks generate."""
    sync: Literal["shared"] = "shared"
    """`shared`: rollouts read the trainer's own weights."""
    batch_size: int = Field(64, ge=1)
    """Sequences that are decoded at once."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling in training."""


class EnvironmentConfig(Section):
    """One source of problems with its scorer; `environment` takes one or a weighted list."""

    kind: Literal["reasoning_gym", "jsonl", "python"]
    """`reasoning_gym`: a task of that library; `jsonl`: a file; `python`: the user's function."""
    name: str | None = None
    """Name in metrics and samples. Default: the task, the file's stem, or the function."""
    weight: float = Field(1.0, gt=0)
    """Share in a mixture."""
    task: str | None = None
    """reasoning_gym: the task's name."""
    params: dict[str, Any] = {}
    """reasoning_gym: the task's parameters; python: keyword arguments of the function."""
    path: str | None = None
    """jsonl: file with one {"question": …, "answer": …} a line; `messages` instead of `question`
    gives a chat, and `response` a supervised target."""
    function: str | None = None
    """python: `module:function`, called with `params`, returns an object with `problems` (a list
    of {"question", "answer"}) and `score(problem, response_text) -> float`."""
    scorer: Literal["verifier", "math_verify", "exact", "last_integer"] | None = None
    """How a response is scored. Default: reasoning_gym and python use their own `verifier`,
    jsonl `math_verify`. `last_integer` hands the response's last integer to the verifier."""
    system_prompt: str | None = None
    """System message put before the question."""
    suffix: str = ""
    """Text appended to the question, such as an instruction about the form of the answer."""
    held_out_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the problems, chosen by hash, that training never sees."""


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(300, ge=1)
    """Updates."""
    prompts_per_step: int = Field(128, ge=1)
    """Prompts of the global batch."""
    responses_per_prompt: int = Field(1, ge=1)
    """Responses sampled for each prompt."""
    micro_batch_size: int = Field(1, ge=1)
    """Sequences of one forward-backward pass on one rank."""
    seq_length: int = Field(4096, ge=2)
    """Longest sequence, prompt and response together, in tokens."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Type of the weights and activations in forward and backward."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of data order, sampling noise and random weights."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron's recompute_granularity)."""
    max_skipped_in_a_row: int = Field(10, ge=1)
    """Skipped steps in a row after which the run stops with an error."""


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    interval: int = Field(0, ge=0)
    """Updates between two evaluations; 0 evaluates only before and after training."""
    at_start: bool = True
    """Evaluate before the first update."""
    at_end: bool = True
    """Evaluate after the last update."""
    problems: int = Field(128, ge=1)
    """Held-out problems."""
    samples: int = Field(1, ge=1)
    """Sampled responses per problem."""
    greedy: bool = True
    """Also evaluate greedy decoding."""


class CheckpointConfig(Section):
    """Saving and loading."""

    interval: int = Field(50, ge=0)
    """Updates between two saves; 0 saves only at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    save_at_end: bool = True
    """Save after the last update."""
    load: str | None = None
    """Start from the weights of this checkpoint directory (optimizer and data start anew)."""


class LoggingConfig(Section):
    """Where results go."""

    run_dir: str = "runs/default"
    """The run directory."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    rollouts_per_step: int = Field(4, ge=0)
    """Sampled texts written to `rollouts/` each step."""
    rollouts_kept: int = Field(200, ge=1)
    """Step files kept in `rollouts/`."""


class Config(Section):
    """Everything about a run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerSection = OptimizerSection()
    sketch: SketchConfig = SketchConfig()
    step_control: StepControlConfig = StepControlConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: list[EnvironmentConfig] = []
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """`environment` may be one mapping; `algorithm: sft` is `algorithm: {name: sft}`."""
        if isinstance(data, dict):
            data = dict(data)
            if isinstance(data.get("environment"), dict):
                data["environment"] = [data["environment"]]
            if isinstance(data.get("algorithm"), str):
                data["algorithm"] = {"name": data["algorithm"]}
        return data

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        sampling = self.rollout.sampling
        if self.algorithm.name != "sft":
            if sampling.temperature == 0:
                raise ValueError("rollout.sampling.temperature: training needs more than 0")
            if sampling.top_p != 1 or sampling.top_k != 0:
                raise ValueError(
                    "rollout.sampling: training needs the full distribution, whose importance "
                    "ratios are exact: expected top_p 1.0 and top_k 0"
                )
        if self.algorithm.name == "grpo" and self.train.responses_per_prompt < 2:
            raise ValueError("train.responses_per_prompt: grpo needs at least 2")
        if self.parallel.sequence and self.parallel.tensor == 1:
            raise ValueError("parallel.sequence: needs parallel.tensor > 1")
        if self.step_control.kl_budget_final > self.step_control.kl_budget:
            raise ValueError("step_control.kl_budget_final: must not exceed step_control.kl_budget")
        return self


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: 2e-4 is a number, not a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Parse YAML text with YAML 1.2 floats."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `a.b=value` overrides, check everything.

    Raises:
        UserError: the file is missing or malformed, a key is unknown, a value has a wrong type, or
            values contradict each other.
    """
    try:
        data = parse_yaml(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of configuration sections")
    for override in overrides or []:
        _apply_override(data, override)
    return config_from_dict(data)


def config_from_dict(data: dict[str, Any]) -> Config:
    """Check a nested dictionary; raises `UserError` with one line."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, sep, value = override.partition("=")
    if not sep or not key:
        raise UserError(f"{override}: expected KEY=VALUE, such as train.steps=10")
    *parents, last = key.split(".")
    node: Any = data
    for depth, name in enumerate(parents):
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise UserError(f"{key}: {name} is not an index into a list of {len(node)}")
            node = node[int(name)]
            continue
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict | list):
            raise UserError(f"{key}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    try:
        parsed = parse_yaml(value)
    except yaml.YAMLError:
        raise UserError(f"{key}: cannot read the value {value!r}") from None
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            raise UserError(f"{key}: {last} is not an index into a list of {len(node)}")
        node[int(last)] = parsed
    else:
        node[last] = parsed


def _one_line(error: ValidationError) -> str:
    """The first of pydantic's complaints, as `key: what is wrong; what was expected`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(_fields_at(first["loc"][:-1]))
        return f"{key}: unknown configuration key; expected one of: {known}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message
    if first["type"] == "missing":
        return f"{key}: missing"
    return f"{key}: {message}, got {first['input']!r}"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    cls: type[BaseModel] = Config
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = cls.model_fields[part].annotation
        if part == "environment":
            annotation = EnvironmentConfig
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        cls = annotation
    return list(cls.model_fields)


def dump_yaml(config: Config) -> str:
    """The fully resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)
