from __future__ import annotations

import pytest

from disagg.errors import DisaggError
from disagg.kv.received import ReceivedKV
from tests.faults import fuzz
from tests.kv.test_fuzz import damaged

ROUNDS = 500


@pytest.mark.parametrize("data", fuzz.valid(), ids=len)
def test_an_undamaged_transfer_is_accepted(data: bytes) -> None:
    assert isinstance(fuzz.receive(data), ReceivedKV)


@pytest.mark.parametrize("data", fuzz.valid(), ids=len)
def test_a_transfer_that_ends_early_is_a_stated_error(data: bytes) -> None:
    for end in range(0, len(data), 29):
        assert isinstance(fuzz.receive(data[:end]), DisaggError)


def test_damaged_transfers_are_stated_errors() -> None:
    assert fuzz.at_random(ROUNDS, 3, damaged) < ROUNDS / 10
