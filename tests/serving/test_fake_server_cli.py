"""`arena fake-server` as a person uses it: starts, says where it is, answers, ends when told to."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arena import cli

QUESTION = {"model": "fake", "prompt": "1. e4", "max_tokens": 8}


IN_BACKGROUND = "sh", "-c", "trap '' INT; exec \"$@\"", "sh"
"""Starts a command as a shell that is no terminal's does with `&`: SIGINT is ignored."""


@contextlib.contextmanager
def serving(
    *arguments: str, by: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address that it printed."""
    process = subprocess.Popen(
        [*by, sys.executable, "-m", "arena.cli", "fake-server", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://"), address
            yield process, address
        finally:
            process.kill()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "by"), [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, IN_BACKGROUND)]
)
def test_it_answers_until_it_is_told_to_end(number: signal.Signals, by: tuple[str, ...]) -> None:
    """In the background it did not hear SIGTERM."""
    with serving("--set", "speed=1000", by=by) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        assert ask(f"{address}/v1/models")["data"][0]["id"] == "fake"
        answer = ask(f"{address}/v1/completions", QUESTION)
        assert answer["choices"][0]["text"]
        process.send_signal(number)
        out, told = process.communicate(timeout=20)
        assert process.returncode == 130
        assert (out, told) == ("", "arena: interrupted\n")
        with pytest.raises(urllib.error.URLError):
            ask(f"{address}/v1/models")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_stands_in_brackets() -> None:
    with serving("--host", "::1") as (_, address):
        assert address.startswith("http://[::1]:")
        assert ask(f"{address}/v1/models")["data"][0]["id"] == "fake"
        port = address.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-m", "arena.cli", "fake-server", "--host", "::1", "--port", port],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 2
        assert f"--port: [::1]:{port} cannot be listened on" in done.stderr


def test_it_ends_while_it_answers() -> None:
    slow = '{kind = "slow_loris", at = [0]}'
    with serving("--set", f"faults=[{slow}]") as (process, address):
        body = json.dumps({**QUESTION, "stream": True}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.read(1)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == "arena: interrupted\n"


def test_a_file_and_keys_say_what_it_is(tmp_path: Path) -> None:
    """The port is the one that was asked for."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    config = tmp_path / "fake.toml"
    config.write_text('model = "a"\ncontext_tokens = 512\n[[faults]]\nkind = "too_long"\nat = [0]')
    with serving(str(config), "--set", "model=b", "--port", str(port)) as (_, address):
        assert address == f"http://127.0.0.1:{port}"
        (model,) = ask(f"{address}/v1/models")["data"]
        assert (model["id"], model["max_model_len"]) == ("b", 512)
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{address}/v1/completions", {**QUESTION, "model": "b"})
        assert refused.value.code == 400
        refused.value.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("{folder}/nowhere.toml",), "nowhere.toml: cannot be read"),
        (("{folder}/broken.toml",), "broken.toml: is not TOML"),
        (("--set", "slot=3"), 'slot: unknown key; did you mean "slots"?'),
        (("--set", "slots=0"), "slots: is 0"),
        (("--set", "speed=inf"), "speed: is inf"),
        (("--set", 'dialects=["vlm"]'), "dialects"),
        (("--set", "dialects=[]"), "dialects: is []"),
        (("--set", 'faults=[{{kind = "crach"}}]'), "faults"),
        (("--port", "70000"), "--port: 70000 is not one of 0 to 65535"),
        (("--port", "-1"), "--port: -1 is not one of 0 to 65535"),
        (("--port", "{taken}"), "--port: 127.0.0.1:{taken} cannot be listened on"),
        (("--host", ""), "--host: give one"),
        (("--host", "a..b"), "--port: a..b:0 cannot be listened on"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    """Port 70000 was taken as 4464."""
    (tmp_path / "broken.toml").write_text("slots = ")
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = held.getsockname()[1]
        filled = [argument.format(folder=tmp_path, taken=taken) for argument in arguments]
        assert cli.main(["fake-server", *filled]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told.format(taken=taken) in line


@pytest.mark.parametrize("port", ["x", "1.5", ""])
def test_a_port_that_is_no_number_is_a_usage_error(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fake-server", "--port", port])
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"argument --port: invalid int value: {port!r}" in told


def test_an_address_that_cannot_be_printed_is_no_taken_port() -> None:
    command = f"{sys.executable} -m arena.cli fake-server >/dev/full"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert done.stderr == "arena: the output cannot be written (No space left on device)\n"
