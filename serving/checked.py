"""Values that others wrote, checked as they are taken: settings of a model, headers of files. Pure.

ValueError, one line with the key, for any other type or size than is asked for.
"""

import json
from collections.abc import Mapping
from typing import Any

_LONGEST = 40
"""Characters of a refused value that are repeated."""


def json_object(text: str | bytes) -> dict[str, Any]:
    """A JSON text that is an object; ValueError for any other, however deep it is nested."""
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError as error:
        where = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"is no JSON{where}") from None
    if not isinstance(told, dict):
        raise ValueError("is no JSON object")
    return told


class Fields:
    """Values by key. What is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", *, within: str = "") -> None:
        """`prefix`: begins every key. `within`: what the values stand in, for errors."""
        self._values = values
        self._prefix = prefix
        self._within = within

    def value(self, key: str) -> Any:
        """As it is, of any type; None where it is absent."""
        return self._values.get(self._prefix + key)

    def number(self, key: str, *, least: int = 1, most: int = 1 << 24) -> int | None:
        """A whole number; None where it is absent."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise self._wrong(key, f"a whole number from {least} to {most:,}")

    def wanted(self, key: str, *, most: int = 1 << 24) -> int:
        """A whole number from 1."""
        value = self.number(key, most=most)
        if value is None:
            raise ValueError(f"{self._within}{self._prefix}{key}: is missing")
        return value

    def is_set(self, key: str, *, default: bool = False) -> bool:
        """A yes or no."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self._wrong(key, "true or false")

    def word(self, key: str) -> str | None:
        """A text; None where it is absent."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a text")

    def words(self, key: str, count: int) -> list[str] | None:
        """The first texts of a list, or letters of a text, which has so many at least."""
        value = self.value(key)
        if value is None:
            return None
        is_long = isinstance(value, list | str) and len(value) >= count
        if is_long and all(isinstance(word, str) for word in value[:count]):
            return list(value[:count])
        raise self._wrong(key, f"a list of {count} names")

    def numbers(self, key: str, count: int | None = None, *, most: int) -> list[int] | None:
        """Whole numbers from 0, `count` of them where that is given; None where they are absent."""
        value = self.value(key)
        if value is None:
            return None
        is_long = isinstance(value, list) and count in (None, len(value))
        if is_long and all(isinstance(n, int) and 0 <= n <= most for n in value):
            return list(map(int, value))
        of = "" if count is None else f"{count} "
        raise self._wrong(key, f"a list of {of}whole numbers from 0 to {most:,}")

    def inner(self, key: str) -> "Fields | None":
        """A table; None where it is absent."""
        value = self.value(key)
        if value is None or isinstance(value, Mapping):
            return None if value is None else self._table(value, key)
        raise self._wrong(key, "a table")

    def inners(self, key: str, count: int) -> "list[Fields] | None":
        """A list of so many tables; None where it is absent."""
        value = self.value(key)
        if value is None:
            return None
        is_long = isinstance(value, list) and len(value) == count
        if is_long and all(isinstance(table, Mapping) for table in value):
            return [self._table(table, key) for table in value]
        raise self._wrong(key, f"a list of {count} tables")

    def _table(self, values: Mapping[str, Any], key: str) -> "Fields":
        return Fields(values, within=f"{self._within}{self._prefix}{key}.")

    def _wrong(self, key: str, wanted: str) -> ValueError:
        name = f"{self._within}{self._prefix}{key}"
        return ValueError(f"{name}: is {_shown(self.value(key))}, not {wanted}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "a table"
    return repr(value)[:_LONGEST]
