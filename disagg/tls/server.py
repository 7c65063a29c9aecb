"""The server's end."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence

from disagg.tls.certificate import certificate_pem, key_pem, token_name


class ServerTLS:
    """The certificates of a server. tokens: gives those that it has now, the current one first."""

    def __init__(self, tokens: Callable[[], Sequence[str]]) -> None:
        self._tokens = tokens
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a new connection: a client that names one of the tokens is shown its certificate, any other that of the
        current one."""
        tokens = self._tokens()
        self._contexts = {token: self._contexts.get(token) or self._new(token) for token in tokens}
        return self._contexts[tokens[0]]

    def _new(self, token: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # connections are kept open instead of sessions
        context.sni_callback = self._choose
        shown, kept = _readable(certificate_pem(token).encode()), _readable(key_pem(token))
        try:
            context.load_cert_chain(f"/dev/fd/{shown}", f"/dev/fd/{kept}")
        finally:
            os.close(shown)
            os.close(kept)
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        for token, context in self._contexts.items():
            if token_name(token) == name:
                connection.context = context


def _readable(text: bytes) -> int:
    """A descriptor to read this short text from. The ssl module takes files only, and no key is written to a disk."""
    reader, writer = os.pipe()
    with open(writer, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(text)
    return reader
