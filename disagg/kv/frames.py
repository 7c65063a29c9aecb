"""The wire format of one KV transfer: values to bytes and back, no sockets.

    sender   -> receiver   preamble (see `preamble`)
    receiver -> sender     reply: its proof, or refused with the reason
    sender   -> receiver   its proof, header
    receiver -> sender     reply: accepted, or refused with the reason
    sender   -> receiver   frames, end frame
    receiver -> sender     reply: acknowledged, or failed with the reason

With hidden states the receiver also replies while frames come: how many chunks have come, and how many may be sent.

Integers are little-endian. Everything from a peer is validated here; ProtocolError names what is wrong with it.
docs/wire-protocol.md specifies the same for other implementations.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import xxhash

from disagg.api.layout import MAX_LAYERS, Layout
from disagg.api.names import AS_IS, KV_CHUNKS, KV_WHOLE, WIRE_FORMS, WireForm
from disagg.errors import MAX_ERROR_CHARS, DisaggError, ProtocolError, clipped
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.parts import MAX_PARTS, WHOLE, Part
from disagg.kv.preamble import MAX_HEADER_BYTES, NONCE_BYTES

MAX_REPLY_BYTES = 1 << 16
MAX_TOKENS = (1 << 32) - 1
MAX_NAME_CHARS = 256  # request ids and token hashes
MAX_HIDDEN = 1 << 16  # elements of one token's hidden state

REPLY_LENGTH = struct.Struct("<I")
FRAME = struct.Struct("<HHIIIQ")  # kind, layer, tensor, start, end, payload length
TOTALS = struct.Struct("<QQ16s")  # frames, payload bytes, digest
DIGEST_BYTES = 16


_STATED = ("sender", "weights")
"""What a header has if its sender states it."""


class Kind(IntEnum):
    """What a frame carries."""

    KEYS = 1
    VALUES = 2
    STATE = 3
    END = 4
    IDLE = 5  # nothing: the sender runs and waits for KV; `end` is what its engine has done so far
    HIDDEN = 6  # the hidden states of a chunk
    CHUNK = 7  # the end of a chunk


@dataclass(frozen=True, slots=True)
class Header:
    """What the sender will deliver: the KV of tokens [start, tokens) of one prompt, or one of `parts` parts of it.
    sender, weights: the name of the prefill host and the form of its weights, each empty if it states none.

    chunks: it comes chunk by chunk, each checked by itself. layers: only what the first so many layers of the model
    keep; None: all. `layout` is that of these layers. hidden: elements of a hidden state; 0 if none are sent.
    """

    ticket: str
    request_id: str
    fingerprint: Fingerprint
    layout: Layout
    token_hash: str
    tokens: int
    start: int = 0
    wire: WireForm = AS_IS
    part: Part = WHOLE
    parts: int = 1
    sender: str = ""
    weights: str = ""
    chunks: bool = False
    layers: int | None = None
    hidden: int = 0

    @property
    def version(self) -> int:
        """Of the protocol that carries it."""
        return KV_CHUNKS if self.chunks else KV_WHOLE

    @property
    def hidden_bytes(self) -> int:
        """Of one token's hidden state."""
        return self.hidden * self.layout.itemsize


def carries_hidden(header: Header) -> bool:
    """Whether the connection with this header carries hidden states."""
    return header.hidden > 0 and header.part.hidden


class Frame(NamedTuple):
    """The head of one frame. tensor: index of the tensor of a ``state`` layer, or of the plane of keys or values (0 in
    the form as-is). length: payload bytes."""

    kind: Kind
    layer: int
    tensor: int
    start: int
    end: int
    length: int


class TransferTotals(NamedTuple):
    """The payload of the end frame. digest: see `Digest.end`."""

    frames: int
    payload_bytes: int
    digest: bytes


class Digest:
    """The running checksums of a transfer: XXH3-128 over frame heads and payloads in their order. No byte is in two."""

    def __init__(self) -> None:
        self._since = xxhash.xxh3_128()  # the last chunk frame
        self._chunks: xxhash.xxh3_128 | None = None

    def update(self, piece: bytes | memoryview) -> None:
        """A frame's head, or a piece of its payload; of every frame but idle, chunk and end frames."""
        self._since.update(piece)

    def chunk(self, head: bytes) -> bytes:
        """Of everything since the chunk frame before the one with this head: its payload."""
        digest = self._since.digest()
        self._since.reset()
        self._chunks = self._chunks or xxhash.xxh3_128()
        self._chunks.update(head + digest)
        return digest

    def end(self) -> bytes:
        """For the end frame: of everything; if there are chunk frames, of these and of the digest of what follows
        them."""
        if self._chunks is None:
            return self._since.digest()
        self._chunks.update(self._since.digest())
        return self._chunks.digest()


def encode_header(header: Header) -> bytes:
    """ProtocolError if it is too long."""
    body = _json_bytes(
        {
            "request_id": header.request_id,
            "tokens": header.tokens,
            "start": header.start,
            "wire": header.wire,
            "part": header.part.to_json(),
            "parts": header.parts,
            "token_hash": header.token_hash,
            "fingerprint": header.fingerprint.to_json(),
            "layout": header.layout.to_json(),
            **({"layers": header.layers, "hidden": header.hidden} if header.chunks else {}),
            **{name: _ascii(text) for name in _STATED if (text := getattr(header, name))},
        }
    )
    if len(body) > MAX_HEADER_BYTES:
        raise ProtocolError(f"the transfer header has {len(body)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return body


def decode_header(raw: bytes, ticket: str, version: int = KV_WHOLE) -> Header:
    """The header that followed the proof of this ticket, each field of the right type and size. The caller compares it
    with what the ticket allows."""
    body = _json_object(raw, "transfer header")
    tokens = _count(body, "tokens", MAX_TOKENS)
    chunks = version == KV_CHUNKS
    part_of_model = chunks and body.get("layers") is not None
    return Header(
        ticket=ticket,
        request_id=_name(body, "request_id"),
        fingerprint=Fingerprint.from_json(body.get("fingerprint")),
        layout=Layout.from_json(body.get("layout")),
        token_hash=_name(body, "token_hash"),
        tokens=tokens,
        start=_count(body, "start", tokens),
        wire=_wire(body),
        part=Part.from_json(body.get("part")),
        parts=_count(body, "parts", MAX_PARTS, minimum=1),
        chunks=chunks,
        layers=_count(body, "layers", MAX_LAYERS, minimum=1) if part_of_model else None,
        hidden=_count(body, "hidden", MAX_HIDDEN) if chunks else 0,
        **{name: _name(body, name) for name in _STATED if name in body},
    )


def encode_ok(**facts: float | str) -> bytes:
    """The receiver's reply of success, with what it measured."""
    return _reply({"ok": True, **facts})


class Credit(NamedTuple):
    """How far a transfer with hidden states has come, in chunks from its first on. checked: these were received and are
    right. allowed: so many may be sent so far."""

    checked: int
    allowed: int


def encode_credit(credit: Credit) -> bytes:
    """The receiver's reply to a header or a chunk with hidden states."""
    return encode_ok(chunks=credit.checked, credit=credit.allowed)


def decode_credit(body: dict[str, Any]) -> Credit | None:
    """What a reply of success says of chunks; None if nothing."""
    if "credit" not in body:
        return None
    checked, allowed = body.get("chunks"), body["credit"]
    if type(checked) is not int or type(allowed) is not int or not 0 <= checked <= allowed <= MAX_TOKENS:
        raise ProtocolError("the receiver's reply states chunks that are no whole numbers, or more than it allowed")
    return Credit(checked, allowed)


def encode_identity(nonce: bytes, proof: bytes) -> bytes:
    """The receiver's reply to a preamble: its nonce, and its proof that it has the ticket."""
    return encode_ok(nonce=nonce.hex(), proof=proof.hex())


def decode_identity(body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Nonce and proof of the receiver, which is not compared yet."""
    nonce, proof = (_hex(body.get(name)) for name in ("nonce", "proof"))
    if len(nonce) != NONCE_BYTES or not proof:
        raise ProtocolError("the receiver's first reply has no nonce or no proof", "another program has its port")
    return nonce, proof


def encode_error(error: DisaggError) -> bytes:
    """The receiver's reply of failure; long messages are cut."""
    clipped = {name: text[:MAX_ERROR_CHARS] for name, text in error.to_json().items()}
    return _reply({"ok": False, "error": clipped})


def decode_reply_length(raw: bytes) -> int:
    """The number of reply bytes that follow."""
    (length,) = REPLY_LENGTH.unpack(raw)
    if length > MAX_REPLY_BYTES:
        raise ProtocolError(f"the receiver's reply announces {length} bytes, at most {MAX_REPLY_BYTES} are allowed")
    return int(length)


def decode_reply(raw: bytes) -> dict[str, Any]:
    """The fields of a reply of success; raises the error in a reply of failure."""
    body = _json_object(raw, "receiver's reply")
    if body.get("ok") is True:
        return body
    error = body.get("error")
    if not isinstance(error, dict):
        raise ProtocolError("the receiver's reply is neither ok nor an error")
    raise DisaggError.from_json(error)


def encode_frame(frame: Frame) -> bytes:
    """A frame's head; the payload follows it on the wire."""
    return FRAME.pack(*frame)


def decode_frame(raw: bytes) -> Frame:
    """A frame's head. `Assembly` checks whether that frame may come next."""
    kind, *rest = FRAME.unpack(raw)
    if kind not in Kind.__members__.values():
        raise ProtocolError(f"unknown frame kind {kind}")
    frame = Frame(Kind(kind), *rest)
    fixed = {
        Kind.END: (0, 0, 0, 0, TOTALS.size),
        Kind.IDLE: (0, 0, 0, frame.end, 0),
        Kind.HIDDEN: (0, 0, frame.start, frame.end, frame.length),
        Kind.CHUNK: (0, 0, frame.start, frame.end, DIGEST_BYTES),
    }.get(frame.kind)
    if fixed is not None and frame[1:] != fixed:
        raise ProtocolError(f"malformed {frame.kind.name.lower()} frame: {rest}")
    return frame


def encode_idle(beats: int) -> bytes:
    """A whole idle frame. beats: pieces of work that the sender's engine has finished, for any prompt."""
    return FRAME.pack(Kind.IDLE, 0, 0, 0, beats & 0xFFFFFFFF, 0)


def encode_end(totals: TransferTotals) -> bytes:
    """The whole end frame."""
    return FRAME.pack(Kind.END, 0, 0, 0, 0, TOTALS.size) + TOTALS.pack(*totals)


def decode_totals(raw: bytes) -> TransferTotals:
    """The end frame's payload."""
    return TransferTotals(*TOTALS.unpack(raw))


def _reply(body: dict[str, Any]) -> bytes:
    raw = _json_bytes(body)
    return REPLY_LENGTH.pack(len(raw)) + raw


def _hex(value: object) -> bytes:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return b""


def _json_bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def _json_object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the {what} is not JSON: {clipped(error)}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"the {what} is not a JSON object")
    return body


def _ascii(text: str) -> str:
    """A text as `_name` reads it."""
    return text.encode("ascii", "replace").decode()[:MAX_NAME_CHARS]


def _name(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value.isascii() or not 1 <= len(value) <= MAX_NAME_CHARS:
        raise ProtocolError(f"{field} in the transfer header must be 1 to {MAX_NAME_CHARS} ASCII characters")
    return value


def _wire(body: dict[str, Any]) -> WireForm:
    for form in WIRE_FORMS:
        if body.get("wire") == form:
            return form
    raise ProtocolError(
        f"unknown wire form {clipped(repr(body.get('wire')))} in the transfer header",
        f"this receiver supports {', '.join(WIRE_FORMS)}: install the same disagg version on both hosts",
    )


def _count(body: dict[str, Any], field: str, maximum: int, minimum: int = 0) -> int:
    value = body.get(field)
    if type(value) is not int or not minimum <= value <= maximum:
        raise ProtocolError(f"{field} in the transfer header must be a whole number from {minimum} to {maximum}")
    return value
