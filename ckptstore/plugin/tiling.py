"""Boxes that make up a leaf, apart from `model`, since NumPy computes them."""

from ckptstore.core.tiling import misfit, tile
