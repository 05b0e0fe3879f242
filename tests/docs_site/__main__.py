"""Builds the documentation's site: `make docs`, or `python -m tests.docs_site` in .venv-docs.

The pages are those of docs/ as they are. They, and the files that they link to, are copied to build/pages under the
same names, so that each relative link holds. zensical (`zensical.toml`) makes `site/` of them, without the network. The
result is then read back: `links.py`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs_site.links import problems
from tests.docs_site.pages import stage

ROOT = Path(__file__).parents[2]
PAGES, SITE = ROOT / "build/pages", ROOT / "site"


def main() -> int:
    """Returns 0, or 1 if the site could not be built or has a dead link."""
    shutil.rmtree(SITE, ignore_errors=True)
    stage(ROOT, PAGES)
    zensical = Path(sys.executable).with_name("zensical")
    # `--clean`: no build depends on an earlier one, perhaps of another release. It takes two seconds all the same.
    if subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode:
        return 1
    found = problems(SITE)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(list(SITE.rglob('*.html')))} pages, {len(found)} dead links: open {SITE / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
