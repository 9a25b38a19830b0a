"""Fixtures of `tests.faults.fixtures`, for the tests in this folder."""

from tests.faults.fixtures import nursery, scratch

__all__ = ["nursery", "scratch"]
