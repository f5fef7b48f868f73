"""metrics.jsonl: each step once, numbers finite or null, keys as documented."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_logra.errors import UserError
from megatron_logra.metrics import METRIC_KEYS, MetricsWriter, check_key, read_metrics

CONTRACT = """step time/{rollout,reward,forward_backward,reduce,probe,apply,sync,checkpoint,step}_s
reward/{mean,std,zero_variance_groups} rollout/{tokens,tokens_per_s,length_mean,truncated}
policy/{kl_predicted,kl_predicted_scaled,kl_budget,alpha,kl_realised,mismatch,entropy}
train/{loss,sketch_norm,update_ratio,skipped}
memory/{weights,master,gradients,optimizer,sketches,projections,static,peak}_bytes
comm/{gradient,sketch,parameter}_bytes sync/{bytes,seconds,version,drift_max}"""


def expand(pattern: str) -> list[str]:
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", pattern)
    if match is None:
        return [pattern]
    return [match[1] + name + match[3] for name in match[2].split(",")]


def random_record(rng: random.Random) -> dict[str, float]:
    keys = [metric.key for metric in METRIC_KEYS if metric.key != "step"]
    return {key: rng.gauss(0, 1) * 10 ** rng.randint(-9, 9) for key in rng.sample(keys, 12)}


def test_every_key_that_users_rely_on_is_documented():
    keys = {metric.key for metric in METRIC_KEYS}
    assert len(keys) == len(METRIC_KEYS)
    assert {key for pattern in CONTRACT.split() for key in expand(pattern)} <= keys
    assert all(metric.unit and metric.meaning for metric in METRIC_KEYS)


def test_values_read_back_bit_for_bit(tmp_path):
    rng = random.Random()
    records = [random_record(rng) for _ in range(20)]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, record in enumerate(records):
            writer.write(step, record)
            # On the disk before `write` returns, not when the file is closed.
            assert read_metrics(tmp_path)[-1] == {"step": step} | record
    assert read_metrics(tmp_path) == [{"step": s} | r for s, r in enumerate(records)]


def test_non_finite_values_become_null(tmp_path):
    values = {
        "train/loss": math.nan,
        "train/lr": math.inf,
        "policy/alpha": np.float32("-inf"),
        "policy/entropy": None,
        "train/skipped": True,
        "train/tokens": np.int64(7),
        "train/grad_norm": np.float32(0.5),
    }
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        written = writer.write(0, values)
    expected = {"step": 0} | dict(zip(values, [None, None, None, None, 1, 7, 0.5], strict=True))
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict == written == expected


@pytest.mark.parametrize("value", ["0.5", [1.0], {}])
def test_a_value_that_is_no_number_is_refused(tmp_path, value):
    with (
        MetricsWriter(tmp_path, tensorboard=False) as writer,
        pytest.raises(TypeError, match="must be a number"),
    ):
        writer.write(0, {"train/loss": value})
    assert read_metrics(tmp_path) == []


def test_resuming_leaves_each_step_once(tmp_path):
    rng = random.Random()
    straight = [random_record(rng) for _ in range(15)]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(11):  # went on to step 10 after the checkpoint at 6 …
            writer.write(step, straight[step] if step < 6 else random_record(rng))
    with MetricsWriter(tmp_path, tensorboard=False, start_step=6) as writer:
        for step in range(6, 15):
            writer.write(step, straight[step])
    assert read_metrics(tmp_path) == [{"step": s} | r for s, r in enumerate(straight)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_run_begins_with_no_record(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(0, {"train/loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1


def test_the_torn_last_line_of_a_killed_run_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "train/loss": 2.5}\n'
    for torn in ('{"step": 1, "trai', '{"step": 1}', ""):
        file.write_text(whole + torn)
        assert read_metrics(tmp_path) == [{"step": 0, "train/loss": 2.5}]
        with MetricsWriter(tmp_path, tensorboard=False, start_step=1) as writer:
            writer.write(1, {"train/loss": 1.0})
        assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", '{"step": "0"}', ""])
def test_a_malformed_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: expected a JSON object with a step"):
        read_metrics(tmp_path)


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: No such file or directory; expected"):
        read_metrics(tmp_path)


def test_a_step_cannot_be_written_twice(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, start_step=3) as writer:
        with pytest.raises(ValueError, match="step 2 comes after step 2"):
            writer.write(2, {})
        writer.write(3, {})
        with pytest.raises(ValueError, match="step 3 comes after step 3"):
            writer.write(3, {})


def test_misspelled_keys_are_refused_with_the_right_spelling():
    for wrong, right in (
        ("reward/maen", "reward/mean"),
        ("policy/kl_realized", "policy/kl_realised"),
        ("memory/sketch_bytes", "memory/sketches_bytes"),
    ):
        with pytest.raises(ValueError, match=f"did you mean {right}"):
            check_key(wrong)
    with pytest.raises(ValueError, match="not a metric"):
        check_key("loss")


def test_free_keys_are_taken():
    for key in ("eval/pass@1", "eval/greedy", "reward/chain_sum/mean", "mine/anything"):
        check_key(key)


def test_tensorboard_gets_the_finite_scalars_of_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = [random.Random(step).random() for step in range(6)]
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            values = {"train/loss": losses[step] if step < 3 else -1.0}
            writer.write(step, values | {"train/lr": math.nan})
    with MetricsWriter(tmp_path, start_step=3) as writer:
        for step in range(3, 6):
            writer.write(step, {"train/loss": losses[step]})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(6))
    assert [event.value for event in scalars] == pytest.approx(losses, rel=1e-6)
    assert Path(tmp_path / "metrics.jsonl").exists()
