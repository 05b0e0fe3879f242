"""`verl-slurm prune` and `tiers`: which checkpoints stay, and where."""

from dataclasses import replace
from pathlib import Path

import click
import msgspec

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import load_keys
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.best import Best
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.pruning import carry_out, look
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.tiers.fetch import fetch, fetch_newest
from verl_slurm.checkpoint.tiers.mover import Pass, look as look_at_tiers, sync
from verl_slurm.checkpoint.tiers.tier_plan import Action, TierCopy, last_good
from verl_slurm.cli.checkpoint.verify_command import lost_newer
from verl_slurm.cli.command_options import RUN, Whole, command, flag, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.submit.checks.resume_point import removed_by_living


@command("CORRUPT KEY NOT_FOUND")
@click.argument("run", type=RUN)
@option("--keep-last", Whole(min=1), "How many of the newest stay. Default: checkpoint.keep_last of the run.")
@option(
    "--keep-every",
    Whole(min=0),
    "One in every so many steps stays permanently, 0: none. Default: checkpoint.keep_every of the run.",
)
@option(
    "--keep-best",
    Whole(min=0),
    "The best so many by checkpoint.best_metric stay, 0: none. Default: checkpoint.keep_best of the run.",
)
@flag("--quarantined", "Remove what was set aside as damaged, too.")
@flag("--dry-run", "Print the plan, remove nothing.")
def prune(
    run: RunPaths,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    quarantined: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove checkpoints of RUN that are no longer needed, and say why each stays or goes.

    A run does this by itself after every save. By hand it frees room: with fewer to keep, or after a
    configuration that kept more. Checkpoints are read back from the newest on until one is good, every byte;
    what is newer than that one, or as new, always stays. Where none is good, nothing goes. --dry-run reads the
    same and prints the very plan that is carried out without it.

    What is torn or not ours is left alone, what is quarantined goes only with --quarantined, and the checkpoint
    that checkpoint.resume_from names stays.

    \b
    verl-slurm prune runs/big --dry-run
    verl-slurm prune runs/big --keep-last 1 --keep-every 1000
    """
    # The run's own retention, of which each option replaces one number.
    config = load_resolved(run.run_yaml).checkpoint
    # A checkpoint that is not signed with them is no reason to remove anything.
    keys = load_keys(config.encryption)
    best = Best.of(config)
    found = look(
        run,
        config.keep_last if keep_last is None else keep_last,
        keep_every=config.keep_every if keep_every is None else keep_every,
        best=best if keep_best is None else replace(best, keep=keep_best),
        # By name: resume_from may be a path, also of this run's own checkpoint.
        protected={Path(config.resume_from or "").name},
        quarantine_too=quarantined,
        verifier=lambda path: verify(path, keys=keys),
    )
    # The very plan that is printed: what was read is not read a second time, nor judged anew.
    with render.told_if_interrupted(
        f"a part is removed; `verl-slurm list {shell_word(run.root)}` shows what is left"
    ):
        removed = [] if dry_run else carry_out(run, found)
    going = [*(item.name for item in found.plan.drop), *found.quarantined]
    # What is gone may be less than what was planned: a run may prune beside us.
    gone = going if dry_run else removed
    freed = sum(found.sizes[name] for name in gone)
    if as_json:
        facts = {"dry_run": dry_run, "verified": found.good, "removed": removed, "num_bytes": freed}
        facts |= {"keep": found.plan.keep, "drop": found.plan.drop, "drop_quarantined": found.quarantined}
        render.json_value(facts)
        return
    for line in found.bad:
        render.warning(f"does not verify, and is left as it is: {line}")
    rows = [("keep", item.name, item.reason) for item in found.plan.keep]
    rows += [("drop", item.name, item.reason) for item in found.plan.drop]
    rows += [("drop", name, "set aside, and asked for") for name in found.quarantined]
    render.table(
        ["name", "", "MB", "why"],
        [[name, word, round(found.sizes[name] / 1e6, 1), reason] for word, name, reason in rows],
    )
    count = f"{counted(len(gone), 'checkpoint')}, {freed / 1e6:.1f} MB"
    render.line(f"dry run: would remove {count}" if dry_run else f"removed {count}")


@command("CONFIG CORRUPT KEY NOT_FOUND TIER")
@click.argument("run", type=RUN)
@click.argument("name", required=False, metavar="[NAME]")
@flag("--offload", "Copy checkpoints on to the tiers, and drop what is too old there.")
@flag("--dry-run", "With --offload: print the plan, change nothing in any tier.")
@flag("--fetch-back", "Bring checkpoint NAME back; default: the newest in any tier.")
def tiers(
    run: RunPaths, name: str | None, offload: bool, dry_run: bool, fetch_back: bool, as_json: bool
) -> int:
    """What lies where: every checkpoint of RUN in its own directory and in every tier of its configuration.

    \b
    verified      every byte was read back there and matched
    unread        whole by its manifest, not read back yet
    damaged       read back, and not what its manifest says
    refused       the run has a key, and this was not signed with it; it is not copied, and counts for nothing
    incomplete    an upload that broke off, or parts are missing; it counts for nothing

    Tiers stand in run.yaml, the nearest first (docs/saving.md); checkpoints go from each to the next by themselves. A
    tier that does not answer is said, and the exit code is 29.

    --offload copies them on at once, drops from a tier what is too old there, and says why each. A copy counts when
    every byte was read back and matched. One that broke off goes on where it stopped. From a tier a checkpoint goes
    when it is older than that tier's keep_days, no later tier waits for it, and what stands in for it was read back
    once more; the last good one never goes. --dry-run prints the very plan that is carried out without it. The run's
    own directory is not touched: that is `verl-slurm prune`. Where the run has a key, what is not signed with it is not
    copied.

    --fetch-back brings NAME back into RUN's own directory, from the nearest tier that has it whole; every byte is held
    against its manifest on the way and read back from the disk before it appears under its name. One that is there and
    verifies is left alone; one that is there and damaged is set aside. To bring back a run whose directory is lost:
    submit the same configuration, write the old run's id (the 16 hex digits behind its name in every key) to
    RUN/run_id, then fetch back.

    \b
    verl-slurm tiers runs/big
    verl-slurm tiers runs/big --offload --dry-run
    verl-slurm tiers runs/big --fetch-back step_003000
    """
    if (offload and fetch_back) or (dry_run and not offload) or (name is not None and not fetch_back):
        raise click.UsageError(
            "--dry-run goes with --offload, NAME with --fetch-back, and one of the two at a time."
        )
    config = load_resolved(run.run_yaml)
    if fetch_back:
        _fetch_back(run, config, name, as_json=as_json)
        return ExitCode.OK
    # A look needs no key: on a login node it says what it could not check, where a pass would refuse.
    seen = sync(run, config, dry_run=dry_run) if offload else look_at_tiers(run, config)
    shown = _pass_facts(seen, dry_run=dry_run) if offload else _look_facts(seen)
    if as_json:
        render.json_value(shown | _unchecked(seen))
        return _code(seen)
    if offload:
        _print_pass(seen)
    else:
        _print_look(seen)
    _warn(run, seen)
    if offload:
        # What was done is counted, not what was planned: an action may have failed, and the others go on.
        done = seen.plan if dry_run else [one.action for one in seen.done if not one.problem]
        copied, dropped = (sum(action.kind == kind for action in done) for kind in ("copy", "drop"))
        would = "dry run: would copy {} and drop {}" if dry_run else "copied {}, dropped {}"
        render.line(would.format(copied, dropped))
    return _code(seen)


def _look_facts(seen: Pass) -> dict[str, object]:
    shown = []
    for state in seen.states:
        copies = [
            render.picked(copy, "name num_bytes digest detail")
            | {"state": _word(copy), "saved_utc": copy.saved}
            for copy in state.copies
        ]
        shown.append(render.picked(state, "name reachable detail keep_days") | {"checkpoints": copies})
    return {"ok": seen.ok, "last_good": last_good(seen.states), "tiers": shown}


def _print_look(seen: Pass) -> None:
    best = last_good(seen.states)

    def row(tier: str, copy: TierCopy) -> tuple[object, ...]:
        saved = "-" if copy.saved is None else f"{copy.saved:%Y-%m-%d %H:%M}"
        detail = "the last good one" if copy.name == best and copy.good else copy.detail
        return copy.name, tier, _word(copy), round(copy.num_bytes / 1e6, 1), saved, detail

    rows = [
        row(state.name, copy)
        for state in seen.states
        # The newest first, by its numbers: step 1,000,000 has a digit more than the leading zeros allow for.
        for copy in sorted(state.copies, key=lambda copy: checkpoint_order(copy.name) or (0, 0), reverse=True)
    ]
    if rows:
        render.table(["checkpoint", "tier", "state", "MB", "saved (UTC)", "detail"], rows)


def _problems(seen: Pass) -> dict[Action, str]:
    return {done.action: done.problem for done in seen.done if done.problem}


def _pass_facts(seen: Pass, *, dry_run: bool) -> dict[str, object]:
    problems = _problems(seen)
    facts: dict[str, object] = {
        "dry_run": dry_run,
        "ok": seen.ok,
        "sent_bytes": sum(done.sent for done in seen.done),
        "unreachable": [state.name for state in seen.states if not state.reachable],
    }
    for kind in ("copy", "drop", "keep", "skip"):
        facts[kind] = [
            render.picked(action, "name tier reason source") | {"problem": problems.get(action, "")}
            for action in seen.plan
            if action.kind == kind
        ]
    return facts


def _print_pass(seen: Pass) -> None:
    problems = _problems(seen)

    def row(action: Action) -> tuple[str, ...]:
        source = f"; from {action.source}" if action.source not in ("", action.tier) else ""
        word = f"FAILED {action.kind}" if action in problems else action.kind
        return action.name, action.tier, word, problems.get(action, action.reason) + source

    render.table(["checkpoint", "tier", "", "why"], map(row, seen.plan))


def _fetch_back(run: RunPaths, config: RunConfig, name: str | None, *, as_json: bool) -> None:
    fetched = fetch_newest(run, config) if name is None else fetch(run, config, name)
    # Without NAME alone: a name that no tier has is refused by `fetch` itself.
    if fetched.name is None:
        raise NotFound(
            "no tier has a checkpoint of this run",
            where=run.root,
            remedy=f"verl-slurm tiers {shell_word(run.root)}",
        )
    # The newest that a tier has need not be the last that the run saved.
    lost = lost_newer(run) if name is None else ()
    path = run.checkpoints / fetched.name
    if removes := removed_by_living(run, fetched.name, soon=True):
        way = f"`cp -a {shell_word(path)} DIR` keeps it, and so does a checkpoint.keep_every that fits it"
        render.warning(f"{removes}: {way}")
    value = msgspec.to_builtins(fetched) | {"path": str(path), "lost": lost}
    render.answer(value, *fetched.reasons, as_json=as_json)


def _word(copy: TierCopy) -> str:
    # In this order: an incomplete upload is not asked for its signature, and what is refused counts for nothing else.
    if not copy.committed:
        return "incomplete"
    if copy.refused:
        return "refused"
    return {True: "verified", False: "damaged", None: "unread"}[copy.verified]


def _unchecked(seen: Pass) -> dict[str, str]:
    return {"signature": f"not checked: no key ({seen.unchecked})"} if seen.unchecked else {}


def _warn(run: RunPaths, seen: Pass) -> None:
    for word, text in _unchecked(seen).items():
        render.warning(f"{word} {text}")
    for state in seen.states:
        if not state.reachable:
            render.warning(f"tier {state.name} does not answer: {state.detail}")
    # The run's own directory is the first of the states.
    if len(seen.states) == 1:
        render.line(f"no tiers in {run.run_yaml}; see verl-slurm tiers --help")


def _code(seen: Pass) -> ExitCode:
    return ExitCode.OK if seen.ok else ExitCode.TIER
