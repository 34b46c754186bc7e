"""Hostile text made safe for record files."""


def one_line(text: str) -> str:
    """Printable words of `text` on one line, single spaces between."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def header_value(text: str) -> str:
    """For `[Name "value"]`: readers disagree on escapes, so quotes and backslashes are replaced."""
    return one_line(text).replace('"', "'").replace("\\", "/")


def comment_text(text: str) -> str:
    """For `{comment}`: braces become parentheses."""
    return one_line(text.replace("{", "(").replace("}", ")"))


def result_mark(is_finished: bool, winner: int | None) -> str:
    """1-0, 0-1 or 1/2-1/2, the first side's points first; * while unfinished."""
    if not is_finished:
        return "*"
    return "1/2-1/2" if winner is None else ("1-0", "0-1")[winner]
