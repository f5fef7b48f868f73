"""Telemetry: peaks and means between two steps, of all ranks, without waiting for a sample."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from test_ranks import config_for

from megatron_logra import telemetry
from megatron_logra.errors import UserError
from megatron_logra.metrics import METRIC_KEYS, MetricsWriter, read_metrics
from megatron_logra.rl import trainer
from megatron_logra.telemetry import Telemetry
from megatron_logra.wandb_log import WandbLog


def test_bytes_are_peaks_and_the_rest_are_means_since_the_last_call() -> None:
    readings = iter([(5, 100.0), (50, 200.0), (20, 300.0), (7, 50.0), (7, 50.0)])

    def read() -> dict[str, float]:
        size, power = next(readings)
        return {"gpu/memory_bytes": size, "gpu/power_w": power, "gpu/utilisation": power / 400}

    sampler = Telemetry(interval_s=1e9, read_gpu=read)
    with sampler:
        first = sampler.take()
        assert (first["gpu/memory_bytes"], first["gpu/power_w"]) == (5, 100)
        sampler._sample()
        sampler._sample()
        found = sampler.take()
        assert (found["gpu/memory_bytes"], found["gpu/power_w"]) == (50, 250)
        assert found["gpu/utilisation"] == pytest.approx(250 / 400)
        assert sampler.take()["gpu/memory_bytes"] == 20, "no sample since: the last one"
        sampler._sample()
        assert sampler.take()["gpu/memory_bytes"] == 7


def test_memory_is_that_of_the_process_and_the_thread_ends() -> None:
    with Telemetry(interval_s=0.01) as sampler:
        before = sampler.take()["host/rss_bytes"]
        ballast = torch.ones(50_000_000)
        time.sleep(0.3)
        found = sampler.take()
        assert found["host/rss_bytes"] - before > 0.9 * ballast.nbytes
        assert found["host/rss_bytes"] >= 0.9 * psutil.Process().memory_info().rss
        assert 0 < found["host/memory_used"] < 1
        started = time.perf_counter()
        for _ in range(100):
            sampler.take()
        assert time.perf_counter() - started < 0.1, "taking waits for no sample"
        del ballast
    assert not [t for t in threading.enumerate() if t.name == "telemetry"]


def test_each_steps_record_has_the_largest_rank_and_the_file_has_all(ranks, tmp_path: Path) -> None:
    ranks.run(2, trainer.run, config_for(tmp_path))
    records = read_metrics(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [record["step"] for record in records]
    for line, record in zip(lines, records, strict=True):
        sizes = [values["host/rss_bytes"] for values in line["ranks"]]
        assert len(sizes) == 2 and record["host/rss_bytes"] == max(sizes) > 2**20
    known = {metric.key for metric in METRIC_KEYS}
    assert all(values.keys() <= known for line in lines for values in line["ranks"])


@pytest.mark.gpu
def test_nvml_reads_the_gpu_that_torch_uses() -> None:
    ballast = torch.ones(2**28, device="cuda")
    read = telemetry.nvml_reader()
    assert read is not None
    found = read()
    assert found["gpu/memory_bytes"] >= ballast.nbytes
    assert found["gpu/power_w"] > 10 and 0 <= found["gpu/utilisation"] <= 1


def test_without_wandb_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match=r"logging\.wandb=p: wandb is not installed"):
        WandbLog(tmp_path, "p", {})


def test_wandb_records_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is optional: pip install wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with MetricsWriter(
        tmp_path, tensorboard=False, wandb=WandbLog(tmp_path, "p", {"a": 1})
    ) as writer:
        writer.write(0, {"reward/mean": 0.5, "policy/alpha": None})
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # a process of its own writes it
    while b"reward/mean" not in recorded.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"reward/mean" in recorded.read_bytes()
