"""`metrics.jsonl`: one JSON object a step, numbers finite or null; and TensorBoard beside it."""

from __future__ import annotations

import difflib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_logra.errors import UserError
from megatron_logra.wandb_log import WandbLog

METRICS_FILE = "metrics.jsonl"


def make_run_dir(run_dir: Path) -> None:
    """Make the run directory and see that files can be written there.

    Raises:
        UserError: a file is in its place or in its path, or it cannot be written to.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(
            f"logging.run_dir: {run_dir}: {error.strerror}; expected a directory for results"
        ) from None


@dataclass(frozen=True)
class Metric:
    """What one key of `metrics.jsonl` means."""

    key: str
    unit: str
    meaning: str


_BYTES = {
    "weights": "model weights as computed with",
    "master": "fp32 masters or 16-bit remainders",
    "gradients": "gradient buffers of non-targets (dense Adam: of all parameters)",
    "optimizer": "moments",
    "sketches": "sketch buffers",
    "projections": "projections as drawn for the current update",
    "static": "all of the above",
    "rollout_copy": "weights in the layout of `rollout.layout`, beside these",
    "peak": "highest memory in use: of the GPU, or resident memory of the process",
}
_PHASES = {
    "rollout": "generating responses",
    "reward": "scoring responses",
    "forward_backward": "forward and backward passes",
    "reduce": "reducing sketches and gradients over ranks",
    "probe": "predicting (and measuring) the KL",
    "apply": "making the direction, writing the update, drawing the next projections",
    "sync": "bringing rollout workers up to date",
    "checkpoint": "saving",
    "eval": "evaluating",
    "step": "the whole step, everything included",
}

METRIC_KEYS: tuple[Metric, ...] = (
    Metric("step", "count", "steps before this one, skipped ones included"),
    *(Metric(f"time/{name}_s", "s", meaning) for name, meaning in _PHASES.items()),
    Metric("reward/mean", "reward", "mean over the batch"),
    Metric("reward/std", "reward", "standard deviation over the batch"),
    Metric("reward/zero_variance_groups", "fraction", "prompts whose responses all score the same"),
    Metric("reward/invalid", "fraction", "responses whose answer could not be scored at all"),
    Metric("reward/baseline", "reward", "running baseline of REINFORCE"),
    Metric("rollout/tokens", "tokens", "generated in this step"),
    Metric("rollout/tokens_per_s", "tokens/s", "generated over the time of generation"),
    Metric("rollout/length_mean", "tokens", "mean length of a response"),
    Metric("rollout/truncated", "fraction", "responses cut off by the largest length"),
    Metric("rollout/lag", "updates", "largest age of a policy that a response was sampled from"),
    Metric("rollout/stale", "count", "responses that were left out for being too old"),
    Metric("policy/kl_predicted", "nats/token", "predicted KL of the step at α = 1"),
    Metric("policy/kl_predicted_scaled", "nats/token", "predicted KL of the step as applied"),
    Metric("policy/kl_budget", "nats/token", "budget after the subtraction of the mismatch"),
    Metric("policy/alpha", "factor", "α, by which the step was scaled"),
    Metric("policy/kl_realised", "nats/token", "KL measured after the step, at an interval"),
    Metric("policy/kl_ratio", "ratio", "realised over predicted KL of the step as applied"),
    Metric("policy/kl_along", "nats/token", "part of kl_realised along the prediction"),
    Metric("policy/kl_correction", "factor", "c of step_control.adaptive: α² c K = budget"),
    Metric("policy/mismatch", "nats/token", "mean rollout logprob minus trainer logprob"),
    Metric("policy/entropy", "nats/token", "of the sampling distribution at generated tokens"),
    Metric("policy/clipped", "fraction", "tokens whose policy ratio was clipped"),
    Metric("policy/importance_truncated", "fraction", "tokens whose importance weight was cut"),
    Metric("policy/logprob_clamped", "count", "tokens whose logprob gap was clamped"),
    Metric("train/loss", "loss", "mean over the loss-carrying tokens of the batch"),
    Metric("train/tokens", "tokens", "loss-carrying tokens of the batch"),
    Metric("train/sketch_norm", "norm", "Frobenius norm over all sketches"),
    Metric("train/grad_norm", "norm", "global norm of the (reconstructed) gradient"),
    Metric("train/update_ratio", "ratio", "‖ΔW‖ / ‖W‖ over all targets, as applied"),
    Metric("train/lr", "rate", "learning rate"),
    Metric("train/skipped", "0 or 1", "1 if the step was skipped and every state left as it was"),
    *(Metric(f"memory/{name}_bytes", "bytes", meaning) for name, meaning in _BYTES.items()),
    Metric("comm/gradient_bytes", "bytes", "sent by a rank to reduce dense gradients"),
    Metric("comm/sketch_bytes", "bytes", "sent by a rank to reduce sketches"),
    Metric("comm/parameter_bytes", "bytes", "sent by a rank to gather parameters and factors"),
    Metric("sync/bytes", "bytes", "sent to rollout workers, or written to copies that generate"),
    Metric("sync/seconds", "s", "of the trainer, to send them"),
    Metric("sync/version", "count", "policy version of who generates"),
    Metric("sync/drift_max", "weight", "largest difference to the trainer's weights"),
    Metric("host/rss_bytes", "bytes", "highest resident memory of a rank and its scorers"),
    Metric("host/memory_used", "fraction", "of the machine's memory, by everything on it; highest"),
    Metric("gpu/memory_bytes", "bytes", "highest memory in use on a GPU, by NVML"),
    Metric("gpu/power_w", "W", "mean power of a GPU in the step; of the rank with most"),
    Metric("gpu/utilisation", "fraction", "of the step in which a GPU ran something; likewise"),
)
"""Every key, but for `eval/*` and `reward/ENVIRONMENT/*`, whose names the run decides."""

_KNOWN = {metric.key for metric in METRIC_KEYS}
_PREFIXES = {key.partition("/")[0] + "/" for key in _KNOWN if "/" in key}


def check_key(key: str) -> None:
    """Raise `ValueError` if `key` lies in one of the documented families but is not documented.

    Keys of other families (`eval/…`, a user's own) are free, and so are parts of a documented
    family with three components, such as `reward/chain_sum/mean`.
    """
    if key in _KNOWN or key.count("/") > 1:
        return
    if any(key.startswith(prefix) for prefix in _PREFIXES) or "/" not in key:
        close = difflib.get_close_matches(key, _KNOWN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{key} is not a metric in METRIC_KEYS{hint}")


def to_number(value: Any) -> float | int | None:
    """A number as JSON may hold it: NaN and infinities become None, booleans 0 or 1.

    Takes Python, numpy and torch scalars; anything else raises `TypeError`.
    """
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"a metric must be a number, got {value!r}")


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of a run directory, in order.

    A last line without a newline is what a killed process leaves, and is dropped.

    Raises:
        UserError: there is no metrics file, or a line is no JSON object with an integer `step`.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: {reason}; expected the metrics of a run directory") from None
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}:{number}: expected a JSON object with a step")
        records.append(record)
    return records


class MetricsWriter:
    """Writes a run's metrics, one record a step, to the disk before `write` returns.

    A run that resumes at `start_step` gives that: records of this step and later ones, which a
    run left behind that went on after its last checkpoint, are dropped, so that each step is there
    once.
    """

    def __init__(
        self,
        run_dir: str | Path,
        tensorboard: bool = True,
        start_step: int = 0,
        wandb: WandbLog | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = start_step - 1
        if self.path.exists():
            self._drop_from(start_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._wandb = wandb
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(self.path.parent / "tensorboard"),
                purge_step=start_step if start_step > 0 else None,
            )

    def _drop_from(self, step: int) -> None:
        kept = [record for record in read_metrics(self.path.parent) if record["step"] < step]
        new = self.path.with_suffix(".jsonl.tmp")
        with new.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in kept)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
        """Append the record of `step`; returns it as written.

        Raises:
            ValueError: the step has been written, or a key is misspelled (`check_key`).
            TypeError: a value is not a number.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}")
        record: dict[str, float | int | None] = {"step": step}
        for key, value in metrics.items():
            check_key(key)
            record[key] = to_number(value)
        self._file.write(_line(record))
        self._file.flush()
        self._last_step = step
        if self._board is not None:
            for key, number in record.items():
                if key != "step" and number is not None:
                    self._board.add_scalar(key, number, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.write(step, record)
        return record

    def close(self) -> None:
        """Close the files; idempotent."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
