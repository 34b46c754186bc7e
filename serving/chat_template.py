"""Prompts of engines that take chat messages and template them themselves."""

from functools import cached_property

from serving.engine import ChatPrompt, PromptParts
from serving.models import local_directory
from serving.template import (
    ModelTemplate,
    TemplateError,
    load_template,
    system_text,
    user_text_of,
)

MESSAGE_TOKENS = 16
"""Upper estimate of what a chat template puts around one message."""


class MessagesTemplate:
    """A system and a user message, with the words that `ModelTemplate` would render for the model.

    Tokens are counted with the model's own tokenizer where its files are on this machine. Else they
    are estimated from above: one for each UTF-8 byte, since tokenizers that fall back to bytes
    never need more, and `MESSAGE_TOKENS` for each message.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def render(self, parts: PromptParts) -> ChatPrompt:
        """The two messages; one more move only adds to the end of the second."""
        return ChatPrompt(
            (
                ("system", system_text(parts.system, parts.persona)),
                ("user", user_text_of(parts)),
            )
        )

    def count_tokens(self, parts: PromptParts) -> int:
        """Tokens of the prompt, or more."""
        if self._counter is not None:
            return self._counter.count_tokens(parts)
        return estimated_tokens(self.render(parts))

    def check(self, parts: PromptParts) -> str | None:
        """None: what the server's own template makes of the messages is not seen from here."""
        del parts
        return None

    @cached_property
    def _counter(self) -> ModelTemplate | None:
        directory = local_directory(self._model)
        if directory is None:
            return None
        try:
            return load_template(directory)
        except TemplateError:
            return None


def estimated_tokens(prompt: ChatPrompt) -> int:
    """An upper estimate by bytes."""
    return sum(len(content.encode()) + MESSAGE_TOKENS for _, content in prompt.messages)
