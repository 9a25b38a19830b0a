"""Files of this host: durable writes, scratch files that are renamed, copies inside the kernel."""

from ckptstore.core.paths import (
    BESIDE,
    SAFE,
    base_of,
    check_path,
    distrust,
    file_system,
    is_alone,
    is_network_filesystem,
    make_directories,
    make_index_directory,
    replace_file,
    rights,
    scratch_for,
    search,
    sync_path,
    write_file,
)
from ckptstore.core.process import file_lock
from ckptstore.storage.local_files import Descriptor, transfer, write_cached
