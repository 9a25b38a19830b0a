"""How ranks learn under which session they write.

The coordinator opens one session for each save and puts it into every rank's plan. With plan caching, DCP hands a rank the final plan of
an earlier save, and what the plan carries is of that save: then the rank asks the store of torch.distributed, where the coordinator
left the session before DCP sent the plans. Nothing is pickled, and no rank waits for another.
"""

import secrets
from collections import OrderedDict
from typing import NamedTuple

import torch.distributed as dist

from ckptstore.core.ids import SessionId, parse_session_id
from ckptstore.errors import InvalidInput

_KEY = "ckptstore/dcp/{}"
_REMEMBERED = 1 << 12

_series = secrets.token_hex(8)
"""This process as a coordinator."""

_announced: dict[str, SessionId] = {}
_written: "OrderedDict[SessionId, None]" = OrderedDict()


class Assignment(NamedTuple):
    """What the coordinator puts into a rank's plan: who it is, and the session of this save."""

    series: str
    session: SessionId


def assign(session: SessionId) -> Assignment:
    """What ranks get to know of a session that this process, the coordinator, has opened."""
    _announced[_series] = session
    if dist.is_available() and dist.is_initialized():
        dist.distributed_c10d._get_default_store().set(_KEY.format(_series), session)
    return Assignment(_series, session)


def session_of(assigned: object) -> SessionId:
    """The session of this save, from what the plan carries. Raises `InvalidInput` for a plan that has lost it."""
    if not isinstance(assigned, tuple) or len(assigned) != 2:
        raise InvalidInput("the plan has lost its storage_data, by which ranks meet; a planner must keep it: use dataclasses.replace")
    series, session = assigned
    if session in _written:  # the plan is that of an earlier save
        session = _announced.get(series) or _asked(series)
    _written[session] = None
    while len(_written) > _REMEMBERED:
        _written.popitem(last=False)
    return parse_session_id(session)


def _asked(series: str) -> str:
    return bytes(dist.distributed_c10d._get_default_store().get(_KEY.format(series))).decode()
