"""The `tarry` command: help, version, exit codes and lazy imports."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from tarry import cli
from tarry.cli.app import app
from tarry.errors import ConfigurationError
from tests.cli.harness import ROOT, run_process

SHORT_RUN = ("--set", "duration=5", "--jobs", "1")
HEAVY_MODULES = (
    "tarry.simulator",
    "tarry.tuning",
    "tarry.wire.tasks",
    "yaml",
    "vl_convert",
    "multiprocessing",
)


def test_help_describes_tarry_and_shows_examples() -> None:
    result = run_process("--help")

    assert 0 == result.returncode
    for text in [
        "To tarry: to wait before going on.",
        "simulate",
        "tune",
        "policy",
        "tarry simulate storm",
        'tarry simulate checkout.toml --assert "amplification < 1.2"',
    ]:
        assert text in result.stdout


def test_help_imports_no_heavy_modules() -> None:
    """`--help` imports neither the simulator nor other heavy packages."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tarry.cli.app import app\n"
        "CliRunner().invoke(app, ['--help'])\n"
        "CliRunner().invoke(app, ['simulate', '--help'])\n"
        f"print([name for name in {HEAVY_MODULES} if name in sys.modules])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "[]\n" == result.stdout


def test_version_is_that_of_the_package() -> None:
    """`tarry --version` prints the version of the installed package."""
    assert f"tarry {version('tarry')}\n" == CliRunner().invoke(app, ["--version"]).stdout


def test_unknown_command_is_rejected() -> None:
    """An unknown command exits with 2."""
    result = run_process("simulat")

    assert (2, "") == (result.returncode, result.stdout)
    assert "No such command 'simulat'" in result.stderr


def test_user_error_is_one_line_without_traceback() -> None:
    """A user error is one line on standard error, and the exit code is 2."""
    result = run_process("simulate", "no\x1b[31mne.toml")

    assert (2, "", "error: no\\x1b[31mne.toml: there is no such file\n") == (
        result.returncode,
        result.stdout,
        result.stderr,
    )


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", [], "cli"),
        ("rich", ["docs"], "cli"),
        ("typer", ["serve", "--dev"], "service"),
        ("typer", ["send", "https://example.com"], "cli,client"),
        ("typer", ["simulate", "storm"], "sim"),
    ],
)
def test_missing_packages_are_named(missing: str, arguments: list[str], extra: str) -> None:
    """Without the extra packages, `tarry` prints what to install for the whole command."""
    code = f"import sys; sys.modules[{missing!r}] = None; from tarry.cli import main; main()"

    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )

    assert 1 == result.returncode
    need = "tarry's command line needs typer and rich"
    assert f"{need}: pip install 'tarry[{extra}]'\n" == result.stderr


def test_extras_are_given_for_existing_commands() -> None:
    groups = {group.name for group in app.registered_groups}
    names = {getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert set() == set(cli._EXTRAS) - groups - names


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigurationError("rate [bold]must\x07"), 2, "error: rate [bold]must\\x07\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 1, ""),
    ],
    ids=["configuration error", "Ctrl-C", "closed pipe"],
)
def test_main_maps_errors_to_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    """An error of a command becomes an exit code and at most one line."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("tarry.cli.app.app", fail)
    monkeypatch.setattr("sys.stdout", sys.stdout)  # main() can replace it

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert code == caught.value.code
    assert message == capsys.readouterr().err


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is not a TarryError keeps its traceback."""
    monkeypatch.setattr("tarry.cli.app.app", lambda **_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_closed_pipe_prints_no_traceback() -> None:
    """If the reader closes standard output, the command prints no traceback."""
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tarry",
            "simulate",
            "examples/checkout.toml",
            "--json",
            *SHORT_RUN,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()

        assert b"" == process.stderr.read()
    assert process.returncode in {1, -signal.SIGPIPE}


def test_checkout_without_an_installation_is_named() -> None:
    """`python -m tarry` in the folder above a checkout named `tarry` says how to install it."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_module('tarry')"
    with TemporaryDirectory() as folder:
        checkout = Path(folder, "tarry")
        checkout.symlink_to(ROOT)
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

        assert 1 == result.returncode
        expected = (
            f"{checkout} is a checkout of tarry, which is not installed: pip install {checkout}\n"
        )
        assert expected == result.stderr
