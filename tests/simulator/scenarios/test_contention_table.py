from tests.contention_table import PAGE, between, table


def test_the_page_shows_what_the_simulator_says() -> None:
    """The table in the documentation is, to the byte, what `make tables` writes."""
    assert table() == between(PAGE.read_text(encoding="utf-8"))
