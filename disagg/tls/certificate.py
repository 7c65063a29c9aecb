"""The certificate that follows from a token, and what each end of a connection makes of it.

The key is one of NIST P-256, which every client of TLS 1.3 accepts (curl on macOS does not accept Ed25519). Nothing in
the certificate is random or depends on the time, and its signature is deterministic (RFC 6979): the same bytes on every
host. Whoever has the token can therefore be any server of the fleet, and can do everything else in it, too.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from disagg.errors import ServerUnproven

NAME: Final = "disagg"
"""The name in the certificate: what clients that check a name have to expect."""
_KEY_INFO: Final = b"disagg server certificate 1"
_NAME_INFO: Final = b"disagg token name 1"
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_NOT_BEFORE, _NOT_AFTER = datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
"""In UTC: a host without a clock is served, too."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
"""OpenSSL's names for an answer that is not one of TLS."""


@lru_cache(8)
def token_name(token: str) -> str:
    """A name of the token that reveals nothing about it. A client sends it, so that a server with two tokens uses the
    same one."""
    return f"{_derived(token, _NAME_INFO)[:8].hex()}.{NAME}"


@lru_cache(8)
def certificate(token: str) -> bytes:
    """The certificate of every server with this token, in DER."""
    key = _key(token)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, _NOT_BEFORE, _NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    )
    return builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True).public_bytes(serialization.Encoding.DER)


def certificate_pem(token: str) -> str:
    """The certificate as text, for clients such as curl."""
    return ssl.DER_cert_to_PEM_cert(certificate(token))


def key_pem(token: str) -> bytes:
    """The private key of `certificate`, as text."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return _key(token).private_bytes(encoding, form, serialization.NoEncryption())


def _key(token: str) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(_derived(token, _KEY_INFO), "big")
    return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _derived(token: str, info: bytes) -> bytes:
    """64 bytes for one purpose."""
    return HKDF(hashes.SHA512(), 64, None, info).derive(token.encode())


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
    """The context of a caller without a token: any server is accepted, so nothing that is secret may be sent."""
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


class ServerTLS:
    """The certificates of a server. tokens: gives those that it has now, the current one first. shown: gives the
    context with the certificate that callers are shown who name no token; None: that of the current token."""

    def __init__(self, tokens: Callable[[], Sequence[str]], shown: Callable[[], ssl.SSLContext] | None = None) -> None:
        self._tokens, self._shown = tokens, shown
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.context()

    def context(self) -> ssl.SSLContext:
        """The context of a new connection: a client that names one of the tokens is shown its certificate."""
        tokens = self._tokens()
        self._contexts = {token: self._contexts.get(token) or self._new(token) for token in tokens}
        if self._shown is None:
            return self._contexts[tokens[0]]
        context = self._shown()
        context.sni_callback = self._choose
        return context

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
