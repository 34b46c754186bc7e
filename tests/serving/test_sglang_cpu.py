"""What SGLang needs on a CPU: where it is, and the modules that stand in for CUDA's."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.sglang_cpu import CPU_ENVIRONMENT, SHIM, installed_pins, sglang_python

FAKE_TORCH = """
from types import SimpleNamespace

class Library:
    def __init__(self, name, kind):
        self.name = f"{kind} {name}"
    def define(self, schema):
        print(self.name, schema.split("(")[0])
    def __del__(self):
        print("gone")

library = SimpleNamespace(Library=Library)
"""


def run_python(
    code: str, *path: Path, python: Path | str = sys.executable, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-c", code],
        env={**env, "PYTHONPATH": os.pathsep.join(map(str, (SHIM, *path)))},
        capture_output=True,
        text=True,
    )


def test_an_environment_counts_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = installed_pins().parent
    assert home.is_relative_to(tmp_path)
    assert sglang_python() is None
    python = home / "bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert sglang_python() is None, "still being installed"
    installed_pins().touch()
    assert sglang_python() == python
    python.unlink()
    assert sglang_python() is None


def test_the_shim_comes_first_on_the_path_of_sglangs_python() -> None:
    assert CPU_ENVIRONMENT["PYTHONPATH"] == str(SHIM)
    assert {file.relative_to(SHIM).as_posix() for file in SHIM.rglob("*.py")} == {
        "sitecustomize.py",
        "sgl_kernel/__init__.py",
    }


def test_any_kernel_can_be_imported_and_none_works() -> None:
    done = run_python(
        "import sgl_kernel\n"
        "from sgl_kernel import copy_all_layer_kv_cache_cpu as kernel\n"
        "print(hasattr(sgl_kernel, '__wrapped__'))\n"
        "kernel(1, out=2)\n"
    )
    assert done.stdout == "False\n"
    assert done.stderr.splitlines()[-1] == (
        "NotImplementedError: sgl_kernel.copy_all_layer_kv_cache_cpu needs a GPU"
    )


@pytest.mark.parametrize(
    ("has_ops", "printed"),
    [
        (False, ["extension", "DEF torchvision nms", "DEF torchvision qnms", "rest"]),
        (True, ["extension", "rest"]),
    ],
)
def test_operators_are_defined_where_torchvision_brought_none(
    tmp_path: Path, has_ops: bool, printed: list[str]
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension\nprint('rest')\n")
    (package / "extension.py").write_text(
        f"print('extension')\ndef _has_ops():\n    return {has_ops}\n"
    )
    done = run_python("import torchvision, os, sys; sys.stdout.flush(); os._exit(0)", tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == printed


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_a_python_without_torchvision_is_left_alone() -> None:
    done = run_python("import torchvision.extension")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torchvision'"


@pytest.mark.live
@pytest.mark.skipif(sglang_python() is None, reason="make engines has not been run")
def test_the_real_torchvision_is_imported() -> None:
    python = sglang_python()
    assert python is not None
    code = (
        "import torch, torchvision.ops, sgl_kernel\n"
        "from importlib.metadata import version\n"
        "print(torch.cuda.is_available(), torch.ops.torchvision.nms, version('sglang'))\n"
    )
    done = run_python(code, python=python, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "torchvision.nms", "0.5.23"]
