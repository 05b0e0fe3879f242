"""`verl-slurm init`: asks up to six questions, reads the cluster, and writes a first configuration.

Each answer is judged at once by the check that `submit` will make.
"""

import asyncio
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import click
import jinja2
import msgspec

from verl_slurm.base.errors import (
    ConfigError,
    DataError,
    NoRoom,
    NotFound,
    PermissionRefused,
    SlurmMissing,
    VerlSlurmError,
)
from verl_slurm.base.files import create_file
from verl_slurm.base.keys import new_key_file, read_key_file
from verl_slurm.base.one_line import counted
from verl_slurm.base.shipped import example, shipped
from verl_slurm.checks.cluster_rules import judge_cluster
from verl_slurm.cli.command_options import PLACE, Whole, exits, option
from verl_slurm.cli.show import render
from verl_slurm.cli.show.render import span
from verl_slurm.config.families import max_positions
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import BUILTIN, RunConfig
from verl_slurm.slurm.devcluster.machine import real_gpus
from verl_slurm.slurm.facts import PartitionFacts
from verl_slurm.slurm.parse import parse_gpus
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.checks.model_and_reward import (
    check_guest,
    check_names,
    check_reward,
)
from verl_slurm.submit.checks.model_files import check_model, said_of
from verl_slurm.submit.checks.prompt_data import recognize
from verl_slurm.submit.checks.slurm_answers import partition_complaint
from verl_slurm.submit.checks.verl import check_input
from verl_slurm.submit.relative_paths import Places, absolute, absolute_reward
from verl_slurm.verl.verl_inputs import Input, Kind as InputKind, is_remote

Kind = Literal["ppo", "grpo", "loop", "verl"]
CHANGE = "CHANGE"
"""Marks a line that is the user's to fill in."""
MAX_NEW_TOKENS = 256
MOST_NODES, MOST_RANKS = 10_000, 1024
"""The latter on one node."""
_COMMENT_AT = 32
# Prompts of a step of verl's, about.
_BATCH = 64


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run is to train, by what Slurm or the machine says."""

    partition: str | None = None
    """None: the default one, or no Slurm."""
    nodes: int = 1
    ranks_per_node: int = 2
    gpus_per_node: int = 0
    cpus_per_node: int = 8
    time_limit_min: int = 240
    signal_lead_s: int = 120
    notes: tuple[str, ...] = ()
    """What is known of the partition: each becomes a comment."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run before its first configuration is written; empty: not known."""

    kind: Kind = "grpo"
    model: str = ""
    reward: str = ""
    data_root: str = ""
    """A directory; `data_files` names files below it, or is empty."""
    data_files: str = ""
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    keys: str = ""
    """Those of the data, if none of them is known to hold answers."""
    max_prompt_tokens: int = 512
    max_tokens: int | None = None
    """Of the longest sequence that the model was made for."""
    train_files: str = ""
    val_files: str = ""
    """The last two are verl's."""
    program: tuple[str, ...] = ()
    place: ClusterPlace | None = None


def name_of(stem: str) -> str:
    """Returns a run's name from that of a file, which may hold what a run's may not."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:64] or "my-run"


def first_reward(name: str, *, has_answers: bool = True) -> str:
    # Every text contains an empty answer: such a reward would be 1 always, and teach nothing.
    guard = "" if has_answers else _GUARD
    return f'''\
"""The reward of {name}: one float for each response. Written by `verl-slurm init`; docs/rewards.md says more."""


def score(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
{guard}\
    # A beginning: 1 for a response that contains the answer. A policy soon learns to write many numbers.
    return [float(answer in response) for response, answer in zip(responses, answers, strict=True)]
'''


_GUARD = f"""\
    # {CHANGE}: the data has no answers (data.answer_key is null), so each of `answers` is empty text.
    if not any(answers):
        raise ValueError("reward.py: say what makes a response good, or set data.answer_key")
"""


def first_config(answers: Answers, name: str) -> str:
    place = answers.place or ClusterPlace()
    ranks = place.nodes * place.ranks_per_node
    left = 0 if answers.max_tokens is None else answers.max_tokens - answers.max_prompt_tokens
    return _template().render(
        a=answers,
        name=name,
        place=place,
        ranks=ranks,
        # Of verl's step and of an update: the number of ranks has to divide both.
        batch=max(_BATCH // ranks, 1) * ranks,
        # If prompts leave no room, `submit` tells it.
        new_tokens=left if 0 < left < MAX_NEW_TOKENS else MAX_NEW_TOKENS,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(  # noqa: S701 - YAML, whose values `yaml` quotes
        loader=jinja2.PackageLoader("verl_slurm.cli.setup", "assets"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"yaml": _yaml, "noted": lambda text, note: f"{text:<{_COMMENT_AT - 2}}  # {note}"}
    return environment.get_template("first_config.yaml.jinja")


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*(?:[:][A-Za-z0-9_./@+-]+)*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"})


def _yaml(value: str) -> str:
    # Quoted unless it is plainly a text: a quote is never wrong, and a missing one may be.
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return msgspec.json.encode(value).decode()


_USUAL_LIMIT_MIN = 240
_USUAL_LEAD_S = 120
_LEAST_LEAD_S = 10
_RANKS_ON_CPUS = 2
_CPUS = 8
# Partitions that are shown, and asked about one by one.
_MOST = 12
_TOPICS = ("requeue", "preemption", "time limit")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One partition with the GPUs of its nodes."""

    facts: PartitionFacts
    gpus: int
    """Of a node, by the kind that most of its usable nodes have."""
    conf: dict[str, str]
    """`scontrol show config`."""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def line(self) -> str:
        facts = self.facts
        limit = "without a limit" if facts.max_time_s is None else f"up to {span(facts.max_time_s)}"
        usual = ", the default" if facts.is_default else ""
        gpus = f", {counted(self.gpus, 'GPU')} on each" if self.gpus else ""
        down = "" if facts.state == "UP" else f", {facts.state} now"
        return f"{facts.name}: {counted(facts.total_nodes, 'node')}{gpus}, jobs {limit}{usual}{down}"


def find_offers(wanted: str | None, warn: Callable[[str], None]) -> list[Offer]:
    """Returns the partitions that take jobs, or the wanted one (NotFound), the default first, those that are DOWN last;
    none without Slurm.
    """
    try:
        return asyncio.run(_ask(wanted))
    except SlurmMissing as error:
        # Nothing is wrong with a machine without Slurm, unless a partition was named.
        if wanted is not None or "there is no" not in error.what:
            said = error.found or error.what
            warn(f"written without Slurm's help: {said}; {error.remedy}")
        return []


async def _ask(wanted: str | None) -> list[Offer]:
    client = SlurmClient()
    found = [await client.partition(wanted)] if wanted else await client.partitions()
    conf = await client.config()
    open_to = [facts for facts in found if facts.takes_jobs and facts.total_nodes]
    if not open_to:
        raise NotFound("no partition takes jobs", where=wanted, remedy="`sinfo -s` shows their states")
    # One that is DOWN may be so for an hour, or for good.
    open_to.sort(key=lambda facts: (facts.state != "UP", not facts.is_default))
    return [Offer(facts=facts, gpus=await _gpus(client, facts.name), conf=conf) for facts in open_to[:_MOST]]


async def _gpus(client: SlurmClient, partition: str) -> int:
    kinds = [parse_gpus(kind) for kind in (await client.usable_nodes(partition)).values()]
    return max(set(kinds), key=kinds.count, default=0)


def usual_ranks(given: Sequence[Offer], partition: str | None) -> int:
    if given:
        offer = next((one for one in given if one.name == partition), given[0])
        return offer.gpus or min(_RANKS_ON_CPUS, _cpus_of(offer))
    return len(real_gpus()) or _RANKS_ON_CPUS


def parse_place(text: str, given: Sequence[Offer]) -> ClusterPlace:
    """Returns the place that `2x8 gpu` describes: nodes, ranks on each, a partition. Without `given`, here.

    Raises:
        ConfigError: another form, or more ranks than a node has GPUs.
        NotFound: no such partition.
    """
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*[x*]\s*([0-9]{1,4})(?:[\s,]+([\w.-]+))?\s*", text, re.ASCII)
    nodes, ranks, name = (int(match[1]), int(match[2]), match[3]) if match else (0, 0, None)
    if not (1 <= nodes <= MOST_NODES and 1 <= ranks <= MOST_RANKS):
        expected = f"e.g. 1x8 or 2x8 gpu, at most {MOST_NODES}x{MOST_RANKS}"
        raise ConfigError("not a place", found=text, expected=expected, remedy="write it so")
    if not given:
        return ClusterPlace(
            partition=name,
            nodes=nodes,
            ranks_per_node=ranks,
            gpus_per_node=ranks if len(real_gpus()) else 0,
            cpus_per_node=min(_CPUS, os.cpu_count() or 1),
        )
    offer = next((one for one in given if name in (None, one.name)), None)
    if offer is None:
        listed = ", ".join(one.name for one in given)
        raise NotFound("no such partition", where=name, expected=listed, remedy="choose one of them")
    if offer.gpus and ranks > offer.gpus:
        raise ConfigError("a node has fewer GPUs", found=ranks, expected=f"at most {offer.gpus}")
    cpus, max_s = _cpus_of(offer), offer.facts.max_time_s
    limit_min = _USUAL_LIMIT_MIN if max_s is None else max(min(_USUAL_LIMIT_MIN, max_s // 60), 1)
    return ClusterPlace(
        partition=offer.name,
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=ranks if offer.gpus else 0,
        # With GPUs, the share of the node that they are.
        cpus_per_node=max(cpus * ranks // offer.gpus, 1) if offer.gpus else min(_CPUS, cpus),
        time_limit_min=limit_min,
        # Of a short limit a quarter: the job is to train, too.
        signal_lead_s=max(min(_USUAL_LEAD_S, limit_min * 60 // 4), _LEAST_LEAD_S),
    )


def partition_notes(chosen: ClusterPlace, given: Sequence[Offer], config: RunConfig) -> tuple[str, ...]:
    """Describes the partition, and what a preemption and the time limit there leave for a save."""
    offer = next((one for one in given if one.name == chosen.partition), None)
    if offer is None:
        return ()
    if complaint := partition_complaint(config, offer.facts):
        remedy = "choose less, or another partition"
        raise ConfigError("the partition cannot run this", where=offer.name, found=complaint, remedy=remedy)
    judged = judge_cluster(offer.conf, offer.facts, config, None)
    return (offer.line, *(f"{one.topic}: {one.found}" for one in judged if one.topic in _TOPICS))


def _cpus_of(offer: Offer) -> int:
    return max(offer.facts.total_cpus // offer.facts.total_nodes, 1)


_KINDS = ("ppo", "grpo", "loop", "verl")
_REWARD = "python:reward.py:score"
# An answer: there is none.
_NONE = "-"
# The loops that an option has a meaning for.
_GO_WITH = {
    "model": ("ppo", "grpo", "verl"),
    "data": ("ppo", "grpo", "verl"),
    "answers": ("ppo", "grpo"),
    "reward": ("ppo", "grpo"),
    "program": ("loop",),
}
_KEYS_OF_VERL: dict[InputKind, str] = {"data": "data.train_files", "model": "actor_rollout_ref.model.path"}
# As `RLHFDataset` of verl 0.9.1 tells files apart.
_SUFFIXES_OF_VERL = (".parquet", ".json", ".jsonl")


@click.command(
    epilog=exits("CONFIG DATA PERMISSION NOT_FOUND NO_ROOM KEY")
    + "\n\nThe file is the same as an answer of Enter to each question would make it, where an option is left out."
)
@click.argument("file", type=PLACE, required=False, metavar="[FILE]")
@option(
    "--for",
    click.Choice(_KINDS),
    "ppo, grpo: our own trainer. loop: a PyTorch program of yours. verl: the package verl.  [default: grpo]",
    "kind",
)
@click.option("--model", help="A Hugging Face directory; for verl also a name of the hub.")
@click.option("--data", help="A directory of prompts, or one file.")
@click.option("--answers", help="The column of the answers, as data.answer_key; for ppo and grpo.")
@click.option("--reward", help="python:FILE.py:FUNCTION, classifier:DIR, ...; for ppo and grpo.")
@click.option("--program", help="For loop: your program and its arguments, as one word.")
@click.option("--partition", help="Slurm's; default: Slurm's own default.")
@option("--nodes", Whole(1, MOST_NODES), "Default: 1.")
@option("--ranks", Whole(1, MOST_RANKS), "On each node, one a GPU; default: its GPUs.")
@option(
    "--key",
    PLACE,
    "Write no configuration: make a key in FILE, 0600; of one that is there, show the id.",
    metavar="FILE",
)
@click.option(
    "--ask/--no-ask",
    default=None,
    help="Ask, or do not. Default: on a terminal, if no option other than --for is given.",
)
def init(file: Path | None, kind: str | None, key: Path | None, ask: bool | None, **given: Any) -> None:
    """Write FILE (default my.yaml), a commented configuration for your own model and data.

    On a terminal up to six questions are asked: the loop, its model, data and reward or its program, and where to
    train. The defaults come from this machine and from Slurm, if it is here: partitions, GPUs, time limits, what a
    preemption leaves. With the answers in it the file passes `verl-slurm submit FILE --dry-run`.

    Without a terminal nothing is asked. Then, if no option answers a question, lines marked CHANGE are yours to fill
    in. An existing file is never overwritten.

    With --key it makes a key for checkpoint.encryption: checkpoints and the rollout ledger are encrypted (AES-256-GCM)
    and signed (HMAC-SHA256) with it. Without its key a checkpoint is lost: keep a copy where the checkpoints are not.
    One key for each run: then a checkpoint of one run cannot pass for another's. The id is the one that manifests name.

    \b
    verl-slurm init my.yaml
    verl-slurm init my.yaml --for verl --no-ask      # with lines to fill in
    verl-slurm init my.yaml --model models/qwen --data data --partition gpu --nodes 2
    verl-slurm init --key ~/.verl-slurm/run.key
    """
    answered = any(value is not None for value in given.values())
    if key is not None:
        if answered or file or kind or ask is not None:
            raise click.UsageError("--key makes a key and no configuration: it goes with nothing else.")
        is_there = os.path.lexists(key)
        found = read_key_file(key) if is_there else new_key_file(key)
        render.line(f"{found.id}  {key}{', which is there already' if is_there else ''}")
        return
    file = file or Path("my.yaml")
    # By os.path, to which a name that is too long is one that is not there.
    if os.path.lexists(file):
        raise _in_the_way(file)
    if not os.path.isdir(file.parent):
        raise PermissionRefused("no such directory", where=file.parent, remedy="make it first")
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
    word, place = str(file), answers.place
    # Otherwise taken for an option, or for the shipped example of that name.
    word = f"./{word}" if word.startswith("-") or example(word) else word
    # With Slurm a place has a partition. Without one, an sbatch that reaches no cluster would be an error.
    local = shutil.which("sbatch") is None if place is None else place.partition is None
    return f"verl-slurm submit {shlex.quote(word)}{' --cluster local' * local}"


class _Asker:
    """Collects the answers: each from an option (`given`), from the user if there is one to `ask`, or by default."""

    def __init__(self, file: Path, given: dict[str, Any], *, ask: bool) -> None:
        self.file, self.given, self._ask = file, given, ask
        self.answers = Answers()

    def answer(
        self, option: str, question: str, default: str | None, judge: Callable[["_Asker", str], Answers]
    ) -> None:
        """Puts one more answer into `answers`; none without an option, a user and a default that fits."""
        if self.given.get(option) is not None:
            # A refused option ends the command; a user is told, and asked again.
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
        if self._ask:
            render.warning(text)

    def with_answer(self, **fields: Any) -> Answers:
        return msgspec.structs.replace(self.answers, **fields)

    def written(self, place: Path) -> str:
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
    for name, kinds in _GO_WITH.items():
        if asker.given[name] is not None and kind not in kinds:
            raise click.UsageError(f"--{name} does not go with --for {kind}.")
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
    given = asker.given
    offers = find_offers(given["partition"], render.warning)
    for offer in offers:
        asker.say(f"partition {offer.line}")
    ranks = given["ranks"] or usual_ranks(offers, given["partition"])
    named = given["partition"] or (offers[0].name if offers else "")

    def judge(asker: _Asker, text: str) -> Answers:
        place = parse_place(text, offers)
        notes = partition_notes(place, offers, _config(asker.with_answer(place=place)))
        return asker.with_answer(place=msgspec.structs.replace(place, notes=notes))

    # One question for all three, since one bounds the others.
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
        full = os.path.abspath(os.path.expanduser(text))
        check_model("model.path", Path(full), text)
        found = asker.with_answer(model=asker.written(Path(full)))
    if (limit := max_positions(said_of(full))) is None:
        return found
    # At least half of it; the data may need more.
    prompt = min(found.max_prompt_tokens, max(limit // 2, limit - MAX_NEW_TOKENS))
    return msgspec.structs.replace(found, max_tokens=limit, max_prompt_tokens=prompt)


def _of_verl(asker: _Asker, kind: InputKind, text: str) -> str:
    place = Path(os.path.expanduser(text))
    # Of a model, what is not here may be a name of the hub.
    here = place.exists() or (kind == "data" and not is_remote(text))
    full = os.path.abspath(place) if here else text
    check_input(Input(kind=kind, key=_KEYS_OF_VERL[kind], place=full, is_default=False))
    return asker.written(place) if here else text


def _data(asker: _Asker, text: str) -> Answers:
    place = Path(os.path.expanduser(text))
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
        words[0] = asker.written(Path(os.path.expanduser(words[0])))
    found = asker.with_answer(program=tuple(words))
    check_guest(_absolute(asker, found))
    return found
