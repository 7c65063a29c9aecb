"""docs/gateway.md names every field of what the gateway's own calls send, with its type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disagg.api import gateway
from disagg.api.base import Contract
from disagg.api.keeper import KeptModel, ModelFacts
from tests.api.test_http_api import rows

PAGE = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
IN_WORDS = (gateway.ParallelChunk, gateway.ParallelEnd)
"""Events of a stream with one field or two more than others."""
OF_HOSTS = (KeptModel, ModelFacts)
"""Values that hosts state, whose tables are in docs/http-api.md."""
TYPES: dict[str, type[Contract]] = {
    kind.__name__: kind
    for module in (gateway,)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Contract) and kind is not Contract
    if kind not in (*IN_WORDS, *OF_HOSTS)
}


@pytest.mark.parametrize("name", TYPES)
def test_a_table_states_every_field_of_the_type_its_bounds_and_its_default(name: str) -> None:
    (table,) = re.findall(rf"^\| {name} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    columns = len(rows(TYPES[name])[0])
    assert [tuple(line[:columns]) for line in cells] == rows(TYPES[name])
