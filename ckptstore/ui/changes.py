"""What the page changes with `--allow-changes`: set and remove tags, forget, undelete.

A forget names the commits that its preview showed, so nothing else is forgotten if others have
committed meanwhile.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptstore.core.ids import CommitId, check_tag
from ckptstore.errors import InvalidInput
from ckptstore.maintenance.forget import forget_commits, remove_tag, set_tag, undelete
from ckptstore.ui.opened import OpenStore
from ckptstore.ui.values import Json, clip

BODY_BYTES_MAX = 4 << 20


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SetTag(_Body):
    name: str = Field(max_length=1_000)
    commit: str = Field(pattern="^[0-9a-f]{12,64}$")


class _RemoveTag(_Body):
    name: str = Field(max_length=1_000)


class _Commits(_Body):
    commits: list[str] = Field(min_length=1, max_length=50_000)


def _ids(store: OpenStore, body: _Commits) -> tuple[CommitId, ...]:
    return tuple(store.commit(each).id for each in dict.fromkeys(body.commits))


def _tag(store: OpenStore, body: Any) -> Json:
    info = store.commit(body.commit)
    set_tag(store.handle, store.reader, check_tag(body.name), info)
    return {"done": f"{clip(body.name)} is {info.id[:12]}"}


def _untag(store: OpenStore, body: Any) -> Json:
    remove_tag(store.handle, body.name)
    return {"done": f"removed {clip(body.name)}"}


def _forget(store: OpenStore, body: Any) -> Json:
    store.handle.check_writable()
    plan = forget_commits(store.handle, _ids(store, body), reason="chosen on the page")
    store.handle.follow()
    return {"done": f"forgot {len(plan.forgotten):,}; undelete brings them back until gc"}


def _undelete(store: OpenStore, body: Any) -> Json:
    store.handle.check_writable()
    commits = _ids(store, body)
    undelete(store.handle, store.reader, commits)
    store.handle.follow()
    return {"done": f"restored {len(commits):,}"}


_CHANGES: Mapping[str, tuple[type[_Body], Callable[[OpenStore, Any], Json]]] = {
    "tag": (_SetTag, _tag),
    "untag": (_RemoveTag, _untag),
    "forget": (_Commits, _forget),
    "undelete": (_Commits, _undelete),
}


def change(store: OpenStore, name: str, body: bytes) -> Json:
    """Carry out one change, and say what was done. Raises `InvalidInput` for an unknown change or a
    body of another form, and what the change raises."""
    if name not in _CHANGES:
        raise InvalidInput(f"no change {clip(name, 40)!r}; there are {', '.join(_CHANGES)}")
    form, carry_out = _CHANGES[name]
    try:
        asked = form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidInput(f"{name}: {clip(where)}: {first['msg']}") from error
    return carry_out(store, asked)
