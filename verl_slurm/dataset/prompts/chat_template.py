"""Finds a run's chat template, as far as possible without transformers."""

from pathlib import Path

import msgspec

from verl_slurm.base.bounded import SMALL, TOKENIZER, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, DataError

__all__ = ["has_template", "no_conversations", "no_template", "processor_template", "read_template"]


def read_template(path: Path) -> str:
    """Reads the Jinja template at `path`.

    Raises:
        DataError: there is none, or it is no text.
    """
    remedy = "set data.chat_template to auto, none or the path of a Jinja template"
    try:
        return read_regular(path, SMALL, follow=True).decode()
    except OSError as error:
        raise DataError("no such chat template", where=path, found=error.strerror, remedy=remedy) from None
    except ValueError as error:
        raise DataError("not a chat template", where=path, found=error, remedy=remedy) from None


def has_template(model: Path) -> bool:
    """Returns whether the tokenizer of a model directory has a chat template of its own."""
    if (model / "chat_template.jinja").is_file() or processor_template(model):
        return True
    try:
        # Without transformers, which a login node may lack. Raw values: the rest of the file is of no interest.
        data = read_regular(model / "tokenizer_config.json", TOKENIZER, follow=True)
        said = decode_json(data, dict[str, msgspec.Raw], TOKENIZER, doubles=False)
    # Not said here: whoever loads the tokenizer says it with its reason.
    except (OSError, *UNREADABLE):
        return False
    return bytes(said.get("chat_template", b"null")).strip() not in (b"null", b'""', b"[]")


def processor_template(model: Path) -> str | None:
    """Returns the chat template in chat_template.json, where older processors keep it; None: it has none."""
    try:
        data = read_regular(model / "chat_template.json", TOKENIZER, follow=True)
        said = decode_json(data, dict[str, msgspec.Raw], TOKENIZER, doubles=False)
        return msgspec.json.decode(said["chat_template"], type=str) or None
    except (OSError, KeyError, *UNREADABLE):
        return None


def no_template(where: object) -> DataError:
    """Builds the error for conversations without a chat template."""
    return DataError(
        "the prompts are conversations and the tokenizer has no chat template",
        where=where,
        expected="chat_template in tokenizer_config.json, chat_template.jinja, or chat_template.json",
        remedy="set data.chat_template to a Jinja file, or model.path to a chat model",
    )


def no_conversations(where: object) -> DataError:
    """Builds the error for conversations that the configuration excludes."""
    return DataError(
        "the prompts are conversations and data.chat_template is none",
        where=where,
        expected="text",
        remedy="set data.chat_template=auto, or data.prompt_key to a key with text",
    )
