"""A dry run builds every rank of a recipe without memory, and finds what a run would find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import load_tensors_metadata
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from test_ranks import config_for

from megatron_logra import dry_run
from megatron_logra.config import Config, load_config
from megatron_logra.planner import static_memory
from megatron_logra.rl import trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RECIPES = {
    "qwen2.5_1.5b/train": 8,
    "qwen2.5_7b/train": 8,
    "gemma3_27b/train": 8,
    "qwen3_32b/train": 8,
    "llama3_70b/train": 16,
    # Training ranks; the workers' come to them.
    "qwen2.5_1.5b/separate": 4,
    "qwen2.5_7b/separate": 4,
    "gemma3_27b/separate": 4,
    "qwen3_32b/separate": 4,
    "llama3_70b/separate": 8,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2-dp2": (4, {"context": 2}),
    "tp2-pp2-dp2": (8, {"tensor": 2, "pipeline": 2}),
}


def _run(config: Config, ranks: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The plan, and the shapes of a checkpoint's tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    check = dry_run.Shards.check

    def keeping(self: dry_run.Shards) -> None:
        check(self)
        shapes.update(self.shapes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run.Shards, "check", keeping)
        planned = dry_run.run(config, ranks)
    return planned, shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_built(recipe: str, ranks, tmp_path: Path) -> None:
    config = load_config(EXAMPLES / f"{recipe}.yaml", [f"logging.run_dir={tmp_path}"])
    ((planned, shapes),) = ranks.run(1, _run, config, RECIPES[recipe])
    assert planned["fits"]["logra"]
    assert json.loads((tmp_path / "plan.json").read_text()) == planned
    weights = [shape for name, shape in shapes.items() if not name.startswith("optimizer.")]
    count = sum(torch.Size(shape).numel() for shape in weights)
    assert count == planned["parameters"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_built_bytes_are_the_planned_ones_in_every_layout(
    layout: str, ranks, tmp_path: Path
) -> None:
    size, parallel = LAYOUTS[layout]
    config = config_for(
        tmp_path,
        parallel=parallel,
        optimizer={"non_targets": "adam"},
        train={"precision": "bf16", "prompts_per_step": 3, "responses_per_prompt": 4},
    )
    ((planned, _),) = ranks.run(1, _run, config, size)
    for rank in range(size):
        held = planned["per_rank"][rank]["logra"]
        expected = static_memory(config, ranks=size, rank=rank)
        assert {kind: held[kind] for kind in expected} == expected


def test_a_checkpoint_has_the_tensors_that_a_run_writes(ranks, tmp_path: Path) -> None:
    config = config_for(
        tmp_path,
        parallel={"tensor": 2},
        train={"steps": 1, "prompts_per_step": 3, "responses_per_prompt": 4}
        | {"precision": "bf16"},
        eval={"at_start": False, "at_end": False},
    )
    ((_, shapes),) = ranks.run(1, _run, config, 2)
    ranks.run(2, trainer.run, config)
    written = load_tensors_metadata(str(tmp_path / "checkpoints" / "iter_0000001"))
    assert shapes == {name: tuple(tensor.global_shape) for name, tensor in written.items()}


def test_a_layout_that_does_not_fit_is_one_line(ranks, tmp_path: Path) -> None:
    config = config_for(tmp_path, parallel={"tensor": 4})
    with pytest.raises(RuntimeError, match=r"UserError: .*num_attention_heads"):
        ranks.run(1, _run, config, 4)


def shard(place: int, size: int, replica: int = 0) -> ShardedTensor:
    return ShardedTensor(
        "w", torch.empty(size), torch.float32, (size,), (6,), (place,), (6,), replica
    )


@pytest.mark.parametrize(
    ("by_rank", "complaint"),
    [
        ([[shard(0, 3)], [shard(3, 3)]], None),
        ([[shard(0, 3), shard(3, 3)], [shard(3, 3, replica=1)]], None),
        ([[shard(0, 3)], [shard(3, 1)]], "4 of 6 elements"),
        ([[shard(0, 3)], [shard(3, 3, replica=1)]], r"written by ranks \[\]"),
        ([[shard(0, 3), shard(3, 3)], [shard(3, 3)]], r"written by ranks \[0, 1\]"),
        ([[shard(0, 3), shard(3, 3)], [shard(3, 1, replica=1)]], r"shapes \(3,\) and \(1,\)"),
    ],
)
def test_gaps_and_overlaps_of_a_checkpoint_are_found(
    by_rank: list[list[ShardedTensor]], complaint: str | None
) -> None:
    shards = dry_run.Shards()

    def check() -> None:
        for rank, tensors in enumerate(by_rank):
            shards.add(rank, tensors)
        shards.check()

    if complaint is None:
        check()
        assert shards.bytes == 24
        return
    with pytest.raises(RuntimeError, match=complaint):
        check()


def test_other_bytes_than_planned_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="rank 3 holds other bytes than planned: master 8"):
        dry_run._compare(3, {"weights": 4, "master": 8}, {"weights": 4, "master": 7})
