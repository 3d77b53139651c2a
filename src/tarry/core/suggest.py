"""Suggestions for misspelt names: the "did you mean" of error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def suggest(word: str, candidates: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the candidate that is most like `word`, or None when none is similar enough.

    `similarity` is the lowest ratio of `difflib.SequenceMatcher` that is accepted, from 0 to 1.
    """
    from difflib import get_close_matches  # only for errors: `import tarry` loads without it

    close = get_close_matches(word, list(candidates), n=1, cutoff=similarity)
    return close[0] if close else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return "did you mean 'x'?", or the list of all candidates when none is similar."""
    names = list(candidates)
    close = suggest(word, names)
    return f"did you mean {close!r}?" if close else f"it has {', '.join(names)}"
