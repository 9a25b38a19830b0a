"""The processes that train together."""

from ckptstore.distributed import framing
from ckptstore.distributed.collective import Collective
from ckptstore.peers import ALONE, collective_of, leads_all
