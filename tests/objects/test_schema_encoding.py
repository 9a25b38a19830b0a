"""Schemas: what a tree looks like comes back, and a damaged one is called so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.model import LeafKind, Node, Schema
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects import canonical
from ckptstore.objects.schema import decode_schema, encode_schema
from tests.support.mutations import damaged

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
INTEGERS = st.integers(-(2**53), 2**53)
KEYS = TEXT | INTEGERS | TEXT.map(lambda text: ["bytes", text])
LEAVES: st.SearchStrategy[tuple[LeafKind, str, tuple[int, ...]]] = st.one_of(
    st.tuples(
        st.just("tensor"),
        st.sampled_from(["bfloat16", "float32"]),
        st.lists(st.integers(0, 2**12), max_size=5).map(tuple),
    ),
    st.tuples(st.sampled_from(["value", "bytes"]), st.just(""), st.just(())),
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    leaves: list[tuple[LeafKind, str, tuple[int, ...]]] = []

    def node(depth: int) -> Node | int:
        if depth == 0 or draw(st.booleans()):
            leaves.append(draw(LEAVES))
            return len(leaves) - 1
        children = tuple(node(depth - 1) for _ in range(draw(st.integers(0, 3))))
        keys = tuple(draw(KEYS) for _ in children) if draw(st.booleans()) else None
        attrs = draw(st.dictionaries(TEXT, KEYS, max_size=2))
        return Node(draw(TEXT), children, keys, tuple(sorted(attrs.items())))

    skeleton = node(4)
    kinds, dtypes, shapes = zip(*leaves, strict=True) if leaves else ((), (), ())
    paths = draw(st.lists(TEXT, min_size=len(leaves), max_size=len(leaves), unique=True))
    aliases = tuple(draw(st.integers(-1, i - 1)) for i in range(len(leaves)))
    return Schema(skeleton, tuple(paths), kinds, dtypes, shapes, aliases)


SMALL = Schema(
    Node(
        "dict",
        (0, Node("list", (1, 2)), 3),
        ("w", 7, ["bytes", "ff"]),
        (("default", ["float", "3ff0000000000000"]),),
    ),
    ("m/w", "m/7/0", "m/7/1", "m/x"),
    ("tensor", "value", "bytes", "tensor"),
    ("float32", "", "", "float32"),
    ((2, 0), (), (), (2, 0)),
    (-1, -1, -1, 0),
)


@given(schemas())
def test_a_schema_comes_back(schema: Schema) -> None:
    assert decode_schema(encode_schema(schema)) == schema


def test_a_schema_is_written_as_the_format_says() -> None:
    assert canonical.decode(encode_schema(SMALL)) == {
        "skeleton": {
            "type": "dict",
            "children": [0, {"type": "list", "children": [1, 2]}, 3],
            "keys": ["w", 7, ["bytes", "ff"]],
            "attrs": {"default": ["float", "3ff0000000000000"]},
        },
        "paths": ["m/w", "m/7/0", "m/7/1", "m/x"],
        "kinds": ["tensor", "value", "bytes", "tensor"],
        "dtypes": ["float32", "", "", "float32"],
        "shapes": [[2, 0], [], [], [2, 0]],
        "aliases": [-1, -1, -1, 0],
    }


@given(schemas().map(encode_schema).flatmap(damaged))
def test_a_damaged_schema_is_a_schema_or_corrupt(data: bytes) -> None:
    try:
        schema = decode_schema(data)
    except Corrupt:
        return
    assert decode_schema(encode_schema(schema)) == schema


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("skeleton", None),
        ("skeleton", 0),
        ("skeleton", {"type": "list", "children": [0, 1, 2]}),
        ("skeleton", {"type": "list", "children": [0, 1, 2, 2]}),
        ("skeleton", {"type": "list", "children": [0, 1, 3, 2]}),
        ("skeleton", {"type": "list", "children": [0, 1, 2, 3, 4]}),
        ("skeleton", {"type": "list", "children": [0, 1, 2, True]}),
        ("skeleton", {"type": "list", "children": [0, 1, 2, "3"]}),
        ("skeleton", {"type": 1, "children": [0, 1, 2, 3]}),
        ("skeleton", {"children": [0, 1, 2, 3]}),
        ("skeleton", {"type": "dict", "children": [0, 1, 2, 3], "keys": ["a"]}),
        ("skeleton", {"type": "dict", "children": [0, 1, 2, 3], "keys": ["a", "b", "c", []]}),
        ("skeleton", {"type": "dict", "children": [0, 1, 2, 3], "keys": ["a", "b", "c", True]}),
        ("skeleton", {"type": "dict", "children": [0, 1, 2, 3], "keys": ["a", "b", "c", [1]]}),
        ("skeleton", {"type": "list", "children": [0, 1, 2, 3], "attrs": []}),
        ("paths", ["a", "b", "c"]),
        ("paths", ["a", "b", "c", "a"]),
        ("paths", ["a", "b", "c", 4]),
        ("kinds", ["tensor", "value", "bytes", "pickle"]),
        ("kinds", ["tensor", "value", "tensor", "tensor"]),
        ("dtypes", ["float32", "", "", ""]),
        ("dtypes", ["float32", "", "int8", "float32"]),
        ("shapes", [[2, 0], [], [1], [2, 0]]),
        ("shapes", [[2, -1], [], [], [2, 0]]),
        ("shapes", [[2, True], [], [], [2, 0]]),
        ("shapes", [[2, [1]], [], [], [2, 0]]),
        ("shapes", [{"2": 0}, [], [], [2, 0]]),
        ("shapes", [[1] * 65, [], [], [2, 0]]),
        ("shapes", [[2**40, 2**40], [], [], [2, 0]]),
        ("aliases", [-1, -1, -1, 3]),
        ("aliases", [-2, -1, -1, -1]),
        ("aliases", [-1, -1, -1, False]),
        ("aliases", {}),
    ],
)
def test_a_schema_that_contradicts_itself_is_corrupt(key: str, value: object) -> None:
    with pytest.raises(Corrupt):
        decode_schema(canonical.encode(canonical.decode(encode_schema(SMALL)) | {key: value}))


@pytest.mark.parametrize("key", ["skeleton", "paths", "kinds", "dtypes", "shapes", "aliases"])
def test_a_schema_that_lacks_a_column_is_corrupt(key: str) -> None:
    obj = canonical.decode(encode_schema(SMALL))
    del obj[key]
    with pytest.raises(Corrupt):
        decode_schema(canonical.encode(obj))


def nested(depth: int) -> Schema:
    skeleton: Node | int = 0
    for _ in range(depth):
        skeleton = Node("list", (skeleton,))
    return Schema(skeleton, ("x",), ("value",), ("",), ((),), (-1,))


def test_containers_nest_99_deep() -> None:
    assert decode_schema(encode_schema(nested(99))) == nested(99)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeper_containers_are_refused(depth: int) -> None:
    with pytest.raises(InvalidInput):
        encode_schema(nested(depth))
