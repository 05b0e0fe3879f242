"""Every parser of bytes that somebody else may have written. A new one is a new row, and its specimens."""

import io
import os
import random
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from verl_slurm_daemon.agent.rank_socket import parse_packet
from verl_slurm_daemon.allocation.hostfile import parse_hostfile

from tests.fuzz import specimens as of
from tests.fuzz.target import Target, scratch
from tests.ledger_stats import ledger_stats
from verl_slurm.base.errors import (
    UNREADABLE,
    CheckpointCorrupt,
    ConfigError,
    DataError,
    NotFound,
    PermissionRefused,
    SchemaMismatch,
    SlurmMissing,
    WireError,
)
from verl_slurm.base.fence import read_owner
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format import manifest, state_schema
from verl_slurm.checkpoint.format.tensor_index import parse_index
from verl_slurm.checkpoint.store.frozen import check_frozen
from verl_slurm.checkpoint.store.quarantine import put_back_unfinished
from verl_slurm.cli.show.run_tables import steps_table
from verl_slurm.cli.show.story import Story, progress
from verl_slurm.config import strict_yaml
from verl_slurm.config.load import dump, parse_config
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.fingerprint import cache as hash_cache, data_record as fingerprint
from verl_slurm.dataset.prompts.rows import prompts_of
from verl_slurm.journal.files import parse_event, read_events, to_json
from verl_slurm.journal.history import History
from verl_slurm.journal.status import read_status
from verl_slurm.journal.steps import every_row, last_steps
from verl_slurm.runs.run_record import last_job, steps_done
from verl_slurm.runtime_state import codec, ledger, rollout_records, token_log
from verl_slurm.runtime_state.samples import read_samples
from verl_slurm.save.writer.protocol import FromSaver
from verl_slurm.slurm import parse as slurm
from verl_slurm.submit.checks.model_files import check_model
from verl_slurm.trainer.state.orchestration import Orchestration, check_or_write
from verl_slurm.verl.torch_zip import zip_problem
from verl_slurm.verl.tracker import judge_tracker
from verl_slurm.wire.control_page import ControlPage
from verl_slurm.wire.framing import Framer
from verl_slurm.wire.http import parse_head
from verl_slurm.wire.lead_file import read_lead_address
from verl_slurm.wire.messages import FromAgent, ToAgent
from verl_slurm.wire.reward_plan import read_reward_plan, read_reward_request


def _in_run(name: str, read: Callable[[RunPaths], object]) -> Callable[[bytes], object]:
    """`read` of a run whose file `name` holds the bytes."""

    def parse(data: bytes) -> object:
        run = scratch() / "run"
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (run / "run_id").write_text(of.RUN_ID)  # the ledger's records name it
        # A file of 0600, as the readers of secrets want it, and written over: renames cost more than parsing.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        try:
            return read(RunPaths(run))
        finally:
            path.unlink(missing_ok=True)

    return parse


def _state(data: bytes) -> object:
    state = codec.decode(data)
    # What was taken can be written again: it is whole.
    return codec.encode(state) if sum(a.nbytes for a in state.rewards.values()) < 1 << 20 else state


def _facts(data: bytes) -> object:
    return codec.facts(lambda at, size: memoryview(data)[at : at + size], len(data), where="here")


def _manifest(data: bytes) -> object:
    found = manifest.parse(data, where="here")
    assert manifest.parse(manifest.render(found), where="here") == found
    assert found.name.isascii()
    return found


def _schema(data: bytes) -> object:
    found = state_schema.parse_schema(data, where="here")
    return state_schema.differences(found, state_schema.current_schema())


def _ledger(paths: RunPaths) -> object:
    ledger_stats(paths)
    return ledger.load(paths, from_step=0, report=str)


def _ledger_writer(paths: RunPaths) -> object:
    with ledger.Ledger(paths, of.ATTEMPT, 0):
        return None


def _responses(paths: RunPaths) -> object:
    found = rollout_records.RolloutLedger(paths, of.ATTEMPT + 1, 0)
    try:
        return found.find(0, 0, of.DIGEST)
    finally:
        found.close()


def _tokens(paths: RunPaths) -> object:
    return token_log.Prefixes(paths, report=str)


def _events(paths: RunPaths) -> object:
    events = read_events(paths)
    story = Story()
    for event in events:
        story.tell(event)
        assert parse_event(json_line(to_json(event))) is not None
    history = History(events)
    history.time_use(1e9)
    return history.failed_starts("7", 1), history.has_ended(last_job(paths).job_id)


def _steps(paths: RunPaths) -> object:
    rows = last_steps(paths, 5)
    msgspec.json.encode(rows)
    history = History()
    for row in every_row(paths):
        history.feed_row(row)
    return steps_table(rows)


def _status(paths: RunPaths) -> object:
    return progress(read_status(paths)), steps_done(paths)


def _frames(direction: bytes, vocabulary: Any) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        framer: Framer[Any] = Framer(of.KEY, direction, vocabulary)
        half = len(data) // 2
        return [*framer.feed(data[:half]), *framer.feed(data[half:])]

    return parse


def _control_page(path: Path) -> object:
    with closing(ControlPage.open(path)) as page:
        return page.request()


def _orchestration(paths: RunPaths) -> object:
    return check_or_write(paths, msgspec.json.decode(of.orchestrations()[0], type=Orchestration))


def _yaml(data: bytes) -> object:
    read = strict_yaml.parse(data, "my.yaml").data
    assert strict_yaml.parse(strict_yaml.dump(read), "dumped").data == read
    return read


def _config(data: bytes) -> object:
    config = parse_config(data, "my.yaml")
    assert parse_config(dump(config), "dumped") == config
    return config


def _override(data: bytes) -> object:
    return parse_config(b"name: run\n", "my.yaml", [data.decode(errors="surrogateescape")])


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    # As slurm.runner hands it on.
    return lambda data: parse(data.decode(errors="replace"))


def _job(text: str) -> object:
    first = re.search(r"JobId=(\d{1,9})\b", text, re.ASCII)
    return slurm.parse_job(text, int(first[1]) if first else 1)


def _node(text: str) -> object:
    slurm.parse_lost_nodes(text)
    slurm.parse_config(text)
    return slurm.parse_node(text, "node1")


def _generators(data: bytes) -> object:
    import torch

    from verl_slurm.save.ranks import rng

    states = of.generator_states(data)
    if states is None:
        return None
    before = rng.capture()
    try:
        rng.restore(states)
        # What was taken is drawn from: a position outside of its table would be read there.
        return random.random(), np.random.random(700), torch.rand(700)
    finally:
        rng.restore(before)


def _shard(data: bytes) -> str:
    fd = os.memfd_create("shard")
    try:
        os.write(fd, data)
        return zip_problem(fd)
    finally:
        os.close(fd)


def _model(name: str) -> Callable[[bytes], object]:
    rest = {
        "config.json": of.model_configs()[0],
        "model.safetensors": of.safetensors()[0],
        "tokenizer.json": b"{}",
    }

    def parse(data: bytes) -> object:
        model = scratch() / "model"
        model.mkdir(exist_ok=True)
        for file, content in (rest | {name: data}).items():
            (model / file).write_bytes(content)
        return check_model("model.path", model)

    return parse


_SEGMENT = f"ledger/attempt_{of.ATTEMPT:06d}.rank_0000.ledger"
_CORRUPT = (CheckpointCorrupt,)
_SLURM = (SlurmMissing, NotFound)

TARGETS = (
    # state of a run
    Target("runtime state", _state, of.states, raises=_CORRUPT, cost=4),
    Target(
        "runtime state, sealed",
        _state,
        of.state_parts,
        raises=_CORRUPT,
        form="msgpack",
        seal=of.seal_record,
        cost=6,
    ),
    Target(
        "random generators", _generators, of.generators, raises=_CORRUPT, form="msgpack", cost=10, torch=True
    ),
    Target("runtime state, compared", _facts, of.states, raises=_CORRUPT, cost=4),
    Target(
        "runtime state, compared, sealed",
        _facts,
        of.state_parts,
        raises=_CORRUPT,
        seal=of.seal_record,
        cost=4,
    ),
    Target(
        "samples.jsonl",
        _in_run("samples.jsonl", read_samples),
        of.samples,
        raises=(NotFound,),
        form="json",
        cost=2,
    ),
    Target("hash cache", hash_cache.decode, of.hash_caches, raises=(ValueError,)),
    Target("ledger", _in_run(_SEGMENT, _ledger), of.ledgers, cost=10),
    Target(
        "ledger, sealed",
        _in_run(_SEGMENT, _ledger),
        of.ledger_parts,
        form="msgpack",
        seal=of.seal_ledger,
        cost=20,
    ),
    Target(
        "responses of verl",
        _in_run(_SEGMENT, _responses),
        of.responses,
        form="msgpack",
        seal=of.in_segment,
        cost=20,
    ),
    Target(
        "tokens of unfinished responses",
        _in_run(f"ledger/tokens/{_SEGMENT}", _tokens),
        of.logged_tokens,
        form="msgpack",
        seal=of.in_segment,
        cost=10,
    ),
    Target("ledger, its writer", _in_run(_SEGMENT, _ledger_writer), of.ledgers, cost=15),
    Target("manifest.json", _manifest, of.manifests, raises=(CheckpointCorrupt, SchemaMismatch), form="json"),
    Target(
        "rewards.json",
        _in_run("rewards.json", read_reward_plan),
        of.reward_plans,
        raises=(CheckpointCorrupt, PermissionRefused),  # the latter: more than 1 MiB
        form="json",
    ),
    Target("steps.jsonl", _in_run("steps.jsonl", _steps), of.step_rows, cost=2),
    Target(
        "one step of steps.jsonl", _in_run("steps.jsonl", _steps), lambda: of.step_rows()[:1], form="json"
    ),
    Target(
        "a copy of a model",
        _in_run(f"frozen/{of.FROZEN}.json", lambda paths: check_frozen(paths, of.FROZEN)),
        of.frozen_records,
        form="json",
        cost=2,
    ),
    Target(
        "a reason in quarantine",
        _in_run(
            "checkpoints/quarantine/step_000012.c0c0c0c0.reason.json",
            lambda paths: put_back_unfinished(paths.checkpoints),
        ),
        of.quarantine_reasons,
        form="json",
    ),
    Target(
        "reward_request.json",
        _in_run("control/reward_request.json", read_reward_request),
        of.reward_requests,
        form="json",
    ),
    Target(
        "index.json",
        lambda data: parse_index(data, where="here"),
        of.indexes,
        raises=(CheckpointCorrupt,),
        form="json",
    ),
    Target(
        "the saver's answers",
        msgspec.json.Decoder(FromSaver).decode,
        of.from_saver,
        raises=(msgspec.MsgspecError, *UNREADABLE),
        form="json",
    ),
    Target(
        "manifest.json, sealed",
        _manifest,
        of.manifests,
        raises=(CheckpointCorrupt, SchemaMismatch),
        form="json",
        seal=of.seal_manifest,
        cost=2,
    ),
    Target("schema_version.json", _schema, of.schemas, raises=_CORRUPT, form="json", cost=2),
    Target(
        "schema_version.json, sealed",
        _schema,
        of.schemas,
        raises=_CORRUPT,
        form="json",
        seal=of.seal_schema,
        cost=3,
    ),
    Target(
        "fingerprint",
        _in_run(".dataset_fingerprint", fingerprint.read),
        of.fingerprints,
        raises=_CORRUPT,
        form="json",
        cost=2,
    ),
    Target(
        "fingerprint, sealed",
        _in_run(".dataset_fingerprint", fingerprint.read),
        of.fingerprints,
        raises=_CORRUPT,
        form="json",
        seal=of.seal_fingerprint,
        cost=2,
    ),
    Target("attempt", _in_run("attempt", read_owner), of.attempts, raises=_CORRUPT, form="json"),
    Target("events.jsonl", _in_run("events.jsonl", _events), of.events, raises=(NotFound,), cost=6),
    Target(
        "one event",
        _in_run("events.jsonl", _events),
        lambda: of.events()[:-2],
        raises=(NotFound,),
        form="json",
        cost=2,
    ),
    Target("status.json", _in_run("status.json", _status), of.statuses, form="json", cost=2),
    Target(
        "orchestration.json",
        _in_run("orchestration.json", _orchestration),
        of.orchestrations,
        raises=(CheckpointCorrupt, ConfigError),
        form="json",
        cost=2,
    ),
    # wire
    Target(
        "lead.json",
        _in_run("control/lead.json", read_lead_address),
        of.lead_addresses,
        raises=(WireError,),
        form="json",
    ),
    Target("frames", _frames(b"L", FromAgent), of.wire_frames, raises=(WireError,)),
    Target(
        "frames to the lead, sealed",
        _frames(b"L", FromAgent),
        of.from_agent,
        raises=(WireError,),
        form="msgpack",
        seal=lambda data: of.frames(data, b"A"),
    ),
    Target(
        "frames to an agent, sealed",
        _frames(b"A", ToAgent),
        of.to_agent,
        raises=(WireError,),
        form="msgpack",
        seal=lambda data: of.frames(data, b"L"),
    ),
    Target("packets of a rank", parse_packet, of.from_rank, raises=(WireError,), form="msgpack"),
    Target("requests to the metrics port", parse_head, of.http_heads, raises=(WireError,)),
    Target(
        "control page",
        _in_run("page", lambda paths: _control_page(paths.root / "page")),
        of.control_pages,
        raises=(WireError,),
        cost=2,
    ),
    # what people and Slurm write
    Target("YAML", _yaml, of.yaml_with_aliases, raises=(ConfigError,), cost=20),
    Target("run.yaml", _config, of.run_configs, raises=(ConfigError,), cost=100),
    Target("override", _override, of.overrides, raises=(ConfigError,), cost=20),
    Target("hostfile", lambda data: parse_hostfile(data, "hosts"), of.hostfiles, raises=(ConfigError,)),
    Target("scontrol show job", _text(_job), of.scontrol_jobs, raises=_SLURM, cost=4),
    Target("scontrol show node", _text(_node), of.scontrol_nodes, raises=_SLURM, cost=3),
    Target(
        "scontrol show partition",
        _text(lambda text: slurm.parse_partition(text, "urgent")),
        of.partitions,
        raises=_SLURM,
        cost=2,
    ),
    Target("config.json of a model", _model("config.json"), of.model_configs, raises=(DataError,), cost=6),
    Target("safetensors header", _model("model.safetensors"), of.safetensors, raises=(DataError,), cost=6),
    Target("a shard of verl's", _shard, of.torch_zips),
    Target("verl's tracker", lambda data: judge_tracker(data, []), of.trackers),
    Target(
        "rows of a data file",
        lambda data: list(prompts_of(io.BytesIO(data), "a.jsonl", DataConfig())),
        of.data_rows,
        raises=(DataError,),
        form="json",
    ),
    Target(
        "an array of rows",
        lambda data: list(prompts_of(io.BytesIO(b"[" + data + b"]"), "a.json", DataConfig())),
        of.data_rows,
        raises=(DataError,),
        form="json",
    ),
    Target(
        "a table of rows",
        lambda data: list(prompts_of(io.BytesIO(b"prompt,answer\n" + data), "a.csv", DataConfig())),
        of.table_rows,
        raises=(DataError,),
    ),
)
