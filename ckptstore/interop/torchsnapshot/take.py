"""How an application state becomes a snapshot: what ranks agree on first, in which order states are
asked for, what is whose."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
"""Commits and restores need memory for so many chunks at most (`repository.memory_budget`)."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks go by: the first rank's path and what it means, and the globs that every rank
    gave."""

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
    """Find the snapshot's place, make its store if there is none, and settle what counts where
    ranks were told different things.

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
    """Leave the random generator, if the state has one, as it was: taking a snapshot must not move
    what it holds."""
    generator = next((value for value in app_state.values() if isinstance(value, RNGState)), None)
    before = None if generator is None else generator.state_dict()
    try:
        yield
    finally:
        if generator is not None and before is not None:
            generator.load_state_dict(before)


def ordered(app_state: Mapping[str, Any], prepare: Prepare | None) -> dict[str, Any]:
    """The state in the order in which it is asked for: the random generator first, as asking others
    may draw from it, then by key, so that ranks ask alike where that takes collectives."""
    keys = sorted(app_state, key=lambda key: (not isinstance(app_state[key], RNGState), key))
    if prepare is None:
        return {key: app_state[key] for key in keys}
    return {
        key: app_state[key]
        if isinstance(app_state[key], RNGState)
        else Prepared(key, app_state[key], prepare)
        for key in keys
    }


def whose(agreed: Agreed, prepare: Prepare | None) -> dict[str, Any]:
    """What a commit is told of the state: its name, and that what nobody called a replica is each
    rank's own, as TorchSnapshot's rules have it."""
    # Prepared tensors are no longer those that DistributedDataParallel keeps equal, so content has
    # to tell.
    return {
        "tag": agreed.place.tag,
        "replicated": agreed.replicated,
        "compare": prepare is not None,
    }


def budget_of(store: Store, wanted: int | None) -> int | None:
    """The memory budget that a call or the environment gives, or the least that the store needs if
    that is more."""
    budget = wanted or knobs.get_memory_budget_bytes()
    return budget and max(budget, LEAST_CHUNKS * store.chunk_bytes)
