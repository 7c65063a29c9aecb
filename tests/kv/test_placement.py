from itertools import pairwise

import pytest
from kv_parts import Cache, mixed_layout

from disagg.kv.placement import ALIGNMENT, Placement


@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (1, 0), (10, 0), (10, 6), (10, 10), (500, 3)])
def test_every_tensor_has_its_bytes_and_no_two_share_any(tokens: int, start: int) -> None:
    cache = Cache.random(mixed_layout(), tokens, start)
    placement = Placement.of(cache.layout, tokens, start)

    places = [*placement.keys, *placement.values, *(place for places in placement.states for place in places)]
    sizes = [array.nbytes for array in [*cache.keys, *cache.values, *(s for states in cache.states for s in states)]]
    assert [place.stop - place.start for place in places] == sizes
    in_order = sorted(places, key=lambda place: (place.start, place.stop))
    assert all(a.stop <= b.start for a, b in pairwise(in_order))
    assert max(place.stop for place in places) <= placement.nbytes
    assert all(place.start % ALIGNMENT == 0 for place in places)
