"""Errors in scenario files and policy files name their line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.documents import MAX_DOCUMENT_BYTES
from tarry.simulator.files import read_defence, read_study
from tarry.simulator.study import run_study
from tests.simulator.file_builders import CHECKOUT, SMALL, YAML, write_file

SCENARIO_MISTAKES = [
    (
        "b.yaml",
        "buckt: 5",
        "b.yaml:7: 'buckt' is not a known key of the file; did you mean 'bucket'?",
    ),
    (
        "a.toml",
        "[extra]",
        "a.toml:7: 'extra' is not a known key of the file; it has question, lesson, ",
    ),
    ("a.toml", "queue = 5", "a.toml:7: servers.api: queue needs concurrency"),
    ("a.toml", "concurrency = 0", "a.toml:7: servers.api: concurrency must be at least 1, got 0"),
    ("a.toml", "slowdown = 'x'", "a.toml:7: servers.api.slowdown must be a number, got 'x'"),
    ("a.toml", "failure_rate = ''", "a.toml:7: servers.api.failure_rate must be a number, got ''"),
    ("a.toml", "calls = 7", "a.toml:7: servers.api.calls must be a string, got 7"),
    ("a.toml", "calls = 'db'", "a.toml:7: servers.api.calls must be one of api, got 'db'"),
    ("a.toml", "calls = 'api'", "a.toml:5: servers must not call in a circle: api -> api"),
    ("a.toml", "failures = 3", "a.toml:7: servers.api.failures must be a list of tables, got 3"),
    ("a.toml", "defence = 3", "a.toml:7: servers.api.defence must be a table, got 3"),
    ("a.toml", "defence = 'no.toml'", "a.toml:7: defence: no.toml: there is no such file"),
    ("a.toml", "[[servers.api.failures]]", "a.toml:7: servers.api.failures[0] needs the key 'end'"),
    (
        "a.toml",
        "[[servers.api.failures]]\nend = 3\nkind = 'x'",
        "a.toml:9: servers.api.failures[0]: kind must be one of error, ",
    ),
    ("a.toml", "[servers.x]\nlatency = -1", "a.toml:8: servers.x.latency must be at least 0, "),
    ("a.toml", "[servers.x]\nlatency = 'x'", "a.toml:8: servers.x.latency must be seconds or a "),
    (
        "a.toml",
        "[servers.x]\nlatency = { kind = 'lognrmal' }",
        "a.toml:8: servers.x.latency needs a kind, one of empirical, ",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'uniform'\nlow = 2\nhigh = 1",
        "a.toml:10: servers.x.latency: high must be at least low (2), got 1",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'uniform'\nlow = 2",
        "a.toml:7: servers.x.latency needs the key 'high'",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'empirical'\nvalues = 3",
        "a.toml:9: servers.x.latency.values must be a list, got 3",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'empirical'\nfile = 'none.csv'",
        "a.toml:9: file: none.csv: there is no such file",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'empirical'\nfile = 3",
        "a.toml:9: file must be a string, got 3",
    ),
    (
        "a.toml",
        "[[clients.surges]]\nstart = 3\nend = 2\nrate = 1",
        "a.toml:9: clients.surges[0]: end must be ",
    ),
    (
        "a.toml",
        "[servers.x.latency]\nkind = 'empirical'\nfile = 'x'\nscale = 0",
        "a.toml:10: scale must be greater than 0, got 0",
    ),
    ("a.toml", "[variants]", "a.toml:7: variants must be a table with a table for each"),
    ("a.toml", "[variants]\nx = 3", "a.toml:8: variants.x must be a table, got 3"),
    (
        "a.toml",
        "[variants.x]\nclients.rate = 0\n",
        "a.toml:8: clients: rate must be greater than 0, got 0",
    ),
    (
        "a.toml",
        "[variants.x.clients.defence.breaker]\nopen_for = 0\n",
        "a.toml:8: clients.defence.breaker: open_for must be greater than 0, got 0",
    ),
    (
        "b.yaml",
        "bucket: 1e1",
        "b.yaml:7: bucket must be a number, got '1e1'; write it without quotes; YAML needs 1.0",
    ),
    (
        "b.yaml",
        "network: 1e-3",
        "b.yaml:7: network must be seconds or a table with a kind, got '1e-3'; write it without ",
    ),
    (
        "a.toml",
        "failure_rate = 5",
        "a.toml:7: servers.api: failure_rate must be from 0 to 1, got 5",
    ),
    ("b.yaml", "bucket: 0", "b.yaml:7: bucket must be greater than 0, got 0"),
    ("b.yaml", "trials: 0", "b.yaml:7: trials must be at least 1, got 0"),
    ("b.yaml", "question: 7", "b.yaml:7: question must be a string, got 7"),
    ("b.yaml", "duration: 9", "b.yaml:7: the key 'duration' appears twice, first on line 1"),
    ("b.yaml", "bucket: &b 2\nnetwork: *b", "b.yaml:8: write the value out instead of an alias"),
    (
        "b.yaml",
        "variants:\n  x: {servers: {api: {failures: [{end: 2},\n    {end: 0}]}}}",
        "b.yaml:9: servers.api.failures[1]: end must be greater than 0, got 0",
    ),
    ("b.yaml", "7: 8", "b.yaml:7: a key must be a plain name"),
    ("b.yaml", "bucket: [", "b.yaml:8: not YAML: expected the node content"),
    ("b.yaml", "bucket: !!python/name:os.system", "b.yaml:7: not YAML: could not determine"),
    ("b.yaml", "---\nmore: 1", "b.yaml:7: must hold one document, but a second one"),
    (
        "a.toml",
        f"defence = 0x{'f' * 5000}",
        "a.toml:7: servers.api.defence must be a table, got a ",
    ),
    ("a.toml", "x = ", "a.toml:7: not TOML: Invalid value"),
    ("a.toml", "duration", "a.toml:7: not TOML: Expected '='"),
    ("a.toml", "calls = [", "a.toml:8: not TOML: "),
]


@pytest.mark.parametrize(
    ("name", "addition", "expected"), SCENARIO_MISTAKES, ids=[case[2] for case in SCENARIO_MISTAKES]
)
def test_error_in_scenario_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, addition: str, expected: str
) -> None:
    """The message starts with the file, the line and the violated rule."""
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.write_text({"a.toml": SMALL, "b.yaml": YAML}[name] + addition + "\n", encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_study(path)

    assert expected == str(caught.value)[: len(expected)]


POLICY_MISTAKES = [
    ("p.toml", "\nmax_attempts = 0", "p.toml:2: max_attempts must be at least 1, got 0"),
    (
        "p.toml",
        "max_atempts = 3",
        "p.toml:1: 'max_atempts' is not a known key of the file; did you mean ",
    ),
    ("p.toml", "breaker = 3", "p.toml:1: breaker must be a table, got 3"),
    (
        "p.toml",
        "[breaker]\nopenfor = 3",
        "p.toml:2: 'openfor' is not a known key of breaker; did you mean ",
    ),
    ("p.toml", "[budget]\nkind = 'tokn'", "p.toml:2: budget needs a kind, one of ratio, throttle"),
    ("p.toml", "[budget]\n", "p.toml:1: budget needs a kind, one of ratio, throttle, token"),
    ("p.toml", "[limiter]\nkind = 'in-flight'", "p.toml:1: limiter needs the key 'limit'"),
    ("p.toml", "jitter = 'none'\n[hedging]\nafter = 1", "p.toml:2: a call has a policy or hedging"),
    ("p.toml", "[hedging]\nafter = 'p0'", "p.toml:2: hedging: after must be seconds or a perce"),
    ("p.toml", "preset = 'x'", "p.toml:1: preset must be one of default, interactive, patient, "),
    (
        "p.toml",
        "jitter = 'none'\nmaxAttempts = 0",
        "p.toml:2: maxAttempts must be at least 1, got 0",
    ),
    (
        "p.toml",
        "max_attempts = 3\nmaxAttempts = 3",
        "p.toml:2: maxAttempts is the same field as max_attempts: leave one out",
    ),
    ("p.toml", "policyId = 'a'", "p.toml:1: 'policyId' is not a known key of the file; "),
    ("p.toml", f"max_attempts = {'9' * 5000}", "p.toml:1: not TOML: Exceeds the limit"),
    ("p.json", '{"max_attempts": 3,\n"jitter": "fll"}', "p.json:2: jitter must be one of decorr"),
    ("p.json", '{"jitter": "full",\n"jitter": "none"}', "p.json:2: the key 'jitter' appears twic"),
    ("p.json", "[1]", "p.json:1: must be a table of keys and values, got [1]"),
    ("p.json", '{"a":\n}', "p.json:2: not JSON: Expecting value"),
    ("p.json", f'{{"a": {"9" * 5000}}}', "p.json: not JSON: Exceeds the limit"),
    ("p.json", "[" * 100_000, "p.json: nested too deeply"),
    ("p.yaml", "[" * 5_000, "p.yaml: nested too deeply"),
    ("p.toml", "a = " + "[" * 100_000, "p.toml: nested too deeply"),
    ("p.yaml", "a: \x00", "p.yaml: not YAML: unacceptable character"),
    ("p.yaml", "a: !!float x", "p.yaml: not YAML: could not convert"),
    ("p.ini", "", "p.ini: the name must end in .toml, .yaml, .yml, .json"),
    (
        "p.toml",
        "# " + "x" * MAX_DOCUMENT_BYTES,
        "p.toml: too large; at most 1,000,000 bytes are allowed",
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "expected"), POLICY_MISTAKES, ids=[case[2] for case in POLICY_MISTAKES]
)
def test_error_in_policy_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    """The message for a policy file starts with the file, the line and the violated rule."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_defence(Path(name))

    assert expected == str(caught.value)[: len(expected)]


def test_error_in_included_policy_names_the_line_of_that_file(tmp_path: Path) -> None:
    policy = write_file(tmp_path, "policy.toml", "jitter = 'full'\nmax_attempts = 0")
    text = SMALL.replace("rate = 20", 'defence = "policy.toml"')
    path = write_file(tmp_path, "s.toml", text)

    with pytest.raises(ConfigurationError) as caught:
        read_study(path)

    assert f"{policy}:2: max_attempts must be at least 1, got 0" == str(caught.value)


def test_error_in_swept_value_names_the_parameter() -> None:
    """A swept value has no line, so the error names the parameter and its value."""
    study = read_study(CHECKOUT)

    with pytest.raises(ConfigurationError) as caught:
        run_study(study, sweep={"clients.defence.max_attempts": [0]})

    expected = (
        "clients.defence.max_attempts = 0: clients.defence: max_attempts must be at least 1, got 0"
    )
    assert expected == str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The error names a file that is missing, is a folder or is not text."""
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"a = 1\nb = '\xff'\n")
    folder = tmp_path / "f.toml"
    folder.mkdir()
    cases = {
        tmp_path / "none.toml": f"{tmp_path}/none.toml: there is no such file",
        folder: f"{folder}: cannot be read: Is a directory",
        binary: f"{binary}:2: must be UTF-8, got the byte 0xff",
    }

    for path, expected in cases.items():
        with pytest.raises(ConfigurationError) as caught:
            read_defence(path)
        assert expected == str(caught.value)


def test_error_without_pyyaml_has_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = write_file(tmp_path, "p.yaml", "max_attempts: 3")

    with pytest.raises(MissingExtra) as caught:
        read_defence(path)

    assert f"{path}: YAML needs PyYAML: pip install 'tarry[sim]'" == str(caught.value)


def test_windows_line_ends_and_byte_order_mark_are_read(tmp_path: Path) -> None:
    """Windows line ends and a byte order mark are accepted and do not change line numbers."""
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xef\xbb\xbfjitter = 'none'\r\nmax_attempts = 0\r\n")

    with pytest.raises(ConfigurationError, match=r":2: max_attempts must be at least 1"):
        read_defence(path)


DURATION_FILE_MISTAKES = [
    ("0.1\nx\n", "", "t.csv:2: must be a number of at least 0, got 'x'"),
    ("0.1\n-1\n", "", "t.csv:2: must be a number of at least 0, got '-1'"),
    ("0.1\nnan\n", "", "t.csv:2: must be a number of at least 0, got 'nan'"),
    ("\n\n", "", "t.csv: the file has no values"),
    ("a,b\n1,2\n", "column = 'c'", "t.csv:1: there is no column 'c'; there are a, b"),
    ("a,b\n1\n", "column = 'b'", "t.csv:2: must be a number of at least 0, got ''"),
    ("1\n" * 1_000_001, "", "t.csv:1000001: at most 1,000,000 values are allowed"),
    ('"' + "1" * 200_000, "", "t.csv:1: not CSV: field larger than field limit"),
]


@pytest.mark.parametrize(
    ("text", "addition", "expected"),
    DURATION_FILE_MISTAKES,
    ids=[case[2] for case in DURATION_FILE_MISTAKES],
)
def test_error_in_durations_names_both_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, addition: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text, encoding="utf-8")
    latency = f"[servers.x.latency]\nkind = 'empirical'\nfile = 't.csv'\n{addition}\n"
    Path("s.toml").write_text(SMALL + latency, encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_study(Path("s.toml"))

    assert f"s.toml:9: file: {expected}" in str(caught.value)
