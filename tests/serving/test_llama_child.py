"""llama.cpp's own server in our child: its flags, its refusals, its end. With the real one where it
is installed."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from serving import EngineConfigError, EngineDead
from serving.llama_child import refusal
from serving.llama_flags import parse
from serving.llama_package import is_installed
from serving.models import packaged_gguf
from serving.process import group_members
from serving.server_process import (
    ServerProcess,
    ServerStart,
    free_port,
    start_server,
    wait_until_answering,
)

CHILD = (sys.executable, "-m", "serving.llama_child")
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
SMALL = ("-c", "1024", "-np", "2", "-t", "1", "-b", "512", "--cache-ram", "0", "--no-ui")
DRIVER = """
import asyncio, sys
from pathlib import Path
from serving.server_process import ServerStart, start_server

async def main():
    folder, *argv = sys.argv[1:]
    server = await start_server(
        ServerStart("main", Path(folder), argv, {"OMP_WAIT_POLICY": "passive"}, 60.0)
    )
    report = Path(folder) / "pgid"
    report.with_suffix(".new").write_text(str(server.pgid))
    report.with_suffix(".new").rename(report)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

live = pytest.mark.live
needs_it = pytest.mark.skipif(not is_installed(), reason="xllamacpp is not installed")

Serve = Callable[..., Awaitable["Server"]]


class Server:
    """A started child and where it listens."""

    def __init__(self, process: ServerProcess, url: str, client: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self.client = client
        self.statuses: list[int | None] = []
        """Answers of /health until it was ready; None where the connection was refused."""

    async def is_healthy(self) -> bool:
        try:
            async with self.client.get(f"{self.url}/health") as answer:
                status: int | None = answer.status
        except aiohttp.ClientConnectionError:
            status = None
        self.statuses.append(status)
        return status == 200

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.client.get(f"{self.url}{path}", headers=headers) as answer:
            return answer.status, await answer.text()

    async def complete(self, **body: Any) -> dict[str, Any]:
        async with self.client.post(f"{self.url}/completion", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        return packaged_gguf()
    except EngineConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
async def serve(gguf: Path, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts the child with the packaged model and waits until it is healthy."""
    started: list[Server] = []
    async with aiohttp.ClientSession() as client:

        async def start(*flags: str, env: dict[str, str] | None = None) -> Server:
            port = free_port()
            argv = (*CHILD, "-m", str(gguf), "--port", str(port), *SMALL, *flags)
            environment = ENVIRONMENT | (env or {})
            process = await start_server(ServerStart("main", tmp_path, argv, environment, 60.0))
            server = Server(process, f"http://127.0.0.1:{port}", client)
            started.append(server)
            await wait_until_answering(process, server.is_healthy)
            return server

        yield start
        for server in started:
            await server.process.end(grace_s=0)
            assert group_members(server.process.pgid) == []


def run_child(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr."""
    done = subprocess.run(
        [*CHILD, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
        timeout=30,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


# What needs no llama.cpp.


def test_flags_have_llama_servers_short_and_long_names() -> None:
    short = "-m f -c 64 -np 3 -b 5 -ub 4 -t 2 -kvu -ctk q8_0 -ctv f16 -cram 0 -a x"
    long = (
        "--model f --ctx-size 64 --parallel 3 --batch-size 5 --ubatch-size 4 --threads 2 "
        "--kv-unified --cache-type-k q8_0 --cache-type-v f16 --cache-ram 0 --alias x"
    )
    assert parse(short.split()) == parse(long.split())
    assert parse(short.split()).parallel == 3


def test_what_is_not_given_is_as_in_llama_server() -> None:
    asked = parse(["-m", "f"])
    assert (asked.host, asked.port, asked.cache_ram) == ("127.0.0.1", 8080, 8192)
    assert (asked.batch_size, asked.ubatch_size) == (2048, 512)
    assert (asked.metrics, asked.kv_unified) == (False, False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-m f --banana", "unrecognized arguments: --banana"),
        ("-m f --para 3", "unrecognized arguments: --para 3"),
        ("-m f -np many", "-np/--parallel: invalid int value: 'many'"),
        ("-m f -ctk banana", "invalid choice: 'banana'"),
        ("-m f -h", "unrecognized arguments: -h"),
        ("", "the following arguments are required: -m/--model"),
    ],
)
def test_a_bad_flag_is_one_line(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(flags.split())
    code, (line,) = run_child(*flags.split())
    assert code == 1
    assert line.startswith("error: ")
    assert words in line


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    code, lines = run_child("-m", str(tmp_path / "none.gguf"))
    assert code == 1
    assert lines == [f"error: model {tmp_path / 'none.gguf'}: No such file or directory"]


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(bytes(range(256)))
    code, lines = run_child("-m", str(garbage))
    assert (code, lines) == (1, [f"error: {garbage} is not a GGUF file"])


def test_a_taken_port_is_one_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, lines = run_child("-m", str(model), "--port", str(port))
    assert (code, lines) == (1, [f"error: port 127.0.0.1:{port} is in use"])


def test_an_address_of_another_machine_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    why = refusal(parse(["-m", str(model), "--host", "192.0.2.1", "--port", "0"]))
    assert why == "cannot listen on 192.0.2.1:0: Cannot assign requested address"


# The real one.


@live
@needs_it
async def test_it_answers_503_while_it_loads_and_then_serves(serve: Serve) -> None:
    server = await serve("--metrics", "--slots", "-a", "smol", "--sse-ping-interval", "1")
    *before, last = server.statuses
    assert last == 200
    assert set(before) <= {None, 503}
    assert 503 in before
    assert server.process.pid == server.process.pgid
    assert len(group_members(server.process.pgid)) == 1

    status, text = await server.get("/props")
    assert status == 200
    about = json.loads(text)
    assert (about["total_slots"], about["model_alias"]) == (2, "smol")
    assert about["default_generation_settings"]["n_ctx"] == 512, "the context is split among slots"
    status, metrics = await server.get("/metrics")
    assert status == 200
    assert "llamacpp:requests_deferred" in metrics
    status, slots = await server.get("/slots")
    assert (status, len(json.loads(slots))) == (200, 2)

    answer = await server.complete(prompt="1. e4", n_predict=8, grammar='root ::= "e2e4" | "d2d4"')
    assert answer["content"] in ("e2e4", "d2d4")


@live
@needs_it
async def test_flags_that_are_not_given_are_off(serve: Serve) -> None:
    server = await serve()
    assert (await server.get("/metrics"))[0] == 501
    assert (await server.get("/slots"))[0] == 501


@live
@needs_it
async def test_one_pool_and_a_small_cache(serve: Serve) -> None:
    server = await serve("-kvu", "-ctk", "q8_0", "-ctv", "q8_0")
    about = json.loads((await server.get("/props"))[1])
    assert about["default_generation_settings"]["n_ctx"] == 1024, "each slot may use all of it"
    log = await server.process.output()
    assert "kv_unified = 'true'" in log
    assert (await server.complete(prompt="Hello", n_predict=2))["content"]


@live
@needs_it
async def test_the_key_stands_in_the_environment_alone(serve: Serve) -> None:
    server = await serve("--slots", env={"LLAMA_API_KEY": "of-a-test"})
    assert (await server.get("/slots"))[0] == 401
    assert (await server.get("/slots", Authorization="Bearer of-a-test"))[0] == 200
    words = psutil.Process(server.process.pid).cmdline()
    assert "of-a-test" not in " ".join(words)
    assert "of-a-test" not in await server.process.output()


@live
@needs_it
@pytest.mark.parametrize("streams", [True, False])
async def test_it_ends_at_once_with_an_answer_in_flight(serve: Serve, streams: bool) -> None:
    """llama-server itself waits for a ping, or for ever where the answer is no stream."""
    server = await serve("--slots")
    body = {"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": True, "stream": streams}

    async def ask() -> bytes:
        async with server.client.post(f"{server.url}/completion", json=body) as answer:
            return await answer.read()

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(20):
        while '"is_processing":true' not in (await server.get("/slots"))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    begun = time.monotonic()
    await server.process.end()
    assert time.monotonic() - begun < 1.5, "it was asked, not killed"
    assert server.process.ended.result().code == -signal.SIGTERM
    with pytest.raises(aiohttp.ClientError):
        await asking


@live
@needs_it
async def test_it_ends_at_once_while_it_loads(gguf: Path, tmp_path: Path) -> None:
    argv = (*CHILD, "-m", str(gguf), "--port", str(free_port()), *SMALL)
    process = await start_server(ServerStart("main", tmp_path, argv, ENVIRONMENT, 60.0))
    async with asyncio.timeout(30):
        while "loading model" not in await process.output():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    begun = time.monotonic()
    await process.end()
    assert time.monotonic() - begun < 1.5
    assert process.ended.result().code == -signal.SIGTERM


@live
@needs_it
async def test_a_truncated_model_is_told_in_llama_cpps_own_words(
    gguf: Path, tmp_path: Path
) -> None:
    model = tmp_path / "cut.gguf"
    await asyncio.to_thread(cut, gguf, model)
    argv = (*CHILD, "-m", str(model), "--port", str(free_port()), *SMALL)
    process = await start_server(ServerStart("main", tmp_path, argv, ENVIRONMENT, 60.0))

    async def never() -> bool:
        return False

    with pytest.raises(EngineDead, match=r"code 1: .* model is corrupted or incomplete"):
        await wait_until_answering(process, never)
    assert (await process.output()).splitlines()[-1] == (
        f"error: llama.cpp did not start with {model}: see its log above"
    )
    await process.end()


def cut(whole: Path, into: Path) -> None:
    with whole.open("rb") as file:
        into.write_bytes(file.read(20_000_000))


@live
@needs_it
async def test_a_taken_port_is_recognised_by_the_start(gguf: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        argv = (*CHILD, "-m", str(gguf), "--port", str(port), *SMALL)
        process = await start_server(ServerStart("main", tmp_path, argv, ENVIRONMENT, 60.0))
        end = await asyncio.shield(process.ended)
    assert (end.code, end.is_port_taken) == (1, True)
    await process.end()


@live
@needs_it
async def test_kill_9_of_the_arena_leaves_no_server(gguf: Path, tmp_path: Path) -> None:
    port = free_port()
    argv = (*CHILD, "-m", str(gguf), "--port", str(port), *SMALL)
    arena = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, str(tmp_path), *argv)
    log = tmp_path / "engine-main.log"
    async with asyncio.timeout(40):
        while not (log.exists() and "listening on" in log.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        pgid = int((tmp_path / "pgid").read_text())
        assert len(group_members(pgid)) == 1
        arena.kill()
        await arena.wait()
        while await asyncio.to_thread(group_members, pgid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
