"""The views by their names in URLs, and how one is asked for: `commit/8f3a….json`.

A part of such an address is made of letters and digits, so no part can name a file elsewhere.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TypeAlias

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugins.ui.form import policies_asked
from ckptstore.plugins.ui.jobs import Jobs
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import Json, clip

_PART = re.compile(r"[0-9a-z]{1,64}")

View: TypeAlias = tuple[int, str]
"""The number of parts after the name, and the function that takes the store and these parts. Its
module is imported when it is asked for."""

VIEWS: Mapping[str, View] = {
    "position": (0, "history_views.position"),
    "store": (0, "history_views.overview"),
    "run": (1, "history_views.run"),
    "lineage": (0, "history_views.lineage"),
    "forgotten": (0, "history_views.forgotten"),
    "commit": (1, "commit_views.commit"),
    "leaves": (2, "commit_views.leaves"),
    "leaf": (2, "tensor_views.leaf"),
}
"""Views that answer at once."""

JOBS: Mapping[str, View] = {
    "health": (0, "upkeep_views.health"),
    "space": (0, "upkeep_views.space"),
    "sharing": (1, "commit_views.sharing"),
    "diff": (2, "commit_views.diff"),
    "tensor": (2, "tensor_views.tensor"),
    "distances": (2, "tensor_views.distances"),
    "moves": (2, "tensor_views.moves"),
}
"""Views that take longer: `{"value": …}`, or `{"progress": …}` until then. Their functions take the
job, too."""

UNCHANGING = ("diff", "tensor", "distances")
"""Jobs whose value does not depend on the position of the log."""


def view(store: OpenStore, jobs: Jobs, address: str, asked: Mapping[str, Sequence[str]]) -> Json:
    """The view at `address`, such as `commit/8f3a….json`, with the parameters `asked`.

    Raises `NotFound` for an unknown address, `InvalidInput` for one of another form, and what the
    view raises.
    """
    name, *parts = address.removesuffix(".json").split("/")
    if not all(map(_PART.fullmatch, (name, *parts))):
        raise InvalidInput(f"{clip(address, 60)!r} is no address of a view")
    if name == "retention" and len(parts) == 1:
        policies = policies_asked(asked)
        key = ("retention", store.number, *parts, *policies, store.position())
        retention = _function("upkeep_views.retention")
        return jobs.ask(key, lambda job: retention(store, parts[0], policies, job))
    if name in VIEWS:
        return _checked(VIEWS, name, parts)(store, *parts)
    if name in JOBS:
        function = _checked(JOBS, name, parts)
        n = 0 if name in UNCHANGING else store.position()
        return jobs.ask((name, store.number, *parts, n), lambda job: function(store, *parts, job))
    raise NotFound(f"no view {clip(name, 40)!r}")


def _checked(views: Mapping[str, View], name: str, parts: Sequence[str]) -> Callable[..., Json]:
    count, named = views[name]
    if len(parts) != count:
        raise NotFound(f"the view {name} takes {count} parts, not {len(parts)}")
    return _function(named)


def _function(named: str) -> Callable[..., Json]:
    module, _, name = named.partition(".")
    function: Callable[..., Json] = getattr(import_module(f"ckptstore.plugins.ui.{module}"), name)
    return function
