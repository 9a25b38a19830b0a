"""The DCP face, for who converts from and to it or saves by it."""

from ckptstore.interop.dcp import dcp_to_store, redirect, store_to_dcp
from ckptstore.interop.dcp.convert import PlainPlanner, write_directory
