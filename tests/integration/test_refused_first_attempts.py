"""A target that refuses the first attempt of each task and accepts the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.servers import store_url
from tests.integration.service import service, target

TASK_COUNT = 100
POLICY = {"maxDelayMs": 2000, "totalBudgetMs": 600_000}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "status"), [("sqlite", 425), ("sqlite", 503), ("postgres", 503), ("redis", 425)]
)
def test_all_tasks_are_delivered_with_two_requests_each(
    tmp_path: Path, kind: str, status: int
) -> None:
    """The lane does not stay parked, although every first attempt fails ("ask again")."""
    with (
        store_url(kind) as store,
        target(lambda _path, number: status if number == 1 else 200) as asking_again,
        service(tmp_path, store=store) as running_service,
    ):
        tasks = [
            {"targetUrl": f"{asking_again.url}/{number}", "policy": POLICY}
            for number in range(TASK_COUNT)
        ]
        running_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})

        running_service.wait_for(
            lambda: {"SUCCEEDED"} == {task["status"] for task in running_service.all_tasks()}
        )

        requests = asking_again.received_requests.values()
        assert [2] * TASK_COUNT == [len(each) for each in requests]
