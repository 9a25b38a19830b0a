"""Words for people: sizes, counts, tables, and addresses without their secrets."""

from ckptstore.core.text import (
    ID_DIGITS,
    SECOND_NS,
    Column,
    Table,
    bytes_text,
    count_text,
    near,
    printable,
    redact,
    seconds_text,
    selector,
    unicode_text,
    without,
)
