"""Words for people: sizes, counts, tables, and addresses without their secrets."""

from ckptstore.core.text import (
    BLUE,
    BOLD,
    ID_DIGITS,
    SECOND_NS,
    Column,
    Table,
    age_text,
    bytes_text,
    count_text,
    exact_text,
    fields,
    local_text,
    near,
    printable,
    redact,
    seconds_text,
    secrets_of,
    selector,
    unicode_text,
    without,
)
