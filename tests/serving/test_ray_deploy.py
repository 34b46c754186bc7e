"""What is taken over of replicas that run already, and what is deployed anew."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.ray_wire import RayStart

ray_deploy = pytest.importorskip("serving.ray_deploy", reason="Ray is not installed (ray extra)")

PLAN = {
    "name": "main",
    "engine": {"kind": "scripted"},
    "stall_seconds": 5.0,
    "restart_limit": 1,
    "look_seconds": 0.25,
    "lease_seconds": 60.0,
    "start_seconds": 900.0,
}
START = RayStart("auto", "app", 2, None, 1, 0, 16, 64, 5.0, PLAN)


class Serve:
    """Ray Serve with one application, or none."""

    def __init__(self, status: str | None = None, **states: int) -> None:
        self.deleted: list[str] = []
        self.fails = False
        engine = SimpleNamespace(replica_states=states, message="")
        told = SimpleNamespace(status=status, deployments={"engine": engine}, message="")
        self.applications = {} if status is None else {"app": told}

    def start(self, proxy_location: str) -> None:
        assert proxy_location == "Disabled"

    def status(self) -> "Serve":
        return self

    def get_app_handle(self, app: str) -> str:
        return f"old {app}"

    def run(self, application: Any, name: str, route_prefix: None) -> str:
        if self.fails:
            raise RuntimeError("ReplicaError: on 10.0.0.7: no such model")
        return f"new {name}"

    def delete(self, app: str, _blocking: bool) -> None:
        self.deleted.append(app)


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", dict)
    monkeypatch.setattr(ray_deploy, "deployment", lambda options, plan: (options, plan))


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        (Serve("RUNNING", RUNNING=2), ("old app", 1)),
        (Serve("UNHEALTHY", RUNNING=1, STARTING=1), ("old app", 1)),
        (Serve("DEPLOYING", RUNNING=1, STARTING=3), ("old app", 1)),
        (Serve("DEPLOYING", RUNNING=0, STARTING=2), ("new app", 2)),
        (Serve("DEPLOY_FAILED", RUNNING=1), ("new app", 2)),
        (Serve("DELETING", RUNNING=1), ("new app", 2)),
        (Serve(), ("new app", 2)),
    ],
)
def test_replicas_that_run_are_taken_over_though_some_are_missing(
    serve: Serve, told: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deploying anew ended those that ran, with their caches, because one was being started."""
    monkeypatch.setattr(ray_deploy, "serve", serve)
    assert ray_deploy.deploy(START) == told


def test_what_did_not_come_up_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that did come up held their GPUs for an arena that had ended."""
    serve = Serve()
    serve.fails = True
    monkeypatch.setattr(ray_deploy, "serve", serve)
    with pytest.raises(RuntimeError, match=r"^on 10.0.0.7: no such model$"):
        ray_deploy.deploy(START)
    assert serve.deleted == ["app"]
