"""The key and the certificate that follow from a token.

The key is one of NIST P-256, which every client of TLS 1.3 accepts (curl on macOS does not accept Ed25519). Nothing in
the certificate is random or depends on the time, and its signature is deterministic (RFC 6979): the same bytes on every
host. Whoever has the token can therefore be any server of the fleet, and can do everything else in it, too.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from disagg.tls import der

NAME: Final = "disagg"
"""The name in the certificate: what clients that check a name have to expect."""
_KEY_INFO: Final = b"disagg server certificate 1"
_NAME_INFO: Final = b"disagg token name 1"
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@lru_cache(8)
def token_name(token: str) -> str:
    """A name of the token that reveals nothing about it. A client sends it, so that a server with two tokens uses the
    same one."""
    return f"{_derived(token, _NAME_INFO)[:8].hex()}.{NAME}"


@lru_cache(8)
def certificate(token: str) -> bytes:
    """The certificate of every server with this token, in DER."""
    key = _key(token)
    body = der.certificate_body(NAME, _point(key))
    return der.certificate(body, key.sign(body, ec.ECDSA(hashes.SHA256(), deterministic_signing=True)))


def certificate_pem(token: str) -> str:
    """The certificate as text, for clients such as curl."""
    return ssl.DER_cert_to_PEM_cert(certificate(token))


def key_pem(token: str) -> bytes:
    """The private key of `certificate`, as text."""
    key = der.private_key(_secret(token).to_bytes(32, "big"), _point(_key(token)))
    return ssl.DER_cert_to_PEM_cert(key).replace("CERTIFICATE", "PRIVATE KEY").encode()


def _key(token: str) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(_secret(token), ec.SECP256R1())


def _secret(token: str) -> int:
    return int.from_bytes(_derived(token, _KEY_INFO), "big") % (_P256_ORDER - 1) + 1


def _point(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key, uncompressed."""
    numbers = key.public_key().public_numbers()
    return b"\4" + numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")


def _derived(token: str, info: bytes) -> bytes:
    """64 bytes for one purpose."""
    return HKDF(hashes.SHA512(), 64, None, info).derive(token.encode())
