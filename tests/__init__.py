"""Tests mirror src/tarry; `from tests.x import y` shares what several of them need."""
