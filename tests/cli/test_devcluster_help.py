"""What `devcluster --help` says of its commands."""

from click.testing import CliRunner

from verl_slurm.cli.main import cli


def test_the_list_of_commands_is_not_cut_off() -> None:
    text = CliRunner().invoke(cli, ["devcluster", "--help"]).output
    assert "..." not in text.partition("Commands:")[2]
    assert "until all nodes are idle (a second or two;" in " ".join(text.split())
