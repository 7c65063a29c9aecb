"""The tree of held KV: each node has the rows of consecutive tokens. Pure; the store locks it and counts its bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

ID_BYTES = array("I").itemsize
RootName = tuple[str, bytes]  # the salt and the first tokens


class Rows(Protocol):
    """KV of consecutive tokens, of the layers that keep every row. Immutable."""

    @property
    def nbytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The rows of the first `at` tokens, and the others, in memory of their own: together as many bytes."""
        ...


class Snapshot(Protocol):
    """What the other layers hold after some token. Immutable."""

    @property
    def nbytes(self) -> int: ...

    @property
    def usable_from(self) -> int:
        """The least number of tokens that a request can go on from with it. It has all that is needed after so many
        tokens, and after any number between that and its own."""
        ...


R = TypeVar("R", bound=Rows)
S = TypeVar("S", bound=Snapshot)


@dataclass(slots=True, eq=False)
class Node(Generic[R, S]):
    """Rows of tokens [start, end). key: their ids. used: when a request last used it, by the store's counter."""

    key: bytes
    start: int
    parent: Node[R, S] | None
    rows: R | None = None  # None at the root, which has no tokens
    snapshot: S | None = None  # at `end`
    children: dict[bytes, Node[R, S]] = field(default_factory=dict)  # by the first token
    pins: int = 0
    used: int = 0
    name: RootName = ("", b"")  # of a root

    @property
    def end(self) -> int:
        return self.start + len(self.key) // ID_BYTES

    @property
    def nbytes(self) -> int:
        return (self.rows.nbytes if self.rows else 0) + (self.snapshot.nbytes if self.snapshot else 0)

    def path(self) -> Iterator[Node[R, S]]:
        """This node and its ancestors, the root last."""
        node: Node[R, S] | None = self
        while node is not None:
            yield node
            node = node.parent


def key_of(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def walk(root: Node[R, S], key: bytes) -> tuple[Node[R, S], int]:
    """The node in which the agreement of the tree with `key` ends, and the number of tokens that agree."""
    node, at = root, 0
    while at < len(key) and (child := node.children.get(key[at : at + ID_BYTES])) is not None:
        same = _common(child.key, key[at : at + len(child.key)])
        node, at = child, at + same
        if same < len(child.key):
            break
    return node, at // ID_BYTES


def _common(a: bytes, b: bytes) -> int:
    """Bytes of the whole tokens at the beginning of both."""
    low, high = 0, min(len(a), len(b)) // ID_BYTES
    if a[: high * ID_BYTES] == b[: high * ID_BYTES]:
        return high * ID_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * ID_BYTES : middle * ID_BYTES] == b[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle
    return low * ID_BYTES


def snapshot_for(node: Node[R, S], matched: int, rewindable: int) -> Node[R, S] | None:
    """A node at or below `node` whose snapshot can be used after `matched` tokens, none of which comes after its end.
    rewindable: no snapshot can be used so many tokens before its end."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.snapshot is not None and node.snapshot.usable_from <= matched <= node.end:
            return node
        pending += [child for child in node.children.values() if child.start < matched + rewindable]
    return None
