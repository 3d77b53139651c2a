"""Format the `.sql` files under src: `python .ci/format_sql.py`, or check them with `--check`.

Reserved words, also those in the bodies of functions, are written in capitals, and space at the end
of a line is removed. Line breaks stay: no formatter for PostgreSQL keeps the bodies of functions,
with queries that are nested four times, readable.
"""

import re
import sys
from pathlib import Path

from pglast.parser import scan

ROOT = Path(__file__).parents[1]
MAX_LINE_LENGTH = 100


def capitalize(text: str) -> str:
    """Return a text whose reserved words are in capitals."""
    # `${NAME}` is replaced by a constant, see `sql_files`. Names keep the length of the text.
    plain = re.sub(r"\$\{(\w+)\}", r"__\1_", text)
    for token in scan(plain):
        word = text[token.start : token.end + 1]
        if token.kind == "RESERVED_KEYWORD":
            new = word.upper()
        elif word.startswith("$$"):
            new = f"$${capitalize(word[2:-2])}$$"
        else:
            continue
        text = text[: token.start] + new + text[token.end + 1 :]
    return text


def format_file(text: str) -> str:
    """Return the text of a file as it should be."""
    lines = [line.rstrip() for line in capitalize(text.expandtabs(4)).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def main() -> list[str]:
    """Format or check all files; return the problems."""
    problems: list[str] = []
    for path in sorted(ROOT.glob("src/**/*.sql")):
        text = path.read_text("utf-8")
        formatted = format_file(text)
        name = path.relative_to(ROOT)
        for number, line in enumerate(formatted.splitlines(), 1):
            if len(line) > MAX_LINE_LENGTH:
                problems.append(f"{name}:{number}: longer than {MAX_LINE_LENGTH} characters")
        if formatted != text and "--check" in sys.argv:
            problems.append(f"{name}: run make format")
        elif formatted != text:
            path.write_text(formatted, "utf-8")
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
