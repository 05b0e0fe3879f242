"""What a configuration may say of its hooks."""

from pathlib import Path

import pytest

from verl_slurm.base.errors import ConfigError, PermissionRefused
from verl_slurm.checks import told
from verl_slurm.config.load import dump, load, parse_config
from verl_slurm.submit.checks.user_programs import check_hooks
from verl_slurm.submit.relative_paths import Places, absolute


def test_good_ones_are_kept(tmp_path: Path) -> None:
    words = [
        "hooks.on_end=[./tell.sh, a b]",
        "hooks.webhook=http://localhost:9/x",
        "hooks.webhook_token_file=t",
    ]
    config = absolute(parse_config(b"", "x.yaml", words), Places(tmp_path))
    assert config.hooks.on_end == (f"{tmp_path}/tell.sh", "a b")
    assert config.hooks.webhook_token_file == f"{tmp_path}/t"
    (tmp_path / "run.yaml").write_bytes(dump(config))
    assert load(tmp_path / "run.yaml") == config


def test_programs_and_the_token_are_looked_for_before_queueing(tmp_path: Path) -> None:
    def config(*words: str) -> list[str]:
        found = check_hooks(absolute(parse_config(b"", "x.yaml", words), Places(tmp_path)))
        return [line for lines in told(found) for line in lines]

    assert config() == []
    assert config("hooks.on_end=[sh, -c, date]", "hooks.webhook=https://x/") == [
        "not looked at: hooks.on_end: what sh starts",
        "not looked at: whether hooks.webhook answers",
    ]
    (tmp_path / "tell.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=f"no program {tmp_path}/tell.sh"):
        config("hooks.on_end=[./tell.sh]")
    (tmp_path / "tell.sh").chmod(0o755)
    assert config("hooks.on_end=[./tell.sh]") == ["hooks on_end"]
    with pytest.raises(ConfigError, match="a secret cannot be read"):
        config("hooks.webhook=https://x/", "hooks.webhook_token_file=token")
    (tmp_path / "token").write_text("x")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(PermissionRefused):
        config("hooks.webhook=https://x/", "hooks.webhook_token_file=token")
