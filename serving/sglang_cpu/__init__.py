"""SGLang on a CPU: where `make engines` puts it, and what it needs to run there.

SGLang's package asks for CUDA's libraries. Here it has an environment of its own without them, and
the few modules that it imports all the same (`shim`) go on its PYTHONPATH. For trying and comparing
engines on a machine without a GPU; with one, install SGLang as its own documentation says and name
its Python in the engine's config.
"""

from collections.abc import Mapping
from pathlib import Path

from serving.user_cache import cache_directory

SHIM = Path(__file__).with_name("shim")
"""On PYTHONPATH, Python runs `sitecustomize` in each of SGLang's processes, before all else."""

CPU_ENVIRONMENT: Mapping[str, str] = {"PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1"}
"""Without the second, SGLang takes the machine for one with CUDA, or looks for vLLM's operators."""

REMEDY = "make engines installs it for a CPU (2.8 GB, about two minutes)"


def installed_pins() -> Path:
    """The pins that the environment of `make engines` was installed from, once it is whole.

    They stand at the top of that environment; need not exist.
    """
    return cache_directory("engines") / "sglang" / "boardfleet-requirements.txt"


def sglang_python() -> Path | None:
    """Python of that environment; None where it is missing or not whole."""
    python = installed_pins().parent / "bin" / "python"
    return python if installed_pins().is_file() and python.exists() else None
