import pytest
from msgspec import structs

from disagg.errors import FingerprintMismatch, ProtocolError
from disagg.kv.fingerprint import Fingerprint, token_hash
from tests.kv.kv_parts import FINGERPRINT


def test_every_differing_component_is_named_with_both_values() -> None:
    other = structs.replace(FINGERPRINT, tokenizer="tokenizer-2", vocab_size=7)
    with pytest.raises(FingerprintMismatch) as caught:
        FINGERPRINT.require_same(other, mine="decode", theirs="prefill")
    assert "vocab_size: decode 1000, prefill 7" in caught.value.message
    assert "tokenizer: decode tokenizer-1, prefill tokenizer-2" in caught.value.message
    assert "rope" not in caught.value.message


def test_equal_fingerprints_pass() -> None:
    other = Fingerprint.from_json(FINGERPRINT.to_json())
    FINGERPRINT.require_same(other, mine="a", theirs="b")


@pytest.mark.parametrize("body", [None, [], {"architecture": "x"}])
def test_a_malformed_fingerprint_is_a_protocol_error(body: object) -> None:
    with pytest.raises(ProtocolError):
        Fingerprint.from_json(body)


def test_the_token_hash_depends_on_order_and_number() -> None:
    assert len({token_hash([1, 2]), token_hash([2, 1]), token_hash([1, 2, 0]), token_hash([])}) == 4
