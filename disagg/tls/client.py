"""The caller's end: which server it accepts, and what to say about one that it does not."""

from __future__ import annotations

import hmac
import socket
import ssl
from dataclasses import dataclass, field
from functools import lru_cache

from disagg.errors import ServerUnproven
from disagg.tls.certificate import certificate, token_name

_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
"""OpenSSL's names for an answer that is not one of TLS."""


@dataclass(frozen=True, slots=True)
class ClientTLS:
    """What a caller with a token needs for a connection to a server of its fleet."""

    context: ssl.SSLContext
    server_name: str
    certificate: bytes = field(repr=False)

    def require(self, connection: ssl.SSLObject | ssl.SSLSocket) -> None:
        """Raise SSLError if the other end of a complete handshake is not a server of the fleet."""
        if not hmac.compare_digest(connection.getpeercert(True) or b"", self.certificate):
            raise ssl.SSLCertVerificationError("another certificate than that of the fleet's token")

    def secure(self, plain: socket.socket) -> ssl.SSLSocket:
        """The connected socket with TLS on it; its timeout bounds each wait. Raises SSLError and OSError."""
        secured = self.context.wrap_socket(plain, server_hostname=self.server_name)
        try:
            self.require(secured)
        except ssl.SSLError:
            secured.close()
            raise
        return secured


@lru_cache(8)
def client_tls(token: str) -> ClientTLS:
    """Trusts the certificate of this token and nothing else."""
    expected = certificate(token)
    context = _context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=expected)
    return ClientTLS(context, token_name(token), expected)


def unchecked_context() -> ssl.SSLContext:
    """For a caller without a token: any server is accepted, so nothing that is secret may be sent."""
    return _context()


def unproven(error: ssl.SSLError, who: str, hint: str = "run `disagg status`") -> ServerUnproven:
    """What a failed handshake says about the server. who: its name and address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ServerUnproven(f"{who} does not prove that it has the fleet's token of this machine", hint)
    if error.reason in _NOT_TLS:
        return ServerUnproven(f"{who} does not speak TLS: another program has the port, or an older disagg", hint)
    return ServerUnproven(f"{who}: no TLS connection: {error.reason or error}", hint)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is of the fleet, not of a host
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
