"""How does an application state become a snapshot? What ranks agree on, the order of the states,
and what is private.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptstore.core.options import Ranks
from ckptstore.distributed.collective import Collective
from ckptstore.interop.torchsnapshot import knobs
from ckptstore.interop.torchsnapshot.errors import UnusableState
from ckptstore.interop.torchsnapshot.locator import Place, place_to_take, store_at
from ckptstore.interop.torchsnapshot.preparing import Prepare, Prepared
from ckptstore.interop.torchsnapshot.stateful import Stateful
from ckptstore.objects import canonical
from ckptstore.state.stateful import RNGState
from ckptstore.store import Store

logger = logging.getLogger("ckptstore")

LEAST_CHUNKS = 4
"""Commits and restores need memory for at most this many chunks (`repository.memory_budget`)."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The settings that hold for all ranks: the first rank's path and its meaning, and the globs
    that every rank gave.
    """

    path: str
    place: Place
    replicated: tuple[str, ...]


def check_stateful(app_state: Mapping[str, Any]) -> None:
    """Raise `TypeError` for what is no dict of stateful values, `UnusableState` for two random
    generators."""
    if not isinstance(app_state, Mapping):
        raise TypeError(
            f"app_state is a {type(app_state)}; wanted a dict of stateful objects by their keys: "
            f"{{'model': model}}"
        )
    for key, value in app_state.items():
        if not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is a {type(value)}; wanted something stateful: put it into a "
                "StateDict(…)"
            )
    generators = [key for key, value in app_state.items() if isinstance(value, RNGState)]
    if len(generators) > 1:
        raise UnusableState(
            f"app_state has several RNGState objects ({', '.join(generators)}), all about one "
            "generator; keep one"
        )


def agree(
    peers: Collective | None,
    path: str,
    replicated: Sequence[str],
    storage_options: Mapping[str, Any] | None,
) -> Agreed:
    """Find the snapshot's place, create its store if needed, and settle arguments that differ
    between ranks.

    Raises `UnusableState` for globs that are no list.
    """
    if isinstance(replicated, str):
        raise UnusableState(
            f"replicated is {replicated!r}; wanted a list of globs: replicated=[{replicated!r}]"
        )
    if peers is None:
        place = place_to_take(path, storage_options)
        store_at(place.store, storage_options, create=True)
        return Agreed(path, place, tuple(replicated))

    def answer(handed_in: list[bytes]) -> list[bytes]:
        async_options_of_ranks = [canonical.decode(each) for each in handed_in]
        first = async_options_of_ranks[0][0]
        place = place_to_take(first, storage_options)
        store_at(place.store, storage_options, create=True)
        common = [
            glob
            for glob in async_options_of_ranks[0][1]
            if all(glob in globs for _, globs in async_options_of_ranks)
        ]
        return [canonical.encode([first, place.store, place.tag, place.pointer, common])] * len(
            async_options_of_ranks
        )

    answered = peers.round(
        "snapshot: agree", lambda: canonical.encode([path, list(replicated)]), answer
    )
    first, store, tag, pointer, common = canonical.decode(answered)
    if first != path:
        logger.warning(
            "rank %d was given the path %s; rank 0's counts: %s", peers.rank, path, first
        )
    if set(common) != set(replicated):
        logger.warning(
            "rank %d was given replicated=%s; what all ranks were given counts: %s",
            peers.rank,
            list(replicated),
            common,
        )
    return Agreed(first, Place(store, tag, pointer), tuple(common))


@contextmanager
def undisturbed(app_state: Mapping[str, Any]) -> Iterator[None]:
    """Restore the random generator of the state, if any, after the block: taking a snapshot must
    not advance it.
    """
    generator = next((value for value in app_state.values() if isinstance(value, RNGState)), None)
    before = None if generator is None else generator.state_dict()
    try:
        yield
    finally:
        if generator is not None and before is not None:
            generator.load_state_dict(before)


def ordered(app_state: Mapping[str, Any], prepare: Prepare | None) -> dict[str, Any]:
    """The state in the order in which it is collected: the random generator first, since other
    states may draw from it, then by key, so that collectives of all ranks match.
    """
    keys = sorted(app_state, key=lambda key: (not isinstance(app_state[key], RNGState), key))
    if prepare is None:
        return {key: app_state[key] for key in keys}
    return {
        key: app_state[key]
        if isinstance(app_state[key], RNGState)
        else Prepared(key, app_state[key], prepare)
        for key in keys
    }


def ranks_of(agreed: Agreed, process_group: Any, prepare: Prepare | None) -> Ranks:
    """Everything not named a replica is private, by TorchSnapshot's rules.

    Prepared tensors are not those that DistributedDataParallel keeps equal, so their content
    decides.
    """
    return Ranks(
        process_group=process_group, replicated=agreed.replicated, compare=prepare is not None
    )


def budget_of(store: Store, wanted: int | None) -> int | None:
    """The memory budget of the call or the environment, raised to the store's minimum."""
    budget = wanted or knobs.get_memory_budget_bytes()
    return budget and max(budget, LEAST_CHUNKS * store.chunk_bytes)
