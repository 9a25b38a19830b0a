"""The maintenance of a store, for commands that carry out one of its methods."""

from ckptstore.cli.policies import policies_of
from ckptstore.maintenance_api import Maintenance
