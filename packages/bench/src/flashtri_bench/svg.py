"""Line charts as SVG text, so that plots need nothing installed and diff as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 48
# Distinguishable without colour vision (Okabe and Ito's palette, less yellow), and by marker.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b", "#000000")


@dataclass
class Series:
    """One line.

    Attributes:
        label: Name in the legend.
        points: `(x, y, low, high)`, low and high being the ends of the error bar.
        end: x where the implementation ran out of memory, None if it did not.
    """

    label: str
    points: list[tuple[float, float, float, float]] = field(default_factory=list)
    end: float | None = None


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    for factor in (0.2, 0.5, 1.0, 2.0):
        if (high - low) / (step * factor) <= 8:
            step *= factor
            break
    first = math.floor(low / step)
    return [i * step for i in range(first, math.ceil(high / step) + 1)]


def _short(value: float) -> str:
    for limit, suffix in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if value >= limit and value % (limit / 2) == 0:
            return f"{value / limit:g}{suffix}"
    return f"{value:g}"


class Axes:
    """Maps values to the drawing.

    Args:
        series: What is drawn.
        log_y: Logarithmic y axis, in powers of ten; it begins at zero otherwise.
    """

    def __init__(self, series: Sequence[Series], log_y: bool) -> None:
        xs = [p[0] for s in series for p in s.points] + [s.end for s in series if s.end is not None]
        highs, lows = [p[3] for s in series for p in s.points], [p[2] for s in series for p in s.points]
        self.x_low, self.x_high = math.log2(min(xs)), math.log2(max(xs))
        self.x_ticks = sorted(set(xs))
        self.log_y = log_y
        if log_y:
            low = math.floor(math.log10(max(min(lows), 1e-12)))
            high = max(low + 1, math.ceil(math.log10(max(highs))))
            self.y_low, self.y_high = float(low), float(high)
            self.y_ticks = [10.0**i for i in range(low, high + 1)]
        else:
            self.y_ticks = _ticks(0.0, max(highs))
            self.y_low, self.y_high = 0.0, self.y_ticks[-1]

    def x(self, value: float) -> float:
        """Horizontal position."""
        share = (math.log2(value) - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def y(self, value: float) -> float:
        """Vertical position."""
        value = math.log10(max(value, 10.0**self.y_low)) if self.log_y else value
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _marker(index: int, x: float, y: float, colour: str) -> str:
    if index % 3 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    if index % 3 == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}"/>'
    return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" fill="{colour}"/>'


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series], log_y: bool = False) -> str:
    """A chart of lines over a logarithmic x axis.

    Args:
        title: Heading, also what a screen reader says.
        x_label: What x is.
        y_label: What y is, with its unit.
        series: The lines; at least one point in all.
        log_y: Logarithmic y axis.

    Returns:
        SVG text.

    Raises:
        ValueError: Nothing to draw.
    """
    if not any(s.points for s in series):
        raise ValueError("series: got no points")
    axes = Axes([s for s in series if s.points], log_y)
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for tick in axes.y_ticks:
        y = axes.y(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{tick:g}</text>')
    for tick in axes.x_ticks:
        x = axes.x(tick)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{_short(tick)}</text>')
    parts.append(f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="#444"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle" fill="#222">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(16 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle" fill="#222">'
        f"{escape(y_label)}</text>"
    )
    for i, line in enumerate(series):
        parts.extend(_line(i, line, axes))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _line(index: int, line: Series, axes: Axes) -> list[str]:
    colour = COLOURS[index % len(COLOURS)]
    parts = []
    at = [(axes.x(x), axes.y(y)) for x, y, _, _ in line.points]
    if at:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for (x, y), (_, _, low, high) in zip(at, line.points, strict=True):
        parts.append(f'<path d="M{x:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}" stroke="{colour}"/>')
        parts.append(_marker(index, x, y, colour))
    if line.end is not None:
        x, y = axes.x(line.end), TOP + 8 + 10 * index
        name = escape(line.label)
        parts.append(
            f'<path d="M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10" stroke="{colour}" stroke-width="2.5">'
            f"<title>{name}: out of memory</title></path>"
        )
    y = TOP + 10 + 20 * index
    x = WIDTH - RIGHT + 16
    parts.append(f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"/>')
    parts.append(_marker(index, x + 10, y, colour))
    parts.append(f'<text x="{x + 26}" y="{y + 4}" fill="#222">{escape(line.label)}</text>')
    return parts
