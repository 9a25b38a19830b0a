"""A store by its log, index and objects, and the commits that refs name in it."""

from ckptstore.index import VARIABLE, database_log
from ckptstore.index.queries import PackInfo, Point, Queries, TagInfo, Totals
from ckptstore.log.entries import Commit, Moved, Tag
from ckptstore.log.log import Log, Refused
from ckptstore.log.resolve import Resolved, newest_first, resolve, resolved
from ckptstore.log.state import CommitRow, State, by_age
from ckptstore.objects.documents import decode_document, encode_config
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.init_store import check_exclusive_create, init_store, read_config
from ckptstore.repository.resolve_ref import AnyRef, find_commit, find_id, is_path, trained_last
from ckptstore.repository.store_handle import CATALOG_NAME, StoreHandle
