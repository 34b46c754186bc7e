"""One engine of a kind of server: a single `HttpEngine`, or one at each of several urls."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from serving.config import EngineStart
from serving.engine import Engine
from serving.http_config import BatchKnobs, replica_name
from serving.http_engine import HttpEngine, ServerKind
from serving.replicated import Replicated

Config = TypeVar("Config", bound=BatchKnobs)


def build_http(start: EngineStart, config: Config, kind: Callable[[Config], ServerKind]) -> Engine:
    """The engine, not started. `kind` makes what one server brings out of its own configuration."""
    if config.urls is None:
        return HttpEngine(start, config, kind(config))
    replicas: dict[str, HttpEngine] = {}
    for url in config.urls:
        name, own = replica_name(url), config.at(url)
        here = replace(start, name=f"{start.name} at {name}")
        replicas[name] = HttpEngine(here, own, kind(own))
    one_of_them = next(iter(replicas.values()))
    limits = replace(one_of_them.limits, max_concurrent=config.max_concurrent)
    return Replicated(start.name, limits, replicas)
