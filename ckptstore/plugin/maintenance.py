"""The maintenance of a store, for commands that carry out one of its methods."""

from ckptstore.maintenance_api import Maintenance
