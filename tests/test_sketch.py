"""A sketch is the dense gradient times Aᵀ, and nothing dense exists."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import tiny_config
from reference import Reference, config_for, make_batches, make_checkpoint
from training import backward, make_learner

from megatron_logra import planner
from megatron_logra.errors import UserError
from megatron_logra.sketch.capture import SketchCapture, round_to_bf16

LENGTHS = [[17, 9], [12, 20], [5, 31]]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def dense_projections(capture: SketchCapture) -> dict[str, torch.Tensor]:
    """A [r, k] of every target, float64, by the weight's name."""
    projections = capture.projections
    return {
        f"{target.name}.weight": projections.transposed(i, torch.float64).t() * projections.scale
        for i, target in enumerate(capture.targets)
    }


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_sketch_equals_dense_gradient_times_projection(
    kind, recompute, distribution, tmp_path, pg, generator
):
    tied = kind == "qwen2"
    make_checkpoint(tmp_path, kind, tied)
    cfg = config_for(
        tmp_path, train={"recompute": recompute}, sketch={"distribution": distribution}
    )
    learner = make_learner(cfg, pg)
    batches = make_batches(generator, LENGTHS)
    backward(learner, batches)
    capture = learner.sketch.capture
    reference = Reference(tmp_path, learner.chunks[0].config, tied)
    gradients = reference.gradients(batches)
    a = dense_projections(capture)
    assert {f"{t.name}.weight" for t in capture.targets} == set(gradients)
    for target in capture.targets:
        name = f"{target.name}.weight"
        assert relative_error(target.sketch, gradients[name] @ a[name].t()) < 1e-5, name


class NormedLinear(torch.nn.Module):
    """A linear with a norm inside, by the names of Transformer Engine's."""

    def __init__(self, normalization: str, zero_centered: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.normalization, self.zero_centered_gamma, self.eps = normalization, zero_centered, 1e-3
        for name, shape in (("weight", (6, 9)), ("layer_norm_weight", 9), ("layer_norm_bias", 9)):
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        gamma = self.layer_norm_weight + int(self.zero_centered_gamma)
        x = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * gamma
        if self.normalization == "LayerNorm":
            x = x + self.layer_norm_bias
        return x @ self.weight.t()


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_sketch_is_of_what_a_linear_multiplies_behind_its_own_norm(
    normalization, zero_centered, pg, generator
):
    model = torch.nn.Module()
    model.linear_qkv = linear = NormedLinear(normalization, zero_centered, generator)
    x, weights = (torch.randn(5, 2, n, generator=generator) for n in (9, 6))
    dense = torch.autograd.grad((linear(x) * weights).sum(), linear.weight)[0].double()
    config = tiny_config({}, sketch={"rank": 4, "targets": ["linear_qkv"]}).sketch
    capture = SketchCapture([model], config, torch.float32, tp_group=pg.tp)
    capture.projections.redraw(0)
    (target,) = capture.targets
    target.proxy.main_grad = torch.zeros_like(target.proxy)
    (linear(x) * weights).sum().backward()
    a = dense_projections(capture)[f"{target.name}.weight"]
    assert relative_error(target.sketch, dense @ a.t()) < 1e-5


def test_one_wrong_token_would_be_noticed(tmp_path, pg, generator):
    """The tolerance above is tight: a change of one token's weight by 1 % is far outside."""
    make_checkpoint(tmp_path, "qwen3", False)
    learner = make_learner(config_for(tmp_path), pg)
    batches = make_batches(generator, LENGTHS)
    batches[1].weights[1, 15] = 1.0
    backward(learner, batches)
    target = learner.sketch.capture.targets[0]
    before = target.sketch.clone()
    batches[1].weights[1, 15] = 1.01
    backward(learner, batches)
    assert relative_error(target.sketch, before.double()) > 1e-4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_input_gradients_are_unchanged_by_the_capture(recompute, tmp_path, pg, generator):
    """∂loss/∂embedding of the sketched model equals that of the plain dense one."""
    make_checkpoint(tmp_path, "qwen3", False)
    (batch,) = make_batches(generator, [[17, 9]])

    def embedding_gradient(kind: str) -> torch.Tensor:
        cfg = config_for(tmp_path, train={"recompute": recompute}, optimizer={"kind": kind})
        learner = make_learner(cfg, pg)
        found = []

        def keep(_module, _inputs, output):
            if not output.requires_grad:
                output.requires_grad_(True)
            output.register_hook(lambda grad: found.append(grad.clone()))

        learner.chunks[0].module.embedding.register_forward_hook(keep)
        backward(learner, [batch])
        return found[-1]

    sketched, dense = embedding_gradient("logra"), embedding_gradient("adam")
    assert relative_error(sketched, dense.double()) < 1e-6


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_trained_beside_sketches_has_its_dense_gradient(recompute, pg, generator):
    """Norms, embeddings and all biases, those that sketched linears add themselves included."""
    batches = make_batches(generator, LENGTHS)
    gradients = []
    for kind in ("logra", "adam"):
        cfg = tiny_config(
            {"add_bias_linear": True, "add_qkv_bias": True},
            optimizer={"kind": kind, "non_targets": "adam"},
            sketch={"rank": 16},
            train={"recompute": recompute},
        )
        learner = make_learner(cfg, pg)
        backward(learner, batches)
        named = learner.chunks[0].module.named_parameters()
        gradients.append({name: p.main_grad.clone() for name, p in named if p.requires_grad})
    beside, dense = gradients
    assert sum(name.endswith("bias") for name in beside) == 2 * 4
    for name, gradient in beside.items():
        assert gradient.any()
        assert relative_error(gradient, dense[name].double()) < 1e-5, name


@pytest.mark.parametrize("non_targets", ["freeze", "adam"])
def test_targets_have_no_gradient_anywhere(non_targets, tmp_path, pg, generator):
    make_checkpoint(tmp_path, "qwen3", False)
    learner = make_learner(config_for(tmp_path, optimizer={"non_targets": non_targets}), pg)
    backward(learner, make_batches(generator, LENGTHS))
    weights = [target.weight for target in learner.sketch.capture.targets]
    ddp = learner.chunks[0]
    for weight in weights:
        assert not weight.requires_grad and weight.grad is None
        assert not hasattr(weight, "main_grad")
        assert all(weight not in buffer.param_index_map for buffer in ddp.buffers)
    others = [p for p in ddp.module.parameters() if all(p is not w for w in weights)]
    assert all(p.requires_grad == (non_targets == "adam") for p in others)
    assert sum(len(buffer.params) for buffer in ddp.buffers) == (
        len(others) if non_targets == "adam" else 0
    )


def test_backward_keeps_projections_and_not_the_inputs_of_linears(tmp_path, pg, generator):
    """What sketched linears save for the backward is [n, r] and the weight, never [n, k]."""
    make_checkpoint(tmp_path, "qwen3", False)
    learner = make_learner(config_for(tmp_path), pg)
    (batch,) = make_batches(generator, [[17, 9]])
    inputs = []
    for _, module in learner.chunks[0].named_modules():
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2:
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    saved: list[int] = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    from megatron_logra.model.gpt import forward_head

    names = {"linear_proj", "linear_fc2"}  # nothing else keeps the inputs of these two
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward_head(learner.chunks[0], batch.tokens, batch.positions, lambda h, _: h)
    assert names <= set(learner.cfg.sketch.targets)
    widths = {t.columns for t in learner.sketch.capture.targets if t.name.rsplit(".")[-1] in names}
    mine = [x for x in inputs if x.shape[-1] in widths and x.is_floating_point()]
    assert len(mine) == 2 * len(names)
    assert not {x.untyped_storage().data_ptr() for x in mine} & set(saved)


def test_capture_is_silent_without_gradients(tmp_path, pg, generator):
    make_checkpoint(tmp_path, "qwen3", False)
    learner = make_learner(config_for(tmp_path), pg)
    (batch,) = make_batches(generator, [[17, 9]])
    learner.zero_grad()
    from megatron_logra.model.gpt import forward_head

    with torch.no_grad():
        forward_head(learner.chunks[0], batch.tokens, batch.positions, lambda h, _: h)
    assert all(not target.sketch.any() for target in learner.sketch.capture.targets)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sketch": {"rank": 49}}, ["sketch.rank: 49 exceeds layer", "at most 48"]),
        ({"sketch": {"targets": ["linear_qkv", "q_proj"]}}, ["sketch.targets", "'q_proj'"]),
    ],
)
def test_a_sketch_that_does_not_fit_is_one_clear_line(sections, words, tmp_path, pg):
    make_checkpoint(tmp_path, "qwen3", False)
    with pytest.raises(UserError) as error:
        make_learner(config_for(tmp_path, **sections), pg)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


SETTINGS = [
    {},
    {"optimizer": {"non_targets": "adam"}},
    {"optimizer": {"kind": "adam"}},
    {"train": {"precision": "bf16"}},
    {"train": {"precision": "bf16"}, "optimizer": {"master": "replicated"}},
    {"train": {"precision": "bf16"}, "optimizer": {"non_targets": "adam"}},
    {"train": {"precision": "bf16"}, "optimizer": {"kind": "adam"}},
    {"sketch": {"rank": 5, "distribution": "gaussian"}},
    {"sketch": {"targets": ["linear_fc2", "linear_qkv"]}, "step_control": {"factor_dtype": "bf16"}},
]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("sections", SETTINGS, ids=str)
def test_counted_bytes_equal_the_planners(kind, sections, tmp_path, pg, generator):
    make_checkpoint(tmp_path, kind, kind == "qwen2")
    cfg = config_for(tmp_path, **sections)
    learner = make_learner(cfg, pg)
    batches = make_batches(generator, LENGTHS)
    backward(learner, batches)
    from training import probe_of

    assert learner.step(probe_of(batches[0])).applied
    assert learner.memory_bytes() == planner.static_memory(cfg)


def test_rounding_by_chance_is_to_a_neighbour_and_right_on_average(generator):
    values = torch.randn(3, 5, 7, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (3, 5, 7), generator=generator
    )
    drawn = [round_to_bf16(values.clone(), generator).double() for _ in range(4000)]
    mean = torch.stack(drawn).mean(dim=0)
    # bf16's numbers around x > 0 are at most 2⁻⁷ x apart.
    assert all(((d - values).abs() < values.abs() / 128).all() for d in drawn)
    assert ((mean - values).abs() < values.abs() / 128 * 0.05).all()  # six standard errors
    # What is no number stays none, whatever its bits.
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32)
    assert round_to_bf16(bits.view(torch.float32), generator).isnan().all()
    exact = torch.tensor([1.0, -2.5, 0.0, math.inf, -math.inf])
    assert torch.equal(round_to_bf16(exact.clone(), generator).float(), exact)
