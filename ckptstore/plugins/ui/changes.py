"""What the page changes with `--allow-changes`: set and remove tags, forget, undelete; and which
options of the command line it has.

A forget names the commits that its preview showed, so nothing else is forgotten if others have
committed meanwhile.
"""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptstore.cli.call import UsageError
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import KINDS, arguments
from ckptstore.cli.policies import policies_of
from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import CommitId, check_tag
from ckptstore.plugin.upkeep import (
    Policy,
    forget_commits,
    remove_tags,
    set_tag,
    undelete,
)
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import Json, clip

BODY_BYTES_MAX = 4 << 20

FIELDS: Mapping[str, str] = {
    "tag.name": "tag.name",
    "tag.ref": "tag.commit",
    "tag.delete": "untag.name",
    "forget.refs": "forget.commits",
    "forget.dry-run": "forget.dry_run",
    "undelete.refs": "undelete.commits",
}
"""Options of the command line, and the field of the change that is the same."""

ABSENT: Mapping[str, str] = {
    "forget.all": "who forgets a whole run types its name",
    "forget.run": "the page of a run is about that run",
    "forget.thin": "a preview shows which commits go, not which leaves",
    "forget.yes": "the page always asks",
    "tag.names tag.rename tag.run": "a tag is shown, set and removed at its commit",
    "undelete.all undelete.run": "each forgotten commit has its button",
    "gc compact reindex repair": "it deletes or rewrites; Space says what gc would free",
    "fsck doctor sessions": "Health says what was verified, what is free, and who writes",
    "clone export import pull push release": "it needs places that a browser cannot choose",
}
"""The operations of upkeep, and the options, that the page lacks, with the reason."""


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


FORGET = next(command for command in COMMANDS if command.name == "forget")
FORM: Mapping[str, Json] = {
    name: {
        "help": option.help,
        "values": option.metavar,
        "pattern": getattr(KINDS.get(option.metavar), "pattern", None),
    }
    for name, option in FORGET.each().items()
    if f"forget.{name}" not in " ".join([*FIELDS, *ABSENT]).split()
}
"""The fields of the form that asks for policies: all other options of `forget`. A value of several
words has a field for each."""


def policies_asked(asked: Mapping[str, Sequence[str]]) -> Sequence[Policy]:
    """The policies that the form asks for, read as the command line reads them. Raises
    `InvalidInput`."""
    given = {name: values for name, values in asked.items() if any(values)}
    if unknown := given.keys() - FORM:
        raise InvalidInput(f"no option {clip(min(unknown), 40)!r}: wanted {', '.join(FORM)}")
    try:
        return policies_of(arguments(FORGET, given))
    except UsageError as error:
        raise InvalidInput(error.args[0]) from error
