"""The key and the certificate that follow from a token.

The key is one of NIST P-256, which every client of TLS 1.3 accepts (curl on macOS does not accept Ed25519). Nothing in
the certificate is random or depends on the time, and its signature is deterministic (RFC 6979): the same bytes on every
host. Whoever has the token can therefore be any server of the fleet, and can do everything else in it, too.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAME: Final = "disagg"
"""Whom the certificate is for: clients that check a name are told to check this one."""
_KEY_INFO: Final = b"disagg server certificate 1"
_NAME_INFO: Final = b"disagg token name 1"
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_NOT_BEFORE, _NOT_AFTER = b"700101000000Z", b"99991231235959Z"  # a host without a clock is served, too

_INTEGER, _BITS, _OCTETS, _OID, _UTF8 = 0x02, 0x03, 0x04, 0x06, 0x0C
_UTC_TIME, _TIME, _SEQUENCE, _SET, _VERSION, _EXTENSIONS = 0x17, 0x18, 0x30, 0x31, 0xA0, 0xA3
_DNS_NAME: Final = 0x82  # in a subjectAltName
_ECDSA_SHA256 = bytes.fromhex("2a8648ce3d040302")
_EC_KEY, _P256 = bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d030107")
_COMMON_NAME, _BASIC_CONSTRAINTS, _ALTERNATIVE_NAME = (bytes.fromhex(one) for one in ("550403", "551d13", "551d11"))
_TRUE: Final = b"\x01\x01\xff"


@lru_cache(8)
def token_name(token: str) -> str:
    """Names a token, and tells nothing about it: which one a client has, so that a server with two picks the same."""
    return f"{_derived(token, _NAME_INFO)[:8].hex()}.{NAME}"


@lru_cache(8)
def certificate(token: str) -> bytes:
    """The certificate of every server with this token, in DER."""
    key = _key(token)
    public = key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    signed = _to_be_signed(public)
    signature = key.sign(signed, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    return _der(_SEQUENCE, signed, _algorithm(_ECDSA_SHA256), _der(_BITS, b"\0", signature))


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
    """HKDF-SHA512 (RFC 5869) of the token: 64 bytes for one purpose."""
    extracted = hmac.digest(bytes(64), token.encode(), hashlib.sha512)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha512)


def _to_be_signed(public: bytes) -> bytes:
    """The signed part of the certificate (RFC 5280). public: the key's point, uncompressed."""
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OID, _COMMON_NAME), _der(_UTF8, NAME.encode()))))
    names = _der(_SEQUENCE, _der(_DNS_NAME, NAME.encode()))
    extensions = _der(
        _SEQUENCE,
        _der(_SEQUENCE, _der(_OID, _BASIC_CONSTRAINTS), _TRUE, _der(_OCTETS, _der(_SEQUENCE))),  # signs no other
        _der(_SEQUENCE, _der(_OID, _ALTERNATIVE_NAME), _der(_OCTETS, names)),
    )
    return _der(
        _SEQUENCE,
        _der(_VERSION, _der(_INTEGER, b"\x02")),  # version 3
        _der(_INTEGER, b"\x01"),  # its number
        _algorithm(_ECDSA_SHA256),
        name,  # of the issuer
        _der(_SEQUENCE, _der(_UTC_TIME, _NOT_BEFORE), _der(_TIME, _NOT_AFTER)),
        name,
        _der(_SEQUENCE, _algorithm(_EC_KEY, _P256), _der(_BITS, b"\0", public)),
        _der(_EXTENSIONS, extensions),
    )


def _algorithm(*names: bytes) -> bytes:
    return _der(_SEQUENCE, *(_der(_OID, name) for name in names))


def _der(tag: int, *parts: bytes) -> bytes:
    """A value of ASN.1 in its only encoding."""
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 128 else size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag]) + (length if size < 128 else bytes([0x80 | len(length)]) + length) + content
