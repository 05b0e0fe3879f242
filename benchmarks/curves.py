"""Curves as an SVG: a thin line for each run, a bold one for the mean of its group. Pure: same numbers, same bytes.

It brings its own background, and light and dark colours of it: a page that shows it need not know which it wears.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

__all__ = ["picture"]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 736, 44, 364
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }
  .page { fill: #ffffff } .grid { stroke: #d8dee4 } .axis { stroke: #57606a }
  polyline { fill: none; stroke-linejoin: round } .run { stroke-width: 1; opacity: .55 } .mean { stroke-width: 3 }
  .c0 { stroke: #0969da } .c1 { stroke: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117 } .grid { stroke: #30363d } .axis { stroke: #8b949e }
    .c0 { stroke: #58a6ff } .c1 { stroke: #f0883e }
  }
"""

Runs = Sequence[Sequence[float]]


def picture(groups: Mapping[str, Runs], *, title: str, x: str, y: str, legend: str) -> str:
    """The whole SVG.

    Args:
        groups: at most two; name → its runs, [runs, steps] values in [0, 1], the first of step 1.
        x, y: what the axes are, with units.
        legend: what thin and bold mean.
    """
    steps = max(len(run) for runs in groups.values() for run in runs)
    across = (_RIGHT - _LEFT) / max(steps, 1)

    def at(step: float, value: float) -> tuple[float, float]:
        return _LEFT + step * across, _BOTTOM - value * (_BOTTOM - _TOP)

    def curve(kind: str, values: Sequence[float]) -> str:
        points = (at(step, value) for step, value in enumerate(values, start=1))
        return f'<polyline class="{kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'

    parts = [_text(_LEFT, 26, title, "title")]
    for tenth in range(0, 11, 2):
        _, height = at(0, tenth / 10)
        parts.append(_line("axis" if tenth == 0 else "grid", _LEFT, height, _RIGHT, height))
        parts.append(_text(_LEFT - 8, height + 4, f"{tenth / 10:.1f}", anchor="end"))
    every = max(1, round(steps / 6))
    for step in range(0, steps + 1, every):
        place, _ = at(step, 0)
        parts.append(_line("axis", place, _BOTTOM, place, _BOTTOM + 5))
        parts.append(_text(place, _BOTTOM + 20, str(step), anchor="middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 12, x, anchor="middle"))
    middle = (_TOP + _BOTTOM) / 2
    parts.append(_text(18, middle, y, anchor="middle", more=f' transform="rotate(-90 18 {middle:.1f})"'))
    for number, (name, runs) in enumerate(groups.items()):
        mean = [sum(values) / len(values) for values in zip(*runs, strict=True)]
        parts.extend(curve(f"run c{number}", run) for run in runs)
        parts.append(curve(f"mean c{number}", mean))
        height = _BOTTOM - 76 + 22 * number
        parts.append(_line(f"mean c{number}", _RIGHT - 380, height, _RIGHT - 350, height))
        said = f"{name}: {mean[0]:.3f} at the first step, {mean[-1]:.3f} at the last"
        parts.append(_text(_RIGHT - 342, height + 4, said))
    parts.append(_text(_RIGHT - 342, _BOTTOM - 76 + 22 * len(groups) + 4, legend))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>'
    page = f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *parts, "</svg>", ""])


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, said: str, kind: str = "", *, anchor: str = "start", more: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'
