"""Statements for many rows."""

from contextlib import closing
from pathlib import Path

import pytest

from tarry.service.stores.sqlite import database
from tarry.service.stores.sqlite.statements import NULL_NUMBER_PARAM, MultiRowUpdate


@pytest.mark.parametrize("count", [1, 5, 200])
def test_an_update_of_many_rows_sets_only_its_columns(count: int, tmp_path: Path) -> None:
    """Each row gets its own values; other columns and rows keep theirs."""
    update = MultiRowUpdate(
        "UPDATE lane SET pending = ?, due_at = nullif(?, ''),\n"
        "    probes = probes + 1, last_claim_at = NULL\nWHERE id = ?"
    )
    with closing(database.connect(tmp_path / "tasks.db")) as connection:
        lanes = [(lane, f"t/{lane}", 7, 8, 9, 3) for lane in range(1, count + 2)]
        connection.executemany(
            "INSERT INTO lane (id, tenant, name, pending, due_at, last_claim_at, probes) "
            "VALUES (?, 1, ?, ?, ?, ?, ?)",
            lanes,
        )
        parameters: list[int | str] = []
        for lane in range(1, count + 1):
            parameters += (lane * 10, NULL_NUMBER_PARAM if lane % 2 else lane, lane)
        update.execute(connection.execute, parameters)
        rows = connection.execute(
            "SELECT id, tenant, name, pending, due_at, last_claim_at, probes FROM lane ORDER BY id"
        ).fetchall()

    changed = [
        (lane, 1, f"t/{lane}", lane * 10, None if lane % 2 else lane, None, 4)
        for lane in range(1, count + 1)
    ]
    assert [*changed, (count + 1, 1, f"t/{count + 1}", 7, 8, 9, 3)] == rows


def test_an_update_by_another_condition_is_rejected() -> None:
    """Rows can only be updated by their key."""
    with pytest.raises(ValueError, match="not an update of rows by their key"):
        MultiRowUpdate("UPDATE lane SET pending = ? WHERE id > ?")
