"""The drawing is well-formed, and each curve climbs from 0 to 1 in steps at the times."""

from __future__ import annotations

from xml.etree import ElementTree

from pluglm.lab.replay import Outcome
from pluglm.lab.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ttft_plot

NAMESPACE = "{http://www.w3.org/2000/svg}"


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    """Curves as (share of the width, share of the height)."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    curves = []
    for line in ElementTree.fromstring(svg).iter(f"{NAMESPACE}polyline"):
        pairs = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        curves.append([((x - LEFT) / width, (HEIGHT - BOTTOM - y) / height) for x, y in pairs])
    return curves


def outcomes(ask, *ttft: float, reason="length") -> list[Outcome]:
    return [Outcome(request=ask("r", 1, 1), finish_reason=reason, arrival_s=0.0, first_token_s=one) for one in ttft]


def test_curves_are_the_shares_by_time(ask):
    slow, fast = points_of(ttft_plot({"a<b": outcomes(ask, 4.0, 2.0), "fast": outcomes(ask, 1.0)}))
    expected = [(0, 0), (0.5, 0), (0.5, 0.5), (1, 0.5), (1, 1), (1, 1)]
    for (x, y), (wanted_x, wanted_y) in zip(slow, expected, strict=True):
        assert abs(x - wanted_x) < 0.001
        assert abs(y - wanted_y) < 0.001
    assert abs(fast[1][0] - 0.25) < 0.001
    assert fast[-1][1] == 1


def test_a_run_without_first_tokens_is_a_flat_line(ask):
    (flat,) = points_of(ttft_plot({"none": outcomes(ask, 3.0, reason="cancelled")}))
    assert {y for _, y in flat} == {0}
    assert "1" in ttft_plot({"none": []})
