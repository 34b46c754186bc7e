"""A model's chat template and tokenizer, without the libraries that would load the model.

The rendered prompt is `head + moves + tail`: head is everything to the end of `lead`, each move is
`" " + move`, and tail closes the user's message and opens the answer. Ids of a move never depend on
its neighbours, so one more move only adds its ids before the tail.
"""

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from serving.engine import PromptParts, TokenPrompt

TEMPLATE_DATE = datetime(2024, 7, 26)
"""What `strftime_now` tells a template. Fixed: a date in the prompt would empty the prefix cache
at midnight and make a resumed run ask something else. (The date that Llama 3 falls back to.)"""

THINK_BEGIN, THINK_END = "<think>", "</think>"
"""Around a thought: tokens of models that reason, plain text to others."""
_AFTER_THOUGHT = f"\n{THINK_END}\n\n"

_MARK = "@@END-OF-MOVES@@"
_BODY_TOKENS_KEPT = 2_000_000
_HEADS_KEPT = 4096
_ANCHOR = "e2e4"

Message = dict[str, str]
_HeadKey = tuple[str, str, str, bool]
"""System, persona, lead, and whether the model thinks first."""
Ids: TypeAlias = "array[int]"
"""Arrays, since tuples of numbers would each be walked by Python's cycle collector."""


class TemplateError(ValueError):
    """The model has no usable chat template or tokenizer; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class _Head:
    ids: Ids
    tail: Ids


class ChatTemplate:
    """A Jinja chat template as Hugging Face's libraries set it up, in text alone."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = special_tokens
        self._has_system = self._keeps_system()

    def user_text(self, system: str, user: str, *, thinks: bool = False) -> str:
        """The whole prompt up to the start of the answer, or where the model `thinks` of its
        thought.

        A template without a system role gets `system` at the start of the user's message. `<think>`
        stands open at the end exactly where the model is to think, whether the template opens it or
        has never heard of it.
        """
        if self._has_system:
            messages = [_message("system", system), _message("user", user)]
        else:
            messages = [_message("user", f"{system}\n\n{user}")]
        text = self._render(messages, thinks=thinks)
        is_open = text.rfind(THINK_BEGIN) > text.rfind(THINK_END)
        if thinks and not is_open:
            return f"{text}{THINK_BEGIN}\n"
        if is_open and not thinks:
            return text.rstrip("\n") + f"\n{_AFTER_THOUGHT}"
        return text

    def _render(self, messages: list[Message], *, thinks: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                enable_thinking=thinks,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from error

    def _keeps_system(self) -> bool:
        mark = "@@SYSTEM@@"
        try:
            return mark in self._render([_message("system", mark), _message("user", "x")])
        except TemplateError:
            return False


class ModelTemplate:
    """Prompts of one model as token ids.

    Every match of a head shares its ids; a bounded store of bodies (head and moves, without the
    tail) makes the next ply's prompt the last one's plus one move.
    """

    think_end = THINK_END

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._heads: dict[_HeadKey, _Head] = {}
        self._move_ids: dict[str, Ids] = {}
        self._note_ids: dict[str, Ids] = {}
        self._bodies: dict[tuple[_HeadKey, tuple[str, ...]], Ids] = {}
        self._body_tokens = 0

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def render(self, parts: PromptParts) -> TokenPrompt:
        """The prompt's ids; raises TemplateError where the template cannot hold `parts`."""
        return TokenPrompt(self._ids(parts, thinks=False))

    def open_thought(self, parts: PromptParts) -> TokenPrompt:
        """As `render`, with `<think>` opened in the answer."""
        return TokenPrompt(self._ids(parts, thinks=True))

    def close_thought(self, parts: PromptParts, thought: str, max_tokens: int) -> TokenPrompt:
        """As `open_thought`, then the thought and `</think>`."""
        said = self._encode_after(thought)[:max_tokens]
        end = self._encode_after(_AFTER_THOUGHT)
        return TokenPrompt(self._ids(parts, thinks=True) + said + end)

    def _ids(self, parts: PromptParts, *, thinks: bool) -> Ids:
        key = (parts.system, parts.persona, parts.lead, thinks)
        head = self._heads.get(key) or self._add_head(key)
        body = self._body(key, head, parts.moves)
        if parts.tail_note:
            body = body + self._note(parts.tail_note)
        return body + head.tail

    def count_tokens(self, parts: PromptParts) -> int:
        return len(self.render(parts).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of bare text, no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def text(self, parts: PromptParts) -> str:
        """The prompt as the chat template itself renders it."""
        return self._chat.user_text(system_text(parts.system, parts.persona), user_text_of(parts))

    def check(self, parts: PromptParts) -> str | None:
        """None if the chat template's own rendering grows only at the end and equals `render`."""
        try:
            prompt = self.render(parts).ids
            shorter = PromptParts(parts.system, parts.persona, parts.lead, parts.moves[:-1])
            own, own_before = self.encode(self.text(parts)), self.encode(self.text(shorter))
        except TemplateError as error:
            return str(error)
        key = (parts.system, parts.persona, parts.lead, False)
        tail = (self._heads.get(key) or self._add_head(key)).tail
        grown = own_before[: len(own_before) - len(tail)]
        at = _first_difference(own[: len(grown)], grown)
        if at is not None:
            return self._differing("changes tokens of earlier moves", at, own, grown)
        at = _first_difference(own, list(prompt))
        if at is not None:
            return self._differing(
                "tokenises the whole prompt otherwise than its parts", at, own, prompt
            )
        return None

    def _differing(self, what: str, at: int, own: Sequence[int], other: Sequence[int]) -> str:
        def shown(ids: Sequence[int]) -> str:
            return repr(self._tokenizer.id_to_token(ids[at])) if at < len(ids) else "nothing"

        return f"the chat template {what}: token {at} is {shown(own)}, not {shown(other)}"

    def _body(self, key: _HeadKey, head: _Head, moves: tuple[str, ...]) -> Ids:
        if not moves:
            return head.ids
        before = self._bodies.get((key, moves[:-1]))
        if before is not None:
            last = moves[-1]
            body = before + (self._move_ids.get(last) or self._add_move(last))
        else:
            body = head.ids[:]
            for move in moves:
                body += self._move_ids.get(move) or self._add_move(move)
        self._keep(key, moves, body)
        return body

    def _keep(self, key: _HeadKey, moves: tuple[str, ...], body: Ids) -> None:
        self._bodies[(key, moves)] = body
        self._body_tokens += len(body)
        while self._body_tokens > _BODY_TOKENS_KEPT:
            oldest = next(iter(self._bodies))
            self._body_tokens -= len(self._bodies.pop(oldest))

    def _add_head(self, key: _HeadKey) -> _Head:
        system, lead = system_text(key[0], key[1]), key[2].strip()
        text = self._chat.user_text(system, lead + _MARK, thinks=key[3])
        head_text, mark, tail_text = text.partition(_MARK)
        if not mark or _MARK in tail_text or lead not in head_text:
            raise TemplateError("the chat template does not keep the user's message as it is")
        if system not in head_text:
            raise TemplateError("the chat template does not keep the system message as it is")
        head = _Head(array("i", self.encode(head_text)), self._encode_after(tail_text))
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        self._heads[key] = head
        return head

    def _add_move(self, move: str) -> Ids:
        ids = self._move_ids[move] = self._encode_after(f" {move}")
        return ids

    def _note(self, note: str) -> Ids:
        ids = self._note_ids.get(note)
        if ids is None:
            if len(self._note_ids) >= 1024:
                self._note_ids.clear()
            ids = self._note_ids[note] = self._encode_after(f"\n{note.strip()}")
        return ids

    def _encode_after(self, text: str) -> Ids:
        """Ids of `text` where it follows other text: some tokenizers put a mark before a start."""
        anchor = self.encode(_ANCHOR)
        whole = self.encode(_ANCHOR + text)
        if whole[: len(anchor)] == anchor:
            return array("i", whole[len(anchor) :])
        return array("i", self.encode(text))


def load_template(directory: Path) -> ModelTemplate:
    """The template of a model directory: `tokenizer.json` and its chat template.

    Raises TemplateError where one is missing or unreadable.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise TemplateError(
            f"{directory}: no tokenizer.json; a model with a fast tokenizer is needed"
        )
    tokenizer = _tokenizer(tokenizer_file, tokenizer_file.stat().st_mtime_ns)
    settings = _read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, settings)
    return ModelTemplate(tokenizer, ChatTemplate(source, _special_tokens(settings)))


@lru_cache(maxsize=8)
def _tokenizer(file: Path, changed_ns: int) -> Tokenizer:
    """A tokenizer is only read, and takes half a second to load: checks and engines share it."""
    del changed_ns  # a file that was written anew is another one
    try:
        return Tokenizer.from_file(str(file))
    # the library raises bare Exception
    except Exception as error:
        raise TemplateError(f"{file}: {error}") from error


def _template_source(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        raise TemplateError(f"{directory}: no chat template; use an instruction-tuned model")
    return source


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in settings.items():
        if re.fullmatch(r"\w+_token", name):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateError(f"{file}: {error}") from error
    return content if isinstance(content, dict) else {}


def system_text(system: str, persona: str) -> str:
    return f"{system.strip()}\n\n{persona.strip()}" if persona.strip() else system.strip()


def user_text_of(parts: PromptParts) -> str:
    moves = "".join(f" {move}" for move in parts.moves)
    note = f"\n{parts.tail_note.strip()}" if parts.tail_note else ""
    return f"{parts.lead.strip()}{moves}{note}"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
