"""The fake server's arithmetic, in virtual time: steps, slots, queue, prefix cache, constraints."""

import json
import re
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.fake_constraints import (
    ConstraintError,
    from_grammar,
    from_regex,
    from_response_format,
    from_schema,
    from_vllm,
)
from serving.fake_model import (
    Ask,
    FakeConfig,
    FakeFault,
    FakeModel,
    Ids,
    Job,
    QueueFull,
    choose,
    pieces_of,
    text_ids,
)
from serving.llama_server import grammar_of


def ids(*parts: range | tuple[int, ...]) -> Ids:
    return array("q", (number for part in parts for number in part))


TEN = ids(range(10))


def ask(prompt: Ids = TEN, tokens: int = 4, *, slot: int | None = None) -> Ask:
    return Ask(prompt, ("x",) * tokens, slot=slot)


def run(model: FakeModel, now: float = 0.0) -> float:
    """Until nothing is left to do; the time then."""
    while step := model.start_step(now):
        now += step.seconds
        model.finish_step(step, now)
    return now


def step(model: FakeModel, now: float = 0.0) -> list[Job]:
    begun = model.start_step(now)
    assert begun is not None
    return model.finish_step(begun, now + begun.seconds)


CALM = FakeConfig(slots=4, cache="none", prefill_tokens_per_s=1000, decode_ms_per_token=10)


# time


def test_a_request_alone_takes_its_prompt_and_a_step_a_token() -> None:
    model = FakeModel(CALM)
    job = model.submit(ask(ids(range(100)), tokens=5), 2.0)
    assert run(model, 2.0) == pytest.approx(2.0 + 0.1 + 5 * 0.01)
    assert (job.queue_s, job.prefill_s, job.decode_s) == pytest.approx((0.0, 0.11, 0.04))
    assert (job.ended, job.written) == ("stop", 5)


def test_cached_tokens_take_no_time() -> None:
    model = FakeModel(CALM.model_copy(update={"cache": "shared", "block_tokens": 16}))
    model.submit(ask(ids(range(100))), 0.0)
    run(model)
    job = model.submit(ask(ids(range(100), range(900, 910)), tokens=1), 0.0)
    run(model)
    assert job.cached == 96
    assert job.prefill_s == pytest.approx((110 - 96) / 1000 + 0.01)


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_throughput_grows_with_concurrency_as_the_formula_says(streams: int) -> None:
    model = FakeModel(CALM.model_copy(update={"prefill_tokens_per_s": 1e12, "load_factor": 2.5}))
    for _ in range(streams):
        model.submit(ask(tokens=100), 0.0)
    load = 1 + 1.5 * (streams - 1) / 3
    assert streams * 100 / run(model) == pytest.approx(streams / (0.01 * load))


def test_more_requests_than_slots_only_wait() -> None:
    def rate(requests: int) -> float:
        model = FakeModel(CALM)
        for _ in range(requests):
            model.submit(ask(), 0.0)
        return requests / run(model)

    rates = [rate(requests) for requests in (1, 2, 4, 8, 16)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] == pytest.approx(rates[3]) == pytest.approx(rates[4])


def test_a_step_is_linear_in_tokens_and_requests() -> None:
    model = FakeModel(CALM)
    for count in (
        (model.step_seconds(tokens, 1) for tokens in (0, 50, 100)),
        (model.step_seconds(0, requests) for requests in (1, 2, 3, 4)),
    ):
        times = list(count)
        growth = [after - before for before, after in pairwise(times)]
        assert growth[0] > 0
        assert growth == pytest.approx([growth[0]] * len(growth))


def test_one_slot_has_no_load() -> None:
    assert FakeModel(FakeConfig(slots=1, load_factor=9)).step_seconds(0, 1) == pytest.approx(0.02)


def test_a_long_prompt_is_computed_in_pieces_and_others_go_on_writing() -> None:
    model = FakeModel(CALM.model_copy(update={"step_tokens": 50}))
    writer = model.submit(ask(ids(range(10)), tokens=9), 0.0)
    step(model)
    long = model.submit(ask(ids(range(120)), tokens=1), 0.0)
    sizes = []
    while long.ended is None:
        begun = model.start_step(0.0)
        assert begun is not None
        sizes.append(begun.tokens)
        model.finish_step(begun, 0.0)
    assert sizes == [50, 50, 23]
    assert writer.written == 4


# slots and queue


def test_slots_are_given_in_order_of_arrival() -> None:
    model = FakeModel(CALM)
    jobs = [model.submit(ask(), 0.0) for _ in range(7)]
    step(model)
    assert [job.started is not None for job in jobs] == [True] * 4 + [False] * 3
    assert (model.running, model.waiting) == (4, 3)
    run(model)
    assert {job.ended for job in jobs} == {"stop"}
    assert jobs[4].queue_s > 0


def test_an_unbounded_queue_takes_all() -> None:
    model = FakeModel(CALM)
    for _ in range(500):
        model.submit(ask(), 0.0)
    assert model.waiting == 500


def test_sglang_refuses_a_burst_while_slots_are_free() -> None:
    config = FakeConfig(dialects=("sglang",), slots=2, queue=2)
    model = FakeModel(config)
    for _ in range(2):
        model.submit(ask(), 0.0)
    with pytest.raises(QueueFull):
        model.submit(ask(), 0.0)
    step(model)
    model.submit(ask(), 0.0)
    assert (model.running, model.waiting, model.totals.refused) == (2, 1, 1)


def test_vllm_counts_running_and_waiting_requests() -> None:
    model = FakeModel(FakeConfig(dialects=("vllm",), slots=2, queue=1))
    for _ in range(3):
        model.submit(ask(), 0.0)
    with pytest.raises(QueueFull):
        model.submit(ask(), 0.0)


def test_a_queue_of_none_takes_what_fits_the_slots() -> None:
    model = FakeModel(FakeConfig(dialects=("vllm",), slots=2, queue=0))
    for _ in range(2):
        model.submit(ask(), 0.0)
    with pytest.raises(QueueFull):
        model.submit(ask(), 0.0)


def test_cancelling_frees_the_slot_at_once() -> None:
    model = FakeModel(FakeConfig(slots=1))
    first, second, third = (model.submit(ask(), 0.0) for _ in range(3))
    begun = model.start_step(0.0)
    assert begun is not None
    model.cancel(first, 0.5)
    model.cancel(third, 0.5)
    assert model.finish_step(begun, 1.0) == []
    assert (first.written, first.ended, first.done) == (0, "abort", 0.5)
    assert model.waiting == 1
    step(model, 1.0)
    assert second.written == 1
    model.cancel(first, 2.0)
    assert model.totals.ended == {"stop": 0, "length": 0, "abort": 2}


# prefix cache


def test_a_cold_wave_shares_its_prefix_within_one_step() -> None:
    """As vLLM does: blocks are known as soon as they are allocated."""
    model = FakeModel(FakeConfig(slots=8, block_tokens=32))
    jobs = [
        model.submit(ask(ids(range(100), range(1000 * n, 1000 * n + 9))), 0.0) for n in range(8)
    ]
    step(model)
    assert [job.cached for job in jobs] == [0] + [96] * 7
    assert (model.totals.looked_up, model.totals.found) == (8 * 109, 7 * 96)


def test_a_prompt_is_never_wholly_cached() -> None:
    model = FakeModel(FakeConfig(slots=1, block_tokens=16))
    jobs = [model.submit(ask(ids(range(64))), 0.0) for _ in range(2)]
    run(model)
    assert [job.cached for job in jobs] == [0, 48]


def test_a_prefix_shorter_than_a_block_never_hits() -> None:
    model = FakeModel(FakeConfig(slots=1, block_tokens=128))
    jobs = [model.submit(ask(ids(range(100))), 0.0) for _ in range(2)]
    run(model)
    assert [job.cached for job in jobs] == [0, 0]


def test_a_block_hits_only_after_all_before_it() -> None:
    model = FakeModel(FakeConfig(slots=1, block_tokens=4))
    model.submit(ask(ids(range(12))), 0.0)
    job = model.submit(ask(ids((99,), range(1, 12))), 0.0)
    run(model)
    assert job.cached == 0


def test_a_salt_and_a_request_without_cache_share_nothing() -> None:
    model = FakeModel(FakeConfig(slots=1, block_tokens=4))
    asks = [
        ask(ids(range(20))),
        Ask(ids(range(20)), ("x",), salt="a"),
        Ask(ids(range(20)), ("x",), use_cache=False),
        Ask(ids(range(20)), ("x",), salt="a"),
    ]
    jobs = [model.submit(one, 0.0) for one in asks]
    run(model)
    assert [job.cached for job in jobs] == [0, 0, 0, 16]


def test_the_shared_cache_forgets_the_oldest() -> None:
    model = FakeModel(FakeConfig(slots=1, context_tokens=16, block_tokens=4))
    prompts = [ids(range(100 * n, 100 * n + 9)) for n in range(4)]
    for prompt in prompts:
        model.submit(ask(prompt, tokens=1), 0.0)
    run(model)
    again = [model.submit(ask(prompts[n], tokens=1), 0.0) for n in (3, 0)]
    run(model)
    assert [job.cached for job in again] == [8, 0]


def test_a_block_whose_beginning_is_forgotten_does_not_hit() -> None:
    model = FakeModel(FakeConfig(slots=1, context_tokens=16, block_tokens=4))
    jobs = [
        model.submit(ask(prompt, tokens=1), 0.0)
        for prompt in (ids(range(13)), ids(range(50, 59)), ids(range(13)))
    ]
    run(model)
    assert [job.cached for job in jobs] == [0, 0, 0]


def test_forgetting_needs_an_idle_model() -> None:
    model = FakeModel(FakeConfig(slots=1, block_tokens=4))
    model.submit(ask(), 0.0)
    assert not model.forget()
    run(model)
    assert model.forget()
    job = model.submit(ask(), 0.0)
    run(model)
    assert job.cached == 0


SLOTTED = FakeConfig(slots=8, dialects=("llama_server",))


@pytest.mark.parametrize(
    ("dialect", "caching", "block"),
    [("vllm", "shared", 16), ("sglang", "shared", 1), ("llama_server", "per_slot", 16)],
)
def test_the_cache_is_as_the_server_has_it(dialect: str, caching: str, block: int) -> None:
    config = FakeConfig.model_validate({"dialects": [dialect]})
    assert (config.caching, config.block) == (caching, block)
    other = FakeConfig.model_validate({"dialects": [dialect], "cache": "none", "block_tokens": 8})
    assert (other.caching, other.block) == ("none", 8)


def test_a_cache_per_slot_is_shared_by_none() -> None:
    """As llama.cpp was measured: one warm slot, then eight at once: one hit, then eight."""
    model = FakeModel(SLOTTED)
    prefix = range(290)
    model.submit(ask(ids(prefix)), 0.0)
    run(model)

    def wave(start: int) -> list[int]:
        prompts = (ids(prefix, range(start + 10 * n, start + 10 * n + 8)) for n in range(8))
        jobs = [model.submit(ask(prompt), 0.0) for prompt in prompts]
        run(model)
        return sorted(job.cached for job in jobs)

    assert wave(1000) == [0] * 7 + [290]
    assert wave(2000) == [290] * 8


def test_the_slot_that_shares_most_is_taken_else_the_longest_unused() -> None:
    model = FakeModel(SLOTTED.model_copy(update={"slots": 3}))
    for start in (0, 100, 200):
        model.submit(ask(ids(range(start, start + 50))), 0.0)
        run(model)
    taken = []
    for prompt in (
        ids(range(100, 160)),
        ids(range(500, 550)),
        ids(range(200, 204), range(900, 999)),
    ):
        job = model.submit(ask(prompt), 0.0)
        run(model)
        taken.append((job.slot, job.cached))
    assert taken == [(1, 50), (0, 0), (2, 4)]


def test_a_pinned_request_waits_for_its_slot_and_others_pass_it() -> None:
    model = FakeModel(SLOTTED.model_copy(update={"slots": 2}))
    first = model.submit(ask(slot=1), 0.0)
    pinned = model.submit(ask(slot=1), 0.0)
    other = model.submit(ask(), 0.0)
    nowhere = model.submit(ask(slot=9), 0.0)
    step(model)
    assert (first.slot, pinned.slot, other.slot, nowhere.slot) == (1, None, 0, None)
    run(model)
    assert pinned.slot == 1
    assert nowhere.ended == "stop"


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 9), st.none() | st.integers(0, 3)),
        max_size=20,
    ),
    st.sampled_from(["shared", "per_slot", "none"]),
    st.integers(1, 40),
)
def test_whatever_comes_is_answered_and_counted(
    rows: list[tuple[int, int, int | None]], cache: str, step_tokens: int
) -> None:
    config = FakeConfig.model_validate(
        {"slots": 3, "cache": cache, "step_tokens": step_tokens, "block_tokens": 4}
    )
    model, now = FakeModel(config), 0.0
    jobs = [model.submit(ask(ids(range(n)), tokens, slot=slot), 0.0) for n, tokens, slot in rows]
    while begun := model.start_step(now):
        assert model.running <= 3
        assert begun.seconds > 0
        now += begun.seconds
        model.finish_step(begun, now)
    assert all(job.ended == "stop" and job.written == len(job.ask.pieces) for job in jobs)
    totals = model.totals
    assert totals.written == totals.ended_written == sum(tokens for _, tokens, _ in rows)
    assert totals.looked_up == totals.found + totals.computed == sum(n for n, _, _ in rows)
    assert model.used_tokens == 0


# what is written


def test_the_same_question_has_the_same_answer() -> None:
    moves = ("e2e4", "d2d4", "g1f3", "c2c4")
    prompt, other = ids(range(50)), ids(range(51))
    assert choose(moves, prompt, 7, 1.0) == choose(moves, prompt, 7, 1.0)
    assert len({choose(moves, prompt, seed, 1.0) for seed in range(30)}) == 4
    assert len({choose(moves, prompt, seed, 0.0) for seed in range(30)}) == 1
    assert any(choose(moves, prompt, s, 1.0) != choose(moves, other, s, 1.0) for s in range(9))


def test_pieces_are_the_text_and_an_end() -> None:
    assert pieces_of("e2e4", by_character=True) == ("e", "2", "e", "4", "")
    assert pieces_of("Knight to f3.", by_character=False) == ("Knight", " to", " f3.", "")


@given(st.text(max_size=40), st.text(max_size=40))
def test_text_appended_only_appends_ids(before: str, after: str) -> None:
    old, new = text_ids(before), text_ids(before + after)
    assert new[: max(0, len(old) - 1)] == old[: max(0, len(old) - 1)]


def test_faults_are_thrown_alike_every_time() -> None:
    config = FakeConfig(
        faults=(FakeFault(kind="reset", at=(3,)), FakeFault(kind="abort", probability=0.3)), seed=5
    )

    def kinds_of_all() -> list[str | None]:
        found = (config.fault(number) for number in range(400))
        return [fault.kind if fault else None for fault in found]

    kinds = kinds_of_all()
    assert kinds[3] == "reset"
    assert kinds == kinds_of_all()
    assert 80 < kinds.count("abort") < 160


def test_an_unknown_fault_and_an_unknown_key_are_refused() -> None:
    with pytest.raises(ValidationError, match="kind"):
        FakeFault.model_validate({"kind": "banana"})
    with pytest.raises(ValidationError, match="slot"):
        FakeConfig.model_validate({"slot": 3})


# constraints

TEXTS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8)


@given(TEXTS)
def test_a_grammar_of_ours_is_understood(texts: list[str]) -> None:
    assert from_grammar(grammar_of(texts)) == tuple(texts)


@given(TEXTS)
def test_an_alternation_of_escaped_texts_is_understood(texts: list[str]) -> None:
    pattern = "|".join(map(re.escape, texts))
    assert from_regex(f"({pattern})") == from_regex(f"(?:{pattern})") == tuple(texts)


@given(TEXTS)
def test_a_schema_writes_what_json_reads(texts: list[str]) -> None:
    schema = {"type": "string", "enum": texts}
    wrapped = {"type": "object", "properties": {"move": schema}, "required": ["move"]}
    assert [json.loads(text) for text in from_schema(schema)] == texts
    assert [json.loads(text)["move"] for text in from_schema(wrapped)] == texts
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert from_response_format(form) == from_schema(schema)


def test_an_empty_alternative_is_taken_as_llama_cpp_takes_it() -> None:
    assert from_grammar('root ::= "e2e4" |') == ("e2e4", "")


@pytest.mark.parametrize("grammar", ["root = | (", 'root ::= [a-h] "4"', 'root ::= "e2e4', "", "x"])
def test_other_grammars_are_refused(grammar: str) -> None:
    with pytest.raises(ConstraintError):
        from_grammar(grammar)


@pytest.mark.parametrize("pattern", ["(e2", "[a-h]4", r"\d", "a+", "(a|(b|c))", "a\\"])
def test_other_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        from_regex(pattern)


@pytest.mark.parametrize("schema", [7, {"type": "string"}, {"type": "array"}])
def test_other_schemas_are_refused(schema: object) -> None:
    with pytest.raises(ConstraintError):
        from_schema(schema)


def test_vllm_takes_exactly_one_constraint() -> None:
    assert from_vllm({"choice": ["a", "b"], "regex": None}) == ("a", "b")
    wrong: list[dict[str, object]] = [
        {},
        {"choice": ["a"], "regex": "a"},
        {"banana": 1},
        {"choice": []},
    ]
    for fields in wrong:
        with pytest.raises(ConstraintError):
            from_vllm(fields)
