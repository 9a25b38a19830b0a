"""The form of policies, made from the options of `forget`, and the options that the page lacks."""

from collections.abc import Mapping, Sequence

from ckptstore.cli.call import UsageError
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import KINDS, arguments
from ckptstore.cli.policies import policies_of
from ckptstore.errors import InvalidInput
from ckptstore.plugin.policies import Policy
from ckptstore.plugins.ui.values import Json, clip

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
