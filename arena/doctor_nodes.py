"""The machines of a Ray cluster against this one: what would keep replicas from running there.

A replica runs in whatever environment Ray has on its machine. Ray is asked in a child, which ends
with the doctor.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arena.doctor import REINSTALL, Check
from serving.config import EngineConfigError
from serving.process import kill_group, last_error
from serving.ray_config import (
    CLUSTER_ADDRESSES,
    installed_ray,
    is_cluster_address,
    token_environment,
)

LIMIT_S = 150.0
"""For the whole cluster; a machine that does not answer is told after 60."""
COMMAND = (sys.executable, "-m", "serving.ray_nodes")
"""Is given the address and the number of a socket."""
_CLUSTER, _NODE = "ray cluster", "ray node"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine, as a process of Ray finds it there."""

    python: str
    executable: str
    """Of the Python that replicas run in."""
    packages: Mapping[str, str | None]
    """Versions of those that must be the same everywhere; None: not installed."""
    lacks_boardfleet: str | None
    """Why a replica cannot be imported."""
    gpus: tuple[str, ...]
    """NVIDIA GPUs by name."""
    free: Mapping[str, float]
    """What Ray has not set aside there, by its names: CPU, GPU, and memory in bytes."""

    @property
    def python_minor(self) -> str:
        return ".".join(self.python.split(".")[:2])


def check_nodes(address: str) -> tuple[Check, ...]:
    """A check of each machine, or one that says why the cluster was not reached; within `LIMIT_S`.

    Raises EngineConfigError for what is no address.
    """
    if not is_cluster_address(address):
        raise EngineConfigError(f"{address!r} is no cluster's address; write {CLUSTER_ADDRESSES}")
    if installed_ray() is None:
        mend = f"{sys.executable} -m pip install 'boardfleet[ray]'"
        return (Check(_CLUSTER, False, "Ray is not installed here", mend),)
    return tuple(read_answer(address, _ask(address)))


def read_answer(address: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    """The checks that follow from what `serving.ray_nodes` printed."""
    if "error" in answer:
        yield Check(_CLUSTER, False, f"{address} was not joined: {answer['error']}")
        return
    here = _facts_of(answer["here"])
    for node in answer["nodes"]:
        if "error" in node:
            yield Check(_NODE, False, f"{node['address']}: {node['error']}")
        else:
            yield compare(node["address"], _facts_of(node["facts"]), here)


def compare(address: str, there: NodeFacts, here: NodeFacts) -> Check:
    """Whether a replica runs there as it would here."""
    if differences := list(_differences(there, here)):
        return Check(_NODE, False, f"{address}: {'; '.join(differences)}", _mend(there, here))
    versions = [f"{name} {version}" for name, version in there.packages.items() if version]
    told = [f"as here: {', '.join([f'python {there.python}', *versions])}"]
    told.append(", ".join(there.gpus) or "no NVIDIA GPU seen")
    told.append(f"free: {_free(there.free)}")
    return Check(_NODE, True, f"{address}: {'; '.join(told)}")


def _facts_of(fields: Mapping[str, Any]) -> NodeFacts:
    return NodeFacts(**{**fields, "gpus": tuple(fields["gpus"])})


def _differences(there: NodeFacts, here: NodeFacts) -> Iterator[str]:
    if there.python_minor != here.python_minor:
        yield f"python {there.python}, here {here.python}"
    for name, ours, theirs in _differing(there, here):
        if theirs is None:
            yield f"{name} is not installed"
        else:
            yield f"{name} {theirs}, " + (f"here {ours}" if ours else "which is not installed here")
    if there.lacks_boardfleet is not None:
        yield f"boardfleet {there.lacks_boardfleet}"


def _differing(there: NodeFacts, here: NodeFacts) -> Iterator[tuple[str, str | None, str | None]]:
    """Package, our version, theirs. A boardfleet that is imported from a folder has none."""
    for name, ours in here.packages.items():
        theirs = there.packages.get(name)
        is_from_folder = name == "boardfleet" and None in (ours, theirs)
        if ours != theirs and not is_from_folder:
            yield name, ours, theirs


def _mend(there: NodeFacts, here: NodeFacts) -> str:
    """One command, to be run there."""
    if there.python_minor != here.python_minor:
        return f"rm -rf .venv && make setup PYTHON=python{here.python_minor}"
    differing = list(_differing(there, here))
    wanted = {name: ours for name, ours, _ in differing if ours}
    if there.lacks_boardfleet is not None and (ours := here.packages["boardfleet"]):
        wanted["boardfleet"] = ours
    pip = f"{there.executable} -m pip"
    # builds for a CPU stand in no index that pip asks by itself
    if any("+" in version for version in wanted.values()):
        install = REINSTALL
    else:
        named = {"boardfleet": "boardfleet[ray]"}
        pins = [f"'{named.get(name, name)}=={version}'" for name, version in wanted.items()]
        install = f"{pip} install {' '.join(pins)}" if pins else ""
    unwanted = [name for name, ours, _ in differing if not ours]
    uninstall = f"{pip} uninstall -y {' '.join(unwanted)}" if unwanted else ""
    return " && ".join(filter(None, (uninstall, install))) or REINSTALL


def _free(resources: Mapping[str, float]) -> str:
    told = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources]
    if "memory" in resources:
        told.append(f"{resources['memory'] / (1 << 30):.1f} GiB")
    return ", ".join(told) or "nothing"


def _ask(address: str) -> Mapping[str, Any]:
    """What the child printed, or an error of our own."""
    lifeline, theirs = socket.socketpair()
    with lifeline:
        with theirs:
            process = subprocess.Popen(
                [*COMMAND, address, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **token_environment()},
            )
        with process:
            try:
                output, log = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return {"error": f"no answer in {LIMIT_S:g} s"}
            finally:
                kill_group(process.pid)
    if process.returncode != os.EX_OK:
        return {"error": last_error(log)}
    answer: Mapping[str, Any] = json.loads(output)
    return answer
