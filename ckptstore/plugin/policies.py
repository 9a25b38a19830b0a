"""Policies of retention: which commits stay."""

from ckptstore.maintenance.retention import Keep, KeepBest, KeepLast, KeepSince, Period, Policy
