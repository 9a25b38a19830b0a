"""A store by its log, index and objects, and the commits that refs name in it."""

from ckptstore.index.queries import PackInfo, Queries
from ckptstore.log.resolve import Resolved, resolve
from ckptstore.log.state import State
from ckptstore.repository.init_store import read_config
from ckptstore.repository.resolve_ref import AnyRef, find_commit, find_id, is_path
from ckptstore.repository.store_handle import StoreHandle
