"""What the page changes with `--allow-changes`: set and remove tags, forget, undelete.

A forget names the commits that its preview showed, so nothing else is forgotten if others have
committed meanwhile.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import CommitId, check_tag
from ckptstore.plugin.upkeep import forget_commits, remove_tags, set_tag, undelete
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import Json, clip


class _Change(BaseModel):
    """A change: its fields are what a page asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def carry_out(self, store: OpenStore) -> Json:
        """Change the store, and say what was `done`."""
        raise NotImplementedError


class _Tag(_Change):
    name: str = Field(max_length=1_000)
    commit: str = Field(pattern="^[0-9a-f]{12,64}$")

    def carry_out(self, store: OpenStore) -> Json:
        info = store.commit(self.commit)
        set_tag(store.handle, store.reader, check_tag(self.name), info)
        return {"done": f"{clip(self.name)} is {info.id[:12]}"}


class _Untag(_Change):
    name: str = Field(max_length=1_000)

    def carry_out(self, store: OpenStore) -> Json:
        remove_tags(store.handle, self.name)
        return {"done": f"removed {clip(self.name)}"}


class _Commits(_Change):
    commits: list[str] = Field(min_length=1, max_length=50_000)

    def ids(self, store: OpenStore) -> tuple[CommitId, ...]:
        """The commits of a store that may be written."""
        store.handle.check_writable()
        return tuple(store.commit(each).id for each in dict.fromkeys(self.commits))


class _Forget(_Commits):
    dry_run: bool = False

    def carry_out(self, store: OpenStore) -> Json:
        """With `dry_run`, change nothing, and say the `question` to ask before."""
        ids, reason = self.ids(store), "chosen on the page"
        plan = forget_commits(store.handle, ids, reason=reason, dry_run=self.dry_run)
        if self.dry_run:
            return {"question": plan.question}
        store.handle.follow()
        return {"done": f"{plan.done}; undelete brings them back until gc"}


class _Undelete(_Commits):
    def carry_out(self, store: OpenStore) -> Json:
        commits = self.ids(store)
        undelete(store.handle, store.reader, commits)
        store.handle.follow()
        return {"done": f"restored {len(commits):,}"}


CHANGES: Mapping[str, type[_Change]] = {
    "tag": _Tag,
    "untag": _Untag,
    "forget": _Forget,
    "undelete": _Undelete,
}
"""The changes by the names of the methods of `Store` that do the same."""


def change(store: OpenStore, name: str, body: bytes) -> Json:
    """Carry out one change. Raises `InvalidInput` for an unknown change or a body of another form,
    and what the change raises."""
    if name not in CHANGES:
        raise InvalidInput(f"no change {clip(name, 40)!r}; there are {', '.join(CHANGES)}")
    try:
        asked = CHANGES[name].model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidInput(f"{name}: {clip(where)}: {first['msg']}") from error
    return asked.carry_out(store)
