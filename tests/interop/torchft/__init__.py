"""Tests of states that are transferred between processes."""
