"""How files of other programs begin, and the bounds that their own readers set."""

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""A pickle of the number with which files of torch before 1.6 begin."""
NPY_MAGIC = b"\x93NUMPY"
GGUF_MAGIC = b"GGUF"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000
"""The longest header that safetensors itself reads."""
