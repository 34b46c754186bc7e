"""Bringing replicas up on Ray Serve."""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from serving.ray_config import LOCAL
from serving.ray_replica import deployment
from serving.ray_router import ROUTER_PATH
from serving.ray_scaling import POLICY_PATH
from serving.ray_wire import RayStart, ReplicaPlan, one_line

_SHUTDOWN_S = 10.0
_HEALTH_PERIOD_S = 5.0
_CONSTRUCTOR_TRIES = 2
_NEWS_PERIOD_S = 5.0
_KEEPS_REPLICAS = (
    ApplicationStatus.RUNNING,
    ApplicationStatus.DEPLOYING,
    ApplicationStatus.UNHEALTHY,
)
"""Those of an application whose replicas Ray keeps: the latter two while it adds some, takes some
away, or starts one again."""
_ENGINE_SAYS = re.compile(r"ReplicaError: (.+)")


def deploy(start: RayStart) -> tuple[Any, int]:
    """The handle of the replicas, and how many there must be: one where some run already under this
    name, for Ray brings back the others, and deploying anew would end them; else of new ones, which
    are ready, all. Raises RuntimeError with the reason where they do not come up."""
    _check_gpus(start)
    serve.start(proxy_location="Disabled")
    if _is_up(serve.status().applications.get(start.app)):
        return serve.get_app_handle(start.app), 1
    application = deployment(_options(start), ReplicaPlan(**start.plan))
    is_up = False
    try:
        with _news(start):
            handle = serve.run(application, name=start.app, route_prefix=None)
        is_up = True
        return handle, start.replicas
    except RuntimeError as error:
        raise RuntimeError(_reason(start.app, error)) from error
    finally:
        if not is_up:
            # replicas that did come up would hold their GPUs for nobody, and others be waited for
            with contextlib.suppress(Exception):
                serve.delete(start.app, _blocking=False)
                serve.status()  # once it answers, it has heard what was said before


def _is_up(found: ApplicationStatusOverview | None) -> bool:
    if found is None or found.status not in _KEEPS_REPLICAS:
        return False
    states = [state for one in found.deployments.values() for state in one.replica_states.items()]
    return any(number for state, number in states if state == "RUNNING")


def _options(start: RayStart) -> dict[str, Any]:
    router: Any = ROUTER_PATH
    options: dict[str, Any] = {
        "max_ongoing_requests": start.most_asked,
        "ray_actor_options": {"num_cpus": start.cpus, "num_gpus": start.gpus},
        "request_router_config": RequestRouterConfig(request_router_class=router),
        "health_check_period_s": min(_HEALTH_PERIOD_S, start.silent_s),
        "health_check_timeout_s": start.silent_s,
        "graceful_shutdown_timeout_s": _SHUTDOWN_S,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        # a line of it for each call
        "logging_config": {"enable_access_log": False},
    }
    if start.max_replicas is None:
        options["num_replicas"] = start.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=start.replicas,
            initial_replicas=start.replicas,
            max_replicas=start.max_replicas,
            policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
                policy_function=POLICY_PATH, policy_kwargs={"batch_limit": start.batch_limit}
            ),
        )
    return options


def _check_gpus(start: RayStart) -> None:
    """Other clusters may grow while replicas wait; this machine does not."""
    there = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if start.address == LOCAL and (wanted := start.replicas * start.gpus) > there:
        raise RuntimeError(
            f"{start.replicas} replicas ask for {wanted:g} GPUs, and Ray finds {there:g} on this "
            "machine: give fewer replicas, or gpus_per_replica"
        )


@contextlib.contextmanager
def _news(start: RayStart) -> Iterator[None]:
    """Meanwhile write to the log how replicas come up, whenever there is something else to say: the
    last of it is told where they do not."""
    ended = threading.Event()

    def look() -> None:
        told = ""
        while not ended.wait(_NEWS_PERIOD_S):
            # news alone: what is wrong with Ray, `serve.run` tells
            with contextlib.suppress(Exception):
                said = " ".join([_awaited(start), *_messages(start.app)])
                if said != told:
                    told = said
                    sys.stderr.write(f"{' '.join(said.split())}\n")

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def _awaited(start: RayStart) -> str:
    """What replicas ask for, and what there is."""
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    there = ", ".join(
        f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {name} free"
        for kind, name in (("CPU", "processors"), ("GPU", "GPUs"))
    )
    return (
        f"waiting for {start.replicas} replicas, which ask for {start.cpus:g} processors and "
        f"{start.gpus:g} GPUs each; the cluster has {there}."
    )


def _messages(app: str) -> list[str]:
    """What Ray says of an application and of its deployments; empty where all is well."""
    found = serve.status().applications.get(app)
    if found is None:
        return []
    told = [found.message, *(one.message for one in found.deployments.values())]
    return [text for text in told if text]


def _reason(app: str, error: Exception) -> str:
    """Why replicas do not come up: the engine's own word, where it stands in Ray's."""
    texts = [str(error), *_messages(app)]
    engines = [match[1] for text in texts for match in _ENGINE_SAYS.finditer(text)]
    return engines[-1] if engines else one_line(error)
