"""Turns a YAML file and `key=value` words into a checked `RunConfig`, and back into YAML.

Every mistake becomes one `ConfigError` line with file, line and key, and for an unknown key the nearest known one.
"""

import difflib
import os
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

import msgspec

from verl_slurm.base.bounded import CONFIG, TooMuch, read_fd, read_regular
from verl_slurm.base.errors import ConfigError, NotFound, PermissionRefused, together
from verl_slurm.base.files import require_own
from verl_slurm.base.one_line import json_line, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.shipped import examples
from verl_slurm.config import strict_yaml
from verl_slurm.config.checks import Complaint
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.hints import VERLS_SECTIONS, nearest_keys
from verl_slurm.config.key_types import fields_of, misfits, struct_of
from verl_slurm.config.schema import RunConfig
from verl_slurm.config.strict_yaml import Value

# A hyphen is allowed behind the first dot: options of sbatch in `slurm.extra` have them.
_OVERRIDE = re.compile(r"([a-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)*)=(.*)", re.DOTALL)


def load(
    path: Path | str,
    overrides: typing.Sequence[str] = (),
    verl: typing.Sequence[str] = (),
    *,
    complete: bool = False,
) -> RunConfig:
    """Reads the file, applies the overrides and checks the result. Relative paths stay as written.

    Args:
        overrides: words like `train.steps=50`, `slurm.partition=null`, `slurm.extra={constraint: a100}`; a later one
            wins over an earlier one, and all of them over the file.
        verl: words of verl's own (Hydra's), `trainer.save_freq=5`; they win over the file's section `verl`.
        complete: model, data and reward must be named, as for a run that is to train.

    Raises:
        ConfigError: the file is not readable or not in the subset of `strict_yaml`, a key is unknown, a type is wrong,
            or values do not go together (`checks.shared.complaints`).
    """
    path = Path(path)
    return parse_config(_read(path), str(path), overrides, verl, complete=complete)


def parse_config(
    raw: bytes,
    source: str,
    overrides: typing.Sequence[str] = (),
    verl: typing.Sequence[str] = (),
    *,
    complete: bool = False,
) -> RunConfig:
    """Does the work of `load` without the file: `raw` is its content, `source` its name in errors."""
    config, wrong = _parse(raw, source, overrides, verl, complete=complete)
    if wrong:
        raise together([error for _, error in wrong])
    return config


def read_config(
    path: Path, overrides: typing.Sequence[str], verl: typing.Sequence[str]
) -> tuple[RunConfig, list[tuple[str, ConfigError]]]:
    """Reads the configuration of a run that is to train, as `load` does, with defaults for wrong keys.

    Returns:
        The configuration, and each dotted key (or word) that is refused with its error. Whether values go together is
        known only if no key is wrong.

    Raises:
        ConfigError: the file is not readable or not in the subset of `strict_yaml`.
    """
    return _parse(_read(path), str(path), overrides, verl, complete=True)


def _parse(
    raw: bytes,
    source: str,
    overrides: typing.Sequence[str],
    verl: typing.Sequence[str],
    *,
    complete: bool,
) -> tuple[RunConfig, list[tuple[str, ConfigError]]]:
    data, lines = strict_yaml.parse(raw, source)
    # Before the overrides: they write into sections.
    for section in _sections() & set(data):
        if data[section] is None:
            data[section] = {}  # a heading whose lines are all commented out
    places = {dotted: f"{source}:{line}" for dotted, line in lines.items()}
    # Collected: a file in the words of another program has many, and each look costs its user a minute.
    wrong: list[tuple[str, ConfigError]] = []
    for word in overrides:
        try:
            dotted, text = _parts(word)
            _override(data, places, dotted, text)
        except ConfigError as error:
            wrong.append((word.partition("=")[0], error))
    ours = data.get("verl") or {}
    if isinstance(ours, dict):
        # One spelling for each key: a nested map in the file and a dotted word must meet, to replace each other.
        data["verl"] = flattened(ours | settings_of(verl))
    # Before the conversion: msgspec would name an unknown key without its line and without a near one.
    unknown = list(_unknown(data, places, source))
    wrong += [(".".join(path), error) for path, error in unknown]
    missing = _missing(data)
    for path, _ in unknown:
        _drop(data, path)
    config = _convert(data, places, source, wrong)
    # Last: they go by typed values, defaults included.
    if not wrong:
        wrong = [(complaint.key, _not_together(complaint, source)) for complaint in complaints(config)]
    # A loop that is not ours names model, data and reward itself.
    if complete and missing and not config.trainer.is_guest:
        wrong += [(missing[0], _unnamed(missing, source))]
    return config, wrong


def _not_together(complaint: Complaint, source: str) -> ConfigError:
    return ConfigError(
        "the values do not go together",
        where=f"{source}: {complaint.key}",
        found=complaint.found,
        expected=complaint.expected,
        remedy=complaint.remedy,
    )


def _drop(data: dict[str, Value], path: typing.Sequence[str]) -> bool:
    """Removes a key by its names, and each section that held nothing else; returns whether it was there."""
    section: typing.Any = data
    *above, last = path
    for name in above:
        section = section.get(name) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        return bool(above) and _drop(data, above)
    del section[last]
    if above and not section:
        _drop(data, above)
    return True


def given_in(path: Path) -> frozenset[str]:
    """Returns the dotted keys that a file of a configuration sets, without those of verl's."""
    data, _ = strict_yaml.parse(_read(path), str(path))
    return frozenset(flattened({key: value for key, value in data.items() if key != "verl"}))


def load_resolved(path: Path | str) -> RunConfig:
    """Reads `RUN/run.yaml`, as `submit` wrote it. NotFound: there is none. Otherwise raises as `load`."""
    path = Path(path)
    if not path.is_file():
        raise no_run(path)
    return _parse_run_yaml(_read(path), path)


def load_own(path: Path) -> RunConfig:
    """Does the work of `load_resolved` for processes that run the programs named in `run.yaml`: lead, agents, ranks.

    Raises:
        NotFound, ConfigError: as `load_resolved`.
        PermissionRefused: the run's directory or its run.yaml belongs to another user, or others may write it.
        OSError: the storage does not deliver it.
    """
    try:
        # The directory is opened first: whoever may write it can exchange run.yaml, whatever that file's own owner is.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Both checks use descriptors, so the file that is checked is the file that is read.
            require_own(os.fstat(folder), path.parent, within=path.parent)
            # O_NONBLOCK: a FIFO in its place would block without end. O_NOFOLLOW: a link may lead elsewhere.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path.name, flags, dir_fd=folder)
            try:
                require_own(os.fstat(fd), path, within=path.parent)
                raw = read_fd(fd, CONFIG)
            finally:
                os.close(fd)
        finally:
            os.close(folder)
    # Every other OSError goes up: storage that does not answer says nothing about the run.
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(path) from None
    except TooMuch as error:
        raise ConfigError("the configuration cannot be read", where=path, found=error) from None
    return _parse_run_yaml(raw, path)


def _parse_run_yaml(raw: bytes, path: Path) -> RunConfig:
    try:
        # Emptied, or zeros after a power cut. YAML would take no bytes for a configuration of defaults.
        if not raw.strip(b"\0 \t\r\n"):
            raise ConfigError(
                "the run's configuration is empty",
                where=path,
                expected="the configuration that `submit` wrote",
            )
        return parse_config(raw, str(path))
    except ConfigError as error:
        # The way back to a whole one.
        error.remedy = f"{error.remedy}; or {restoring(path)}" if error.remedy else restoring(path)
        error.args = (error.one_line(),)
        raise


def restoring(path: Path) -> str:
    """Returns how to get a damaged or lost run.yaml back."""
    paths = RunPaths(path.parent)
    saved = sorted(
        paths.checkpoints.glob("step_*/config.yaml"),
        key=lambda at: [*map(int, re.findall(r"\d+", at.parent.name))],
    )
    for copy in (paths.trained_with, *reversed(saved)):
        # An encrypted one is no text.
        with suppress(ConfigError, OSError, TooMuch):
            former = parse_config(read_regular(copy, CONFIG), str(copy))
            # Of a checkpoint that was taken over from another run, it is that run's.
            if copy == paths.trained_with or former.run_dir == str(path.parent.resolve()):
                what = (
                    "its newest ranks were started with"
                    if copy == paths.trained_with
                    else "that was saved with"
                )
                return f"`cp {shell_word(copy)} {shell_word(path)}` puts back what {what}"
    return "restore it from a backup, or from config.yaml in one of its checkpoints"


def left_of_run(root: Path) -> str:
    """Returns a file of a run in a directory, whether its run.yaml is there or not; empty: it is no run's."""
    # Each is made after run.yaml, and has a name that other programs hardly use there.
    for pattern in ("events.jsonl", "control/attempt_*.claim", "checkpoints/step_*/manifest.json"):
        for found in root.glob(pattern):
            return str(found.relative_to(root))
    return ""


def is_run(root: Path) -> bool:
    """Returns whether a directory is a run's, also one whose run.yaml is gone."""
    return (root / "run.yaml").exists() or bool(left_of_run(root))


def no_run(path: Path) -> NotFound:
    """Returns the error for a `RUN/run.yaml` that is not there."""
    if left := left_of_run(path.parent):
        return NotFound(
            "the run's configuration is gone",
            where=path,
            found=f"no such file beside {left}",
            expected="the configuration that `submit` wrote",
            remedy=restoring(path),
        )
    return NotFound(
        "not a run directory",
        where=path.parent,
        expected=f"a file {path.name} in it",
        remedy=f"`verl-slurm list {shell_word(path.parent)}` shows the runs below it"
        if any(path.parent.glob("*/run.yaml"))
        else "see the runs with `verl-slurm list DIR`",
    )


def dump(config: RunConfig) -> bytes:
    """Returns YAML that `load` reads back to an equal config, with every key written out."""
    return strict_yaml.dump(msgspec.to_builtins(config))


@cache
def known_keys() -> Mapping[str, object]:
    """Maps every dotted key of a config to its type annotation, sections left out."""
    # Cached: resolving type hints is slow, and each key of each config is looked up here.
    found = {key: field.type for key, _, field in fields_of(RunConfig)}
    return MappingProxyType(
        {key: kind for key, kind in found.items() if not re.search(r"\[\]|\.NAME\.", key)}
    )


def flattened(section: dict[str, typing.Any], prefix: str = "") -> dict[str, typing.Any]:
    """Returns `section` with its nested maps as dotted keys; later ones win. Lists and empty maps stay as they are."""
    flat: dict[str, typing.Any] = {}
    for key, value in section.items():
        whole = key
        if prefix:
            bare, path = key.lstrip("+~"), prefix.lstrip("+~")
            mark = key.removesuffix(bare) or prefix.removesuffix(path)
            whole = f"{mark}{path}.{bare}"
        inner = flattened(value, whole) if isinstance(value, dict) and value else {whole: value}
        for name in inner:
            flat.pop(name, None)  # keep the order: a later key is also later in the words for verl
        flat |= inner
    return flat


def differences(old: RunConfig, new: RunConfig) -> list[tuple[str, object, object]]:
    """Lists the keys in which two configs differ, as (dotted key, old value, new value), in schema order."""
    before, after = _flat(msgspec.to_builtins(old)), _flat(msgspec.to_builtins(new))
    # Maps may have keys that the other lacks; those of the schema come first, in its order.
    keys = list(before) + [key for key in after if key not in before]
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, CONFIG, follow=True)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        raise ConfigError(
            "no such configuration",
            where=path,
            expected=f"perhaps {path.parent / near[0]}" if near else None,
            remedy=f"give the path of a YAML file, or the name of an example: {', '.join(examples())}",
        ) from None
    except PermissionError as error:
        remedy, what = "ask its owner, or copy it to a place of yours", "the configuration cannot be read"
        raise PermissionRefused(what, where=path, found=error.strerror, remedy=remedy) from None
    except (OSError, TooMuch) as error:
        found, remedy = getattr(error, "strerror", error), "give the path of a readable YAML file"
        raise ConfigError(
            "the configuration cannot be read", where=path, found=found, remedy=remedy
        ) from None


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _parts(word: str) -> tuple[str, str]:
    match = _OVERRIDE.fullmatch(word)
    if match is None:
        expected = "KEY=VALUE, e.g. train.steps=50"
        raise ConfigError("not an override", where=word, expected=expected, remedy="write it so")
    return match[1], match[2]


def _override(data: dict[str, Value], places: dict[str, str], dotted: str, text: str) -> None:
    # The place stands in errors, and for a key of `encryption` the value may be the secret itself.
    shown = f"override {dotted}" if _private(dotted) else f"override {dotted}={text}"
    _require_known(dotted, shown)
    *sections, last = dotted.split(".")
    place = data
    for section in sections:
        inner = place.get(section)
        if inner is None:
            # Also where the file says `section:` with nothing below it, which is null.
            inner = place[section] = {}
        if not isinstance(inner, dict):
            found = f"the value {inner!r} in the file"
            raise ConfigError("not a section", where=dotted, found=found, remedy="fix the file")
        place = inner
    place[last] = _override_value(dotted, text)
    places[dotted] = shown


def _private(dotted: str) -> bool:
    """Returns whether a wrong value at this key may be a pasted secret, which errors must not show."""
    return dotted.startswith("checkpoint.encryption")


def _override_value(dotted: str, text: str) -> Value:
    annotation = known_keys().get(dotted)
    # YAML would make 7 of `name=007`, and a name must be what was typed.
    if annotation is str:
        return text
    if annotation == str | None:
        return None if text in ("", "null") else text
    return strict_yaml.parse_value(text, f"override {dotted}={text}")


def override_word(key: str, value: object) -> str:
    """Returns the word of a command line that gives `key` this value."""
    plain = isinstance(value, str) and known_keys().get(key) in (str, str | None)
    return f"{key}={value if plain else json_line(value).decode()}"


@cache
def _sections() -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(RunConfig) if struct_of(field.type))


def _unknown(
    data: typing.Mapping[str, Value], places: dict[str, str], source: str, above: tuple[str, ...] = ()
) -> typing.Iterator[tuple[tuple[str, ...], ConfigError]]:
    """Yields the names that lead to each unknown key, with its error; of an unknown section each key."""
    keys = known_keys()
    for name, value in data.items():
        path = (*above, name)
        dotted = ".".join(path)
        place = places.get(dotted, source)
        # As a word of the command line has it, `train.steps: 5`; in a file that is one name, and none of ours.
        if "." in name:
            yield path, _unknown_key(dotted, place) or _dotted_name(dotted, place)
            continue
        inside = isinstance(value, dict) and value and dotted not in VERLS_SECTIONS
        # The keys of an unknown section show best what was meant.
        if inside and (dotted in _sections() or _takes_no_section(keys.get(dotted))):
            assert isinstance(value, dict)
            yield from _unknown(value, places, source, path)
        elif problem := _unknown_key(dotted, place):
            yield path, problem


def _dotted_name(dotted: str, place: str) -> ConfigError:
    section, _, key = dotted.partition(".")
    return ConfigError(
        "no such key",
        where=place if place.endswith(dotted) else f"{place}: {dotted}",
        expected=f"a line `{section}:`, and `{key}` indented below it",
        remedy="a file has sections; KEY=VALUE behind it has dots",
    )


def _takes_no_section(annotation: object) -> bool:
    """Returns whether a key is unknown, or takes a text or a number."""
    # A section there has keys of another program.
    return annotation is None or annotation in (str, int, float, bool, str | None)


def _require_known(dotted: str, place: str) -> None:
    if problem := _unknown_key(dotted, place):
        raise problem


def _unknown_key(dotted: str, place: str) -> ConfigError | None:
    keys = known_keys()
    if dotted in keys or dotted in _sections():
        return None
    # Below a map any name may stand: its keys belong to sbatch or to verl.
    if any(dotted.startswith(f"{key}.") and "dict[" in str(kind) for key, kind in keys.items()):
        return None
    return ConfigError(
        "no such key",
        where=place if place.endswith(dotted) else f"{place}: {dotted}",
        expected=" or ".join(nearest_keys(dotted, keys, _sections())) or None,
        remedy="`verl-slurm config` lists all keys with their meaning"
        # Sections of verl's that ours has as well, or might.
        + "; one of verl's stands below `verl:`, or after `--`"
        * dotted.startswith(("data.", "model.", "optim.", "reward", "trainer.")),
    )


# Keys that decide what is trained. Their defaults belong to the quick start and are never taken silently.
_NAMED = {
    "model.path": "a Hugging Face model directory, or builtin:tiny",
    "model.reward": "python:FILE.py:FUNCTION, classifier:DIR or rule:arithmetic",
    "data.root": "a directory with prompts, or builtin:arithmetic",
}


def _missing(data: dict[str, Value]) -> list[str]:
    sections = {dotted: data.get(dotted.partition(".")[0]) for dotted in _NAMED}
    return [
        dotted
        for dotted, inside in sections.items()
        if not isinstance(inside, dict) or dotted.partition(".")[2] not in inside
    ]


def _unnamed(missing: typing.Sequence[str], source: str) -> ConfigError:
    return ConfigError(
        "the configuration does not say what to train",
        where=source,
        found=f"no {', no '.join(missing)}",
        expected="; ".join(f"{key}: {_NAMED[key]}" for key in missing),
        remedy=f"add {'it' if len(missing) == 1 else 'them'}, or write KEY=VALUE after the file",
    )


def _convert(
    data: dict[str, Value], places: dict[str, str], source: str, wrong: list[tuple[str, ConfigError]]
) -> RunConfig:
    """Returns the typed configuration; each value that does not fit comes into `wrong`, and has its default."""
    try:
        return msgspec.convert(data, RunConfig, strict=True)
    except msgspec.ValidationError:
        keys = {*known_keys(), *_sections()}
    for dotted, value, expected in misfits(RunConfig, data):
        # Lines and types are known by key: one of a map, or within a list, goes with the whole of it.
        known = dotted.partition("[")[0]
        place = places.get(known, source)
        while known and known not in keys:
            known = known.rpartition(".")[0]
        if not _drop(data, known.split(".")):
            continue  # another entry of it was wrong
        wrong.append((known, _wrong_value(dotted, value, expected, place, known)))
    return msgspec.convert(data, RunConfig, strict=True)


def _wrong_value(dotted: str, value: object, expected: str, place: str, known: str) -> ConfigError:
    names = {str: ", text", type(None): ", nothing", dict: ", a section", list: ", a list", bool: ", bool"}
    is_text = expected.startswith("text") and isinstance(value, int | float)
    # A type of GPUs, as sbatch takes it.
    typed = re.fullmatch(r"(?:gpu:)?([\w.-]+):(\d+)", str(value)) if dotted == "slurm.gpus_per_node" else None
    if typed:
        remedy = f"write slurm.gpus_per_node={typed[2]} and slurm.extra.gres=gpu:{typed[1]}:{typed[2]}"
    else:
        remedy = "write it in quotes" if is_text else f"see `verl-slurm config explain {shell_word(known)}`"
    return ConfigError(
        "wrong value",
        where=place if place.startswith("override ") else f"{place}: {dotted}",
        # A secret that was pasted in the wrong place must not reach a log.
        found="a value that does not fit" if _private(dotted) else f"{value!r}{names.get(type(value), '')}",
        expected=expected,
        remedy=remedy,
    )


def _flat(data: object, prefix: str = "") -> dict[str, object]:
    if isinstance(data, dict):
        merged: dict[str, object] = {}
        for key, value in data.items():
            merged |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
        return merged
    return {prefix: data}


_VERL_WORD = re.compile(r"(\+{0,2}[A-Za-z_][A-Za-z0-9_@/.-]*)=(.*)", re.DOTALL)


def settings_of(words: typing.Sequence[str]) -> dict[str, Value]:
    """Returns the last setting of each key; what is no setting becomes a key with a blank at its end."""
    return dict(_verl_word(word) for word in _with_values(words))


def _verl_word(word: str) -> tuple[str, Value]:
    # Refused with all others that verl does not take (`verl/overrides.py`): no key has a blank.
    no_word = f"{word} ", None
    if (match := _VERL_WORD.fullmatch(word)) is None:
        return no_word
    try:
        # Hydra's own reading where it is there: it decides in the job what the word means.
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException
    except ModuleNotFoundError:
        # Without Hydra, as outside a container, by our own reading.
        return match[1], strict_yaml.parse_value(match[2], word)
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        return no_word
    if parsed.is_sweep_override():
        return no_word  # a sweep: one run per setting
    return match[1], typing.cast("Value", parsed.value())


def _with_values(words: typing.Sequence[str]) -> typing.Iterator[str]:
    """Yields words; an option of Hydra's and its value are one."""
    former = ""
    for word in words:
        if former:
            yield f"{former}={word}"
            former = ""
        elif word in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd"):
            former = word
        else:
            yield word
    if former:
        yield former
