"""Checks the data files of a run of verl: whole, with the columns that verl reads, enough rows, and a reward for them.

The rules are those of verl 0.9: `RLHFDataset` and `MultiTurnSFTDataset`, and the reward managers. What a user's own
code decides is not known here, and a note says so.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from verl_slurm.base.bounded import SOURCE, read_regular
from verl_slurm.base.errors import ConfigError, DataError
from verl_slurm.base.one_line import counted
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.prompts.look import MOST_TEXTS, Rows, WantedRows
from verl_slurm.submit.checks.prompt_data import look_at_files, refuse_partial
from verl_slurm.submit.checks.user_programs import Found, ranks_search
from verl_slurm.verl.overrides import value_at
from verl_slurm.verl.releases import Entry
from verl_slurm.verl.verl_inputs import Input, with_critic

_MANAGERS = ("naive", "dapo", "gdpo", "remote", "rate_limited")
"""Those of verl's own that give `data_source` and the ground truth to a function."""
_OF_GROUPS = re.compile("(grpo|rloo|opo|gpg|gdpo|(tir_)?optimal_token|reinforce_plus_plus_baseline).*")
"""Estimators of verl's that compare the responses to one prompt."""
_SUFFIXES = (".parquet", ".json", ".jsonl")
_ROLLOUT = "actor_rollout_ref.rollout"
_SOURCE, _TRUTH = "data_source", "reward_model.ground_truth"


def check_sizes(entry: Entry, settings: Mapping[str, Any]) -> list[str]:
    """Refuses a mini-batch that is larger than its batch: verl would end at its first update. Returns notes.

    Raises:
        ConfigError: both numbers.
    """
    batch = value_at(settings, "data.train_batch_size")
    roles = ["actor_rollout_ref.actor", *(["critic"] if with_critic(entry, settings) else [])]
    for role in roles if entry == "ppo" and isinstance(batch, int) else []:
        size = value_at(settings, f"{role}.ppo_mini_batch_size")
        if isinstance(size, int) and size > batch:
            raise ConfigError(
                "a mini-batch of verl's is larger than the batch",
                where=f"verl.{role}.ppo_mini_batch_size",
                found=f"{size}, and data.train_batch_size={batch}",
                expected=f"at most {batch}",
                remedy="lower it, or raise verl.data.train_batch_size",
            )
    estimator = value_at(settings, "algorithm.adv_estimator")
    if _OF_GROUPS.match(str(estimator)) and value_at(settings, "actor_rollout_ref.rollout.n") == 1:
        alone = "compares the responses to a prompt; of a single one the advantage is its raw reward"
        return [f"verl.actor_rollout_ref.rollout.n is 1: {estimator} {alone}"]
    return []


def check_verl_data(
    config: RunConfig, settings: Mapping[str, Any], key: str, inputs: Sequence[Input], *, begun: bool
) -> Found:
    """Checks the files of `data.train_files` or `data.val_files` that are on this machine.

    Args:
        inputs: of the key, each of which exists or is elsewhere.
        begun: the run has trained on this data: missing shards are a note.

    Raises:
        ConfigError: fewer rows than one batch.
        DataError: not whole, of a kind that verl does not read, without a column, or without a reward.
    """
    places = [Path(one.place).expanduser() for one in inputs]
    where, there = f"verl.{key}", [place for place in places if place.exists()]
    if not there:
        return Found([], [])
    files = [file for place in there for file in _files(place)]
    notes = _refuse_partial(where, files, begun=begun)
    entry: Entry = config.trainer.entry
    odd = [place for place in there if entry == "ppo" and place.is_dir()]
    odd += [file for file in files if file.suffix not in (_SUFFIXES if entry == "ppo" else _SUFFIXES[:1])]
    if unknown := _why_unknown(config, settings):
        return Found([], [*notes, f"not looked at: the rows of {where}: {unknown}"])
    if odd and entry == "ppo":
        raise DataError(
            "verl does not read such a file",
            where=f"{where}: {odd[0]}",
            found="a directory" if odd[0].is_dir() else None,
            expected=", ".join(f"*{suffix}" for suffix in _SUFFIXES),
            remedy=f"set {where} to such files",
        )
    if odd:
        return Found([], [*notes, f"not looked at: the rows of {where}: {odd[0]} is not called *.parquet"])
    messages = value_at(settings, f"data.{'prompt_key' if entry == 'ppo' else 'messages_key'}")
    messages = messages if isinstance(messages, str) else "prompt" if entry == "ppo" else "messages"
    reward, unseen = _reward(config, settings)
    notes += unseen
    keys = [messages, *([_SOURCE, _TRUTH] if reward.reads_rows else [])]
    wanted = WantedRows(
        files=list(map(str, files)),
        keys=keys,
        messages=messages,
        texts=_SOURCE if reward.reads_rows else "",
        also=["extra_info"],
    )
    rows = look_at_files(wanted, where)
    if isinstance(rows, str):
        return Found([], [*notes, f"not looked at: the rows of {where}: {rows}"])
    _refuse_rows(entry, where, rows, messages, reward)
    if key == "data.train_files" and there == places:
        _refuse_too_few(config, settings, rows)
    if reward.reads_rows and reward.is_default:
        notes += _refuse_unrewarded(config, where, rows)
    if not rows.whole:
        notes.append(f"{where}: only the first {rows.rows} rows were looked at")
    elsewhere = f" ({len(places) - len(there)} more elsewhere)" if there != places else ""
    number = counted(rows.rows, "row") if rows.whole else f"more than {counted(rows.rows, 'row')}"
    return Found(
        [f"{where}: {counted(len(files), 'file')}{elsewhere}, {number} with {', '.join(keys)}"], notes
    )


def _files(place: Path) -> Iterator[Path]:
    # pandas reads a directory as one table.
    if place.is_dir():
        yield from sorted(path for path in place.rglob("*") if path.is_file() and path.name[0] not in "._")
    else:
        yield place


def _refuse_partial(where: str, files: Sequence[Path], *, begun: bool) -> list[str]:
    notes = []
    for folder in dict.fromkeys(file.parent for file in files):
        own = [file.name for file in files if file.parent == folder]
        names = os.listdir(folder)
        remedy = f"copy or download them, and name all in {where}; to use a part, give its files other names"
        # The user has listed the files: a download of one that is not listed is none of theirs.
        notes += refuse_partial(folder, own, names, own.__contains__, remedy=remedy, known=begun, key=where)
        # Those that are there and are not listed: the list is the user's word.
        notes += refuse_partial(folder, own, own, lambda _: False, remedy=remedy, known=True, key=where)
    return list(dict.fromkeys(notes))


def _why_unknown(config: RunConfig, settings: Mapping[str, Any]) -> str:
    """Returns why it is not known what verl reads of the rows; empty: it is known."""
    if config.slurm.container is not None:
        return "verl is the container's"
    if config.trainer.command:
        return "trainer.command reads them"
    if own := value_at(settings, "data.custom_cls.path"):
        return f"the class of {own} reads them"
    if find_spec("pyarrow") is None:
        return "pyarrow is not installed here"
    return ""


class _Reward(NamedTuple):
    reads_rows: bool
    """A function gets `data_source` and the ground truth of each row."""
    is_default: bool = False
    """It is verl's own."""


def _reward(config: RunConfig, settings: Mapping[str, Any]) -> tuple[_Reward, list[str]]:
    """Returns what gives the rewards, and notes."""
    if config.trainer.entry != "ppo":
        return _Reward(reads_rows=False), []
    manager = value_at(settings, "reward.reward_manager.name") or "naive"
    manager = value_at(settings, "reward_model.reward_manager") or manager
    imported = value_at(settings, "reward.reward_manager.source") == "importlib"
    unknown = f"the reward manager {manager}" if imported or manager not in _MANAGERS else ""
    if loops := value_at(settings, f"{_ROLLOUT}.agent.agent_loop_config_path"):
        unknown = f"the agent loops of {loops}"
    if unknown:
        note = f"not looked at: which columns of verl's data the reward reads, which {unknown} may decide"
        return _Reward(reads_rows=False), [note]
    own = any(value_at(settings, f"{above}custom_reward_function.path") for above in ("", "reward."))
    model = any(value_at(settings, f"{above}reward_model.enable") for above in ("", "reward."))
    return _Reward(reads_rows=own or not model, is_default=not own), []


def _refuse_rows(entry: Entry, where: str, rows: Rows, messages: str, reward: _Reward) -> None:
    if not rows.rows:
        raise DataError("verl's data files hold no row", where=where, remedy=f"set {where}")
    for key, (place, found) in rows.lacking.items():
        # A function of the user's may know what a null means.
        if key != messages and not reward.is_default and not found.startswith("keys "):
            continue
        named = f"set verl.data.{'prompt_key' if entry == 'ppo' else 'messages_key'}"
        managed = "set a reward manager of your own (verl.reward.reward_manager)"
        raise DataError(
            "a row lacks what verl reads",
            where=f"{where}: {place}",
            found=found,
            expected=f"a value under {key!r}",
            remedy=f"write it into the rows, or {named if key == messages else managed}",
        )
    if rows.no_messages is not None:
        place, found = rows.no_messages
        raise DataError(
            "a row holds no conversation",
            where=f"{where}: {place}",
            found=found,
            expected=f"a list of {{role, content}} under {messages!r}",
            remedy="write it as one: verl gives it to the model's chat template",
        )


def _refuse_too_few(config: RunConfig, settings: Mapping[str, Any], rows: Rows) -> None:
    """Refuses fewer rows than one batch: verl drops what does not fill one, and would take no step."""
    sizes = {key: value_at(settings, f"data.{key}") for key in ("train_batch_size", "gen_batch_size")}
    most = value_at(settings, "data.train_max_samples")
    num = min(rows.rows, most) if isinstance(most, int) and most > 0 else rows.rows
    for key, size in sizes.items():
        if not isinstance(size, int):
            continue
        if config.trainer.entry == "sft":  # its ranks cut both down to what they can divide
            size -= size % config.distributed.world_size
        if (rows.whole or num < rows.rows) and num < size:
            raise ConfigError(
                "verl has fewer rows than one batch, so it would take no step",
                where=f"verl.data.{key}",
                found=f"{size}, and {counted(num, 'row')} in data.train_files",
                expected=f"at most {num}",
                remedy=f"lower verl.data.{key}, or give more rows",
            )


def _refuse_unrewarded(config: RunConfig, where: str, rows: Rows) -> list[str]:
    """Refuses a data source for which verl has no reward; returns notes."""
    table = _rewards_of_verl(config)
    if table is None:
        return [f"not looked at: whether verl has a reward for {_SOURCE} {', '.join(sorted(rows.texts)[:4])}"]
    sources, beginnings = table
    for text, place in rows.texts.items():
        if text not in sources and not text.startswith(beginnings):
            known = [*sorted(sources), *(f"{word}..." for word in beginnings)]
            raise DataError(
                "verl has no reward for this data",
                where=f"{where}: {place}",
                found=f"{_SOURCE} {text[:60]!r}",
                expected=f"a reward function of yours, or one of {', '.join(known)}",
                remedy="set verl.reward.custom_reward_function.path and verl.reward.custom_reward_function.name",
            )
    if len(rows.texts) >= MOST_TEXTS:
        return [f"not looked at: more than {MOST_TEXTS} values of {_SOURCE} in {where}"]
    return []


def _rewards_of_verl(config: RunConfig) -> tuple[set[str], tuple[str, ...]] | None:
    """Returns the data sources that the installed verl has rewards for: whole, and how they begin. It is read and not
    imported; None: it is not there, or is not written as in the releases that are known.
    """
    search = ranks_search(config)
    spec = PathFinder.find_spec("verl", search) if search else None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            tree = ast.parse(
                read_regular(Path(folder) / "utils/reward_score/__init__.py", SOURCE, follow=True)
            )
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "default_compute_score":
                branch = next((part for part in node.body if isinstance(part, ast.If)), None)
                return None if branch is None else _table(branch)
    return None


def _table(branch: ast.If) -> tuple[set[str], tuple[str, ...]] | None:
    sources, beginnings = set[str](), list[str]()
    rest: list[ast.stmt] = [branch]
    while rest and isinstance(rest[0], ast.If):
        test = rest[0].test
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]:
            match part:
                case ast.Compare(
                    left=ast.Name(id="data_source"),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=str(text))],
                ):
                    sources.add(text)
                case ast.Compare(
                    left=ast.Name(id="data_source"),
                    ops=[ast.In()],
                    comparators=[ast.List(elts=some) | ast.Tuple(elts=some) | ast.Set(elts=some)],
                ) if all(isinstance(one, ast.Constant) for one in some):
                    sources |= {str(one.value) for one in some if isinstance(one, ast.Constant)}
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="data_source"), attr="startswith"),
                    args=[ast.Constant(value=str(text))],
                ):
                    beginnings.append(text)
                case _:
                    return None
        rest = rest[0].orelse
    # Without an error at the end, what is not named has a reward as well.
    return (sources, tuple(beginnings)) if rest and isinstance(rest[0], ast.Raise) else None
