"""`make setup`, `make engines` and `.ci/run`, with stand-ins for python, uv and make."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# One script is both the python that makes the .venv and the one inside it.
PYTHON = r"""#!/usr/bin/env bash
case "$1 $2" in
  "-c from serving"*) echo "$STUB_PINS" ;;
  "-c "*) exit "${STUB_WRONG_VERSION:-0}" ;;
  "-V ") echo "Python 3.9.2" ;;
  "-m venv") echo "venv ${*:3}" >>"$STUB_LOG"
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip")
    if [ "$3" = config ]; then
      case "$5" in
        global.find-links) echo "${STUB_FIND_LINKS:-}" ;;
        global.index-url) echo "${STUB_INDEX:-}" ;;
      esac
    else
      echo "pip ${*:3}" >>"$STUB_LOG"
      cp "$STUB_UV" "$(dirname "$0")/uv"
    fi ;;
esac
"""
UV = r"""#!/usr/bin/env bash
case "$1 $2" in
  "--version "*) ;;
  "venv "*) echo "uv $*" >>"$STUB_LOG"
    mkdir -p "${!#}/bin"; cp "$(dirname "$0")/python" "${!#}/bin/python" ;;
  "pip compile") [ "$(cat)" = "torch==2.13.0+cpu" ] && [ "${STUB_TORCH_HERE:-}" = yes ] ;;
  *) echo "uv $*" >>"$STUB_LOG"; exit "${STUB_UV_CODE:-0}" ;;
esac
"""


PINS = ("cpu-constraints.txt", "cpu-overrides.txt", "sglang-cpu-requirements.txt")


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    """A fresh clone with only what `make setup` reads."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.root.mkdir()
        for name in ("Makefile", "pyproject.toml", *PINS):
            shutil.copy(ROOT / name, self.root / name)
        self.log = folder / "log"
        self.log.touch()
        self.python = folder / "python3"
        write_script(self.python, PYTHON)
        write_script(folder / "uv", UV)
        kept = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        self.environment = kept | {"STUB_LOG": str(self.log), "STUB_UV": str(folder / "uv")}
        self.sglang = folder / "a cache/sglang"
        self.environment["STUB_PINS"] = str(self.sglang / "pins.txt")

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.make("setup", **variables)

    def make(self, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", target, f"PYTHON={self.python}"],
            cwd=self.root,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def calls(self) -> list[str]:
        """What was called since the last look."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines

    @property
    def is_ready(self) -> bool:
        return (self.root / ".venv/.ready").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_an_old_python_is_one_clear_line(checkout: Checkout) -> None:
    done = checkout.setup(STUB_WRONG_VERSION="1")
    assert done.returncode != 0
    complaint, *rest = done.stderr.splitlines()
    assert "needs Python 3.11 to 3.14" in complaint
    assert "Python 3.9.2" in complaint
    assert "make setup PYTHON=" in complaint
    assert all(line.startswith("make:") for line in rest)
    assert checkout.calls() == []


def test_a_fresh_clone_takes_torch_from_the_cpu_backend(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    venv, pip, install = checkout.calls()
    assert venv == "venv --clear .venv"
    assert pip.endswith("-c cpu-constraints.txt uv")
    assert install == (
        "uv pip install --quiet --python .venv/bin/python --torch-backend cpu"
        " --override cpu-overrides.txt -c cpu-constraints.txt -e .[cpu,dev,llamacpp,otel,ray]"
    )
    assert checkout.is_ready


def test_find_links_that_hold_the_torch_wheel_replace_the_backend(checkout: Checkout) -> None:
    checkout.setup(STUB_FIND_LINKS="/wheels /more", STUB_TORCH_HERE="yes")
    install = checkout.calls()[-1]
    assert "--find-links /wheels --find-links /more" in install
    assert "--torch-backend" not in install


def test_find_links_from_the_environment_come_first(checkout: Checkout) -> None:
    checkout.setup(PIP_FIND_LINKS="/mine", STUB_FIND_LINKS="/wheels", STUB_TORCH_HERE="yes")
    install = checkout.calls()[-1]
    assert "--find-links /mine" in install
    assert "/wheels" not in install


def test_find_links_without_the_torch_wheel_are_left_alone(checkout: Checkout) -> None:
    checkout.setup(STUB_FIND_LINKS="/wheels")
    install = checkout.calls()[-1]
    assert "--find-links" not in install
    assert "--torch-backend cpu" in install


def test_pips_index_is_passed_on_unless_uv_has_its_own(checkout: Checkout) -> None:
    checkout.setup(STUB_INDEX="file:///mirror")
    assert "--default-index file:///mirror" in checkout.calls()[-1]
    (checkout.root / ".venv/.ready").unlink()
    checkout.setup(STUB_INDEX="file:///mirror", UV_DEFAULT_INDEX="file:///own")
    assert "--default-index" not in checkout.calls()[-1]


def test_the_second_time_does_nothing(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    assert checkout.setup().returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "cpu-constraints.txt", "cpu-overrides.txt"])
def test_a_changed_file_installs_again_in_the_same_venv(checkout: Checkout, name: str) -> None:
    checkout.setup()
    checkout.calls()
    ready = (checkout.root / ".venv/.ready").stat().st_mtime_ns
    os.utime(checkout.root / name, ns=(ready + 10**9, ready + 10**9))
    checkout.setup()
    (install,) = checkout.calls()
    assert install.startswith("uv pip install")


@pytest.mark.parametrize("damage", ["no python", "no uv", "cut off"])
def test_a_half_made_venv_is_made_anew(checkout: Checkout, damage: str) -> None:
    checkout.setup()
    checkout.calls()
    venv = checkout.root / ".venv"
    (venv / ".ready").unlink()
    match damage:
        case "no python":
            (venv / "bin/python").unlink()
        case "no uv":
            (venv / "bin/uv").unlink()
        case _:
            (venv / ".unfinished").touch()
    assert checkout.setup().returncode == 0
    assert checkout.calls()[0] == "venv --clear .venv"
    assert checkout.is_ready
    assert not (venv / ".unfinished").exists()


def test_a_failed_install_is_not_ready_and_keeps_the_venv(checkout: Checkout) -> None:
    assert checkout.setup(STUB_UV_CODE="2").returncode != 0
    assert not checkout.is_ready
    checkout.calls()
    assert checkout.setup().returncode == 0
    (install,) = checkout.calls()
    assert install.startswith("uv pip install")


def test_an_install_that_was_killed_starts_over(checkout: Checkout) -> None:
    assert checkout.setup(STUB_UV_CODE="137").returncode != 0
    checkout.calls()
    assert checkout.setup().returncode == 0
    assert checkout.calls()[0] == "venv --clear .venv"


def test_engines_installs_sglang_into_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    done = checkout.make("engines")
    assert done.returncode == 0, done.stderr
    assert f"SGLang is installed: {checkout.sglang}" in done.stderr
    assert checkout.calls() == [
        f"uv venv --quiet --clear --python .venv/bin/python {checkout.sglang}",
        f"uv pip install --quiet --python {checkout.sglang}/bin/python --torch-backend cpu"
        " --compile-bytecode --no-deps -r sglang-cpu-requirements.txt",
    ]


def test_engines_sets_up_first_and_the_second_time_does_nothing(checkout: Checkout) -> None:
    assert checkout.make("engines").returncode == 0
    assert checkout.is_ready
    checkout.calls()
    done = checkout.make("engines")
    assert done.returncode == 0
    assert "installed already" in done.stderr
    assert checkout.calls() == []


@pytest.mark.parametrize("damage", ["other pins", "no python", "cut off"])
def test_an_sglang_that_is_not_whole_is_made_anew(checkout: Checkout, damage: str) -> None:
    checkout.setup()
    code = "137" if damage == "cut off" else "0"
    assert (checkout.make("engines", STUB_UV_CODE=code).returncode == 0) == (code == "0")
    match damage:
        case "other pins":
            (checkout.root / "sglang-cpu-requirements.txt").write_text("sglang==9.9.9\n")
        case "no python":
            (checkout.sglang / "bin/python").unlink()
    checkout.calls()
    assert checkout.make("engines").returncode == 0
    assert checkout.calls()[0].startswith("uv venv --quiet --clear")


def test_a_python_without_an_sglang_wheel_is_one_clear_line(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    done = checkout.make("engines", STUB_WRONG_VERSION="1", MAKEFLAGS="-o setup")
    assert done.returncode != 0
    assert "SGLang has wheels for Python 3.11 to 3.13" in done.stderr
    assert checkout.calls() == []


@pytest.mark.parametrize(("broken", "code"), [("", 0), ("lint", 1), ("test", 1)])
def test_ci_runs_both_and_fails_when_either_does(tmp_path: Path, broken: str, code: int) -> None:
    clone = tmp_path / "clone"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", clone / ".ci/run")
    tools = tmp_path / "tools"
    tools.mkdir()
    write_script(
        tools / "make", f'#!/bin/sh\necho "$1 $(pwd) CI=$CI"\n[ "$1" != "{broken or "none"}" ]\n'
    )
    for program in ("chromium", "nginx", "haproxy"):  # nothing is installed by a test
        write_script(tools / program, "#!/bin/sh\n")
    done = subprocess.run(
        ["bash", str(clone / ".ci/run")],
        cwd=tmp_path,
        env={"PATH": f"{tools}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [f"lint {clone} CI=true", f"test {clone} CI=true"]
    assert done.returncode == code
    assert broken in done.stderr
