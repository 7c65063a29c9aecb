"""Plots as SVG text. Colours are CSS classes, so that one picture serves light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 16, 44
_ROW, _LABEL, _TOTAL = 34, 110, 104  # a row's height; the room before its bar and, for "100% hidden", behind it
_NEAR = (34.0, 12.0)  # pixels; a label closer than this to another is left to the tooltip
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Dot:
    """One measured place: `high` is the upper end of its band, `tip` its tooltip, `label` a word beside it."""

    x: float
    y: float
    tip: str
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Dots of one CSS class, joined in order."""

    css: str
    dots: Sequence[Dot]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from data to pixels, with its ticks."""

    title: str
    text: Format
    low: float
    high: float
    ticks: Sequence[float]
    log: bool

    def place(self, value: float, begin: float, end: float) -> float:
        """The pixel of a value between two edges."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return begin + (end - begin) * (at - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x with a word on top."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar: (CSS class, value, tooltip) of its segments, in order; `total` stands at its end."""

    label: str
    segments: Sequence[tuple[str, float, str]]
    total: str


def axis(title: str, values: Sequence[float], text: Format, scale: Literal["log", "linear", "lengths"]) -> Axis:
    """An axis that holds all values. "lengths": logarithmic with a tick at each value. All > 0 but on "linear"."""
    low, high = min(values), max(values)
    if scale == "linear":
        top = high * 1.12 or 1.0
        step = _nice(top / 4)
        return Axis(title, text, 0.0, top, [step * n for n in range(int(top / step) + 1)], log=False)
    pad = (high / low) ** 0.06 if high > low else 1.6
    low, high = low / pad, high * pad
    ticks = sorted(set(values)) if scale == "lengths" else _decades(low, high)
    return Axis(title, text, low, high, _thinned(ticks, low, high) if scale == "lengths" else ticks, log=True)


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> str:
    """Lines with dots; a band from each dot up to its `high`."""
    edges = (_LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM, _TOP)
    left, right, bottom, top = edges
    parts = [_grid(x, y, edges)]
    for mark in marks:
        at = x.place(mark.x, left, right)
        side = "end" if at > (left + right) / 2 else "start"
        shift = -6 if side == "end" else 6
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text("marktext", at + shift, top + 11, side, mark.label))
    for line in lines:
        places = [(x.place(d.x, left, right), y.place(d.y, bottom, top), d) for d in line.dots]
        parts.append(_band(line, places, y, bottom, top))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places)
        parts.append(f'<polyline class="line {line.css}" points="{path}"/>')
    labelled: list[tuple[float, float]] = []
    for line in lines:
        for dot in line.dots:
            px, py = x.place(dot.x, left, right), y.place(dot.y, bottom, top)
            crowded = any(abs(px - ox) < _NEAR[0] and abs(py - oy) < _NEAR[1] for ox, oy in labelled)
            parts.append(_dot(line.css, dot, px, py, label="" if crowded else dot.label))
            labelled += [] if crowded else [(px, py)]
    return _svg(WIDTH, HEIGHT, f"{y.title} by {x.title}", parts)


def bar_chart(bars: Sequence[Bar], text: Format) -> str:
    """Stacked horizontal bars on one scale."""
    longest = max((sum(value for _, value, _ in bar.segments) for bar in bars), default=0.0) or 1.0
    left, right, height = _LABEL, WIDTH - _TOTAL, len(bars) * _ROW + 30
    scale = (right - left) / longest
    step = _nice(longest / 4)
    parts = []
    for number in range(int(longest / step) + 1):
        at = left + number * step * scale
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 24}"/>')
        parts.append(_text("tick", at, height - 8, "middle", text(number * step)))
    for row, bar in enumerate(bars):
        middle, at = row * _ROW + _ROW / 2 + 4, float(left)
        parts.append(_text("name", left - 10, middle + 4, "end", bar.label))
        for css, value, tip in bar.segments:
            wide = value * scale
            title = f"<title>{escape(tip)}</title>"
            parts.append(
                f'<rect class="bar {css}" x="{at:.1f}" y="{middle - 10}" width="{wide:.2f}" height="20">{title}</rect>'
            )
            at += wide
        parts.append(_text("value", at + 8, middle + 4, "start", bar.total))
    return _svg(WIDTH, height, "stacked bars", parts)


def _grid(x: Axis, y: Axis, edges: tuple[int, int, int, int]) -> str:
    left, right, bottom, top = edges
    parts = []
    for value in y.ticks:
        at = y.place(value, bottom, top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text("tick", left - 8, at + 4, "end", y.text(value)))
    for value in x.ticks:
        at = x.place(value, left, right)
        parts.append(_text("tick", at, bottom + 18, "middle", x.text(value)))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text("title", (left + right) / 2, bottom + 37, "middle", x.title))
    return "".join(parts)


def _band(line: Line, places: Sequence[tuple[float, float, Dot]], y: Axis, bottom: int, top: int) -> str:
    if len(places) < 2 or any(dot.high is None for *_, dot in places):
        return ""
    upper = [(px, max(float(top), y.place(dot.high or dot.y, bottom, top))) for px, _, dot in places]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*upper, *((px, py) for px, py, _ in reversed(places))])
    return f'<polygon class="band {line.css}" points="{path}"/>'


def _dot(css: str, dot: Dot, px: float, py: float, label: str) -> str:
    side, shift = ("end", -8) if px > WIDTH - 80 else ("start", 8)
    beside = _text("beside", px + shift, py - 7, side, label) if label else ""
    title = f"<title>{escape(dot.tip)}</title>"
    return f'<g class="{css}"><circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="4.5">{title}</circle></g>{beside}'


def _text(css: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: int, height: int, name: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">{body}</svg>'


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


def _decades(low: float, high: float) -> list[float]:
    """Ticks for a logarithmic axis: as many of 1, 2, 5 per decade as leave room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 7:
            return ticks
    return ticks


def _thinned(values: Sequence[float], low: float, high: float) -> list[float]:
    """Without those whose label would touch the one before."""
    kept: list[float] = []
    for value in values:
        if not kept or math.log(value / kept[-1]) / math.log(high / low) > 0.09:
            kept.append(value)
    return kept
