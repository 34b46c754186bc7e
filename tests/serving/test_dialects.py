"""What is said to each kind of server and what its answers mean, on bytes that real ones sent.

Recorded: vLLM 0.32.0 (CPU), SGLang 0.5.23 (CPU), llama.cpp b11434 and b11549. From public API
documentation, since they do not run here: OpenAI (platform.openai.com/docs/api-reference/chat),
LM Studio (github.com/lmstudio-ai/docs; in tests/data/wire/lmstudio.json), Ollama
(github.com/ollama/ollama, docs/api.md and server/sched.go).
"""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serving import (
    ENGINE_KINDS,
    ChatPrompt,
    EngineConfigError,
    EngineError,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    PromptParts,
    Request,
    RequestRejected,
    Sampling,
    check_engine,
    parse_engine_config,
)
from serving import sglang as sglang_kind
from serving.chat_template import MESSAGE_TOKENS, MessagesTemplate
from serving.dialect import (
    Complaint,
    Dialect,
    Reading,
    Samples,
    Seen,
    context_of,
    fault_of,
    object_of,
)
from serving.llama_server import (
    LlamaDialect,
    LlamaServerConfig,
    SlotTable,
    grammar_of,
    slots_usage,
)
from serving.llama_server import command as llama_command
from serving.models import ModelShape
from serving.openai_chat import (
    OllamaConfig,
    OllamaDialect,
    OpenAiDialect,
    ollama_command,
    unwrapped,
)
from serving.sglang import SglangConfig, SglangDialect
from serving.vllm_config import VllmBuild
from serving.vllm_server import VllmDialect, VllmServerConfig
from serving.vllm_server import command as vllm_command

MakeRequest = Callable[..., Request]
WIRE = Path(__file__).parents[1] / "data/wire"
CHAT = ChatPrompt((("system", "Play."), ("user", "Moves: e2e4")))
SHAPE = ModelShape(context_tokens=8192, kv_bytes_per_token=23_040)


def dialects() -> dict[str, Dialect]:
    return {
        "vllm_server": VllmDialect(VllmServerConfig(url="http://127.0.0.1:1")),
        "sglang": SglangDialect(SglangConfig()),
        "llama_server": LlamaDialect(LlamaServerConfig(max_concurrent=2)),
        "openai": OpenAiDialect("gpt"),
        "ollama": OllamaDialect(OllamaConfig(model="llama3.2")),
    }


def read(dialect: Dialect, *messages: str) -> Reading:
    reading = Reading()
    for message in messages:
        dialect.read(message, reading)
    return reading


def ask(dialect: Dialect, request: Request) -> dict[str, Any]:
    if not dialect.takes_ids:
        request = replace(request, prompt=CHAT)
    return dict(dialect.call(request, "wire-1").body)


# answers

VLLM = (
    '{"id":"cmpl-1","object":"text_completion","created":1795973940,"model":"m","choices":'
    '[{"index":0,"text":"e2","logprobs":null,"finish_reason":null,"stop_reason":null}]}',
    '{"id":"cmpl-1","object":"text_completion","created":1795973940,"model":"m","choices":'
    '[{"index":0,"text":"e4","logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
    '{"id":"cmpl-1","object":"text_completion","created":1795973940,"model":"m","choices":[],'
    '"usage":{"prompt_tokens":99,"total_tokens":104,"completion_tokens":5,"prompt_tokens_details":'
    '{"cached_tokens":96}},"metrics":{"time_to_first_token_ms":33.0,"generation_time_ms":130.0,'
    '"queue_time_ms":3.0,"mean_itl_ms":32.5,"tokens_per_second":30.6}}',
    "[DONE]",
)
SGLANG = (
    '{"text":"e2","output_ids":[85,34],"meta_info":{"id":"r","finish_reason":null,'
    '"prompt_tokens":99,"weight_version":"default","num_retractions":0,"queue_time":0.25,'
    '"completion_tokens":2,"cached_tokens":98}}',
    '{"text":"e2e4","output_ids":[85,34,85,36,2],"meta_info":{"id":"r","finish_reason":'
    '{"type":"stop","matched":2},"prompt_tokens":99,"num_retractions":0,"queue_time":0.25,'
    '"completion_tokens":5,"cached_tokens":98,"cached_tokens_details":{"device":98,"host":0},'
    '"first_token_latency":0.75,"e2e_latency":1.0}}',
    "[DONE]",
)
LLAMA = (
    '{"index":0,"content":"e2","tokens":[7042],"stop":false,"id_slot":-1,"tokens_predicted":1,'
    '"tokens_evaluated":99}',
    '{"index":0,"content":"e4","tokens":[7043],"stop":false,"id_slot":-1,"tokens_predicted":2,'
    '"tokens_evaluated":99}',
    '{"content":"","stop":true,"stop_type":"eos","tokens_evaluated":99,"tokens_predicted":5,'
    '"timings":{"cache_n":98,"prompt_n":1,"prompt_ms":21.0,"prompt_per_token_ms":21.0,'
    '"prompt_per_second":47.6,"predicted_n":5,"predicted_ms":74.0,"predicted_per_token_ms":14.8,'
    '"predicted_per_second":67.6}}',
)
OPENAI = (
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt","choices":[{"index":0,'
    '"delta":{"content":"\\"e2"},"finish_reason":null}],"usage":null}',
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt","choices":[{"index":0,'
    '"delta":{"content":"e4\\""},"finish_reason":null}],"usage":null}',
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt","choices":[{"index":0,'
    '"delta":{},"finish_reason":"stop"}],"usage":null}',
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"gpt","choices":[],"usage":'
    '{"prompt_tokens":99,"completion_tokens":5,"total_tokens":104,"prompt_tokens_details":'
    '{"cached_tokens":64},"completion_tokens_details":{"reasoning_tokens":0}}}',
    "[DONE]",
)
OLLAMA = (
    '{"model":"llama3.2","created_at":"2023-08-04T08:52:19.385406455-07:00","message":'
    '{"role":"assistant","content":"\\"e2","images":null},"done":false}',
    '{"model":"llama3.2","created_at":"2023-08-04T08:52:19.385406455-07:00","message":'
    '{"role":"assistant","content":"e4\\""},"done":false}',
    '{"model":"llama3.2","created_at":"2023-08-04T19:22:45.499127Z","message":{"role":"assistant",'
    '"content":""},"done_reason":"stop","done":true,"total_duration":4883583458,"load_duration":'
    '1334875,"prompt_eval_count":99,"prompt_eval_duration":342546000,"eval_count":5,'
    '"eval_duration":4535599000}',
)
ANSWERS = {
    "vllm_server": VLLM,
    "sglang": SGLANG,
    "llama_server": LLAMA,
    "openai": OPENAI,
    "ollama": OLLAMA,
}
CACHED = {"vllm_server": 96, "sglang": 98, "llama_server": 98, "openai": 64, "ollama": None}
DURATIONS = {
    "vllm_server": (0.003, 0.033, 0.13),
    "sglang": (0.25, 0.5, 0.25),
    "llama_server": (None, 0.021, 0.074),
    "openai": (None, None, None),
    "ollama": (None, 0.342546, 4.535599),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_recorded_answer(kind: str, make_request: MakeRequest) -> None:
    dialect = dialects()[kind]
    reading = read(dialect, *ANSWERS[kind])
    assert dialect.answer(make_request(), reading) == "e2e4"
    assert (reading.finish, reading.is_done) == (Finish.STOP, True)
    assert (reading.prompt, reading.completion, reading.cached) == (99, 5, CACHED[kind])
    assert reading.pieces == 2
    durations = (reading.queue_s, reading.prefill_s, reading.decode_s)
    assert durations == pytest.approx(DURATIONS[kind])


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_whole_with_its_last_message_alone(kind: str) -> None:
    reading = read(dialects()[kind], *ANSWERS[kind][:-1])
    assert not reading.is_done


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("vllm_server", (VLLM[1].replace('"stop","stop', '"length","stop'), "[DONE]")),
        ("sglang", (SGLANG[1].replace('{"type":"stop","matched":2}', '{"type":"length"}'),)),
        ("llama_server", (LLAMA[2].replace('"eos"', '"limit"'),)),
        ("openai", (OPENAI[3].replace('"stop"', '"length"'),)),
        ("ollama", (OLLAMA[2].replace('"stop"', '"length"'),)),
    ],
)
def test_an_answer_that_ran_out_of_tokens(kind: str, messages: tuple[str, ...]) -> None:
    assert read(dialects()[kind], *messages).finish is Finish.LENGTH


def test_a_first_message_that_only_names_the_role_is_no_content() -> None:
    """Counting it as the first token spoils the time to it (vllm issue 15106)."""
    llama_chat = (
        '{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],'
        '"created":1795973940,"id":"c","object":"chat.completion.chunk"}'
    )
    for message in (OPENAI[0], llama_chat):
        assert not read(dialects()["openai"], message).has_content


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("openai", '{"choices":[{"index":0,"delta":{"reasoning_content":"Hm, e2e4?"}}]}'),
        ("openai", '{"choices":[{"index":0,"delta":{"reasoning":"Hm","content":null}}]}'),
        ("ollama", '{"message":{"role":"assistant","content":"","thinking":"Hm"},"done":false}'),
    ],
)
def test_thinking_is_no_part_of_the_answer(kind: str, message: str) -> None:
    reading = read(dialects()[kind], message)
    assert (reading.text, reading.has_content, reading.has_thought) == ("", False, True)
    assert reading.thought.startswith("Hm")
    assert not read(dialects()[kind], ANSWERS[kind][0]).has_thought


@pytest.mark.parametrize(
    ("kind", "messages", "cached"),
    [
        # without --enable-cache-report, and without --enable-prompt-tokens-details
        ("openai", ('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
                    '"prompt_tokens_details":null}}',), None),
        ("vllm_server", ('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}',),
         None),
        ("openai", ('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
                    '"prompt_tokens_details":{"cached_tokens":null}}}',), None),
        ("openai", ('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
                    '"prompt_tokens_details":{"cached_tokens":0}}}',), 0),
    ],
)  # fmt: skip
def test_cached_tokens_that_are_not_told_are_unknown(
    kind: str, messages: tuple[str, ...], cached: int | None
) -> None:
    reading = read(dialects()[kind], *messages)
    assert (reading.prompt, reading.completion, reading.cached) == (9, 2, cached)


def test_llama_tells_its_durations_in_whichever_message() -> None:
    """Over chat they come with the usage if that was asked for, else with the end."""
    timings = '"timings":{"cache_n":32,"prompt_n":1,"prompt_ms":11.0,"predicted_ms":22.0}'
    for message in (
        '{"choices":[{"finish_reason":"length","index":0,"delta":{}}],' + timings + "}",
        '{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":33},' + timings + "}",
    ):
        reading = read(dialects()["openai"], message)
        assert (reading.prefill_s, reading.decode_s) == pytest.approx((0.011, 0.022))


def test_sglang_without_metrics_tells_no_durations() -> None:
    plain = re.sub(r'"(queue_time|first_token_latency|e2e_latency)":[\d.]+,?', "", SGLANG[1])
    reading = read(SglangDialect(SglangConfig()), plain.replace(",}}", "}}"))
    assert (reading.queue_s, reading.prefill_s, reading.decode_s) == (None, None, None)


def test_sglang_that_streams_deltas_is_found_out() -> None:
    first, second = '{"text":"e2","meta_info":{}}', '{"text":"e4","meta_info":{}}'
    with pytest.raises(MalformedReply, match="incremental-streaming-output"):
        read(SglangDialect(SglangConfig()), first, second)


def test_half_a_character_may_stand_at_the_end_for_a_while() -> None:
    reading = read(SglangDialect(SglangConfig()), '{"text":"장\\ufffd"}', '{"text":"장기"}')
    assert reading.text == "장기"


# failures inside answers

FULL = "The request queue is full."


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # SGLang's /generate, HTTP 200
        ("sglang", '{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503,'
                   f'"message":"{FULL}"}}}}}}'),
        # SGLang's chat, HTTP 200
        ("openai", f'{{"error":{{"message":"{FULL}","type":"SERVICE_UNAVAILABLE","code":503}}}}'),
        # vLLM, refused while the stream had begun
        ("vllm_server", '{"error":{"message":"The engine is currently busy and cannot accept new '
                        'requests. Please try again later or on a different instance.","type":'
                        '"Service Unavailable","param":null,"code":503}}'),
        ("llama_server", '{"error":{"code":503,"message":"no slot available","type":'
                         '"unavailable_error"}}'),
        ("ollama", '{"error":"server busy, please try again.  maximum pending requests exceeded"}'),
        ("openai", '{"error":{"message":"Too many concurrent requests"}}'),
        ("openai", '{"error":{"message":"Too Many Requests"}}'),
    ],
)  # fmt: skip
def test_a_full_queue_inside_an_answer(kind: str, message: str) -> None:
    with pytest.raises(Overloaded):
        read(dialects()[kind], message)


@pytest.mark.parametrize(
    ("kind", "message", "error"),
    [
        ("sglang", '{"text":"e","meta_info":{"finish_reason":{"type":"abort",'
                   '"message":"Aborted"}}}', EngineUnavailable),
        ("sglang", '{"error":{"message":"The input (3001 tokens) is longer than the model\'s '
                   'context length (2048 tokens).","type":"invalid_request_error","code":400}}',
         RequestRejected),
        ("openai", '{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}',
         EngineUnavailable),
        ("vllm_server", '{"error":{"message":"Internal server error","type":'
                        '"InternalServerError","param":null,"code":500}}', EngineUnavailable),
        ("openai", '{"choices":[{"index":0,"delta":{},"finish_reason":"content_filter"}]}',
         MalformedReply),
        ("llama_server", '{"content":"","stop":true,"stop_type":"none"}', MalformedReply),
        # no queue is full, however much there is too many of
        ("openai", '{"error":{"message":"too many tokens in the prompt"}}', EngineUnavailable),
        ("ollama", '{"error":"too many images in the message"}', EngineUnavailable),
        ("ollama", '{"error":"an error was encountered while running the model"}',
         EngineUnavailable),
        ("ollama", '{"message":{"content":""},"done":true,"done_reason":"load"}',
         EngineUnavailable),
    ],
)  # fmt: skip
def test_a_failure_inside_an_answer(kind: str, message: str, error: type[EngineError]) -> None:
    with pytest.raises(EngineError) as caught:
        read(dialects()[kind], message)
    assert type(caught.value) is error


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(
    "message",
    [
        "not json",
        "[1]",
        "null",
        "",
        '{"choices":7,"content":7,"text":7,"message":7}',
        '{"choices":["x"],"content":["x"],"text":["x"],"message":["x"]}',
        '{"a":' + "[" * 100_000,
        '{"a":' + "9" * 5000 + "}",
        # an end that is none
        '{"choices":[{"finish_reason":[]}],"stop":true,"stop_type":[],"done":true,"done_reason":[],'
        '"meta_info":{"finish_reason":["stop"]}}',
    ],
    ids=lambda message: message[:20],
)
def test_nonsense_is_malformed(kind: str, message: str) -> None:
    with pytest.raises(MalformedReply):
        read(dialects()[kind], message)


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_error_of_nonsense_is_an_error(kind: str) -> None:
    for code in ('"' + "9" * 5000 + '"', "9" * 4000, "[]", "true", "0", '"³"'):
        with pytest.raises(EngineUnavailable) as caught:
            read(dialects()[kind], f'{{"error":{{"message":"no","code":{code}}}}}')
        assert str(caught.value) == "no"


def test_counts_and_durations_beyond_all_measure_are_none() -> None:
    """What is told must fit into a record."""
    for much in ("1e999", "-1", "9" * 400, "NaN"):
        reading = read(dialects()["llama_server"], re.sub(r":\d[\d.]*", f":{much}", LLAMA[2]))
        assert (reading.prompt, reading.completion, reading.cached) == (None, None, None)
        assert (reading.prefill_s, reading.decode_s) == (None, None)


def test_an_answer_of_nonsense_stands_as_it_is() -> None:
    assert unwrapped("[" * 100_000) == "[" * 100_000


# LM Studio


def lm_studio(name: str) -> dict[str, Any]:
    """One documented exchange."""
    content = json.loads((WIRE / "lmstudio.json").read_text(encoding="utf-8"))
    (exchange,) = (one for one in content["exchanges"] if one["name"] == name)
    return dict(exchange)


def said_by_lm_studio(name: str) -> Reading:
    events = lm_studio(name)["events"]
    return read(
        OpenAiDialect("granite"), *(one if one == "[DONE]" else json.dumps(one) for one in events)
    )


def test_an_answer_of_lm_studio(make_request: MakeRequest) -> None:
    reading = said_by_lm_studio("choice")
    assert OpenAiDialect("granite").answer(make_request(), reading) == "e2e4"
    assert (reading.finish, reading.is_done) == (Finish.STOP, True)
    # it tells no cached tokens
    assert (reading.prompt, reading.completion, reading.cached) == (99, 5, None)
    assert said_by_lm_studio("free, out of tokens").finish is Finish.LENGTH


def test_lm_studio_may_think_until_its_tokens_are_gone() -> None:
    reading = said_by_lm_studio("all thought")
    assert (reading.text, reading.has_thought, reading.finish) == ("", True, Finish.LENGTH)


def test_lm_studio_refuses_inside_an_answer_and_with_its_own_codes() -> None:
    with pytest.raises(RequestRejected, match="3001 tokens"):
        said_by_lm_studio("too long")
    for name, said in (("no model", '"model" is required'), ("no such model", "of that name")):
        exchange = lm_studio(name)
        refused = OpenAiDialect("granite").refused(exchange["status"], json.dumps(exchange["body"]))
        assert type(refused) is RequestRejected
        assert said in str(refused)


def test_lm_studio_is_asked_with_what_it_documents(make_request: MakeRequest) -> None:
    body = ask(OpenAiDialect("granite"), make_request())
    assert body.keys() <= lm_studio("choice")["request"].keys() | {"temperature", "top_p", "seed"}


# refusals


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        # SGLang, not streamed
        (503, f'{{"object":"error","message":"{FULL}","type":"503","code":503}}', Overloaded, FULL),
        (429, "", Overloaded, "an empty answer"),
        (429, "<html><body><h1>429 Too Many Requests</h1></body></html>", Overloaded, "429 Too"),
        (503, '{"error":{"message":"The engine has reached its prefill token backlog limit. Please '
              'try again later or on a different instance.","type":"Service Unavailable",'
              '"param":null,"code":503}}', Overloaded, "backlog"),
        (503, '{"error":"server busy, please try again.  maximum pending requests exceeded"}',
         Overloaded, "server busy"),
        # llama.cpp
        (503, '{"error":{"message":"Loading model","type":"unavailable_error","code":503}}',
         EngineUnavailable, "Loading model"),
        (400, '{"error":{"code":400,"message":"request (3031 tokens) exceeds the available context '
              'size (2048 tokens), try increasing it","type":"exceed_context_size_error",'
              '"n_prompt_tokens":3031,"n_ctx":2048}}', RequestRejected, "3031 tokens"),
        (400, '{"error":{"code":400,"message":"Failed to initialize samplers: failed to parse '
              'grammar","type":"invalid_request_error"}}', RequestRejected, "parse grammar"),
        (401, '{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}',
         RequestRejected, "Invalid API Key"),
        (500, '{"error":{"code":500,"message":"Cannot use both json_schema and grammar"}}',
         EngineUnavailable, "Cannot use both"),
        # SGLang's other two shapes
        (400, '{"error":{"message":"Duplicate request ID detected"}}', RequestRejected,
         "Duplicate"),
        (400, '{"error":"unknown field: choice"}', RequestRejected, "unknown field"),
        # FastAPI
        (422, '{"detail":[{"loc":["body","prompt"],"msg":"field required"}]}', RequestRejected,
         "field required"),
        (404, '{"error":"model \'llama9\' not found"}', RequestRejected, "llama9"),
        # in front of it
        (502, "<html><head><title>502 Bad Gateway</title></head></html>", EngineUnavailable,
         "502 Bad Gateway"),
        (503, "<html><body><h1>503 Service Unavailable</h1>\nNo server is available to handle this "
              "request.\n</body></html>", EngineUnavailable, "No server is available"),
        (302, "", MalformedReply, "redirect"),
        (408, "", EngineUnavailable, "408"),
    ],
)  # fmt: skip
def test_a_refusal(status: int, body: str, error: type[EngineError], said: str) -> None:
    for dialect in dialects().values():
        refused = dialect.refused(status, body)
        assert type(refused) is error
        assert said in str(refused)
        assert "\n" not in str(refused)


def test_a_refusal_is_short() -> None:
    assert len(str(fault_of(Complaint.read("<p>" + "x" * 9999), 500))) < 400


# questions


def test_vllm_is_asked_for_a_choice_with_ids(make_request: MakeRequest) -> None:
    dialect = VllmDialect(VllmServerConfig(url="http://127.0.0.1:1", served_model="smol"))
    call = dialect.call(make_request(ids=(1, 2), seed=2**62), "w")
    assert call.path == "/v1/completions"
    body = dict(call.body)
    assert body["prompt"] == [1, 2]
    assert body["structured_outputs"] == {"choice": ["e2e4", "d2d4", "g1f3"]}
    assert (body["model"], body["seed"], body["max_tokens"]) == ("smol", 2**62, 6)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert not body.keys() & {"guided_choice", "cache_salt"}
    assert dialect.forget() == ()
    salted = ask(dialect, make_request())
    assert salted["cache_salt"] == ask(dialect, make_request())["cache_salt"]
    dialect.forget()
    assert ask(dialect, make_request())["cache_salt"] != salted["cache_salt"]


def test_sglang_is_asked_for_a_choice_as_a_regex(make_request: MakeRequest) -> None:
    """It has none, and its chat ignores vLLM's fields and answers 200 with free text."""
    body = ask(SglangDialect(SglangConfig()), make_request(choices=("e2e4", "a+b", "한.수")))
    regex = body["sampling_params"]["regex"]
    for text, fits in (("e2e4", True), ("a+b", True), ("aab", False), ("한.수", True), ("", False)):
        assert bool(re.fullmatch(regex, text)) is fits
    assert (body["rid"], body["stream"]) == ("wire-1", True)
    abort = SglangDialect(SglangConfig()).abort("wire-1")
    assert abort is not None
    assert (abort.path, abort.body) == ("/abort_request", {"rid": "wire-1"})


def test_llama_is_asked_for_a_choice_as_a_grammar(make_request: MakeRequest) -> None:
    dialect = dialects()["llama_server"]
    body = ask(dialect, make_request(seed=2**62 + 5))
    assert body["grammar"] == 'root ::= "e2e4" | "d2d4" | "g1f3"'
    assert body["seed"] < 2**32
    assert (body["top_k"], body["min_p"], body["cache_prompt"]) == (0, 0.0, True)
    assert body["stream"] is True
    assert grammar_of(['a"b', "c\\d", "e\nf", "장"]) == (
        'root ::= "a\\"b" | "c\\\\d" | "e\\U0000000Af" | "장"'
    )


@pytest.mark.parametrize("kind", ["openai", "ollama"])
def test_chat_is_asked_for_a_choice_as_a_schema(kind: str, make_request: MakeRequest) -> None:
    body = ask(dialects()[kind], make_request(seed=2**62 + 5))
    schema = {"type": "string", "enum": ["e2e4", "d2d4", "g1f3"]}
    if kind == "openai":
        assert body["response_format"]["json_schema"]["schema"] == schema
        # quotes, and a code fence before them
        assert (body["max_tokens"], body["seed"]) == (6 + 2 + 32, 5)
        assert body.keys() == {
            "model", "messages", "max_tokens", "temperature", "top_p", "seed", "stream",
            "stream_options", "response_format",
        }  # fmt: skip
    else:
        assert body["format"] == schema
        options = body["options"]
        assert (options["num_predict"], options["num_ctx"], options["seed"]) == (40, 2048, 5)
        assert (body["think"], body["truncate"]) == (False, False)
    assert body["messages"] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Moves: e2e4"},
    ]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_free_question_carries_no_constraint(kind: str, make_request: MakeRequest) -> None:
    body = json.dumps(ask(dialects()[kind], make_request(choices=None)))
    for field in ("structured_outputs", "regex", "grammar", "response_format", "format"):
        assert f'"{field}"' not in body


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("choices", [(), ("e2e4", "")])
def test_choices_that_would_allow_silence_are_refused(
    kind: str, choices: tuple[str, ...], make_request: MakeRequest
) -> None:
    """llama.cpp takes an empty alternative without a word."""
    with pytest.raises(RequestRejected, match="choices"):
        ask(dialects()[kind], make_request(choices=choices))


@pytest.mark.parametrize("kind", ["llama_server", "openai", "ollama"])
def test_a_least_length_that_cannot_be_told_is_refused(
    kind: str, make_request: MakeRequest
) -> None:
    request = replace(make_request(), sampling=Sampling(min_tokens=3))
    with pytest.raises(RequestRejected, match="min_tokens"):
        ask(dialects()[kind], request)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('"e2e4"', "e2e4"), (' "e2e4"\n', "e2e4"), ('"장\\u0021"', "장!"),
        ('"e2', "e2"), ("e2e4", "e2e4"), ("", ""), ('{"move":"e2e4"}', '{"move":"e2e4"}'),
    ],
)  # fmt: skip
def test_a_choice_comes_out_of_its_quotes(text: str, answer: str) -> None:
    assert unwrapped(text) == answer


def test_a_free_answer_in_quotes_keeps_them(make_request: MakeRequest) -> None:
    assert dialects()["openai"].answer(make_request(choices=None), Reading(text='"a"')) == '"a"'


# slots


def test_a_match_keeps_its_slot(make_request: MakeRequest) -> None:
    dialect = LlamaDialect(LlamaServerConfig(max_concurrent=3))

    def slot_of(match: str) -> int:
        body = dict(dialect.call(make_request(match_id=match), match).body)
        dialect.ended(match)
        return int(body["id_slot"])

    slots = [slot_of(match) for match in "abcabccba"]
    assert sorted(slots[:3]) == [0, 1, 2]
    assert slots == [*slots[:3], *slots[:3], slots[2], slots[1], slots[0]]


def test_a_new_match_takes_the_slot_that_was_idle_longest_never_one_that_is_asked() -> None:
    table = SlotTable(2)
    assert table.take("a", "1", (1,)) == 0
    assert table.take("b", "2", (1,)) == 1
    assert table.take("c", "3", (1,)) is None
    table.release("2")
    # a's is older, but it is asked
    assert table.take("c", "4", (1,)) == 1
    table.release("1")
    table.release("4")
    assert table.take("a", "5", (1,)) == 0
    assert table.take("b", "6", (1,)) == 1


def test_a_new_match_takes_a_free_slot_that_was_primed_for_its_game() -> None:
    table = SlotTable(4)
    for n, game in enumerate(("chess", "chess", "janggi", "janggi")):
        assert table.take("", str(n), tuple(map(ord, game))) == n
    for n in range(4):
        table.release(str(n))

    def slot_of(match: str, prompt: str) -> int | None:
        slot = table.take(match, match, tuple(map(ord, prompt)))
        table.release(match)
        return slot

    assert slot_of("a", "janggi a1a2") == 2
    assert slot_of("b", "chess e2e4") == 0
    # b's begins alike as well, but is b's
    assert slot_of("c", "chess e2e4 e7e5") == 1
    assert slot_of("d", "chess d2d4") == 3
    assert slot_of("a", "janggi a1a2 b1b2") == 2
    # what is of no match takes no match's slot while another is free
    table = SlotTable(2)
    assert slot_of("a", "chess") == 0
    assert slot_of("", "janggi") == 1
    assert slot_of("", "janggi") == 1


# what servers tell of themselves


def test_vllms_metrics() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0125
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1512.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
"""
    seen = dialects()["vllm_server"].seen([text])
    assert seen == Seen(3, 2, 0.0125, 1512, 1024, 0)


def test_sglangs_metrics() -> None:
    labels = '{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}'
    text = f"""sglang:num_running_reqs{labels} 2.0
sglang:num_queue_reqs{labels} 1.0
sglang:token_usage{labels} 0.01
sglang:prompt_tokens_total{labels} 1411.0
sglang:cached_tokens_total{{cache_source="device",model_name="m"}} 1000.0
sglang:cached_tokens_total{{cache_source="host",model_name="m"}} 28.0
"""
    seen = SglangDialect(SglangConfig()).seen([text])
    # the counter of retractions is not shown before the first
    assert seen == Seen(2, 1, 0.01, 1411, 1028, 0)
    retracted = text + f"sglang:num_retracted_requests_total{labels} 4.0\n"
    assert SglangDialect(SglangConfig()).seen([retracted]).preemptions == 4


def test_llamas_metrics_and_slots() -> None:
    metrics = """llamacpp:prompt_tokens_total 723
llamacpp:prompt_tokens_cached_total 1090
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
llamacpp:n_busy_slots_per_decode nan
"""
    slots = """[{"id":0,"n_ctx":2048,"speculative":false,"is_processing":false},
{"id":1,"n_ctx":2048,"is_processing":true,"id_task":5,"n_prompt_tokens":1024,
"next_token":[{"has_next_token":true,"n_decoded":3}]}]"""
    seen = dialects()["llama_server"].seen([metrics, slots])
    assert seen == Seen(1, 0, 0.25, 1813, 1090, None)
    assert slots_usage("") is None
    assert slots_usage('{"error":{"code":501}}') is None


def test_pages_of_nonsense_tell_nothing() -> None:
    deep, much = "[" * 100_000, "9" * 400
    assert slots_usage(deep) is None
    assert slots_usage(f'[{{"n_ctx":1,"n_prompt_tokens":{much}}}]') in (0.0, 1.0)
    assert object_of(deep) == object_of('{"a":' + deep) == {}
    assert Samples.read("vllm:x 1e308\nvllm:x 1e308\n").total("vllm:x") is None
    for dialect in dialects().values():
        assert dialect.seen([deep] * len(dialect.metrics_paths)) == Seen()


def test_a_page_without_figures_tells_nothing() -> None:
    for dialect in dialects().values():
        assert dialect.seen([""] * len(dialect.metrics_paths)) == Seen()
    assert Samples.read("vllm:x +Inf\nvllm:y NaN\nvllm:z one\n").values == {}


@pytest.mark.parametrize(
    ("kind", "body", "version"),
    [
        ("vllm_server", '{"version":"0.32.0"}', "0.32.0"),
        ("sglang", '{"model_path":"m","version":"0.5.23","internal_states":[{}]}', "0.5.23"),
        ("llama_server", '{"total_slots":2,"build_info":"b1-7e4c0a9",'
                         '"default_generation_settings":{"n_ctx":2048}}', "b1-7e4c0a9"),
        ("ollama", '{"version":"0.12.3"}', "0.12.3"),
        ("openai", '{"object":"list","data":[]}', "unknown"),
        ("vllm_server", "", "unknown"),
    ],
)  # fmt: skip
def test_versions(kind: str, body: str, version: str) -> None:
    assert dialects()[kind].about([body, ""]) == version


def models_of(**lengths: int | None) -> str:
    cards = [{"id": name, "max_model_len": length} for name, length in lengths.items()]
    return json.dumps({"object": "list", "data": cards})


@pytest.mark.parametrize(
    ("kind", "texts", "said"),
    [
        ("llama_server", ('{"total_slots":1}',), "has 1 slots, fewer than max_concurrent = 2"),
        ("llama_server", ('{"default_generation_settings":{"n_ctx":512}}',),
         "holds 512 tokens, fewer than context_tokens = 2048"),
        ("vllm_server", ("", models_of(m=512)), "512 tokens .* context_tokens = .*max-model-len"),
        ("sglang", ("{}", models_of(m=512)), "512 tokens .* context_tokens = .*context-length"),
        ("sglang", ('{"max_running_requests":7}', ""), "7 requests .* max_concurrent = 8"),
        # of each replica
        ("sglang", ('{"max_running_requests":9,"internal_states":['
                    '{"effective_max_running_requests_per_dp":4},'
                    '{"effective_max_running_requests_per_dp":3}]}', ""), "7 requests at once"),
    ],
)  # fmt: skip
def test_a_server_smaller_than_configured_is_refused(
    kind: str, texts: tuple[str, ...], said: str
) -> None:
    configured = dialects() | {"sglang": SglangDialect(SglangConfig(max_concurrent=8))}
    with pytest.raises(EngineConfigError, match=said):
        configured[kind].about(texts)


@pytest.mark.parametrize(
    ("models", "tokens"),
    [
        (models_of(other=512, mine=4096), 4096), (models_of(other=512), 512),
        (models_of(a=None), None), ("", None), ('{"data":7}', None),
        ('{"data":[7,{"id":"mine"}]}', None),
    ],
)  # fmt: skip
def test_the_context_of_the_model_that_is_asked_counts(models: str, tokens: int | None) -> None:
    """A server may have several."""
    assert context_of(models, "mine") == tokens


@pytest.mark.parametrize(
    ("card", "told"),
    [
        ({"root": "org/Model", "max_model_len": 512}, "Model with 512 tokens a request"),
        ({"root": "/data/models/Model/", "max_model_len": 512}, "Model with 512 tokens a request"),
        ({"root": "Model"}, "Model"), ({"max_model_len": 512}, "with 512 tokens a request"),
        ({"root": None}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["vllm_server", "sglang"])
def test_what_is_served_is_told_without_where_it_lies(
    kind: str, card: dict[str, Any], told: str
) -> None:
    dialect = dialects()[kind]
    assert dialect.model(["", json.dumps({"data": [{"id": "m", **card}]})]) == told
    assert dialect.model(["", ""]) == ""


# configurations


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    pairs = zip(argv, (*argv[1:], ""), strict=True)
    return {word: "" if after.startswith("-") else after for word, after in pairs if word[0] == "-"}


def test_llama_servers_command() -> None:
    config = LlamaServerConfig(
        max_concurrent=3, context_tokens=3333, threads=2, kv_dtype="q8_0", extra_args=("-fa", "on")
    )
    command = llama_command(config, Path("/models/m.gguf"), 4711)
    said = flags(command.argv)
    # each slot is rounded up to 256, as the server does
    assert (said["-np"], said["-c"]) == ("3", str(3 * 3584))
    assert (said["-b"], said["-ctk"], said["-ctv"], said["-t"]) == ("512", "q8_0", "q8_0", "2")
    assert int(said["--threads-http"]) >= 64
    assert (said["--cache-ram"], said["--sse-ping-interval"]) == ("0", "1")
    assert {"--metrics", "--slots", "--no-ui"} <= said.keys()
    assert (said["-m"], said["--port"], said["--host"]) == ("/models/m.gguf", "4711", "127.0.0.1")
    assert command.argv[-2:] == ("-fa", "on")
    assert command.env == {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.usefixtures("bfloat16_cpu")
def test_vllm_servers_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.vllm_server.installed_build", lambda: VllmBuild("0.32.0", "cpu"))
    monkeypatch.setattr("serving.vllm_server.shape_of", lambda model: SHAPE)
    config = VllmServerConfig(max_concurrent=4, prefix_cache=False, max_batched_tokens=512)
    command = vllm_command(config, "/models/m", 4711)
    said = flags(command.argv)
    assert (said["--model"], said["--max-model-len"], said["--max-num-seqs"]) == (
        "/models/m", "2048", "4",
    )  # fmt: skip
    assert (said["--block-size"], said["--max-num-batched-tokens"]) == ("32", "512")
    assert said["--kv-cache-memory-bytes"] == str(23_040 * 2048 * 5)
    assert said["--served-model-name"] == "smollm2-135m"
    assert {
        "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        "--disable-uvicorn-access-log",
    } <= said.keys()
    assert "--disable-log-stats" not in said
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_the_installed_vllm_knows_every_flag_of_ours() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    source = "".join(
        (Path(spec.origin).parent / part).read_text(encoding="utf-8")
        for part in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    )
    for flag in flags(vllm_command(VllmServerConfig(), "/models/m", 1).argv[3:]):
        name = flag.removeprefix("--").removeprefix("no-")
        assert f'"--{name}"' in source or f"{name.replace('-', '_')}:" in source, flag


@pytest.mark.usefixtures("bfloat16_cpu")
def test_sglangs_command_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SglangConfig.model_validate(
        {"max_concurrent": 4, "device": "cpu", "kv_cache_bytes": "100MiB", "threads": 2,
         "max_batched_tokens": 512, "prefix_cache": False, "python": "/opt/bin/python"}
    )  # fmt: skip
    command = sglang_kind.command(config, "/models/m", SHAPE, 4711)
    said = flags(command.argv)
    assert command.argv[:3] == ("/opt/bin/python", "-m", "sglang.launch_server")
    assert (said["--context-length"], said["--max-running-requests"]) == ("2048", "4")
    assert said["--max-total-tokens"] == str((100 << 20) // 23_040)
    assert (said["--chunked-prefill-size"], said["--max-prefill-tokens"]) == ("512", "512")
    assert (said["--device"], said["--attention-backend"]) == ("cpu", "torch_native")
    assert (said["--decode-log-interval"], said["--load-snapshot-publish-interval"]) == ("1", "1")
    assert {"--enable-metrics", "--enable-cache-report", "--disable-radix-cache"} <= said.keys()
    env = command.env
    assert (env["OMP_NUM_THREADS"], env["SGLANG_CPU_OMP_THREADS_BIND"]) == ("2", "0-1")
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert Path(env["PYTHONPATH"]).is_dir()


def test_sglang_on_a_gpu_sizes_its_own_pool() -> None:
    config = SglangConfig(device="cuda", memory_fraction=0.5)
    said = flags(sglang_kind.command(config, "/models/m", SHAPE, 1).argv)
    assert said["--mem-fraction-static"] == "0.5"
    assert not said.keys() & {"--max-total-tokens", "--device", "--dtype"}
    assert "PYTHONPATH" not in sglang_kind.environment(config)


def test_ollama_is_set_up_by_its_environment() -> None:
    command = ollama_command(OllamaConfig(max_concurrent=4, kv_dtype="q8_0"), 4711)
    assert command.argv == ("ollama", "serve")
    assert (command.env["OLLAMA_HOST"], command.env["OLLAMA_NUM_PARALLEL"]) == (
        "127.0.0.1:4711", "4",
    )  # fmt: skip
    assert (command.env["OLLAMA_KV_CACHE_TYPE"], command.env["OLLAMA_FLASH_ATTENTION"]) == (
        "q8_0", "1",
    )  # fmt: skip
    assert command.env["OLLAMA_CONTEXT_LENGTH"] == "2048"


URL = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "llama_server", "block_tokens": 16}, "caches whole slots"),
        ({"kind": "llama_server", "kv_cache_bytes": 1}, "sizes its cache by max_concurrent"),
        ({"kind": "llama_server", "url": URL, "threads": 2}, "threads: is the server's own"),
        ({"kind": "llama_server", "extra_args": ["-np", "4"]}, "-np: use max_concurrent"),
        ({"kind": "llama_server", "extra_args": ["--port=1"]}, "--port: the address"),
        # as servers read them too: with _ for -, cut short, with the value behind
        ({"kind": "llama_server", "extra_args": ["-np4"]}, "-np4: use max_concurrent"),
        ({"kind": "llama_server", "extra_args": ["-c4096"]}, "-c4096: use context_tokens"),
        ({"kind": "vllm_server", "extra_args": ["--max_num_seqs", "4"]}, "use max_concurrent"),
        ({"kind": "vllm_server", "extra_args": ["--max-num-seq=4"]}, "use max_concurrent"),
        ({"kind": "vllm_server", "extra_args": ["--gpu_memory_utilization=0.5"]},
         "use memory_fraction"),
        ({"kind": "vllm_server", "extra_args": ["--api_key", "k"]}, "keys stand in no"),
        ({"kind": "vllm_server", "extra_args": ["--api-k=k"]}, "keys stand in no"),
        ({"kind": "sglang", "extra_args": ["--admin-api-key", "k"]}, "keys stand in no"),
        ({"kind": "sglang", "extra_args": ["--max-running", "4"]}, "use max_concurrent"),
        ({"kind": "sglang", "extra_args": ["--por", "4"]}, "--por: the address"),
        ({"kind": "vllm_server", "url": URL, "dtype": "half"}, "dtype: is the server's own"),
        ({"kind": "vllm_server", "extra_args": ["--disable-log-stats"]}, "needs it as it is"),
        ({"kind": "vllm_server", "max_batched_tokens": 4}, "max_batched_tokens: 4 a step"),
        ({"kind": "sglang", "kv_cache_bytes": 1, "memory_fraction": 0.5}, "give one of them"),
        ({"kind": "sglang", "extra_args": ["--incremental-streaming-output"]}, "needs it as it is"),
        ({"kind": "openai"}, "url: is needed"),
        ({"kind": "openai", "url": URL, "kv_dtype": "fp8"}, "set it where the server is started"),
        ({"kind": "openai", "url": URL, "extra_body": {"stream": False}}, "is set for each"),
        ({"kind": "lmstudio", "start_seconds": 3}, "runs already"),
        ({"kind": "ollama", "dtype": "half"}, "pull another tag"),
        ({"kind": "openai", "url": URL, "extra_body": {"temperature": 0}}, "is set for each"),
        ({"kind": "lmstudio", "extra_body": {"response_format": {}}}, "is set for each"),
        ({"kind": "openai", "url": "127.0.0.1:80"}, "begin with http:// or https://; write it"),
        ({"kind": "openai", "url": "ftp://127.0.0.1"}, "begin with http:// or https://; write it"),
        ({"kind": "openai", "url": "http://127.0.0.1:99999"}, "its port is no number of 1 to"),
        ({"kind": "openai", "url": "http://127.0.0.1:abc"}, "its port is no number of 1 to"),
        ({"kind": "openai", "url": "http://127.0.0.1:0"}, "its port is no number of 1 to"),
        ({"kind": "openai", "url": "http://[::1"}, "its brackets hold no address; write it"),
        ({"kind": "openai", "url": "http://a..b"}, "it names no host; write it"),
        ({"kind": "openai", "url": "http://:80"}, "it names no host; write it"),
        ({"kind": "openai", "url": "http://a b"}, "there is a space in it; write it"),
        ({"kind": "openai", "url": "http://me:secret@host:abc"}, "keys and parameters"),
        ({"kind": "openai", "url": "http://me:secret@host"}, "keys and parameters"),
        ({"kind": "openai", "url": URL, "api_key_env": "sk-12"}, "name of an environment variable"),
        ({"kind": "vllm_server", "extra_args": ["--api-key", "x"]}, "keys stand in no"),
        ({"kind": "sglang", "api_key_env": "KEY"}, "takes no key"),
    ],
)  # fmt: skip
def test_knobs_that_a_server_lacks_are_refused_with_the_reason(
    data: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        parse_engine_config("main", data)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama_server", ("-cram", "64", "-fa", "on", "--threads-batch", "2")),
        ("vllm_server", ("--max-logprobs", "5", "--model-impl=vllm", "-O3")),
        ("sglang", ("--schedule-policy", "lpm", "--model-loader-extra-config", "{}", "--tp", "2")),
    ],
)
def test_flags_that_only_look_like_ours_are_taken(kind: str, words: tuple[str, ...]) -> None:
    config = parse_engine_config("main", {"kind": kind, "extra_args": words})
    assert config.model_dump()["extra_args"] == words


def test_what_a_request_sets_stands_in_no_extra_body(make_request: MakeRequest) -> None:
    sent = ask(dialects()["openai"], make_request()).keys()
    for name in (*sent, "n", "max_completion_tokens"):
        with pytest.raises(ValidationError, match=f"{name}: is set for each request"):
            parse_engine_config("main", {"kind": "lmstudio", "extra_body": {name: 1}})


def test_a_key_in_the_wrong_place_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as caught:
        parse_engine_config("main", {"kind": "openai", "url": URL, "api_key_env": "sk-secret"})
    assert "sk-secret" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "vllm_server"}, {"kind": "vllm_server", "url": URL}, {"kind": "sglang"},
        {"kind": "sglang", "url": URL}, {"kind": "llama_server"}, {"kind": "ollama"},
        {"kind": "llama_server", "url": URL}, {"kind": "ollama", "url": URL},
        {"kind": "lmstudio"}, {"kind": "openai", "url": URL, "model": "gpt"},
    ],
)  # fmt: skip
def test_a_saved_config_can_be_read_again(data: dict[str, Any]) -> None:
    config = parse_engine_config("main", data)
    saved = config.model_dump(mode="json", exclude_none=True)
    assert parse_engine_config("main", saved) == config


def test_a_url_may_end_with_v1() -> None:
    for url in (URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"):
        config = parse_engine_config("main", {"kind": "openai", "url": url})
        assert config.model_dump()["url"] == URL


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "openai", "url": URL, "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY.*export it"),
        ({"kind": "openai", "url": URL, "api_key_env": "hf_SECRET"}, "api_key_env: there is no"),
        ({"kind": "llama_server", "binary": "/no/llama-server"}, "no such program"),
        ({"kind": "llama_server", "binary": "/usr"}, "'/usr': is a directory"),
        ({"kind": "ollama", "binary": "/usr"}, "/usr: is a directory"),
        ({"kind": "llama_server", "model": "someone/some-model"}, "takes a .gguf file"),
        ({"kind": "llama_server", "model": "/no/such.gguf"}, "no such file"),
        ({"kind": "ollama", "binary": "no-ollama-here"}, "install Ollama"),
        ({"kind": "sglang", "python": "/no/python"}, "no such file"),
    ],
)
def test_what_is_missing_is_said_before_a_start(data: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineConfigError, match=said) as caught:
        check_engine("main", parse_engine_config("main", data))
    assert str(caught.value).startswith("engines.main: ")
    assert "\n" not in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"extra_args": ["-ngl", "4"]}, "unrecognized arguments: -ngl 4"),
        ({"extra_args": ["--threads-http", "many"]}, "invalid int value: 'many'"),
        ({"extra_args": ["-h"]}, "unrecognized arguments: -h"),
        ({"kv_dtype": "q9"}, "invalid choice: 'q9'"),
    ],
)
def test_what_the_packaged_llama_server_does_not_take_is_said_before_a_start(
    knobs: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("serving.llama_server.is_installed", lambda: True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    monkeypatch.setattr("serving.llama_server.gguf_of", lambda model: tmp_path / "m.gguf")
    with pytest.raises(EngineConfigError, match=re.escape(said)) as caught:
        check_engine("main", parse_engine_config("main", {"kind": "llama_server", **knobs}))
    assert "name a llama-server as binary" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_server_kind_is_registered() -> None:
    assert {"vllm_server", "sglang", "llama_server", "ollama", "lmstudio", "openai"} <= set(
        ENGINE_KINDS
    )


# chat messages


def test_messages_grow_only_at_the_end(parts: PromptParts) -> None:
    template = MessagesTemplate("a-model-that-only-the-server-knows")
    before, after = (
        template.render(replace(parts, moves=moves)).messages
        for moves in (parts.moves, (*parts.moves, "g1f3"))
    )
    assert [role for role, _ in before] == ["system", "user"]
    assert before[0] == after[0]
    assert after[1][1] == before[1][1] + " g1f3"
    assert template.check(parts) is None


def test_tokens_are_counted_with_the_models_own_tokenizer_where_it_is_here(
    parts: PromptParts, template: Any
) -> None:
    own = MessagesTemplate("smollm2-135m").count_tokens(parts)
    assert own == template.count_tokens(parts)
    unknown = MessagesTemplate("a-model-that-only-the-server-knows").count_tokens(parts)
    text = sum(len(content.encode()) for _, content in MessagesTemplate("").render(parts).messages)
    assert unknown == text + 2 * MESSAGE_TOKENS >= own
