"""The key and the certificate of a token are the same everywhere, and different for every token."""

from __future__ import annotations

import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from disagg.tls.certificate import certificate, certificate_pem, key_pem, token_name

TOKEN = "0123456789abcdef0123456789abcdef"


def test_a_token_has_this_certificate_on_every_host_and_with_every_version() -> None:
    assert hashlib.sha256(certificate("token")).hexdigest() == (
        "922ef6ae9e61b8d2e20c15a0d8afdeb19f5e15913ab4f0216045770a5cc2fe99"
    )
    assert token_name("token") == "48e049fa4ad6d3b7.disagg"


def test_the_certificate_is_one_of_x509_that_signs_itself_and_no_other() -> None:
    read = x509.load_der_x509_certificate(certificate(TOKEN))
    read.verify_directly_issued_by(read)
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["disagg"]
    assert not read.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (read.not_valid_before_utc.year, read.not_valid_after_utc.year) == (1970, 9999)


def test_the_key_is_that_of_the_certificate() -> None:
    key = serialization.load_pem_private_key(key_pem(TOKEN), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)
    assert x509.load_pem_x509_certificate(certificate_pem(TOKEN).encode()).public_key() == key.public_key()


@pytest.mark.parametrize("other", ["", TOKEN + "0", TOKEN[:-1] + "e"])
def test_another_token_has_another_key_and_another_name(other: str) -> None:
    assert key_pem(other) != key_pem(TOKEN) and certificate(other) != certificate(TOKEN)
    assert token_name(other) != token_name(TOKEN)


def test_neither_certificate_nor_name_contains_the_token() -> None:
    shown = certificate(TOKEN) + token_name(TOKEN).encode()
    assert TOKEN.encode() not in shown and bytes.fromhex(TOKEN) not in shown
