"""A step equals the dense float64 reference, is predicted right, and fails without a trace."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from reference import VOCABULARY, Batch, Reference, config_for, make_batches, make_checkpoint
from test_sketch import LENGTHS, dense_projections, relative_error
from training import backward, make_learner, probe_of

from megatron_logra.config import StepControlConfig
from megatron_logra.optimizer.learner import Learner
from megatron_logra.optimizer.step_control import StepControl


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path, "qwen3", False)
    return tmp_path


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{t.name}.weight": t.weight.detach() for t in learner.sketch.capture.targets}


def snapshot(learner: Learner) -> list[torch.Tensor]:
    """All tensors that a step may change, copied."""
    sketch = learner.sketch
    tensors = [p.detach() for p in learner.chunks[0].parameters()]
    tensors += [*sketch.moments, *(master.value() for master in sketch.masters)]
    tensors += [sketch.capture.projections._data, torch.get_rng_state()]
    if learner.adam is not None:
        for state in learner.adam.optimizer.state.values():
            tensors += [state[key] for key in sorted(state)]
    return [tensor.clone() for tensor in tensors]


def counters(learner: Learner) -> object:
    return copy.deepcopy(
        (
            learner.update,
            learner.sketch.state_dict(),
            [scheduler.state_dict() for scheduler in learner.schedulers],
        )
    )


@pytest.mark.parametrize("rule", ["norm_preserving", "plain", "sgd"])
def test_five_budgeted_updates_equal_the_dense_reference(rule, checkpoint, pg, generator):
    cfg = config_for(
        checkpoint,
        optimizer={"rule": rule},
        step_control={"kl_budget": 1e-5, "kl_budget_final": 1e-6, "schedule_steps": 4},
    )
    learner = make_learner(cfg, pg)
    reference = Reference(checkpoint, learner.chunks[0].config, False)
    alphas = []
    for update in range(5):
        batches = make_batches(generator, LENGTHS)
        a = dense_projections(learner.sketch.capture)
        backward(learner, batches)
        result = learner.step(probe_of(batches[0]))
        gradients = reference.gradients(batches)
        directions = reference.direction(gradients, a, rule, update + 1)
        changes = {name: -d @ a[name] for name, d in directions.items()}
        changes = reference.scaled_to_ratio(changes, 6e-5)
        predicted = reference.predicted_kl(changes, batches[0])
        fraction = 0.5 * (1 - math.cos(math.pi * min(update / 4, 1)))
        budget = 1e-5 + (1e-6 - 1e-5) * fraction
        alpha = min(3.0, math.sqrt(budget / predicted))
        reference.add(changes, alpha)
        assert result.applied and result.kl_budget == pytest.approx(budget, rel=1e-12)
        # `plain` divides by rows' root second moments, which magnifies fp32's rounding where
        # those are small: once in some twenty inputs beyond 1e-4.
        assert result.kl_predicted == pytest.approx(predicted, rel=1e-3)
        assert result.alpha == pytest.approx(alpha, rel=5e-4)
        assert result.update_ratio == pytest.approx(6e-5 * alpha, rel=5e-4)
        alphas.append(alpha)
        for name, weight in weights_of(learner).items():
            assert relative_error(weight, reference.weight(name)) < 1e-6
    start = Reference(checkpoint, learner.chunks[0].config, False)
    for name, weight in weights_of(learner).items():
        moved = reference.weight(name) - start.weight(name)
        assert relative_error(weight.double() - start.weight(name), moved) < 5e-3
    assert min(alphas) < 3  # the budget held at least one step back


@pytest.mark.parametrize("rule", ["norm_preserving", "plain", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_five_updates_by_learning_rate_equal_the_dense_reference(
    rule, clip, checkpoint, pg, generator
):
    lr, decay = {"norm_preserving": 0.1, "plain": 1e-3, "sgd": 0.1}[rule], 0.3
    schedule = {"lr": lr, "weight_decay": decay, "clip_grad": clip, "decay": "linear"}
    cfg = config_for(
        checkpoint,
        optimizer={"rule": rule},
        step_control={"mode": "lr", "lr": schedule | {"decay_steps": 10}},
    )
    learner = make_learner(cfg, pg)
    reference = Reference(checkpoint, learner.chunks[0].config, False)
    for update in range(5):
        batches = make_batches(generator, LENGTHS)
        a = dense_projections(learner.sketch.capture)
        backward(learner, batches)
        result = learner.step(None)
        gradients = reference.gradients(batches)
        norm = math.sqrt(
            sum(float((g @ a[n].t() @ a[n]).square().sum()) for n, g in gradients.items())
        )
        if clip:
            assert norm > clip
            gradients = {n: g * clip / (norm + 1e-6) for n, g in gradients.items()}
        rate = lr * (1 - update / 10)
        directions = reference.direction(gradients, a, rule, update + 1)
        changes = {
            n: -decay * rate * reference.weight(n) - rate * d @ a[n] for n, d in directions.items()
        }
        reference.add(changes, 1.0)
        assert result.lr == pytest.approx(rate, rel=1e-9)
        if clip:
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        for name, weight in weights_of(learner).items():
            assert relative_error(weight, reference.weight(name)) < 1e-5


def test_adam_alone_equals_torch_adamw_in_float64(checkpoint, pg, generator):
    adam = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
    cfg = config_for(checkpoint, optimizer={"kind": "adam", "adam": adam})
    learner = make_learner(cfg, pg)
    reference = Reference(checkpoint, learner.chunks[0].config, False)
    parameters = list(reference.parameters.values())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        batches = make_batches(generator, LENGTHS)
        backward(learner, batches)
        learner.step(None)
        reference.gradients(batches)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    model = dict(learner.chunks[0].module.named_parameters())
    for name in reference.names():
        assert relative_error(model[name].detach(), reference.weight(name)) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma3"])  # qwen2: QKV bias, a tied output
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize(("budget", "tolerance"), [(2e-4, 0.05), (2e-5, 0.02)])
def test_predicted_kl_is_the_realised_one(
    budget, tolerance, temperature, kind, tmp_path, pg, generator
):
    """With ρ large enough that the budget decides, against our own measure and the reference's."""
    tied = kind == "qwen2"
    make_checkpoint(tmp_path, kind, tied)
    cfg = config_for(
        tmp_path,
        step_control={
            "kl_budget": budget,
            "kl_budget_final": budget,
            "update_ratio": 3e-3,
            "realised_kl_interval": 1,
        },
        rollout={"sampling": {"temperature": temperature}},
    )
    learner = make_learner(cfg, pg)
    reference = Reference(tmp_path, learner.chunks[0].config, tied)
    batches = make_batches(generator, [[60, 40, 33]] * 3)
    before = {name: w.double() for name, w in weights_of(learner).items()}
    backward(learner, batches)
    result = learner.step(probe_of(batches[0]))
    assert result.alpha is not None and result.alpha < 3
    assert result.kl_predicted_scaled == pytest.approx(budget, rel=1e-9)
    changes = {n: w.double() - before[n] for n, w in weights_of(learner).items()}
    exact = reference.realised_kl(changes, 1.0, batches[0], temperature)
    assert result.kl_realised == pytest.approx(exact, rel=1e-3)
    assert exact == pytest.approx(budget, rel=tolerance)


def test_tangent_equals_central_differences(checkpoint, pg, generator):
    cfg = config_for(checkpoint, step_control={"kl_budget": 1e-4, "kl_budget_final": 1e-4})
    learner = make_learner(cfg, pg)
    reference = Reference(checkpoint, learner.chunks[0].config, False)
    batches = make_batches(generator, LENGTHS)
    backward(learner, batches)
    learner.sketch.probe = probe_of(batches[0])
    assert not learner.sketch.prepare_grads()  # the direction is in the proxies, nothing applied
    a = dense_projections(learner.sketch.capture)
    changes = {
        f"{t.name}.weight": -t.proxy.detach().double() @ a[f"{t.name}.weight"]
        for t in learner.sketch.capture.targets
    }
    for batch in batches:
        predicted = learner.predictor.predict(probe_of(batch), 1e-4)
        assert predicted == pytest.approx(reference.predicted_kl(changes, batch), rel=1e-4)
    torch.testing.assert_close(
        tangent_of(learner, batches[0]),
        differences(reference, changes, batches[0]),
        rtol=1e-3,
        atol=4e-6,
    )


def tangent_of(learner: Learner, batch: Batch) -> torch.Tensor:
    import torch.autograd.forward_ad as forward_ad

    from megatron_logra.model.gpt import forward_head

    def head(hidden, logits_fn):
        return forward_ad.unpack_dual(logits_fn(hidden)).tangent.transpose(0, 1)

    with torch.no_grad(), forward_ad.dual_level(), learner.sketch.capture.tangent():
        tangent = forward_head(learner.chunks[0], batch.tokens, batch.positions, head)
    return tangent[batch.mask].double()


@torch.no_grad()
def differences(reference: Reference, changes, batch: Batch) -> torch.Tensor:
    with reference.moved(changes, 0.5):
        up = reference.logits(batch)
    with reference.moved(changes, -0.5):
        down = reference.logits(batch)
    return (up - down)[batch.mask]


def test_masked_and_padded_positions_have_no_influence_on_the_prediction(checkpoint, pg, generator):
    learner = make_learner(config_for(checkpoint), pg)
    batches = make_batches(generator, LENGTHS)
    backward(learner, batches)
    learner.sketch.probe = probe_of(batches[0])
    learner.sketch.prepare_grads()
    batch = batches[0]
    expected = learner.predictor.predict(probe_of(batch), 1e-4)
    wide = torch.randint(0, VOCABULARY, (2, 40), generator=generator)
    weights = torch.zeros(2, 40)
    wide[:, :17], weights[:, :17] = batch.tokens, batch.weights
    wide[1, 9:] = torch.randint(
        0, VOCABULARY, (31,), generator=generator
    )  # the short row's padding
    assert learner.predictor.predict(probe_of(Batch(wide, weights)), 1e-4) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_probe_of_one_token_and_of_none(checkpoint, pg, generator):
    learner = make_learner(config_for(checkpoint), pg)
    batches = make_batches(generator, LENGTHS)
    backward(learner, batches)
    batch = batches[0]
    batch.weights[:] = 0
    with pytest.raises(ValueError, match="no generated token"):
        learner.predictor.predict(probe_of(batch), 1e-4)
    batch.weights[0, 12] = 1
    assert learner.step(probe_of(batch)).applied


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prediction_changes_nothing(precision, checkpoint, pg, generator):
    learner = make_learner(config_for(checkpoint, train={"precision": precision}), pg)
    batches = make_batches(generator, LENGTHS)
    for _ in range(2):
        backward(learner, batches)
        learner.step(probe_of(batches[0]))
    backward(learner, batches)
    before, numbers = snapshot(learner), counters(learner)
    learner.sketch.probe = probe_of(batches[0])
    assert not learner.sketch.prepare_grads()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner), strict=True))
    assert counters(learner) == numbers
    assert learner.chunks[0].training


def poison_sketch(learner: Learner, monkeypatch) -> None:
    learner.sketch.capture.targets[3].sketch[2, 1] = math.nan


def poison_prediction(learner: Learner, monkeypatch) -> None:
    weight = learner.chunks[0].module.decoder.final_layernorm.weight
    predict = learner.predictor.predict

    def with_nan(*arguments):
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0] = math.nan
            try:
                return predict(*arguments)
            finally:
                weight.copy_(kept)

    monkeypatch.setattr(learner.predictor, "predict", with_nan)


def poison_gradient(learner: Learner, monkeypatch) -> None:
    learner.chunks[0].buffers[0].grad_data[5] = math.inf


@pytest.mark.parametrize(
    ("poison", "non_targets"),
    [
        (poison_sketch, "freeze"),
        (poison_sketch, "adam"),
        (poison_prediction, "freeze"),
        (poison_prediction, "adam"),
        (poison_gradient, "adam"),
    ],
)
def test_a_step_that_fails_leaves_everything_as_it_was(
    poison, non_targets, checkpoint, pg, generator, monkeypatch
):
    sections = {"optimizer": {"non_targets": non_targets}}
    learner, twin = (make_learner(config_for(checkpoint, **sections), pg) for _ in range(2))
    first, second = make_batches(generator, LENGTHS), make_batches(generator, LENGTHS)
    for each in (learner, twin):
        backward(each, first)
        assert each.step(probe_of(first[0]), mismatch=1e-5).applied
    before, numbers = snapshot(learner), counters(learner)
    backward(learner, second)
    with monkeypatch.context() as patch:
        poison(learner, patch)
        result = learner.step(probe_of(second[0]), mismatch=1e-4)
    assert not result.applied and "finite" in result.reason
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(learner), strict=True))
    assert counters(learner) == numbers
    # The run goes on as if the failed step had never been.
    for each in (learner, twin):
        backward(each, second)
        assert each.step(probe_of(second[0]), mismatch=1e-4).applied
    assert all(torch.equal(a, b) for a, b in zip(snapshot(learner), snapshot(twin), strict=True))


def test_fifty_steps_leave_no_tensor_behind(checkpoint, pg, generator):
    learner = make_learner(config_for(checkpoint), pg)
    batches = make_batches(generator, [[8, 6], [7, 9]])

    def live() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        return len(tensors), sum(t.numel() * t.element_size() for t in tensors)

    counts = []
    for step in range(50):
        backward(learner, batches)
        assert learner.step(probe_of(batches[0])).applied
        if step in (2, 3, 4, 10, 49):
            counts.append(live())
    assert len(set(counts)) == 1


def test_projections_are_refreshed_as_configured(checkpoint, pg, generator):
    learner = make_learner(config_for(checkpoint, sketch={"refresh": 3}), pg)
    batches = make_batches(generator, LENGTHS)
    seen = []
    for _ in range(6):
        seen.append(learner.sketch.capture.projections._data.clone())
        backward(learner, batches)
        learner.step(probe_of(batches[0]))
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[3], seen[5])
    assert not torch.equal(seen[2], seen[3])


@pytest.mark.parametrize("budget", [2e-5, 2e-4, 2e-3])
@pytest.mark.parametrize("estimator", ["forward_ad", "finite_difference"])
def test_bf16_realised_kl_stays_near_the_prediction(estimator, budget, checkpoint, pg, generator):
    """bf16 logits are coarse; the step itself is applied in fp32, so that both agree to 10 %.

    Differences of three responses have some noise: of 84 draws one was off by more than that.
    """
    cfg = config_for(
        checkpoint,
        train={"precision": "bf16"},
        step_control={
            "kl_budget": budget,
            "kl_budget_final": budget,
            "update_ratio": 3e-3,
            "factor_dtype": "bf16",
            "estimator": estimator,
        },
    )
    learner = make_learner(cfg, pg)
    reference = Reference(checkpoint, learner.chunks[0].config, False)
    batches = make_batches(generator, [[60, 40, 33]] * 3)
    before = [master.value().double() for master in learner.sketch.masters]
    backward(learner, batches)
    result = learner.step(probe_of(batches[0]))
    changes = {
        f"{t.name}.weight": master.value().double() - old
        for t, master, old in zip(
            learner.sketch.capture.targets, learner.sketch.masters, before, strict=True
        )
    }
    exact = reference.realised_kl(changes, 1.0, batches[0])
    room = 0.1 if estimator == "forward_ad" else 0.2
    assert result.kl_predicted_scaled == pytest.approx(exact, rel=room)


def test_budget_follows_the_formulas():
    config = StepControlConfig(kl_budget=2e-4, kl_budget_final=2e-5, schedule_steps=300)
    control = StepControl(config)
    assert control.budget(0) == pytest.approx(2e-4)
    assert control.budget(150) == pytest.approx(1.1e-4)
    assert control.budget(300) == control.budget(5000) == pytest.approx(2e-5)
    control.observe_mismatch(1e-4)
    assert control.budget(0) == pytest.approx(1e-4)
    control.observe_mismatch(-1.0)  # counts as 0
    assert control.mismatch_average == pytest.approx(0.7e-4)
    control.observe_mismatch(1.0)
    assert control.budget(0) == pytest.approx(1e-4)  # never below half
    assert control.alpha(1e-5, 4e-5) == pytest.approx(2.0)
    assert control.alpha(1e-9, 4e-5) == 3.0
    assert control.alpha(0.0, 4e-5) == 1.0
    for bad in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite number"):
            control.alpha(bad, 1e-4)
