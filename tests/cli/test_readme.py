from tests.cli.running import ROOT, tarry


def test_the_readme_shows_what_the_command_prints() -> None:
    """The table of the storm in the README is the one that the command prints."""
    _, _, shown = (ROOT / "README.md").read_text("utf-8").partition("$ tarry simulate storm\n")
    expected = shown.partition("```")[0].splitlines()

    printed = [line.rstrip() for line in tarry("simulate", "storm").stdout.splitlines()]

    assert expected == [line for line in printed if line in expected]
