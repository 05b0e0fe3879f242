"""The lines of a hostfile, and what is refused."""

import pytest
from verl_slurm_daemon.allocation.hostfile import Host, check_hosts, find_host, parse_hostfile

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError

TEXT = "# the first leads\nworker-0 slots=8\n\nworker-1.cluster slots=4  # smaller\n"


def test_hosts_come_in_their_order_and_are_found_by_full_and_short_names() -> None:
    assert parse_hostfile(TEXT.encode(), "hosts") == (Host("worker-0", 8), Host("worker-1.cluster", 4))
    hosts = parse_hostfile(TEXT.encode(), "hosts")
    assert find_host(hosts, "worker-0.cluster") == 0
    assert find_host(hosts, "worker-1.cluster") == 1
    with pytest.raises(ConfigError, match="--host NAME"):
        find_host(hosts, "elsewhere")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "worker-0\n",
        "worker-0 slots=0\n",
        "w slots=1\nw slots=1\n",
        "a;b slots=1\n",
        "w slots=²\n",
    ],
)
def test_what_is_no_hostfile_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="hosts.*fix the hostfile"):
        parse_hostfile(text.encode(), "hosts")


def test_a_hostfile_in_another_encoding_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="byte 7 is no UTF-8"):
        parse_hostfile(b"worker-\xe9 slots=8\n", "hosts")


def test_hosts_that_do_not_fit_the_run_are_refused_and_so_are_second_copies() -> None:
    config = run_config(nodes=2, dp_size=8)
    check_hosts((Host("a", 4), Host("b", 4)), config)
    with pytest.raises(ConfigError, match=r"distributed\.nodes"):
        check_hosts((Host("a", 8),), config)
    with pytest.raises(ConfigError, match="slots=4 or more"):
        check_hosts((Host("a", 4), Host("b", 2)), config)
    config = run_config(nodes=2, dp_size=2, local_dir="/nvme")
    with pytest.raises(ConfigError, match="checkpoint.local_dir"):
        check_hosts((Host("a", 1), Host("b", 1)), config)
