"""The fake server over HTTP: each server's recorded shapes, figures that are true, every fault."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from serving.fake_model import FakeConfig, FakeDialect, FakeFault, FaultKind
from serving.fake_server import FakeServer, WallClock, serve

WIRE = Path(__file__).parents[1] / "data/wire"
IDS = list(range(100, 140))
FAST = 1e5
"""Seconds of the model in one."""


class StepClock:
    """A clock that stands still until the test lets steps pass."""

    def __init__(self) -> None:
        self._now = 0.0
        self._permits = asyncio.Semaphore(0)

    def time(self) -> float:
        return self._now

    async def sleep_until(self, at: float) -> None:
        await self._permits.acquire()
        self._now = max(self._now, at)

    def pass_steps(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()


@dataclass(slots=True)
class Got:
    """What came back over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: str | None = None
    """How it ended, where it did not end well."""

    @property
    def media_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0]

    @property
    def events(self) -> list[Any]:
        """Data of each event, or each line's object; JSON where it is."""
        if self.media_type == "application/x-ndjson":
            return [_json(line) for line in self.body.decode().splitlines()]
        parts = self.body.decode().split("\n\n")
        return [_json(part.removeprefix("data: ")) for part in parts if part]

    @property
    def content(self) -> Any:
        return _json(self.body.decode())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


async def ask(url: str, path: str, body: Any = None, method: str = "POST") -> Got:
    """One connection; what came until it ended, however it did."""
    got = Got(0, {}, b"")
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url + path, json=body, allow_redirects=False) as response,
        ):
            got.status, got.headers = response.status, dict(response.headers)
            async for data in response.content.iter_any():
                got.body += data
    except aiohttp.ClientError as error:
        got.error = f"{type(error).__name__}: {error}"
    return got


async def look(url: str, path: str) -> Got:
    return await ask(url, path, method="GET")


async def until(is_so: Callable[[], bool]) -> None:
    """Without a limit of its own: a test has one."""
    while not is_so():  # noqa: ASYNC110 - what is waited for happens on another connection
        await asyncio.sleep(0.001)


async def until_well(server: FakeServer, path: str) -> None:
    while (await look(server.url, path)).status != 200:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Endpoint:
    """A question in one dialect, and where its answer stands."""

    dialect: FakeDialect
    path: str
    body: dict[str, Any]
    text: Callable[[list[Any]], str]
    quoted: bool = False
    """The choice comes as JSON writes it."""

    @property
    def id(self) -> str:
        return f"{self.dialect}{self.path}"

    @property
    def free(self) -> dict[str, Any]:
        """The same question without its constraint."""
        names = ("structured_outputs", "grammar", "response_format", "format")
        body = {name: value for name, value in self.body.items() if name not in names}
        if "sampling_params" in body:
            body["sampling_params"] = {"max_new_tokens": 50}
        return body

    @property
    def choices(self) -> tuple[str, str]:
        return ('"e2e4"', '"d2d4"') if self.quoted else ("e2e4", "d2d4")


def _deltas(events: list[Any]) -> str:
    texts = [
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    ]
    return "".join(texts)


def _texts(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if isinstance(e, dict) for c in e["choices"])


MESSAGES = [{"role": "user", "content": "Your move, please: e2e4 or d2d4?"}]
SCHEMA = {"type": "string", "enum": ["e2e4", "d2d4"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA}}
USAGE = {"stream_options": {"include_usage": True}}
CHAT = {"messages": MESSAGES, "max_tokens": 50, "stream": True, "response_format": FORMAT, **USAGE}
GRAMMAR = 'root ::= "e2e4" | "d2d4"'

VLLM = Endpoint(
    "vllm",
    "/v1/completions",
    {
        "prompt": IDS,
        "max_tokens": 50,
        "stream": True,
        "structured_outputs": {"choice": ["e2e4", "d2d4"]},
        **USAGE,
    },
    _texts,
)
SGLANG = Endpoint(
    "sglang",
    "/generate",
    {
        "input_ids": IDS,
        "rid": "m/0/0/0",
        "sampling_params": {"max_new_tokens": 50, "regex": "(e2e4|d2d4)"},
        "stream": True,
    },
    lambda events: str(events[-2]["text"]),
)
LLAMA = Endpoint(
    "llama_server",
    "/completion",
    {"prompt": IDS, "n_predict": 50, "stream": True, "grammar": GRAMMAR},
    lambda events: "".join(event["content"] for event in events),
)
OLLAMA = Endpoint(
    "ollama",
    "/api/chat",
    {"messages": MESSAGES, "options": {"num_predict": 50}, "format": SCHEMA},
    lambda events: "".join(event["message"]["content"] for event in events),
    quoted=True,
)
CHATS = [
    Endpoint(dialect, "/v1/chat/completions", CHAT, _deltas, quoted=True)
    for dialect in ("vllm", "sglang", "llama_server", "ollama", "openai")
]
NATIVE = [VLLM, SGLANG, LLAMA, OLLAMA]
ALL = [*NATIVE, *CHATS]
every_endpoint = pytest.mark.parametrize("endpoint", ALL, ids=lambda endpoint: endpoint.id)


def config_of(dialect: FakeDialect, *faults: FaultKind, **knobs: Any) -> FakeConfig:
    """A quick server of one kind; each fault hits the question of its place."""
    return FakeConfig(
        dialects=(dialect,),
        speed=knobs.pop("speed", FAST),
        faults=tuple(FakeFault(kind=kind, at=(at,)) for at, kind in enumerate(faults)),
        **knobs,
    )


async def answer_of(endpoint: Endpoint, *faults: FaultKind, **knobs: Any) -> Got:
    async with FakeServer(config_of(endpoint.dialect, *faults, **knobs)) as server:
        return await ask(server.url, endpoint.path, endpoint.body)


# recorded shapes


def _expand(value: Any) -> Any:
    match value:
        case "ids":
            return IDS
        case str() if found := re.fullmatch(r"ids\*(\d+)", value):
            return IDS * int(found[1])
        case str() if found := re.fullmatch(r"hi\*(\d+)", value):
            return "hi " * int(found[1])
        case dict():
            return {name: _expand(inner) for name, inner in value.items()}
        case list():
            return [_expand(inner) for inner in value]
    return value


def recorded(server: str) -> dict[str, dict[str, Any]]:
    exchanges = json.loads((WIRE / f"{server}.json").read_text())["exchanges"]
    return {exchange["name"]: _expand(exchange) for exchange in exchanges}


_UNSAID = """
vLLM: stop_reason prompt_token_ids token_ids prompt_text system_fingerprint service_tier refusal
    annotations audio function_call routed_experts prompt_logprobs kv_transfer_params permission
    ec_transfer_params created_cache_tokens multimodal_tokens completion_tokens_details
SGLang: matched_stop weight_version weight_versions num_retractions storage_prefetch_wait logprobs
    storage_staging_wait forward_entry_time prefill_finished_time reasoning_tokens err_type metadata
    cached_tokens_details dp_rank request_received_ts request_finished_ts decode_throughput
    api_server_dispatch_finish_ts response_sent_to_client_ts
llama.cpp: prompt models aliases tags architecture vocab_type n_vocab n_embd n_params size ftype
    model_ftype modalities endpoint_slots endpoint_props endpoint_metrics ui chat_template_caps
    bos_token eos_token cors_proxy_enabled
"""
UNSAID = frozenset(_UNSAID.split())
"""Fields that servers send and the fake does not: nothing of ours reads them."""

_ONLY_HERE = """
vLLM with --enable-per-request-metrics: metrics
SGLang where it refused: queue_time prompt_tokens cached_tokens
llama.cpp, left out of the recording: chat_template params
"""
ONLY_HERE = frozenset(_ONLY_HERE.split())


def differences(real: Any, fake: Any, where: str = "") -> list[str]:
    """How the shape of `fake` is not that of `real`: names and types, not values."""
    if real is None or fake is None:
        return []
    if isinstance(real, dict) and isinstance(fake, dict):
        missing = [f"{where}: no {name}" for name in real.keys() - fake.keys() - UNSAID]
        added = [f"{where}: {name} added" for name in fake.keys() - real.keys() - ONLY_HERE]
        inner = (differences(real[n], fake[n], f"{where}.{n}") for n in real.keys() & fake.keys())
        return missing + added + [text for texts in inner for text in texts]
    if isinstance(real, list) and isinstance(fake, list):
        inner = (differences(a, b, f"{where}[]") for a, b in zip(real[:1], fake[:1], strict=True))
        return [text for texts in inner for text in texts]
    kinds = ((int, float) if isinstance(one, int | float) else type(one) for one in (real, fake))
    first, second = kinds
    return [] if first == second else [f"{where}: {real!r} became {fake!r}"]


SAME_TEXT = {"full", "full whole", "full chat", "full chat whole", "too long", "too long whole"}
SAME_TEXT |= {"not found", "no such model", "unknown field", "two constraints", "flush busy"}
SAME_TEXT |= {"reset busy", "reset"}
"""Answered word for word."""


def check_like(exchange: dict[str, Any], got: Got) -> None:
    assert got.status == exchange["status"]
    if exchange["content_type"] is not None:
        assert got.media_type == exchange["content_type"].partition(";")[0]
    real = exchange["events"] if "events" in exchange else exchange["body"]
    fake = got.events if "events" in exchange else got.content
    if isinstance(real, list) and "events" in exchange:
        assert len(fake) == len(real)
        pairs = list(zip(real, fake, strict=True))
    else:
        pairs = [(real, fake)]
    assert [text for one, other in pairs for text in differences(one, other)] == []
    if exchange["name"] in SAME_TEXT:
        assert _messages(fake) == _messages(real)


def _messages(value: Any) -> list[str]:
    """Every text a client could match, without made-up ids."""
    if isinstance(value, dict):
        return [
            text
            for name in sorted(value)
            if name not in UNSAID and name != "id"
            for text in _messages(value[name])
        ]
    if isinstance(value, list):
        return [text for inner in value for text in _messages(inner)]
    return [value.strip()] if isinstance(value, str) else []


async def exchange_with(server: FakeServer, exchange: dict[str, Any]) -> Got:
    return await ask(server.url, exchange["path"], exchange.get("request"), exchange["method"])


APART = {"full", "full whole", "full chat", "full chat whole", "reset busy", "flush busy"}
APART |= {"aborted, its end", "aborted waiting", "completions, its end", "slots used"}
RECORDED: list[tuple[FakeDialect, str]] = [
    (dialect, name)
    for dialect in ("vllm", "sglang", "llama_server")
    for name in recorded(dialect)
    if name not in APART
]


@pytest.mark.parametrize(("dialect", "name"), RECORDED)
async def test_it_answers_as_was_recorded(dialect: FakeDialect, name: str) -> None:
    exchange = recorded(dialect)[name]
    context = {"vllm": 512, "sglang": 2048, "llama_server": 2048}[dialect]
    config = config_of(dialect, model="smol", context_tokens=context, slots=2)
    async with FakeServer(config) as server:
        check_like(exchange, await exchange_with(server, exchange))


def _has(server: FakeServer, requests: int) -> bool:
    return server.running + server.waiting == requests


def _runs(server: FakeServer, requests: int) -> bool:
    return server.running == requests


@contextlib.asynccontextmanager
async def busy(endpoint: Endpoint, running: int, waiting: int, **knobs: Any) -> AsyncIterator[Any]:
    """A server whose clock stands still with so many requests inside: server, clock, answers."""
    clock = StepClock()
    config = config_of(endpoint.dialect, slots=running, model="smol", **knobs)
    async with FakeServer(config, clock=clock) as server, asyncio.TaskGroup() as group:
        tasks = []
        for number in range(running + waiting):
            body = endpoint.free | ({"rid": f"r{number}"} if endpoint.dialect == "sglang" else {})
            tasks.append(group.create_task(ask(server.url, endpoint.path, body)))
            await until(partial(_has, server, number + 1))
            if 0 < number < running:
                # slots are filled between steps
                clock.pass_steps()
                await until(partial(_runs, server, number + 1))
        await until(lambda: (server.running, server.waiting) == (running, waiting))
        yield server, clock, tasks
        clock.pass_steps(1000)


@pytest.mark.parametrize("name", ["full", "full chat", "reset busy"])
async def test_a_full_vllm_answers_as_was_recorded(name: str) -> None:
    exchange = recorded("vllm")[name]
    async with busy(VLLM, 2, 1, queue=1) as (server, _, _):
        check_like(exchange, await exchange_with(server, exchange))


@pytest.mark.parametrize(
    "name", ["full", "full whole", "full chat", "full chat whole", "flush busy"]
)
async def test_a_full_sglang_answers_as_was_recorded(name: str) -> None:
    """Streamed, a full queue is HTTP 200 and an event."""
    exchange = recorded("sglang")[name]
    async with busy(SGLANG, 2, 1, queue=1) as (server, _, _):
        check_like(exchange, await exchange_with(server, exchange))


async def test_sglang_aborts_by_name_as_was_recorded() -> None:
    async with busy(SGLANG, 2, 1) as (server, clock, tasks):
        clock.pass_steps()
        await until(lambda: server.totals.written == 3)
        for rid in ("r2", "r0", "nobody"):
            got = await ask(server.url, "/abort_request", {"rid": rid})
            assert (got.status, got.body) == (200, b"")
        running, waiting = (await tasks[0]).events, (await tasks[2]).events
        assert running[-2]["meta_info"]["finish_reason"]["message"] == "Aborted"
        names = recorded("sglang")
        assert differences(names["aborted, its end"]["events"], running[-2:]) == []
        check_like(names["aborted waiting"], await tasks[2])
        assert waiting[0]["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        assert server.running == 1


async def test_llama_cpps_text_completion_ends_as_was_recorded() -> None:
    exchange = recorded("llama_server")["completions, its end"]
    async with FakeServer(config_of("llama_server")) as server:
        last, mark = (await exchange_with(server, exchange)).events[-2:]
    assert (differences(exchange["events"][0], last), mark) == ([], "[DONE]")
    assert last["usage"]["completion_tokens"] == 3


async def test_slots_that_were_used_are_told_as_was_recorded() -> None:
    async with FakeServer(config_of("llama_server", slots=2)) as server:
        for slot in (0, 1):
            await ask(server.url, "/completion", LLAMA.body | {"id_slot": slot})
        exchange = recorded("llama_server")["slots used"]
        got = await look(server.url, "/slots")
        check_like(exchange, got)
        assert [slot["n_prompt_tokens"] for slot in got.content] == [45, 45]


async def test_ollama_answers_as_its_documentation_says() -> None:
    """github.com/ollama/ollama/blob/main/docs/api.md, chat request (streaming)."""
    first = {
        "model": "llama3.2",
        "created_at": "2023-08-04T08:52:19.385406455-07:00",
        "message": {"role": "assistant", "content": "The"},
        "done": False,
    }
    last = {
        "model": "llama3.2",
        "created_at": "2023-08-04T19:22:45.499127Z",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "total_duration": 4883583458,
        "load_duration": 1334875,
        "prompt_eval_count": 26,
        "prompt_eval_duration": 342546000,
        "eval_count": 282,
        "eval_duration": 4535599000,
    }
    got = await answer_of(OLLAMA)
    assert got.media_type == "application/x-ndjson"
    assert differences(first, got.events[0]) == differences(last, got.events[-1]) == []
    async with FakeServer(config_of("ollama")) as server:
        assert (await look(server.url, "/api/version")).content["version"]
        assert (await look(server.url, "/api/tags")).content["models"][0]["name"] == "fake"
        whole = await ask(server.url, "/api/chat", OLLAMA.body | {"stream": False})
        assert differences(last, whole.content) == []


async def test_openai_answers_as_its_documentation_says() -> None:
    """platform.openai.com/docs/api-reference/chat-streaming: the finish in a chunk of its own, then
    one without choices that counts."""
    got = await answer_of(CHATS[-1])
    chunks = got.events
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-3]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert (chunks[-2]["choices"], chunks[-1]) == ([], "[DONE]")
    assert chunks[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# answers


@every_endpoint
async def test_a_constraint_is_obeyed(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint)
    assert got.error is None
    assert endpoint.text(got.events) in endpoint.choices


@every_endpoint
async def test_without_a_constraint_the_answer_is_free(endpoint: Endpoint) -> None:
    async with FakeServer(config_of(endpoint.dialect, replies=("MOVE: g1f3",))) as server:
        got = await ask(server.url, endpoint.path, endpoint.free)
    assert endpoint.text(got.events) == "MOVE: g1f3"


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama_server", "openai"])
@pytest.mark.parametrize("name", ["guided_choice", "choice", "banana"])
async def test_an_unknown_constraint_is_ignored_in_silence(dialect: FakeDialect, name: str) -> None:
    """As real servers do, with 200: whoever constrains must look whether it was obeyed."""
    body = {"messages": MESSAGES, "max_tokens": 50, name: ["e2e4", "d2d4"]}
    async with FakeServer(config_of(dialect)) as server:
        got = await ask(server.url, "/v1/chat/completions", body)
    assert got.status == 200
    assert got.content["choices"][0]["message"]["content"].startswith("I would")


async def test_each_server_takes_its_own_constraints_alone() -> None:
    body = {"messages": MESSAGES, "max_tokens": 50}
    own: dict[FakeDialect, dict[str, Any]] = {
        "vllm": {"structured_outputs": {"choice": ["e2e4"]}},
        "sglang": {"regex": "(e2e4)"},
        "llama_server": {"grammar": 'root ::= "e2e4"'},
    }
    obeyed = set()
    for dialect in own:
        async with FakeServer(config_of(dialect)) as server:
            for name, field_ in own.items():
                got = await ask(server.url, "/v1/chat/completions", body | field_)
                if got.content["choices"][0]["message"]["content"] == "e2e4":
                    obeyed.add((dialect, name))
    assert obeyed == {(name, name) for name in own}


async def test_the_seed_and_the_prompt_choose() -> None:
    async with FakeServer(config_of("vllm")) as server:

        async def choice(prompt: list[int], **more: Any) -> str:
            got = await ask(server.url, VLLM.path, VLLM.body | {"prompt": prompt} | more)
            return _texts(got.events)

        first = [await choice(IDS, seed=seed) for seed in range(8)]
        assert first == [await choice(IDS, seed=seed) for seed in range(8)]
        assert set(first) == {"e2e4", "d2d4"}
        assert len({await choice(IDS, seed=seed, temperature=0) for seed in range(8)}) == 1


async def test_an_answer_is_cut_at_its_bound_and_at_the_context() -> None:
    config = config_of("llama_server", context_tokens=43)
    async with FakeServer(config) as server:
        cut = await ask(server.url, "/completion", LLAMA.body | {"n_predict": 2})
        full = await ask(server.url, "/completion", LLAMA.body)
    assert LLAMA.text(cut.events) in ("e2", "d2")
    assert (cut.events[-1]["tokens_predicted"], cut.events[-1]["stop_type"]) == (2, "limit")
    assert (full.events[-1]["tokens_predicted"], full.events[-1]["stop_type"]) == (3, "limit")


async def test_sglang_refuses_a_question_whose_answer_may_not_fit() -> None:
    """Its prompt of 40 ids does fit."""
    room = SGLANG.body["sampling_params"]["max_new_tokens"]
    for context, code in ((40 + room, None), (39 + room, 400)):
        got = await answer_of(SGLANG, context_tokens=context)
        event = got.events[0]
        assert event.get("error", {}).get("code") == code
        if code is not None:
            assert f"a total of {40 + room} tokens" in event["error"]["message"]


async def test_ollama_cuts_a_long_prompt_unless_told_not_to() -> None:
    async with FakeServer(config_of("ollama", context_tokens=16)) as server:
        got = await ask(server.url, "/api/chat", OLLAMA.body)
        assert got.events[-1]["prompt_eval_count"] == 8
        refused = await ask(server.url, "/api/chat", OLLAMA.body | {"truncate": False})
        assert refused.status == 400
        assert "exceeds the context length" in refused.content["error"]


async def test_durations_are_the_models() -> None:
    """40 prompt tokens at 1,000 a second, 5 tokens of 10 ms, however long it really took."""
    knobs = {"prefill_tokens_per_s": 1000.0, "decode_ms_per_token": 10.0}
    timings = (await answer_of(LLAMA, **knobs)).events[-1]["timings"]
    assert (timings["prompt_ms"], timings["predicted_ms"]) == pytest.approx((50.0, 40.0))
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 40, 5)
    meta = (await answer_of(SGLANG, **knobs)).events[-2]["meta_info"]
    assert meta["e2e_latency"] == pytest.approx(0.09, abs=1e-6)
    usage = (await answer_of(VLLM, **knobs)).events[-2]
    assert usage["metrics"]["generation_time_ms"] == pytest.approx(40.0)
    last = (await answer_of(OLLAMA, **knobs)).events[-1]
    assert last["eval_duration"] == pytest.approx((last["eval_count"] - 1) * 10e6)


async def test_cached_tokens_are_told() -> None:
    async with FakeServer(config_of("vllm", block_tokens=32)) as server:
        cached = []
        for _ in range(2):
            got = await ask(server.url, VLLM.path, VLLM.body)
            cached.append(got.events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert (await ask(server.url, "/reset_prefix_cache")).content == {"success": True}
        got = await ask(server.url, VLLM.path, VLLM.body)
        cached.append(got.events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0]


async def test_the_wall_clock_is_never_ahead() -> None:
    clock = WallClock(speed=50)
    began = time.monotonic()
    await clock.sleep_until(1.0)
    assert time.monotonic() - began >= 0.9 / 50
    assert clock.time() >= 0.9


async def test_what_was_asked_is_seen() -> None:
    async with FakeServer(config_of("sglang", "no_usage")) as server:
        await ask(server.url, SGLANG.path, SGLANG.body)
        await look(server.url, "/ready")
    (seen,) = server.seen
    assert (seen.number, seen.path, seen.body, seen.fault) == (
        0,
        "/generate",
        SGLANG.body,
        "no_usage",
    )
    assert seen.headers["Content-Type"] == "application/json"


async def test_nonsense_is_refused() -> None:
    async with FakeServer(FakeConfig(speed=FAST)) as server:
        wrong: list[Any] = [[], "x", {}, {"prompt": "x", "max_tokens": "many"}, {"prompt": ["x"]}]
        for body in wrong:
            got = await ask(server.url, "/v1/completions", body)
            assert got.status == 400, body
        assert server.running == server.waiting == 0


async def test_one_port_answers_as_all_of_them() -> None:
    async with FakeServer(FakeConfig(speed=FAST)) as server:
        for endpoint in NATIVE:
            got = await ask(server.url, endpoint.path, endpoint.body)
            assert endpoint.text(got.events) in endpoint.choices
        page = (await look(server.url, "/metrics")).body.decode()
        for name in ("vllm:", "sglang:", "llamacpp:"):
            assert f"\n{name}" in page


# figures


def figure(page: bytes, name: str) -> float:
    lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page.decode(), re.MULTILINE)
    assert lines, name
    return sum(float(value) for value in lines)


@pytest.mark.parametrize(
    ("endpoint", "running", "waiting"),
    [
        (VLLM, "vllm:num_requests_running", "vllm:num_requests_waiting"),
        (SGLANG, "sglang:num_running_reqs", "sglang:num_queue_reqs"),
        (LLAMA, "llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ],
    ids=["vllm", "sglang", "llama_server"],
)
async def test_metrics_tell_what_runs_and_waits(
    endpoint: Endpoint, running: str, waiting: str
) -> None:
    async with busy(endpoint, 2, 3) as (server, clock, tasks):
        page = (await look(server.url, "/metrics")).body
        assert (figure(page, running), figure(page, waiting)) == (2, 3)
        clock.pass_steps(1000)
        await asyncio.gather(*tasks)
        page = (await look(server.url, "/metrics")).body
        assert (figure(page, running), figure(page, waiting)) == (0, 0)


async def test_metrics_count_tokens_by_each_servers_names() -> None:
    async with FakeServer(FakeConfig(speed=FAST, block_tokens=16)) as server:
        for _ in range(2):
            await ask(server.url, VLLM.path, VLLM.body)
        page = (await look(server.url, "/metrics")).body
    assert {
        name: figure(page, name)
        for name in (
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:generation_tokens_total",
            "sglang:prompt_tokens_total",
            "sglang:cached_tokens_total",
            "llamacpp:prompt_tokens_total",
            "llamacpp:prompt_tokens_cached_total",
            "llamacpp:tokens_predicted_total",
            "llamacpp:n_busy_slots_per_decode",
        )
    } == {
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:generation_tokens_total": 10,
        "sglang:prompt_tokens_total": 80,
        "sglang:cached_tokens_total": 32,
        "llamacpp:prompt_tokens_total": 48,
        "llamacpp:prompt_tokens_cached_total": 32,
        "llamacpp:tokens_predicted_total": 10,
        "llamacpp:n_busy_slots_per_decode": 1,
    }
    assert b"sglang:num_retracted_requests_total" not in page


async def test_no_free_slot_can_be_asked_for() -> None:
    async with busy(LLAMA, 1, 0) as (server, _, _):
        got = await look(server.url, "/slots?fail_on_no_slot=1")
        assert (got.status, got.content["error"]["type"]) == (503, "unavailable_error")
        slot = (await look(server.url, "/slots")).content[0]
        assert slot["is_processing"] is True
        assert (await look(server.url, "/health")).status == 200


async def test_sglangs_health_takes_a_second_and_ready_does_not() -> None:
    clock = StepClock()
    async with FakeServer(config_of("sglang"), clock=clock) as server:
        assert (await look(server.url, "/ready")).status == 200
        asking = asyncio.create_task(look(server.url, "/health"))
        clock.pass_steps()
        assert (await asking).status == 200
        assert clock.time() == 1.0


# clients that leave


async def leave(server: FakeServer, endpoint: Endpoint) -> None:
    """Ask, and close the connection once the request is inside."""
    asking = asyncio.create_task(ask(server.url, endpoint.path, endpoint.free))
    await until(lambda: server.running + server.waiting > 0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("endpoint", ALL, ids=lambda endpoint: endpoint.id)
async def test_a_client_that_leaves_frees_its_slot_at_once(endpoint: Endpoint) -> None:
    async with FakeServer(config_of(endpoint.dialect), clock=StepClock()) as server:
        await leave(server, endpoint)
        await until(lambda: server.running + server.waiting == 0)
        assert server.totals.ended["abort"] == 1


async def test_a_late_cancel_keeps_its_slot_to_the_end() -> None:
    clock = StepClock()
    async with FakeServer(config_of("llama_server", "late_cancel"), clock=clock) as server:
        await leave(server, LLAMA)
        clock.pass_steps()
        await until(lambda: server.totals.written == 1)
        assert server.running == 1
        clock.pass_steps(1000)
        await until(lambda: server.running == 0)
        assert server.totals.ended == {"stop": 1, "length": 0, "abort": 0}


# connections


async def test_llama_cpp_sends_no_headers_before_the_slot() -> None:
    async with busy(LLAMA, 1, 0) as (server, clock, _):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(LLAMA.body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: server.waiting == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        clock.pass_steps(1000)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.parametrize(
    ("endpoint", "faults", "is_closed"),
    [(LLAMA, (), True), (VLLM, (), False), (VLLM, ("keepalive_lie",), True)],
    ids=["llama_server", "vllm", "vllm lying"],
)
async def test_keep_alive_is_a_lie_where_it_is_said_to_be(
    endpoint: Endpoint, faults: tuple[FaultKind, ...], is_closed: bool
) -> None:
    async with FakeServer(config_of(endpoint.dialect, *faults)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(endpoint.body).encode()
        head = f"POST {endpoint.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert (b"Keep-Alive: timeout=5" in answer) == is_closed
        assert b"Connection: close" not in answer
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        line = b""
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
        assert line == (b"" if is_closed else b"HTTP/1.1 200 OK\r\n")
        writer.close()


# faults


@every_endpoint
async def test_refusals_for_want_of_room(endpoint: Endpoint) -> None:
    faults: tuple[FaultKind, ...] = ("queue_full_503", "queue_full_429", "queue_full_200")
    async with FakeServer(config_of(endpoint.dialect, *faults)) as server:
        got = [await ask(server.url, endpoint.path, endpoint.body) for _ in faults]
        whole = endpoint.body | {"stream": False}
        assert (await ask(server.url, endpoint.path, whole)).status == 200
    assert [one.status for one in got] == [503, 429, 200]
    assert b'"message"' in got[0].body or "error" in got[0].content
    event = got[2].events[0]
    assert "error" in event or event["meta_info"]["finish_reason"]["status_code"] == 503
    assert server.totals.written > 0


@every_endpoint
async def test_too_long_is_refused(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "too_long")
    if endpoint is SGLANG:
        assert (got.status, got.events[0]["error"]["code"]) == (200, 400)
    else:
        assert got.status == 400
    assert b"2049" in got.body or b"context length" in got.body


@every_endpoint
async def test_an_aborted_answer_says_so(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "abort")
    assert got.error is None
    text = got.body.decode()
    assert '"abort"' in text or '"error"' in text
    assert not any(choice in text for choice in endpoint.choices)


@every_endpoint
async def test_a_truncated_answer_ends_early(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "truncate")
    assert got.status == 200
    assert got.body
    assert got.error is not None
    assert "ClientPayloadError" in got.error
    assert b"[DONE]" not in got.body


async def check_reset(endpoint: Endpoint, is_streamed: bool) -> None:
    async with FakeServer(config_of(endpoint.dialect, "reset")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(endpoint.body | {"stream": is_streamed}).encode()
        head = f"POST {endpoint.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("endpoint", NATIVE, ids=lambda endpoint: endpoint.id)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_reset_is_a_reset(endpoint: Endpoint, is_streamed: bool) -> None:
    await check_reset(endpoint, is_streamed)


def test_a_reset_is_a_reset_on_the_loop_of_the_command_too() -> None:
    uvloop.run(check_reset(VLLM, True))


@pytest.mark.parametrize("endpoint", NATIVE, ids=lambda endpoint: endpoint.id)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_slow_loris_sends_bytes_and_no_event(endpoint: Endpoint, is_streamed: bool) -> None:
    loris = FakeFault(kind="slow_loris", at=(0,), seconds=0.001)
    config = FakeConfig(dialects=(endpoint.dialect,), speed=FAST, faults=(loris,))
    async with (
        FakeServer(config) as server,
        aiohttp.ClientSession() as session,
        session.post(
            server.url + endpoint.path, json=endpoint.body | {"stream": is_streamed}
        ) as response,
    ):
        data = b""
        while len(data) < 30:
            data += await response.content.readany()
        assert b"\n" not in data
        assert data.split()[-1].endswith(b"{")


@every_endpoint
async def test_a_malformed_event_is_no_json(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "malformed_sse")
    assert got.error is None
    broken = [event for event in got.events if isinstance(event, str) and event != "[DONE]"]
    assert len(broken) == 1
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(broken[0])


@every_endpoint
async def test_other_content_types_and_statuses(endpoint: Endpoint) -> None:
    faults: tuple[FaultKind, ...] = ("wrong_content_type", "html_error", "redirect")
    async with FakeServer(config_of(endpoint.dialect, *faults)) as server:
        plain, html, moved = [await ask(server.url, endpoint.path, endpoint.body) for _ in faults]
    assert (plain.status, plain.media_type) == (200, "text/plain")
    assert (html.status, html.media_type) == (502, "text/html")
    assert (moved.status, moved.headers["Location"]) == (307, "/elsewhere")


@every_endpoint
async def test_an_ignored_constraint_is_a_success(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "ignore_constraint")
    assert got.status == 200
    assert endpoint.text(got.events).startswith("I would develop")


COUNTS = re.compile(r'"(prompt_tokens|completion_tokens|tokens_predicted|eval_count|usage)"')


@every_endpoint
async def test_counts_can_be_missing(endpoint: Endpoint) -> None:
    assert COUNTS.search((await answer_of(endpoint)).body.decode())
    got = await answer_of(endpoint, "no_usage")
    assert not COUNTS.search(got.body.decode())
    assert endpoint.text(got.events) in endpoint.choices


@pytest.mark.parametrize("endpoint", [VLLM, SGLANG, LLAMA, *CHATS[:2]], ids=lambda one: one.id)
async def test_cached_tokens_can_be_unknown(endpoint: Endpoint) -> None:
    known, unknown = await answer_of(endpoint), await answer_of(endpoint, "null_cached")
    numbers = re.compile(r'"(?:cached_tokens|cache_n)":\d')
    assert numbers.search(known.body.decode())
    assert not numbers.search(unknown.body.decode())


@every_endpoint
async def test_thinking_comes_first_and_apart_in_chats(endpoint: Endpoint) -> None:
    got = await answer_of(endpoint, "thinking")
    text, body = endpoint.text(got.events), got.body.decode()
    if endpoint.path in ("/v1/chat/completions", "/api/chat"):
        assert text in endpoint.choices
        assert re.search(r'"(reasoning|reasoning_content|thinking)":" me"', body)
    else:
        assert text in {f"<think>Let me see.</think>{choice}" for choice in endpoint.choices}


@every_endpoint
async def test_thinking_takes_tokens_of_the_answer(endpoint: Endpoint) -> None:
    """With few of them nothing is left for it."""
    body = json.loads(json.dumps(endpoint.body))
    limits = (body, body.get("sampling_params", {}), body.get("options", {}))
    for field in ("max_tokens", "max_new_tokens", "n_predict", "num_predict"):
        for place in limits:
            if field in place:
                place[field] = 3
    async with FakeServer(config_of(endpoint.dialect, "thinking")) as server:
        got = await ask(server.url, endpoint.path, body)
        assert server.totals.ended["length"] == 1
    apart = endpoint.path in ("/v1/chat/completions", "/api/chat")
    assert endpoint.text(got.events) == ("" if apart else "<think>Let me")


@every_endpoint
async def test_an_event_without_content_may_come_long_before_the_first_token(
    endpoint: Endpoint,
) -> None:
    clock = StepClock()
    config = config_of(endpoint.dialect, "role_only_first")
    async with (
        FakeServer(config, clock=clock) as server,
        aiohttp.ClientSession() as session,
        session.post(server.url + endpoint.path, json=endpoint.body) as response,
    ):
        line = (await response.content.readline()).decode()
        event = json.loads(line.removeprefix("data: "))
        assert server.totals.written == 0
        clock.pass_steps(1000)
        rest = await response.content.read()
    assert endpoint.text([event, event]) == ""
    assert len(rest) > 100


@every_endpoint
async def test_whole_answers_too(endpoint: Endpoint) -> None:
    whole = endpoint.body | {"stream": False}
    faults: tuple[FaultKind, ...] = ("truncate", "malformed_sse", "abort", "keepalive_lie")
    async with FakeServer(config_of(endpoint.dialect, *faults)) as server:
        got = [await ask(server.url, endpoint.path, whole) for _ in range(5)]
    assert got[0].error is not None
    assert isinstance(got[1].content, str)
    assert "abort" in got[2].body.decode()
    assert got[3].status == got[4].status == 200
    assert any(json.dumps(choice) in got[4].body.decode() for choice in endpoint.choices)


def once(kind: FaultKind, at: int, seconds: float, dialect: FakeDialect = "vllm") -> FakeConfig:
    fault = FakeFault(kind=kind, at=(at,), seconds=seconds)
    return FakeConfig(dialects=(dialect,), speed=FAST, faults=(fault,))


async def test_a_crash_closes_the_port() -> None:
    async with FakeServer(once("crash", 0, 600)) as server:
        died = await ask(server.url, VLLM.path, VLLM.body)
        assert died.status == 0
        refused = await look(server.url, "/health")
    for got in (died, refused):
        assert got.error is not None
    assert "ClientConnectorError" in str(refused.error)


async def test_a_crashed_server_comes_back_and_remembers_nothing() -> None:
    async with FakeServer(once("crash", 1, 0.05)) as server:
        await ask(server.url, VLLM.path, VLLM.body)
        assert server.totals.written == 5
        await ask(server.url, VLLM.path, VLLM.body)
        await until_well(server, "/health")
        page = (await look(server.url, "/metrics")).body
        assert figure(page, "vllm:generation_tokens_total") == 0
        got = await ask(server.url, VLLM.path, VLLM.body)
        assert got.events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_crash_resets_whoever_is_being_answered() -> None:
    clock = StepClock()
    crash = FakeFault(kind="crash", at=(1,), seconds=0.05)
    config = FakeConfig(dialects=("vllm",), faults=(crash,))
    async with FakeServer(config, clock=clock) as server:
        first = asyncio.create_task(ask(server.url, VLLM.path, VLLM.body))
        await until(lambda: server.running == 1)
        await ask(server.url, VLLM.path, VLLM.body)
        assert (await first).error is not None
        assert server.running == 0


async def test_a_frozen_server_accepts_and_says_nothing() -> None:
    async with FakeServer(config_of("vllm", "freeze")) as server:
        asking = asyncio.create_task(ask(server.url, VLLM.path, VLLM.body))
        await until(lambda: len(server.seen) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(look(server.url, "/health"), 0.05)
        assert not asking.done()
    assert (await asking).error is not None


async def test_a_freeze_stops_the_step_under_way() -> None:
    clock = StepClock()
    async with FakeServer(once("freeze", 1, 600), clock=clock) as server:
        first = asyncio.create_task(ask(server.url, VLLM.path, VLLM.body))
        await until(lambda: server.running == 1)
        second = asyncio.create_task(ask(server.url, VLLM.path, VLLM.body))
        await until(lambda: len(server.seen) == 2)
        clock.pass_steps(9)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(look(server.url, "/health"), 0.05)
        assert server.totals.written == 0
    assert all(got.error for got in await asyncio.gather(first, second))


async def test_a_freeze_holds_answers_up_and_ends() -> None:
    async with FakeServer(once("freeze", 1, 0.1)) as server:
        began = time.monotonic()
        answers = await asyncio.gather(
            *(ask(server.url, VLLM.path, VLLM.body) for _ in range(3)), look(server.url, "/health")
        )
        assert time.monotonic() - began >= 0.1
    assert all(VLLM.text(got.events) in VLLM.choices for got in answers[:3])


@pytest.mark.parametrize("endpoint", NATIVE, ids=lambda endpoint: endpoint.id)
async def test_a_loading_server_says_so_everywhere(endpoint: Endpoint) -> None:
    async with FakeServer(once("loading_503", 0, 600, endpoint.dialect)) as server:
        got = await ask(server.url, endpoint.path, endpoint.body)
        page = await look(server.url, "/v1/models")
        assert (got.status, page.status) == (503, 503)
        assert "Loading model" in got.body.decode()


async def test_loading_ends() -> None:
    async with FakeServer(once("loading_503", 0, 0.05)) as server:
        await ask(server.url, VLLM.path, VLLM.body)
        await until_well(server, "/health")
        assert (await ask(server.url, VLLM.path, VLLM.body)).status == 200


async def test_it_is_served_until_it_is_cancelled() -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(FakeConfig(), "127.0.0.1", 0, url.set_result))
    assert (await look(await url, "/health")).status == 200
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert (await look(await url, "/health")).error is not None


async def test_it_closes_while_questions_arrive() -> None:
    """One that came in last once kept it from closing for ever."""
    server = FakeServer(config_of("vllm", speed=1.0))
    await server.__aenter__()
    closed = False

    async def keep_asking() -> None:
        while not closed:
            await ask(server.url, VLLM.path, VLLM.body)

    asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
    await until(lambda: server.running > 0)
    async with asyncio.timeout(20):
        await server.__aexit__()
    closed = True
    await asyncio.gather(*asking)
