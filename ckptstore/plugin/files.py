"""Files of this host: durable writes, scratch files that are renamed, copies inside the kernel."""

from ckptstore.core.paths import (
    BESIDE,
    SAFE,
    base_of,
    check_path,
    distrust,
    is_alone,
    make_directories,
    replace_file,
    rights,
    scratch_for,
    search,
    sync_path,
    write_file,
)
from ckptstore.storage.local_files import Descriptor, transfer, write_cached
