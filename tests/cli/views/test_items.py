"""Lists that are broken between their items."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from disagg.cli.views.items import Items


def lines(items: Items, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(items)
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, ["qwen: TTFT 31.0 ms: client 1.2 ms, first step 14.8 ms, network 15.0 ms"]),
        (57, ["qwen: TTFT 31.0 ms: client 1.2 ms, first step 14.8 ms,", "  network 15.0 ms"]),
        (40, ["qwen: TTFT 31.0 ms: client 1.2 ms,", "  first step 14.8 ms, network 15.0 ms"]),
    ],
)
def test_a_figure_and_its_unit_stay_on_one_line(width: int, expected: list[str]) -> None:
    parts = ["client 1.2 ms", "first step 14.8 ms", "network 15.0 ms"]
    assert lines(Items(Text("qwen: TTFT 31.0 ms: "), parts), width) == expected


def test_an_item_longer_than_a_line_is_folded() -> None:
    folded = lines(Items(Text("m: "), ["a much longer reason", "b"], "; "), 12)
    assert [line.rstrip() for line in folded] == ["m: a much", "longer", "reason;", "  b"]
