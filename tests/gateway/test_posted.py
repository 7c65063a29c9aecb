"""The Via header of whole requests: gateways on the way are named, and bounded."""

from __future__ import annotations

import pytest

from disagg.errors import RequestLoop
from disagg.gateway.posted import MAX_HOPS, new_name, passed_on


def test_a_gateway_adds_its_name_to_those_before_it_and_drops_what_others_wrote() -> None:
    first, second = new_name(), new_name()
    assert passed_on([], first) == f"1.1 {first}"
    assert passed_on(["1.1 nginx", f"1.1 {first}, 2 caf\u00e9"], second) == f"1.1 {first}, 1.1 {second}"


def test_a_request_may_pass_through_so_many_gateways_and_through_each_once() -> None:
    via = ""
    for _ in range(MAX_HOPS):
        via = passed_on([via], new_name())
    with pytest.raises(RequestLoop, match="through 8 gateways"):
        passed_on([via], new_name())
    name = new_name()
    with pytest.raises(RequestLoop, match="this gateway already"):
        passed_on([passed_on([passed_on([], name)], new_name())], name)
