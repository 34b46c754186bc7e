"""Servers that we launch: started, waited for, explained when they fail, and never left behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import structlog

from serving import EngineConfigError, EngineDead, end_survivors
from serving import process as process_module
from serving import server_process as module
from serving.process import group_members
from serving.server_process import (
    ServerProcess,
    ServerStart,
    free_port,
    needed_program,
    reason_of,
    start_server,
    wait_until_answering,
)

Launch = Callable[..., Awaitable[ServerProcess]]

WEB = "-m", "http.server", "--bind", "127.0.0.1"
"""A real server that says nothing of itself."""

STUBBORN = (
    "import signal, subprocess, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen(['sleep', '1000'])\n"
    "print('up', flush=True)\n"
    "time.sleep(1000)\n"
)

CHILDLESS = (
    "import psutil, sys, time\n"
    "print('children', [child.pid for child in psutil.Process().children()], flush=True)\n"
    "[child.kill() for child in psutil.Process().children(recursive=True)]\n"
    "time.sleep(1000)\n"
)

DRIVER = """
import asyncio, sys
from pathlib import Path
from serving.server_process import ServerStart, start_server

async def main():
    folder, *argv = sys.argv[1:]
    server = await start_server(ServerStart("main", Path(folder), argv, {}, 30.0))
    report = Path(folder) / "pgid"
    report.with_suffix(".new").write_text(str(server.pgid))
    report.with_suffix(".new").rename(report)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Starts this Python with arguments; ends what it started and sees that nothing is left."""
    servers: list[ServerProcess] = []

    async def start(
        *arguments: str, env: dict[str, str] | None = None, limit_s: float = 30.0
    ) -> ServerProcess:
        argv = (sys.executable, *arguments)
        server = await start_server(ServerStart("main", tmp_path, argv, env or {}, limit_s))
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.end(grace_s=0)
        assert group_members(server.pgid) == []
    assert not (tmp_path / "engine-main.pid").exists()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def is_there(file: str) -> bool:
    return Path(file).exists()


async def never() -> bool:
    return False


async def wait_for_line(server: ServerProcess, line: str) -> str:
    async with asyncio.timeout(20):
        while line not in (output := await server.output()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return output


async def wait_until_gone(pgid: int, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while await asyncio.to_thread(group_members, pgid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_server_lives_in_a_session_of_its_own_until_it_is_ended(
    launch: Launch, tmp_path: Path
) -> None:
    port = free_port()
    server = await launch(*WEB, str(port))
    await wait_until_answering(server, lambda: listens(port))
    assert os.getsid(server.pid) == server.pid == server.pgid
    assert group_members(server.pgid) == [server.pid], "the child became the server"
    assert (tmp_path / "engine-main.pid").exists()
    assert not server.ended.done()
    begun = time.monotonic()
    await server.end()
    assert time.monotonic() - begun < 2.0
    assert server.ended.result().code == -signal.SIGTERM
    assert not await listens(port)
    await server.end()


async def test_its_output_is_a_file_of_the_run_which_restarts_add_to(
    launch: Launch, tmp_path: Path
) -> None:
    for text in ("ValueError: of the first start", "of the second"):
        server = await launch("-c", f"import sys; print('out'); sys.exit({text!r})")
        end = await server.ended
        assert (end.code, end.reason) == (1, text)
        await server.end()
    assert server.log_file == tmp_path / "engine-main.log"
    log = server.log_file.read_text()
    assert log.index("first start") < log.index("of the second")
    assert log.count("out\n") == 2


async def test_the_environment_is_the_arenas_and_what_the_start_adds(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_ARENA", "a")
    code = "import os; print(os.environ['OF_THE_ARENA'] + os.environ['OF_THE_START'])"
    server = await launch("-c", code, env={"OF_THE_START": "b"})
    await server.ended
    assert await server.output() == "ab\n"


async def test_keys_of_other_servers_are_not_its_own(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have asked us for them."""
    for name in ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "secret")
    code = "import os; print([name for name in os.environ if 'API_KEY' in name])"
    server = await launch("-c", code, env={"LLAMA_API_KEY": "of the start"})
    await server.ended
    assert await server.output() == "['LLAMA_API_KEY']\n"


async def test_temporary_files_go_with_the_server(launch: Launch) -> None:
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(1000)"
    server = await launch("-c", code)
    folder = (await wait_for_line(server, "\n")).strip()
    assert is_there(folder)
    await server.end()
    assert not is_there(folder)


async def test_a_group_that_ignores_the_request_is_killed_after_the_grace(launch: Launch) -> None:
    server = await launch("-c", STUBBORN)
    await wait_for_line(server, "up")
    assert len(group_members(server.pgid)) == 2
    begun = time.monotonic()
    await server.end(grace_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 2.0
    assert group_members(server.pgid) == []
    assert server.ended.result().code == -signal.SIGKILL


async def test_what_a_dead_server_started_is_ended_too(launch: Launch) -> None:
    server = await launch("-c", STUBBORN)
    await wait_for_line(server, "up")
    os.kill(server.pid, signal.SIGKILL)
    assert (await server.ended).code == -signal.SIGKILL
    assert len(group_members(server.pgid)) == 1
    await server.end(grace_s=0)
    assert group_members(server.pgid) == []


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("no-such-server", "no-such-server: no such program on PATH"),
        ("/no/such/server", "/no/such/server: no such program"),
        (__file__, "no such program"),
        ("/usr", "/usr: is a directory"),
    ],
)
async def test_a_missing_program_is_said_before_anything_is_started(
    program: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineConfigError, match=words) as caught:
        await start_server(ServerStart("main", tmp_path / "run", (program,), {}, 1.0))
    assert "install it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_program_is_found_by_name_and_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "some-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("some-server", "./some-server", "~/some-server", str(program)):
        assert needed_program(name, "") == str(program)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(EngineConfigError, match="no such program"):
        needed_program("./some-server", "")  # the one on PATH is another
    with pytest.raises(EngineConfigError, match=r"other-server: .*: apt install other-server"):
        needed_program("other-server", "apt install other-server")


async def test_a_program_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    server = await start_server(ServerStart("main", tmp_path, (str(program),), {}, 30.0))
    with pytest.raises(EngineDead, match=rf"code 127: {program} cannot be run: No such file"):
        await wait_until_answering(server, never)
    await server.end()


async def test_the_wait_ends_with_the_servers_own_reason(launch: Launch) -> None:
    code = "import sys; sys.exit('MemoryError: no room for 7 blocks')"
    server = await launch("-c", code, limit_s=600.0)
    with pytest.raises(EngineDead) as caught:
        await wait_until_answering(server, never)
    assert str(caught.value) == (
        "engine main did not start: it ended with code 1: MemoryError: no room for 7 blocks "
        f"(log: {server.log_file})"
    )


async def test_the_last_lines_of_its_log_stand_in_the_error(launch: Launch) -> None:
    said = r"a\nMemoryError: no room\n\nbacktrace of 9 frames\nleft a core file\n" + "x" * 999
    server = await launch("-c", f"import sys; sys.exit('{said}')")
    with pytest.raises(EngineDead) as caught:
        await wait_until_answering(server, never)
    assert "\n" not in str(caught.value)
    assert (
        "code 1: MemoryError: no room; last in its log: backtrace of 9 frames | left a core file | "
        + "x" * 200
        + " (log: "
    ) in str(caught.value)


async def test_the_wait_has_a_limit_and_tells_how_far_it_came(launch: Launch) -> None:
    code = "print('found it'); print('loading', flush=True); import time; time.sleep(1000)"
    server = await launch("-c", code, limit_s=0.3)
    await wait_for_line(server, "loading")
    said = r"not answer within 0\.3 s; last in its log: found it \| loading"
    with pytest.raises(EngineDead, match=said):
        await wait_until_answering(server, never)


async def test_a_question_without_an_end_is_held_to_the_limit_too(launch: Launch) -> None:
    server = await launch("-c", "import time; time.sleep(1000)", limit_s=0.3)

    async def hang() -> bool:
        await asyncio.sleep(1000)
        return True

    with pytest.raises(EngineDead, match="not answer within"):
        await wait_until_answering(server, hang)


async def test_progress_of_the_wait_is_logged(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROGRESS_S", 0.0)
    server = await launch("-c", "print('shard 3 of 9', flush=True); import time; time.sleep(1000)")
    await wait_for_line(server, "shard")
    asked = 0

    async def at_the_third() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with structlog.testing.capture_logs() as logs:
        await wait_until_answering(server, at_the_third)
    assert [(entry["event"], entry["engine"], entry["doing"]) for entry in logs] == [
        ("engine.starting", "main", "shard 3 of 9")
    ] * 2


async def test_a_taken_port_is_recognised_and_who_holds_it_is_not_taken_for_the_server(
    launch: Launch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = await launch(*WEB, str(port))
        end = await asyncio.shield(server.ended)
        assert end.is_port_taken
        assert "Address already in use" in end.reason
        with pytest.raises(EngineDead, match="Address already in use"):
            await wait_until_answering(server, lambda: listens(port))


async def test_another_end_is_not_called_a_taken_port(launch: Launch) -> None:
    server = await launch("-c", "import sys; sys.exit('no memory')")
    assert not (await asyncio.shield(server.ended)).is_port_taken


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


@pytest.mark.parametrize("behaviour", ["arena killed", "guard late", "kills its children"])
async def test_kill_9_of_the_arena_leaves_no_process(tmp_path: Path, behaviour: str) -> None:
    code = CHILDLESS if behaviour == "kills its children" else STUBBORN
    arguments = (str(tmp_path), sys.executable, "-c", code)
    arena = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, *arguments)
    async with asyncio.timeout(30):
        while not (tmp_path / "pgid").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        pgid = int((tmp_path / "pgid").read_text())
        if behaviour != "guard late":  # else the arena goes before the guard is there
            while (tmp_path / "engine-main.log").stat().st_size == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert group_members(pgid)
    if behaviour == "kills its children":
        assert "children []" in (tmp_path / "engine-main.log").read_text()
    arena.kill()
    await arena.wait()
    await wait_until_gone(pgid, 10.0)


def test_what_a_killed_guard_left_is_ended_by_the_next_run(tmp_path: Path) -> None:
    """The record on disk names the group."""
    arguments = (str(tmp_path), sys.executable, "-c", STUBBORN)
    with subprocess.Popen([sys.executable, "-c", DRIVER, *arguments]) as arena:
        log = tmp_path / "engine-main.log"
        begun = time.monotonic()
        while not (log.exists() and "up" in log.read_text() and (tmp_path / "pgid").exists()):
            assert time.monotonic() - begun < 30
            time.sleep(0.05)
        pgid = int((tmp_path / "pgid").read_text())
        guard = guard_of(pgid, tmp_path / "engine-main.pid")
        os.kill(guard, signal.SIGKILL)
        arena.kill()
        arena.wait()
    assert len(group_members(pgid)) == 2
    assert end_survivors(tmp_path) == [pgid]
    assert group_members(pgid) == []


def guard_of(pgid: int, record: Path) -> int:
    """The process of our child's command line and of this start's temporary directory."""
    scratch = json.loads(record.read_text())["scratch"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.pid != pgid and process_module.__file__ in process.cmdline()
            if is_ours and process.environ().get("TMPDIR") == scratch:
                return process.pid
    raise AssertionError("no guard")


LLAMA_CPP = (
    "0.00.000.228 I srv          init: initializing ...\n"
    "0.00.023.792 E llama_model_load: error loading model: tensor 'x' is not within the bounds\n"
    "0.00.023.851 E llama_model_load_from_file_impl: failed to load model\n"
    "0.00.038.236 E srv          init: exiting due to model loading error\n"
)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "it wrote nothing"),
        ("starting\nbye\n", "bye"),
        (LLAMA_CPP, "llama_model_load: error loading model: tensor 'x' is not within the bounds"),
        ("INFO x\nRuntimeError: no GPU\nbye\n", "RuntimeError: no GPU"),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31000): "
            "address already in use\nINFO:     Waiting for application shutdown.\n",
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31000): "
            "address already in use",
        ),
        (
            "0.00.001.970 E srv         start: couldn't bind HTTP server socket, port: 18921\n"
            "0.00.002.081 E srv          init: exiting due to HTTP server error\n",
            "0.00.001.970 E srv         start: couldn't bind HTTP server socket, port: 18921",
        ),
        ("ModuleNotFoundError: harmless\n" + "INFO x\n" * 60 + "killed\n", "killed"),
        ("Error: listen tcp 127.0.0.1:11434: bind: address already in use\n",) * 2,
    ],
)
def test_the_reason_is_the_line_that_says_most(output: str, reason: str) -> None:
    assert reason_of(output) == reason.strip()


@pytest.mark.timeout(5)
@pytest.mark.parametrize("piece", ["x", "x.", "1 ", "E ", "in use "])
def test_a_log_of_one_long_line_is_read_at_once(piece: str) -> None:
    """A server printed its arguments in 30,000 characters, and the search was quadratic."""
    assert len(reason_of(piece * (64_000 // len(piece)))) == 400
