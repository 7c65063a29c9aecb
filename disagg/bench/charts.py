"""Plots as SVG text. Colours are CSS classes, so that one picture serves light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 16, 44
_ROW, _LABEL, _TOTAL = 34, 110, 104  # height of a row; width before its bar, and behind it for "100% hidden"
_CHARACTER, _LINE = 6.8, 13.0  # upper bounds of a character's width and a line's height, in pixels
_MIN_TICKS = 3
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Dot:
    """One measured point. high: upper end of its band. tip: tooltip. label: text beside it."""

    x: float
    y: float
    tip: str
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class ChartLine:
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

    def pixel(self, value: float, begin: float, end: float) -> float:
        """The position of a value between two edges."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return begin + (end - begin) * (at - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x with a label at the top."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar: (CSS class, value, tooltip) of its segments, in order; `total`: the text behind it."""

    label: str
    segments: Sequence[tuple[str, float, str]]
    total: str


def axis(title: str, values: Sequence[float], text: Format, scale: Literal["log", "linear", "lengths"]) -> Axis:
    """An axis that covers all values, with at least three ticks. "lengths": logarithmic, with a tick at each value
    that has room. Values are positive unless the scale is "linear"."""
    low, high = min(values), max(values)
    if scale == "linear":
        top = high * 1.12 or 1.0
        return Axis(title, text, 0.0, top, _steps(0.0, top), log=False)
    pad = (high / low) ** 0.06 if high > low else 1.6
    low, high = low / pad, high * pad
    ticks = _log_ticks(low, high)
    if scale == "lengths":
        ticks = _apart(sorted(set(values)), ticks, low, high, text)
    return Axis(title, text, low, high, ticks, log=True)


def line_chart(lines: Sequence[ChartLine], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> str:
    """Lines with dots; a band from each dot up to its `high`."""
    edges = (_LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM, _TOP)
    left, right, bottom, top = edges
    parts = [_grid(x, y, edges)]
    for number, mark in enumerate(marks):
        at = x.pixel(mark.x, left, right)
        side = "end" if at > (left + right) / 2 else "start"
        shift = -6 if side == "end" else 6
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text("marktext", at + shift, top + 11 + number * _LINE, side, mark.label))
    for line in lines:
        joined = [(x.pixel(d.x, left, right), y.pixel(d.y, bottom, top), d) for d in line.dots]
        parts.append(_band(line, joined, y, bottom, top))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in joined)
        parts.append(f'<polyline class="line {line.css}" points="{path}"/>')
    dots = [
        (line.css, dot, x.pixel(dot.x, left, right), y.pixel(dot.y, bottom, top)) for line in lines for dot in line.dots
    ]
    taken = [(px - 5, py - 5, px + 5, py + 5) for _, _, px, py in dots]
    for css, dot, px, py in dots:
        parts.append(_dot(css, dot, px, py))
        parts.append(_label(dot.label, px, py, taken))
    return _svg(WIDTH, HEIGHT, f"{y.title} by {x.title}", parts)


def bar_chart(bars: Sequence[Bar], text: Format) -> str:
    """Stacked horizontal bars on one scale."""
    longest = max((sum(value for _, value, _ in bar.segments) for bar in bars), default=0.0) or 1.0
    left, right, height = _LABEL, WIDTH - _TOTAL, len(bars) * _ROW + 30
    scale = (right - left) / longest
    parts = []
    for value in _steps(0.0, longest):
        at = left + value * scale
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 24}"/>')
        parts.append(_text("tick", at, height - 8, "middle", text(value)))
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
        at = y.pixel(value, bottom, top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text("tick", left - 8, at + 4, "end", y.text(value)))
    for value in x.ticks:
        at = x.pixel(value, left, right)
        parts.append(_text("tick", at, bottom + 18, "middle", x.text(value)))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text("title", (left + right) / 2, bottom + 37, "middle", x.title))
    return "".join(parts)


def _band(line: ChartLine, places: Sequence[tuple[float, float, Dot]], y: Axis, bottom: int, top: int) -> str:
    if len(places) < 2 or any(dot.high is None for *_, dot in places):
        return ""
    upper = [(px, max(float(top), y.pixel(dot.high or dot.y, bottom, top))) for px, _, dot in places]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*upper, *((px, py) for px, py, _ in reversed(places))])
    return f'<polygon class="band {line.css}" points="{path}"/>'


def _dot(css: str, dot: Dot, px: float, py: float) -> str:
    title = f"<title>{escape(dot.tip)}</title>"
    return f'<g class="{css}"><circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="4.5">{title}</circle></g>'


def _label(label: str, px: float, py: float, taken: list[tuple[float, float, float, float]]) -> str:
    """A text beside a dot, where it covers none of the boxes `taken`, to which its own is added; "" if it cannot. The
    dot's tooltip holds it too."""
    if not label:
        return ""
    width = len(label) * _CHARACTER
    for anchor, begin in (("start", px + 8), ("end", px - 8 - width)):
        for base in (py - 9, py + 18):
            box = (begin, base - _LINE + 3, begin + width, base + 3)
            inside = begin >= _LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                return _text("beside", begin if anchor == "start" else box[2], base, anchor, label)
    return ""


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _text(css: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: int, height: int, name: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">{body}</svg>'


def _steps(low: float, high: float) -> list[float]:
    """Round values from low to high: multiples of the largest of 1, 2, 5 x 10^n that gives enough of them."""
    power = math.floor(math.log10(high - low))
    for step in (factor * 10.0**exponent for exponent in range(power, power - 3, -1) for factor in (5, 2, 1)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= _MIN_TICKS:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError("a hundredth of the range fits into it")


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks for a logarithmic axis: 1, 2, 5 per decade or fewer, and evenly spaced values within less than a decade."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [10.0**power for power in powers if low <= 10.0**power <= high]
    for factors in ((1, 2, 5), (1, 3)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if _MIN_TICKS <= len(ticks) <= 7:
            return ticks
    return decades[:: math.ceil(len(decades) / 8)] if len(decades) >= _MIN_TICKS else _steps(low, high)


def _apart(values: Sequence[float], fillers: Sequence[float], low: float, high: float, text: Format) -> list[float]:
    """The values whose labels do not overlap; with fewer than three, also fillers between them."""
    kept: list[float] = []

    def fits(value: float) -> bool:
        scale = (WIDTH - _RIGHT - _LEFT) / math.log(high / low)
        return all(
            scale * abs(math.log(value / other)) >= (len(text(value)) + len(text(other))) / 2 * _CHARACTER + 6
            for other in kept
        )

    for value in values:
        if fits(value):
            kept.append(value)
    for value in fillers:
        if len(kept) < _MIN_TICKS and fits(value):
            kept.append(value)
    return sorted(kept)
