"""Engines over a fake host, for tests: each is closed, and nothing is left of it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from serving.process import group_members


class Hosted(Protocol):
    """An engine whose host is a child of ours."""

    host_command: Any

    @property
    def pgid(self) -> int | None: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...


E = TypeVar("E", bound=Hosted)
P = ParamSpec("P")


@asynccontextmanager
async def launching(
    fake: str, log_dir: Path, make: Callable[P, E]
) -> AsyncIterator[Callable[..., "asyncio.Future[E]"]]:
    """Opens engines that `make` makes, over the fake host at a path with a behaviour."""
    engines: list[E] = []
    groups: list[int] = []

    async def start(behaviour: str, *args: P.args, **knobs: P.kwargs) -> E:
        engine = make(*args, **knobs)
        engine.host_command = (sys.executable, fake, behaviour)
        engines.append(engine)
        await engine.open()
        assert engine.pgid is not None
        groups.append(engine.pgid)
        return engine

    yield lambda *args, **knobs: asyncio.ensure_future(start(*args, **knobs))
    for engine in engines:
        if engine.pgid is not None:
            groups.append(engine.pgid)
        await engine.close()
        await engine.close()
    assert [group_members(group) for group in groups] == [[] for _ in groups]
    assert not (log_dir / "engine-main.pid").exists()
