"""A real Slurm of two emulated nodes on this machine: daemons on loopback, in a directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
NODES = ("127.0.0.1", "127.0.0.2")
_CONF = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/munge.socket.2,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
MailProg=/bin/true
SlurmdParameters=config_overrides
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=5
MinJobAge=300
GresTypes=gpu
"""
_NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=10000 Gres=gpu:4 "
    "State=UNKNOWN\n"
)
_PARTITION = (
    "PartitionName=debug Nodes=127.0.0.[1-2] Default=YES DefaultTime=15 MaxTime=INFINITE State=UP "
    "OverSubscribe=NO\n"
)
_LIMIT_S = 600.0
_FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Cluster:
    """Starts the daemons; `close` ends those that it has started.

    Its directory is short, because a socket's path has at most 107 characters.
    """

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm"))
        self.root.chmod(0o755)
        for name in ("state", "log", "dev", "munge", *(f"spool/{node}" for node in NODES)):
            (self.root / name).mkdir(parents=True)
        for number in range(4):  # Slurm wants GPUs to be character devices
            os.mknod(self.root / "dev" / f"nvidia{number}", 0o600 | 0o020000, os.makedev(195, 255))
        ports = _free_ports(3)
        conf = self.root / "slurm.conf"
        conf.write_text(
            _CONF.format(controller=ports[0], root=self.root)
            + "".join(
                _NODE.format(name=node, port=port)
                for node, port in zip(NODES, ports[1:], strict=True)
            )
            + _PARTITION
        )
        (self.root / "gres.conf").write_text(
            "".join(
                f"NodeName={node} Name=gpu File={self.root}/dev/nvidia[0-3]\n" for node in NODES
            )
        )
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        munge = self.root / "munge"
        key = munge / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.run(
            *("munged", f"--key-file={key}", f"--socket={munge}/munge.socket.2"),
            *(f"--pid-file={munge}/munged.pid", f"--log-file={munge}/munged.log"),
            *(f"--seed-file={munge}/munged.seed", "--num-threads=2"),
        )
        self.run("slurmctld")
        for node in NODES:
            self.run("slurmd", "-N", node)
        self.wait_for(self._idle, "both nodes are idle")

    def _idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() == str(len(NODES))

    def run(self, *command: str, **variables: str) -> str:
        """What a command prints; raises if it fails."""
        # Daemons keep the descriptors that they are given: no pipe may wait for their end.
        with tempfile.TemporaryFile("w+") as out:
            done = subprocess.run(
                command,
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
            )
            out.seek(0)
            text = out.read()
        assert done.returncode == 0, f"{command}: {text}"
        return text

    def wait_for(self, holds: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
        """Poll until `holds()`; fails with the daemons' last words."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    "\n".join(path.read_text(errors="replace").splitlines()[-15:])
                    for path in sorted((self.root / "log").glob("*.log"))
                )
                raise AssertionError(f"not within {limit_s:.0f} s: {what}\n{logs}")
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """A job's state, such as RUNNING."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """What `scontrol show job` says."""
        told = self.run("scontrol", "show", "job", "--oneliner", job)
        return next(word.partition("=")[2] for word in told.split() if word.startswith(name + "="))

    def wait(self, job: str, limit_s: float = _LIMIT_S) -> tuple[str, int]:
        """Wait until a job has ended; its state and exit code."""
        self.wait_for(lambda: self.state(job) in _FINAL, f"job {job} has ended", limit_s)
        return self.state(job), int(self.field(job, "ExitCode").partition(":")[0])

    def close(self) -> None:
        """Cancel all jobs, end the daemons by their ids, and delete the directory."""
        with suppress(AssertionError, subprocess.SubprocessError, OSError):
            self.run("scancel", "--full", "-u", "root")
            self.wait_for(
                lambda: not self.run("squeue", "-h", "-t", "R,CG").strip(), "no job runs", 15
            )
        files = ["slurmctld.pid", *(f"slurmd.{node}.pid" for node in NODES), "munge/munged.pid"]
        pids = [int(p.read_text()) for p in map(self.root.joinpath, files) if p.exists()]
        deadline = time.monotonic() + 2
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in pids:
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


def why_not() -> str | None:
    """Install Slurm if it is missing; why there cannot be a cluster, or None."""
    if os.geteuid() != 0:
        return "an emulated Slurm needs root (fake GPUs are device files)"
    done = subprocess.run(
        [str(REPO / "tools" / "install_slurm.sh")], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["tools/install_slurm.sh failed"])[-1]
    return None


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
