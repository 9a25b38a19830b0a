"""How tensors moved over the commits of a run: the rows that `Store.history` returns."""

from ckptstore.plugins.analysis.history import History, HistoryRow

__all__ = ["History", "HistoryRow"]
