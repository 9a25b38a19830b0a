"""What is below a leaf of kind `plain`? Its values as leaves of their own, so that all other code
has paths, kinds and contents for them.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from ckptstore.core.model import LeafContent, LeafKind, Node, Schema, Shape
from ckptstore.core.process import uncollected
from ckptstore.objects.schema import moved
from ckptstore.restore.reader import Tree
from ckptstore.state.flatten import flatten_value
from ckptstore.state.inflate import decode_leaf


@uncollected()
def expanded(tree: Tree, leaves: Collection[int], read: Callable[[Tree, int], bytes]) -> Tree:
    """`tree` with what is in `leaves`, which are plain and not gone, as leaves; `read` gives the
    bytes of one."""
    walk = _Expansion(tree, leaves, read)
    skeleton = walk.visit(tree.schema.skeleton)
    aliases = [alias if alias < 0 else walk.numbers[alias] for alias in walk.aliases]
    columns = tuple(walk.paths), tuple(walk.kinds), tuple(walk.dtypes), tuple(walk.shapes)
    return replace(tree, schema=Schema(skeleton, *columns, tuple(aliases)), contents=walk.contents)


class _Expansion:
    """A tree on its way: the columns of its leaves, with aliases by the numbers of before, which
    `numbers` turns into those of now."""

    def __init__(
        self, tree: Tree, leaves: Collection[int], read: Callable[[Tree, int], bytes]
    ) -> None:
        self._tree, self._leaves, self._read = tree, leaves, read
        self.numbers: dict[int, int] = {}
        self.paths: list[str] = []
        self.kinds: list[LeafKind] = []
        self.dtypes: list[str] = []
        self.shapes: list[Shape] = []
        self.aliases: list[int] = []
        self.contents: list[LeafContent] = []

    def visit(self, node: Node | int) -> Node | int:
        if not isinstance(node, int):
            return replace(node, children=tuple([self.visit(child) for child in node.children]))
        first = self.numbers[node] = len(self.paths)
        schema = self._tree.schema
        if node not in self._leaves:
            self._take(schema, slice(node, node + 1), [self._tree.contents[node]])
            return first
        value = decode_leaf(schema, node, self._read(self._tree, node))
        below = flatten_value(value, schema.paths[node])
        self._take(below.schema, slice(None), [_inline(each.read_all()) for each in below.leaves])
        return moved(below.schema.skeleton, first)

    def _take(self, schema: Schema, leaves: slice, contents: list[LeafContent]) -> None:
        self.paths += schema.paths[leaves]
        self.kinds += schema.kinds[leaves]
        self.dtypes += schema.dtypes[leaves]
        self.shapes += schema.shapes[leaves]
        self.aliases += schema.aliases[leaves]  # no plain value has some
        self.contents += contents


def _inline(data: bytes) -> LeafContent:
    return LeafContent(data, b"", len(data))
