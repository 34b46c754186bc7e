"""A cluster of several nodes on this machine, in processes of its own: `ray_cluster.py NODES`.

Run by its path; it leads a session, prints its address, and then does what stands on its standard
input, a word a line, and says `done`. At the end of the input it ends.

add        one more node
remove     the last node, as if its machine lost its power
restart    the head dies with all nodes, and a cluster like the first comes up at its address
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any

from serving.process import kill_group
from serving.server_process import free_port

CPUS = 2
"""Of a node; this machine may have fewer."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For the environment of who joins it: Ray takes 127.0.0.1 for this machine's outer address on
systems that it makes clusters of."""


class Nodes:
    """The cluster, from inside."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        self._make = Cluster
        self._number = number
        self._port = 0
        self.client_port = free_port()
        self._last = 1
        self.start()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def start(self) -> None:
        head = {
            "node_ip_address": "127.0.0.1",
            "num_cpus": 0,
            "include_dashboard": False,
            "ray_client_server_port": self.client_port,
            "object_store_memory": 100 << 20,
        }
        if self._port:
            head["gcs_server_port"] = self._port
        self.cluster = self._make(initialize_head=True, head_node_args=head)
        self._port = int(self.address.rpartition(":")[2])
        self.workers = [self._node() for _ in range(self._number)]

    def _node(self) -> Any:
        # an address of its own, so that who joins at the head's does so there and not at a node
        self._last += 1
        return self.cluster.add_node(
            node_ip_address=f"127.0.0.{self._last}", num_cpus=CPUS, object_store_memory=80 << 20
        )

    def add(self) -> None:
        self.workers.append(self._node())

    def remove(self) -> None:
        self.cluster.remove_node(self.workers.pop(), allow_graceful=False)

    def restart(self) -> None:
        for node in [*self.workers, self.cluster.head_node]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        self.start()


class RayCluster:
    """The cluster, from outside. Every process of it is gone after the `with`."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def __enter__(self) -> "RayCluster":
        self._temporary = mkdtemp(prefix="ray-")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **LOOPBACK, "RAY_TMPDIR": self._temporary},
        )
        self.address, port = self._line().split()
        self.client_address = f"ray://127.0.0.1:{port}"
        """For one who is not on a machine of it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        kill_group(self._process.pid)
        self._process.communicate()
        subprocess.run(["rm", "-rf", self._temporary], check=True)

    def tell(self, word: str) -> None:
        """Blocks until it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    @property
    def session(self) -> int:
        """That all its processes are in."""
        return self._process.pid

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster ended"
        return line


def main(number: int) -> None:
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    nodes = Nodes(number)
    said.write(f"{nodes.address} {nodes.client_port}\n")
    for line in sys.stdin:
        getattr(nodes, line.strip())()
        said.write("done\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]))
