"""mggcn/report/chart.py: lines lie where their values say, and the values are on the page."""

import math
import re

import pytest

from mggcn.report.chart import MOST_POINTS, SIDE, Line, line_chart, nice_ticks


def drawn(text: str) -> list[list[tuple[float, float]]]:
    """Corners of the lines, in the order given."""
    paths = re.findall(r'data-line="\d+" data-x[^>]* d="M([^"]+)"', text)
    corners = [[corner.split() for corner in path.removesuffix("h0.1").split("L")] for path in paths]
    return [[(float(x), float(y)) for x, y in path] for path in corners]


def test_lines_lie_where_their_values_are() -> None:
    """Fails if an axis is turned, a scale differs between lines, or ticks are not those of the values."""
    text = line_chart("score", [Line("a", [1, 2, 3], [0.0, 0.5, 1.0]), Line("b", [3], [0.5], 1)], [2.0])
    (low, middle, high), lone = drawn(text)
    assert [low[0], middle[0], high[0]] == [0, SIDE / 2, SIDE]
    assert SIDE - low[1] == pytest.approx(high[1], abs=0.2)
    assert (middle[1], lone[0]) == (SIDE / 2, (SIDE, SIDE / 2))
    assert f'class="mark" d="M{SIDE / 2:.1f} 0V{SIDE}"' in text
    assert re.findall(r'class="y"[^>]*>([^<]*)<', text) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert re.findall(r'class="x"[^>]*>([^<]*)<', text) == ["1", "2", "3"]
    assert 'data-y="0 0.5 1"' in text


def test_a_logarithmic_axis() -> None:
    """Fails if equal factors take unequal room; a zero has no logarithm and makes the axis linear."""
    ((_, one), (_, two), (_, three)) = drawn(
        line_chart("loss", [Line("", [1, 2, 3], [0.01, 1, 100])], logarithmic=True)
    )[0]
    assert two - three == pytest.approx(one - two, abs=0.2)
    ((_, one), (_, two), (_, three)) = drawn(line_chart("loss", [Line("", [1, 2, 3], [0, 1, 4])], logarithmic=True))[0]
    assert two - three == pytest.approx(3 * (one - two), abs=0.4)


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_nothing_to_draw(values: list[float]) -> None:
    """Fails if a run without a finite value breaks the page."""
    assert "No finite value" in line_chart("loss", [Line("loss", range(len(values)), values)])


@pytest.mark.parametrize("values", [[0.7], [2.0, 2.0, 2.0], [1e-30, 1e30], [-5.0, 7.0], [0.0], [1e9, 1e9 + 1]])
def test_odd_ranges(values: list[float]) -> None:
    """Fails on one epoch, a constant, a huge range, or negative scores."""
    for logarithmic in (False, True):
        text = line_chart("x", [Line("x", range(1, len(values) + 1), values)], logarithmic=logarithmic)
        assert all(0 <= y <= SIDE for _, y in drawn(text)[0])
        assert 1 <= text.count('class="y"') <= 14


def test_long_histories_are_thinned() -> None:
    """Fails if a page grows with the epochs without end, or loses the last one."""
    count = 25 * MOST_POINTS + 3
    text = line_chart("x", [Line("x", range(1, count + 1), [float(k) for k in range(count)])])
    assert MOST_POINTS / 2 <= len(drawn(text)[0]) <= MOST_POINTS + 1
    assert drawn(text)[0][-1][0] == SIDE


def test_names_are_escaped() -> None:
    """Fails if a run's name becomes markup."""
    assert "<b>x" not in line_chart("<b>x", [Line("<b>x", [1, 2], [1, 2])])


@pytest.mark.parametrize(("low", "high", "ticks"), [(1, 100, [20, 40, 60, 80, 100]), (-1, 1, [-1, -0.5, 0, 0.5, 1])])
def test_nice_ticks(low: float, high: float, ticks: list[float]) -> None:
    """Fails if ticks are no round numbers or leave the range."""
    assert nice_ticks(low, high, 6) == ticks
