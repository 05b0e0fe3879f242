"""Curves as an SVG. Pure: same numbers, same bytes.

It brings its own background, and light and dark colours of it: a page that shows it need not know which it wears.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 736, 44, 364
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }
  .page { fill: #ffffff } .grid { stroke: #d8dee4 } .axis { stroke: #57606a }
  polyline { fill: none; stroke-linejoin: round } .run { stroke-width: 1; opacity: .55 } .mean { stroke-width: 3 }
  .c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #8250df } .c3 { stroke: #6e7781 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117 } .grid { stroke: #30363d } .axis { stroke: #8b949e }
    .c0 { stroke: #58a6ff } .c1 { stroke: #f0883e } .c2 { stroke: #d2a8ff } .c3 { stroke: #8b949e }
  }
"""

Runs = Sequence[Sequence[float]]
Points = Sequence[tuple[float, float]]


def picture(groups: Mapping[str, Runs], *, title: str, x: str, y: str, legend: str) -> str:
    """A thin line for each run, a bold one for the mean of its group; the whole SVG.

    Args:
        groups: at most four; name → its runs, [runs, steps] values in [0, 1], the first of step 1.
        x, y: what the axes are, with units.
        legend: what thin and bold mean.
    """
    steps = max(len(run) for runs in groups.values() for run in runs)
    axes = _Axes(max(steps, 1), 1.0)

    def numbered(values: Sequence[float]) -> Points:
        return [(float(step), value) for step, value in enumerate(values, start=1)]

    parts: list[str] = []
    said: list[str] = []
    for number, (name, runs) in enumerate(groups.items()):
        mean = [sum(values) / len(values) for values in zip(*runs, strict=True)]
        parts.extend(axes.curve(f"run c{number}", numbered(run)) for run in runs)
        parts.append(axes.curve(f"mean c{number}", numbered(mean)))
        said.append(f"{name}: {mean[0]:.3f} at the first step, {mean[-1]:.3f} at the last")
    return _page(
        title,
        [
            *axes.drawn(x, y, [f"{tenth / 10:.1f}" for tenth in range(0, 11, 2)]),
            *parts,
            *_legend(said, legend),
        ],
    )


def lines(curves: Mapping[str, Points], *, title: str, x: str, y: str, top: float | None = None) -> str:
    """A bold line for each of at most four curves; the whole SVG. Both axes begin at 0.

    Args:
        curves: what the legend says of it → its points.
        x, y: what the axes are, with units.
        top: where the y axis ends; None: at the largest value.
    """
    right, largest = (max(point[axis] for points in curves.values() for point in points) for axis in (0, 1))
    top = largest if top is None else top
    axes = _Axes(right, top)
    parts = [axes.curve(f"mean c{number}", points) for number, points in enumerate(curves.values())]
    return _page(
        title,
        [*axes.drawn(x, y, [f"{top * fifth / 5:.0f}" for fifth in range(6)]), *parts, *_legend([*curves])],
    )


class _Axes:
    """Places of values in the picture.

    Args:
        right, top: the largest values of both axes.
    """

    def __init__(self, right: float, top: float) -> None:
        self._right, self._top = right, top

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = x / self._right * (_RIGHT - _LEFT), y / self._top * (_BOTTOM - _TOP)
        return _LEFT + across, _BOTTOM - up

    def curve(self, kind: str, points: Points) -> str:
        places = (self.at(*point) for point in points)
        return f'<polyline class="{kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>'

    def drawn(self, x: str, y: str, upwards: Sequence[str]) -> list[str]:
        parts = []
        for number, said in enumerate(upwards):
            _, height = self.at(0, self._top * number / (len(upwards) - 1))
            parts.append(_line("grid" if number else "axis", _LEFT, height, _RIGHT, height))
            parts.append(_text(_LEFT - 8, height + 4, said, anchor="end"))
        for value in range(0, int(self._right) + 1, max(1, round(self._right / 6))):
            place, _ = self.at(value, 0)
            parts.append(_line("axis", place, _BOTTOM, place, _BOTTOM + 5))
            parts.append(_text(place, _BOTTOM + 20, str(value), anchor="middle"))
        parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 12, x, anchor="middle"))
        middle = (_TOP + _BOTTOM) / 2
        parts.append(_text(18, middle, y, anchor="middle", more=f' transform="rotate(-90 18 {middle:.1f})"'))
        return parts


def _legend(said: Sequence[str], more: str = "") -> list[str]:
    """Each curve's words beside a piece of its line, below each other at the lower right."""
    first = _BOTTOM - 32 - 22 * len(said)
    parts = []
    for number, words in enumerate(said):
        height = first + 22 * number
        parts.append(_line(f"mean c{number}", _RIGHT - 380, height, _RIGHT - 350, height))
        parts.append(_text(_RIGHT - 342, height + 4, words))
    if more:
        parts.append(_text(_RIGHT - 342, first + 22 * len(said) + 4, more))
    return parts


def _page(title: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>'
    page = f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", page, _text(_LEFT, 26, title, "title"), *parts, "</svg>", ""]
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, said: str, kind: str = "", *, anchor: str = "start", more: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'
