"""Which cluster is worked on."""

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
