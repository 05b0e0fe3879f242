"""`verl-slurm init`: asks five questions, reads the cluster, and writes a first configuration.

Without a terminal nothing is asked, and with an option that answers a question neither. Each answer is judged at once
by the check that `submit` will make.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from verl_slurm.base.errors import ConfigError, NotFound, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.options import PLACE, Whole, exits
from verl_slurm.cli.setup.first_config import CHANGE, Answers, first_config, first_reward, name_of
from verl_slurm.cli.show import render

if TYPE_CHECKING:
    from verl_slurm.config.schema import RunConfig

__all__ = ["init"]

_KINDS = ("ppo", "grpo", "loop", "verl")
_REWARD = "python:reward.py:score"


@click.command(
    epilog=exits(ExitCode.CONFIG, ExitCode.DATA, ExitCode.PERMISSION, ExitCode.NOT_FOUND)
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
@click.option("--reward", help="python:FILE.py:FUNCTION, classifier:DIR, ...; for ppo and grpo.")
@click.option("--program", help="For loop: your program and its arguments, as one word.")
@click.option("--partition", help="Slurm's; default: Slurm's own default.")
@click.option("--nodes", type=Whole(1, 10_000), help="Default: 1.")
@click.option("--ranks", type=Whole(1, 1024), help="On each node, one a GPU; default: its GPUs.")
@click.option(
    "--ask/--no-ask", default=None, help="Ask, or do not. Default: on a terminal, without other options."
)
def init(file: Path, kind: str | None, ask: bool | None, **given: Any) -> int:
    """Write FILE (default my.yaml), a commented configuration for your own model and data.

    On a terminal five questions are asked: the loop, the model, the data, the reward, and where to train. The defaults
    come from this machine and from Slurm, if it is here: partitions, GPUs, time limits, what a preemption leaves. With
    the answers in it the file passes `verl-slurm submit FILE --dry-run`.

    Without a terminal nothing is asked. Then, if no option answers a question, lines marked CHANGE are yours to fill
    in. An existing file is never overwritten.

    \b
    verl-slurm init my.yaml
    verl-slurm init my.yaml --for verl --no-ask      # with lines to fill in
    verl-slurm init my.yaml --model models/qwen --data data --partition gpu --nodes 2
    """
    if file.is_symlink() or file.exists():
        raise _in_the_way(file)
    if not file.parent.is_dir():
        raise PermissionRefused("no such directory", where=file.parent, remedy="make it first")
    answered = any(value is not None for value in given.values())
    if ask is None:
        ask = not answered and sys.stdin.isatty() and sys.stderr.isatty()
    asker = _Asker(given | {"kind": kind}, ask=ask)
    answers = _answers(asker, file) if ask or answered else _of_kind(kind or "grpo")
    name = name_of(file.stem)
    text = first_config(answers, name)
    beside = file.parent / "reward.py"
    # O_EXCL decides, and no look before it: a file that appears in between is not overwritten either.
    _write(file, text)
    rows: list[tuple[str, object]] = [("written", file)]
    if answers.reward == _REWARD and not beside.exists():
        _write(beside, first_reward(name))
        rows.append(("reward", f"{beside}: a first one, yours to change"))
    if CHANGE in text:
        rows.append(("fill in", f"the lines marked {CHANGE} (docs/first-run.md)"))
    rows.append(("check it", f"verl-slurm submit {shlex.quote(str(file))} --dry-run"))
    rows.append(("start it", f"verl-slurm submit {shlex.quote(str(file))} --wait"))
    render.fields(rows)
    return ExitCode.OK


def _in_the_way(file: Path) -> PermissionRefused:
    return PermissionRefused(
        "something is in the way", where=file, remedy="choose another FILE, or move it away"
    )


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise _in_the_way(file) from None


class _Asker:
    """Gets the answer to a question from an option, from the user, or by default, and has it judged.

    Args:
        given: the options by name; None: not given.
        ask: there is a user to ask.
    """

    def __init__(self, given: dict[str, Any], *, ask: bool) -> None:
        self.given, self._ask = given, ask

    def answer(
        self,
        option: str,
        question: str,
        default: str | None,
        judge: Callable[[str], Answers],
        so_far: Answers,
    ) -> Answers:
        """Returns the answers so far with this one in them; unchanged if there is none.

        Raises:
            VerlSlurmError: the option's answer is refused. A user is told so, and asked again.
        """
        if self.given.get(option) is not None:
            return judge(str(self.given[option]))
        if not self._ask:
            return so_far if default is None else judge(default)

        def judged(text: str) -> Answers:
            try:
                return judge(text.strip())
            except VerlSlurmError as error:
                raise click.UsageError(error.one_line()) from None

        # On standard error, as all questions: standard output is for the answer.
        found: Answers = click.prompt(question, default=default, value_proc=judged, err=True)
        return found

    def say(self, text: str) -> None:
        """Shows what a user should know before the next question."""
        if self._ask:
            render.warning(text)


def _of_kind(word: str) -> Answers:
    if word not in _KINDS:
        raise ConfigError("no such loop", found=word, expected=", ".join(_KINDS), remedy="choose one")
    return Answers(kind=word)  # type: ignore[arg-type] # as just checked


def _answers(asker: _Asker, file: Path) -> Answers:
    asker.say("ppo, grpo: our own trainer; loop: a PyTorch program of yours; verl: the package verl")
    so_far = asker.answer("kind", "1. Which loop trains", "grpo", _of_kind, Answers())
    if so_far.kind == "loop":
        program = "train.py" if Path("train.py").is_file() else None
        so_far = asker.answer(
            "program",
            "2. Your program and its arguments",
            program,
            lambda t: _program(so_far, file, t),
            so_far,
        )
    else:
        so_far = asker.answer(
            "model", "2. Directory of the model", _a_model(), lambda t: _model(so_far, file, t), so_far
        )
        data = "data" if Path("data").is_dir() else None
        so_far = asker.answer(
            "data", "3. Directory or file of the data", data, lambda t: _data(so_far, file, t), so_far
        )
    if so_far.kind in ("ppo", "grpo"):
        so_far = asker.answer(
            "reward", "4. What scores a response", _REWARD, lambda t: _reward(so_far, file, t), so_far
        )
    return _where(asker, so_far)


def _where(asker: _Asker, so_far: Answers) -> Answers:
    """Asks for nodes, GPUs and partition in one question, since one bounds the others."""
    from verl_slurm.cli.setup import cluster_places

    given = asker.given
    offers = cluster_places.offers(given["partition"], render.warning)
    for offer in offers:
        asker.say(f"partition {offer.line}")
    ranks = given["ranks"] or cluster_places.usual_ranks(offers, given["partition"])
    named = given["partition"] or (offers[0].name if offers else "")
    wished = f"{given['nodes'] or 1}x{ranks} {named}".strip()

    def judge(text: str) -> Answers:
        place = cluster_places.place(text, offers)
        found = msgspec.structs.replace(so_far, place=place)
        place = msgspec.structs.replace(place, notes=cluster_places.notes(place, offers, _config(found)))
        return msgspec.structs.replace(found, place=place)

    number = {"loop": 3, "verl": 4}.get(so_far.kind, 5)
    what = "Nodes x GPUs of each" if any(one.gpus for one in offers) else "Nodes x ranks on each"
    return asker.answer("place", f"{number}. {what}{', partition' * bool(offers)}", wished, judge, so_far)


def _config(answers: Answers) -> "RunConfig":
    from verl_slurm.config.load import parse_config

    return parse_config(first_config(answers, "my").encode(), "the answers")


def _written(file: Path, place: Path) -> str:
    """Returns a path as it stands in FILE: relative to its directory, if it is below."""
    above, full = Path(os.path.abspath(file)).parent, Path(os.path.abspath(place.expanduser()))
    return str(full.relative_to(above) if full.is_relative_to(above) else full)


def _a_model() -> str | None:
    found = sorted([*Path().glob("*/config.json"), *Path().glob("models/*/config.json")])
    return str(found[0].parent) if found else None


def _model(so_far: Answers, file: Path, text: str) -> Answers:
    from verl_slurm.config.schema import BUILTIN
    from verl_slurm.submit.checks.inputs import check_names
    from verl_slurm.submit.checks.model_files import check_model

    place = Path(text).expanduser()
    if so_far.kind == "verl" and not place.exists():
        return msgspec.structs.replace(so_far, model=text)  # a name of the hub; submit says so
    if text.startswith(BUILTIN):
        found = msgspec.structs.replace(so_far, model=text)
        check_names(_config(found))
        return found
    check_model("model.path", Path(os.path.abspath(place)), text)
    return msgspec.structs.replace(so_far, model=_written(file, place))


def _data(so_far: Answers, file: Path, text: str) -> Answers:
    from verl_slurm.config.schema import BUILTIN
    from verl_slurm.submit.checks.data import recognize
    from verl_slurm.submit.checks.inputs import absolute
    from verl_slurm.submit.relative_paths import Places

    replace = msgspec.structs.replace
    place = Path(text).expanduser()
    if so_far.kind == "verl":
        return _data_of_verl(so_far, file, place)
    if text.startswith(BUILTIN):
        return replace(so_far, data_root=text)
    one = place.is_file()
    found = replace(
        so_far,
        data_root=_written(file, place.parent if one else place),
        data_files=place.name if one else "",
    )
    data = recognize(absolute(_config(found), Places(Path.cwd(), file))).data
    return replace(
        found,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        max_prompt_tokens=data.max_prompt_tokens,
    )


def _data_of_verl(so_far: Answers, file: Path, place: Path) -> Answers:
    held_out: list[Path] = []
    train = place
    if place.is_dir():
        files = sorted(place.glob("*.parquet"))
        held_out = [path for path in files if path.name.startswith(("test", "val"))]
        others = [path for path in files if path not in held_out]
        if not others:
            raise NotFound("no data", where=place, expected="train.parquet in it", remedy="name the file")
        train = others[0]
    elif not place.exists():
        raise NotFound("no such data", where=place, remedy="name a directory, or a file")
    return msgspec.structs.replace(
        so_far,
        train_files=_written(file, train),
        # verl wants one, and evaluates on the training data then.
        val_files=_written(file, held_out[0] if held_out else train),
    )


def _reward(so_far: Answers, file: Path, text: str) -> Answers:
    from verl_slurm.submit.checks.inputs import absolute_reward, check_reward

    # The default is written beside FILE, if it is not there.
    if text != _REWARD or (file.parent / "reward.py").exists():
        check_reward(absolute_reward(text, Path(os.path.abspath(file)).parent))
    return msgspec.structs.replace(so_far, reward=text)


def _program(so_far: Answers, file: Path, text: str) -> Answers:
    from verl_slurm.submit.checks.inputs import absolute, check_guest
    from verl_slurm.submit.relative_paths import Places

    words = shlex.split(text)
    if words and words[0].endswith(".py"):
        words[0] = _written(file, Path(words[0]))
    found = msgspec.structs.replace(so_far, program=tuple(words))
    check_guest(absolute(_config(found), Places(Path.cwd(), file)))
    return found
