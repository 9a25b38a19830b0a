"""The worked example of docs/format.md, taken from the golden store `v3/zstd`.

`python -m tests.golden.example` writes it into the page; a test compares them.
"""

import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any

from tests.golden.reader import reader

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
PLACE = Path(__file__).parent / "v3" / "zstd"
BEGIN, END = "<!-- example: begin -->\n", "<!-- example: end -->\n"
TAG, KEY, LEAF = "best", "model", "model/half"
RECORD = {
    "chunk id": 32,
    "checksum": 16,
    "offset": 8,
    "stored": 4,
    "raw": 4,
    "base": 4,
    "codec": 1,
    "width": 1,
    "kind": 1,
    "depth": 1,
    "zero": 8,
}
"""The fields of a record of a footer, with their sizes."""


def example() -> str:
    """The text between the markers."""
    store = reader.Store(PLACE)
    entries = [json.loads(file.read_bytes()[65:]) for file in sorted(PLACE.glob("log/0*"))]
    tag = next(e for e in reversed(entries) if e["kind"] == "tag" and e["name"] == TAG)
    commit = next(e for e in entries if e.get("commit") == tag["commit"] and "session" in e)
    leaf = store.leaves(tag["commit"])[LEAF]
    lines = [
        f"1. The entries of `log/` are read in order. Entry {tag['n']} sets the tag, and no later",
        f"   one changes it. The whole file `log/{tag['n']:012d}`, with long lines folded:",
        "",
        *block((PLACE / f"log/{tag['n']:012d}").read_text().splitlines()),
        "",
        f"   `reused` {pack_set(tag['reused'])}.",
        "",
        f"2. Entry {commit['n']} has made the commit, in the session `{commit['session']}`. So the",
        "   document is this file, whose name is folded:",
        "",
        *block([f"commits/{commit['session']}-{commit['commit']}"]),
        "",
        f"   Its JSON says of the key `{KEY}`:",
        "",
        *document(store, commit),
        *chunks(store, commit, leaf),
    ]
    return "\n".join(lines) + "\n"


def document(store: Any, commit: dict[str, Any]) -> Iterator[str]:
    name = f"commits/{commit['session']}-{commit['commit']}"
    tree = json.loads(reader.inflate((PLACE / name).read_bytes(), 0, 1 << 20))["trees"][KEY]
    yield from block([json.dumps(tree, separators=(",", ":"))])
    schema = json.loads(store.chunk(bytes.fromhex(tree["schema"])))
    number = schema["paths"].index(LEAF)
    file, record, _ = store.chunks[bytes.fromhex(tree["schema"])][0]
    yield from (
        "",
        f"3. The schema is a chunk of the pack `{file.name}`. Its record in the footer:",
        "",
        *block(fields(record)),
        "",
        f"   It says of leaf {number}: path `{schema['paths'][number]}`, kind "
        f"`{schema['kinds'][number]}`, dtype `{schema['dtypes'][number]}`, shape",
        f"   `{schema['shapes'][number]}`, alias {schema['aliases'][number]}.",
        "",
    )
    page_id = b64decode(tree["pages"])
    yield from (
        "4. The page ids, decoded from base64, are 32 bytes: one page.",
        "",
        *block([page_id.hex()]),
        "",
        f"   The page begins with these bytes, up to the payload of leaf {number}:",
        "",
        *block(page_rows(store.chunk(page_id), number)),
        "",
    )


def page_rows(page: bytes, number: int) -> Iterator[str]:
    """A page up to the payload of leaf `number`. It begins with leaf 0 and has no extents."""
    _, _, _, count, _ = struct.unpack_from("<4sIIIQ", page)
    at = 24 + count + -count % 4
    sizes = struct.unpack_from(f"<{count}I", page, at)
    lengths = [n * (32 if kind == 1 else 1) for n, kind in zip(sizes, page[24:], strict=False)]
    starts = list(accumulate(lengths, initial=at + 4 * count))
    yield f"{page[:16].hex(' ', 4)}   CKPG, version, first leaf, entries"
    yield f"{page[16:24].hex()}   first id"
    yield f"{page[24 : 24 + count].hex(' ')}   kinds"
    yield f"{page[24 + count : at].hex(' ')}   padding"
    yield f"{page[at : starts[0]].hex(' ', 4)}   sizes"
    yield f"… {starts[number] - starts[0]} bytes of the leaves before"
    yield f"{page[starts[number] : starts[number + 1]].hex()}"


def chunks(store: Any, commit: dict[str, Any], leaf: dict[str, Any]) -> Iterator[str]:
    (chunk,) = leaf["ids"]
    file, record, _ = store.chunks[chunk][0]
    offset, stored, width = record[2], record[3], record[7]
    data = file.read_bytes()[offset : offset + stored]
    raw = store.chunk(chunk)
    listed = next(pack for pack in commit["packs"] + first_packs() if pack[1] == file.name)
    elements = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, 12, 2)]
    yield from (
        f"5. Its one chunk is in the pack `{file.name}`, number {listed[0]}, of {listed[2]} bytes:",
        "",
        *block(fields(record)),
        "",
        f"   The {stored} stored bytes from offset {offset} are `split-zstd`, of {width} planes:",
        "",
        *block(
            [
                f"{data[:16].hex()}   checksum",
                f"{data[16:24].hex()}   shift",
                f"{data[24 : 24 + 4 * width].hex(' ', 4)}   bytes of lists",
                f"{data[24 + 4 * width : 44 + 4 * width].hex(' ', 4)}   Blosc chunk",
                f"{data[44 + 4 * width : 48 + 4 * width].hex()}   bytes of plane 0",
                f"{data[48 + 4 * width : 64 + 4 * width].hex()}…   plane 0",
            ]
        ),
        "",
        f"   Decoded they are {len(raw)} bytes, which match id and checksum. The first elements:",
        "",
        *block([raw[:12].hex(" ", 2), ", ".join(f"{x:.6g}" for x in elements)]),
    )


def first_packs() -> list[Any]:
    entry: dict[str, Any] = json.loads((PLACE / f"log/{1:012d}").read_bytes()[65:])
    return list(entry["packs"])


def fields(record: tuple[Any, ...]) -> Iterator[str]:
    data = struct.pack("<32s16sQIIIBBBB8s", *record)
    for (name, size), stop in zip(RECORD.items(), accumulate(RECORD.values()), strict=True):
        value = data[stop - size : stop]
        number = f" = {int.from_bytes(value, 'little')}" if 1 < size < 9 and name != "zero" else ""
        yield f"{name:9} {value.hex()}{number}"


def pack_set(value: list[Any]) -> str:
    coded = b64decode(value[1])
    assert coded[:2] == b"\0\1" and len(coded) == 3
    packs = [str(value[0] + i) for i in range(8) if coded[2] >> i & 1]
    return (
        f"is, decoded, `{coded.hex(' ')}`: after 0 bytes of zeros comes 1 byte, whose bits are the "
        f"packs\n   {', '.join(packs)}"
    )


def block(lines: Any) -> Iterator[str]:
    """A code block of the list, with lines folded at 88 columns."""
    yield "   ```"
    for line in lines:
        yield from (f"   {part}" for part in wrap(line, 88, break_on_hyphens=False))
    yield "   ```"


def main() -> None:
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + example() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
