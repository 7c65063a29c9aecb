"""Milliseconds as text."""

from __future__ import annotations


def ms(value: float | None) -> str:
    """Milliseconds as text: 0.8 ms, 42 ms, 1.2 s."""
    if value is None:
        return "–"
    if value >= 999.5:
        return (
            f"{value / 1e3:.2f} s"
            if value < 9_995
            else f"{value / 1e3:.1f} s"
            if value < 99_950
            else f"{value / 1e3:,.0f} s"
        )
    if value >= 9.95 or not value:
        return f"{value:.0f} ms" if value else "0"
    return f"{value:.1f} ms" if value >= 0.995 else f"{value:.2g} ms"


def tick(value: float) -> str:
    """Milliseconds for the ticks of an axis: 500 ms, 2 s."""
    return f"{value / 1e3:,g} s" if value >= 1000 else f"{value:g} ms" if value else "0"
