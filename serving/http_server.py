"""The server behind an HTTP engine, from its readiness to its next failure."""

import asyncio
from collections.abc import Callable

from serving.config import EngineStart
from serving.dialect import Command
from serving.engine import EngineDead, EngineError
from serving.http_client import HttpClient, Readiness
from serving.server_process import (
    ServerProcess,
    ServerStart,
    free_port,
    start_server,
    wait_until_answering,
)

_POLL_S = 0.25
_PORT_TRIES = 3


class Server:
    """A server that answered, and is of use until `failed` is done."""

    def __init__(self, url: str, process: ServerProcess | None, command: Command | None) -> None:
        self.url = url
        self.process = process
        """What we launched; None for one that ran before."""
        self.command = command
        self.has_answered = False
        """A question."""
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Done with the reason once it is of no more use."""
        self._watching: asyncio.Task[None] | None = None
        if process is not None:
            self._watching = asyncio.create_task(self._watch(process))

    def fail(self, error: EngineError) -> None:
        """Give it up; the first reason stands."""
        if not self.failed.done():
            self.failed.set_result(error)

    async def end(self, *, at_once: bool = False) -> None:
        """End what we launched, and wait until none of its processes is left."""
        if self._watching is not None:
            self._watching.cancel()
        if self.process is not None:
            await (self.process.end(grace_s=0) if at_once else self.process.end())

    async def _watch(self, process: ServerProcess) -> None:
        ended = await asyncio.shield(process.ended)
        self.fail(EngineDead(f"engine {process.start.name}: the server {ended}"))


async def reach(
    client: HttpClient, name: str, url: str, limit_s: float, *, is_known: bool = False
) -> Server:
    """The server that runs at `url`; raises EngineDead where it is not ready within `limit_s`, and
    at once where it wants another key or, unless it `is_known` from before, is of another kind."""
    answer = Readiness(False, "no answer")
    try:
        async with asyncio.timeout(limit_s):
            while True:
                answer = await client.readiness(url)
                if answer.is_ready:
                    return Server(url, None, None)
                if answer.is_refused:
                    raise EngineDead(f"engine {name}: {url} refuses us: {answer.why}")
                # before a server that restarts, a proxy may say so for a while
                if answer.is_of_another_kind and not is_known:
                    raise EngineDead(f"engine {name}: {answer.why}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        what = "did not answer" if answer.status is None else "was not ready"
        raise EngineDead(
            f"engine {name}: {url} {what} within {limit_s:g} s: {answer.why}"
        ) from None


async def launch(
    client: HttpClient, settings: EngineStart, plan: Callable[[int], Command], limit_s: float
) -> Server:
    """A server of our own on a free port, ready.

    `plan` gives its command for a port, and may block. Raises EngineDead with the server's reason,
    EngineConfigError where its program is missing; no process is left then.
    """
    for _ in range(_PORT_TRIES - 1):
        try:
            return await _launch_at(free_port(), client, settings, plan, limit_s)
        except _PortTakenError:
            continue
    return await _launch_at(free_port(), client, settings, plan, limit_s)


class _PortTakenError(EngineDead):
    """Another process took the port before the server could."""


async def _launch_at(
    port: int,
    client: HttpClient,
    settings: EngineStart,
    plan: Callable[[int], Command],
    limit_s: float,
) -> Server:
    command = await asyncio.to_thread(plan, port)
    start = ServerStart(settings.name, settings.log_dir, command.argv, command.env, limit_s)
    process = await start_server(start)
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        return (await client.readiness(url)).is_ready

    try:
        await wait_until_answering(process, answers)
    except BaseException as error:
        is_taken = process.ended.done() and process.ended.result().is_port_taken
        await process.end(grace_s=0)
        if isinstance(error, EngineDead) and is_taken:
            raise _PortTakenError(str(error)) from error
        raise
    return Server(url, process, command)
