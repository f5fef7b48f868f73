"""The command line: `megatron-logra COMMAND …`.

Exit codes: 0 done; 2 the user's input is wrong (one line on stderr); 75 stopped on request after
saving a checkpoint; 1 anything else. torch and Megatron are imported only once a command's
arguments and configuration are known to be right.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import megatron_logra
from megatron_logra import launcher, stopping
from megatron_logra.config import Config, load_config, require_servable, require_trainable
from megatron_logra.errors import (
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    StopRequested,
    UserError,
    lost_a_rank,
    several_ranks,
)

PROGRAM = "megatron-logra"


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser(command: str) -> _Parser:
    return _Parser(
        prog=f"{PROGRAM} {command}", description=COMMANDS[command].__doc__, allow_abbrev=False
    )


def _add_config(parser: _Parser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the configuration, a YAML file")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="changes to it, such as train.steps=10",
    )


def _add_checkpoint(parser: _Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint directory (iter_NNNNNNN); default: the run directory's latest, and "
        "without one the weights that the configuration names",
    )


def _add_ranks(parser: _Parser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="start N local ranks (default: 1); not used where torchrun has started them",
    )


def _starts_ranks(args: argparse.Namespace) -> bool:
    """Whether this process is to start the ranks, and not to be one."""
    if args.nproc < 1:
        raise UserError(f"--nproc {args.nproc}: expected a number of ranks, 1 or more")
    return args.nproc > 1 and not launcher.is_rank()


def _become_rank() -> None:
    """End with the launcher, and prepare the platform before anything imports Megatron-Core."""
    launcher.stop_with_launcher()
    from megatron_logra import platform

    platform.install()


def train(argv: Sequence[str]) -> int:
    """Train a model; results go to logging.run_dir."""
    parser = _parser("train")
    _add_config(parser)
    _add_ranks(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run directory's latest checkpoint"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build every rank in turn without memory, check it, write the plan, and train nothing",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of a dry run; default: --nproc, or as few as the parallel section takes",
    )
    parser.add_argument(
        "--workers-among-ranks",
        action="store_true",
        help="with rollout.placement=separate: of the ranks that srun has started, the last are "
        "the rollout workers'",
    )
    args = parser.parse_intermixed_args(argv)
    starts_ranks = _starts_ranks(args)
    if args.ranks is not None and (not args.dry_run or args.ranks < 1):
        raise UserError(f"--ranks {args.ranks}: expected a number of ranks, with --dry-run")
    config = load_config(args.config, args.overrides)
    require_trainable(config)
    if args.dry_run:
        return _dry_run(config, args.ranks or (args.nproc if args.nproc > 1 else None))
    separate = config.rollout.placement == "separate"
    if separate and args.workers_among_ranks and not launcher.is_rank():
        raise UserError("--workers-among-ranks: expected to be a rank that srun has started")
    if starts_ranks or (separate and not launcher.is_rank()):
        helpers = _rollout_workers(config, args) if separate else []
        return launcher.launch(["train", *argv], args.nproc, helpers)
    with stopping.handled(_stop_at_once):  # until the first step begins
        _become_rank()
        if separate and args.workers_among_ranks:
            from megatron_logra import roles
            from megatron_logra.rollout import worker

            index = roles.take(config)
            if index is not None:
                worker.run(config, index)
                return 0

        from megatron_logra.rl import trainer

        told = _told(trainer.run(config, resume=args.resume))
    if os.environ.get("RANK", "0") == "0":
        print(told)
    return 0


def _dry_run(config: Config, ranks: int | None) -> int:
    from megatron_logra import platform

    platform.install()
    from megatron_logra import dry_run

    dry_run.run(config, ranks)
    return 0


def _rollout_workers(config: Config, args: argparse.Namespace) -> list[launcher.Helper]:
    """The commands that start a run's rollout workers."""
    workers = config.rollout.workers
    command = ["rollout-worker", args.config, *args.overrides, "--index"]
    return [
        launcher.Helper([*command, str(index)], workers.ranks, workers.restarts)
        for index in range(workers.count)
    ]


def _stop_at_once(_number: int, _frame: FrameType | None) -> None:
    """A request to stop, as long as nothing can be lost by it."""
    raise StopRequested("stopped before training began, with nothing to save")


def _told(summary: dict[str, Any]) -> str:
    """What `trainer.run` returned, in a few lines."""
    lines = [f"{summary['steps']} steps, {summary['updates']} updates: {summary['run_dir']}"]
    if summary["checkpoint"]:
        lines.append(f"saved {summary['checkpoint']}")
    for name, after in (summary["after"] or {}).items():
        before = (summary["before"] or {}).get(name)
        begin = f"{before['pass@1']:.3f} → " if before else ""
        lines.append(f"held-out pass@1, {name}: {begin}{after['pass@1']:.3f}")
    return "\n".join(lines)


def _as_rank(
    command: str, argv: Sequence[str], args: argparse.Namespace, work: Callable[[Config], object]
) -> int:
    """Do a command's work as one of its ranks, or start the local ranks that do; the exit code."""
    starts_ranks = _starts_ranks(args)
    config = load_config(args.config, args.overrides)
    if starts_ranks:
        return launcher.launch([command, *argv], args.nproc)
    _become_rank()
    work(config)
    return 0


def rollout_worker(argv: Sequence[str]) -> int:
    """Generate for a trainer elsewhere (rollout.placement: separate), until it has no more."""
    parser = _parser("rollout-worker")
    _add_config(parser)
    parser.add_argument(
        "--index", type=int, required=True, metavar="I", help="which worker, from 0"
    )
    _add_ranks(parser)
    args = parser.parse_intermixed_args(argv)

    def work(config: Config) -> None:
        from megatron_logra.rollout import worker

        worker.run(config, args.index)

    return _as_rank("rollout-worker", argv, args, work)


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint on held-out problems; writes eval.json into the run directory."""
    parser = _parser("eval")
    _add_config(parser)
    _add_checkpoint(parser)
    _add_ranks(parser)
    args = parser.parse_intermixed_args(argv)

    def work(config: Config) -> None:
        from megatron_logra.rl import evaluate

        evaluate.run(config, args.checkpoint)

    return _as_rank("eval", argv, args, work)


def generate(argv: Sequence[str]) -> int:
    """Sample responses to prompts, as rollout.sampling says (temperature 0: greedy)."""
    parser = _parser("generate")
    _add_config(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="may be given repeatedly"
    )
    _add_checkpoint(parser)
    _add_ranks(parser)
    args = parser.parse_intermixed_args(argv)

    def work(config: Config) -> None:
        from megatron_logra.rl import evaluate

        evaluate.generate(config, args.prompt, args.checkpoint)

    return _as_rank("generate", argv, args, work)


def serve(argv: Sequence[str]) -> int:
    """Answer requests over HTTP, as OpenAI's interface does, until a signal says stop."""
    parser = _parser("serve")
    _add_config(parser)
    _add_checkpoint(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: 127.0.0.1, which this machine alone can reach); "
        "nobody is asked for a password",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="serve the weights of the run's trainer (rollout.placement: separate), as they change",
    )
    _add_ranks(parser)
    args = parser.parse_intermixed_args(argv)
    starts_ranks = _starts_ranks(args)
    config = load_config(args.config, args.overrides)
    require_servable(config, follow=args.follow)

    from megatron_logra.rollout import http_port

    http_port.require_packages()
    if starts_ranks:
        return launcher.launch(["serve", *argv], args.nproc)
    with stopping.handled(_end, (signal.SIGINT, signal.SIGTERM)):  # until it serves
        first = os.environ.get("RANK", "0") == "0"
        listener = http_port.listen(args.host, args.port) if first else None
        _become_rank()

        from megatron_logra.rollout import server

        server.run(config, listener, checkpoint=args.checkpoint, follow=args.follow)
    return 0


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def plan(argv: Sequence[str]) -> int:
    """Show memory and communication per rank before anything runs."""
    parser = _parser("plan")
    _add_config(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the run; default: as few as the parallel section takes",
    )
    parser.add_argument(
        "--compare",
        action="append",
        choices=("logra", "adam"),
        default=[],
        help="show this optimizer too",
    )
    parser.add_argument(
        "--gpu-memory", type=float, default=80.0, metavar="GIB", help="of one rank (default: 80)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan of every rank as JSON")
    args = parser.parse_intermixed_args(argv)
    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: expected a number of ranks, 1 or more")
    if not 0 < args.gpu_memory < float("inf"):
        raise UserError(f"--gpu-memory {args.gpu_memory:g}: expected GiB, more than 0")
    config = load_config(args.config, args.overrides)

    from megatron_logra import platform

    platform.quieten()  # nothing runs: a plan needs no stand-ins
    from megatron_logra.planner import report

    report.run(
        config,
        ranks=args.ranks,
        compare=args.compare,
        gpu_memory=args.gpu_memory,
        json_file=args.json,
    )
    return 0


def convert(argv: Sequence[str]) -> int:
    """Make a checkpoint of a Hugging Face directory (from-hf), or the reverse (to-hf)."""
    parser = _parser("convert")
    directions = parser.add_subparsers(dest="direction", required=True, metavar="from-hf | to-hf")
    there = directions.add_parser("from-hf", help="from a Hugging Face directory")
    there.add_argument("source", metavar="SRC", help="Hugging Face directory")
    there.add_argument("target", metavar="DST", help="the checkpoint; must not exist")
    back = directions.add_parser("to-hf", help="to a Hugging Face directory")
    back.add_argument(
        "source", metavar="SRC", help="a checkpoint, or a run directory, whose latest is taken"
    )
    back.add_argument("target", metavar="DST", help="Hugging Face directory; must not exist")
    back.add_argument(
        "--like",
        metavar="DIR",
        help="Hugging Face directory of the model, for configuration and tokenizer; default: what "
        "the checkpoint was made of",
    )
    back.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="default: as in the checkpoint"
    )
    back.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="largest file (default: 5)"
    )
    args = parser.parse_args(argv)
    if args.direction == "to-hf" and not args.shard_gb > 0:
        raise UserError(f"--shard-gb {args.shard_gb:g}: expected more than 0")

    from megatron_logra import platform

    platform.quieten()
    import torch

    from megatron_logra import convert

    source, target = Path(args.source), Path(args.target)
    if args.direction == "from-hf":
        convert.from_hf(source, target)
    else:
        types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        convert.to_hf(
            source,
            target,
            like=Path(args.like) if args.like is not None else None,
            dtype=types[args.dtype] if args.dtype is not None else None,
            shard_bytes=int(args.shard_gb * 10**9),
        )
    print(target)
    return 0


def report(argv: Sequence[str]) -> int:
    """Draw plots and one self-contained HTML page from run directories."""
    parser = _parser("report")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run directory; each gets its plots, the first the page",
    )
    args = parser.parse_args(argv)

    from megatron_logra import report

    print(report.write_report(args.runs))
    return 0


def doctor(argv: Sequence[str]) -> int:
    """Say what is installed and usable here, and what each lack switches off."""
    _parser("doctor").parse_args(argv)

    from megatron_logra import doctor

    return doctor.run()


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "serve": serve,
    "rollout-worker": rollout_worker,
    "convert": convert,
    "plan": plan,
    "report": report,
    "doctor": doctor,
}


def _overview() -> str:
    lines = [f"usage: {PROGRAM} COMMAND ...", "", megatron_logra.__doc__ or "", "", "commands:"]
    lines += [f"  {name:<9} {command.__doc__}" for name, command in COMMANDS.items()]
    lines += ["", f"{PROGRAM} COMMAND --help says more about each."]
    return "\n".join(lines)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        raise UserError(f"a command is missing; expected one of: {', '.join(COMMANDS)}")
    if argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(megatron_logra.__version__)
        return 0
    if argv[0] not in COMMANDS:
        raise UserError(f"{argv[0]}: no such command; expected one of: {', '.join(COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `argv` defaults to the process's arguments."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except SystemExit as exit_:  # argparse, after --help
        return exit_.code if isinstance(exit_.code, int) else 1
    except BaseException as error:
        if launcher.speaks_for_all():
            _explain(error)
        code = _exit_code(error)
    if several_ranks() and code != EXIT_STOPPED:
        # The other ranks wait for this one: nothing may keep it from ending at once.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    return code


def _explain(error: BaseException) -> None:
    """Say on stderr why the command ends."""
    if isinstance(error, UserError):
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
    elif isinstance(error, StopRequested):
        reason = " ".join(str(error).split()) or "stopped on request"
        print(f"{PROGRAM}: {reason}; go on with --resume", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
    elif lost_a_rank(error):
        print(f"{PROGRAM}: lost another rank: {str(error).split('. ')[0]}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return EXIT_USER_ERROR
    return EXIT_STOPPED if isinstance(error, StopRequested) else 1
