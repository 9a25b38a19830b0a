"""The processes that train together, and connections between them."""

from ckptstore.distributed import framing
from ckptstore.distributed.collective import Collective
from ckptstore.distributed.sockets import Address, listen, own_addresses, reach
from ckptstore.peers import ALONE, collective_of, leads_all
