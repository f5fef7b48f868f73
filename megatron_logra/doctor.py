"""What is installed and usable on this machine, and what each lack switches off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_logra.rollout import http_port

Status = Literal["ok", "absent", "warning", "missing"]
"""`absent`: something optional is not there; `missing`: something required is not there."""

_MARKS: dict[Status, str] = {"ok": "ok", "absent": "-", "warning": "WARN", "missing": "MISSING"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    part: str
    status: Status
    detail: str
    """Version and place, or what is wrong."""
    effect: str = ""
    """What the lack switches off, or what to do."""


def run() -> int:
    """Print the findings; 0, or 1 if a required part is missing."""
    findings = inspect()
    print(format_findings(findings))
    return 1 if any(finding.status == "missing" for finding in findings) else 0


def inspect() -> list[Finding]:
    """All findings. Nothing but torch and NVML is imported, so broken packages do no harm."""
    gpus = _gpus()
    has_gpu = gpus.status == "ok"
    return [
        python(),
        required("torch", (2, 11)),
        required("megatron-core", (0, 19), below=(0, 20)),
        *map(required, ("transformers", "tokenizers", "safetensors", "pydantic")),
        optional("sentencepiece", "tokenizers that come as SentencePiece models are off"),
        optional("gguf", "fetching the quickstart's model is off"),
        optional("reasoning-gym", "the reasoning_gym environments are off"),
        optional("math-verify", "the math_verify scorer is off"),
        optional("tensorboard", "logging.tensorboard must be false"),
        optional("matplotlib", "the report command is off"),
        server(),
        host(),
        gpus,
        nvml(has_gpu),
        backend("NCCL", "nccl", "several GPUs cannot work together"),
        backend("gloo", "gloo", "several ranks on CPUs are off"),
        transformer_engine(has_gpu),
        bridge(has_gpu),
        apex(),
        flash_attention(),
        slurm(),
    ]


def format_findings(findings: list[Finding]) -> str:
    """The report as text: part, mark, detail, and the effect of a lack on a line of its own."""
    width = max(len(finding.part) for finding in findings)
    lines = []
    for finding in findings:
        mark = _MARKS[finding.status]
        lines.append(f"{finding.part:<{width}}  {mark:<7}  {finding.detail}")
        if finding.effect:
            lines.append(f"{'':<{width}}           → {finding.effect}")
    missing = [finding.part for finding in findings if finding.status == "missing"]
    lines.append("")
    lines.append(
        f"Required and not usable: {', '.join(missing)}." if missing else "All required parts work."
    )
    return "\n".join(lines)


def python() -> Finding:
    """The interpreter; the package refuses to be installed into one older than 3.12."""
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def required(
    distribution: str, at_least: tuple[int, ...] = (), below: tuple[int, ...] | None = None
) -> Finding:
    """A distribution without which nothing works, in a range of versions."""
    version = _version(distribution)
    if version is None:
        return Finding(distribution, "missing", "not installed", "required: tools/bootstrap.sh")
    release = _release(version)
    if release < at_least or (below is not None and release >= below):
        wanted = ">=" + ".".join(map(str, at_least))
        wanted += "" if below is None else ",<" + ".".join(map(str, below))
        return Finding(distribution, "missing", version, f"required: {wanted}")
    return Finding(distribution, "ok", version)


def optional(distribution: str, effect: str) -> Finding:
    """A distribution without which a part is off."""
    version = _version(distribution)
    if version is None:
        return Finding(distribution, "absent", "not installed", effect)
    return Finding(distribution, "ok", version)


def server() -> Finding:
    """What megatron-core's HTTP server imports."""
    versions = {name: _version(name) for name in http_port.PACKAGES.values()}
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        effect = "the serve command is off: pip install 'megatron-logra[serve]'"
        return Finding("HTTP server", "absent", f"not installed: {', '.join(lacking)}", effect)
    present = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("HTTP server", "ok", present)


def host() -> Finding:
    """Cores and memory."""
    try:
        import psutil
    except ImportError:
        return Finding(
            "host", "absent", "psutil is not installed", "cores and memory are not shown here"
        )
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(
        "host",
        "ok",
        f"{cores} CPU cores, {memory.total / 2**30:.1f} GiB ({memory.available / 2**30:.1f} free)",
    )


def _gpus() -> Finding:
    off = "everything runs on the CPU, through stand-ins, over gloo"
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return Finding("GPUs", "absent", f"torch cannot be imported: {error}", off)
    if not torch.cuda.is_available():
        return Finding("GPUs", "absent", "none that torch can use", off)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("GPUs", "ok", f"{len(names)}: {', '.join(names)} (CUDA {torch.version.cuda})")


def nvml(has_gpu: bool) -> Finding:
    """NVIDIA's management library, which measures GPU memory."""
    effect = "GPU memory is measured by torch's allocator alone" if has_gpu else ""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            count = pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        return Finding("NVML", "absent", "nvidia-ml-py is not installed", effect)
    except pynvml.NVMLError as error:
        return Finding("NVML", "absent", str(error), effect)
    return Finding("NVML", "ok", f"driver {driver}, {count} device{'s' if count != 1 else ''}")


def backend(part: str, name: str, effect: str) -> Finding:
    """A communication backend of torch.distributed."""
    try:
        import torch.distributed as dist
    except Exception as error:  # a broken installation raises anything
        return Finding(part, "absent", f"torch cannot be imported: {error}", effect)
    if not dist.is_available() or not dist.is_backend_available(name):
        return Finding(part, "absent", "this torch is built without it", effect)
    if name == "nccl":
        import torch

        if not torch.cuda.is_available():
            return Finding(part, "absent", "built in, but needs a GPU", effect)
        return Finding(part, "ok", ".".join(map(str, torch.cuda.nccl.version())))
    return Finding(part, "ok", "built in")


def transformer_engine(has_gpu: bool) -> Finding:
    """NVIDIA's layers: needed for speed on GPUs, harmful without one."""
    part = "Transformer Engine"
    if importlib.util.find_spec("transformer_engine") is None:
        effect = "layers come from the local specs; for GPUs: pip install 'megatron-logra[te]'"
        return Finding(part, "absent", "not installed", effect if has_gpu else "")
    version = _version("transformer-engine") or _version("transformer_engine") or "version unknown"
    if not has_gpu:
        return Finding(
            part,
            "warning",
            f"{version}, but there is no GPU",
            "it breaks the local layer specs (megatron-core then takes its norms): uninstall it "
            "here, or use an environment without it",
        )
    return Finding(part, "ok", version)


def bridge(has_gpu: bool) -> Finding:
    """Megatron-Bridge, which serves models that are none of our families; see `model.bridge`."""
    part, distribution = "Megatron-Bridge", "megatron-bridge"
    effect = "models of other families than those built in are refused"
    version = _version(distribution)
    if version is None:
        remedy = ": pip install 'megatron-logra[bridge]'" if has_gpu else ""
        return Finding(part, "absent", "not installed", effect + remedy)
    if not (0, 6) <= _release(version) < (0, 7):
        return Finding(part, "warning", f"{version}; expected >=0.6,<0.7", effect)
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding(part, "warning", f"{version}, but no Transformer Engine", effect)
    return Finding(part, "ok", version)


def apex() -> Finding:
    """NVIDIA's apex, which is not on PyPI; the package of that name there is something else."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex (NVIDIA)", "absent", "not installed", "torch's Adam is used instead")
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any(
        (place / "optimizers").is_dir() and (place / "multi_tensor_apply").is_dir()
        for place in places
    ):
        return Finding("apex (NVIDIA)", "ok", _version("apex") or "version unknown")
    return Finding(
        "apex (NVIDIA)",
        "warning",
        f"the package named apex ({spec.origin}) is not NVIDIA's",
        "megatron-core takes it for NVIDIA's: pip uninstall apex",
    )


def flash_attention() -> Finding:
    """flash_attn, which megatron-core's dynamic inference engine calls."""
    if importlib.util.find_spec("flash_attn") is None:
        return Finding(
            "flash_attn", "absent", "not installed", "attention is computed by torch's kernels"
        )
    version = _version("flash-attn") or _version("flash_attn") or "version unknown"
    return Finding("flash_attn", "ok", version)


def slurm() -> Finding:
    """The job scheduler."""
    srun = shutil.which("srun")
    if srun is None:
        return Finding("Slurm", "absent", "no srun on PATH", "runs stay on this machine")
    try:
        done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Slurm", "warning", f"{srun} does not answer: {error}")
    if done.returncode:
        problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return Finding("Slurm", "warning", f"{srun} --version fails: {problem}")
    job = os.environ.get("SLURM_JOB_ID")
    inside = f", inside job {job}" if job else ""
    return Finding("Slurm", "ok", f"{done.stdout.strip()} ({srun}){inside}")
