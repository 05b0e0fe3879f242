"""The checks of the configuration."""

import re
from typing import Any, NamedTuple

__all__ = ["Complaint", "Complaints"]


class Complaint(NamedTuple):
    """Names a key, its value, the expected value and the remedy."""

    key: str
    found: str
    expected: str
    remedy: str


class Complaints(list[Complaint]):
    """What is wrong with a configuration."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self._config = config

    def refuse_if(self, wrong: object, key: str, expected: str, remedy: str, found: str = "") -> bool:
        """Adds a complaint about `key` if `wrong`, and returns whether it is. No `found`: the key's value is shown."""
        if wrong:
            self.append(Complaint(key, found or shown(self.value(key)), expected, remedy))
        return bool(wrong)

    def value(self, key: str) -> Any:
        """Returns the value of a key, as `slurm.qos` or `tiers[0].name`; None within a section that is null."""
        place: Any = self._config
        for part in re.findall(r"[^.\[\]]+", key):
            if isinstance(place, list | tuple):
                place = place[int(part)]
            elif place is not None:
                place = place[part] if isinstance(place, dict) else getattr(place, part)
        return place


def shown(value: object) -> str:
    return (
        str(list(value) if isinstance(value, tuple) else value) if not isinstance(value, str) else repr(value)
    )
