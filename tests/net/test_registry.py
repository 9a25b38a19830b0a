"""Nothing is public without an entry in the net, or a line that says where else it is tried."""

import ckptstore
from ckptstore.cli.commands import COMMANDS
from tests.net import registry


def public() -> set[str]:
    """Every name of the package, every method of `Store` and `Snapshot`, every verb."""
    names = {name for name in ckptstore.__all__ if not name.startswith("_")}
    for kind in (ckptstore.Store, ckptstore.Snapshot):
        names |= {f"{kind.__name__}.{name}" for name in dir(kind) if not name.startswith("_")}
    return names | {f"$ {command.name}" for command in COMMANDS}


def test_every_public_name_is_in_the_net_or_says_where_it_is_tried() -> None:
    entries = (
        *(*registry.WRITERS, *registry.READERS, *registry.RANKED),
        *(*registry.OPERATIONS, *registry.PLACES),
    )
    covered = {name for entry in entries for name in entry.covers}
    apart = {name for names in registry.APART.values() for name in names.split()}
    apart = {name.replace("$", "$ ") for name in apart}
    assert not covered & apart, "in the net, and said to be apart"
    assert covered | apart == public()
