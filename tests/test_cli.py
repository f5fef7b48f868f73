"""The command line as a user calls it: exit codes, one-line errors, and what stays unimported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_logra import cli
from megatron_logra.errors import StopRequested, UserError

REPO = Path(__file__).resolve().parents[1]


def call(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "megatron_logra"]
    return subprocess.run(
        [*start, *args],
        capture_output=True,
        text=True,
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text("model: {hf: nowhere}\n")
    return str(file)


@pytest.fixture
def user_error(capsys) -> Callable[..., str]:
    """Calls the program, which must end with one line on stderr and 2; returns the message."""

    def run(*args: str) -> str:
        code = cli.main(args)
        stdout, stderr = capsys.readouterr()
        assert (code, stdout) == (2, "")
        assert stderr.count("\n") == 1, stderr
        assert stderr.startswith("megatron-logra: error: ")
        return stderr.removeprefix("megatron-logra: error: ").rstrip("\n")

    return run


def test_usage_errors_are_one_line_and_exit_2(config, user_error):
    commands = "train, eval, generate, serve, rollout-worker, convert, plan, report, doctor"
    assert user_error() == f"a command is missing; expected one of: {commands}"
    assert user_error("tarin") == f"tarin: no such command; expected one of: {commands}"
    assert user_error("train") == (
        "the following arguments are required: CONFIG; see megatron-logra train --help"
    )
    assert user_error("train", config, "--epochs") == (
        "unrecognized arguments: --epochs; see megatron-logra train --help"
    )
    assert user_error("generate", config) == (
        "the following arguments are required: --prompt; see megatron-logra generate --help"
    )


@pytest.mark.parametrize(
    "command", [["train"], ["eval"], ["generate", "--prompt", "hi"], ["serve"], ["plan"]]
)
def test_configuration_errors_are_one_line_and_exit_2(config, command, user_error):
    assert user_error(*command, config, "train.steps=none").startswith("train.steps: expected")
    assert user_error(*command, "nowhere.yaml").startswith("nowhere.yaml: No such file")


def test_overrides_may_stand_before_and_after_options(config, user_error):
    for order in (["train.steps=x", "--resume"], ["--resume", "train.steps=x"]):
        assert user_error("train", config, *order).startswith("train.steps: expected")
    assert user_error("train", "--resume", "train.seed=1", config).startswith(
        "train.seed=1: No such file"
    )


@pytest.mark.parametrize("nproc", ["2", "1"])
def test_bad_configurations_start_no_ranks(config, user_error, nproc):
    assert user_error("train", config, "--nproc", nproc, "train.steps=x").startswith("train.steps")


def test_a_number_of_ranks_is_positive(config, user_error):
    assert user_error("train", config, "--nproc", "0").startswith("--nproc 0: expected a number")


def test_report_of_no_run_directory_is_a_user_error(tmp_path, user_error):
    assert user_error("report", str(tmp_path / "none")) == (
        f"{tmp_path / 'none'}: no such directory; expected a run directory"
    )


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_help_exits_0(args, capsys):
    assert cli.main(args) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout
    assert stderr == ""


def test_the_process_ends_with_the_commands_exit_code(config):
    done = call("train", config, "train.steps=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megatron-logra: error: train.steps: expected a valid integer, got 'none'\n"
    )
    assert call("--version").returncode == 0


@pytest.mark.parametrize("args", [["train", "--help"], ["train", "CONFIG", "train.steps=x"]])
def test_no_heavy_import_before_the_input_is_known_to_be_right(config, args):
    args = [config if arg == "CONFIG" else arg for arg in args]
    code = (
        "import sys; from megatron_logra.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(n.split('.')[0] in ('torch', 'megatron', 'matplotlib') for n in sys.modules))"
    )
    done = call(*args, code=code)
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (UserError("key: wrong\n  expected  right"), 2, "error: key: wrong expected right\n"),
        (StopRequested("signal 15"), 75, "signal 15; go on with --resume\n"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
    ],
)
def test_exit_codes_of_expected_ends(monkeypatch, capsys, raised, code, says):
    def command(argv):
        raise raised

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert cli.main(["train"]) == code
    assert capsys.readouterr() == ("", f"megatron-logra: {says}")


def test_any_other_exception_shows_its_traceback_and_exits_1(monkeypatch, capsys):
    def command(argv):
        raise ZeroDivisionError("of the test")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert cli.main(["train"]) == 1
    stderr = capsys.readouterr().err
    assert "Traceback" in stderr
    assert stderr.endswith("ZeroDivisionError: of the test\n")


def test_stop_requested_reaches_the_process_exit_code():
    code = (
        "import sys; from megatron_logra import cli; from megatron_logra.errors import *\n"
        "def stop(argv): raise StopRequested('asked')\n"
        "cli.COMMANDS['train'] = stop; sys.exit(cli.main(['train']))"
    )
    assert call(code=code).returncode == 75
