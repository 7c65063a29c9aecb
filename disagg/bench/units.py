"""Milliseconds as text."""

from __future__ import annotations

from disagg.units import seconds


def ms(value: float | None) -> str:
    """A latency in its unit; "–" if it was not measured."""
    return "–" if value is None else seconds(value / 1e3)


def tick(value: float) -> str:
    """Milliseconds for the ticks of an axis: 500 ms, 2 s."""
    return f"{value / 1e3:,g} s" if value >= 1000 else f"{value:g} ms" if value else "0"
