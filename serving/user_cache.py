"""The user's cache directory: converted models, and bytecode where Python may not write its own."""

import importlib.util
import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """The user's cache directory, of all programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_directory(name: str) -> Path:
    """Our own directory of that name in it; need not exist."""
    return cache_home() / "boardfleet" / name


def bytecode_environment(package: str) -> dict[str, str]:
    """Variables for a child that imports the heavy `package`.

    Where Python is told to write no bytecode and the package has none, every import compiles
    thousands of files (17 s instead of 7 s for vllm, in each of its three processes): the child
    keeps it in our cache instead, and writes nothing where it was told not to.
    """
    spec = importlib.util.find_spec(package)
    if not sys.dont_write_bytecode or spec is None or spec.origin is None:
        return {}
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return {}
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(cache_directory("bytecode")),
    }
