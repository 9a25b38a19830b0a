"""How ranks learn under which session they write.

The coordinator opens one session for each save and puts it into every rank's plan. With plan
caching, DCP hands a rank the final plan of an earlier save, and what the plan carries is of that
save: then the rank asks the store of torch.distributed, where the coordinator left the session
before DCP sent the plans, under the name of the save, since saves may overlap. Nothing is pickled,
and no rank waits for another. A session that is not this save's after all is found out when the
coordinator finishes: the receipts bear another one.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ckptstore.core.ids import SessionId, digest, parse_session_id
from ckptstore.errors import InvalidInput

K = TypeVar("K")
V = TypeVar("V")

_KEY = "ckptstore/dcp/{}"
_REMEMBERED = 1 << 12

_series = secrets.token_hex(8)
"""This process as a coordinator."""

_announced: "OrderedDict[str, SessionId]" = OrderedDict()
_written: "OrderedDict[tuple[SessionId, int], None]" = OrderedDict()
_lock = threading.Lock()


class Assignment(NamedTuple):
    """What the coordinator puts into a rank's plan: who it is, and the session of this save."""

    series: str
    session: SessionId


def assign(session: SessionId, name: str) -> Assignment:
    """What ranks get to know of a session that this process, the coordinator, has opened for the
    save called `name`."""
    for key in _keys(_series, name):
        with _lock:
            _remember(_announced, key, session)
        if dist.is_available() and dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(key, session)
    return Assignment(_series, session)


def session_of(assigned: object, rank: int, name: str) -> SessionId:
    """The session of this save, of which rank `rank` writes its part, from what the plan carries.

    Where the plan is that of an earlier save, the newest session of the coordinator for `name`, or
    if that is unknown, for any. Raises `InvalidInput` for a plan that has lost it.
    """
    if not isinstance(assigned, tuple) or len(assigned) != 2:
        raise InvalidInput(
            "the plan has lost its storage_data, by which ranks meet; a planner must keep it: use "
            "dataclasses.replace"
        )
    series, session = assigned
    with _lock:
        is_earlier = (session, rank) in _written
    if is_earlier:
        session = _newest(_keys(series, name))
    with _lock:
        _remember(_written, (parse_session_id(session), rank), None)
    return parse_session_id(session)


def _keys(series: str, name: str) -> tuple[str, str]:
    """Under which a session is announced: for saves of that name, of which several may overlap, and
    for any."""
    return _KEY.format(f"{series}/{digest(name.encode()).hex()[:16]}"), _KEY.format(series)


def _newest(keys: Sequence[str]) -> str:
    with _lock:
        found = next((_announced[key] for key in keys if key in _announced), None)
    if found is not None:
        return found
    store = dist.distributed_c10d._get_default_store()
    key = next((key for key in keys[:-1] if store.check([key])), keys[-1])
    return bytes(store.get(key)).decode()


def _remember(memory: "OrderedDict[K, V]", key: K, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
