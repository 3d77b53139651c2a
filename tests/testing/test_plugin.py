"""Tests for the pytest plugin, run in test suites that use it."""

from __future__ import annotations

import pytest

# Imported here because pytester removes modules that a test imports. A second import would create
# the event classes again, which would not be the classes that `tarry` exports.
import tarry.core.events  # noqa: F401

pytest_plugins = ["pytester"]

HEADER = """
import pytest
import tarry

calls = []

hourly = tarry.Policy(initial_delay=3600, max_delay=3600, jitter="none")

@tarry.retry(on=ConnectionError, policy=hourly)
def flaky():
    calls.append(1)
    raise ConnectionError
"""


@pytest.fixture(autouse=True)
def strict_project(pytester: pytest.Pytester) -> None:
    """Configure pytest with strict markers and warnings as errors.

    Each run imports all other plugins again; those of faker and schemathesis take 2 s.
    """
    pytester.makeini(
        """
        [pytest]
        addopts = --strict-markers --strict-config -W error -p no:faker -p no:schemathesis
        """
    )


def assert_passes(pytester: pytest.Pytester, test: str) -> None:
    """Run a test with the plugin that tarry installs, and assert that it passes."""
    pytester.makepyfile(HEADER + test)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_no_wait(pytester: pytest.Pytester) -> None:
    """`tarry_no_wait` makes waits of hours return at once."""
    assert_passes(
        pytester,
        """
def test(tarry_no_wait):
    with pytest.raises(ConnectionError):
        flaky()
    assert len(calls) == 4
""",
    )


def test_events(pytester: pytest.Pytester) -> None:
    """`tarry_events` is the list of the test's events."""
    assert_passes(
        pytester,
        """
def test(tarry_no_wait, tarry_events):
    with pytest.raises(ConnectionError):
        flaky()
    assert type(tarry_events[-1]) is tarry.GaveUp
""",
    )


def test_clock(pytester: pytest.Pytester) -> None:
    """`tarry_clock` runs the test in virtual time."""
    assert_passes(
        pytester,
        """
def test(tarry_clock):
    with pytest.raises(ConnectionError):
        flaky()
    assert tarry_clock.elapsed == pytest.approx(3 * 3600)
""",
    )


def test_marker(pytester: pytest.Pytester) -> None:
    """The marker limits attempts and skips waits, also with strict markers."""
    assert_passes(
        pytester,
        """
@pytest.mark.tarry(attempts=2, wait=False)
def test():
    with pytest.raises(ConnectionError):
        flaky()
    assert len(calls) == 2
""",
    )


def test_marker_for_a_module(pytester: pytest.Pytester) -> None:
    """The marker can be set for a module, and a marker on a test overrides it."""
    assert_passes(
        pytester,
        """
pytestmark = pytest.mark.tarry(wait=False)

class TestClass:
    @pytest.mark.tarry(wait=False, attempts=1)
    def test(self):
        with pytest.raises(ConnectionError):
            flaky()
        assert len(calls) == 1
""",
    )


def test_marker_with_the_clock(pytester: pytest.Pytester) -> None:
    """The marker and the fixtures can be used together."""
    assert_passes(
        pytester,
        """
@pytest.mark.tarry(attempts=3)
def test(tarry_clock, tarry_events):
    with pytest.raises(ConnectionError):
        flaky()
    assert len(calls) == 3
    assert tarry_clock.elapsed == pytest.approx(2 * 3600)
    assert len(tarry_events) > 3
""",
    )


def test_fixtures_and_markers_end_with_their_test(pytester: pytest.Pytester) -> None:
    """Fixtures and markers do not affect the next test."""
    pytester.makepyfile(
        HEADER
        + """
@pytest.mark.tarry(attempts=1)
def test_first(tarry_no_wait, tarry_events):
    with pytest.raises(ConnectionError):
        flaky()

def test_second(tarry_clock):
    calls.clear()
    with pytest.raises(ConnectionError):
        flaky()
    assert len(calls) == 4
    assert tarry_clock.elapsed > 0
"""
    )

    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_marker_is_listed(pytester: pytest.Pytester) -> None:
    """`pytest --markers` describes the marker."""
    result = pytester.runpytest_inprocess("--markers", "-p", "no:cacheprovider")

    result.stdout.fnmatch_lines(["@pytest.mark.tarry(attempts=None, wait=True): *"])


def test_marker_with_an_unknown_argument(pytester: pytest.Pytester) -> None:
    """An unknown argument of the marker is an error that names the argument."""
    pytester.makepyfile(
        HEADER
        + """
@pytest.mark.tarry(atempts=1)
def test():
    pass
"""
    )

    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*atempts*"])


def test_plugin_imports_neither_trio_nor_the_runtime(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test():
    assert "trio" not in sys.modules
    assert "tarry.runtime.call" not in sys.modules
"""
    )

    options = ("-p", "no:cacheprovider", "-p", "no:anyio")  # the plugin of anyio imports trio
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)
