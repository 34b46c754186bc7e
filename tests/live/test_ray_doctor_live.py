"""`arena doctor --ray` on a real cluster of two nodes, and how its child ends."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from serving.process import group_members
from tests.live.ray_cluster import LOOPBACK, RayCluster

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (ray extra)"
    ),
]

DOCTOR = (sys.executable, "-m", "arena.cli", "doctor", "--json", "--ray")
ENVIRONMENT = {**os.environ, **LOOPBACK}


def test_every_node_is_told_as_it_is() -> None:
    with RayCluster(1) as cluster:
        done = subprocess.run(
            [*DOCTOR, cluster.address], capture_output=True, text=True, env=ENVIRONMENT, timeout=200
        )
        checks = json.loads(done.stdout)["checks"]
        nodes = [check for check in checks if check["name"].startswith("ray ")]
        assert [(node["name"], node["ok"]) for node in nodes] == [("ray node", True)] * 2, nodes
        assert all("as here: python 3." in node["detail"] for node in nodes)
        assert sum("; free: 2 CPU, " in node["detail"] for node in nodes) == 1, "the head has none"
        assert len(group_members(cluster.session)) > 2, "the cluster goes on"


def wait_for_child(doctor: "subprocess.Popen[str]") -> psutil.Process:
    limit = time.monotonic() + 60
    while True:
        for process in psutil.Process(doctor.pid).children():
            if "serving.ray_nodes" in process.cmdline():
                return process
        assert time.monotonic() < limit
        os.sched_yield()


def test_the_child_ends_with_a_doctor_that_is_killed() -> None:
    """While it waits for a cluster that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [*DOCTOR, address], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as doctor:
            child = wait_for_child(doctor)
            silent.accept()[0].close()  # it is guarded, and has begun to look
            doctor.kill()
        child.wait(timeout=30)
        assert group_members(child.pid) == []
