"""Pointer files: small files that name one commit of a store."""

from ckptstore.objects.pointer_files import (
    DIRECTORY_POINTERS,
    HOLLOW_POINTER,
    POINTER_BYTES_MAX,
    Pointer,
    check_nameable,
    decode_pointer,
    encode_pointer,
    is_pointer,
    pointer_file,
    read_pointer,
    write_pointer,
)
