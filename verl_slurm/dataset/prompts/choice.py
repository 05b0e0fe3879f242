"""Decides which files of a data directory hold the prompts. Pure: decides from the names below the root.

Without `data.files` the first match of these is taken:

1. `*.jsonl` directly in the root;
2. a data set that `datasets` saved (`state.json` and `*.arrow`): the files that state.json names, in its order;
3. files of one other kind directly in the root: `*.parquet`, `*.json`, `*.csv`, `*.tsv` or `*.arrow`;
4. the same in `ROOT/data`, as snapshots of the Hugging Face hub have it.

Files of several kinds, or of several splits (train and test), are refused: the user then sets `data.files`. A name
tells its split by a word of its own in the file's name, or in that of a directory: `test.jsonl`, `math_test.jsonl`,
`test/a.jsonl`. Files of a test split alone are refused for `data.root` if the training split lies elsewhere below it.

`data.files` is a glob relative to the root: `*` and `?` stay within a name, `**/` is any number of directories. Files
are read in the order of their paths.

Names that no trainer reads are never data (`data_names`): of editors, Git and file systems, and the caches that
`datasets` writes beside what it saved.

Whether the data is whole is told by names, too: of shards (`train-00000-of-00003.parquet`), and of what programs that
download or copy write before a file is there (`train.jsonl.part`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice

import msgspec

from verl_slurm.base.errors import UNREADABLE, DataError

SUFFIXES = (".jsonl", ".parquet", ".json", ".csv", ".tsv", ".arrow")
_EXPECTED = "*.jsonl, *.parquet, *.json, *.csv, *.tsv, or a directory that `datasets` saved"
# JSON files that lie beside the data and hold no prompts.
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
# A word of its own: `testament.json` is no test split, `gsm8kTest.json` and `gsm8k_test.json` are.
_SPLIT = re.compile(
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:(train(?:ing)?)|test(?:s|ing)?|validation|valid|val|dev(?:el)?|eval(?:uation)?|held[-_]?out|holdout)"
    r"(?![a-z])"
)
# The hash that older versions of `datasets` put behind it differs from shard to shard.
_SHARD = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(?:-[0-9a-f]{16})?(\D.*|)", re.DOTALL)
_UNFINISHED = re.compile(
    r"(.+?)(?:\.(?:incomplete|part(?:ial)?|tmp|temp|crdownload|opdownload|download|aria2|filepart)|_\.gstmp)"
)
_OF_RSYNC = re.compile(r"\.(.+)\.[A-Za-z0-9]{6}")
_OF_THE_HUB = ".cache/huggingface/download/"
"""Where `hf download --local-dir` keeps what is not there yet."""
_SHOWN = 4
# Snapshots of a volume come and go by themselves, and what else lies at its root is not the user's.
_OF_VOLUMES = (
    r"\.snapshots?|\.zfs|lost\+found|\.Trash[^/]*|\.fseventsd|\.Spotlight-V100|System Volume Information"
)
_OF_VOLUME = re.compile(rf"(?:^|/)(?:{_OF_VOLUMES})(?:/|$)")
# Of editors, office programs, notebooks, Git, downloads, and of NFS, macOS and Windows.
_NEVER_DATA = re.compile(
    r"(?:^|/)(?:\.[^/]+\.(?:sw[a-z]|kate-swp)|[^/]+~|\.#[^/]+|#[^/]+#|\.~lock\.[^/]+#|~\$[^/]+|\.ipynb_checkpoints"
    r"|\.git|\.cache|\.nfs[0-9a-f]{8,}|\.DS_Store|\._[^/]+|Thumbs\.db|desktop\.ini"
    rf"|{_OF_VOLUMES})(?:/|$)"
)
_SAVED, _OF_A_MODEL = "state.json", "config.json"
# `Dataset.map` and its like beside a saved data set: what is done, and what NamedTemporaryFile calls it before.
_CACHE = re.compile(r"cache-[^/]+\.arrow|tmp[a-z0-9_]{8}")
# `hf download` brings these anew, and no loader of a model reads them.
_ABOUT_A_MODEL = re.compile(
    r"\.git(?:attributes|ignore)|(?:README|LICEN[CS]E|NOTICE)(?:\.(?:txt|rst))?|[^/]*\.md"
)


class _State(msgspec.Struct):
    """The used part of the state.json of `Dataset.save_to_disk`."""

    data_files: list[dict[str, str]] = msgspec.field(name="_data_files")


def choose(
    names: Collection[str], pattern: str | None, read: Callable[[str], bytes], *, root: object, key: str
) -> list[str]:
    """Returns the files that hold prompts, in the order in which they are read.

    Args:
        names: paths of the files below the root, relative, with `/`.
        pattern: `data.files`; None: by the rule above.
        root, key: for the message; `key` is `data.root` or `data.eval_root`.

    Raises:
        DataError: no file, or more than one reading of the directory.
    """
    files_key = key.replace("root", "files")
    names = data_names(names)
    if pattern is not None:
        # Sorted: the order decides which prompt is which number, and storage lists names in any order.
        chosen = sorted(name for name in names if matches(pattern, name))
        if not chosen:
            raise DataError(
                f"no file matches {files_key}={pattern}",
                where=root,
                found=_listing(names),
                expected="a pattern relative to that directory, e.g. data/train-*.parquet",
                remedy=f"set {files_key}",
            )
        if odd := [name for name in chosen if not name.endswith(SUFFIXES)]:
            raise DataError(
                "a file of a kind that is not read",
                where=f"{root}/{odd[0]}",
                expected=_EXPECTED,
                remedy=f"narrow {files_key}={pattern}, or {_CONVERT}",
            )
        return chosen
    top = sorted(name for name in names if "/" not in name)
    if jsonl := [name for name in top if name.endswith(".jsonl")]:
        return _of_one_split(jsonl, names, root, key)
    # Before the kinds below: the cache files of `datasets` may lie beside the data, as *.arrow, too.
    if _SAVED in top and any(name.endswith(".arrow") for name in top):
        return _saved(top, read, root)
    if "dataset_dict.json" in top:
        splits = sorted({name.partition("/")[0] for name in names if name.endswith("/state.json")})
        raise DataError(
            "the data set has several splits",
            where=root,
            found=", ".join(splits) or "dataset_dict.json",
            expected="the directory of one split",
            remedy=f"set {key}={root}/{_preferred(splits, key) if splits else 'train'}",
        )
    # The root first; snapshots of the hub have their files in data/.
    for folder in ("", "data/"):
        inside = [name for name in sorted(names) if name.startswith(folder)]
        inside = [name for name in inside if "/" not in name.removeprefix(folder)]
        held = [name for name in inside if name.endswith(SUFFIXES) and name not in _ABOUT_DATA]
        if held:
            _require_one_kind(held, root, key)
            return _of_one_split(held, names, root, key)
    raise DataError(
        "no prompts in the data directory",
        where=root,
        found=_listing(names),
        expected=_EXPECTED,
        remedy=_remedy(names, root, key, files_key),
    )


_CONVERT = 'convert it to JSON Lines, {"prompt": ..., "answer": ...} on each line'


def is_never_data(name: str) -> bool:
    """Returns whether no trainer reads a file or directory of that name, relative to the root, or what is in it."""
    return _NEVER_DATA.search(name) is not None


def is_entered(folder: str, pattern: str | None) -> bool:
    """Returns whether files that `pattern` takes may lie in a folder (None: any file), or what is not there yet."""
    wanted = pattern is None or _OF_THE_HUB.startswith(f"{folder}/") or reaches(pattern, folder)
    return wanted and _OF_VOLUME.search(folder) is None


def data_names(names: Iterable[str], pattern: str | None = None) -> list[str]:
    """Returns the names that may be of data, and that `pattern` takes, if there is one."""
    names = list(names)
    beside = {_SAVED: _CACHE, _OF_A_MODEL: _ABOUT_A_MODEL}
    never = {_prefix(name): beside[last] for name in names if (last := name.rpartition("/")[2]) in beside}

    def may_be(name: str) -> bool:
        folder = _prefix(name)
        if is_never_data(name) or (folder in never and never[folder].fullmatch(name, len(folder))):
            return False
        return pattern is None or matches(pattern, name)

    return [name for name in names if may_be(name)]


def splits_of(names: Iterable[str]) -> set[str]:
    """Returns the splits that the names tell, in lower case; `train` for all words for it, "" for a name without."""
    return {_split(name) for name in names}


def missing_shards(chosen: Iterable[str], names: Iterable[str]) -> str:
    """Returns which shards of the chosen files are not among `names`; empty: all are there."""
    groups: dict[tuple[str, ...], set[int]] = {}
    wanted = {group: total for name in chosen for group, _, total in _shards(name)}
    for name in names:
        for group, number, _ in _shards(name):
            groups.setdefault(group, set()).add(number)
    said = []
    for group, total in sorted(wanted.items()):
        there = groups.get(group, set())
        # Weights count from 1, data of `datasets` from 0.
        numbers = range(1, total + 1) if total in there and 0 not in there else range(total)
        if count := total - sum(number in numbers for number in there):
            before, width, between, digits, after = group
            lacking = (f"{before}{n:0{width}}{between}{digits}{after}" for n in numbers if n not in there)
            shown = ", ".join(islice(lacking, _SHOWN))
            said.append(f"no {shown} ({count} of {total} shards missing)")
    return "; ".join(said)


def names_shards(pattern: str | None) -> bool:
    """Returns whether a pattern tells shards by their numbers: `train-0000?-of-00003.parquet`."""
    return pattern is not None and re.search(r"\d[?*]*[-_]of[-_]", pattern) is not None


def _shards(name: str) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yields the set that a shard belongs to, its number, and the size of the set; nothing for another file."""
    folder = _prefix(name)
    if match := _SHARD.fullmatch(name, len(folder)):
        before, number, between, total, after = match.groups()
        yield (folder + before, str(len(number)), between, total, after), int(number), int(total)


def unfinished_downloads(
    chosen: Iterable[str], names: Iterable[str], belongs: Callable[[str], bool]
) -> list[str]:
    """Lists names beside the chosen files that a download or a copy has not finished. `belongs`: whether a file of that
    name, relative to the root, would belong to the data.
    """
    folders, found = {_prefix(name) for name in chosen}, []
    for name in sorted(names):
        folder = _prefix(name)
        inside, own = folder.removeprefix(_OF_THE_HUB), name[len(folder) :]
        match = _UNFINISHED.fullmatch(own) or _OF_RSYNC.fullmatch(own)
        if inside not in folders or match is None:
            continue
        # rclone and the hub put a hash between the file's name and the end.
        stem = match[1] if is_data(match[1]) else match[1].rpartition(".")[0]
        told = is_data(stem)
        # Programs of all kinds write files called .tmp.
        if (
            belongs(inside + stem)
            if told
            else own.endswith((".incomplete", ".crdownload", ".part", ".partial"))
        ):
            found.append(name)
    return found


def takes(pattern: str | None, chosen: Collection[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether a further file would be read as `chosen` are."""
    kinds, splits = {_suffix(name) for name in chosen}, {"", "train"} | splits_of(chosen)
    if pattern is not None:
        return lambda name: matches(pattern, name)
    return lambda name: _suffix(name) in kinds and _split(name) in splits


def _split(name: str) -> str:
    word = _SPLIT.search(name)
    return "" if word is None else "train" if word[1] else word[0].lower()


def _preferred(names: Iterable[str], key: str) -> str:
    """Returns the name to propose: of the training split for `data.root`, of another one for `data.eval_root`."""
    order = ["train", ""] if key == "data.root" else ["", "train"]

    def place(name: str) -> tuple[int, str]:
        split = _split(name)
        otherwise = len(order) if key == "data.root" else -1
        return order.index(split) if split in order else otherwise, name

    return min(names, key=place)


def _require_one_kind(held: list[str], root: object, key: str) -> None:
    # A data set that lies there in two forms would be read twice.
    if len({_suffix(name) for name in held}) > 1:
        raise DataError(
            "the data directory has files of several kinds",
            where=root,
            found=_listing(held),
            expected="one kind",
            remedy=_proposal(held, held, key),
        )


def _of_one_split(chosen: list[str], names: Collection[str], root: object, key: str) -> list[str]:
    """Returns `chosen`. Training on a test split would go unnoticed, so it is refused here."""
    splits, trains = splits_of(chosen), key == "data.root"
    # `math.jsonl` beside `math_test.jsonl` trains; `train.jsonl` beside `more.jsonl` may be one split.
    mixed = len(splits - {""}) > 1 or ("" in splits and bool(splits - {"", "train"}))
    # Alone, the files that are read are of one split. The other one may lie there as another kind, or further below.
    others = [name for name in names if is_data(name) and name not in chosen and _split(name) == "train"]
    if not mixed and not (trains and others and splits - {"", "train"}):
        return chosen
    held = [*chosen, *(() if mixed else others)]
    raise DataError(
        "the data directory has several splits",
        where=root,
        found=_listing(held) if mixed else f"{chosen[0]} to be read, and {_preferred(others, key)}",
        expected="one split, or a pattern that says which one",
        remedy=_proposal(held, names, key),
    )


def _proposal(held: list[str], names: Iterable[str], key: str) -> str:
    """Returns a remedy: to take the files of one kind and one split of `held`."""
    files_key = key.replace("root", "files")
    first = _preferred(held, key)
    if _is_compressed(first):
        return f"unpack {first}, then set {files_key}"
    # The shortest pattern that takes nothing of another split.
    kind, word = _suffix(first), _SPLIT.search(first)
    patterns = [f"{_prefix(first)}*{kind}"]
    if word is not None:
        folder = _prefix(first)
        start = first[: word.end()] if word.start() >= len(folder) else folder
        stars = f"{folder}*{word[0]}" if word.start() > len(folder) else start
        patterns = [f"{stars}*{kind}", f"{start}*{kind}"]
    for pattern in patterns:
        taken = {_split(name) for name in names if matches(pattern, name)}
        if taken == {_split(first)}:
            return f"set {files_key}='{pattern}'"
    return f"set {files_key}='{first}'"


def is_data(name: str) -> bool:
    """Returns whether a name is that of prompts, read or to be unpacked first."""
    plain = name[: -len(_suffix(name))] if _is_compressed(name) else name
    return plain.endswith(SUFFIXES) and plain.rpartition("/")[2] not in _ABOUT_DATA


def _is_compressed(name: str) -> bool:
    return name.endswith(_COMPRESSED)


def _suffix(name: str) -> str:
    return name[name.rindex(".") :]


def _prefix(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _saved(top: list[str], read: Callable[[str], bytes], root: object) -> list[str]:
    where = f"{root}/state.json"
    try:
        # The files that it names, in its order: *.arrow beside them may be caches of `datasets`.
        state = msgspec.json.decode(read("state.json"), type=_State)
        files = [entry["filename"] for entry in state.data_files]
    except (KeyError, *UNREADABLE) as error:
        raise DataError(
            "the saved data set cannot be read",
            where=where,
            found=error,
            expected="state.json as Dataset.save_to_disk writes it",
            remedy="save the data set again",
        ) from None
    # A copy that was interrupted would otherwise train on a part of the data.
    if missing := [name for name in files if name not in top]:
        raise DataError(
            "the saved data set is not whole",
            where=where,
            found=f"no {missing[0]}",
            remedy="copy or save the data set again",
        )
    return files


def _listing(names: Iterable[str]) -> str:
    """Describes the directory's content: directories by name and a few files."""
    files = sorted(name for name in names if "/" not in name)
    folders = sorted({name.partition("/")[0] + "/" for name in names if "/" in name})
    shown = [*files, *folders] if files or len(folders) > 1 else sorted(names)
    if not shown:
        return "no file"
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _remedy(names: Collection[str], root: object, key: str, files_key: str) -> str:
    if below := [name for name in names if "/" in name and name.endswith(SUFFIXES)]:
        first = _preferred(below, key)
        folder = first.rpartition("/")[0]
        # All directories together would be all splits.
        if len(splits_of(below)) > 1:
            return f"set {key}={root}/{folder}"
        return f"set {key}={root}/{folder}, or {files_key}='**/*{_suffix(first)}' for all directories below"
    if packed := sorted(name for name in names if _is_compressed(name) and is_data(name)):
        return f"unpack {_preferred(packed, key)} first"
    if names:
        return f"set {key} to another directory, or {_CONVERT}"
    return f"set {key} to a directory with prompts"


def reaches(pattern: str, folder: str) -> bool:
    """Returns whether a glob may match a file in `folder` or below; `folder` is relative, and `.` the root."""
    above = pattern.split("/")[:-1]
    # Each beginning of the glob's folders; one that ends in `**` takes all that is below it.
    heads = ("/".join([*above[:n], *["*"] * (above[n - 1] == "**")]) for n in range(1, len(above) + 1))
    return folder == "." or any(matches(head, folder) for head in heads)


def matches(pattern: str, name: str) -> bool:
    """Returns whether a glob matches all of `name`."""
    # Every reading of the glob at once: the work grows with the product of both lengths. One regular expression for all
    # of it tries one reading after the other, and each `**/` multiplies their number.
    *folders, last = pattern.replace("[", "[[]").split("/")
    parts = name.split("/")
    # Numbers of the name's parts that the pattern's parts so far can take.
    ends = {0}
    for folder in folders:
        if folder == "**":
            ends = set(range(min(ends), len(parts)))
        else:
            ends = {at + 1 for at in ends if at < len(parts) and fnmatchcase(parts[at], folder)}
        if not ends:
            return False
    return len(parts) - 1 in ends and fnmatchcase(parts[-1], last)
