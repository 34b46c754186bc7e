"""What servers tell of themselves: metrics under each one's own names, and status pages. Pure.

Every figure is true of the fake at that moment. A name that a server shows is missing here where
the fake has nothing to say: histograms, memory, speculative decoding.
"""

from collections.abc import Iterable
from typing import Any

from serving.fake_model import FakeConfig, FakeDialect, FakeModel, Job
from serving.fake_wire import Event

VERSIONS: dict[FakeDialect, str] = {
    "vllm": "0.32.0+fake",
    "sglang": "0.5.23+fake",
    "llama_server": "b11549-fake",
    "ollama": "0.12.0-fake",
}

Sample = tuple[str, str, str, float]
"""Name, type, labels and value."""


def metrics(dialect: FakeDialect, model: FakeModel) -> str:
    """Prometheus' text format; empty for a server that has none."""
    match dialect:
        case "vllm":
            return _page(_vllm(model))
        case "sglang":
            return _page(_sglang(model))
        case "llama_server":
            return _page(_llama(model))
        case _:
            return ""


def _page(samples: Iterable[Sample]) -> str:
    lines, typed = [], set()
    for name, kind, labels, value in samples:
        if name not in typed:
            lines += [f"# HELP {name} {name}", f"# TYPE {name} {kind}"]
            typed.add(name)
        lines.append(f"{name}{labels and f'{{{labels}}}'} {value}")
    return "".join(f"{line}\n" for line in lines)


def _vllm(model: FakeModel) -> Iterable[Sample]:
    totals = model.totals
    labels = f'engine="0",model_name="{model.config.model}"'
    for reason, waiting in (("capacity", model.waiting), ("deferred", 0)):
        where = f'{labels},reason="{reason}"'
        yield "vllm:num_requests_waiting_by_reason", "gauge", where, float(waiting)
    for name, kind, value in (
        ("num_requests_running", "gauge", model.running),
        ("num_requests_waiting", "gauge", model.waiting),
        ("kv_cache_usage_perc", "gauge", model.used_tokens / model.capacity_tokens),
        ("prefix_cache_queries_total", "counter", totals.looked_up),
        ("prefix_cache_hits_total", "counter", totals.found),
        ("num_preemptions_total", "counter", 0),
        ("prompt_tokens_total", "counter", totals.looked_up),
        ("prompt_tokens_cached_total", "counter", totals.found),
        ("generation_tokens_total", "counter", totals.written),
    ):
        yield f"vllm:{name}", kind, labels, float(value)
    for reason, count in totals.ended.items():
        where = f'engine="0",finished_reason="{reason}",model_name="{model.config.model}"'
        yield "vllm:request_success_total", "counter", where, float(count)
    refused = f'model_name="{model.config.model}",reason="max_num_queued_reqs"'
    yield "vllm:admission_rejections_total", "counter", refused, float(totals.refused)


def _sglang(model: FakeModel) -> Iterable[Sample]:
    """`num_retracted_requests_total` does not exist before the first retraction, and there is
    never one here."""
    totals = model.totals
    name_label = f'model_name="{model.config.model}"'
    scheduler = f'engine_type="unified",{name_label},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    found = totals.found / totals.looked_up if totals.looked_up else 0.0
    for name, value in (
        ("max_total_num_tokens", model.capacity_tokens),
        ("num_running_reqs", model.running),
        ("num_queue_reqs", model.waiting),
        ("num_grammar_queue_reqs", 0),
        ("cache_hit_rate", found),
        ("token_usage", round(model.used_tokens / model.capacity_tokens, 2)),
        ("num_used_tokens", model.used_tokens),
    ):
        yield f"sglang:{name}", "gauge", scheduler, float(value)
    plain = f'engine_type="unified",{name_label}'
    device = f'cache_source="device",{plain}'
    ended = totals.ended["stop"] + totals.ended["length"]
    yield "sglang:prompt_tokens_total", "counter", plain, float(totals.ended_prompt)
    yield "sglang:generation_tokens_total", "counter", plain, float(totals.ended_written)
    yield "sglang:cached_tokens_total", "counter", device, float(totals.ended_found)
    yield "sglang:num_requests_total", "counter", plain, float(ended)
    yield "sglang:num_aborted_requests_total", "counter", plain, float(totals.ended["abort"])


def _llama(model: FakeModel) -> Iterable[Sample]:
    """Tokens predicted move when a request ends; nothing tells the KV cache's use."""
    totals = model.totals
    for name, kind, value in (
        ("prompt_tokens_total", "counter", totals.computed),
        ("prompt_tokens_cached_total", "counter", totals.found),
        ("prompt_seconds_total", "counter", totals.prefill_s),
        ("tokens_predicted_total", "counter", totals.ended_written),
        ("tokens_predicted_seconds_total", "counter", totals.decode_s),
        ("n_decode_total", "counter", totals.steps),
        ("n_tokens_max", "counter", totals.longest),
        ("prompt_tokens_seconds", "gauge", _rate(totals.computed, totals.prefill_s)),
        ("predicted_tokens_seconds", "gauge", _rate(totals.ended_written, totals.decode_s)),
        ("requests_processing", "gauge", model.running),
        ("requests_deferred", "gauge", model.waiting),
        ("n_busy_slots_per_decode", "gauge", _rate(totals.step_requests, totals.steps)),
    ):
        yield f"llamacpp:{name}", kind, "", value


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0


def models_page(dialect: FakeDialect, config: FakeConfig) -> Event:
    """/v1/models."""
    card: Event = {"id": config.model, "object": "model", "created": 0}
    match dialect:
        case "vllm":
            more: Event = {"owned_by": "vllm", "root": config.model, "parent": None}
            card |= more | {"max_model_len": config.context_tokens}
        case "sglang":
            more = {"owned_by": "sglang", "root": config.model, "parent": None}
            card |= more | {"max_model_len": config.context_tokens}
        case "llama_server":
            meta = {"n_ctx": config.context_tokens, "n_ctx_train": config.context_tokens}
            card |= {"owned_by": "llamacpp", "meta": meta}
        case "ollama":
            card |= {"owned_by": "library"}
        case "openai":
            card |= {"owned_by": "system"}
    return {"object": "list", "data": [card]}


def slots_page(model: FakeModel) -> list[Event]:
    """llama.cpp's /slots; a slot that was never used tells little."""
    return [_slot(model.config, at, job, left) for at, (job, left) in enumerate(model.slots)]


def _slot(config: FakeConfig, at: int, job: Job | None, left: int) -> Event:
    slot: Event = {"id": at, "n_ctx": config.context_tokens, "speculative": False}
    slot["is_processing"] = job is not None
    if job is None and not left:
        return slot
    tokens = left if job is None else job.computed + job.written
    remain = -1 if job is None else len(job.ask.pieces) - job.written
    token = {"has_next_token": job is not None, "has_new_line": False, "n_remain": remain}
    return slot | {
        "id_task": at,
        "n_prompt_tokens": tokens,
        "n_prompt_tokens_processed": 0 if job is None else job.computed - job.cached,
        "n_prompt_tokens_cache": 0 if job is None else job.cached,
        "params": {},
        "next_token": [token | {"n_decoded": 0 if job is None else job.written}],
    }


def props_page(config: FakeConfig) -> Event:
    """llama.cpp's /props; `n_ctx` is a slot's."""
    return {
        "default_generation_settings": {"params": {}, "n_ctx": config.context_tokens},
        "total_slots": config.slots,
        "model_alias": config.model,
        "model_path": config.model,
        "chat_template": "",
        "build_info": VERSIONS["llama_server"],
        "is_sleeping": False,
    }


def server_info_page(model: FakeModel) -> Event:
    """SGLang's /server_info."""
    config = model.config
    return {
        "model_path": config.model,
        "context_length": config.context_tokens,
        "max_running_requests": config.slots,
        "max_queued_requests": config.queue,
        "max_total_tokens": model.capacity_tokens,
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": config.slots,
                "memory_usage": {"token_capacity": model.capacity_tokens},
            }
        ],
        "version": VERSIONS["sglang"],
    }


def tags_page(config: FakeConfig) -> Event:
    """Ollama's /api/tags."""
    details: dict[str, Any] = {"format": "gguf", "family": "fake", "parameter_size": "0"}
    model = {"name": config.model, "model": config.model, "size": 0, "digest": "0" * 64}
    return {"models": [model | {"modified_at": "2026-01-01T00:00:00Z", "details": details}]}
