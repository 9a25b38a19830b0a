"""Objects of a store by key, in whichever place."""

from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage, put_finished
from ckptstore.storage.reserve import RESERVE_BYTES
