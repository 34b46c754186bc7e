"""The contract of engines over HTTP, against real servers that we launch here with the packaged
model: llama.cpp, and SGLang and vLLM where they are installed. Through their chat endpoints too, as
any OpenAI-compatible server is used."""

import importlib.util
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serving.http_engine import HttpEngine
from serving.llama_package import is_installed
from serving.process import group_members
from serving.sglang_cpu import REMEDY, sglang_python
from tests.serving.contract import CHECKS, Subject, Tells, open_engine, told_inside

IN_MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    IN_MODULE_LOOP,
]

ALL_DURATIONS = frozenset({"queue_s", "prefill_s", "decode_s"})
COMPUTING = ALL_DURATIONS - {"queue_s"}


@dataclass(frozen=True, slots=True)
class Real:
    """A server that can be launched here."""

    kind: str
    missing: str | None
    """Why it cannot."""
    tells: Tells
    knobs: dict[str, Any]
    chat_tells: Tells
    heeds_seeds: bool = True
    many: int = 24


REAL = {
    real.kind: real
    for real in (
        Real(
            "llama_server",
            None if is_installed() else "xllamacpp is not installed: make setup",
            Tells(COMPUTING, cached=True, figures=True),
            {"scrape_seconds": 0.3},
            Tells(COMPUTING, cached=True, version=False),
        ),
        Real(
            "sglang",
            None if sglang_python() else f"SGLang is not installed: {REMEDY}",
            Tells(ALL_DURATIONS, True, True, True),
            {"scrape_seconds": 0.3},
            Tells(cached=True, version=False),
            # it does with --enable-deterministic-inference, which a CPU's backend has not
            heeds_seeds=False,
        ),
        Real(
            "vllm_server",
            None if importlib.util.find_spec("vllm") else "vLLM is not installed",
            Tells(ALL_DURATIONS, True, True, True),
            {"scrape_seconds": 0.3, "max_batched_tokens": 512},
            Tells(cached=True, version=False),
        ),
    )
}
IN_CHATS = (
    "choices are obeyed",
    "usage is told",
    "times are in order",
    "cancelling frees the slot",
    "too long is rejected",
)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=REAL)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    """One server of each kind, for all tests of it; when it is closed nothing of it is left."""
    real = REAL[request.param]
    if real.missing is not None:
        pytest.skip(real.missing)
    folder = tmp_path_factory.mktemp(real.kind)
    table = {
        "kind": real.kind,
        "max_concurrent": 4,
        "max_queued": 100,
        "context_tokens": 1024,
        **real.knobs,
    }
    async with open_engine(table, folder) as engine:
        group = http_engine(engine.inner).pgid
        assert group is not None
        assert group_members(group)
        yield Subject(
            engine,
            real.tells,
            forgets=True,
            heeds_seeds=real.heeds_seeds,
            many=real.many,
            deadline_s=3.0,
            slowness=5.0,
        )
    assert group_members(group) == []


def http_engine(engine: object) -> HttpEngine:
    assert isinstance(engine, HttpEngine)
    return engine


@pytest.mark.parametrize("check", CHECKS)
async def test_it_keeps_the_contract(subject: Subject, check: str) -> None:
    await CHECKS[check](subject)


@pytest.mark.parametrize("check", IN_CHATS)
async def test_its_chat_endpoint_does_too(subject: Subject, check: str, tmp_path: Path) -> None:
    command = http_engine(subject.engine.inner).command
    assert command is not None
    port = command.argv[command.argv.index("--port") + 1]
    table = {
        "kind": "openai",
        "url": f"http://127.0.0.1:{port}",
        "max_concurrent": 4,
        "max_queued": 100,
        "context_tokens": 1024,
    }
    async with open_engine(table, tmp_path) as engine:
        tells = REAL[subject.engine.kind].chat_tells
        chat = replace(
            subject,
            engine=engine,
            tells=tells,
            forgets=False,
            many=8,
            count_inside=partial(told_inside, subject),
        )
        await CHECKS[check](chat)
