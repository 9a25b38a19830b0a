"""Connections between processes of many hosts."""

from ckptstore.distributed.addresses import Address, cut_off, listen, own_addresses, reach
