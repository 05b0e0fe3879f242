"""`verl-slurm tiers`, `offload` and `fetch-back`."""

import click
import msgspec

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.cli.options import RUN, exits, json_option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.tiers.fetch import fetch, fetch_newest
from verl_slurm.tiers.mover import Pass, look, sync
from verl_slurm.tiers.plan import TierCopy, last_good


@click.command(epilog=exits(ExitCode.NOT_FOUND, ExitCode.TIER))
@click.argument("run", type=RUN)
@json_option
def tiers(run: RunPaths, as_json: bool) -> int:
    """What lies where: every checkpoint of RUN in its own directory and in every tier of its configuration.

    \b
    verified      every byte was read back there and matched
    unread        whole by its manifest, not read back yet
    damaged       read back, and not what its manifest says
    refused       the run has a key, and this was not signed with it; it is not copied, and counts for nothing
    incomplete    an upload that broke off, or parts are missing; it counts for nothing

    Tiers stand in run.yaml, the nearest first; checkpoints go from each to the next by themselves:

    \b
    tiers:
      - {name: nvme, kind: posix, path: /local/scratch, keep_days: 7}
      - {name: store, kind: s3, bucket: my-checkpoints, keep_days: 90}
      - {name: cold, kind: archive, path: /archive/me}

    A tier that does not answer is said, and the exit code is 29. Credentials of a bucket are found where every
    AWS tool finds them.
    """
    # A look needs no key: on a login node it says what it could not check, where a pass would refuse.
    seen = look(run, load_resolved(run.run_yaml))
    best = last_good(seen.states)
    if as_json:
        shown = [
            {
                "name": state.name,
                "reachable": state.reachable,
                "detail": state.detail,
                "keep_days": state.keep_days,
                "checkpoints": [
                    {
                        "name": copy.name,
                        "state": _word(copy),
                        "saved_utc": copy.saved,
                        "num_bytes": copy.num_bytes,
                        "digest": copy.digest,
                        "detail": copy.detail,
                    }
                    for copy in state.copies
                ],
            }
            for state in seen.states
        ]
        render.json_value({"ok": seen.ok, "last_good": best, "tiers": shown} | _unchecked(seen))
        return _code(seen)
    rows = [
        [
            copy.name,
            state.name,
            _word(copy),
            round(copy.num_bytes / 1e6, 1),
            "-" if copy.saved is None else f"{copy.saved:%Y-%m-%d %H:%M}",
            "the last good one" if copy.name == best and copy.good else copy.detail,
        ]
        for state in seen.states
        # The newest first, by its numbers: step 1,000,000 has a digit more than the leading zeros allow for.
        for copy in sorted(state.copies, key=lambda copy: checkpoint_order(copy.name) or (0, 0), reverse=True)
    ]
    if rows:
        render.table(["checkpoint", "tier", "state", "MB", "saved (UTC)", "detail"], rows)
    _warn(run, seen)
    return _code(seen)


@click.command(epilog=exits(ExitCode.CONFIG, ExitCode.KEY, ExitCode.NOT_FOUND, ExitCode.TIER))
@click.argument("run", type=RUN)
@click.option("--dry-run", is_flag=True, help="Print the plan, change nothing in any tier.")
@json_option
def offload(run: RunPaths, dry_run: bool, as_json: bool) -> int:
    """Copy the checkpoints of RUN on to its tiers, and drop what is too old there; say why each.

    A copy counts when every byte was read back and matched. One that broke off goes on where it stopped. From a
    tier a checkpoint goes when it is older than that tier's keep_days, no later tier waits for it, and what stands in
    for it was read back once more; the last good one never goes. --dry-run prints the very plan that is carried out
    without it. The run's own directory is not touched: that is `verl-slurm prune`. Where the run has a key, what is
    not signed with it is not copied.

    \b
    verl-slurm offload runs/big --dry-run
    verl-slurm offload runs/big --json
    """
    did = sync(run, load_resolved(run.run_yaml), dry_run=dry_run)
    # A plan names a checkpoint once a tier, so the two tell which of its actions failed.
    problems = {(d.action.tier, d.action.name): d.problem for d in did.done if d.problem}
    if as_json:
        answer: dict[str, object] = {"dry_run": dry_run, "ok": did.ok}
        for kind in ("copy", "drop", "keep", "skip"):
            answer[kind] = [
                {
                    "name": action.name,
                    "tier": action.tier,
                    "reason": action.reason,
                    "source": action.source,
                    "problem": problems.get((action.tier, action.name), ""),
                }
                for action in did.plan
                if action.kind == kind
            ]
        answer["sent_bytes"] = sum(done.sent for done in did.done)
        answer["unreachable"] = [state.name for state in did.states if not state.reachable]
        render.json_value(answer | _unchecked(did))
        return _code(did)
    render.table(
        ["checkpoint", "tier", "", "why"],
        [
            [
                action.name,
                action.tier,
                f"FAILED {action.kind}" if (action.tier, action.name) in problems else action.kind,
                problems.get((action.tier, action.name), action.reason)
                + (f"; from {action.source}" if action.source not in ("", action.tier) else ""),
            ]
            for action in did.plan
        ],
    )
    _warn(run, did)
    # What was done is counted, not what was planned: an action may have failed, and the others go on.
    kinds = [done.action.kind for done in did.done if not done.problem]
    if dry_run:
        kinds = [action.kind for action in did.plan]
    copied, dropped = kinds.count("copy"), kinds.count("drop")
    render.line(
        f"dry run: would copy {copied} and drop {dropped}"
        if dry_run
        else f"copied {copied}, dropped {dropped}"
    )
    return _code(did)


@click.command("fetch-back", epilog=exits(ExitCode.CORRUPT, ExitCode.KEY, ExitCode.NOT_FOUND, ExitCode.TIER))
@click.argument("run", type=RUN)
@click.argument("name", required=False)
@json_option
def fetch_back(run: RunPaths, name: str | None, as_json: bool) -> None:
    """Bring checkpoint NAME (default: the newest in any tier) back into RUN's own directory.

    It is taken from the nearest tier that has it whole; every byte is held against its manifest on the way and
    read back from the disk before it appears under its name. One that is there and verifies is left alone; one that
    is there and damaged is set aside.

    To bring back a run whose directory is lost: submit the same configuration, write the old run's id (the 16 hex
    digits behind its name in every key) to RUN/run_id, then fetch-back.

    \b
    verl-slurm fetch-back runs/big step_003000
    """
    config = load_resolved(run.run_yaml)
    fetched = fetch_newest(run, config) if name is None else fetch(run, config, name)
    # Without NAME alone: a name that no tier has is refused by `fetch` itself.
    if fetched.name is None:
        raise NotFound(
            "no tier has a checkpoint of this run",
            where=run.root,
            remedy=f"verl-slurm tiers {shell_word(run.root)}",
        )
    value = msgspec.to_builtins(fetched) | {"path": str(run.checkpoints / fetched.name)}
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
