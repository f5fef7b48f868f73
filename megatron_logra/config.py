"""The whole configuration as typed objects: read from YAML, checked once, passed on.

An unknown key, a wrong type or an impossible combination raises `UserError` with one line that
names the key. Defaults are the LoGRA paper's where it has one.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_logra.errors import UserError


class Section(BaseModel):
    """Base of all sections: no unknown keys, no silent conversions, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Section):
    """Which model is trained: either `hf` or `spec`."""

    hf: str | None = None
    """A Hugging Face directory (config.json, safetensors, tokenizer), or what `convert from-hf`
    made of one; its weights are loaded."""
    spec: dict[str, Any] | None = None
    """A randomly initialised model: Megatron's TransformerConfig field names, and GPTModel's
    vocab_size, max_sequence_length, rotary_base and share_embeddings_and_output_weights."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer directory, a sentencepiece model (FILE.model, with its chat template
    in chat_template.jinja beside it), or `bytes` (one token a byte). Default: that of `hf`."""
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
    virtual_pipeline: int = Field(1, ge=1)
    """Model chunks on each pipeline rank; more than 1 takes Megatron's interleaved schedule."""
    context: int = Field(1, ge=1)
    """Context-parallel ranks."""
    expert: int = Field(1, ge=1)
    """Expert-parallel ranks."""
    sequence: bool = False
    """Sequence parallelism; needs tensor > 1."""
    overlap_grad_reduce: bool | None = None
    """Reduce sketches and gradients over data-parallel ranks while the last micro-batch's backward
    pass still runs. Default: wherever there are several such ranks."""
    bucket_size: int | None = Field(None, ge=1)
    """Numbers that are reduced at once with overlap. Default: 40 million, or a million for each
    data-parallel rank if that is more."""
    timeout_s: float = Field(1800.0, gt=0)
    """Seconds for which a rank waits for another before the run ends; for all to join, at most
    300."""
    optimizer_instances: int = Field(1, ge=1)
    """Groups of data-parallel ranks that each hold the whole optimizer state, such as one a node:
    more memory, and parameters are gathered within a group only."""

    def to_generate(self, tensor: int, pipeline: int) -> ParallelConfig:
        """A layout of such sizes for ranks that only generate, and wait for each other as long."""
        return ParallelConfig(tensor=tensor, pipeline=pipeline, timeout_s=self.timeout_s)

    @property
    def unfit_for_inference(self) -> str | None:
        """The setting that Megatron's dynamic inference engine has no use for, if there is one."""
        for key in ("context", "virtual_pipeline"):
            if getattr(self, key) > 1:
                return f"parallel.{key}={getattr(self, key)}"
        return None


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

    mode: Literal["kl_budget", "fixed_ratio", "lr"] = "kl_budget"
    """`kl_budget`: predicted-KL control; `fixed_ratio`: every update as large as `update_ratio`,
    without control; `lr`: learning rate, weight decay and clipping."""
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
    estimator: Literal["auto", "forward_ad", "finite_difference"] = "auto"
    """How the change of the logits is predicted: by a forward-mode (JVP) pass, or by differences
    over a side path; `auto` takes forward mode where every function of the model has a rule."""
    probe_responses: int = Field(8, ge=1)
    """Responses of the global batch on which the KL is predicted, evenly spaced by place."""
    probe_max_tokens: int = Field(4096, ge=1)
    """Tokens of each probe response that count; the rest is cut off. Also the most positions of one
    forward pass of the probe, unless a single prompt and response have more."""
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
    adaptive: bool = False
    """Divide the budget by the smoothed ratio of realised to predicted KL (`step_control.py`)."""
    adaptive_ema: float = Field(0.3, gt=0, le=1)
    """Weight of the newest ratio in its moving (geometric) average."""
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
    """Policy ratio is clipped below at 1 - clip_low; it is 1 while each batch serves one update."""
    clip_high: float = Field(0.2, ge=0)
    """Policy ratio is clipped above at 1 + clip_high; see clip_low."""
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


class RolloutWorkersConfig(Section):
    """Rollout workers of their own, for `rollout.placement: separate`."""

    count: int = Field(1, ge=1)
    """Workers; each generates for its share of the problems."""
    tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks of each."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages of each."""
    exactness: Literal["fp32", "bf16"] = "fp32"
    """`fp32`: bf16 weights keep the 16 bits they lack, and equal the trainer's; `bf16`: they do
    not, take half the memory of the master away, and drift between refreshes."""
    restarts: int = Field(3, ge=0)
    """Times that a worker which has died is started again by `--nproc`'s launcher."""

    @property
    def ranks(self) -> int:
        """Ranks of each."""
        return self.tensor * self.pipeline


class RolloutLayoutConfig(Section):
    """A layout of their own in which the training ranks generate."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks; all that are left over hold copies, and share the problems."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages."""


class DynamicEngineConfig(Section):
    """What `rollout.engine: dynamic` has besides: a paged KV cache, and CUDA graphs."""

    block_tokens: int = Field(256, ge=1)
    """Tokens of a block; flash-attn wants multiples of 256."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """GiB of keys and values on each rank; where they run out, requests wait or are computed anew.
    Default: room for `batch_size` sequences of full length."""
    prefix_cache: bool = False
    """Share whole blocks of equal beginnings among sequences that are decoded at once, such as
    those of a group."""
    cuda_graphs: int = Field(0, ge=0)
    """Most CUDA graphs of steps that decode, each for a number of requests from `batch_size` down
    by halves; 0 for none. They are captured whenever generation begins. Need flash-attn."""


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["static", "dynamic"] = "static"
    """`static`: batched generation with a KV cache; `dynamic`: megatron-core's engine, continuous
    batching with a paged KV cache."""
    dynamic: DynamicEngineConfig = DynamicEngineConfig()
    """Of the dynamic engine."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: the training ranks generate; `separate`: `workers` do."""
    layout: RolloutLayoutConfig | None = None
    """colocated: generate with a copy of the weights in this layout. Default: with the trainer's
    own, in its layout."""
    sync: Literal["shared", "sketch", "dense"] = "shared"
    """`shared`: rollouts read the trainer's own weights (colocated); `sketch`: workers apply the
    factors of each update (separate); `dense`: workers get whole weights each time (separate), or
    Megatron reshards them to the copy (colocated, with `layout`)."""
    transport: Literal["files", "gloo", "nccl"] = "files"
    """How weights get to separate workers: `files` in `exchange_dir`; `gloo`, `nccl`: over process
    groups, from the trainer's host memory or its GPUs."""
    workers: RolloutWorkersConfig = RolloutWorkersConfig()
    """Rollout workers of their own."""
    exchange_dir: str | None = None
    """Directory in which trainer and workers meet; on several nodes a shared one. Default:
    `exchange` in the run directory."""
    max_lag: int = Field(0, ge=0)
    """Updates by which the policy that samples may be older than the one that is trained: so many
    steps are generated ahead. 0 is strictly on-policy."""
    refresh_interval: int = Field(100, ge=1)
    """Updates between whole weights under `sync: sketch`, from which late workers begin."""
    audit_interval: int = Field(10, ge=0)
    """Updates between comparisons of some weights of the workers' with the trainer's; 0: none."""
    timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a worker's responses, in seconds."""
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
    jsonl `math_verify`. `verifier` sees what stands in the last <answer>…</answer>, if there is
    one (python: the whole response); `last_integer` hands it the response's last integer
    (jsonl: equality with the answer)."""
    system_prompt: str | None = None
    """System message put before the question."""
    suffix: str = ""
    """Text appended to the question, such as an instruction about the form of the answer."""
    held_out_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the problems, chosen by hash, that training never sees."""
    held_out_path: str | None = None
    """jsonl: file of the held-out problems; then `held_out_fraction` does not apply, and questions
    of this file are left out of training."""
    score_time_limit: float = Field(10.0, gt=0)
    """Seconds after which scoring a response is given up and the response is not valid."""


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
    async_save: bool = False
    """Go on training while a checkpoint is written, from a copy in host memory. The last save, and
    that of a stop request, is waited for."""
    load: str | None = None
    """Start from the weights of this checkpoint directory (optimizer and data start anew)."""


class LoggingConfig(Section):
    """Where results go."""

    run_dir: str = "runs/default"
    """The run directory."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: str | None = None
    """Project of Weights & Biases, to which metrics then go, too: offline (in `wandb/`), unless the
    environment's WANDB_MODE says otherwise."""
    telemetry_interval_s: float = Field(1.0, gt=0)
    """Seconds between two samples of host memory and GPU."""
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

    @property
    def generating(self) -> Config:
        """This, with the layout in which the run's ranks generate as `parallel`."""
        layout = self.rollout.layout
        if layout is None:
            return self
        parallel = self.parallel.to_generate(layout.tensor, layout.pipeline)
        return self.model_copy(update={"parallel": parallel})

    @property
    def worker_parallel(self) -> ParallelConfig:
        """The layout of each rollout worker."""
        workers = self.rollout.workers
        return self.parallel.to_generate(workers.tensor, workers.pipeline)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """`environment` may be one mapping; `algorithm: sft` is `algorithm: {name: sft}`."""
        return _expand_short_forms(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _placement(self) -> Config:
        rollout = self.rollout
        if rollout.layout is not None:
            if rollout.placement != "colocated" or rollout.sync != "dense":
                raise ValueError(
                    "rollout.layout: expected with rollout.placement=colocated and "
                    f"rollout.sync=dense, got {rollout.placement} and {rollout.sync}; workers have "
                    "rollout.workers.tensor and .pipeline"
                )
            if self.parallel.virtual_pipeline > 1:
                raise ValueError(
                    f"rollout.layout: parallel.virtual_pipeline={self.parallel.virtual_pipeline} "
                    "cannot be resharded; expected 1"
                )
        elif (rollout.placement == "colocated") != (rollout.sync == "shared"):
            raise ValueError(
                "rollout.sync: expected shared with rollout.placement=colocated (or dense with a "
                "rollout.layout), sketch or dense with separate; got "
                f"{rollout.sync} with {rollout.placement}"
            )
        if rollout.sync == "sketch" and self.optimizer.kind == "adam":
            raise ValueError("rollout.sync: sketch needs optimizer.kind=logra; expected dense")
        if rollout.max_lag and rollout.placement == "colocated":
            raise ValueError("rollout.max_lag: more than 0 needs rollout.placement=separate")
        if rollout.transport != "files" and rollout.placement == "colocated":
            raise ValueError(
                f"rollout.transport: {rollout.transport} needs rollout.placement=separate"
            )
        unfit = self.parallel.unfit_for_inference if rollout.sync == "shared" else None
        if unfit and rollout.engine == "dynamic":
            raise ValueError(f"rollout.engine: dynamic cannot have {unfit}; expected 1, or static")
        if self.algorithm.name == "sft" and rollout.sync != "shared":
            key = "layout:" if rollout.layout is not None else "placement: separate"
            raise ValueError(f"rollout.{key} is of no use to algorithm sft")
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.algorithm.name == "grpo" and self.train.responses_per_prompt < 2:
            raise ValueError("train.responses_per_prompt: grpo needs at least 2")
        if self.parallel.sequence and self.parallel.tensor == 1:
            raise ValueError("parallel.sequence: needs parallel.tensor > 1")
        if self.parallel.virtual_pipeline > 1 and self.parallel.pipeline == 1:
            raise ValueError("parallel.virtual_pipeline: more than 1 needs parallel.pipeline > 1")
        control = self.step_control
        falls = control.mode == "kl_budget" and control.schedule != "constant"
        if falls and control.kl_budget_final > control.kl_budget:
            raise ValueError(
                f"step_control.kl_budget_final: {control.kl_budget_final:g} exceeds "
                f"step_control.kl_budget={control.kl_budget:g}; expected at most that"
            )
        if control.adaptive and (control.mode != "kl_budget" or control.realised_kl_interval == 0):
            raise ValueError(
                "step_control.adaptive: needs mode kl_budget and realised_kl_interval of at least 1"
            )
        return self


def require_trainable(config: Config) -> None:
    """Refuse sampling that responses can be generated with, but not trained on.

    Raises:
        UserError: greedy, top-p or top-k sampling in reinforcement learning.
    """
    sampling = config.rollout.sampling
    if config.algorithm.name == "sft":
        return
    if sampling.temperature == 0:
        raise UserError("rollout.sampling.temperature: training needs more than 0")
    if sampling.top_p != 1 or sampling.top_k != 0:
        raise UserError(
            "rollout.sampling: training needs the full distribution, whose importance ratios are "
            "exact: expected top_p 1.0 and top_k 0"
        )


def require_servable(config: Config, *, follow: bool) -> None:
    """Refuse what `serve` cannot do, before anything is started.

    Raises:
        UserError: a layout that Megatron's inference engine has no use for, or no trainer to
            `follow`.
    """
    unfit = config.generating.parallel.unfit_for_inference
    if unfit is not None:
        raise UserError(f"{unfit}: serve takes 1 only, as Megatron's engine does")
    if follow and config.rollout.placement != "separate":
        raise UserError("--follow: needs rollout.placement=separate, got colocated")


def _expand_short_forms(data: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy in which `environment` is a list and `algorithm` a mapping."""
    data = dict(data)
    if isinstance(data.get("environment"), dict):
        data["environment"] = [data["environment"]]
    if isinstance(data.get("algorithm"), str):
        data["algorithm"] = {"name": data["algorithm"]}
    return data


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats (2e-4 is a number, not a string); a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag.endswith(":merge"):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Parse YAML text with YAML 1.2 floats."""
    return yaml.load(text, Loader=_Loader)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `a.b=value` overrides, check everything.

    A file with the key `base` changes another one, named by its path from there: sections are
    merged, values and lists replaced.

    Raises:
        UserError: the file is missing or malformed, a key is unknown, a value has a wrong type, or
            values contradict each other.
    """
    data = _read(path)
    base = data.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: base: expected a file, got {base!r}")
        below = _read(Path(path).parent / base)
        if "base" in below:
            raise UserError(f"{path}: base: {base} has a base, too; expected a whole configuration")
        data = _merged(_expand_short_forms(below), _expand_short_forms(data))
    for override in overrides or []:
        data = _apply_override(data, override)
    return config_from_dict(data)


def _read(path: str | Path) -> dict[str, Any]:
    """A file's mapping of sections."""
    try:
        data = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; expected a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_yaml_problem(error)}") from None
    if not isinstance(data, dict):
        got = "the file is empty" if data is None else f"got a {type(data).__name__}"
        raise UserError(f"{path}: expected a mapping of configuration sections; {got}")
    return data


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with what `above` says otherwise."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _yaml_problem(error: yaml.YAMLError) -> str:
    """`:LINE: what is wrong`, to be put behind the file's name."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        return f":{error.problem_mark.line + 1}: not valid YAML: {problem}"
    return f": not valid YAML: {' '.join(str(error).split())}"


def config_from_dict(data: dict[str, Any]) -> Config:
    """Check a nested dictionary; raises `UserError` with one line."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def _apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` in which `a.b=value` is set; lists take an index, or none if they have
    one entry (`environment.task` is `environment.0.task`)."""
    key, sep, value = override.partition("=")
    path = key.split(".")
    if not sep or not all(path):
        raise UserError(f"{override}: expected KEY=VALUE, such as train.steps=10")
    try:
        parsed = parse_yaml(value)
    except yaml.YAMLError:
        raise UserError(f"{key}: cannot read the value {value!r}; expected YAML") from None
    data = _expand_short_forms(copy.deepcopy(data))
    if path[0] == "environment" and len(path) > 1 and not data.get("environment"):
        data["environment"] = [{}]
    node: Any = data
    for depth, name in enumerate(path):
        if isinstance(node, list) and len(node) == 1 and not name.isdigit():
            node = node[0]
        at: int | str = name
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise UserError(f"{key}: {name} is not an index into a list of {len(node)}")
            at = int(name)
        elif not isinstance(node, dict):
            raise UserError(f"{key}: {'.'.join(path[:depth])} is a value, not a section")
        elif depth < len(path) - 1 and node.get(name) is None:
            node[name] = {}
        if depth < len(path) - 1:
            node = node[at]
        else:
            node[at] = parsed
    return data


def _one_line(error: ValidationError) -> str:
    """The first of pydantic's complaints, as `key: what is wrong; what was expected`."""
    first = error.errors()[0]
    loc = first["loc"]
    key = ".".join(str(part) for part in loc)
    if first["type"] == "extra_forbidden":
        known = ", ".join(_section_at(loc[:-1]).model_fields)
        return f"{key}: unknown configuration key; expected one of: {known}"
    if first["type"] == "invalid_key":
        known = ", ".join(_section_at(loc[:-1]).model_fields)
        return f"{key}: a configuration key must be a name; expected one of: {known}"
    if first["type"] == "missing":
        section, name = _section_at(loc[:-1]), str(loc[-1])
        purpose = section.model_fields[name].description or _section_at(loc).__doc__ or ""
        return f"{key}: missing; expected: {' '.join(purpose.split())}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if first["type"] == "value_error":
        return message
    if first["type"] == "model_type":
        message = "expected a section (a mapping of keys)"
    got = repr(first["input"])
    return f"{key}: {message}, got {got if len(got) <= 80 else got[:77] + '...'}"


def _section_at(loc: tuple[int | str, ...]) -> type[Section]:
    """The section class that a pydantic error location names."""
    cls: type[Section] = Config
    for part in loc:
        if isinstance(part, int):
            continue
        annotation: Any = cls.model_fields[part].annotation
        if get_origin(annotation) is list:
            (annotation,) = get_args(annotation)
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        cls = annotation
    return cls


def dump_yaml(config: Config) -> str:
    """The fully resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)
