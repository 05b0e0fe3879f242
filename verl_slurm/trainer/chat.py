"""Renders conversations as text, by the tokenizer's chat template or by one of the user's."""

from collections.abc import Callable

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl_slurm.base.errors import DataError
from verl_slurm.dataset.prompts.chat_template import no_conversations, no_template
from verl_slurm.dataset.prompts.rows import Prompt

__all__ = ["as_text", "plain_text"]


def plain_text(where: str, prompt: Prompt) -> str:
    """Returns the prompt unchanged; it must be text.

    Raises:
        DataError: it is a conversation.
    """
    if isinstance(prompt, str):
        return prompt
    raise no_conversations(where)


def as_text(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Callable[[str, Prompt], str]:
    """Returns a function (place, prompt) → the text whose tokens the policy sees.

    Args:
        template: a chat template; None: the tokenizer's own.

    Raises (when called):
        DataError: no template for a conversation, or the template refuses it.
    """

    def render(where: str, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        if template is None and not tokenizer.chat_template:
            raise no_template(where)
        try:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, chat_template=template
            )
        # Templates are programs, and unexpected input surfaces as any of these.
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                "the chat template refuses a prompt",
                where=where,
                found=f"{type(error).__name__}: {error}",
                expected="a conversation as the template wants it",
                remedy="fix the row, or set data.chat_template",
            ) from error
        return str(text)

    return render
