"""Copies the pages of the site, and all that they link to, to a directory of their own. Pure standard library."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_OURS = Path(__file__).parent


def linked(root: Path) -> list[Path]:
    """Lists README.md, the pages and pictures of docs/, and every file of the checkout that they lead to."""
    waiting = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("docs/*.svg")]
    found = dict.fromkeys(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page) if page.suffix == ".md" else ():
            if target not in found and target.is_file() and target.is_relative_to(root):
                found[target] = None
                waiting.append(target)
    return sorted(found)


def _targets(page: Path) -> Iterator[Path]:
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        path = link.partition("#")[0]
        if path and "://" not in path:
            yield (page.parent / path).resolve()


def stage(root: Path, place: Path) -> None:
    """Makes `place` anew."""
    shutil.rmtree(place, ignore_errors=True)
    for path in linked(root):
        copy = place / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    assets = place / "assets"
    assets.mkdir()
    for path in _OURS.glob("assets/*"):
        shutil.copyfile(path, assets / path.name)
