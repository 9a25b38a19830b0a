"""Tests of states that travel between processes."""
