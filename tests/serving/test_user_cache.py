"""Bytecode of heavy packages goes to our cache only where Python may not keep its own."""

import importlib.util
import sys
from pathlib import Path

import pytest

from serving.user_cache import bytecode_environment, cache_directory


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "heavy_package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def test_a_python_that_keeps_bytecode_is_left_alone(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert bytecode_environment("heavy_package") == {}


def test_a_package_with_bytecode_is_left_alone(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compiled = Path(importlib.util.cache_from_source(str(package)))
    compiled.parent.mkdir(parents=True, exist_ok=True)
    compiled.write_bytes(b"")
    assert bytecode_environment("heavy_package") == {}


def test_otherwise_it_goes_to_our_cache(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode_environment("heavy_package") == {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(cache_directory("bytecode")),
    }


def test_a_missing_package_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode_environment("no_such_package_here") == {}
