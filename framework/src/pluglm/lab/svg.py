"""A drawing of how times to first token are distributed, as SVG text. Knows coordinates and outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pluglm.lab.replay import Outcome

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 20, 20, 50  # pixels
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, told apart by everybody
FONT = 'font-family="sans-serif" font-size="12"'
NUM_TICKS = 5


def ttft_plot(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The share of each run's completed requests that had their first token by a time: one curve for each run."""
    times = {
        label: sorted(one.ttft_s for one in some if one.completed and one.ttft_s is not None)
        for label, some in outcomes.items()
    }
    longest = max((one[-1] for one in times.values() if one), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(longest),
    ]
    for index, (label, seconds) in enumerate(times.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{_curve(seconds, longest)}"/>')
        y = HEIGHT - BOTTOM - 12 - 16 * (len(times) - 1 - index)
        parts.append(f'<text x="{WIDTH - RIGHT - 8}" y="{y}" fill="{colour}" text-anchor="end">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(seconds: Sequence[float], longest: float) -> str:
    """Steps of 1 / n at each time, from (0, 0) to the right edge."""
    points = [(0.0, 0.0)]
    for rank, one in enumerate(seconds, start=1):
        points += [(one, points[-1][1]), (one, rank / len(seconds))]
    points.append((longest, points[-1][1]))
    return " ".join(f"{_x(time / longest):.1f},{_y(share):.1f}" for time, share in points)


def _axes(longest: float) -> list[str]:
    parts = [f'<path d="M{_x(0)} {_y(1)}V{_y(0)}H{_x(1)}" fill="none" stroke="black"/>']
    for tick in range(NUM_TICKS + 1):
        part = tick / NUM_TICKS
        parts.append(f'<text x="{_x(part)}" y="{_y(0) + 18}" text-anchor="middle">{longest * part:.3g}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{_y(part) + 4}" text-anchor="end">{part:.0%}</text>')
    parts.append(f'<text x="{_x(0.5)}" y="{HEIGHT - 12}" text-anchor="middle">time to first token, s</text>')
    return parts


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _y(part: float) -> float:
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
