"""Completion for bash that leaves no blank behind `KEY=`, where a value has to follow. Loaded when a shell asks."""

from click.shell_completion import BashComplete, add_completion_class

_ADD = "COMPREPLY+=($value)"


@add_completion_class
class Bash(BashComplete):
    """click's own, but for the blank."""

    source_template = BashComplete.source_template.replace(
        _ADD, f"{_ADD}\n            [[ $value == *= ]] && compopt -o nospace"
    )
