from __future__ import annotations

import importlib.util
import threading

import pytest
import torch
from helpers import tiny_model
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import get_default_causal_mask

from megatron_logra import distributed, platform
from megatron_logra.config import ParallelConfig
from megatron_logra.errors import UserError
from megatron_logra.model.gpt import forward_head

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins exist without a GPU")


def names_in_place() -> list[object]:
    return [getattr(owner, name) for owner, name, _ in platform._stand_ins()]


def test_install_again_changes_nothing() -> None:
    before = names_in_place()
    platform.install()
    assert all(a is b for a, b in zip(before, names_in_place(), strict=True))


def test_install_changes_nothing_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(platform, "_installed", False)
    before = names_in_place()
    platform.install()
    assert all(a is b for a, b in zip(before, names_in_place(), strict=True))


@needs_cpu
def test_transformer_engine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(platform, "_installed", False)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: found("torch" if name == "transformer_engine" else name),
    )
    with pytest.raises(UserError, match="transformer_engine is installed but"):
        platform.install()


@needs_cpu
def test_stand_ins_hold_in_every_thread() -> None:
    devices = []

    def work() -> None:
        devices.append(get_default_causal_mask(5).device.type)
        devices.append(torch.empty(2, device=torch.cuda.current_device()).device.type)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert devices == ["cpu", "cpu"]


@needs_cpu
def test_factories_of_torch_itself_are_untouched() -> None:
    with torch.device("meta"):
        made = [torch.zeros(2), torch.ones(2), torch.empty(2), torch.tensor([1.0])]
    assert all(t.is_meta for t in made)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_random_states_fork_and_return() -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    outer = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(5)
    with tracker.fork():
        second = torch.rand(5)
    if not torch.cuda.is_available():
        assert torch.equal(torch.get_rng_state(), outer)
    assert not torch.equal(first, second)


def test_recomputed_dropout_is_the_same_dropout(generator: torch.Generator) -> None:
    x = (torch.rand(200, generator=generator) + 1).requires_grad_(True)
    y = tensor_parallel.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), False, x)
    y.sum().backward()
    assert 0 < (y == 0).sum() < 200
    torch.testing.assert_close(x.grad, (y / x).detach())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatrons_training_step_is_adam(
    pg: ProcessGroupCollection, generator: torch.Generator, overlap: bool, precision: str
) -> None:
    """Schedule, gradient buffer, clipping and DistributedOptimizer against torch's AdamW."""
    model = tiny_model(pg, train={"precision": precision})
    config = model.config
    initial = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=True,
            bucket_size=1000,
        ),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.0,
            clip_grad=0.5,
            bf16=precision == "bf16",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync if overlap else None
    batches = [torch.randint(131, (n, 9), generator=generator) for n in (2, 3)]

    def loss(hidden, logits, tokens):
        scores = logits(hidden).float()[:-1].transpose(0, 1)
        return torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )

    def step(data, chunk):
        tokens = next(data)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        value = forward_head(chunk, tokens, positions, lambda h, f: loss(h, f, tokens))
        count = torch.tensor(tokens[:, 1:].numel(), dtype=torch.int)
        return value, lambda output: (output, count, {"loss": output.detach()})

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[wrapped],
        num_microbatches=2,
        seq_length=9,
        micro_batch_size=2,
        forward_only=False,
    )
    applied, norm, _ = optimizer.step()
    assert applied

    # The same step from the same initial weights, by plain autograd and torch's optimizer.
    reference = tiny_model(pg, train={"precision": precision})
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter.detach().float(), initial[name])
    total = sum(batch[:, 1:].numel() for batch in batches)
    masters = {n: p.clone().requires_grad_(True) for n, p in initial.items()}
    sums = {n: torch.zeros_like(p) for n, p in masters.items()}
    for tokens in batches:
        positions = torch.arange(9).expand_as(tokens)
        value = forward_head(reference, tokens, positions, lambda h, f, t=tokens: loss(h, f, t))
        value.backward()
        for name, parameter in reference.named_parameters():
            sums[name] += parameter.grad.float()
            parameter.grad = None
    for name, master in masters.items():
        master.grad = sums[name] / total
    expected_norm = torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
    torch.optim.AdamW(masters.values(), lr=0.01, weight_decay=0.0).step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.02, "atol": 0}
    torch.testing.assert_close(torch.tensor(norm), expected_norm, **tolerance)
    # Adam's first step is ±lr wherever the gradient is not tiny, so compare by the step.
    for name, parameter in model.named_parameters():
        want, got = masters[name].detach().to(config.params_dtype), parameter.detach()
        clear = sums[name].abs() > 1e-2 * sums[name].abs().max()
        assert clear.any()
        torch.testing.assert_close(got[clear], want[clear], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tensor": 2}, "parallel.tensor=2"),
        ({"pipeline": 3, "context": 2}, "parallel.pipeline=3, parallel.context=2"),
        ({"expert": 2}, "parallel.expert=2"),
    ],
)
def test_layouts_that_need_more_ranks_name_their_keys(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        distributed.check_layout(ParallelConfig(**sizes), ranks=1)


def test_layouts_that_fit_their_ranks_pass() -> None:
    distributed.check_layout(ParallelConfig(tensor=2), ranks=4)
    with pytest.raises(UserError, match="multiple of 2 ranks, but this run has 3"):
        distributed.check_layout(ParallelConfig(tensor=2), ranks=3)


def test_one_process_is_rank_zero_of_one(pg: ProcessGroupCollection) -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert [group.size() for group in (pg.tp, pg.pp, pg.dp, pg.cp, pg.dp_cp)] == [1] * 5


@needs_cpu
def test_one_rank_does_not_reduce_with_itself(pg, monkeypatch):
    """Gloo would, on a thread whose OpenMP workers slow down those of this one for good."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("sent")

    for name in ("_coalescing_manager", "reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, fail)
    data = torch.arange(6.0)
    with buffers._coalescing_manager(pg.dp, async_ops=True) as work:
        assert buffers.dist_reduce_scatter_func(data, data, group=pg.dp, async_op=True) is None
        assert buffers.dist_all_gather_func(data, data, group=pg.dp, async_op=True) is None
    work.wait()
    assert torch.equal(data, torch.arange(6.0))
