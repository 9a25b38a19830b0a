"""Fixtures of `tests.support.fixtures`, for the tests in this folder."""

from tests.support.fixtures import nursery, scratch

__all__ = ["nursery", "scratch"]
