"""Writes docs/settings.md from the schema: `python -m tests.settings_page`."""

from itertools import groupby
from pathlib import Path

from verl_slurm.config.explain import Key, all_keys

PAGE = Path(__file__).parent.parent / "docs/settings.md"
_HEAD = """# Every setting

For anyone who looks for a key of the configuration: all of them, with type, default and meaning.

`verl-slurm config` prints the same list, `verl-slurm config SECTION` one section, and
`verl-slurm config explain KEY` one key. `python -m tests.settings_page` makes this page from
`verl_slurm/config/schema.py`. Examples are in [configuration.md](configuration.md).
"""


def page() -> str:
    """Returns the text of the page."""
    parts = [_HEAD]
    for section, keys in groupby(_in_sections(), key=_section):
        rows = "".join(_row(key) for key in keys)
        head = f"## {section}\n\n" if section else "## Without a section\n\n"
        parts.append(f"{head}| key | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}")
    return "\n".join(parts)


def _in_sections() -> list[Key]:
    """Returns all keys: those without a section first, then as the schema has them."""
    keys = all_keys()
    order = ["", *dict.fromkeys(section for key in keys if (section := _section(key)))]
    return sorted(keys, key=lambda key: order.index(_section(key)))


def _section(key: Key) -> str:
    return key.key.partition(".")[0].removesuffix("[]") if "." in key.key else ""


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else ""
    cells = [f"`{key.key}`", key.type, default, key.meaning]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
