from tests.contention_table import PAGE, render_tables, tables_on_page


def test_tables_on_the_page_are_current() -> None:
    """The tables in docs/contention.md are, to the byte, those that `make tables` writes."""
    assert render_tables() == tables_on_page(PAGE.read_text(encoding="utf-8"))
