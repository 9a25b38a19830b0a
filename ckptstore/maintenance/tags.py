"""Setting and removing tags: one log entry each."""

from ckptstore.core.ids import check_tag
from ckptstore.core.model import CommitInfo
from ckptstore.errors import NotFound
from ckptstore.log.entries import Tag
from ckptstore.log.log import Refused
from ckptstore.log.state import Resolved
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader

ATTEMPTS = 5


def set_tag(handle: StoreHandle, reader: Reader, name: str, info: CommitInfo | Resolved) -> None:
    """Set tag `name` to the commit and renew its packs; retries if a gc moved them meanwhile.

    Raises `Conflict` if the commit was forgotten meanwhile.
    """
    handle.check_writable()
    check_tag(name)
    document = reader.document(info.session, info.id)
    for attempt in range(ATTEMPTS):
        try:
            handle.log.append(Tag(name, info.id, reader.packs_of(document)))
            break
        except Refused as error:
            if not error.refusal.again or attempt == ATTEMPTS - 1:
                raise
            handle.objects.sync(handle.log.replay(), thorough=True)
    handle.follow()


def remove_tag(handle: StoreHandle, name: str) -> None:
    """Remove a tag; the commit stays. Raises `NotFound` for an unknown tag."""
    handle.check_writable()
    if name not in {tag.name for tag in handle.queries().tags()}:
        raise NotFound(f"no tag {name!r}; `ckptstore tag` lists them")
    handle.log.append(Tag(name, None, frozenset()))
    handle.follow()
