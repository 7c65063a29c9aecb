"""The head of a split in one process: a prefill engine computes the first layers of a prompt, whose rows and hidden
states come into the memory of a decode engine through the wire's frames."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api.names import AS_IS, WireForm
from disagg.engines.base import EmittingEngine
from disagg.engines.decoding import DecodeEngine
from disagg.errors import DisaggError
from disagg.kv.arena import Arenas
from disagg.kv.arriving import ArrivingKV
from disagg.kv.blocks import Block
from disagg.kv.fingerprint import token_hash
from disagg.kv.frames import Header, Kind, TransferTotals, decode_frame, encode_frame
from disagg.kv.outbox import frames_of
from disagg.kv.receive.chunks import ChunkedAssembly, Chunks
from tests.deadlines import wait_until


class Head:
    """The first `layers` layers of all tokens but the last, from `start` on. arriving: for the decode engine."""

    def __init__(
        self,
        prefill: EmittingEngine,
        decode: DecodeEngine,
        tokens: Sequence[int],
        layers: int,
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        chunk_tokens: int | None = None,
        salt: str = "",
    ) -> None:
        prompt, split = tokens[:-1], decode.info.split
        layout = split.head(decode.info.layout, layers)
        layout.require_same(split.head(prefill.info.layout, layers), mine="decode", theirs="prefill")
        hidden = split.hidden if layers < split.layers else 0
        self.arriving = ArrivingKV(
            layout, len(prompt), start, arenas=Arenas(decode.allocate), layers=layers, hidden=hidden
        )
        self._header = Header(
            ticket="",
            request_id="r",
            fingerprint=decode.info.fingerprint,
            layout=layout,
            token_hash=token_hash(tokens),
            tokens=len(prompt),
            start=start,
            wire=wire,
            chunks=True,
            layers=layers,
            hidden=hidden,
        )
        self.arriving.begin(0)
        self._kv = self.arriving.place(0, self._header)
        self._assembly = ChunkedAssembly(self._kv, self._header, Chunks(self.arriving, 0, self._header))
        self._frames = self._chunks = 0
        self._run = prefill.start(
            prompt, self._emit, start=start, wire=wire, salt=salt, chunk_tokens=chunk_tokens, layers=layers
        )

    @property
    def done(self) -> bool:
        return self._run.done

    def step(self) -> None:
        """Compute the next chunk."""
        self._run.step()

    def finish(self) -> ArrivingKV:
        """Compute what is left, and end the transfer."""
        while not self._run.done:
            self._run.step()
        self._run.close()
        self._assembly.finish(TransferTotals(self._frames, self._assembly.nbytes, b""), b"")
        self.arriving.leave(0)
        self.arriving.end(0, "complete")
        return self.arriving

    def fail(self, error: DisaggError) -> None:
        """The head fails after the chunks that it has computed."""
        self._run.close()
        self.arriving.leave(0)
        self.arriving.end(0, error)

    def _emit(self, block: Block) -> None:
        if (wait := getattr(block, "wait", None)) is not None:
            wait()
        header = self._header
        for made, payload in frames_of(block, header.layout, header.wire, hidden_bytes=header.hidden_bytes):
            frame = decode_frame(encode_frame(made))
            if self._header.hidden and frame.kind is not Kind.STATE:
                wait_until(lambda: self.arriving.progress.allowed > self._chunks)
            if frame.kind is Kind.CHUNK:
                self._assembly.end_chunk(frame, b"", b"")
                self._chunks += 1
                continue
            sent = b"".join(payload)
            for view in self._assembly.place(frame):
                view[:], sent = sent[: len(view)], sent[len(view) :]
            self._frames += 1
