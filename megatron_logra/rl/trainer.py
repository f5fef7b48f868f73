"""The training loop.

    problems → rollout → reward → advantage → loss → sketch → direction → step control → weights

`Trainer._reinforcement_step` is this line as code. A step that fails anywhere leaves weights,
moments, counters and seeds as they were; only the data position moves on.

Every rank runs this loop and holds the same global batch, of which it trains on its share. What is
decided, from a step's success to a stop, is decided alike on all; the first rank alone writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_logra import attempts, distributed, memory, platform, stopping, telemetry
from megatron_logra import checkpoint as checkpoints
from megatron_logra.background_save import BackgroundSave
from megatron_logra.config import Config, dump_yaml, require_trainable
from megatron_logra.errors import StopRequested, UserError
from megatron_logra.metrics import (
    METRIC_KEYS,
    METRICS_FILE,
    MetricsWriter,
    make_run_dir,
    read_metrics,
)
from megatron_logra.optimizer.learner import Learner, StepResult
from megatron_logra.progress import Progress
from megatron_logra.rl import evaluate, losses, rollouts
from megatron_logra.rl.advantages import RunningBaseline, advantages
from megatron_logra.rl.batch import Sample, micro_batches, probe_batch
from megatron_logra.rl.environments import Mixture, Problem, build_environment
from megatron_logra.rl.passes import Passes
from megatron_logra.rl.policy import build_policy, join_ranks
from megatron_logra.rl.rollout_copy import RolloutCopy, copy_groups
from megatron_logra.rl.rollouts import Rollout, RolloutMaker, SampleLog
from megatron_logra.rl.workers import Workers
from megatron_logra.wandb_log import WandbLog

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
Record = dict[str, Any]


def run(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Train; results go to `logging.run_dir`.

    Args:
        config: everything about the run.
        resume: go on from the run directory's latest checkpoint; without one, from the start.

    Returns:
        A summary: steps, updates, seconds, accuracies before and after, memory by kind, the last
        checkpoint.

    Raises:
        UserError: the configuration or a file is wrong. What was trained before it turned out has
            been saved.
        StopRequested: SIGTERM, SIGUSR1 or the job's end asked for it; a checkpoint has been saved.
        RuntimeError: too many steps in a row failed; a checkpoint has been saved.
    """
    require_trainable(config)
    join_ranks(config)
    run_dir = Path(config.logging.run_dir)
    source = distributed.first(lambda: _prepare_run_dir(run_dir, resume))
    with ExitStack() as stack:
        environment = build_environment(config.environment, config.train.seed)
        stack.callback(environment.close)
        distributed.first(environment.check)
        distributed.first(lambda: make_run_dir(run_dir))
        if distributed.rank() == 0:
            stack.enter_context(attempts.recorded(run_dir, _step_of(source)))
        trainer = Trainer(config, environment, source)
        if distributed.rank() == 0:
            (run_dir / CONFIG_FILE).write_text(dump_yaml(config), encoding="utf-8")
        return trainer.run()


@dataclass
class State:
    """Where a run is, besides weights and optimizer."""

    step: int = 0
    """Completed steps."""
    data_position: int = 0
    """Training problems used."""
    failed_in_a_row: int = 0
    """Steps without an update for a reason other than a lack of signal."""


class Trainer:
    """One run.

    Args:
        config: everything about it.
        environment: where problems come from.
        source: verified checkpoint to go on from.
    """

    def __init__(self, config: Config, environment: Mixture, source: Path | None) -> None:
        self.config = config
        self.environment = environment
        self.run_dir = Path(config.logging.run_dir)
        self.state = State()
        self.baseline = RunningBaseline(config.algorithm.baseline_ema)
        copy_pg = copy_groups(config) if config.rollout.layout is not None else None
        self.policy = build_policy(config)
        if source is None and config.checkpoint.load is not None:
            self.policy.load_weights(Path(config.checkpoint.load))
        self.learner = Learner(self.policy.chunks, self.policy.tconfig, config, self.policy.pg)
        self._unwritten: Record | None = None
        self._saved_step = 0
        self._background: BackgroundSave | None = None
        self._reason = ""
        self.deadline = stopping.Deadline(
            distributed.first(stopping.job_end),
            stopping.job_end,
            self.learner.memory_bytes()["static"],
        )
        if source is not None:
            self._restore(source)
        self.telemetry = telemetry.Telemetry(config.logging.telemetry_interval_s)
        self.workers = (
            Workers(config, self.learner) if config.rollout.placement == "separate" else None
        )
        self.copy = RolloutCopy(config, self.policy, copy_pg) if copy_pg is not None else None
        self.maker = RolloutMaker(
            self.copy.policy if self.copy else self.policy,
            environment,
            self.workers.engine if self.workers else None,
        )
        self.maker.version = self.learner.update
        self.samples = SampleLog(
            self.run_dir, config.logging.rollouts_per_step, config.logging.rollouts_kept
        )
        self.sft = config.algorithm.name == "sft"
        self._held_out: list[Problem] | None = None
        self.progress = Progress(config.train.steps, self.state.step, silent=distributed.rank() > 0)
        self.passes = Passes(self.policy, self.progress)

    # --- the loop ---------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """All steps that are left."""
        config, state = self.config, self.state
        started = time.perf_counter()
        before: dict[str, evaluate.Accuracy] | None = None
        after: dict[str, evaluate.Accuracy] | None = None
        path: Path | None = None
        skipped = 0
        with (
            self.workers or nullcontext(),
            self.progress,
            self.telemetry,
            self._open_metrics() as writer,
            stopping.requests() as request,
        ):
            if self.workers is not None:
                self.workers.engine.stop_requested = lambda: request.made
            while state.step < config.train.steps:
                begun = time.perf_counter()
                record = self._blank_record()
                try:
                    if self._evaluation_due():
                        found = self._evaluate(record)
                        before = found if state.step == 0 else before
                    record |= self._supervised_step() if self.sft else self._reinforcement_step()
                except (UserError, StopRequested):
                    # A problem or a reward is wrong, or the wait for workers is given up: nothing
                    # of this step is applied.
                    self._save_what_is_done()
                    raise
                skipped += record["train/skipped"]
                self._account(record)
                state.data_position += config.train.prompts_per_step
                state.step += 1
                last = state.step == config.train.steps
                try:
                    self._sync(record)
                except UserError:  # the step is done, whatever becomes of the workers
                    self._save_what_is_done(record)
                    raise
                self.deadline.step_took(time.perf_counter() - begun)
                out_of_time = distributed.rank() == 0 and not last and self.deadline.reached()
                stop = distributed.any_rank(request.made or out_of_time)
                if last and config.eval.at_end:
                    try:
                        after = self._evaluate(record)
                    except (UserError, StopRequested):
                        self._save_what_is_done(record)
                        raise
                path = self._finish_background_save() or path
                if self._checkpoint_due(last) or stop:
                    waits = last or stop or not config.checkpoint.async_save
                    path = self._save(record, background=not waits) or path
                record["time/step_s"] = time.perf_counter() - begun
                if writer is not None:
                    record = writer.write(state.step - 1, record)
                self.progress.step(state.step - 1, record)
                if state.failed_in_a_row >= config.train.max_skipped_in_a_row:
                    self._save_what_is_done()
                    raise RuntimeError(
                        f"{state.failed_in_a_row} steps in a row failed, the last one because "
                        f"{self._reason}; see train.max_skipped_in_a_row"
                    )
                if stop and not last:
                    why = f": {self.deadline.reason()}" if out_of_time else ""
                    raise StopRequested(f"stopped after step {state.step}, saved {path}{why}")
        return {
            "run_dir": str(self.run_dir),
            "steps": state.step,
            "updates": self.learner.update,
            "skipped": skipped,
            "seconds": time.perf_counter() - started,
            "before": _to_json(before),
            "after": _to_json(after),
            "memory": _largest(distributed.each(self.learner.memory_bytes)),
            "checkpoint": str(path) if path else None,
        }

    def _reinforcement_step(self) -> Record:
        """One step of reinforcement learning."""
        config = self.config
        problems = self._next_problems()
        self._ask_ahead()
        batch = self.maker.make(
            problems,
            config.train.responses_per_prompt,
            config.rollout.sampling,
            update=self.state.step,
            stream="rollout",
            progress=lambda done, of: self.progress.phase("rollout", done, of),
        )
        record: Record = {**rollouts.metrics(batch)}
        baseline = self.baseline.state_dict()
        values = advantages(torch.tensor(batch.rewards()), config.algorithm, self.baseline)
        fresh = [self._lag(rollout) <= config.rollout.max_lag for rollout in batch.all]
        samples = [
            _sample(rollout, advantage if used else 0.0)
            for rollout, advantage, used in zip(
                batch.all, values.flatten().tolist(), fresh, strict=True
            )
        ]
        record["rollout/lag"] = max(map(self._lag, batch.all))
        record["rollout/stale"] = fresh.count(False)
        self.samples.write(self.state.step, batch, [sample.advantage for sample in samples])
        result = self._update(samples, [rollout.problem for rollout in batch.all], record)
        if result is None or not result.applied:
            self.baseline.load_state_dict(baseline)
        if config.algorithm.name == "reinforce":
            record["reward/baseline"] = self.baseline.value
        # Who reads the trainer's own weights is sent nothing, and drifts nowhere.
        record |= {"time/sync_s": 0.0, "sync/seconds": 0.0, "sync/bytes": 0}
        record["sync/version"] = self.learner.update
        record["sync/drift_max"] = batch.drift if self.workers or self.copy else 0.0
        return record

    def _sync(self, record: Record) -> None:
        """Bring who generates to the weights, if they have changed; `record` gets `sync/*`."""
        generating = self.workers or self.copy
        if generating is None or self.maker.version == self.learner.update:
            return
        started = time.perf_counter()
        record["sync/bytes"] = generating.publish()
        self.maker.version = self.learner.update
        record["time/sync_s"] = record["sync/seconds"] = time.perf_counter() - started

    def _ask_ahead(self) -> None:
        """Let separate workers generate for this step, and for as many more as may lag behind."""
        if self.workers is None:
            return
        config = self.config
        for ahead in range(config.rollout.max_lag + 1):
            step = self.state.step + ahead
            if step < config.train.steps and not self.maker.has_asked("rollout", step):
                self.maker.ask(
                    self._next_problems(ahead),
                    config.train.responses_per_prompt,
                    config.rollout.sampling,
                    update=step,
                    stream="rollout",
                )

    def _lag(self, rollout: Rollout) -> int:
        """Updates by which the oldest policy that a response was sampled from is behind."""
        return self.learner.update - min(rollout.response.versions, default=self.learner.update)

    def _supervised_step(self) -> Record:
        """One step on given responses."""
        problems = self._next_problems()
        record: Record = {}
        self._update([self._target(problem) for problem in problems], problems, record)
        return record

    def _update(
        self, samples: list[Sample], problems: list[Problem], record: Record
    ) -> StepResult | None:
        """From samples to new weights; None if no sample carries a signal.

        Args:
            samples: the global batch.
            problems: which each sample answers, for messages.
            record: gets `time/*`, `train/*` and `policy/*`.
        """
        config, pad_id = self.config, self.policy.tokenizer.pad_id
        record["train/skipped"] = 1
        batches = micro_batches(
            samples,
            config.train.micro_batch_size,
            pad_id,
            length_multiple=self.policy.length_multiple,
            count_multiple=self.policy.micro_batch_multiple,
            uniform=len(self.policy.chunks) > 1,
            share=self.policy.data_rank,
        )
        record["train/tokens"] = sum(len(s.response_ids) for s in samples if s.carries_loss)
        if not batches:  # where all is solved there is no signal; that is no failure
            return None
        started = time.perf_counter()
        self.learner.zero_grad()
        sums, bad = self.passes.train(self.learner, batches)
        record["time/forward_backward_s"] = time.perf_counter() - started
        mismatch = losses.ratio(sums, "mismatch", "mismatch_tokens")
        record |= {
            "train/loss": losses.ratio(sums, "loss"),
            "policy/mismatch": mismatch,
            "policy/entropy": losses.ratio(sums, "entropy"),
            "policy/clipped": losses.ratio(sums, "clipped"),
            "policy/importance_truncated": losses.ratio(sums, "truncated"),
            "policy/logprob_clamped": sums.get("clamped"),
        }
        if bad:
            named = ", ".join(f"{place} (problem {problems[place].id})" for place in bad[:4])
            self._failed(f"the loss is not finite in response {named}")
            return StepResult(applied=False)
        self.progress.phase("step")
        probe = None
        if self.learner.predictor is not None:
            control = config.step_control
            probe = probe_batch(
                samples,
                control.probe_responses,
                control.probe_max_tokens,
                pad_id,
                length_multiple=self.policy.length_multiple,
            ).to(platform.device())
        result = self.learner.step(probe, mismatch)
        record |= {f"time/{phase}_s": seconds for phase, seconds in result.seconds.items()}
        record |= {
            "policy/kl_predicted": result.kl_predicted,
            "policy/kl_predicted_scaled": result.kl_predicted_scaled,
            "policy/kl_budget": result.kl_budget,
            "policy/kl_realised": result.kl_realised,
            "policy/kl_ratio": result.kl_ratio,
            "policy/kl_along": result.kl_along,
            "policy/kl_correction": result.kl_correction,
            "policy/alpha": result.alpha,
            "train/sketch_norm": result.sketch_norm,
            "train/update_ratio": result.update_ratio,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
        }
        for note in result.notes:
            self.progress.message(note)
        if result.applied:
            record["train/skipped"] = 0
            self.state.failed_in_a_row = 0
        else:
            self._failed(result.reason or "the optimizer refused")
        return result

    def _failed(self, reason: str) -> None:
        self._reason = reason
        self.state.failed_in_a_row += 1
        self.progress.message(f"step {self.state.step} skipped: {reason}")

    def _next_problems(self, ahead: int = 0) -> list[Problem]:
        """The problems of this step, or of one that is so many steps ahead."""
        count = self.config.train.prompts_per_step
        first = self.state.data_position + ahead * count
        return distributed.first(
            lambda: [self.environment.train_problem(place) for place in range(first, first + count)]
        )

    def _target(self, problem: Problem) -> Sample:
        """A problem with its given response, which ends with the tokenizer's end token."""
        if not problem.response:
            raise UserError(
                f"environment {problem.environment}: problem {problem.id} has no response; "
                "algorithm sft needs one for each"
            )
        tokenizer = self.policy.tokenizer
        prompt = self.maker.prompt(problem)
        response = [*tokenizer.encode(problem.response), tokenizer.eos_id]
        return Sample(prompt, response[: self.policy.max_length - len(prompt)])

    # --- evaluation -------------------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        """Before the first step, and before each one after so many updates.

        So `eval/*` of a record is of the weights that its step began with; only the last record
        has the accuracy that training ended with.
        """
        step, interval = self.state.step, self.config.eval.interval
        return self.config.eval.at_start if step == 0 else interval > 0 and step % interval == 0

    def _evaluate(self, record: Record) -> dict[str, evaluate.Accuracy]:
        """Measure on the held-out problems; `record` gets `eval/*`."""
        started = time.perf_counter()
        if self._held_out is None:
            self._held_out = distributed.first(
                lambda: self.environment.held_out(self.config.eval.problems, evaluate.HELD_OUT_SEED)
            )
        found = {}
        if self.sft:
            samples = [self._target(problem) for problem in self._held_out]
            record["eval/loss"] = self.passes.mean_loss(samples)
        else:
            found = evaluate.accuracies(
                self.maker,
                self._held_out,
                self.config,
                lambda done, of: self.progress.phase("eval", done, of),
            )
            record["eval/pass@1"] = found["sampled"].pass_at_1
            if "greedy" in found:
                record["eval/greedy_pass@1"] = found["greedy"].pass_at_1
        spent = time.perf_counter() - started
        record["time/eval_s"] = (record["time/eval_s"] or 0.0) + spent
        self.progress.skip_time()
        return found

    # --- accounts ---------------------------------------------------------------------------

    def _blank_record(self) -> Record:
        """Every documented key that has a meaning in this run, null until it is measured."""
        absent = ("reward", "rollout", "sync") if self.sft else ()
        keys = (metric.key for metric in METRIC_KEYS)
        return {key: None for key in keys if key != "step" and key.split("/")[0] not in absent}

    def _account(self, record: Record) -> None:
        """Memory, communication and telemetry of the rank with most of it."""
        learner = self.learner
        own = {f"memory/{kind}_bytes": size for kind, size in learner.memory_bytes().items()}
        own["memory/rollout_copy_bytes"] = self.copy.bytes if self.copy else 0
        own["memory/peak_bytes"] = memory.peak_bytes()
        own |= {f"comm/{kind}_bytes": size for kind, size in learner.comm_bytes().items()}
        taken = self.telemetry.take()
        every = distributed.each(lambda: (own, taken))
        record |= _largest([sizes for sizes, _ in every])
        by_rank = [values for _, values in every]
        for key in dict.fromkeys(key for values in by_rank for key in values):
            record[key] = max(values[key] for values in by_rank if key in values)
        if distributed.rank() == 0:
            telemetry.write(self.run_dir, self.state.step, by_rank)

    def _open_metrics(self) -> AbstractContextManager[MetricsWriter | None]:
        """The metrics file, without records of steps that come again; None if not ours to write."""
        if distributed.rank() > 0:
            return nullcontext()
        step, unwritten = self.state.step, self._unwritten
        path = self.run_dir / METRICS_FILE
        written = [r["step"] for r in read_metrics(self.run_dir)] if path.exists() else []
        if unwritten is None or step - 1 in written:
            return self._writer(step)
        # Killed after the save and before the record of its step was written.
        writer = self._writer(step - 1)
        writer.write(step - 1, unwritten)
        return writer

    def _writer(self, step: int) -> MetricsWriter:
        settings, wandb = self.config.logging, None
        if settings.wandb is not None:
            wandb = WandbLog(self.run_dir, settings.wandb, self.config.model_dump())
        return MetricsWriter(self.run_dir, settings.tensorboard, step, wandb)

    # --- checkpoints ------------------------------------------------------------------------

    def _checkpoint_due(self, last: bool) -> bool:
        interval = self.config.checkpoint.interval
        if last:
            return self.config.checkpoint.save_at_end
        return interval > 0 and self.state.step % interval == 0

    def _save_what_is_done(self, record: Record | None = None) -> None:
        """Save the completed steps before the run ends with an error."""
        path = self._finish_background_save(wait=True)
        if self.state.step > self._saved_step:
            path = self._save(record)
        if path is not None:
            self.progress.message(f"saved {path}; go on from it with --resume")

    def _finish_background_save(self, *, wait: bool = False) -> Path | None:
        """Make what is being saved the latest checkpoint, if it is written; None if it is not."""
        save = self._background
        if save is None or not (wait or save.done()):
            return None
        self._background = None
        return save.finish()

    def _save(self, record: Record | None, *, background: bool = False) -> Path | None:
        """Save everything.

        Args:
            record: of the last step, if it is not written yet; a resumed run writes it.
            background: only begin to, and return None.
        """
        started = time.perf_counter()
        self._finish_background_save(wait=True)
        self.progress.phase("checkpoint")
        # Times differ from rank to rank.
        written = distributed.first(lambda: dict(record) if record is not None else None)
        save = BackgroundSave if background else checkpoints.save
        saved = save(
            self.run_dir / CHECKPOINTS,
            self.state.step,
            {
                **self._sharded_state(is_loading=False),
                "trainer": {
                    **asdict(self.state),
                    "baseline": self.baseline.state_dict(),
                    "record": written,
                },
            },
            {
                "model": self.policy.description(),
                "optimizer": self._optimizer_description(),
                "layout": checkpoints.layout(self.policy.pg),
                "config": self.config.model_dump(),
            },
            self.config.checkpoint.keep,
        )
        self._saved_step = self.state.step
        if record is not None:
            record["time/checkpoint_s"] = time.perf_counter() - started
        if isinstance(saved, BackgroundSave):
            self._background = saved
            return None
        self.deadline.save_took(time.perf_counter() - started)
        return saved

    def _restore(self, path: Path) -> None:
        """Take up a run where `path`, which has been verified, has it."""
        description = checkpoints.read_description(path, verified=True)
        model, optimizer = self.policy.description(), self._optimizer_description()
        checkpoints.require_same(path, description["model"], model, "model")
        checkpoints.require_same(path, description["optimizer"], optimizer, "optimizer")
        wanted = self._sharded_state(is_loading=True)
        same_layout = description.get("layout") == checkpoints.layout(self.policy.pg)
        if not same_layout:
            del wanted["rng"]
        loaded = checkpoints.load(path, wanted)
        checkpoints.set_weights(self.policy.chunks, loaded)
        self.learner.load_state_dict(loaded["learner"])
        if same_layout:
            checkpoints.set_rng_state(loaded["rng"])
        trainer = dict(loaded["trainer"])
        self.baseline.load_state_dict(trainer.pop("baseline"))
        self._unwritten = trainer.pop("record")
        self.state = State(**trainer)
        self._saved_step = self.state.step
        if distributed.rank() > 0:
            return
        print(f"resuming after step {self.state.step} from {path}")
        for change in _changes(description["config"], self.config.model_dump()):
            print(f"changed since then: {change}")

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        weights = checkpoints.weights_state(self.learner.chunks)
        return {
            **weights,
            "learner": self.learner.sharded_state_dict(weights, is_loading),
            "rng": checkpoints.rng_state(self.policy.pg),
        }

    def _optimizer_description(self) -> dict[str, Any]:
        """What decides which optimizer state there is."""
        optimizer = self.config.optimizer
        if optimizer.kind == "adam":
            return {"kind": "adam"}
        return {
            "kind": optimizer.kind,
            "non_targets": optimizer.non_targets,
            "targets": sorted(self.config.sketch.targets),
        }


def _prepare_run_dir(run_dir: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from; refuses to write over another run."""
    if resume:
        source = checkpoints.latest(run_dir / CHECKPOINTS)
        attempts.check(run_dir, _step_of(source))
        if source is None:
            print(f"{run_dir}: no checkpoint yet; starting from the first step")
        return source
    metrics = run_dir / METRICS_FILE
    if checkpoints.list_checkpoints(run_dir / CHECKPOINTS) or (
        metrics.exists() and metrics.stat().st_size
    ):
        raise UserError(
            f"logging.run_dir: {run_dir} already holds a run; go on with it by --resume, or give "
            "another directory"
        )
    if run_dir.is_dir():
        (run_dir / attempts.ATTEMPTS_FILE).unlink(missing_ok=True)
    return None


def _step_of(source: Path | None) -> int:
    """Completed steps of a checkpoint; 0 without one."""
    return int(checkpoints.read_description(source, verified=True)["step"]) if source else 0


def _sample(rollout: Rollout, advantage: float) -> Sample:
    return Sample(
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response.token_ids,
        rollout_logprobs=rollout.response.logprobs,
        advantage=advantage,
        completed=rollout.response.finish_reason == "stop",
    )


def _largest(by_rank: list[dict[str, int]]) -> dict[str, int]:
    """The largest value of each key over the ranks."""
    return {key: max(own[key] for own in by_rank) for key in by_rank[0]}


def _to_json(found: dict[str, evaluate.Accuracy] | None) -> dict[str, Any] | None:
    return {name: value.to_json() for name, value in found.items()} if found else None


def _changes(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`key old → new` for each value that differs; where results go is left out."""
    if key in ("logging", "checkpoint"):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key} {old} → {new}"
