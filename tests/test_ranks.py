"""The training loop gives the same run on several ranks as on one, and ends on all of them."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import letters_config, listening, quick, tiny_config
from layout_runs import backward, whole_weights
from megatron.core.distributed import param_and_grad_buffer
from reference import make_batches
from torch import distributed as dist
from training import make_learner

from megatron_logra import checkpoint, distributed
from megatron_logra.config import Config, dump_yaml
from megatron_logra.errors import UserError
from megatron_logra.metrics import read_metrics
from megatron_logra.rl import rollouts, trainer
from megatron_logra.rl.policy import build_policy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
}
SPEC = {"num_layers": 4, "hidden_size": 32, "vocab_size": 261, "init_method_std": 0.1}
VARIES = ("time/", "rollout/tokens_per_s", "memory/", "comm/", "host/", "gpu/")


def config_for(run_dir: Path, **sections: dict[str, Any]) -> Config:
    return letters_config(run_dir, SPEC, **sections)


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory) -> tuple[Path, Any]:
    """The run on one rank: its directory, and what `_run` returns."""
    run_dir = tmp_path_factory.mktemp("reference")
    (result,) = ranks.run(1, _run, config_for(run_dir))
    assert result[0]["updates"] == 3, "too few updates to tell anything"
    return run_dir, result


def _run(config: Config, resume: bool = False) -> tuple[dict[str, Any], list[Any], Any]:
    """Train; the summary, each sampled response as (tokens, reward), and the last whole weights."""
    sampled: list[Any] = []
    make, learners = rollouts.RolloutMaker.make, []

    def recording(self: rollouts.RolloutMaker, *args: Any, **kwargs: Any) -> rollouts.Rollouts:
        batch = make(self, *args, **kwargs)
        sampled.append([(r.response.token_ids, r.reward) for r in batch.all])
        return batch

    class Learner(trainer.Learner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            learners.append(self)

    original = trainer.Learner
    rollouts.RolloutMaker.make, trainer.Learner = recording, Learner  # type: ignore[method-assign, misc]
    try:
        summary = trainer.run(config, resume=resume)
    finally:
        rollouts.RolloutMaker.make, trainer.Learner = make, original  # type: ignore[method-assign, misc]
    return summary, sampled, whole_weights(learners[0])


def assert_same_records(run_dir: Path, reference: Path, varies: tuple[str, ...] = VARIES) -> None:
    records, expected = read_metrics(run_dir), read_metrics(reference)
    assert [record["step"] for record in records] == [0, 1, 2]
    for record, other in zip(records, expected, strict=True):
        assert record.keys() == other.keys()
        for key, value in other.items():
            if not key.startswith(varies):
                wanted = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
                assert record[key] == wanted, (record["step"], key)


def assert_same_weights(weights: Any, expected: Any) -> None:
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.parametrize("layout", quick(LAYOUTS, set(LAYOUTS) - {"tp2", "pp2"}))
def test_every_layout_samples_and_learns_the_same(layout, ranks, reference, tmp_path):
    size, parallel = LAYOUTS[layout]
    reference_dir, (_, sampled, weights) = reference
    for _, own_sampled, own_weights in ranks.run(
        size, _run, config_for(tmp_path, parallel=parallel)
    ):
        assert own_sampled == sampled
        assert_same_weights(own_weights, weights)
    assert_same_records(tmp_path, reference_dir)
    for path in (reference_dir / "rollouts").iterdir():
        lines = (tmp_path / "rollouts" / path.name).read_text().splitlines()
        texts = [json.loads(line)["response"] for line in path.read_text().splitlines()]
        assert [json.loads(line)["response"] for line in lines] == texts


@pytest.mark.parametrize(
    ("layout", "prefix_cache"),
    quick(
        [("one", True), ("tp2", False), ("tp2-sequence", True), ("dp2", False), ("pp2", True)],
        [("tp2-sequence", True), ("dp2", False), ("pp2", True)],
    ),
)
def test_the_dynamic_engine_samples_and_learns_as_the_static_one(
    layout, prefix_cache, ranks, reference, tmp_path
):
    """The same tokens, records (with the mismatch to the trainer's forward) and weights."""
    size, parallel = {**LAYOUTS, "one": (1, {})}[layout]
    reference_dir, (_, sampled, weights) = reference
    rollout = {"engine": "dynamic", "dynamic": {"block_tokens": 8, "prefix_cache": prefix_cache}}
    config = config_for(tmp_path, parallel=parallel, rollout=rollout)
    for _, own_sampled, own_weights in ranks.run(size, _run, config):
        assert own_sampled == sampled
        assert_same_weights(own_weights, weights)
    assert_same_records(tmp_path, reference_dir)
    assert all(abs(record["policy/mismatch"]) < 1e-5 for record in read_metrics(tmp_path))


@pytest.mark.parametrize("layout", ["dp2", "tp2-sequence", "pp2-interleaved"])
def test_a_run_goes_on_under_another_layout(layout, ranks, reference, tmp_path):
    size, parallel = LAYOUTS[layout]
    reference_dir, (_, sampled, weights) = reference
    run_dir = tmp_path / "run"
    shutil.copytree(reference_dir, run_dir)
    (run_dir / "checkpoints" / "latest").write_text("iter_0000001\n")
    for _, own_sampled, own_weights in ranks.run(
        size, _run, config_for(run_dir, parallel=parallel), True
    ):
        assert own_sampled == sampled[-len(own_sampled) :]
        assert_same_weights(own_weights, weights)
    assert_same_records(run_dir, reference_dir)


@pytest.mark.parametrize("kind", quick(("logra", "adam"), ("logra",)))
def test_supervised_training_is_the_same_on_two_data_parallel_ranks(kind, ranks, tmp_path):
    """One rank's last micro-batch carries no loss; its gradients come and are reduced all the same.

    (3 micro-batches, an output layer of its own, and reduction overlapped with the backward pass.)
    """
    sections = {
        "algorithm": {"name": "sft"},
        "optimizer": {"kind": kind, "adam": {"lr": 1e-3}},
        "train": {"steps": 3, "prompts_per_step": 9},
    }
    (one,) = ranks.run(1, _run, config_for(tmp_path / "one", **sections))
    for _, _, weights in ranks.run(2, _run, config_for(tmp_path / "two", **sections)):
        assert_same_weights(weights, one[2])
    assert_same_records(tmp_path / "two", tmp_path / "one")


def test_counted_bytes_are_those_of_the_collectives(ranks, tmp_path):
    for kind, master in (("logra", "sharded"), ("logra", "replicated"), ("adam", "sharded")):
        config = config_for(
            tmp_path / kind / master,
            optimizer={"kind": kind, "non_targets": "adam", "master": master},
            step_control={"factor_dtype": "bf16", "realised_kl_interval": 0},
            train={"steps": 1, "prompts_per_step": 3, "responses_per_prompt": 4}
            | {"precision": "bf16"},
            eval={"at_start": False, "at_end": False},
            checkpoint={"save_at_end": False},
        )
        counted = ranks.run(2, _run_counting, config)
        (record,) = read_metrics(tmp_path / kind / master)
        assert not record["train/skipped"]
        for reduced, gathered in counted:
            assert reduced == record["comm/sketch_bytes"] + record["comm/gradient_bytes"]
            assert gathered == record["comm/parameter_bytes"]
        assert (record["comm/sketch_bytes"] > 0) == (kind == "logra")


def _run_counting(config: Config) -> tuple[int, int]:
    """Train; bytes that a ring sends for this rank's reduce-scatters and all-gathers."""
    bytes_of: dict[str, int] = {"reduced": 0, "gathered": 0}

    def counting(function: Any, kind: str, whole: int) -> Callable[..., Any]:
        def call(*tensors: Any, **kwargs: Any) -> Any:
            size = dist.get_world_size(kwargs["group"])
            bytes_of[kind] += tensors[whole].nbytes * (size - 1) // size
            return function(*tensors, **kwargs)

        return call

    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        module = param_and_grad_buffer
        patched.setattr(module, "dist_all_gather_func", counting(gather, "gathered", 0))
        patched.setattr(module, "dist_reduce_scatter_func", counting(reduce, "reduced", 1))
        patched.setattr(dist, "all_gather_into_tensor", counting(gather, "gathered", 0))
        trainer.run(config)
    return bytes_of["reduced"], bytes_of["gathered"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_ranks_non_finite_gradient_skips_adams_step_on_all(ranks, bad):
    for before, after, result in ranks.run(2, _adam_with_one_bad_gradient, bad):
        assert not result.applied and result.reason == "a gradient is not finite"
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def _adam_with_one_bad_gradient(bad: float) -> tuple[Any, Any, Any]:
    config = tiny_config(SPEC, optimizer={"kind": "adam"})
    learner = make_learner(config, distributed.initialize(config.parallel, 0))
    generator = torch.Generator().manual_seed(0)
    backward(learner, make_batches(generator, [[18, 9], [12, 20]]))
    before = {name: weight.clone() for name, weight in whole_weights(learner).items()}
    if dist.get_rank() == 1:
        learner.chunks[0].buffers[0].grad_data[-1] = bad
    return before, whole_weights(learner), learner.step(None)


@pytest.mark.parametrize(
    ("parallel", "key"),
    [
        ({"expert": 2}, "parallel.expert=2"),
        ({"pipeline": 2, "virtual_pipeline": 3}, "virtual_pipeline: 6 does not divide"),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_name(parallel, key, ranks, tmp_path):
    config = config_for(tmp_path, parallel=parallel)
    for message in ranks.run(2, _refusal, config):
        assert key in message and "\n" not in message


def _refusal(config: Config) -> str:
    try:
        build_policy(config)
    except UserError as error:
        return str(error)
    return "built"


# --- the launcher -------------------------------------------------------------------------------


def start(directory: Path, *arguments: str, steps: int = 5000) -> subprocess.Popen[str]:
    """`train --nproc 2` of a run in `directory`/run."""
    config = config_for(
        directory / "run",
        train={"steps": steps, "prompts_per_step": 3, "responses_per_prompt": 4},
        eval={"at_start": False, "at_end": False},
        checkpoint={"interval": 0},
    )
    (directory / "config.yaml").write_text(dump_yaml(config))
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "megatron_logra", "train", str(directory / "config.yaml")]
    return subprocess.Popen(
        [*command, "--nproc", "2", *arguments],
        env={**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
        | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    metrics = directory / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rank_pids(launcher: int) -> dict[int, int]:
    """Process ids of the launcher's ranks."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (rank,) = (v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK="))
        found[int(rank)] = int(pid)
    return found


def test_no_rank_listens_beyond_this_machine(tmp_path):
    process = start(tmp_path)
    try:
        wait_for_steps(process, tmp_path, 1)
        places = listening(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert len(places) > 2 and {address for address, _ in places} == {"127.0.0.1"}


def test_a_killed_rank_takes_the_run_down_with_its_reason(tmp_path):
    process = start(tmp_path)
    wait_for_steps(process, tmp_path, 2)
    pids = rank_pids(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in said and "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_stop_request_to_the_launcher_saves_and_ends_all_ranks(tmp_path):
    process = start(tmp_path, "rollout.engine=dynamic")  # its imports touch signals
    wait_for_steps(process, tmp_path, 1)
    pids = rank_pids(process.pid)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert said.count("stopped after step") == 1 and "most recent call first" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    done = len(read_metrics(tmp_path / "run"))
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.name == f"iter_{done:07d}"
    # The run is there already: one line, once, for both ranks.
    again = start(tmp_path)
    stdout, said = again.communicate(timeout=120)
    assert (again.returncode, stdout, said.count("\n")) == (2, "", 1), said
    assert "logging.run_dir" in said
