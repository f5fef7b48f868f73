"""The set-up scripts: which Python they find, when they run again, and how they fail.

No environment is made here: the interpreters are stand-ins that only record how they are called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((REPO / "tools").glob("*.sh")), REPO / ".ci" / "run"]
PINS = {
    canonicalize_name(line.partition("==")[0]): line.strip().partition("==")[2]
    for line in (REPO / "tools" / "requirements-test.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


class Machine:
    """A home, a PATH with the basic programs alone, and a checkout with only the set-up's files."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.bin = root / "bin"
        self.repo = root / "repo"
        self.log = root / "calls"
        for directory in (self.home, self.bin, self.repo / "tools"):
            directory.mkdir(parents=True)
        for name in (
            *("bash", "cat", "cut", "dirname", "env", "flock", "grep", "ls", "mkdir", "rm", "sed"),
            *("sha256sum", "sleep", "tail", "touch", "chmod", "cp", "gcc"),
        ):
            self.program(name, f'exec {shutil.which(name)} "$@"')
        for name in ("bootstrap.sh", "requirements-test.txt"):
            shutil.copy(REPO / "tools" / name, self.repo / "tools")
        shutil.copy(REPO / "pyproject.toml", self.repo)

    def program(self, name: str, text: str, directory: Path | None = None) -> Path:
        file = (directory or self.bin) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
        return file

    def python(self, name: str, answer: str = "good", directory: Path | None = None) -> Path:
        """An interpreter that judges itself `answer`, makes environments and installs nothing."""
        return self.program(
            name,
            f"""
echo "$0 $*" >>{self.log}
case "$1 $2" in
  "-c "*) echo {answer} ;;
  "--version "*) echo Python 3.12.9 ;;
  "-m venv")
    mkdir -p "$3/bin"
    printf 'home = %s\\nversion = 3.12.9\\n' "$0" >"$3/pyvenv.cfg"
    cp "$0" "$3/bin/python" ;;
  "-m pip") if [ "$3" = install ] && [ -n "$PIP_FAILS" ]; then echo "$PIP_FAILS"; exit 1; fi ;;
esac""",
            directory,
        )

    def bootstrap(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.bash(f"{self.repo}/tools/bootstrap.sh", **variables)

    def find_python(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.bash(
            "-c",
            f"BOOTSTRAP_ONLY_DEFINE=1 . {self.repo}/tools/bootstrap.sh; find_python",
            **variables,
        )

    def bash(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.home), "PATH": str(self.bin)} | variables
        return subprocess.run(
            [str(self.bin / "bash"), *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def installs(self) -> list[str]:
        """The pip installs so far, each by what it installs."""
        if not self.log.exists():
            return []
        calls = re.findall(r"-m pip install .*--no-input (.*)", self.log.read_text())
        self.log.unlink()
        return calls

    @property
    def both(self) -> list[str]:
        """What a whole set-up installs: the pins, then the package."""
        pins = f"-r {self.repo}/tools/requirements-test.txt"
        return [pins, f"--no-deps --no-build-isolation --editable {self.repo}"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_may_be_executed(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_python_3_12_is_preferred_to_newer_ones(machine):
    for name in ("python3.14", "python3.13", "python3"):
        machine.python(name)
    wanted = machine.python("python3.12", directory=machine.home / ".pyenv/versions/3.12.1/bin")
    assert machine.find_python().stdout == f"{wanted}\n"
    wanted.unlink()
    assert machine.find_python().stdout == f"{machine.bin}/python3.13\n"


def test_a_shim_that_does_not_run_and_an_old_python3_are_passed_over(machine):
    machine.program("python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    machine.python("python3", "old")
    wanted = machine.python("python3.12", directory=machine.home / ".pyenv/versions/3.12.1/bin")
    assert machine.find_python().stdout == f"{wanted}\n"


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        (".pyenv/versions/3.12.7/bin", {}),
        ("elsewhere/versions/3.12.7/bin", {"PYENV_ROOT": "HOME/elsewhere"}),
        (".local/share/uv/python/cpython-3.12.7-linux-x86_64-gnu/bin", {}),
        ("data/uv/python/cpython-3.12.7-linux/bin", {"XDG_DATA_HOME": "HOME/data"}),
        ("pythons/cpython-3.12.7-linux/bin", {"UV_PYTHON_INSTALL_DIR": "HOME/pythons"}),
    ],
)
def test_pythons_off_the_path_are_found(machine, place, variables):
    wanted = machine.python("python3.12", directory=machine.home / place)
    variables = {k: v.replace("HOME", str(machine.home)) for k, v in variables.items()}
    assert machine.find_python(**variables).stdout == f"{wanted}\n"


def test_a_python_that_only_python3_names_is_found(machine):
    wanted = machine.python("python3")
    assert machine.find_python().stdout == f"{wanted}\n"


def test_without_a_python_one_line_says_so(machine):
    machine.python("python3", "old")
    done = machine.bootstrap()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("bootstrap: error: no Python >= 3.12 found")


def test_a_python_without_venv_is_named(machine):
    machine.python("python3.12", "no venv")
    done = machine.bootstrap()
    assert done.returncode == 1
    assert f"{machine.bin}/python3.12 lacks the venv and ensurepip modules" in done.stderr
    machine.python("python3.13")
    assert machine.bootstrap().returncode == 0


def test_a_second_call_does_nothing(machine):
    machine.python("python3.12")
    assert machine.bootstrap().returncode == 0
    assert machine.installs() == machine.both
    done = machine.bootstrap()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not machine.log.exists()


def test_changed_pins_install_again_and_a_moved_package_only_itself(machine):
    machine.python("python3.12")
    venv = {"MEGATRON_LOGRA_VENV": str(machine.home / "venv")}
    machine.bootstrap(**venv)
    assert machine.installs() == machine.both
    with (machine.repo / "pyproject.toml").open("a") as file:
        file.write("\n")
    machine.bootstrap(**venv)
    assert machine.installs() == machine.both[1:]
    machine.repo = machine.repo.rename(machine.home / "clone")
    machine.bootstrap(**venv)
    assert machine.installs() == machine.both[1:]
    with (machine.repo / "tools" / "requirements-test.txt").open("a") as file:
        file.write("\n")
    machine.bootstrap(**venv)
    assert machine.installs() == machine.both


def test_an_interrupted_set_up_is_made_anew(machine):
    machine.python("python3.12")
    venv = machine.repo / ".venv"
    assert machine.bootstrap(PIP_FAILS="ERROR: out of luck").returncode == 1
    (venv / "half_installed").touch()
    machine.installs()
    done = machine.bootstrap()
    assert done.returncode == 0
    assert "starting again" in done.stderr
    assert machine.installs() == machine.both
    assert not (venv / "half_installed").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(machine):
    machine.python("python3.12")
    machine.bootstrap()
    (machine.repo / ".venv/bin/python").unlink()
    machine.installs()
    assert machine.bootstrap().returncode == 0
    assert machine.installs() == machine.both


def test_a_users_own_environment_is_kept(machine):
    python = machine.python("python3.12")
    own = machine.home / "own"
    subprocess.run([python, "-m", "venv", own], check=True, env={"PATH": os.environ["PATH"]})
    (own / "theirs").touch()
    assert machine.bootstrap(MEGATRON_LOGRA_VENV=str(own), PIP_FAILS="ERROR: no").returncode == 1
    assert machine.bootstrap(MEGATRON_LOGRA_VENV=str(own)).returncode == 0
    assert (own / "theirs").exists()


def test_a_directory_that_is_no_environment_is_not_touched(machine):
    machine.python("python3.12")
    other = machine.home / "documents"
    other.mkdir()
    (other / "letter").touch()
    done = machine.bootstrap(MEGATRON_LOGRA_VENV=str(other))
    assert done.returncode == 1
    assert "exists and is no virtual environment" in done.stderr
    assert [path.name for path in other.iterdir()] == ["letter"]


@pytest.mark.parametrize(
    ("failure", "gcc", "says"),
    [
        ("ERROR: No matching distribution found for x", True, "pip could not install"),
        ("OSError: No space left on device", True, "the disk is full"),
        ("error: command 'cc' failed", False, "a C compiler is missing"),
    ],
)
def test_a_failed_install_tells_pips_words_and_the_likely_cause(machine, failure, gcc, says):
    machine.python("python3.12")
    if not gcc:
        (machine.bin / "gcc").unlink()
    done = machine.bootstrap(PIP_FAILS=failure)
    assert done.returncode == 1
    assert failure in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"bootstrap: error: {says}")


def test_calls_at_the_same_time_install_once(machine):
    machine.python("python3.12")
    start = f"{machine.repo}/tools/bootstrap.sh"
    done = machine.bash("-c", f"{start} & {start} & {start} & wait -n && wait -n && wait -n")
    assert done.returncode == 0, done.stderr
    assert machine.installs() == machine.both


def test_pins_satisfy_the_declared_ranges():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        requirement = Requirement(text)
        pin = PINS.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(pin), text


bootstrapped = pytest.mark.skipif(
    not (Path(sys.prefix) / ".megatron_logra-deps").exists(),
    reason="this environment was not made by tools/bootstrap.sh",
)


@bootstrapped
def test_pins_are_complete_and_agree_with_each_other():
    """What the pinned packages need is pinned too, but for what torch pins by itself."""
    for name in PINS:
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is pinned, but not installed here")
        for requirement in map(Requirement, needed):
            if name == "torch" and requirement.name.startswith(("cuda-", "nvidia-", "triton")):
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pin = PINS.get(canonicalize_name(requirement.name))
                assert pin is not None, f"{name} needs {requirement}"
                assert requirement.specifier.contains(pin), f"{name} needs {requirement}"


@bootstrapped
def test_this_environment_has_the_pinned_versions():
    installed = {name: version(name).partition("+")[0] for name in PINS}
    assert installed == PINS
