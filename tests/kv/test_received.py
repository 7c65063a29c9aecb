from itertools import pairwise

import pytest

from disagg.api.layout import Layout
from disagg.api.names import WIRE_FORMS, WireForm
from disagg.kv.received import ALIGNMENT, ByteRanges
from tests.kv.kv_parts import Cache, groups_layout, mixed_layout


@pytest.mark.parametrize("wire", WIRE_FORMS)
@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (1, 0), (10, 0), (10, 6), (10, 10), (500, 3)])
def test_every_tensor_has_its_bytes_and_no_two_share_any(tokens: int, start: int, wire: WireForm) -> None:
    layout = Layout((*mixed_layout().layers, *groups_layout().layers), "bfloat16")
    cache = Cache.random(layout, tokens, start, wire=wire)
    ranges = ByteRanges.of(layout, tokens, start, wire)

    places = [place for places in (*ranges.keys, *ranges.values, *ranges.states) for place in places]
    sizes = [array.nbytes for array in cache.flat()]
    assert [place.stop - place.start for place in places] == sizes
    in_order = sorted(places, key=lambda place: (place.start, place.stop))
    assert all(a.stop <= b.start for a, b in pairwise(in_order))
    assert max(place.stop for place in places) <= ranges.nbytes
    assert all(place.start % ALIGNMENT == 0 for place in places)
