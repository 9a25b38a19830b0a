"""A store by its log, index and objects, and the commits that refs name in it."""

from ckptstore.index import VARIABLE, database_log
from ckptstore.index.queries import PackInfo, Queries
from ckptstore.log.entries import Moved, Tag
from ckptstore.log.log import Log
from ckptstore.log.resolve import Resolved, newest_first, resolve, resolved
from ckptstore.log.state import CommitRow, State, by_age
from ckptstore.objects.documents import encode_config
from ckptstore.repository.init_store import check_exclusive_create, read_config
from ckptstore.repository.resolve_ref import AnyRef, find_commit, find_id, is_path
from ckptstore.repository.store_handle import StoreHandle
