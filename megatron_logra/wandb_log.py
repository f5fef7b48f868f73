"""Metrics for Weights & Biases (optional); offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_logra.errors import UserError


class WandbLog:
    """One run there; a resumed run goes on under the same id.

    Args:
        run_dir: the run directory; what is recorded offline lies in its `wandb/`.
        project: under which the run is filed.
        config: shown with the run.

    Raises:
        UserError: wandb is not installed, or does not start.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"logging.wandb={project}: wandb is not installed; pip install wandb, or set null"
            ) from None
        place = str(run_dir.resolve())
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                dir=place,
                id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"),
                config=dict(config),
                settings=wandb.Settings(silent=True, disable_git=True, x_disable_stats=True),
            )
        except (wandb.errors.Error, OSError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"logging.wandb={project}: wandb does not start: {text}") from None

    def write(self, step: int, record: Mapping[str, float | int | None]) -> None:
        """Log what a step's record has; null values are left out."""
        self._run.log({k: v for k, v in record.items() if v is not None}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
