"""Which types can be stored? All of them are registered once this file is imported.

Whoever encodes, splits, decodes or joins takes `values` and `containers` from here, so that no type
is unknown because its file was not imported.
"""

from ckptstore.state import arrays, composites, containers, values

__all__ = ["arrays", "composites", "containers", "values"]
