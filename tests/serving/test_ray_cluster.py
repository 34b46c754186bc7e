"""Which cluster is worked on."""

import socket
from pathlib import Path
from typing import Any

import pytest

ray_cluster = pytest.importorskip("serving.ray_cluster", reason="Ray is not installed (ray extra)")


def test_a_cluster_of_ours_is_started_whatever_ray_address_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray took that of the environment, and refused to set processors aside there."""
    from ray._private import services

    started: list[object] = []

    def init(address: Any = None, **knobs: Any) -> None:
        started.append(services.canonicalize_bootstrap_address(address))

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr("ray.init", init)
    ray_cluster.start_here(2)
    assert started == [None], "none that runs already"


def test_auto_is_what_was_started_here_and_no_cluster_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray looked through the processes, and took one that ends with its run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"answers at auto: `ray start` has left no .*host:p"):
        ray_cluster.join("auto")
    joined: list[str] = []
    monkeypatch.setattr("ray.init", lambda address, **_: joined.append(address))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(f"{address}\n")
        ray_cluster.join("auto")
        monkeypatch.setenv("RAY_ADDRESS", f"localhost:{head.getsockname()[1]}")
        ray_cluster.join("auto")
    assert joined == [address, address.replace("127.0.0.1", "localhost")]
