"""How far receivers of sketches get from the trainer over hundreds of updates.

    python tools/drift_curve.py [--updates 500] [--refresh 100] [--plot FILE] [--json FILE]

A small random GPT learns random sequences in bf16 with fp32 master weights, each update as large as
the paper's (6e-5 of the weights). Three receivers apply the same payloads: bf16 with the 16 bits it
lacks; bf16 alone; bf16 alone with whole weights every `--refresh` updates. After each update all
their target weights are compared with the trainer's, and now and then what they predict.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from bench_step import Program

from megatron_logra import platform

platform.install()

from matplotlib.figure import Figure  # noqa: E402
from torch.nn.functional import kl_div, log_softmax  # noqa: E402

from megatron_logra import distributed  # noqa: E402
from megatron_logra.config import ParallelConfig  # noqa: E402
from megatron_logra.figures import BLUE, GREY, ORANGE, VERMILION  # noqa: E402
from megatron_logra.model.gpt import build_model, forward_head, transformer_config  # noqa: E402
from megatron_logra.sketch.capture import Target  # noqa: E402
from megatron_logra.sync.payload import assemble  # noqa: E402
from megatron_logra.sync.receiver import Receiver  # noqa: E402
from megatron_logra.sync.sender import Sender  # noqa: E402

MODEL = {
    "layers": 2,
    "hidden": 128,
    "vocabulary": 256,
    "rank": 16,
    "sequence": 32,
    "batch": 8,
    "precision": "bf16",
    "mode": "fixed_ratio",
    "master": "replicated",
    "tensor": 1,
    "sequence_parallel": False,
    "probe": 0,
}
"""The program of `bench_step`: its model, and the options of its steps."""
BATCHES = 4
"""Batches that are learnt in turn."""
KL_EVERY = 10
"""Updates between comparisons of predictions."""
COLOURS = {"bf16 + 16 bits": BLUE, "bf16": VERMILION, "bf16, refreshed": ORANGE}
EXACT, ROUNDED, REFRESHED = COLOURS


def flat(targets: list[Target]) -> torch.Tensor:
    """All target weights as the model computes with them, fp32 [number of weights]."""
    return torch.cat([target.weight.detach().flatten().float() for target in targets])


def logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every next token, fp32 [positions, vocabulary]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def head(hidden: torch.Tensor, logits_fn: Any) -> torch.Tensor:
        return log_softmax(logits_fn(hidden).float(), -1).flatten(0, 1)

    with torch.no_grad():
        return forward_head(model, tokens, positions, head)


def measure(updates: int, refresh: int) -> list[dict[str, Any]]:
    """Train, and follow with the three receivers; one row an update."""
    pg = distributed.initialize(ParallelConfig(), seed=0)
    program = Program(argparse.Namespace(**MODEL), "logra", pg)
    learner, cfg = program.learner, program.cfg
    assert learner.sketch is not None
    tconfig, arguments = transformer_config(cfg)
    sender = Sender(learner, cfg.sketch, "drift", audit_interval=0)

    def receiver(name: str) -> Receiver:
        model = build_model(tconfig, arguments, pg)
        return Receiver([model], cfg.sketch, pg, exactness="fp32" if name == EXACT else "bf16")

    receivers = {name: receiver(name) for name in COLOURS}

    def whole(*names: str) -> None:
        piece = sender.refresh()
        assert piece is not None
        for name in names:
            receivers[name].refresh(assemble([piece]))

    whole(*receivers)
    generator = torch.Generator().manual_seed(0)
    shape = (BATCHES, MODEL["batch"], MODEL["sequence"])
    batches = torch.randint(0, MODEL["vocabulary"], shape, generator=generator)
    targets = learner.sketch.capture.targets
    first = flat(targets)
    rows = []
    for update in range(1, updates + 1):
        program.step([batches[update % BATCHES]])
        piece = sender.update()
        assert piece is not None
        for each in receivers.values():
            each.apply(assemble([piece]))
        if update % refresh == 0:
            whole(REFRESHED)
        trainer = flat(targets)
        row: dict[str, Any] = {
            "update": update,
            "moved": float((trainer - first).norm() / first.norm()),
        }
        predicted = None
        if update % KL_EVERY == 0:
            predicted = logprobs(learner.chunks[0], batches[0])
        for name, each in receivers.items():
            difference = flat(each.capture.targets) - trainer
            row[name] = {
                "relative": float(difference.norm() / trainer.norm()),
                "largest": float(difference.abs().max()),
                "share": float((difference != 0).float().mean()),
            }
            if predicted is not None:
                own = logprobs(each.chunks[0], batches[0])
                kl = kl_div(own, predicted, reduction="none", log_target=True)
                row[name]["kl"] = float(kl.sum(-1).mean())
        rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], refresh: int, path: Path) -> None:
    """Draw both differences over the updates."""
    figure = Figure(figsize=(8, 2.9), layout="constrained", dpi=150)
    weights, policies = figure.subplots(1, 2)
    steps = [row["update"] for row in rows]
    weights.plot(steps, [row["moved"] for row in rows], color=GREY, ls="--", label="trainer moved")
    compared = [row for row in rows if row["update"] % KL_EVERY == 0]
    for name, colour in COLOURS.items():
        label = f"bf16, whole weights every {refresh}" if name == REFRESHED else name
        weights.plot(steps, [row[name]["relative"] for row in rows], color=colour, label=label)
        policies.plot(
            [row["update"] for row in compared], [row[name]["kl"] for row in compared], color=colour
        )
    weights.set_title("‖receiver − trainer‖ / ‖trainer‖, target weights", fontsize=9, loc="left")
    policies.set_title("KL(trainer ‖ receiver), nats a token", fontsize=9, loc="left")
    weights.legend(frameon=False, fontsize=7)
    for axes in (weights, policies):
        axes.set_xlabel("update", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.ticklabel_format(axis="y", scilimits=(-3, 4))
        axes.yaxis.get_offset_text().set_fontsize(7)
        axes.grid(color="#E4E4E4", linewidth=0.6)
    figure.savefig(path)


def main() -> None:
    """Measure and print; with --plot and --json, write picture and figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--refresh", type=int, default=100, help="updates between whole weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    args = parser.parse_args()
    if args.updates < KL_EVERY or args.refresh < 1:
        parser.error(f"--updates: expected at least {KL_EVERY}, and --refresh at least 1")
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows = measure(args.updates, args.refresh)
    last = rows[-1]
    print(f"{args.updates} updates, {time.perf_counter() - started:.0f} s")
    print(f"the trainer's weights moved by {last['moved']:.2e} of their norm")
    print(f"{'':16}{'largest over all updates':>38}{'weights that':>22}")
    print(f"{'receiver':16}{'relative':>12}{'weight':>13}{'KL, nats':>13}{'differ at the end':>22}")
    for name in COLOURS:
        worst = {key: max(row[name].get(key, 0.0) for row in rows) for key in (*last[name], "kl")}
        print(
            f"{name:16}{worst['relative']:>12.2e}{worst['largest']:>13.2e}{worst['kl']:>13.2e}"
            f"{last[name]['share']:>21.1%}"
        )
    if args.plot:
        plot(rows, args.refresh, args.plot)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
