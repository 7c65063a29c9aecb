"""A certificate and a private key of P-256 in DER: RFC 5280, RFC 5958, RFC 5915.

cryptography.x509 and cryptography's serialization write the same bytes, and take longer to import than all else that
TLS needs.
"""

from __future__ import annotations

from typing import Final

_INTEGER, _BITS, _OCTETS, _TEXT, _UTC, _TIME, _SEQUENCE, _SET = 0x02, 0x03, 0x04, 0x0C, 0x17, 0x18, 0x30, 0x31
_VERSION, _EXTENSIONS, _PUBLIC, _DNS_NAME = 0xA0, 0xA3, 0xA1, 0x82
"""Tags whose meaning their place defines."""
_EC_KEY: Final = bytes.fromhex("06072a8648ce3d0201")
_P256: Final = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_SHA256: Final = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME: Final = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS: Final = bytes.fromhex("0603551d13")
_ALTERNATIVE_NAME: Final = bytes.fromhex("0603551d11")
_CRITICAL: Final = bytes.fromhex("0101ff")


def certificate_body(name: str, point: bytes) -> bytes:
    """What a certificate signs: that this key is that of `name`, from 1970 to 9999, and signs for nobody else."""
    text = name.encode()
    who = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_TEXT, text))))
    valid = _der(_SEQUENCE, _der(_UTC, b"700101000000Z"), _der(_TIME, b"99991231235959Z"))
    key = _der(_SEQUENCE, _der(_SEQUENCE, _EC_KEY, _P256), _bits(point))
    no_authority = _der(_SEQUENCE, _BASIC_CONSTRAINTS, _CRITICAL, _der(_OCTETS, _der(_SEQUENCE)))
    names = _der(_SEQUENCE, _ALTERNATIVE_NAME, _der(_OCTETS, _der(_SEQUENCE, _der(_DNS_NAME, text))))
    extensions = _der(_EXTENSIONS, _der(_SEQUENCE, no_authority, names))
    version_3, serial = _der(_VERSION, _integer(2)), _integer(1)
    return _der(_SEQUENCE, version_3, serial, _algorithm(), who, valid, who, key, extensions)


def certificate(body: bytes, signature: bytes) -> bytes:
    """signature: ECDSA of the body's SHA-256."""
    return _der(_SEQUENCE, body, _algorithm(), _bits(signature))


def private_key(secret: bytes, point: bytes) -> bytes:
    """PKCS #8. secret: 32 bytes. point: of the public key, uncompressed."""
    key = _der(_SEQUENCE, _integer(1), _der(_OCTETS, secret), _der(_PUBLIC, _bits(point)))
    return _der(_SEQUENCE, _integer(0), _der(_SEQUENCE, _EC_KEY, _P256), _der(_OCTETS, key))


def _algorithm() -> bytes:
    return _der(_SEQUENCE, _ECDSA_SHA256)


def _integer(value: int) -> bytes:
    """Of one byte."""
    return _der(_INTEGER, bytes([value]))


def _bits(content: bytes) -> bytes:
    return _der(_BITS, b"\0", content)


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = [size] if size < 0x80 else [0x81, size] if size < 0x100 else [0x82, size >> 8, size & 0xFF]
    return bytes([tag, *length]) + content
