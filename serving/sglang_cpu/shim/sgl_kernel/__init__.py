"""Stands in for SGLang's GPU kernels where there is no GPU: every name can be imported, none works.

SGLang imports the package whatever the device, and a dense model on a CPU calls nothing in it.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
