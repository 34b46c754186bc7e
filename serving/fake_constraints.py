"""The texts a constraint allows, for those that are a list of alternatives written out.

That is what engines of ours send: vLLM's `choice`, a GBNF or EBNF rule of literals, a regular
expression of escaped literals, a JSON schema with an enum. Anything else is a ConstraintError.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Texts = tuple[str, ...]

_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_RULE = re.compile(r"\s*root\s*::=\s*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_META = set(".^$*+?{}[]()")


class ConstraintError(ValueError):
    """Not a list of alternatives."""


def from_grammar(grammar: str) -> Texts:
    """`root ::= "e2e4" | "d2d4"`: each alternative one or more literals. llama.cpp takes an empty
    alternative, as after a trailing `|`, and so does this."""
    rule = _RULE.fullmatch(grammar.strip())
    if rule is None:
        raise ConstraintError("no rule `root ::= …`")
    texts, text, rest = [], "", rule[1].strip()
    while rest:
        if rest.startswith("|"):
            texts.append(text)
            text, rest = "", rest[1:].lstrip()
            continue
        literal = _LITERAL.match(rest)
        if literal is None:
            raise ConstraintError(f"not a literal: {rest[:20]!r}")
        text += _ESCAPE.sub(_unescape, literal[1])
        rest = rest[literal.end() :].lstrip()
    return (*texts, text)


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code:
        return chr(int(code, 16))
    return {"n": "\n", "r": "\r", "t": "\t"}.get(escape[4], escape[4])


def from_regex(pattern: str) -> Texts:
    """`(e2e4|d2d4)`, each alternative as `re.escape` writes it."""
    inner = re.fullmatch(r"\((?:\?:)?(.*)\)", pattern, re.DOTALL)
    texts, text = [], ""
    characters = iter(inner[1] if inner else pattern)
    for character in characters:
        if character == "|":
            texts.append(text)
            text = ""
        elif character == "\\":
            escaped = next(characters, "")
            if not escaped or escaped.isalnum():
                raise ConstraintError(f"not a literal: {pattern[:40]!r}")
            text += escaped
        elif character in _META:
            raise ConstraintError(f"not a literal: {pattern[:40]!r}")
        else:
            text += character
    return (*texts, text)


def from_schema(schema: Any) -> Texts:
    """A string of an enum, or an object whose one property is such a string: as JSON writes them.
    An object without properties is `{}`."""
    if not isinstance(schema, Mapping):
        raise ConstraintError("a schema is an object")
    if isinstance(schema.get("enum"), list):
        return tuple(_json(value) for value in schema["enum"])
    if schema.get("type") == "object":
        properties = schema.get("properties") or {}
        if not properties:
            return ("{}",)
        if len(properties) == 1:
            ((name, inner),) = properties.items()
            return tuple(f"{{{_json(name)}:{text}}}" for text in from_schema(inner))
    raise ConstraintError("neither an enum nor an object of one enum")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def from_response_format(form: Any) -> Texts | None:
    """OpenAI's `response_format`; None where it leaves the answer free."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return ("{}",)
    if kind == "json_schema":
        return from_schema((form.get("json_schema") or {}).get("schema"))
    raise ConstraintError(f"response_format of type {kind!r}")


def from_vllm(fields: Any) -> Texts:
    """vLLM's `structured_outputs`: exactly one of its kinds."""
    kinds: dict[str, Callable[[Any], Texts]] = {
        "choice": tuple,
        "regex": from_regex,
        "grammar": from_grammar,
        "json": lambda value: from_schema(json.loads(value) if isinstance(value, str) else value),
    }
    given = {name: value for name, value in dict(fields).items() if value is not None}
    if len(given) != 1 or not given.keys() <= kinds.keys():
        raise ConstraintError(
            f"exactly one of {', '.join(kinds)}, got {', '.join(given) or 'none'}"
        )
    ((name, value),) = given.items()
    texts = kinds[name](value)
    if not texts:
        raise ConstraintError("no alternative")
    return texts
