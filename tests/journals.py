"""Journals in tests: events made of a few words, and files read as the JSON objects that they hold."""

import json
from typing import Any, get_args, get_origin

import msgspec

from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal import files
from verl_slurm.journal.events import KINDS, Event

Line = dict[str, Any]
"""One event, as the object of its line."""


def make_event(kind: str, /, **fields: Any) -> Event:
    """An event of that kind; a required field that is not given has its type's empty value.

    Raises:
        msgspec.ValidationError: a field has another type than is declared.
        KeyError: no such kind.
        AssertionError: no such field.
    """
    form = KINDS[kind]
    known = msgspec.structs.fields(form)
    assert fields.keys() <= {field.name for field in known}, (
        f"{kind} has no field {sorted(fields.keys() - {f.name for f in known})}"
    )
    empty = {field.name: _empty(field.type) for field in known if field.required and field.name not in fields}
    return msgspec.convert({"event": kind, **empty, **fields}, form)


def _empty(kind: Any) -> Any:
    return (get_args(kind)[0] if hasattr(kind, "__metadata__") else get_origin(kind) or kind)()


def make_events(lines: list[Line]) -> list[Event]:
    """Events from their objects, `event` and all; see `make_event`."""
    return [
        make_event(line["event"], **{key: value for key, value in line.items() if key != "event"})
        for line in lines
    ]


def append_event(paths: RunPaths, kind: str, /, **fields: Any) -> None:
    """Write one down, with the present time where none is given."""
    files.append_event(paths, make_event(kind, **fields))


def read_events(paths: RunPaths) -> list[Line]:
    """All events of the file, oldest first, in full: fields at their defaults, too."""
    return [full(one) for one in files.read_events(paths)]


def full(one: Event) -> Line:
    """The object of the event's line, and the fields at their defaults."""
    defaults: Line = {name: getattr(one, name) for name in one.__struct_fields__}
    own: Line = json.loads(json_line(files.to_json(one)))
    return defaults | own
