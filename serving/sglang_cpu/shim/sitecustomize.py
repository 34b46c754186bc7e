"""Run by Python at its start, in SGLang's processes on a CPU: lets torchvision be imported.

PyPI's torchvision is built for CUDA. With a CPU build of torch its operators do not load, and then
its Python half, which SGLang imports for every model, fails on the two that it expects by name.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_EXTENSION = "torchvision.extension"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Defining(Loader):
    """Loads the extension, then defines the operators that it did not bring."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if module._has_ops():
            return
        import torch

        make: Any = torch.library.Library
        library = make("torchvision", "DEF")
        library.define(f"nms{_BOXES}")
        library.define(f"qnms{_BOXES}")
        # the definitions go when the library does
        module.__dict__["_boardfleet_library"] = library


class _ExtensionFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _EXTENSION:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Defining(spec.loader)
        return spec


sys.meta_path.insert(0, _ExtensionFinder())
