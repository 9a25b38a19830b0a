"""Words for people: sizes, counts, tables, and addresses without their secrets."""

from ckptstore.core.text import (
    ID_DIGITS,
    Column,
    Table,
    bytes_text,
    count_text,
    near,
    printable,
    redact,
    selector,
    unicode_text,
    without,
)
