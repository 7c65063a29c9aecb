"""The transfer that a ticket allows."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.names import AS_IS, WireForm
from disagg.errors import FingerprintMismatch, LayoutMismatch, ProtocolError
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.layout import Layout
from disagg.kv.wire.frames import Header


@dataclass(frozen=True, slots=True)
class Expected:
    """The one transfer that a ticket allows. It is the KV of tokens [start, tokens) of this prompt on this model, in
    one of the forms `wires`."""

    request_id: str
    layout: Layout
    fingerprint: Fingerprint
    token_hash: str
    tokens: int
    start: int = 0
    wires: tuple[WireForm, ...] = (AS_IS,)

    def require(self, header: Header) -> None:
        """Raise an error that names the first field in which the header differs."""
        self.layout.require_same(header.layout, mine="decode", theirs="prefill")
        if header.wire not in self.wires:
            raise LayoutMismatch(
                f"the prefill host would send the KV as {header.wire}, this ticket allows {' or '.join(self.wires)}",
                "take kv_wire out of the prefill host's engine options, or install the same disagg on both hosts",
            )
        self.fingerprint.require_same(header.fingerprint, mine="decode", theirs="prefill")
        if (self.tokens, self.token_hash) != (header.tokens, header.token_hash):
            raise FingerprintMismatch(
                f"the hosts tokenised the prompt differently (token_hash: "
                f"decode {self.token_hash[:16]} of {self.tokens} tokens, "
                f"prefill {header.token_hash[:16]} of {header.tokens})",
                "put the same tokenizer files and chat template on both hosts",
            )
        if self.start != header.start or self.request_id != header.request_id:
            raise ProtocolError(
                f"the transfer is for request {header.request_id} from token {header.start} on, "
                f"the ticket for request {self.request_id} from token {self.start} on"
            )
