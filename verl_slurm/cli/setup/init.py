"""`verl-slurm init`: asks up to six questions, reads the cluster, and writes a first configuration.

Without a terminal nothing is asked, and with an option that answers a question neither. Each answer is judged at once
by the check that `submit` will make.
"""

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.errors import ConfigError, DataError, NoRoom, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import create_file
from verl_slurm.base.keys import new_key_file, read_key_file
from verl_slurm.base.shipped import example, shipped
from verl_slurm.cli.options import PLACE, Whole, exits
from verl_slurm.cli.setup import cluster_places
from verl_slurm.cli.setup.first_config import (
    CHANGE,
    MAX_NEW_TOKENS,
    MOST_NODES,
    MOST_RANKS,
    Answers,
    first_config,
    first_reward,
    name_of,
)
from verl_slurm.cli.show import render
from verl_slurm.config.families import max_positions
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.submit.checks.data import recognize
from verl_slurm.submit.checks.inputs import absolute, absolute_reward, check_guest, check_names, check_reward
from verl_slurm.submit.checks.model_families import said_of
from verl_slurm.submit.checks.model_files import check_model
from verl_slurm.submit.checks.verl import check_input
from verl_slurm.submit.relative_paths import Places
from verl_slurm.verl.inputs import Input, Kind, is_remote

_KINDS = ("ppo", "grpo", "loop", "verl")
_REWARD = "python:reward.py:score"
_NONE = "-"
"""An answer: there is none."""
_GO_WITH = {
    "model": ("ppo", "grpo", "verl"),
    "data": ("ppo", "grpo", "verl"),
    "answers": ("ppo", "grpo"),
    "reward": ("ppo", "grpo"),
    "program": ("loop",),
}
"""The loops that an option has a meaning for."""
_KEYS_OF_VERL: dict[Kind, str] = {"data": "data.train_files", "model": "actor_rollout_ref.model.path"}
_SUFFIXES_OF_VERL = (".parquet", ".json", ".jsonl")
"""As `RLHFDataset` of verl 0.9.1 tells files apart."""


_EXITS = (
    ExitCode.CONFIG,
    ExitCode.DATA,
    ExitCode.PERMISSION,
    ExitCode.NOT_FOUND,
    ExitCode.NO_ROOM,
    ExitCode.KEY,
)


@click.command(
    epilog=exits(*_EXITS)
    + "\n\nThe file is the same as an answer of Enter to each question would make it, where an option is left out."
)
@click.argument("file", type=PLACE, default=Path("my.yaml"), metavar="[FILE]")
@click.option(
    "--for",
    "kind",
    type=click.Choice(_KINDS),
    help="ppo, grpo: our own trainer. loop: a PyTorch program of yours. verl: the package verl.  [default: grpo]",
)
@click.option("--model", help="A Hugging Face directory; for verl also a name of the hub.")
@click.option("--data", help="A directory of prompts, or one file.")
@click.option("--answers", help="The column of the answers, as data.answer_key; for ppo and grpo.")
@click.option("--reward", help="python:FILE.py:FUNCTION, classifier:DIR, ...; for ppo and grpo.")
@click.option("--program", help="For loop: your program and its arguments, as one word.")
@click.option("--partition", help="Slurm's; default: Slurm's own default.")
@click.option("--nodes", type=Whole(1, MOST_NODES), help="Default: 1.")
@click.option("--ranks", type=Whole(1, MOST_RANKS), help="On each node, one a GPU; default: its GPUs.")
@click.option(
    "--key",
    type=PLACE,
    metavar="FILE",
    help="Write no configuration: make a key in FILE, 0600; of one that is there, show the id.",
)
@click.option(
    "--ask/--no-ask",
    default=None,
    help="Ask, or do not. Default: on a terminal, if no option other than --for is given.",
)
def init(file: Path, kind: str | None, key: Path | None, ask: bool | None, **given: Any) -> None:
    """Write FILE (default my.yaml), a commented configuration for your own model and data.

    On a terminal up to six questions are asked: the loop, its model, data and reward or its program, and where to
    train. The defaults come from this machine and from Slurm, if it is here: partitions, GPUs, time limits, what a
    preemption leaves. With the answers in it the file passes `verl-slurm submit FILE --dry-run`.

    Without a terminal nothing is asked. Then, if no option answers a question, lines marked CHANGE are yours to fill
    in. An existing file is never overwritten.

    \b
    verl-slurm init my.yaml
    verl-slurm init my.yaml --for verl --no-ask      # with lines to fill in
    verl-slurm init my.yaml --model models/qwen --data data --partition gpu --nodes 2
    verl-slurm init --key ~/.verl-slurm/run.key
    """
    if key is not None:
        is_there = os.path.lexists(key)
        found = read_key_file(key) if is_there else new_key_file(key)
        render.line(f"{found.id}  {key}{', which is there already' if is_there else ''}")
        return
    # By os.path, to which a name that is too long is one that is not there.
    if os.path.lexists(file):
        raise _in_the_way(file)
    if not os.path.isdir(file.parent):
        raise PermissionRefused("no such directory", where=file.parent, remedy="make it first")
    answered = any(value is not None for value in given.values())
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if ask and not terminal:
        raise click.UsageError("--ask needs a terminal, and there is none.")
    if ask is None:
        ask = terminal and not answered
    asker = _Asker(file, given | {"kind": kind}, ask=ask)
    answers = _ask_all(asker) if ask or answered else _of_kind(asker, kind or "grpo")
    name = name_of(file.stem)
    text = _schema_line() + first_config(answers, name)
    beside = file.parent / "reward.py"
    _write(file, text)
    rows: list[tuple[str, object]] = [("written", file)]
    if answers.reward == _REWARD and not beside.exists():
        try:
            _write(beside, first_reward(name, has_answers=answers.answer_key is not None))
        except BaseException:
            file.unlink()  # it names a reward that is not there, and a retry would find it in the way
            raise
        rows.append(("reward", f"{beside}: a first one, yours to change"))
    if answers.answer_key is None and answers.kind in ("ppo", "grpo"):
        known = f"the data has {answers.keys}" if answers.keys else "the data has none"
        rows.append(("answers", f"{known}; answer_key is null, so the reward gets none"))
    if CHANGE in text:
        rows.append(("fill in", f"the lines marked {CHANGE} (docs/first-run.md)"))
    rows.append(("check it", f"{_submit(file, answers)} --dry-run"))
    rows.append(("start it", f"{_submit(file, answers)} --wait"))
    render.fields(rows)


def _schema_line() -> str:
    """Returns the comment by which editors complete keys; nothing where the JSON Schema is not installed."""
    schema = Path(shipped("configs/schema.json"))
    # A URI, because a path with a space would end at it.
    return f"# yaml-language-server: $schema={schema.as_uri()}\n" if schema.is_absolute() else ""


def _in_the_way(file: Path) -> PermissionRefused:
    return PermissionRefused(
        "something is in the way", where=file, remedy="choose another FILE, or move it away"
    )


def _write(file: Path, text: str) -> None:
    try:
        made = create_file(file, text.encode())
    except OSError as error:
        refusal = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT) else PermissionRefused
        remedy = "choose another FILE"
        raise refusal("it cannot be written", where=file, found=error.strerror, remedy=remedy) from None
    if not made:
        raise _in_the_way(file)


def _submit(file: Path, answers: Answers) -> str:
    """Returns the command that submits the file from here."""
    word, place = str(file), answers.place
    # Otherwise taken for an option, or for the shipped example of that name.
    word = f"./{word}" if word.startswith("-") or example(word) else word
    # With Slurm a place has a partition. Without one, an sbatch that reaches no cluster would be an error.
    local = shutil.which("sbatch") is None if place is None else place.partition is None
    return f"verl-slurm submit {shlex.quote(word)}{' --cluster local' * local}"


class _Asker:
    """Collects the answers: each from an option, from the user, or by default, and judged.

    Args:
        file: that is to be written.
        given: the options by name; None: not given.
        ask: there is a user to ask.
    """

    def __init__(self, file: Path, given: dict[str, Any], *, ask: bool) -> None:
        self.file, self.given, self._ask = file, given, ask
        self.answers = Answers()

    def answer(
        self,
        option: str,
        question: str,
        default: str | None,
        judge: Callable[["_Asker", str], Answers],
    ) -> None:
        """Puts one more answer into `answers`; none without an option, a user and a default that fits.

        Raises:
            VerlSlurmError: the option's answer is refused. A user is told so, and asked again.
        """
        if self.given.get(option) is not None:
            self.answers = self._judged(judge, str(self.given[option]))
            return
        usual = self.answers
        try:
            usual = usual if default is None else self._judged(judge, default)
        except VerlSlurmError:
            default = None  # found by its name alone, not asked for
        if not self._ask:
            self.answers = usual
            return

        def judged(text: str) -> Answers:
            try:
                return usual if text == default else self._judged(judge, text.strip())
            except VerlSlurmError as error:
                error.remedy = None  # it names keys of a file that is not written yet
                raise click.UsageError(error.one_line()) from None

        # On standard error, as all questions: standard output is for the answer.
        self.answers = click.prompt(question, default=default, value_proc=judged, err=True)

    def _judged(self, judge: Callable[["_Asker", str], Answers], text: str) -> Answers:
        try:
            return judge(self, text)
        except OSError as error:
            raise PermissionRefused("it cannot be read", where=text, found=error.strerror) from None

    def say(self, text: str) -> None:
        """Shows what a user should know before the next question."""
        if self._ask:
            render.warning(text)

    def with_answer(self, **fields: Any) -> Answers:
        """Returns the answers so far, and these."""
        return msgspec.structs.replace(self.answers, **fields)

    def written(self, place: Path) -> str:
        """Returns a path as it stands in the file: relative to its directory, if it is below."""
        above, full = Path(os.path.abspath(self.file)).parent, Path(os.path.abspath(place))
        return str(full.relative_to(above) if full.is_relative_to(above) else full)


def _of_kind(_: _Asker, word: str) -> Answers:
    if word not in _KINDS:
        raise ConfigError("no such loop", found=word, expected=", ".join(_KINDS), remedy="choose one")
    return Answers(kind=word)  # type: ignore[arg-type] # as just checked


def _ask_all(asker: _Asker) -> Answers:
    asker.say("ppo, grpo: our own trainer; loop: a PyTorch program of yours; verl: the package verl")
    asker.answer("kind", "1. Which loop trains", "grpo", _of_kind)
    kind = asker.answers.kind
    for option, kinds in _GO_WITH.items():
        if asker.given[option] is not None and kind not in kinds:
            raise click.UsageError(f"--{option} does not go with --for {kind}.")
    if kind == "loop":
        program = "train.py" if Path("train.py").is_file() else None
        asker.answer("program", "2. Your program and its arguments", program, _program)
    else:
        models = sorted([*Path().glob("*/config.json"), *Path().glob("models/*/config.json")])
        model = str(models[0].parent) if models else None
        of_hub = (
            "or its name on the hub" if kind == "verl" else "as `hf download NAME --local-dir DIR` makes it"
        )
        asker.answer("model", f"2. Directory of the model, {of_hub}", model, _model)
        data = "data" if Path("data").is_dir() else None
        asker.answer("data", "3. Directory or file of the data", data, _data)
        if kind != "verl" and (asker.answers.keys or asker.given["answers"] is not None):
            asker.say(f"no column of the data is known to hold answers: {asker.answers.keys}")
            asker.answer("answers", f"   Column of the answers, or {_NONE}", None, _answers)
    if kind in ("ppo", "grpo"):
        asker.answer("reward", "4. What scores a response", _REWARD, _reward)
    _ask_where(asker, {"loop": 3, "verl": 4}.get(kind, 5))
    return asker.answers


def _ask_where(asker: _Asker, number: int) -> None:
    """Asks for nodes, GPUs and partition in one question, since one bounds the others."""
    given = asker.given
    offers = cluster_places.offers(given["partition"], render.warning)
    for offer in offers:
        asker.say(f"partition {offer.line}")
    ranks = given["ranks"] or cluster_places.usual_ranks(offers, given["partition"])
    named = given["partition"] or (offers[0].name if offers else "")

    def judge(asker: _Asker, text: str) -> Answers:
        place = cluster_places.place(text, offers)
        notes = cluster_places.notes(place, offers, _config(asker.with_answer(place=place)))
        return asker.with_answer(place=msgspec.structs.replace(place, notes=notes))

    default = f"{given['nodes'] or 1}x{ranks} {named}".strip()
    if given["nodes"] or given["ranks"] or given["partition"]:
        given["place"] = default
    what = "Nodes x GPUs of each" if any(one.gpus for one in offers) else "Nodes x ranks on each"
    question = f"{number}. {what}{', partition' * bool(offers)}"
    asker.answer("place", question, default, judge)


def _config(answers: Answers) -> RunConfig:
    return parse_config(first_config(answers, "my").encode(), "the answers")


def _absolute(asker: _Asker, answers: Answers) -> RunConfig:
    return absolute(_config(answers), Places(Path.cwd(), asker.file))


def _model(asker: _Asker, text: str) -> Answers:
    if asker.answers.kind == "verl":
        return asker.with_answer(model=_of_verl(asker, "model", text))
    if text.startswith(BUILTIN):
        full, found = text, asker.with_answer(model=text)
        check_names(_config(found))
    else:
        full = os.path.abspath(Path(text).expanduser())
        check_model("model.path", Path(full), text)
        found = asker.with_answer(model=asker.written(Path(full)))
    if (limit := max_positions(said_of(full))) is None:
        return found
    # At least half of it; the data may need more.
    prompt = min(found.max_prompt_tokens, max(limit // 2, limit - MAX_NEW_TOKENS))
    return msgspec.structs.replace(found, max_tokens=limit, max_prompt_tokens=prompt)


def _of_verl(asker: _Asker, kind: Kind, text: str) -> str:
    """Returns a place that verl is to read as it is written in the file."""
    place = Path(text).expanduser()
    # Of a model, what is not here may be a name of the hub.
    here = place.exists() or (kind == "data" and not is_remote(text))
    full = os.path.abspath(place) if here else text
    check_input(Input(kind=kind, key=_KEYS_OF_VERL[kind], place=full, is_default=False))
    return asker.written(place) if here else text


def _data(asker: _Asker, text: str) -> Answers:
    place = Path(text).expanduser()
    if asker.answers.kind == "verl":
        names = [f"{text}/{name}.parquet" for name in ("train", "test")] if place.is_dir() else [text] * 2
        train, test = [_of_verl(asker, "data", name) for name in names]
        if not train.endswith(_SUFFIXES_OF_VERL):
            expected = " or ".join(_SUFFIXES_OF_VERL)
            raise DataError("verl cannot read it", where=text, found=Path(text).suffix, expected=expected)
        return asker.with_answer(train_files=train, val_files=test)
    if text.startswith(BUILTIN):
        found = asker.with_answer(data_root=text)
        check_names(_config(found))
        return found
    root, files = (place.parent, place.name) if place.is_file() else (place, "")
    found = asker.with_answer(data_root=asker.written(root), data_files=files)
    return _recognized(asker, found)


def _recognized(asker: _Asker, found: Answers, answer_key: str | None = None) -> Answers:
    config, there = recognize(_absolute(asker, found), answer_key)
    keys = ("prompt_key", "answer_key", "max_prompt_tokens")
    return msgspec.structs.replace(found, keys=there, **{key: getattr(config.data, key) for key in keys})


def _answers(asker: _Asker, text: str) -> Answers:
    if text == _NONE:
        return asker.with_answer(keys="", answer_key=None)
    root = asker.answers.data_root
    if not root or root.startswith(BUILTIN):
        return asker.with_answer(answer_key=text)
    return _recognized(asker, asker.answers, text)


def _reward(asker: _Asker, text: str) -> Answers:
    # The default is written beside the file, if it is not there.
    if text != _REWARD or (asker.file.parent / "reward.py").exists():
        check_reward(absolute_reward(text, Path(os.path.abspath(asker.file)).parent))
    return asker.with_answer(reward=text)


def _program(asker: _Asker, text: str) -> Answers:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError("not a command", found=f"{text}: {error}", remedy="close the quote") from None
    if words and words[0].endswith(".py"):
        words[0] = asker.written(Path(words[0]).expanduser())
    found = asker.with_answer(program=tuple(words))
    check_guest(_absolute(asker, found))
    return found
