"""What `doctor` says of machines made of fake packages and programs."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from megatron_logra import cli, doctor


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A directory whose packages hide the real ones."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


def install(site: Path, name: str, version: str, *modules: str) -> None:
    package = site / name
    for directory in (package, *(package / module for module in modules)):
        directory.mkdir(parents=True, exist_ok=True)
        # Whatever is looked at must not be imported: a broken package does that.
        (directory / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    importlib.invalidate_caches()


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


def test_the_report_of_this_environment_names_every_part(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        *("Python", "torch", "megatron-core", "Transformer Engine", "apex", "NVML", "NCCL"),
        *("gloo", "GPUs", "Slurm", "Megatron-Bridge", "flash_attn", "reasoning-gym", "math-verify"),
    ):
        assert any(line.startswith(part) for line in text.splitlines()), part
    for distribution in ("torch", "megatron-core", "reasoning-gym"):
        assert importlib.metadata.version(distribution) in text
    assert text.endswith("All required parts work.\n")


def test_every_lack_says_what_it_switches_off(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    for finding in doctor.inspect():
        if finding.detail == "not installed" and finding.part != "Transformer Engine":
            assert finding.effect, finding


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.18.9", "missing"),
        ("0.19.0", "ok"),
        ("0.19.2+cu13", "ok"),
        ("0.19.3rc1", "ok"),
        ("0.20.0", "missing"),
        ("1.0", "missing"),
    ],
)
def test_a_required_part_outside_its_versions_is_missing(site, capsys, version, status):
    install(site, "megatron_core", version)
    finding = doctor.required("megatron-core", (0, 19), below=(0, 20))
    assert (finding.status, finding.detail) == (status, version)
    assert cli.main(["doctor"]) == (0 if status == "ok" else 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("megatron-core" in last) == (status == "missing")
    if status == "missing":
        assert finding.effect == "required: >=0.19,<0.20"


def test_a_required_part_that_is_not_there_is_missing():
    assert doctor.required("no-such-distribution").status == "missing"
    assert doctor.optional("no-such-distribution", "a part is off") == doctor.Finding(
        "no-such-distribution", "absent", "not installed", "a part is off"
    )


def test_nvidias_apex_is_told_from_the_package_of_that_name(site):
    install(site, "apex", "0.9.10", "lib")
    finding = doctor.apex()
    assert finding.status == "warning"
    assert "is not NVIDIA's" in finding.detail
    assert "uninstall" in finding.effect
    for module in ("optimizers", "multi_tensor_apply"):
        (site / "apex" / module).mkdir()
    finding = doctor.apex()
    assert (finding.status, finding.detail) == ("ok", "0.9.10")


def test_transformer_engine_without_a_gpu_is_a_warning(site):
    install(site, "transformer_engine", "2.10.0")
    without = doctor.transformer_engine(has_gpu=False)
    assert without.status == "warning"
    assert "breaks the local layer specs" in without.effect
    assert doctor.transformer_engine(has_gpu=True).status == "ok"
    assert "transformer_engine" not in sys.modules


def test_megatron_bridge_needs_its_version_and_transformer_engine(site):
    absent = doctor.bridge(has_gpu=True)
    assert absent.status == "absent"
    assert absent.effect.endswith("are refused: pip install 'megatron-logra[bridge]'")
    install(site, "megatron_bridge", "0.6.2")
    assert doctor.bridge(has_gpu=True).detail == "0.6.2, but no Transformer Engine"
    install(site, "transformer_engine", "2.10.0")
    assert doctor.bridge(has_gpu=True) == doctor.Finding("Megatron-Bridge", "ok", "0.6.2")
    (site / "megatron_bridge-0.6.2.dist-info").rename(site / "megatron_bridge-0.7.0.dist-info")
    info = site / "megatron_bridge-0.7.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("0.6.2", "0.7.0"))
    importlib.invalidate_caches()
    finding = doctor.bridge(has_gpu=True)
    assert (finding.status, finding.detail) == ("warning", "0.7.0; expected >=0.6,<0.7")


def test_slurm_is_asked_for_its_version(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor.slurm().status == "absent"
    program(tmp_path / "bin", "srun", "echo slurm 24.05.1")
    assert doctor.slurm().detail == f"slurm 24.05.1 ({tmp_path / 'bin' / 'srun'})"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert doctor.slurm().detail.endswith(", inside job 77")
    program(tmp_path / "bin", "srun", "echo no controller >&2; exit 3")
    finding = doctor.slurm()
    assert finding.status == "warning"
    assert "no controller" in finding.detail


def test_backends_are_those_of_this_torch():
    assert doctor.backend("gloo", "gloo", "off").status == "ok"
    assert doctor.backend("X", "no_such_backend", "off") == doctor.Finding(
        "X", "absent", "this torch is built without it", "off"
    )
