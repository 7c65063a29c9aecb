"""KV of finished requests, found by the tokens that a new request shares with them. No framework: rows are opaque.

Prompts that begin alike share their KV: a tree whose nodes hold the rows of consecutive tokens. Layers that keep every
row can be cut at any token. Layers that do not (sliding windows, states) have a snapshot at some nodes' ends, and a
request can go on only there, or as many tokens before as the snapshot has rows to spare.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from disagg.engines.model.prefix_tree import ID_BYTES, Node, R, RootName, S, key_of, snapshot_for, walk

# Prefixes shorter than this are not found: they are the first words of a chat template, which all prompts share.
MIN_TOKENS = 16
# Snapshots on the way from the root to a conversation's end; older ones are dropped unless another branch begins there.
# Two per turn: the end of the prompt and of the answer.
MAX_SNAPSHOTS = 4


@dataclass(frozen=True, slots=True)
class Prefix(Generic[R, S]):
    """What is held of the first `tokens` tokens. rows: of consecutive tokens from 0 on, at least `tokens` in all.
    snapshot: after `snapshot_at` tokens, at least `tokens`, and usable from there on."""

    tokens: int
    rows: tuple[R, ...]
    snapshot: S | None
    snapshot_at: int


class PinnedPrefix(Generic[R, S]):
    """Held KV of the first `tokens` tokens of a prompt, which is not given up until it is released."""

    def __init__(self, store: PrefixCache[R, S], node: Node[R, S], tokens: int) -> None:
        self._store, self._node, self._tokens = store, node, tokens
        self._released = False

    @property
    def tokens(self) -> int:
        return self._tokens

    def release(self) -> None:
        with self._store.lock:
            self._node.pins -= not self._released
            self._released = True

    def read(self) -> Prefix[R, S]:
        """The KV; not after `release`, and not while another thread is in `add`."""
        with self._store.lock:
            nodes = [node for node in self._node.path() if node.rows is not None and node.start < self._tokens]
            rows = tuple(node.rows for node in reversed(nodes) if node.rows is not None)
            return Prefix(self._tokens, rows, self._node.snapshot, self._node.end)


class PrefixCache(Generic[R, S]):
    """At most `limit` bytes of held KV; the least recently used is given up first, and none that is in use.

    rewindable: None if every layer keeps every row; else no snapshot can be used so many tokens before its own end.
    `add` and `PinnedPrefix.read` are for one thread at a time, everything else is safe on any.
    """

    def __init__(self, limit: int, rewindable: int | None) -> None:
        self.limit, self.rewindable = limit, rewindable
        self.lock = threading.Lock()
        self._roots: dict[RootName, Node[R, S]] = {}
        self._leaves: OrderedDict[Node[R, S], None] = OrderedDict()  # the least recently used first
        self._nbytes = 0
        self._clock = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def find(self, tokens: Sequence[int], salt: str) -> PinnedPrefix[R, S] | None:
        """The longest held prefix of `tokens`, perhaps all, that a request can go on from. It is in use until it is
        released."""
        key = key_of(tokens)
        with self.lock:
            if (root := self._roots.get((salt, key[: MIN_TOKENS * ID_BYTES]))) is None:
                return None
            node, count = self._usable(*walk(root, key))
            if count < MIN_TOKENS:
                return None
            node.pins += 1
            self._touch(node)
            return PinnedPrefix(self, node, count)

    def add(
        self, tokens: Sequence[int], salt: str, rows: Callable[[int, int], R], snapshots: Mapping[int, S] | None = None
    ) -> None:
        """Hold the KV of `tokens`. rows(start, end): those of tokens [start, end), in memory of their own; called for
        what is not held yet. snapshots: by the number of tokens before them; needed if there is a `rewindable`."""
        if len(tokens) < MIN_TOKENS or self.limit <= 0:
            return
        key = key_of(tokens)
        ends: Mapping[int, S | None] = {len(tokens): None} if self.rewindable is None else snapshots or {}
        node = None
        for end in sorted(end for end in ends if end >= MIN_TOKENS):
            if (node := self._extend(salt, key[: end * ID_BYTES], rows, ends[end])) is None:
                return
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

    def forget(self, tokens: Sequence[int], salt: str) -> list[Any]:
        """Drop what `tokens` begin with, and all that was held after it, also what is in use: who uses it can still
        read it. Returns what was dropped, as `give_up`."""
        key = key_of(tokens)
        with self.lock:
            root = self._roots.get((salt, key[: MIN_TOKENS * ID_BYTES]))
            if root is None or (top := root.children.pop(key[:ID_BYTES], None)) is None:
                return []
            dropped, pending = list[Any](), [top]
            while pending:
                node = pending.pop()
                pending += node.children.values()
                self._nbytes -= node.nbytes
                self._leaves.pop(node, None)
                dropped += [node.rows, node.snapshot]
            self._drop_empty(root)
            return dropped

    def _oldest(self) -> Node[R, S] | None:
        return next((node for node in self._leaves if not node.pins), None)

    def clear(self) -> None:
        """Drop everything, also what is in use."""
        with self.lock:
            self._roots.clear()
            self._leaves.clear()
            self._nbytes = 0

    def _usable(self, node: Node[R, S], matched: int) -> tuple[Node[R, S], int]:
        """The node to read and the number of tokens to use, if the tokens agree up to `matched`, within `node`."""
        if self.rewindable is None:
            return node, matched
        if (later := snapshot_for(node, matched, self.rewindable)) is not None:
            return later, matched
        with_snapshot = (at for at in node.path() if at.snapshot is not None and at.end <= matched)
        return next(((at, at.end) for at in with_snapshot), (node, 0))

    def _extend(self, salt: str, key: bytes, rows: Callable[[int, int], R], snapshot: S | None) -> Node[R, S] | None:
        """The node that ends after `key`, with these rows and this snapshot. Rows are copied without the lock: only
        this thread adds nodes, and the one that is extended cannot be given up meanwhile. None if it was forgotten."""
        with self.lock:
            name = (salt, key[: MIN_TOKENS * ID_BYTES])
            root = self._roots.setdefault(name, Node(b"", 0, None, name=name))
            node, matched = walk(root, key)
            node.pins += 1
        try:
            end = len(key) // ID_BYTES
            new = rows(matched, end) if matched < end else None
            cut = matched < node.end and (new is not None or snapshot is not None)
            halves = node.rows.split(matched - node.start) if cut and node.rows is not None else None
        except BaseException:  # a node that stays pinned would never be given up
            with self.lock:
                node.pins -= 1
                self._drop_empty(node)
            raise
        with self.lock:
            node.pins -= 1
            if not self._has(node):
                return None
            if halves is not None:
                node = self._split(node, matched, *halves)
            if new is not None:
                node = self._append(node, key[matched * ID_BYTES :], new)
            if snapshot is not None and node.snapshot is None:
                node.snapshot = snapshot
                self._nbytes += snapshot.nbytes
            self._touch(node)
        return node

    def _has(self, node: Node[R, S]) -> bool:
        """Whether the node was not forgotten."""
        *path, root = node.path()
        inner = all(one.parent is not None and one.parent.children.get(one.key[:ID_BYTES]) is one for one in path)
        return inner and self._roots.get(root.name) is root

    def _split(self, node: Node[R, S], at: int, upper: R, lower: R) -> Node[R, S]:
        """Insert a new node above `node`, which keeps its end, its snapshot and those who use it."""
        assert node.parent is not None and node.rows is not None, "the root has no rows to split"
        bytes_above = (at - node.start) * ID_BYTES
        above = Node(node.key[:bytes_above], node.start, node.parent, upper, used=node.used)
        node.parent.children[above.key[:ID_BYTES]] = above
        node.key, node.start, node.parent, node.rows = node.key[bytes_above:], at, above, lower
        above.children[node.key[:ID_BYTES]] = node
        return above

    def _append(self, parent: Node[R, S], key: bytes, rows: R) -> Node[R, S]:
        node = parent.children[key[:ID_BYTES]] = Node(key, parent.end, parent, rows)
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        self._nbytes += rows.nbytes
        return node

    def _remove(self, leaf: Node[R, S]) -> None:
        """Remove a leaf. Its parent, if it becomes one, is next, unless it was used without the leaf since."""
        parent = leaf.parent
        assert parent is not None, "a root is not a leaf"
        del self._leaves[leaf], parent.children[leaf.key[:ID_BYTES]]
        self._nbytes -= leaf.nbytes
        if parent.parent is not None and not parent.children:
            useless = self.rewindable is not None and parent.snapshot is None
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=parent.used > leaf.used and not useless)
        self._drop_empty(parent)

    def _drop_empty(self, node: Node[R, S]) -> None:
        if node.parent is None and not node.children and not node.pins:
            self._roots.pop(node.name, None)

    def _drop_old_snapshots(self, end: Node[R, S]) -> None:
        with self.lock:
            having = [node for node in end.path() if node.snapshot is not None]
            for node in having[MAX_SNAPSHOTS:]:
                if node.snapshot is not None and not node.pins and len(node.children) == 1:
                    self._nbytes -= node.snapshot.nbytes
                    node.snapshot = None

    def _touch(self, node: Node[R, S]) -> None:
        self._clock += 1
        for each in node.path():
            each.used = self._clock
        if node in self._leaves:
            self._leaves.move_to_end(node)


def salted(salt: str, head: int | None) -> str:
    """The salt of a prefix whose KV is that of the model's first `head` layers, None for all: KV of one number of
    layers is never found for another, whatever the salts are."""
    return f"{'' if head is None else head}:{salt}"


Layer = tuple[Any, ...]
"""Keys and values; or the arrays of a state."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerArrays:
    """layers: per layer, None for those that are held in another way."""

    layers: tuple[Layer | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for layer in self.layers for array in layer or ())


@dataclass(frozen=True, slots=True, eq=False)
class LayerSnapshot(LayerArrays):
    """What sliding and state layers hold after some token. layers: None for those that keep every row. usable_from: the
    least number of tokens that a request can go on from with it."""

    usable_from: int


def segments(prefix: Prefix[Any, Any], layer: int) -> Iterator[tuple[int, Layer]]:
    """The rows of one layer that keeps every row, with the index of each piece's first. Cut off after
    `prefix.tokens`."""
    start = 0
    for part in prefix.rows:
        arrays: Layer | None = part.layers[layer]
        assert arrays is not None, "this layer does not keep every row"
        rows = arrays[0].shape[2]
        yield start, _without_last(arrays, start + rows - prefix.tokens)
        start += rows


def last_rows(prefix: Prefix[Any, Any], layer: int) -> Layer:
    """The rows that a snapshot has of a sliding layer, in the order of the tokens; the arrays of a state. Cut off after
    `prefix.tokens`."""
    arrays: Layer | None = prefix.snapshot.layers[layer] if prefix.snapshot is not None else None
    assert arrays is not None, "this layer keeps every row"
    return _without_last(arrays, prefix.snapshot_at - prefix.tokens)


def _without_last(arrays: Layer, surplus: int) -> Layer:
    return arrays if surplus <= 0 else tuple(array[:, :, : array.shape[2] - surplus] for array in arrays)
