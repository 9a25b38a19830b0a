"""fsck's third level: every listed pack exists, has the right size and two readable footers; and
orphans."""

from collections.abc import Callable, Iterator

from ckptstore.core.ids import PackId, pack_key
from ckptstore.core.text import bytes_text
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.fold import Pack, State
from ckptstore.maintenance.check.report import Finding, Kind, Severity, foreign
from ckptstore.maintenance.check.trees import Contents
from ckptstore.maintenance.gc.orphans import list_objects, owner, unlisted
from ckptstore.objects.pack import FooterTable
from ckptstore.repository.footer_index import keys_of
from ckptstore.repository.footers import read_table_at
from ckptstore.storage.contract import Storage

_HEAL = "run `ckptstore repair`: what verifies is saved; --from names a mirror that has the rest"


def unreadable(contents: Contents) -> Iterator[Finding]:
    """Packs without a readable footer: their content is unknown. Pure."""
    for pack in contents.state.packs.values():
        if error := contents.problems.get(pack.id):
            size = f"{bytes_text(pack.bytes)}, {pack.chunks} chunks"
            what = f"pack {pack.id} ({size}) cannot be read: {error}"
            if isinstance(error, Unavailable):
                yield _unanswered(what, pack.id)
            else:
                yield Finding(Kind.PACK, what, _HEAL, key=pack_key(pack.id), pack=pack.id)


def _unanswered(what: str, name: PackId) -> Finding:
    """Storage did not return an object: its bytes may be sound, so `repair` leaves it alone (it
    has no key here)."""
    return Finding(Kind.PACK, what, "check the storage, then run fsck again", pack=name)


def pack_findings(storage: Storage, pack: Pack, table: FooterTable) -> Iterator[Finding]:
    """The problems of one pack with at least one readable footer, `table`."""
    if len(table) != pack.chunks:
        yield _object(
            pack, pack_key(pack.id), f"has {len(table)} chunks; the log says {pack.chunks}"
        )
    for key in keys_of(pack.id, metadata=pack.metadata):
        try:
            size = storage.size(key)
            if size is None:
                yield _object(pack, key, "is missing")
            elif size != pack.bytes:
                yield _object(pack, key, f"has {size} bytes; the log says {pack.bytes}")
            elif read_table_at(storage, key).tobytes() != table.tobytes():
                yield _object(pack, key, "lists other chunks than its twin")
        except (Corrupt, NotFound) as error:
            yield _object(pack, key, f"is damaged: {error}")
        except Unavailable as error:
            yield _unanswered(str(error), pack.id)


def _object(pack: Pack, key: str, what: str) -> Finding:
    """A problem of one object. The twin of a metadata pack still serves, so nothing is lost yet."""
    if pack.metadata:
        step = "run `ckptstore repair --apply`, which copies the sound twin over it"
        return Finding(Kind.TWIN, f"{key} {what}", step, key=key, pack=pack.id)
    return Finding(Kind.PACK, f"{key} {what}", _HEAL, key=key, pack=pack.id)


def orphan_findings(storage: Storage, present: Callable[[], State]) -> Iterator[Finding]:
    """Objects that no log entry names: left by stopped writers, being written now, or foreign.
    They are listed before `present` reads the state, so newly committed ones are excluded."""
    listing = list_objects(storage)
    state = present()
    for key, size in unlisted(listing, state):
        session = owner(key)
        if session is None:
            yield foreign(key)
            continue
        what = f"{key} ({bytes_text(size)}) is named by no entry of the log"
        step = "nothing: its writer may be at work; else gc will find it dead"
        if state.closed(session):
            step = "run `ckptstore gc`, which deletes it"
        yield Finding(Kind.ORPHAN, what, step, Severity.NOTE, key)
