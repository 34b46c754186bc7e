"""What `arena plan` predicts of a KV cache, against the running engine's own figure."""

import importlib.util
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from arena import config, plan
from arena.plan import PlanAsk
from serving.dialect import Samples
from serving.llama_package import is_installed
from serving.llama_server import LlamaServerConfig, command
from serving.models import packaged_gguf
from serving.server_process import free_port
from serving.sglang_cpu import REMEDY, sglang_python
from tests.serving.contract import open_engine

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(600)]


def planned(table: dict[str, Any]) -> dict[str, Any]:
    """What is predicted for the engine of a table."""
    agents = [{"name": name, "kind": "llm", "engine": "main"} for name in "ab"]
    cup = {"max_plies": 20, "games": ["chess"]}
    told = config.parse(
        {"name": "p", "engines": {"main": table}, "agents": agents, "tournament": cup}
    )
    memory: dict[str, Any] = plan.build(PlanAsk(config=told))["memory"]
    return memory


@dataclass(frozen=True, slots=True)
class Told:
    """An engine's table, and its own metrics while it ran."""

    table: dict[str, Any]
    metrics: str


async def told_by(request: pytest.FixtureRequest, folder: Path) -> Told:
    async with open_engine(request.param, folder) as engine:
        return Told(request.param, await engine.metrics())


VLLM = {"kind": "vllm", "max_concurrent": 8, "context_tokens": 1024}
# blocks that the memory does not fill, and a context that no blocks fill
UNEVEN = {"kv_cache_bytes": "100MB", "block_tokens": 64, "context_tokens": 1000}
SGLANG = {"kind": "sglang", "max_concurrent": 4, "context_tokens": 1024}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[VLLM, {**VLLM, **UNEVEN}])
async def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return await told_by(request, tmp_path_factory.mktemp("vllm"))


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[SGLANG])
async def sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    if sglang_python() is None:
        pytest.skip(f"SGLang is not installed: {REMEDY}")
    return await told_by(request, tmp_path_factory.mktemp("sglang"))


def test_vllm_has_exactly_the_tokens(vllm: Told) -> None:
    (info,) = re.findall(r"^vllm:cache_config_info\{(.*)\}", vllm.metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    assert planned(vllm.table)["kv_tokens"] == int(labels["kv_cache_size_tokens"])


def test_sglang_has_the_tokens_within_2_percent(sglang: Told) -> None:
    told = Samples.read(sglang.metrics).most("sglang:max_total_num_tokens")
    assert planned(sglang.table)["kv_tokens"] == pytest.approx(told, rel=0.02)


@pytest.mark.skipif(not is_installed(), reason="xllamacpp is not installed")
def test_llama_server_has_the_tokens_within_2_percent(tmp_path: Path) -> None:
    table = {"kind": "llama_server", "max_concurrent": 3, "context_tokens": 1000}
    log = tmp_path / "server.log"
    settings = LlamaServerConfig.model_validate(table)
    with (
        llama_server(settings, log) as url,
        urllib.request.urlopen(f"{url}/slots", timeout=5) as answer,
    ):
        slots = json.load(answer)
    memory = planned(table)
    assert memory["kv_tokens"] == pytest.approx(sum(slot["n_ctx"] for slot in slots), rel=0.02)
    assert memory["unit_tokens"] == slots[0]["n_ctx"]


@contextmanager
def llama_server(settings: LlamaServerConfig, log: Path) -> Iterator[str]:
    """The server as an engine of ours launches it, once it is ready: its address."""
    port = free_port()
    started = command(settings, packaged_gguf(), port)
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            started.argv, env={**os.environ, **started.env}, stdout=out, stderr=out
        )
    try:
        limit = time.monotonic() + 100
        while not is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait(20)


def is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False
