"""KV of finished requests, found by the tokens that a new request shares with them. No framework: rows are opaque.

Prompts that begin alike share their KV: a tree whose nodes hold the rows of consecutive tokens. Layers that keep every
row can be cut at any token. Layers that do not (sliding windows, states) have a snapshot at some nodes' ends, and only
there can a request go on, except within the first window.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

# Prefixes shorter than this are not found: they are the first words of a chat template, which all prompts share.
MIN_TOKENS = 16
# Snapshots on the way from the root to a conversation's end; older ones are dropped unless another branch begins there.
# Two per turn: the end of the prompt and of the answer.
MAX_SNAPSHOTS = 4

_ID_BYTES = array("I").itemsize
_Name = tuple[str, bytes]  # of a root: the salt and the first MIN_TOKENS tokens


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


R = TypeVar("R", bound=Rows)
S = TypeVar("S", bound=Snapshot)


@dataclass(slots=True, eq=False)
class _Node(Generic[R, S]):
    """Rows of tokens [start, end). key: their ids. used: when a request last used it, by the store's counter."""

    key: bytes
    start: int
    parent: _Node[R, S] | None
    rows: R | None = None  # None at the root, which has no tokens
    snapshot: S | None = None  # at `end`
    children: dict[bytes, _Node[R, S]] = field(default_factory=dict)  # by the first token
    pins: int = 0
    used: int = 0
    name: _Name = ("", b"")  # of a root

    @property
    def end(self) -> int:
        return self.start + len(self.key) // _ID_BYTES

    @property
    def nbytes(self) -> int:
        return (self.rows.nbytes if self.rows else 0) + (self.snapshot.nbytes if self.snapshot else 0)

    def path(self) -> Iterator[_Node[R, S]]:
        """This node and its ancestors, the root last."""
        node: _Node[R, S] | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Prefix(Generic[R, S]):
    """What is held of the first `tokens` tokens. rows: of consecutive tokens from 0 on, at least `tokens` in all.
    snapshot: after `snapshot_at` tokens; if these are more than `tokens`, they fit every window."""

    tokens: int
    rows: tuple[R, ...]
    snapshot: S | None
    snapshot_at: int


class Held(Generic[R, S]):
    """See engines.base.HeldKV."""

    def __init__(self, store: HeldStore[R, S], node: _Node[R, S], tokens: int) -> None:
        self._store, self._node, self._tokens = store, node, tokens
        self._released = False

    @property
    def tokens(self) -> int:
        return self._tokens

    def release(self) -> None:
        """See HeldKV."""
        with self._store.lock:
            self._node.pins -= not self._released
            self._released = True

    def read(self) -> Prefix[R, S]:
        """The KV; not after `release`, and not while another thread is in `add`."""
        with self._store.lock:
            nodes = [node for node in self._node.path() if node.rows is not None and node.start < self._tokens]
            rows = tuple(node.rows for node in reversed(nodes) if node.rows is not None)
            return Prefix(self._tokens, rows, self._node.snapshot, self._node.end)


class HeldStore(Generic[R, S]):
    """At most `limit` bytes of held KV; the least recently used is given up first, and none that is in use.

    window: None if every layer keeps every row; else the smallest window, 0 if some layer's state cannot be cut.
    `add` and `Held.read` are for one thread at a time, everything else is safe on any.
    """

    def __init__(self, limit: int, window: int | None) -> None:
        self.limit, self.window = limit, window
        self.lock = threading.Lock()
        self._roots: dict[_Name, _Node[R, S]] = {}
        self._leaves: OrderedDict[_Node[R, S], None] = OrderedDict()  # the least recently used first
        self._nbytes = 0
        self._clock = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def find(self, tokens: Sequence[int], salt: str) -> Held[R, S] | None:
        """The longest held prefix that a request can go on from, shorter than `tokens`; in use until it is released."""
        key = _key(tokens[:-1])
        with self.lock:
            if (root := self._roots.get((salt, key[: MIN_TOKENS * _ID_BYTES]))) is None:
                return None
            node, count = self._usable(*_walk(root, key))
            if count < MIN_TOKENS:
                return None
            node.pins += 1
            self._touch(node)
            return Held(self, node, count)

    def add(
        self, tokens: Sequence[int], salt: str, rows: Callable[[int, int], R], snapshots: Mapping[int, S] | None = None
    ) -> None:
        """Hold the KV of `tokens`. rows(start, end): those of tokens [start, end), in memory of their own; called for
        what is not held yet. snapshots: by the number of tokens before them; needed if there is a `window`."""
        if len(tokens) < MIN_TOKENS:
            return
        key = _key(tokens)
        ends: Mapping[int, S | None] = {len(tokens): None} if self.window is None else snapshots or {}
        node = None
        for end in sorted(end for end in ends if end >= MIN_TOKENS):
            node = self._extend(salt, key[: end * _ID_BYTES], rows, ends[end])
        if node is not None:
            self._drop_old_snapshots(node)
            self.give_up(self._nbytes - self.limit)

    def give_up(self, nbytes: int) -> list[Any]:
        """Drop at least `nbytes`, if so much is not in use. Returns what was dropped: its memory is free when the
        caller drops it too."""
        dropped: list[Any] = []
        with self.lock:
            target = self._nbytes - max(0, nbytes)
            while self._nbytes > target and (node := self._oldest()) is not None:
                dropped += [node.rows, node.snapshot]
                self._remove(node)
        return dropped

    def _oldest(self) -> _Node[R, S] | None:
        return next((node for node in self._leaves if not node.pins), None)

    def clear(self) -> None:
        """Drop everything, also what is in use."""
        with self.lock:
            self._roots.clear()
            self._leaves.clear()
            self._nbytes = 0

    def _usable(self, node: _Node[R, S], matched: int) -> tuple[_Node[R, S], int]:
        """The node to read and the number of tokens to use, if the tokens agree up to `matched`, within `node`."""
        if self.window is None:
            return node, matched
        if (later := _snapshot_below(node, matched, self.window)) is not None:
            return later, matched
        with_snapshot = (at for at in node.path() if at.snapshot is not None and at.end <= matched)
        return next(((at, at.end) for at in with_snapshot), (node, 0))

    def _extend(self, salt: str, key: bytes, rows: Callable[[int, int], R], snapshot: S | None) -> _Node[R, S]:
        """The node that ends after `key`, with these rows and this snapshot. Rows are copied without the lock: only
        this thread adds nodes, and the one that is extended cannot be given up meanwhile."""
        with self.lock:
            name = (salt, key[: MIN_TOKENS * _ID_BYTES])
            root = self._roots.setdefault(name, _Node(b"", 0, None, name=name))
            node, matched = _walk(root, key)
            node.pins += 1
        try:
            end = len(key) // _ID_BYTES
            new = rows(matched, end) if matched < end else None
            cut = matched < node.end and (new is not None or snapshot is not None)
            halves = node.rows.split(matched - node.start) if cut and node.rows is not None else None
        except BaseException:
            with self.lock:
                node.pins -= 1
                self._drop_empty(node)
            raise
        with self.lock:
            node.pins -= 1
            if halves is not None:
                node = self._split(node, matched, *halves)
            if new is not None:
                node = self._append(node, key[matched * _ID_BYTES :], new)
            if snapshot is not None and node.snapshot is None:
                node.snapshot = snapshot
                self._nbytes += snapshot.nbytes
            self._touch(node)
        return node

    def _split(self, node: _Node[R, S], at: int, upper: R, lower: R) -> _Node[R, S]:
        """Insert a new node above `node`, which keeps its end, its snapshot and those who use it."""
        assert node.parent is not None and node.rows is not None, "the root has no rows to split"
        bytes_above = (at - node.start) * _ID_BYTES
        above = _Node(node.key[:bytes_above], node.start, node.parent, upper, used=node.used)
        node.parent.children[above.key[:_ID_BYTES]] = above
        node.key, node.start, node.parent, node.rows = node.key[bytes_above:], at, above, lower
        above.children[node.key[:_ID_BYTES]] = node
        return above

    def _append(self, parent: _Node[R, S], key: bytes, rows: R) -> _Node[R, S]:
        node = parent.children[key[:_ID_BYTES]] = _Node(key, parent.end, parent, rows)
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        self._nbytes += rows.nbytes
        return node

    def _remove(self, leaf: _Node[R, S]) -> None:
        """Remove a leaf. Its parent, if it becomes one, is next, unless it was used without the leaf since."""
        parent = leaf.parent
        assert parent is not None, "a root is not a leaf"
        del self._leaves[leaf], parent.children[leaf.key[:_ID_BYTES]]
        self._nbytes -= leaf.nbytes
        if parent.parent is not None and not parent.children:
            useless = self.window is not None and parent.snapshot is None
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=parent.used > leaf.used and not useless)
        self._drop_empty(parent)

    def _drop_empty(self, node: _Node[R, S]) -> None:
        if node.parent is None and not node.children and not node.pins:
            self._roots.pop(node.name, None)

    def _drop_old_snapshots(self, end: _Node[R, S]) -> None:
        with self.lock:
            having = [node for node in end.path() if node.snapshot is not None]
            for node in having[MAX_SNAPSHOTS:]:
                if node.snapshot is not None and not node.pins and len(node.children) == 1:
                    self._nbytes -= node.snapshot.nbytes
                    node.snapshot = None

    def _touch(self, node: _Node[R, S]) -> None:
        self._clock += 1
        for each in node.path():
            each.used = self._clock
        if node in self._leaves:
            self._leaves.move_to_end(node)


def _key(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _walk(root: _Node[R, S], key: bytes) -> tuple[_Node[R, S], int]:
    """The node in which the agreement of the tree with `key` ends, and the number of tokens that agree."""
    node, at = root, 0
    while at < len(key) and (child := node.children.get(key[at : at + _ID_BYTES])) is not None:
        same = _common(child.key, key[at : at + len(child.key)])
        node, at = child, at + same
        if same < len(child.key):
            break
    return node, at // _ID_BYTES


def _common(a: bytes, b: bytes) -> int:
    """Bytes of the whole tokens at the beginning of both."""
    low, high = 0, min(len(a), len(b)) // _ID_BYTES
    if a[: high * _ID_BYTES] == b[: high * _ID_BYTES]:
        return high * _ID_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * _ID_BYTES : middle * _ID_BYTES] == b[low * _ID_BYTES : middle * _ID_BYTES]:
            low = middle
        else:
            high = middle
    return low * _ID_BYTES


def _snapshot_below(node: _Node[R, S], matched: int, window: int) -> _Node[R, S] | None:
    """A node at or below `node` with a snapshot after more than `matched` tokens that fit the window: it holds the rows
    of all its tokens."""
    pending = [node] if matched <= window else []
    while pending:
        node = pending.pop()
        if matched < node.end <= window and node.snapshot is not None:
            return node
        pending += [child for child in node.children.values() if child.start < window]
    return None
