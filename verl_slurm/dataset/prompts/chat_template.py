"""Renders by a run's chat template, as far as possible without transformers; tells a row that is refused."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_slurm.base.bounded import SMALL, TOKENIZER, decode_json, read_regular
from verl_slurm.base.errors import UNREADABLE, DataError


def read_template(path: Path) -> str:
    """Reads the Jinja template at `path`. Raises DataError if there is none, or it is no text."""
    remedy = "set data.chat_template to auto, none or the path of a Jinja template"
    try:
        return read_regular(path, SMALL, follow=True).decode()
    except OSError as error:
        raise DataError("no such chat template", where=path, found=error.strerror, remedy=remedy) from error
    except ValueError as error:
        raise DataError("not a chat template", where=path, found=error, remedy=remedy) from None


def has_template(model: Path) -> bool:
    """Returns whether the tokenizer of a model directory has a chat template of its own."""
    here = (model / "chat_template.jinja").is_file() or _default(_in_configuration(model))
    return bool(here or processor_template(model))


def model_template(model: Path) -> str | None:
    """Reads the chat template of a model directory as its tokenizer chooses it; None: none, or unknown which."""
    try:
        return read_regular(model / "chat_template.jinja", SMALL, follow=True).decode()
    except (OSError, *UNREADABLE):
        pass
    return _default(_in_configuration(model)) or processor_template(model)


def _default(template: Any) -> str | None:
    # Several, by name: without tools and documents transformers takes this one alone.
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) and template else None


def same_template(one: str | None, other: str | None) -> bool:
    """Returns whether two chat templates render alike: read as text or as bytes, ends of lines are one to Jinja."""
    if one is None or other is None:
        return one is other
    return _lines(one) == _lines(other)


def _lines(template: str) -> str:
    return template.replace("\r\n", "\n").replace("\r", "\n")


def _in_configuration(model: Path) -> Any:
    try:
        # Without transformers, which a login node may lack. Raw values: the rest of the file is of no interest.
        data = read_regular(model / "tokenizer_config.json", TOKENIZER, follow=True)
        said = decode_json(data, dict[str, msgspec.Raw], TOKENIZER, doubles=False)
        return msgspec.json.decode(said.get("chat_template", b"null"))
    # Not said here: whoever loads the tokenizer says it with its reason.
    except (OSError, *UNREADABLE):
        return None


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
        expected="chat_template in tokenizer_config.json (of several by name, `default`), chat_template.jinja, or "
        "chat_template.json",
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


def renderer(template: str) -> Callable[[Sequence[Any]], str] | None:
    """Returns what renders a conversation as transformers does, but for special tokens; None: unknown how."""

    # Here: other users of this module, and most data, do without.
    from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks the assistant's text for programs that mask it."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        tree = environment.parse(template)
        compiled = environment.from_string(tree)
        names = meta.find_undeclared_variables(tree)
    except TemplateSyntaxError as error:
        broken = error
        if "unknown tag" in str(error):  # of a newer transformers
            return None

        def refuse(_: object) -> str:
            raise broken

        return refuse  # with the first conversation: prompts that are text do without
    except UNREADABLE:
        return None
    # They are empty: only whether the template takes a conversation is asked.
    tokens = {name: "" for name in names if name.endswith("_token")}
    # transformers gives these two in any case, so that they are defined.
    given = {"tools": None, "documents": None, "add_generation_prompt": True}
    return lambda messages: compiled.render(messages=messages, **given, **tokens)


def refuses(error: BaseException) -> bool:
    """Decides whether an error of a template or a tokenizer is its refusal of a text, which stays."""
    # Errors of the machine may pass.
    # A tokenizer's panic is no Exception, and its class has no name that could be imported.
    return type(error).__name__ == "PanicException" or (
        isinstance(error, Exception) and not isinstance(error, OSError | MemoryError | DataError)
    )


def template_refuses(where: object, error: BaseException) -> DataError:
    """Builds the error for a conversation that the chat template refuses."""
    return DataError(
        "the chat template refuses a prompt",
        where=where,
        found=f"{type(error).__name__}: {error}",
        expected="a conversation as the template wants it",
        remedy="fix the row, or set data.chat_template",
    )


def require_asked(where: object, messages: Sequence[Any], text: str) -> str:
    """Returns a rendered conversation. Raises DataError if the template has left out what is to be answered."""
    last = messages[-1]
    content = last.get("content")
    # A template may quote what it says; a word of it stays. Of an answer it may leave out what was thought.
    words = (
        re.findall(r"\w{3,}", content) if isinstance(content, str) and last.get("role") != "assistant" else []
    )
    if words and not any(word.casefold() in text.casefold() for word in words):
        raise DataError(
            "the chat template leaves out the last message",
            where=where,
            found=f"a message of the role {last.get('role')!r}, and no word of it in the prompt",
            expected="the text that the policy answers",
            remedy="use a role that the template knows, such as user, or set data.chat_template",
        )
    return text


def tokens_of(
    encode: Callable[[list[str]], list[list[int]]],
    texts: list[str],
    place: Callable[[str], object],
    vocabulary: int | None,
) -> list[list[int]]:
    """Returns the tokens that a tokenizer makes of a batch of texts.

    Args:
        place: text → the row that it is of.
        vocabulary: number of the model's tokens; None: not known.

    Raises:
        DataError: the tokenizer refuses one of them or makes nothing of it, or the model has no such token.
    """
    try:
        found = encode(texts)
    except BaseException as error:
        if not refuses(error):
            raise
        # Its error tells no row, so each is tried by itself.
        for text in texts:
            try:
                encode([text])
            except BaseException as own:
                if not refuses(own):
                    raise
                raise DataError(
                    "the tokenizer refuses a prompt",
                    where=f"{place(text)}, prompt {text[:40]!r}",
                    found=f"{type(own).__name__}: {own}",
                    remedy="fix or remove the row",
                ) from own
        raise
    for text, ids in zip(texts, found, strict=True):
        if not ids:
            raise DataError(
                "the tokenizer makes no token of a prompt",
                where=f"{place(text)}, prompt {text[:40]!r}",
                expected="a tokenizer that has the prompt's characters",
                remedy="set model.path to a model with its whole tokenizer, or remove the row",
            )
        if vocabulary is not None and max(ids, default=0) >= vocabulary:
            raise DataError(
                "the model lacks a token of the tokenizer's",
                where=f"{place(text)}, prompt {text[:40]!r}",
                found=f"token {max(ids)}",
                expected=f"below vocab_size={vocabulary} of the model's config.json",
                remedy="use the tokenizer that belongs to the model, or save the model after resize_token_embeddings",
            )
    return found
