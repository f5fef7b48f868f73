"""The batch scripts under a real Slurm: ranks, stops, requeues, failures, arrays, limits."""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import NODES, REPO, Cluster, why_not
from test_ranks import VARIES, assert_same_records, config_for

from megatron_logra import attempts
from megatron_logra.config import Config, dump_yaml
from megatron_logra.metrics import read_metrics
from megatron_logra.rl import trainer

sys.path.insert(0, str(REPO / "tools"))

import scaling_study

SCRIPTS = sorted(path.name for path in (REPO / "slurm").glob("*.sbatch"))
PROGRAM = """\
#!/usr/bin/env bash
# In place of Python: keeps what a rank was started with, and ends as it is told to.
{ echo "host=$SLURMD_NODENAME arguments=$*"
  for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT \\
    CUDA_VISIBLE_DEVICES OMP_NUM_THREADS; do echo "$name=${!name:-}"; done; } \\
  >"$RECORDS/$SLURM_JOB_ID.$LOGRA_LIFE.$RANK"
exit "${CODE:-0}"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    running = Cluster()
    yield running
    running.close()


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """An environment whose Python only records what it was started with."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PROGRAM)
    python.chmod(0o755)
    return python.parents[1]


def settings(tmp_path: Path, venv: Path | None = None, **variables: str) -> dict[str, str]:
    """Everything that the scripts want to be told."""
    return {
        "LOGRA_ACCOUNT": "default",
        "LOGRA_PARTITION": "default",
        "MEGATRON_LOGRA_VENV": str(venv or Path(sys.prefix)),
        "LOGRA_LOGS": str(tmp_path / "logs"),
        "LOGRA_INTERFACE": "lo",
        "RECORDS": str(tmp_path),
        "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}",
        **variables,
    }


def submit(
    cluster: Cluster,
    tmp_path: Path,
    script: str,
    *arguments: str,
    nodes: int = 1,
    tasks: int = 2,
    **variables: str,
) -> str:
    """Submit by the script itself; returns the job's id."""
    venv = variables.pop("venv", None)
    options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1"]
    options += ["--gpus-per-node=0", "--time=15"]
    # Slurm's own request to stop comes at once where less time than this is left.
    options += ["--signal=B:USR1@20"]
    done = subprocess.run(
        [str(REPO / "slurm" / script), *options, *arguments],
        env={**cluster.environment, **settings(tmp_path, venv and Path(venv), **variables)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def output(tmp_path: Path, job: str) -> str:
    """What the batch script and the ranks have said."""
    files = [*(tmp_path / "logs").glob(f"*-{job}.out"), *(tmp_path / "logs").glob(f"{job}/*.log")]
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(files))


def records(tmp_path: Path, job: str) -> dict[str, dict[str, str]]:
    """What the recorder's ranks were started with, by `LIFE.RANK`."""
    return {
        path.name.removeprefix(f"{job}."): dict(
            line.partition("=")[::2] for line in path.read_text().splitlines()
        )
        for path in tmp_path.glob(f"{job}.*")
    }


def free_run(run_dir: Path, **train: Any) -> Path:
    """A run's configuration as a file: three steps that take long enough to come between."""
    config = config_for(
        run_dir,
        train={"steps": 3, "prompts_per_step": 3, "responses_per_prompt": 4}
        | {"micro_batch_size": 4, **train},
        checkpoint={"interval": 0},
    )
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.parent / f"{run_dir.name}.yaml"
    data = config.model_dump()
    data["environment"][0]["params"] = {"pause": 0.5}
    path.write_text(dump_yaml(Config.model_validate(data)))
    return path


# --- without a cluster ----------------------------------------------------------------------------


def script_alone(
    script: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if "LOGRA" not in k and "SLURM" not in k}
    return subprocess.run(
        [str(REPO / "slurm" / script), *arguments],
        env={**clean, "LOGRA_SITE": "/dev/null", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_all_that_is_missing(script: str) -> None:
    done = script_alone(script, "--dry-run", "CONFIG")
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    for name in ("LOGRA_ACCOUNT", "LOGRA_PARTITION", "MEGATRON_LOGRA_VENV"):
        assert sum(f"{name} is missing" in line for line in lines) == 1
    assert len(lines) == 3
    assert "usage: slurm/" + script in script_alone(script).stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEGATRON_LOGRA_VENV", "/nowhere"),
        ("LOGRA_CONTAINER", "docker"),
        ("LOGRA_CONTAINER", "pyxis"),
        ("LOGRA_LAUNCHER", "mpirun"),
        ("LOGRA_RETRIES", "often"),
        ("LOGRA_REQUEUE", "yes"),
        ("LOGRA_SITE", "/nowhere"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str, tmp_path: Path) -> None:
    given = {**settings(tmp_path), variable: value}
    done = script_alone("train_1node.sbatch", "--dry-run", "CONFIG", **given)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    missing = "LOGRA_IMAGE" if value == "pyxis" else variable
    assert missing in done.stderr


def test_settings_come_from_the_site_file_and_the_environment_wins(tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text('# ours\nLOGRA_ACCOUNT="physics"\nLOGRA_PARTITION=a100\nLOGRA_QOS=long\n')
    given = {"LOGRA_SITE": str(site), "MEGATRON_LOGRA_VENV": sys.prefix, "LOGRA_PARTITION": "h200"}
    done = script_alone(
        "train_multinode.sbatch", "--dry-run", "--nodes=4", "C.yaml", "a=b", **given
    )
    assert done.returncode == 0, done.stderr
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("sbatch ")]
    words = command.split()
    assert {"--account=physics", "--partition=h200", "--qos=long", "--nodes=4"} <= set(words)
    assert words[-2:] == ["C.yaml", "a=b"]
    site.write_text("LOGRA_ACOUNT=physics\n")
    done = script_alone("train_1node.sbatch", "C.yaml", **given)
    assert done.returncode == 2 and f"{site}:1: LOGRA_ACOUNT" in done.stderr


@pytest.mark.parametrize(
    ("container", "wanted"),
    [
        ("pyxis", ["--container-image=IMAGE", "--container-mounts=", "/data:/data"]),
        ("apptainer", ["apptainer exec --nv --bind ", "/data:/data", " IMAGE "]),
    ],
)
def test_a_container_is_around_the_ranks(container: str, wanted: list[str], tmp_path: Path) -> None:
    given = {**settings(tmp_path), "LOGRA_CONTAINER": container, "LOGRA_IMAGE": "IMAGE"}
    del given["MEGATRON_LOGRA_VENV"]
    done = script_alone(
        "train_1node.sbatch", "--dry-run", "C.yaml", LOGRA_MOUNTS="/data:/data", **given
    )
    assert done.returncode == 0, done.stderr
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert all(text in command for text in wanted)
    assert command.index("IMAGE") < command.index("rank.sh python3 -m megatron_logra train ")


def test_scripts_name_no_site() -> None:
    for path in (REPO / "slurm").iterdir():
        if path.suffix in (".sbatch", ".sh"):
            headers = re.findall(r"^#SBATCH.*", path.read_text(), flags=re.MULTILINE)
            assert not re.search(r"account|partition|qos|mail|constraint", "\n".join(headers))


# --- with a cluster -------------------------------------------------------------------------------


@pytest.mark.slurm
def test_each_rank_knows_its_place_on_two_nodes(
    cluster: Cluster, recorder: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, "train_multinode.sbatch", "C.yaml", nodes=2, venv=str(recorder))
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    found = records(tmp_path, job)
    assert sorted(found) == [f"0.0.{rank}" for rank in range(4)]
    for rank in range(4):
        place = found[f"0.0.{rank}"]
        assert place["RANK"] == str(rank) and place["LOCAL_RANK"] == str(rank % 2)
        assert place["WORLD_SIZE"] == "4" and place["LOCAL_WORLD_SIZE"] == "2"
        assert place["host"].split()[0] == NODES[rank // 2]
        assert place["host"].endswith(
            "arguments=-m megatron_logra train --workers-among-ranks C.yaml"
        )
        assert place["MASTER_ADDR"] == NODES[0] and 20000 <= int(place["MASTER_PORT"]) < 32000
    assert len({place["MASTER_PORT"] for place in found.values()}) == 1
    assert {path.name for path in (tmp_path / "logs" / job).iterdir()} == {
        f"0.0.{rank}.log" for rank in range(4)
    }


@pytest.mark.slurm
def test_a_rank_that_sees_one_gpu_takes_it(
    cluster: Cluster, recorder: Path, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        tmp_path,
        "train_multinode.sbatch",
        "--gpus-per-task=1",
        "C.yaml",
        nodes=2,
        venv=str(recorder),
    )
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    for place in records(tmp_path, job).values():
        devices = place["CUDA_VISIBLE_DEVICES"].split(",")
        assert int(place["LOCAL_RANK"]) < len(devices)


@pytest.mark.slurm
@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1)])
def test_a_failed_run_starts_again_so_often_and_a_wrong_input_never(
    cluster: Cluster, recorder: Path, tmp_path: Path, code: int, starts: int
) -> None:
    job = submit(
        cluster,
        tmp_path,
        "train_1node.sbatch",
        "C.yaml",
        venv=str(recorder),
        CODE=str(code),
        LOGRA_RETRIES="2",
    )
    assert cluster.wait(job) == ("FAILED", code), output(tmp_path, job)
    found = records(tmp_path, job)
    assert sorted(found) == [f"0.{life}.{rank}" for life in range(starts) for rank in range(2)]
    resumed = [place["host"].endswith("--resume") for life, place in sorted(found.items())]
    assert resumed == [False] * 2 + [True] * 2 * (starts - 1)


@pytest.mark.slurm
def test_a_job_without_time_to_start_does_not_requeue_for_ever(
    cluster: Cluster, recorder: Path, tmp_path: Path
) -> None:
    python = recorder / "bin" / "python"
    python.write_text(f"#!/usr/bin/env bash\ntouch {tmp_path}/started\nexec sleep 100\n")
    job = submit(cluster, tmp_path, "train_1node.sbatch", "--hold=", "C.yaml", venv=str(recorder))
    early = tmp_path / "logs" / job / "stopped_early"
    early.parent.mkdir(parents=True)
    early.write_text("0.0\n1.0\n")  # two lives that ended like this
    cluster.run("scontrol", "release", job)
    cluster.wait_for((tmp_path / "started").exists, "the ranks are started")
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    state, code = cluster.wait(job)
    assert state == "FAILED" and code not in (0, 75), output(tmp_path, job)
    assert "expected a --time that leaves" in output(tmp_path, job)


@pytest.mark.slurm
def test_a_dry_run_in_a_job_shows_every_rank_and_starts_none(
    cluster: Cluster, recorder: Path, tmp_path: Path
) -> None:
    variables = settings(tmp_path, recorder)
    told = cluster.run(
        *("sbatch", "--parsable", "--wait", "--nodes=2", "--ntasks-per-node=2"),
        *("--cpus-per-task=1", "--gpus-per-node=0", "--time=1", f"--output={tmp_path}/out"),
        *(f"--chdir={REPO}", str(REPO / "slurm" / "train_multinode.sbatch")),
        *("--dry-run", "C.yaml"),
        **variables,
    )
    text = (tmp_path / "out").read_text()
    for rank in range(4):
        place = f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank % 2} on {NODES[rank // 2]}"
        assert place in text, text
    assert "NCCL_SOCKET_IFNAME=lo" in text and "train --workers-among-ranks C.yaml" in text
    assert not records(tmp_path, told.strip())


def wait_for_steps(cluster: Cluster, tmp_path: Path, run_dir: Path, job: str, count: int) -> None:
    metrics = run_dir / "metrics.jsonl"

    def holds() -> bool:
        assert cluster.state(job) in ("PENDING", "RUNNING"), output(tmp_path, job)
        return metrics.exists() and metrics.read_text().count("\n") >= count

    cluster.wait_for(holds, f"{count} steps: {output(tmp_path, job)}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank, in one piece."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    trainer.run(config_for(run_dir, checkpoint={"interval": 0}))
    return run_dir


@pytest.mark.slurm
def test_a_stopped_job_requeues_itself_and_goes_on_as_if_nothing_had_been(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    run_dir = tmp_path / "run"
    config = free_run(run_dir)
    job = submit(cluster, tmp_path, "train_multinode.sbatch", str(config), nodes=2)
    wait_for_steps(cluster, tmp_path, run_dir, job, 1)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    assert cluster.field(job, "Restarts") == "1"
    assert "back into the queue" in output(tmp_path, job)
    ends = [attempt["end"] for attempt in attempts.read(run_dir)]
    assert ends == ["stopped on request", "done"]
    assert_same_records(run_dir, uninterrupted)


@pytest.mark.slurm
def test_the_last_ranks_of_a_job_are_the_rollout_workers(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    """Two ranks train on one node and are stopped once; the two on the other generate together."""
    run_dir = tmp_path / "run"
    config = free_run(run_dir)
    separate = tmp_path / "separate.yaml"
    separate.write_text(
        f"base: {config.name}\n"
        "rollout: {placement: separate, sync: sketch, transport: gloo, workers: {tensor: 2}}\n"
    )
    job = submit(cluster, tmp_path, "train_multinode.sbatch", str(separate), nodes=2)
    wait_for_steps(cluster, tmp_path, run_dir, job, 1)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    ends = [attempt["end"] for attempt in attempts.read(run_dir)]
    assert ends == ["stopped on request", "done"]
    assert_same_records(run_dir, uninterrupted, (*VARIES, "sync/"))
    assert all(record["sync/bytes"] > 0 for record in read_metrics(run_dir))


@pytest.mark.slurm
def test_torchrun_stops_too_and_another_number_of_ranks_goes_on(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    run_dir = tmp_path / "run"
    config = free_run(run_dir)
    job = submit(
        cluster,
        tmp_path,
        "train_1node.sbatch",
        str(config),
        LOGRA_LAUNCHER="torchrun",
        LOGRA_REQUEUE="0",
    )
    wait_for_steps(cluster, tmp_path, run_dir, job, 1)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    assert cluster.wait(job) == ("FAILED", 75), output(tmp_path, job)
    done = len(read_metrics(run_dir))
    assert 1 <= done < 3
    job = submit(cluster, tmp_path, "train_1node.sbatch", str(config), "--resume", tasks=1)
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    assert f"resuming after step {done}" in output(tmp_path, job)
    assert_same_records(run_dir, uninterrupted)


@pytest.mark.slurm
def test_a_node_that_goes_down_costs_the_steps_since_the_last_checkpoint(
    cluster: Cluster, tmp_path: Path, uninterrupted: Path
) -> None:
    run_dir = tmp_path / "run"
    config = free_run(run_dir)
    job = submit(
        cluster,
        tmp_path,
        "train_multinode.sbatch",
        str(config),
        "checkpoint.interval=1",
        nodes=2,
        tasks=1,
    )
    wait_for_steps(cluster, tmp_path, run_dir, job, 1)
    cluster.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    cluster.wait_for(lambda: cluster.state(job) == "PENDING", "the job is in the queue again")
    # It comes back by itself (ReturnToService=2) once its daemon reports.
    assert cluster.wait(job) == ("COMPLETED", 0), output(tmp_path, job)
    first, second = attempts.read(run_dir)
    assert first["step"] == 0 and second["step"] >= 1 and second["end"] == "done"
    assert_same_records(run_dir, uninterrupted)


@pytest.mark.slurm
def test_a_study_is_an_array_with_a_task_for_each_run(cluster: Cluster, tmp_path: Path) -> None:
    base = free_run(tmp_path / "base")
    study = {
        "base": base.name,
        "directory": str(tmp_path / "out"),
        "baseline": "optimizer=adam",
        "grids": [
            {
                "optimizer": {"adam": {"optimizer.kind": "adam"}, "r=4": {"sketch.rank": 4}},
                "seed": {"0": {"train.seed": 0}},
            }
        ],
    }
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(study))  # JSON is YAML
    cells = {0: "adam", 1: "r=4"}
    directory = [cell.directory for cell in scaling_study.Study(path).cells]
    job = submit(cluster, tmp_path, "scaling_study.sbatch", str(path), tasks=1)
    # One of the tasks is stopped on its way: it goes back into the queue, and on.
    wait_for_steps(cluster, tmp_path, directory[1], f"{job}_1", 1)
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
    for index, cell in cells.items():
        task = f"{job}_{index}"
        assert cluster.wait(task) == ("COMPLETED", 0), output(tmp_path, task)
        log = output(tmp_path, task) + output(tmp_path, f"{job}/{index}")
        assert f"{index + 1}/2  optimizer {cell}, seed 0" in log
        assert f"{2 - index}/2  " not in log, "the other task's run"
        found = attempts.read(directory[index])
        assert {attempt["job"] for attempt in found} == {cluster.field(task, "JobId")}
        stopped = ["stopped on request"] * index
        assert [attempt["end"] for attempt in found] == [*stopped, "done"]
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2

    job = submit(cluster, tmp_path, "scaling_study.sbatch", str(path), tasks=1)
    for index in cells:
        assert cluster.wait(f"{job}_{index}") == ("COMPLETED", 0), output(tmp_path, job)
        assert attempts.read(directory[index])[-1]["job"] != cluster.field(
            f"{job}_{index}", "JobId"
        ), "it was done"

    tool = [sys.executable, str(REPO / "tools" / "scaling_study.py"), "gather", str(path)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer"], row["done"]) for row in rows] == [("adam", "True"), ("r=4", "True")]
    assert all(int(row["static_bytes"]) > 0 and float(row["step_s"]) > 0 for row in rows)


@pytest.mark.slurm
def test_a_run_ends_before_its_job_does(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = free_run(run_dir, steps=5000)
    job = submit(
        cluster,
        tmp_path,
        "train_1node.sbatch",
        "--signal=B:CONT@20",  # Slurm itself asks for nothing
        *(str(config), "eval.interval=0", "eval.at_start=false"),
        tasks=1,
        LOGRA_REQUEUE="0",
    )
    wait_for_steps(cluster, tmp_path, run_dir, job, 1)
    # Only now, for starting may take long; the run asks again once a minute.
    end = datetime.datetime.now() + datetime.timedelta(seconds=100)
    cluster.run("scontrol", "update", f"JobId={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    assert cluster.wait(job) == ("FAILED", 75), output(tmp_path, job)
    assert "the job ends at" in output(tmp_path, job)
    assert (run_dir / "checkpoints" / "latest").exists()
