"""The files in deploy/: their commands, settings and ports are those of the service."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import typer.main
import yaml

from tarry.cli.app import app
from tarry.service.settings import Settings, load_settings
from tarry.service.shutdown import GRACE_S
from tests.certificates import Authority
from tests.cli.harness import run_command
from tests.integration.service import service
from tests.test_docs import DOCS, ROOT, code_on_page

DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
MANIFESTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes" / "tarry.yaml").read_text("utf-8"))
)
DEPLOYMENT_PAGE = (DOCS / "deployment.md").read_text("utf-8")
UNIT = DEPLOY / "systemd" / "tarry.service"


def find_manifest(kind: str) -> dict[str, Any]:
    """Return the manifest of a kind."""
    return next(manifest for manifest in MANIFESTS if manifest["kind"] == kind)


POD = find_manifest("Deployment")["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def read_unit() -> dict[str, str]:
    """Return the section [Service] of the systemd unit; of a repeated key, the last value."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, "utf-8")
    return dict(parser["Service"])


def image_environment() -> dict[str, str]:
    """Return the TARRY_ variables of the image."""
    return dict(re.findall(r"\b(TARRY_\w+)=(\S+)", CONTAINERFILE))


def compose_environment() -> dict[str, str]:
    """Return the TARRY_ variables of the service in compose.yaml."""
    variables: dict[str, str] = COMPOSE["services"]["tarry"]["environment"]
    return {name: re.sub(r"\$\{\w+:\?[^}]*\}", "x", value) for name, value in variables.items()}


def kubernetes_environment() -> dict[str, str]:
    """Return the TARRY_ variables of the pods."""
    values = find_manifest("ConfigMap")["data"] | find_manifest("Secret")["stringData"]
    return {name: value for name, value in values.items() if name.startswith("TARRY_")}


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield each command line of `tarry`, without the name of the program."""
    image_command = re.search(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert image_command is not None
    yield "Containerfile", json.loads(image_command[1])
    yield "compose.yaml", COMPOSE["services"]["tarry"]["command"]
    yield "kubernetes", CONTAINER["args"]
    yield "systemd", shlex.split(read_unit()["ExecStart"])[1:]


@pytest.mark.parametrize("arguments", dict(command_lines()).values(), ids=dict(command_lines()))
def test_commands_exist(arguments: list[str]) -> None:
    """`tarry serve` accepts each command line."""
    command = typer.main.get_command(app)
    serve = command.get_command(None, arguments[0])  # type: ignore[attr-defined]

    context = serve.make_context("serve", arguments[1:])

    assert "serve" == context.info_name


@pytest.mark.parametrize(
    "variables",
    [{}, compose_environment(), kubernetes_environment()],
    ids=["image", "compose", "k8s"],
)
def test_variables_are_settings(variables: dict[str, str]) -> None:
    """The service accepts the variables of the image, alone and with those of a deployment."""
    loaded = load_settings({}, image_environment() | variables)

    assert {"TARRY_STORE", "TARRY_BODIES", "TARRY_HOST"} <= set(loaded.sources.values())
    assert "0.0.0.0" == loaded.settings.host  # noqa: S104 - nothing listens


def test_unit_has_valid_settings() -> None:
    """The settings file next to the systemd unit can be loaded."""
    loaded = load_settings({}, {}, DEPLOY / "systemd" / "tarry.toml")

    assert f"/var/lib/{read_unit()['StateDirectory']}/tarry.db" in loaded.settings.store


@pytest.mark.parametrize(
    ("seconds", "drain_ms"),
    [
        (COMPOSE["services"]["tarry"]["stop_grace_period"].removesuffix("s"), Settings().drain_ms),
        (
            POD["terminationGracePeriodSeconds"]
            - int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1]),
            kubernetes_environment()["TARRY_DRAIN_MS"],
        ),
        (read_unit()["TimeoutStopSec"], Settings().drain_ms),
    ],
    ids=["compose", "kubernetes", "systemd"],
)
def test_shutdown_is_not_cut_short(seconds: str | int, drain_ms: str | int) -> None:
    """The service is killed only after the time that an orderly shutdown may take."""
    assert int(seconds) * 1000 >= int(drain_ms) + GRACE_S * 1000


def test_ports_and_paths_agree() -> None:
    """Image, probes, health check and scrape jobs use the port and the paths of the service."""
    port = Settings().port
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus-compose.yml").read_text("utf-8"))

    assert f"EXPOSE {port}" in CONTAINERFILE
    assert [{"name": "http", "containerPort": port}] == CONTAINER["ports"]
    assert ["/healthz", "/healthz", "/readyz"] == [probe["path"] for probe in probes]
    assert [f"127.0.0.1:{port}:{port}"] == COMPOSE["services"]["tarry"]["ports"]
    assert [f"tarry:{port}"] == scrape["scrape_configs"][0]["static_configs"][0]["targets"]


def test_network_policy_closes_private_networks() -> None:
    """The policy selects the pods; beside DNS and the store, only public addresses are open."""
    policy = find_manifest("NetworkPolicy")["spec"]
    [ingress] = policy["ingress"]
    dns, store, targets = policy["egress"]
    blocks = [peer["ipBlock"] for peer in targets["to"]]
    closed = [ip_network(text) for block in blocks for text in block["except"]]

    pod_labels = find_manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pod_labels == policy["podSelector"]["matchLabels"]
    assert ["Ingress", "Egress"] == policy["policyTypes"]
    assert [{"port": "http"}] == ingress["ports"]
    assert {53} == {each["port"] for each in dns["ports"]}
    assert [5432] == [each["port"] for each in store["ports"]]
    for block in blocks:
        for text in block["except"]:
            assert ip_network(text).subnet_of(ip_network(block["cidr"]))  # type: ignore[arg-type]
    for text in ("10.1.2.3", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "::1"):
        assert any(ip_address(text) in network for network in closed)
    for text in ("fd00:ec2::254", "fe80::1", "100.100.100.200", "168.63.129.16"):
        assert any(ip_address(text) in network for network in closed)
    assert not any(ip_address("8.8.8.8") in network for network in closed)


def test_health_check_uses_the_settings_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of HEALTHCHECK finds a service with the host of the image, also with TLS."""
    check = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert check is not None
    program, *arguments = json.loads(check[1])
    assert "tarry" == program
    monkeypatch.setenv("TARRY_HOST", image_environment()["TARRY_HOST"])
    authority = Authority(tmp_path)
    files = authority.issue("service")
    for variables, ca_file in (
        ({}, None),
        ({"TARRY_TLS_CERT": str(files.cert), "TARRY_TLS_KEY": str(files.key)}, authority.ca_file),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with service(tmp_path, ca_file=ca_file) as running:
            monkeypatch.setenv("TARRY_PORT", str(running.port))
            assert (0, "ok\n", "") == run_command(*arguments)
        monkeypatch.delenv("TARRY_PORT")


def test_containers_have_no_privileges() -> None:
    """Containers run without root, capabilities and a writable root file system."""
    compose = COMPOSE["services"]["tarry"]

    assert "USER 10001:10001" in CONTAINERFILE
    assert (True, ["ALL"]) == (compose["read_only"], compose["cap_drop"])
    assert (True, 10001) == (
        POD["securityContext"]["runAsNonRoot"],
        POD["securityContext"]["runAsUser"],
    )
    assert {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    } == CONTAINER["securityContext"]


def test_every_image_can_be_pinned_by_its_digest() -> None:
    """Base images and images of other projects are arguments or variables, with a tag by default.

    The image names its base image. Whether the tags exist is not tested.
    """
    tag = r"docker\.io/[\w/-]+:[\w.-]+"
    bases = re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE)
    services = {name: service for name, service in COMPOSE["services"].items() if name != "tarry"}

    assert ["$PYTHON_IMAGE"] * 2 == bases
    default = re.search(rf"^ARG PYTHON_IMAGE=({tag})$", CONTAINERFILE, re.MULTILINE)
    assert default is not None
    assert "LABEL org.opencontainers.image.base.name=$PYTHON_IMAGE" in CONTAINERFILE
    variable = f"${{PYTHON_IMAGE:-{default[1]}}}"
    assert {"PYTHON_IMAGE": variable} == COMPOSE["services"]["tarry"]["build"]["args"]
    for name, service_ in services.items():
        pattern = rf"\$\{{{name.upper()}_IMAGE:-{tag}\}}"
        assert re.fullmatch(pattern, service_["image"]), service_["image"]
        assert f"{name.upper()}_IMAGE" in DEPLOYMENT_PAGE


def test_image_copies_files_that_the_build_context_has(tmp_path: Path) -> None:
    """`.dockerignore` excludes all files except those from which the wheel is built."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    included = [line[1:] for line in lines if line.startswith("!")]
    context = tmp_path / "context"
    context.mkdir()
    for name in included:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]

    done = subprocess.run(command, cwd=context, capture_output=True, text=True, check=False)

    assert "*" in lines
    assert 0 == done.returncode, done.stderr
    assert 1 == len(list(tmp_path.glob("tarry-*.whl")))


COMPOSE_SERVICES = {"tarry", "postgres", "prometheus", "grafana"}
COMPOSE_KEYS = {"name", "services", "secrets", "volumes"}
SERVICE_KEYS = {
    "build",
    "cap_drop",
    "command",
    "depends_on",
    "environment",
    "healthcheck",
    "image",
    "ports",
    "read_only",
    "restart",
    "secrets",
    "security_opt",
    "stop_grace_period",
    "tmpfs",
    "ulimits",
    "volumes",
}
"""Keys that the file uses. A key may be added if the Compose specification has it."""


def test_compose_has_its_services_and_known_keys() -> None:
    """The file has the service, its store and its monitoring, and only keys that Compose knows."""
    services = COMPOSE["services"]
    keys = {key for service in services.values() for key in service}
    dependencies = {name for service in services.values() for name in service.get("depends_on", ())}
    secrets = {name for service in services.values() for name in service.get("secrets", ())}

    assert services.keys() == COMPOSE_SERVICES
    assert set() == COMPOSE.keys() - COMPOSE_KEYS
    assert set() == keys - SERVICE_KEYS
    assert dependencies <= COMPOSE_SERVICES
    assert secrets == COMPOSE["secrets"].keys()
    assert all("image" in service and "restart" in service for service in services.values())


def test_files_that_compose_mounts_exist() -> None:
    """Each mounted file exists, except the API key of Prometheus, which the operator creates."""
    mounts = [
        volume.partition(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service["volumes"]
    ]
    files = [mount for mount in mounts if mount.startswith(".")]

    assert [] == [file for file in files if not (DEPLOY / file).exists()]
    assert set(mounts) - set(files) == set(COMPOSE["volumes"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_match_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    """Each manifest is valid, without unknown fields, in an older and in the newest version."""
    for version in ("1.27", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.programs
@pytest.mark.parametrize("command", ["verify", "security --offline=true --threshold=20"])
def test_systemd_accepts_the_unit(command: str, tmp_path: Path) -> None:
    """The unit is valid, and its exposure level is at most 2.0 of 10."""
    unit = tmp_path / UNIT.name
    program = str(Path(sys.executable).with_name("tarry"))
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/tarry/bin/tarry", program))

    done = subprocess.run(
        ["systemd-analyze", *command.split(), str(unit)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "" == done.stderr


def test_page_names_every_file() -> None:
    """docs/deployment.md names each folder and file of deploy/ that an operator uses."""
    code = code_on_page(DOCS / "deployment.md")
    paths = ("Containerfile", "compose.yaml", "kubernetes/tarry.yaml", "systemd/tarry.service")

    assert [] == [path for path in paths if f"deploy/{path}" not in code]
