"""The key and the certificate that follow from a token.

The key is one of NIST P-256, which every client of TLS 1.3 accepts (curl on macOS does not accept Ed25519). Nothing in
the certificate is random or depends on the time, and its signature is deterministic (RFC 6979): the same bytes on every
host. Whoever has the token can therefore be any server of the fleet, and can do everything else in it, too.
"""

from __future__ import annotations

import ssl
from datetime import datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

NAME: Final = "disagg"
"""The name in the certificate: what clients that check a name have to expect."""
_KEY_INFO: Final = b"disagg server certificate 1"
_NAME_INFO: Final = b"disagg token name 1"
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_NOT_BEFORE, _NOT_AFTER = datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
"""In UTC: a host without a clock is served, too."""


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
