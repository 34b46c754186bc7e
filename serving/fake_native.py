"""Native endpoints: SGLang's /generate, llama.cpp's /completion, Ollama's /api/chat. Pure.

Ollama's shapes: https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from serving.fake_constraints import Texts, from_grammar, from_regex, from_schema
from serving.fake_model import FakeDialect
from serving.fake_wire import (
    Answer,
    ChatForm,
    CompletionForm,
    Event,
    Form,
    OpenAiForm,
    Question,
    Refused,
    chat_ids,
    compact,
    error_of,
    openai_choices,
    prompt_ids,
    sglang_too_long,
    stop_texts,
    timings_of,
)


class SglangForm(OpenAiForm):
    """SGLang's /generate. Events carry the whole text so far, and every refusal of a streamed
    request is an event in HTTP 200, except for a field it does not know."""

    path = "/generate"

    FIELDS: ClassVar[str] = (
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p "
        "frequency_penalty presence_penalty repetition_penalty min_new_tokens n json_schema regex "
        "ebnf structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens "
        "no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width watermark "
        "choice"
    )

    def read(self, body: Mapping[str, Any]) -> Question:
        sampling = body.get("sampling_params") or {}
        known = self.FIELDS.split()
        for name in sampling:
            if name not in known:
                wanted = ", ".join(f"`{one}`" for one in known)
                raise Refused(400, {"error": f"unknown field `{name}`, expected one of {wanted}"})
        if "input_ids" not in body and "text" not in body:
            raise self.bad("Either text, input_ids or input_embeds should be provided.")
        temperature = sampling.get("temperature")
        return Question(
            ids=prompt_ids(body["input_ids"] if "input_ids" in body else body["text"]),
            choices=self.choices(lambda: self._choices(sampling)),
            max_tokens=int(sampling.get("max_new_tokens") or 128),
            temperature=1.0 if temperature is None else float(temperature),
            seed=sampling.get("sampling_seed"),
            is_streamed=bool(body.get("stream")),
            rid=body.get("rid"),
            salt=str(body.get("extra_key") or ""),
            stop=stop_texts(sampling),
            keeps_stop=bool(sampling.get("no_stop_trim")),
        )

    def _choices(self, sampling: Mapping[str, Any]) -> Texts | None:
        kinds: dict[str, Callable[[Any], Texts]] = {
            "regex": from_regex,
            "ebnf": from_grammar,
            "json_schema": lambda text: from_schema(json.loads(text)),
        }
        given = [name for name in kinds if sampling.get(name) is not None]
        if len(given) > 1:
            raise self._error(
                400, "Only one of json_schema, regex, ebnf, or structural_tag can be set."
            )
        if sampling.get("choice") is not None:
            raise Refused(500, {"error": {"message": "Internal Server Error"}})
        return kinds[given[0]](sampling[given[0]]) if given else None

    def opening(self, answer: Answer) -> list[Event]:
        return [self._chunk(answer, 0, None)]

    def token(self, answer: Answer, index: int) -> list[Event]:
        is_end = answer.is_last(index) and answer.job.ended is not None
        return [self._chunk(answer, index + 1, self._reason(answer) if is_end else None)]

    def closing(self, answer: Answer) -> list[Event]:
        if answer.job.ended == "abort":
            return [self._chunk(answer, answer.job.written, self._reason(answer))]
        return []

    def whole(self, answer: Answer) -> Event:
        return self._chunk(answer, answer.job.written, self._reason(answer))

    def _reason(self, answer: Answer) -> Event:
        job = answer.job
        if job.ended == "abort":
            if job.started is None:
                return {"type": "abort", "message": "Abort in waiting queue"}
            return {"type": "abort", "message": "Aborted", "status_code": None}
        if job.ended == "length":
            return {"type": "length", "length": job.written}
        return {"type": "stop", "matched": 2}

    def _chunk(self, answer: Answer, count: int, reason: Event | None) -> Event:
        job = answer.job
        meta: Event = {"id": answer.question.rid or answer.id, "finish_reason": reason}
        if not answer.hides_usage:
            meta["prompt_tokens"] = len(job.ask.ids)
            meta["completion_tokens"] = count
            meta["cached_tokens"] = answer.cached
        meta["queue_time"] = job.queue_s
        if job.done is not None and reason is not None:
            meta["e2e_latency"] = job.done - job.submitted
            if job.first is not None:
                meta["first_token_latency"] = job.first - job.submitted
        text = "".join(job.ask.pieces[:count])
        return {"text": text, "output_ids": list(range(count)), "meta_info": meta}

    def full(self, status: int | None = None) -> Refused:
        code = status or 503
        text = "The request queue is full."
        return Refused(code, error_of("sglang", code, text, str(code)), (self._abort(code, text),))

    def too_long(self, tokens: int, context: int) -> Refused:
        return self._error(400, sglang_too_long(tokens, context))

    def bad(self, message: str) -> Refused:
        return self._error(400, message)

    def unfit(self, message: str) -> Refused:
        """Streamed, a first token comes all the same."""
        text = f"Failed to compile regex grammar: {message}"
        event = self._abort(400, text) | {"text": "-", "output_ids": [29]}
        counts = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
        event["meta_info"] |= counts | {"queue_time": 0.0, "first_token_latency": 0.0}
        return Refused(400, {"error": {"message": text}}, (event,))

    def _error(self, status: int, message: str) -> Refused:
        event = {"message": message, "type": "invalid_request_error", "code": status}
        body = {"error": {"message": message}}
        return Refused(status, body, ({"error": event | {"retryable": False}},))

    def _abort(self, status: int, message: str) -> Event:
        reason = {"type": "abort", "status_code": status, "message": message}
        meta = {"id": "refused", "finish_reason": reason, "e2e_latency": 0.0}
        return {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}


class LlamaForm(OpenAiForm):
    """llama.cpp's /completion: no `[DONE]`."""

    path = "/completion"
    media_type = "text/event-stream"
    end_mark = b""

    def read(self, body: Mapping[str, Any]) -> Question:
        if not body.get("prompt"):
            raise self.bad("'prompt' is required")
        limit = body.get("n_predict", body.get("max_tokens", -1))
        temperature = body.get("temperature")
        return Question(
            ids=prompt_ids(body["prompt"]),
            choices=self.choices(lambda: openai_choices("llama_server", body)),
            max_tokens=1 << 30 if limit < 0 else max(1, limit),
            temperature=0.8 if temperature is None else float(temperature),
            seed=body.get("seed"),
            is_streamed=bool(body.get("stream")),
            slot=body.get("id_slot"),
            use_cache=bool(body.get("cache_prompt", True)),
            stop=stop_texts(body),
            fields=tuple(body.get("response_fields") or ()),
        )

    def opening(self, answer: Answer) -> list[Event]:
        return [self._piece(answer, "", 0)]

    def token(self, answer: Answer, index: int) -> list[Event]:
        return [self._piece(answer, answer.job.ask.pieces[index], index + 1)]

    def closing(self, answer: Answer) -> list[Event]:
        if answer.job.ended == "abort":
            return [error_of("llama_server", 500, "Request was aborted", "server_error")]
        return [self._end(answer, "")]

    def whole(self, answer: Answer) -> Event:
        if answer.job.ended == "abort":
            raise Refused(500, error_of("llama_server", 500, "Request was aborted", "server_error"))
        return self._end(answer, answer.text)

    def _piece(self, answer: Answer, text: str, count: int) -> Event:
        head = {"index": 0, "content": text, "tokens": [count], "stop": False, "id_slot": -1}
        return head | self._counts(answer, count)

    def _counts(self, answer: Answer, count: int) -> Event:
        if answer.hides_usage:
            return {}
        return {"tokens_predicted": count, "tokens_evaluated": len(answer.job.ask.ids)}

    def _end(self, answer: Answer, content: str) -> Event:
        job = answer.job
        timings = timings_of(answer)
        if answer.hides_cached:
            del timings["cache_n"]
        last = {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": job.slot,
            "stop": True,
            "model": answer.model,
            **self._counts(answer, job.written),
            "has_new_line": False,
            "truncated": False,
            "stop_type": "limit" if job.ended == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": len(job.ask.ids) + job.written - 1,
            **({} if answer.hides_usage else {"timings": timings}),
        }
        wanted = answer.question.fields
        return {name: last[name] for name in wanted if name in last} if wanted else last


class OllamaForm(OpenAiForm):
    """Ollama's /api/chat: one JSON object a line, streamed unless told not to."""

    path = "/api/chat"
    media_type = "application/x-ndjson"
    end_mark = b""
    streams_by_default = True
    thinks_apart = True

    def read(self, body: Mapping[str, Any]) -> Question:
        options = body.get("options") or {}
        if not body.get("messages"):
            raise self.bad("messages are required")
        limit = options.get("num_predict", -1)
        form = body.get("format")
        return Question(
            ids=chat_ids(body["messages"]),
            choices=self.choices(
                lambda: None if not form else ("{}",) if form == "json" else from_schema(form)
            ),
            max_tokens=1 << 30 if limit < 0 else max(1, limit),
            temperature=float(options.get("temperature", 0.8)),
            seed=options.get("seed"),
            is_streamed=bool(body.get("stream", True)),
            model=body.get("model"),
            is_cut=bool(body.get("truncate", True)),
        )

    def opening(self, answer: Answer) -> list[Event]:
        return [self._line(answer, {"content": ""})]

    def token(self, answer: Answer, index: int) -> list[Event]:
        piece = answer.job.ask.pieces[index]
        if not piece:
            return []
        delta = (
            {"content": "", "thinking": piece} if index < answer.thoughts else {"content": piece}
        )
        return [self._line(answer, delta)]

    def closing(self, answer: Answer) -> list[Event]:
        if answer.job.ended == "abort":
            return [{"error": "an error was encountered while running the model: aborted"}]
        return [self._line(answer, {"content": ""}) | self._end(answer)]

    def whole(self, answer: Answer) -> Event:
        if answer.job.ended == "abort":
            raise Refused(500, self.closing(answer)[0])
        delta = {"content": "".join(answer.pieces[answer.thoughts :])}
        if answer.thoughts:
            delta["thinking"] = "".join(answer.pieces[: answer.thoughts])
        return self._line(answer, delta) | self._end(answer)

    def frame(self, event: Event) -> bytes:
        return compact(event) + b"\n"

    def _line(self, answer: Answer, delta: Event) -> Event:
        head = {"model": answer.model, "created_at": "2026-01-01T00:00:00.000000Z"}
        return head | {"message": {"role": "assistant"} | delta, "done": False}

    def _end(self, answer: Answer) -> Event:
        job = answer.job
        done: Event = {"done": True, "done_reason": job.ended}
        if answer.hides_usage:
            return done
        return done | {
            "total_duration": _ns(job.queue_s + job.prefill_s + job.decode_s),
            "load_duration": 0,
            "prompt_eval_count": len(job.ask.ids),
            "prompt_eval_duration": _ns(job.prefill_s),
            "eval_count": job.written,
            "eval_duration": _ns(job.decode_s),
        }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


FORMS: dict[FakeDialect, tuple[type[Form], ...]] = {
    "vllm": (CompletionForm, ChatForm),
    "sglang": (SglangForm, ChatForm, CompletionForm),
    "llama_server": (LlamaForm, ChatForm, CompletionForm),
    "ollama": (OllamaForm, ChatForm),
    "openai": (ChatForm,),
}
