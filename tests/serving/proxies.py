"""The proxy files of `configs/proxy`, run for real between ports of a test's own."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

PROXIES = Path(__file__).parents[2] / "configs/proxy"
CAP = 16
"""Requests under way per server, as the files say."""


def binary(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        reason = f"{name} is not installed: apt-get install --no-install-recommends {name}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def _nginx(config: Path, folder: Path) -> list[str]:
    return [binary("nginx"), "-p", str(folder), "-c", str(config), "-e", "stderr"]


def _haproxy(config: Path, folder: Path) -> list[str]:
    return [binary("haproxy"), "-db", "-f", str(config)]


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "nginx.conf": _nginx,
    "haproxy.cfg": _haproxy,
}
"""By file: what runs a config in a folder."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One that workers of another user may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@asynccontextmanager
async def running(name: str, *servers: int) -> AsyncIterator[str]:
    """The URL of the proxy of this file, which listens; its two servers are at these ports."""
    port = free_ports(1)[0]
    text = (PROXIES / name).read_text()
    for written, ours in zip((8000, 8001, 8080), (*servers, port), strict=True):
        assert f"127.0.0.1:{written}" in text
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{ours}")
    with shared_folder() as folder:
        config = folder / name
        config.write_text(text)
        async with _process(COMMANDS[name](config, folder), port):
            yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _process(command: list[str], port: int) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    told = asyncio.create_task(process.stderr.read())
    try:
        while not await is_listening(port):
            assert process.returncode is None, (await told).decode()
            await asyncio.sleep(0.02)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await told


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def until_it_holds(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again; the test's own time limit ends it."""
    while True:
        if await holds():
            return
        await asyncio.sleep(0.02)
