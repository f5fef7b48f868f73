"""What a rank's processes and its GPU take while a step runs, sampled beside it by a thread.

Peaks and means of each step are handed over with the step's other accounts, in one exchange
between ranks that happens anyway; nothing waits for a sample. All ranks' values go to
`telemetry.jsonl`, the largest into the step's record.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

logger = logging.getLogger(__name__)
TELEMETRY_FILE = "telemetry.jsonl"
GpuReader = Callable[[], dict[str, float]]
"""Reads `gpu/memory_bytes`, `gpu/power_w` and `gpu/utilisation` (0 to 1) of this rank's GPU."""


class Telemetry:
    """Samples until it is closed; a context manager.

    Args:
        interval_s: seconds between two samples.
        read_gpu: reads the GPU; default: NVML, where there is one.
    """

    def __init__(self, interval_s: float = 1.0, read_gpu: GpuReader | None = None) -> None:
        self._interval_s = interval_s
        self._read_gpu = read_gpu or nvml_reader()
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._samples: list[dict[str, float]] = []
        """Since the last call of `take`, and the one before."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> dict[str, float]:
        """Peaks of bytes, and means of the rest, since the last call.

        Where no sample has been taken since then, the last one counts again.
        """
        with self._lock:
            samples, self._samples = self._samples, self._samples[-1:]
        found = {}
        for key in dict.fromkeys(key for sample in samples for key in sample):
            values = [sample[key] for sample in samples[len(samples) > 1 :] if key in sample]
            if not values:
                continue
            mean = sum(values) / len(values)
            found[key] = max(values) if key.endswith(("_bytes", "memory_used")) else mean
        return found

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        memory = psutil.virtual_memory()
        sample = {
            "host/rss_bytes": float(self._resident()),
            "host/memory_used": 1 - memory.available / memory.total,
        }
        if self._read_gpu is not None:
            sample |= self._read_gpu()
        with self._lock:
            self._samples.append(sample)

    def _resident(self) -> int:
        """Resident bytes of this process and of those it has started (scorers)."""
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += process.memory_info().rss
        return total


def write(run_dir: Path, step: int, by_rank: list[dict[str, float]]) -> None:
    """Append a step's values of all ranks to `telemetry.jsonl`."""
    line = json.dumps({"step": step, "ranks": by_rank}) + "\n"
    with (run_dir / TELEMETRY_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def nvml_reader() -> GpuReader | None:
    """Reads this process's current GPU through NVML; None without a GPU or without NVML."""
    if not torch.cuda.is_available():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        # By its UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA, and not for NVML.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        logger.warning("no telemetry of the GPU: NVML says %s", error)
        return None

    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        with contextlib.suppress(pynvml.NVMLError):  # some GPUs do not tell all
            found["gpu/memory_bytes"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        with contextlib.suppress(pynvml.NVMLError):
            found["gpu/utilisation"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(pynvml.NVMLError):
            found["gpu/power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return found

    return read
