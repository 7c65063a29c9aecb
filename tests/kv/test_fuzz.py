"""Random damage to valid transfers: the receiver always answers in bounded time and never keeps a byte."""

import random

from disagg.errors import DisaggError
from disagg.kv.preamble import NONCE_BYTES, encode_preamble
from disagg.kv.receive import ReceiveLimits
from disagg.kv.received import ReceivedKV
from tests.deadlines import ends_by_itself, wait_until
from tests.kv.kv_parts import Cache, header_for, mixed_layout, parts_of, start_receiver, stream

CACHE = Cache.random(mixed_layout(), 12)
ROUNDS = 400


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """One to three of: flip bits, overwrite, cut out, repeat, insert, truncate."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) or 1)
        size = chance.choice([1, 2, 4, 8, 24, 100])
        match chance.randrange(6):
            case 0:
                data[at : at + 1] = bytes(b ^ (1 << chance.randrange(8)) for b in data[at : at + 1])
            case 1:
                data[at : at + size] = chance.choice([b"\x00", b"\xff", chance.randbytes(1)]) * size
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[max(0, at - size) : at]
            case 4:
                data[at:at] = chance.randbytes(size)
            case _:
                del data[at:]
    return bytes(data)


def test_damaged_transfers_never_hang_the_receiver_nor_leak_a_byte() -> None:
    receiver = start_receiver(ReceiveLimits(header_s=2, stall_s=2, linger_s=0.5))
    chance = random.Random(20)
    unharmed = 0
    for _ in range(ROUNDS):
        slot = receiver.issue(CACHE)
        raw = stream(header_for(slot), parts_of(CACHE, chance.choice([1, 4, 12])))
        sent = damaged(raw, chance)
        with ends_by_itself():
            if chance.random() < 0.1:
                preamble = damaged(encode_preamble(slot.ticket, chance.randbytes(NONCE_BYTES)), chance)
                receiver.exchange(preamble + sent, hang_up=True)
            else:
                receiver.exchange(sent, slot.ticket, hang_up=True)
        receiver.tickets.revoke(slot.ticket)  # where the damage hid the ticket
        result = receiver.result(slot)
        if isinstance(result, ReceivedKV):
            assert CACHE.matches(result)  # only bytes that carry no meaning were damaged
            result.release()
            unharmed += 1
        else:
            assert isinstance(result, DisaggError)
    assert unharmed < ROUNDS / 10
    wait_until(receiver.settled)
    receiver.require_serving()
    receiver.server.close()
