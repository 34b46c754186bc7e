"""Files that a person names to be written: whole or not at all, and over nothing of another kind.

What stands in the way is told as StoreError, one line with the path.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from arena.store import StoreError


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file may be written over by: one of its own kind."""

    name: str
    """In words, as in "is no page of ours"."""
    beginning: bytes
    """The first bytes of every such file, in lower case."""
    mark: bytes = b""
    """What its first KiB holds too, in lower case."""


HTML_PAGE = Kind("page of ours", b"<!doctype html>\n<!-- boardfleet -->")


def check(path: Path, kind: Kind) -> None:
    """Raise what `write` would, as far as it can be known beforehand. Nothing is written."""
    with _told(path):
        if not _is_stream(path):
            _check_replaceable(path, kind)
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass


def write(path: Path, kind: Kind, pieces: Iterable[str]) -> None:
    """Write a text as UTF-8; a device or pipe is written to."""
    with _told(path):
        if _is_stream(path):
            with path.open("w", encoding="utf-8", newline="") as stream:
                stream.writelines(pieces)
        else:
            _check_replaceable(path, kind)
            _replace(path.resolve(), pieces)


def write_all(folder: Path, files: Mapping[str, tuple[Kind, Iterable[str]]]) -> None:
    """Write texts into a folder by their names, all of them or none; a folder that is not there is
    made, and other files in it are left alone."""
    with _told(folder):
        for name, (kind, _) in files.items():
            with _told(folder / name):
                _check_replaceable(folder / name, kind)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as beside:
                for name, (_, pieces) in files.items():
                    with (Path(beside) / name).open("w", encoding="utf-8", newline="") as file:
                        file.writelines(pieces)
                for name in files:
                    os.replace(Path(beside) / name, folder / name)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    except ValueError as error:
        raise StoreError(f"{str(path)!r}: is no file to write to ({error})") from None


def _is_stream(path: Path) -> bool:
    """A device, pipe or socket: there is nothing in it to be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _check_replaceable(path: Path, kind: Kind) -> None:
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(1024).lower()
        if not head.startswith(kind.beginning) or kind.mark not in head:
            raise StoreError(f"{path}: is there, and is no {kind.name}; name another file")


def _replace(path: Path, pieces: Iterable[str]) -> None:
    """Write beside its place and move it there."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.writelines(pieces)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
