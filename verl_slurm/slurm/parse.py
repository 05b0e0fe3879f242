"""Parses the output of Slurm's commands into structs. Pure.

`scontrol show job` is read in its many-line form, not with `-o`: there every free text (job name, command, work
directory, comment) ends its line, so a job named `x JobState=COMPLETED` cannot forge a field. A field that comes twice
nevertheless (a newline in a name) is refused.

Times: the client asks for seconds since the epoch (`SLURM_TIME_FORMAT=%s`), free of time zones and summer time; the
usual local `2026-11-21T00:42:58` is understood too. All datetimes here are in UTC.
"""

import re
from collections.abc import Collection
from datetime import UTC, datetime

import msgspec

from verl_slurm.base.errors import NotFound, SlurmMissing
from verl_slurm.slurm.commands import WORK_DIR
from verl_slurm.slurm.facts import JobFacts, NodeFacts, PartitionFacts

_NOTHING = frozenset({"", "None", "N/A", "Unknown", "(null)", "NONE"})
# keys whose value is the rest of the line, blanks included
_FREE_TEXT = frozenset(
    {"JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment"}
    | {"Extra", "Reason", "OS", "SubmitLine"}
)
_KEY = re.compile(r"[A-Za-z][\w/:.*-]*")


def parse_time(text: str) -> datetime | None:
    """Parses Slurm's time; returns None for its many words for "none". Raises ValueError: neither."""
    if text in _NOTHING:
        return None
    # Without ASCII, \d matches the digits of all scripts.
    if re.fullmatch(r"\d{1,12}", text, re.ASCII):
        return datetime.fromtimestamp(int(text), UTC)
    # A time without a zone is this node's local one: scontrol prints it by its own node's zone.
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone(UTC)


def parse_own_jobs(text: str) -> list[tuple[str, str, str]]:
    """Parses lines of `commands.list_jobs`: (number, command, working directory), by their numbers."""
    jobs = []
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        number, _, rest = rest.partition("|")
        command, _, where = rest.partition(WORK_DIR)
        # `12+1` is a further component of heterogeneous job 12, which its first one, `12+0`, stands for. `12_3` and
        # `12_[4-8]` are tasks of an array: the lead, and so the journal, has the number.
        if re.fullmatch(r"[0-9]{1,10}", number) and ("+" not in name or name.endswith("+0")):
            jobs.append((number, command, where))
    return sorted(jobs, key=lambda job: int(job[0]))


def parse_dependencies(text: str) -> list[tuple[int, str, str]]:
    """Parses lines of `commands.list_dependencies`: (number, dependency, command) of the jobs that have one."""
    rows = [line.strip().split("|", 2) for line in text.splitlines()]
    return [
        (int(row[0]), row[1], row[2])
        for row in rows
        if len(row) == 3 and row[0].isascii() and row[0].isdigit() and row[1] not in _NOTHING
    ]


def parse_states(text: str) -> dict[int, tuple[str, str, str, str, str]]:
    """Parses lines of `commands.list_states`: number to (state, reason, command, working directory, comment).

    A reason of None is empty, and so is a comment that is not a batch script's (`JobFacts.comment`).
    """
    found: dict[int, tuple[str, str, str, str, str]] = {}
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, rest = rest.partition("|")
        rest, _, where = rest.partition(WORK_DIR)
        where, _, comment = where.partition(WORK_DIR)
        # The script's path is absolute, and both may contain the separator. Other jobs than batch jobs have none.
        reason, slash, script = rest.partition("|/")
        if not slash and reason.endswith("|(null)"):
            reason, slash, script = reason.removesuffix("|(null)"), "|", "(null)"
        if number.isascii() and number.isdigit() and state:
            reason = "" if reason in _NOTHING else reason
            found[int(number)] = (state, reason, slash[1:] + script, where, _of_a_script(comment))
    return found


def _of_a_script(comment: str) -> str:
    return comment if comment.startswith("verl-slurm: ") else ""


def parse_seconds(text: str) -> int | None:
    """Parses `[days-]hours:minutes:seconds`, `minutes:seconds` or plain seconds; None: unlimited or not set.

    Raises ValueError: none of these.
    """
    if text in _NOTHING or text.upper() in {"UNLIMITED", "INFINITE", "PARTITION_LIMIT", "INVALID"}:
        return None
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(?:(\d{1,6}):)?(\d{1,9})", text, re.ASCII)
    if match is None:
        raise ValueError(f"not a duration: {text!r}")
    days, first, second, last = (None if part is None else int(part) for part in match.groups())
    # `minutes:seconds`: the expression has put the minutes in the place of the hours.
    if second is None:
        first, second = None, first
    return ((days or 0) * 24 + (first or 0)) * 3600 + (second or 0) * 60 + (last or 0)


def _records(text: str) -> list[dict[str, str]]:
    """Returns blocks of `Key=value` lines, which blank lines separate."""
    blocks: list[dict[str, str]] = []
    # One record for each task of an array and each component of a heterogeneous job.
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            _read_line(line.strip(), fields)
        if fields:
            blocks.append(fields)
    return blocks


def _read_line(line: str, fields: dict[str, str]) -> None:
    while line:
        key, equals, rest = line.partition("=")
        if not equals or _KEY.fullmatch(key) is None:
            # a word that belongs to the value before (`Power= `, `OS=Linux 6.1 #1 SMP`), in no field that we read
            line = line.partition(" ")[2].lstrip()
            continue
        # A job's Reason shares its line with Dependency (`JobState=.. Reason=.. Dependency=..`); a node's is free text.
        if key in _FREE_TEXT and not (key == "Reason" and " Dependency=" in rest):
            value, line = rest, ""
        else:
            value, _, line = rest.partition(" ")
            line = line.lstrip()
        # A newline in a name begins a line: a second JobState must not replace, or be replaced by, the forged one.
        if key in fields:
            raise _unreadable(f"the field {key} twice")
        fields[key] = value


def _unreadable(found: str) -> SlurmMissing:
    return SlurmMissing(
        "the answer of scontrol is not understood",
        found=found[:200],
        remedy="run `scontrol show job JOBID` by hand; report the output if it looks sane",
    )


def parse_job(text: str, job_id: int) -> JobFacts:
    """Parses the record of `job_id` in the output of `scontrol show job ID`; an array or a heterogeneous job
    has several.

    Raises NotFound: no such record. SlurmMissing: the text is not what Slurm prints.
    """
    for fields in _records(text):
        if fields.get("JobId") == str(job_id):
            try:
                return _job(fields)
            except (KeyError, ValueError) as error:
                raise _unreadable(f"{type(error).__name__} {error}") from error
    raise NotFound(
        "Slurm does not know the job",
        where=job_id,
        remedy="squeue --me lists your jobs; those long over are in sacct, where there is one",
    )


def _job(fields: dict[str, str]) -> JobFacts:
    user = re.search(r"\((\d+)\)$", fields["UserId"])
    if user is None:
        raise ValueError(f"UserId {fields['UserId']!r}")
    # Fields by [] are printed by all versions in all states; those by `get` by newer ones, or in some states.
    return JobFacts(
        job_id=int(fields["JobId"]),
        name=fields.get("JobName", ""),
        # One word, that of a flag before that of the state (job_state_string): SIGNALING hides RUNNING, COMPLETING the
        # end.
        state=fields["JobState"],
        reason=_optional(fields["Reason"]),
        restarts=int(fields["Restarts"]),
        requeue=fields["Requeue"] == "1",
        partition=fields["Partition"],
        preempt_time=parse_time(fields.get("PreemptTime", "")),  # not printed while pending
        eligible_time=parse_time(fields["EligibleTime"]),
        submit_time=parse_time(fields.get("SubmitTime", "")),
        start_time=parse_time(fields["StartTime"]),
        end_time=parse_time(fields["EndTime"]),
        time_limit_s=parse_seconds(fields.get("TimeLimit", "UNLIMITED")),
        exit_code=fields["ExitCode"],
        batch_host=_optional(fields.get("BatchHost", "")),
        node_list=_optional(fields.get("NodeList", "")),
        # `2-2` while the job waits.
        num_nodes=int(fields["NumNodes"].partition("-")[0]),
        user_id=int(user[1]),
        # Other words there are the user's, or the site's.
        comment=_of_a_script(fields.get("Comment", "")),
        command=_optional(fields.get("Command", "")),
        work_dir=_optional(fields.get("WorkDir", "")),
        excluded=_optional(fields.get("ExcNodeList", "")),
        required=_optional(fields.get("ReqNodeList", "")),
        reservation=_optional(fields.get("Reservation", "")),
        dependency=_optional(fields.get("Dependency", "")),
        failed_node=_optional(fields.get("FailedNode", "")),
        expedited=fields.get("ExpeditedRequeue") == "Yes",
        array_task=_array_task(fields),
    )


def _array_task(fields: dict[str, str]) -> str | None:
    """Returns None for a job that is no task, or for a record of several waiting tasks (`ArrayTaskId=2-8%1`)."""
    task = f"{fields.get('ArrayJobId', '')}_{fields.get('ArrayTaskId', '')}"
    # Checked: it becomes a word of `scontrol requeue` and `scancel`.
    return task if re.fullmatch(r"\d{1,10}_\d{1,10}", task, re.ASCII) else None


def _optional(value: str) -> str | None:
    return None if value in _NOTHING else value


def parse_node(text: str, name: str) -> NodeFacts:
    """Parses the output of `scontrol show node NAME`. Raises NotFound, SlurmMissing, as `parse_job`."""
    for fields in _records(text):
        if fields.get("NodeName") == name:
            try:
                return NodeFacts(
                    name=name,
                    # A node may have none yet: its name is then what Slurm itself looks up.
                    addr=_optional(fields.get("NodeAddr", "")) or name,
                    hostname=_optional(fields.get("NodeHostName", "")) or name,
                    state=_node_state(fields["State"]),
                    cpus=int(fields["CPUTot"]),
                )
            except (KeyError, ValueError) as error:
                raise _unreadable(f"{type(error).__name__} {error}") from error
    raise NotFound("Slurm does not know the node", where=name, remedy="sinfo -N lists the nodes")


def parse_lost_nodes(text: str) -> tuple[str, ...]:
    """Returns the names of DOWN or not responding nodes in the output of `scontrol show node LIST`."""
    return tuple(
        fields["NodeName"]
        for fields in _records(text)
        if "NodeName" in fields and _node_state(fields.get("State", "")) & {"DOWN", "NOT_RESPONDING"}
    )


# In sinfo's short and long words.
IDLE = frozenset({"idle"})
_USABLE = frozenset({"alloc", "allocated", "comp", "completing", "idle", "mix", "mixed", "planned", "plnd"})
# For a job that asks for their reservation: an idle node of it is called so.
USABLE_RESERVED = _USABLE | {"resv", "reserved"}


def parse_usable_nodes(text: str, states: Collection[str] = _USABLE) -> dict[str, str]:
    """Parses the output of `commands.list_nodes`: the nodes that jobs run on now or may at once, and the kind
    of each.

    A kind is `features|generic resources`. `states`: those that count.
    """
    usable: dict[str, str] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, _, kind = rest.partition("|")
        # `idle*` does not respond, `idle~` is powered down: neither counts
        if state in states:
            usable[name] = kind
    return usable


def parse_reservation(text: str, name: str) -> str | None:
    """Returns the nodes in the output of `scontrol show reservation NAME`, in Slurm's bracket form; None: it has none.

    Raises NotFound, SlurmMissing, as `parse_job`.
    """
    for fields in _records(text):
        if fields.get("ReservationName") == name:
            return _optional(fields.get("Nodes", ""))
    raise NotFound("Slurm has no such reservation", where=name, remedy="scontrol show reservation lists them")


def _node_state(text: str) -> frozenset[str]:
    # Flags behind a state (sinfo(1), "NODE STATE CODES"): the word counts, and `*` is a fact of its own.
    states = {word.rstrip("*~#!%$@^-") for word in text.upper().split("+")}
    if "*" in text:
        states.add("NOT_RESPONDING")
    return frozenset(states)


def parse_partition(text: str, name: str) -> PartitionFacts:
    """Parses the output of `scontrol show partition NAME`. Raises NotFound, SlurmMissing, as `parse_job`."""
    for fields in _records(text):
        if fields.get("PartitionName") == name:
            return _partition(fields)
    raise NotFound(
        "Slurm has no such partition",
        where=name,
        remedy="sinfo -s lists the partitions; set slurm.partition to one of them",
    )


def parse_partitions(text: str) -> list[PartitionFacts]:
    """Parses the output of `scontrol show partition`. Raises SlurmMissing, as `parse_job`."""
    return [_partition(fields) for fields in _records(text) if "PartitionName" in fields]


def parse_default_partition(text: str) -> PartitionFacts:
    """Returns the default partition in that output. Raises NotFound: there is none. SlurmMissing."""
    for facts in parse_partitions(text):
        if facts.is_default:
            return facts
    raise NotFound(
        "Slurm has no default partition",
        remedy="sinfo -s lists the partitions; set slurm.partition to one of them",
    )


def parse_gpus(kind: str) -> int:
    """Returns the GPUs of a node from the words of `parse_usable_nodes`: `a100|gpu:a100:8(S:0-1)` has 8."""
    resources = kind.rpartition("|")[2]
    # A type may stand before the number, and sockets behind it; nodes with two types have an entry for each.
    return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:([0-9]{1,4})(?=[(,]|$)", resources)))


def _partition(fields: dict[str, str]) -> PartitionFacts:
    try:
        limit = fields.get("MaxNodes", "UNLIMITED")
        return PartitionFacts(
            name=fields["PartitionName"],
            state=fields["State"],
            total_nodes=int(fields["TotalNodes"]),
            total_cpus=int(fields["TotalCPUs"]),
            max_time_s=parse_seconds(fields["MaxTime"]),
            max_nodes=None if limit == "UNLIMITED" else int(limit),
            grace_s=int(fields.get("GraceTime", "0")),
            preempt_mode=fields.get("PreemptMode", "OFF"),
            is_default=fields.get("Default") == "YES",
        )
    except (KeyError, ValueError) as error:
        raise _unreadable(f"{type(error).__name__} {error}") from error


def parse_config(text: str) -> dict[str, str]:
    """Parses the output of `scontrol show config`: `Name = value` lines, by name."""
    config: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        # `SlurmctldHost[0]`; headings and the lines of plugins have no such key.
        if equals and re.fullmatch(r"[A-Za-z][\w/.-]*(?:\[\d+\])?", key.strip(), re.ASCII):
            config[key.strip()] = value.strip()
    return config


def parse_config_time(text: str) -> datetime | None:
    """Returns slurmctld's time, from the first line of `scontrol show config`; None if it is missing."""
    # From the same answer as the settings: one question tells both.
    match = re.match(r"Configuration data as of (\S+)$", text, re.MULTILINE)
    try:
        return None if match is None else parse_time(match[1])
    except (ValueError, OverflowError, OSError):
        return None


def parse_hostnames(text: str) -> list[str]:
    """Parses the output of `scontrol show hostnames LIST`. Raises SlurmMissing: a word is no host name."""
    names = text.split()
    for name in names:
        if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,254}", name, re.ASCII) is None:
            raise _unreadable(f"host name {name!r}")
    return names


_ENDS = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


class _Job(msgspec.Struct):
    job_id: int = 0
    job_state: str | list[str] = []


# Two fields alone: the form of others differs by version (from 23.11 times and numbers are `{set, infinite, number}`).
class _Answer(msgspec.Struct):
    jobs: list[_Job] = []


def ended_as(text: str, job_id: int) -> str | None:
    """Reads from `scontrol show job ID --json` what a COMPLETING job will be; None: it does not say."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    # msgspec lets the last two through, which are none of its own errors.
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # One record, and a list of words: a single word is the one that hides the others (up to 23.02).
    # The text shows one word of a state that has several, and COMPLETING hides the others: a job that its
    # user cancels and one that Slurm ends for a preemption look alike (all versions). From 23.11 on the JSON
    # lists all of them. 22.05's scontrol has no such option: then the end stays unknown.
    states = [job.job_state for job in answer.jobs if job.job_id == job_id]
    if len(states) != 1 or isinstance(states[0], str):
        return None
    ends = [state for state in states[0] if state in _ENDS]
    return ends[0] if len(ends) == 1 else None


class PastJobs(msgspec.Struct, frozen=True, kw_only=True):
    """What the lines add up to. A line is one start of a job."""

    waits_s: tuple[float, ...] = ()
    """From when a job could start to when it did, of each start."""
    ran_s: float = 0.0
    """Of all starts together."""
    thrown_out: int = 0
    """Starts that ended as PREEMPTED or REQUEUED."""


def parse_past_jobs(text: str) -> PastJobs:
    """Parses lines of `commands.list_past_jobs`; one that is not understood is passed over."""
    waits: list[float] = []
    ran, thrown_out = 0.0, 0
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 4:
            continue
        state, eligible, start, elapsed = fields
        # A job that never started has `Unknown` there.
        if eligible.isascii() and eligible.isdigit() and start.isascii() and start.isdigit():
            waits.append(max(float(int(start) - int(eligible)), 0.0))
        if elapsed.isascii() and elapsed.isdigit():
            ran += int(elapsed)
        # `CANCELLED by 1000`: the first word is the state.
        thrown_out += state.partition(" ")[0] in ("PREEMPTED", "REQUEUED")
    return PastJobs(waits_s=tuple(waits), ran_s=ran, thrown_out=thrown_out)
