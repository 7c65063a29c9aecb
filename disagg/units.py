"""Quantities as short text, in the unit that fits: sizes, counts, lengths of time, rates."""

from __future__ import annotations

import math
from collections.abc import Callable


def size(count: float | None) -> str:
    """Bytes: 0 B, 512 B, 3.0 MiB, 128 GiB, 1.8 TiB."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """1 host, 2 hosts, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def seconds(value: float | None) -> str:
    """A measured or predicted duration: 0.04 ms, 1.8 ms, 42 ms, 1.23 s, 95 s; a dash if there is none."""
    if value is None:
        return "–"
    if abs(value) < 0.000995:
        return f"{value * 1e3:.2g} ms"
    if value < 0.9995:
        return f"{value * 1e3:.1f} ms" if value < 0.00995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"


def estimate(value: float) -> str:
    """An estimated duration: 1 s, 45 s, 3 min, 2.5 h."""
    if value < 90:
        return f"{max(1, math.ceil(value))} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def duration_steps(value: float) -> tuple[int, Callable[[int], str]]:
    """A duration as a whole number of steps, 0.1 ms up to 10 s, else 10 ms; and the function that prints steps.

    Parts of a duration that are rounded to the same steps can be printed so that they add up to it.
    """
    if value < 10:
        return round(value * 1e4), lambda steps: f"{steps / 10:,.1f} ms"
    return round(value * 100), lambda steps: f"{steps / 100:,.2f} s"


def speed(value: float | None) -> str:
    """Tokens per second; a dash if there is no rate."""
    if value is None or value <= 0:
        return "–"
    return f"{value:,.1f} tok/s" if value < 99.95 else f"{value:,.0f} tok/s"


def uptime(value: float | None) -> str:
    """12s, 5m, 3h 20m, 12d 4h."""
    if value is None:
        return "–"
    minutes, rest = divmod(int(value), 60)
    hours, minutes_left = divmod(minutes, 60)
    if minutes == 0:
        return f"{rest}s"
    if hours == 0:
        return f"{minutes}m"
    return f"{hours}h {minutes_left}m" if hours < 24 else f"{hours // 24}d {hours % 24}h"


def ms(value: float | None) -> str:
    """A latency in its unit; "–" if it was not measured."""
    return seconds(None if value is None else value / 1e3)


def tick(value: float) -> str:
    """Milliseconds for the ticks of an axis: 500 ms, 2 s."""
    return f"{value / 1e3:,g} s" if value >= 1000 else f"{value:g} ms" if value else "0"
