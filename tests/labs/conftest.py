"""Figures of the labs are looked at, in the longer language; every test begins in English (tests/conftest.py)."""

from tests.display.legible import language, legible_figures  # noqa: F401 - fixtures of all tests of this room
