"""Encryption of a running service: the files of the store contain no text of a target."""

from __future__ import annotations

from pathlib import Path

from cryptography.fernet import Fernet

from tests.integration.ports import free_port
from tests.integration.service import service


def test_errors_in_the_attempt_log_are_encrypted(tmp_path: Path) -> None:
    """The API returns the error of an attempt; neither the file nor its WAL contains it."""
    flags = ("--set", f"encryption_keys={Fernet.generate_key().decode()}")
    with service(tmp_path, *flags) as running_service:
        url = f"http://127.0.0.1:{free_port()}/"
        task_id = running_service.post(targetUrl=url, policy={"maxAttempts": 1})["taskId"]
        running_service.wait_until_finished(task_id)
        [attempt] = running_service.attempts(task_id)
        assert "Could not connect" in attempt["errorMessage"]
        files = {
            path.name: path.read_bytes() for path in tmp_path.glob("tarry.db*") if path.is_file()
        }
        assert {"tarry.db", "tarry.db-wal"} <= files.keys()
        assert b"refused" in b"".join(files.values())  # the error class is not encrypted
        assert not [name for name, content in files.items() if b"Could not connect" in content]
