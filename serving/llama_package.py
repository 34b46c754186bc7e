"""The package that has llama.cpp's server in it, seen without importing it.

Apart from `llama_child`, which is run as a program: one that is imported too would be there twice.
"""

import importlib.util

REMEDY = (
    "pip install 'boardfleet[llamacpp]', put llama-server on PATH, or name its file in the "
    "engine's config"
)
"""Where no llama.cpp server is found."""


def is_installed() -> bool:
    """Whether `llama_child` can serve."""
    return importlib.util.find_spec("xllamacpp") is not None
