"""`megatron-logra plan`: what each rank holds and sends, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from megatron_logra.config import Config
from megatron_logra.errors import UserError, speaking_of
from megatron_logra.memory import KINDS
from megatron_logra.model.vocabulary import require_same_padding
from megatron_logra.planner.estimates import PassEstimate
from megatron_logra.planner.shapes import Kind, Layout, Model, Stage, layout_of
from megatron_logra.planner.static import StageBuffers
from megatron_logra.planner.traffic import TOTAL, step_traffic

GIB = 2**30
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
WORKER_KINDS = ("weights", "master", "projections")
"""What a rollout worker holds between requests."""


def run(
    cfg: Config,
    *,
    ranks: int | None,
    compare: Sequence[Kind],
    gpu_memory: float,
    json_file: str | None,
) -> None:
    """Plan, print the table, and write JSON if asked to.

    Args:
        cfg: the configuration.
        ranks: of the run; None means as few as `parallel` takes.
        compare: optimizers to show besides the configured one.
        gpu_memory: GiB that a rank has.
        json_file: where to write JSON.

    Raises:
        UserError: the configuration does not fit, or the file cannot be written.
    """
    found = plan(cfg, ranks, gpu_memory)
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {json_file}: {error.strerror or error}") from None
    shown = list(dict.fromkeys([cfg.optimizer.kind, *compare]))
    print(table(found, cfg, shown))


def plan(cfg: Config, ranks: int | None = None, gpu_memory: float = 80.0) -> dict[str, Any]:
    """Memory and traffic of every rank, for sketches and for dense Adam.

    Returns:
        `per_rank`: an entry a rank; `largest`: that of the rank with the largest total, for each
        optimizer. Each has `logra` and `adam` with bytes by kind (`static` is their exact sum),
        `activations` (an estimate), `total` = static + activations, `rollout_cache` (keys and
        values while generating, when no activations are held), and `comm`, bytes sent per step by
        collective. `rollout_worker`: bytes of its largest rank, or None if rollouts are colocated.
        `rollout_copy`: what a `rollout.layout` adds to each rank, `weights` and `rollout_cache` of
        the largest, or None without one.
        `fits`: whether the largest ranks stay within `gpu_memory` GiB in both phases.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
    """
    layout = layout_of(cfg, ranks)
    model = Model(cfg, layout)
    by_stage = [
        {kind: _of_stage(model, model.stage(number, kind)) for kind in ALL_KINDS}
        for number in range(layout.pipeline)
    ]
    per_rank = [
        {
            "rank": rank,
            "tensor": rank % layout.tensor,
            "pipeline": layout.stage(rank),
            "shard": layout.shard(rank),
            **{kind: by_stage[layout.stage(rank)][kind][layout.shard(rank)] for kind in ALL_KINDS},
        }
        for rank in range(layout.ranks)
    ]
    largest = {
        kind: max((entry[kind] for entry in per_rank), key=lambda sizes: sizes["total"])
        for kind in ALL_KINDS
    }
    worker = _worker(cfg) if cfg.rollout.placement == "separate" else None
    copy = copy_sizes(cfg, layout.ranks) if cfg.rollout.layout is not None else None
    return {
        "ranks": layout.ranks,
        "layout": asdict(layout),
        "parameters": sum(shape.numel for shape in model.whole),
        "gpu_memory": round(gpu_memory * GIB),
        "largest": largest,
        "fits": {
            kind: max(_needed(sizes, copy), _needed(worker or sizes, copy)) <= gpu_memory * GIB
            for kind, sizes in largest.items()
        },
        "rollout_worker": worker,
        "rollout_copy": copy,
        "per_rank": per_rank,
    }


def _of_stage(model: Model, stage: Stage) -> list[dict[str, Any]]:
    """Sizes and traffic of each of the ranks that share a stage."""
    buffers = StageBuffers(model, stage)
    passes = PassEstimate(model, stage)
    activations, cache = passes.activations(), passes.rollout_cache()
    comm = step_traffic(model, stage, buffers)
    return [
        {
            **static,
            "activations": activations,
            "total": static["static"] + activations,
            "rollout_cache": cache,
            "comm": comm,
        }
        for static in buffers.static()
    ]


def worker_config(cfg: Config) -> Config:
    """The configuration of a rollout worker: it samples from a model of its own layout."""
    own = cfg.rollout.model_copy(update={"placement": "colocated"})
    return cfg.model_copy(update={"parallel": cfg.worker_parallel, "rollout": own})


def _worker(cfg: Config) -> dict[str, int]:
    """Sizes of a rollout worker's rank: the weights, what they lack to be the trainer's, and A."""
    own = worker_config(cfg)
    master = {"master": "replicated", "non_targets": "freeze"}
    own = own.model_copy(update={"optimizer": own.optimizer.model_copy(update=master)})
    try:
        layout = layout_of(own)
        model = Model(own, layout)
    except UserError as error:
        raise UserError(f"rollout.workers: {error}") from None
    found = []
    for number in range(layout.pipeline):
        stage = model.stage(number, "logra")
        held = StageBuffers(model, stage).static()[0]
        if cfg.rollout.workers.exactness == "bf16":
            held["master"] = 0
        kept = {kind: held[kind] for kind in WORKER_KINDS}
        cache = PassEstimate(model, stage).rollout_cache()
        found.append({**kept, "static": sum(kept.values()), "rollout_cache": cache})
    return max(found, key=_needed)


def copy_sizes(cfg: Config, ranks: int) -> dict[str, int]:
    """Sizes of the model with which `ranks` training ranks generate in a layout of their own."""
    own = cfg.generating
    frozen = own.optimizer.model_copy(update={"non_targets": "freeze"})
    own = own.model_copy(update={"optimizer": frozen})
    with speaking_of("rollout.layout"):
        layout = layout_of(own, ranks)
        model = Model(own, layout)
        require_same_padding(model.arguments.vocab_size, cfg.parallel.tensor, layout.tensor)
    found = []
    for number in range(layout.pipeline):
        stage = model.stage(number, "logra")
        weights = StageBuffers(model, stage).static()[0]["weights"]
        cache = PassEstimate(model, stage).rollout_cache()
        found.append({"weights": weights, "rollout_cache": cache})
    return max(found, key=lambda sizes: sum(sizes.values()))


def _needed(sizes: dict[str, Any], copy: dict[str, int] | None = None) -> int:
    """Most bytes at a time: in forward-backward passes or in rollouts, of a `copy` if there is."""
    held, cache = sizes["static"], sizes["rollout_cache"]
    if copy is not None:
        held, cache = held + copy["weights"], copy["rollout_cache"]
    return int(held + max(sizes.get("activations", 0), cache))


def table(found: dict[str, Any], cfg: Config, kinds: Sequence[Kind]) -> str:
    """The plan for people: the largest rank of each optimizer in `kinds`."""
    largest = {kind: found["largest"][kind] for kind in kinds}
    lines = [_headline(found, cfg), "", _row("GiB on the largest rank", kinds)]
    for name in (*KINDS, "static"):
        lines.append(_gib_row(name, [sizes[name] for sizes in largest.values()]))
    for name in ("activations", "total"):
        lines.append(_gib_row(f"{name} (estimate)", [sizes[name] for sizes in largest.values()]))
    worker, copy = found["rollout_worker"], found["rollout_copy"]
    if copy is not None:
        held = copy["weights"]
        rows = {
            "copy that generates": [held for _ in kinds],
            "total (estimate) + copy": [sizes["total"] + held for sizes in largest.values()],
            "or static + copy + rollout cache": [
                sizes["static"] + sum(copy.values()) for sizes in largest.values()
            ],
        }
        lines += [_gib_row(name, numbers) for name, numbers in rows.items()]
    elif worker is None:
        numbers = [sizes["static"] + sizes["rollout_cache"] for sizes in largest.values()]
        lines.append(_gib_row("or static + rollout cache", numbers))
    else:
        lines += ["", _row("GiB on a rollout worker's rank", [""])]
        lines += [_gib_row(name, [worker[name]]) for name in (*WORKER_KINDS, "static")]
        lines += [_gib_row("static + rollout cache", [_needed(worker)]), ""]
    limit = found["gpu_memory"] / GIB
    verdicts = ["fits" if found["fits"][kind] else "does not fit" for kind in kinds]
    lines.append(_row(f"in {limit:g} GiB", verdicts))
    if found["layout"]["pipeline"] > 1:
        lines += ["", *_stage_lines(found, kinds)]
    lines += ["", _row("GiB sent by that rank in a step", kinds)]
    names = list(dict.fromkeys(key for sizes in largest.values() for key in sizes["comm"]))
    for key in [*(name for name in names if name != TOTAL), TOTAL]:
        lines.append(_gib_row(key, [sizes["comm"].get(key, 0) for sizes in largest.values()]))
    return "\n".join(lines)


def _headline(found: dict[str, Any], cfg: Config) -> str:
    layout = Layout(**found["layout"])
    parts = [
        f"{name} {getattr(layout, name)}"
        for name in ("tensor", "pipeline", "context", "data")
        if getattr(layout, name) > 1
    ]
    sizes = f" = {' × '.join(parts)}" if parts else ""
    sequence = ", sequence parallel" if layout.sequence else ""
    return (
        f"{found['parameters'] / 1e9:.2f} B parameters, {cfg.train.precision}; "
        f"{found['ranks']} rank{'s' if found['ranks'] > 1 else ''}{sizes}{sequence}; "
        f"sketch rank {cfg.sketch.rank}, masters {cfg.optimizer.master}, "
        f"recompute {cfg.train.recompute}"
    )


def _stage_lines(found: dict[str, Any], kinds: Sequence[Kind]) -> list[str]:
    lines = [_row("GiB static by stage, largest rank", kinds)]
    for stage in range(found["layout"]["pipeline"]):
        entries = [entry for entry in found["per_rank"] if entry["pipeline"] == stage]
        numbers = [max(entry[kind]["static"] for entry in entries) for kind in kinds]
        lines.append(_gib_row(f"stage {stage}", numbers))
    return lines


def _gib_row(label: str, sizes: Sequence[int]) -> str:
    return _row(
        label, [f"{size / GIB:.3f}" if size < GIB else f"{size / GIB:.2f}" for size in sizes]
    )


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<40}" + "".join(f"{cell:>14}" for cell in cells)
