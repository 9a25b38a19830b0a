"""Read the commits of a store with nothing of ckptstore: a companion to docs/format.md.

    python docs/reader.py STORE                     list the commits, oldest first
    python docs/reader.py STORE REF                 list the leaves of a commit
    python docs/reader.py STORE REF PATH > FILE     write the bytes of a leaf

REF is `latest`, a step, a tag or a commit id; § is docs/format.md. The store has its log in itself.
"""

import json
import re
import struct
import sys
from base64 import b64decode
from contextlib import suppress
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3
from xxhash import xxh3_128_digest

COLUMNS = ("paths", "kinds", "dtypes", "shapes", "aliases")
NOTHING: dict[str, Any] = {"inline": None, "ids": (), "boxes": ()}


def expect(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


def inflate(frame: bytes, least: int, most: int) -> bytes:
    """The content of one zstd frame. Its size is compared before memory is taken for it."""
    size = zstandard.frame_content_size(frame)
    expect(least <= size <= most, f"a zstd frame of {size} bytes; wanted {least} to {most}")
    return zstandard.ZstdDecompressor().decompress(frame) if size else b""


def word_of(width: int) -> int:
    """The bytes of a word of elements of `width` bytes (§4)."""
    return {1: 1, 2: 2, 4: 4, 8: 8, 16: 8}.get(width, 1)


def decode(codec: int, stored: bytes, width: int, size: int) -> bytes:
    """The `size` raw bytes of a chunk, or its difference from its base (§4)."""
    stored = stored[16:] if codec == 3 else stored
    if codec < 2:
        return inflate(stored, size, size) if codec else stored
    expect(xxh3_128_digest(stored[16:]) == stored[:16], "planes are damaged")
    word = word_of(width)
    sizes = struct.unpack_from(f"<{word}I", stored, 24)
    end, at = len(stored) - size % word, 24 + 4 * word
    words = join(stored[at + sum(sizes) : end], size // word, word)
    for i, length in enumerate(sizes):
        if length:
            words[i::word] = spread(stored[at : at + length], words[i::word])
            at += length
    return bytes(words) + stored[end:]


def join(chunk: bytes, count: int, word: int) -> bytearray:
    """The words of a Blosc chunk of one block (§4)."""
    head = struct.pack("<4B4I", 2, 1, 0x81, word, count * word, count * word, len(chunk), 20)
    expect(chunk[:20] == head if count else not chunk, "no such Blosc chunk")
    planes, at, size = b"", 20, count if count >= 128 else count * word
    while at < len(chunk):
        (length,) = struct.unpack_from("<I", chunk, at)
        plane, at = chunk[at + 4 : at + 4 + length], at + 4 + length
        planes += plane if length == size else inflate(plane, size, size)
    words = bytearray(count * word)
    for i in range(word):
        words[i::word] = planes[i * count : (i + 1) * count]
    return words


def spread(stored: bytes, plane: bytearray) -> bytearray:
    """A sparse plane, with the bytes that it lists (§4)."""
    count, size = struct.unpack_from("<II", stored)
    places = accumulate(struct.unpack(f"<{count}I", join(stored[8 : 8 + size], count, 4)))
    for place, byte in zip(places, inflate(stored[8 + size :], count, count), strict=True):
        plane[place] = byte
    return plane


def undo(difference: bytes, base: bytes, width: int, shift: int) -> bytes:
    """The chunk that differs so from its base and the shift (§4)."""
    word = word_of(width)
    form = f"<{len(base) // word}{'?BH?I???Q'[word]}"
    words, bases = struct.unpack_from(form, difference), struct.unpack_from(form, base)
    raw = struct.pack(
        form, *((d + bases[i] + shift) % (1 << 8 * word) for i, d in enumerate(words))
    )
    return raw + difference[len(raw) :]


def rounded(masters: bytes, function: int) -> bytes:
    """The float32 numbers of masters, each rounded to 16 bits (§4); as they are for function 0."""
    raw, nan = bytearray(), 0x7FC0 if function == 1 else 0x7E00
    for at in range(0, len(masters) if function else 0, 4):
        (bits,), (number,) = (struct.unpack_from(f, masters, at) for f in ("<I", "<f"))
        if number != number:
            raw += struct.pack("<H", bits >> 16 & 0x8000 | nan)
        elif function == 1:
            raw += struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)
        else:
            infinite = abs(number) >= 65520  # halfway between the largest float16 and the next
            raw += struct.pack("<e", number * float("inf") if infinite else number)
    return bytes(raw) if function else masters


def patched(stored: bytes, base: bytes, width: int) -> bytes:
    """The chunk that a patch makes of its base, or of what was rounded (§4)."""
    expect(xxh3_128_digest(stored[16:]) == stored[:16], "a patch is damaged")
    count, first, _, wide, tail = struct.unpack_from("<IIHBB", stored, 52)
    word, raw, at, rest = word_of(width), bytearray(base), -1, stored[100:]
    gaps, changes = join(rest[:first], count, wide), join(rest[first + tail :], count, word)
    for n in range(count):
        at += int.from_bytes(gaps[n * wide : (n + 1) * wide], "little") + 1
        place, folded = slice(at * word, (at + 1) * word), changes[n * word : (n + 1) * word]
        change = int.from_bytes(folded, "little")
        new = int.from_bytes(base[place], "little") + (change >> 1 ^ -(change & 1))
        raw[place] = (new % (1 << 8 * word)).to_bytes(word, "little")
    raw[len(raw) - tail :] = rest[first : first + tail]
    return bytes(raw)


class Store:
    def __init__(self, place: Path) -> None:
        """The store in the directory `place`, as its log is now."""
        self.place = place
        config = json.loads((place / "ckptstore.json").read_bytes())
        expect(config["ckptstore"] == 3, f"format {config['ckptstore']}; wanted 3")
        check = config.pop("check")
        canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        expect(blake3(canonical.encode()).hexdigest() == check, "ckptstore.json is damaged")
        expect(not config["read"], f"{', '.join(config['read'])} is needed to read this store")
        self.id, self.generation = config["store"], config["log"]["generation"]
        self.commits: dict[str, dict[str, Any]] = {}
        self.tags, self.places = dict[str, str | None](), dict[str, str]()
        self.chunks: dict[bytes, list[tuple[Path, Any, Any]]] = {}
        for entry in self._log():
            self._apply(entry)
        self.commits = dict(sorted(self.commits.items(), key=lambda item: item[1]["age"]))

    def _log(self) -> Any:
        """The entries in order, each checked against the one before (§8)."""
        n, prev = 1, [blake3(self.id.encode()).hexdigest(), 0]
        while (file := self.place / f"log/{n:012d}").exists():
            data = file.read_bytes()
            head, body = data[:65].decode(), data[65:]
            expect(head == blake3(body).hexdigest() + "\n", f"entry {n} is damaged")
            entry = json.loads(body)
            expect(entry == entry | {"n": n, "store": self.id, "prev": prev}, f"no entry {n}")
            yield entry
            n, prev = n + 1, [head[:64], len(data)]
        later = [file.name for file in (self.place / "log").glob("[0-9]*") if int(file.name) > n]
        expect(not later, f"entry {n} of the log is missing; there are {sorted(later)[:3]}")

    def _apply(self, entry: dict[str, Any]) -> None:
        """What an entry changes, as far as a reader needs it (§8.1)."""
        kind = entry["kind"]
        if kind in ("commit", "reduced"):
            id, old = entry["commit"], self.commits.get(entry.get("replaces", ""), {})
            old["forgotten"] = True
            self.commits[id] = entry | {"forgotten": False, "age": old.get("age", entry["n"])}
            both = {self.places.get(each, each) for each in (id, old.get("commit", id))}
            self.places |= {id: id} | {each: id for each, p in self.places.items() if p in both}
            self.tags |= dict.fromkeys(entry["tags"], id)
        elif kind == "tag":
            self.tags[entry["name"]] = entry["commit"]
        elif kind in ("forget", "undelete"):
            for id in self.commits.keys() & entry["commits"]:
                for other, its in self.commits.items():
                    its["forgotten"] |= self.places[other] == self.places[id]
                self.commits[id]["forgotten"] = kind == "forget"
        elif kind == "condemn":
            self.commits = {id: e for id, e in self.commits.items() if id not in entry["purge"]}
        elif kind == "moved":
            expect(entry["next_generation"] <= self.generation, f"the log is at {entry['place']}")
        else:
            expect(kind in ("register", "delete", "over", "settings"), f"unknown entry: {kind}")
        for _, pack, size, *_ in entry["packs"] if "session" in entry else ():
            for name in (pack, pack + ".2"):
                self._index(self.place / "packs" / pack[:2] / name, size)

    def _index(self, file: Path, size: int) -> None:
        """Take in the footer of a pack or twin (§4), if the file is there and sound."""
        if not file.is_file() or file.stat().st_size != size:
            return
        with file.open("rb") as pack:
            pack.seek(size - 72)
            start, _, offset, length, digest, end = struct.unpack("<12sIQQ32s8s", pack.read())
            pack.seek(offset)
            tail = pack.read(length + 32)
        form = {b"\2\0\0\0": "<32s16sQIIIBBBB8s", b"\4\0\0\0": "<32s16sQIIIBBBB72s"}
        sound = (start[:8], end, blake3(tail).digest()) == (b"CKPTPACK", b"KCAPTPKC", digest)
        if sound and start[8:] in form:
            records = list(struct.iter_unpack(form[start[8:]], tail[:length]))
            for record in records:
                base = None if record[5] == 0xFFFFFFFF else records[record[5]]
                self.chunks.setdefault(record[0], []).append((file, record, base))

    def chunk(self, wanted: bytes, most: int = 64) -> bytes:
        """The raw bytes of a chunk, from the first pack that has them as they were; it is at most
        so many patches away from one that is stored whole."""
        for file, record, base in self.chunks[wanted]:
            _, digest, offset, length, size, _, codec, width, *_ = record
            with file.open("rb") as pack, suppress(ValueError, struct.error, zstandard.ZstdError):
                pack.seek(offset)
                stored = pack.read(length)
                if codec == 4:
                    expect(0 < stored[60] <= most, "a chain of patches is too long")
                    others = [stored[64:96]] if any(stored[64:96]) else []
                    depth = 0 if stored[96] else stored[60] - 1
                    before = b"".join(self.chunk(b, depth) for b in (stored[16:48], *others))
                    raw = patched(stored, rounded(before, stored[96]), width)
                else:
                    raw = decode(codec, stored, width, size)
                if base:
                    pack.seek(base[2])
                    before = decode(base[6], pack.read(base[3]), width, size)
                    raw = undo(raw, before, width, int.from_bytes(stored[32:40], "little"))
                if xxh3_128_digest(raw) == digest and blake3(raw).digest() == wanted:
                    return raw
        raise ValueError(f"no pack has chunk {wanted.hex()} as it was")

    def find(self, ref: str) -> str:
        """The id of the newest commit that `ref` names."""
        named = [id for id, e in self.commits.items() if not e["forgotten"] or id == ref]
        named = [id for id in named if ref in ("latest", str(self.commits[id]["step"]), id)]
        return self.tags.get(ref) or named[-1]

    def leaves(self, commit: str) -> dict[str, dict[str, Any]]:
        """The leaves of a commit by path (§5 to §7)."""
        file = self.place / f"commits/{self.commits[commit]['session']}-{commit}"
        data = inflate(file.read_bytes(), 0, 256 << 20)
        expect(blake3(data).hexdigest() == commit, "the document does not match its commit's id")
        of = json.loads(data)
        escaped = (re.sub(r"[%/\0-\x1f\x7f]", lambda c: f"%{ord(c[0]):02X}", k) for k in of["keys"])
        order = {key or "%empty": n for n, key in enumerate(escaped)}
        leaves = [leaf for tree in of["trees"].values() for leaf in self._tree(tree)]
        leaves.sort(key=lambda leaf: order[leaf["paths"].partition("/")[0]])
        return {leaf["paths"]: leaf for leaf in leaves}

    def _tree(self, tree: dict[str, str]) -> list[dict[str, Any]]:
        schema = json.loads(self.chunk(bytes.fromhex(tree["schema"])))
        columns = zip(*(schema[name] for name in COLUMNS), strict=True)
        leaves = [dict(zip(COLUMNS, each, strict=True)) | NOTHING for each in columns]
        for (id,) in struct.iter_unpack("32s", b64decode(tree["pages"], validate=True)):
            page = self.chunk(id)
            start, number, count, first = struct.unpack_from("<8sIIQ", page)
            follows = b"CKPG\1\0\0\0", len(leaves[number]["ids"])
            expect((start, first) == follows, "a page does not follow the one before")
            at = 24 + count + -count % 4
            sizes, at = struct.unpack_from(f"<{count}I", page, at), at + 4 * count
            for kind, size in zip(page[24 : 24 + count], sizes, strict=True):
                leaf, payload = leaves[number], page[at : at + size * (32 if kind == 1 else 1)]
                number, at = number + (kind != 2), at + len(payload)
                leaf["inline"] = None if kind else payload
                leaf["ids"] += tuple(i for (i,) in struct.iter_unpack("32s", payload * (kind == 1)))
                if kind == 2 and size > 8:
                    leaf["boxes"] = list(struct.iter_unpack(f"<{payload[0]}Q", payload[8:]))
        contents = [*({name: leaf[name] for name in NOTHING} for leaf in leaves), {}]
        return [leaf | contents[leaf["aliases"]] for leaf in leaves]  # the last is for -1

    def read(self, leaf: dict[str, Any]) -> bytes:
        """The bytes of a leaf; of a tensor its elements in row-major order, little-endian."""
        expect(leaf["ids"] or leaf["inline"] is not None, f"{leaf['paths']} was thinned away")
        data = leaf["inline"] or b"".join(map(self.chunk, leaf["ids"]))
        width = max(int(re.findall(r"\d+|$", leaf["dtypes"])[0] or 8) // 8, 1)  # from bits
        wanted = width * prod(leaf["shapes"]) if leaf["kinds"] == "tensor" else len(data)
        expect(len(data) == wanted, f"{leaf['paths']} has {len(data)} bytes; wanted {wanted}")
        strides = [width * prod(leaf["shapes"][i:]) for i in range(1, 65)]
        out, at = bytearray(data), 0
        for offsets, lengths in zip(leaf["boxes"][::2], leaf["boxes"][1::2], strict=True):
            run, ends = lengths[-1] * width, map(sum, zip(offsets, lengths, strict=True))
            for index in product(*list(map(range, offsets, ends))[:-1]):
                start = sum(i * n for i, n in zip((*index, offsets[-1]), strides, strict=False))
                out[start : start + run], at = data[at : at + run], at + run
        return bytes(out)


def main(place: str, ref: str = "", path: str = "") -> None:
    store = Store(Path(place))
    leaves = store.leaves(store.find(ref)) if ref else {}
    if path:
        sys.stdout.buffer.write(store.read(leaves[path]))
    for leaf in leaves.values() if not path else ():
        print(leaf["paths"], leaf["kinds"], leaf["dtypes"], leaf["shapes"] or "")
    for commit, entry in store.commits.items() if not ref else ():
        tags = [tag for tag, named in store.tags.items() if named == commit]
        print(commit, entry["run"], entry["step"], *tags, "forgotten" * entry["forgotten"])


if __name__ == "__main__":
    main(*sys.argv[1:])
