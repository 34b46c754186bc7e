"""What is told of engines that are not equal: every setting, what nobody knows, slots, prompts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arena import compare, compare_page
from arena import compare_figures as figures
from arena import config as configs
from arena.compare_figures import AS_SERVED, EngineRecord
from arena.compare_text import engine_text, flags_texts, summary_text, unequal_texts
from serving import PACKAGED_MODEL, parse_engine_config

URL = "http://127.0.0.1:1"
OWN = "tests.examples.own_engine:DiceEngine"

Row = dict[str, Any]


def told(**engines: Mapping[str, Any]) -> dict[str, Row]:
    """The inequalities of engines of these tables, by knob."""
    return told_of(engines)


def told_of(
    engines: Mapping[str, Mapping[str, Any]], cells: Sequence[Row] = (), matches: int = 4
) -> dict[str, Row]:
    knobs = {
        name: compare.knobs_of(parse_engine_config(name, table)) for name, table in engines.items()
    }
    records = [EngineRecord(name, "k", None, 4, {}) for name in engines]
    return {row["knob"]: row for row in figures.unequal(records, knobs, cells, matches)}


# settings


@pytest.mark.parametrize(
    ("kind", "knob", "value"),
    [
        ("vllm", "device", "cpu"),
        ("vllm", "tensor_parallel", 2),
        ("vllm", "enforce_eager", True),
        ("vllm", "extra_args", {"scheduling_policy": "priority"}),
        ("vllm", "seed", 1),
        ("vllm", "prefix_cache", False),
        ("vllm", "max_queued", 65),
        ("sglang", "python", "/opt/python"),
        ("sglang", "extra_args", ["--attention-backend", "torch_native"]),
        ("llama_server", "binary", "/opt/llama-server"),
        ("llama_server", "kv_dtype", "q8_0"),
        ("scripted", "latency_seconds", 0.5),
        (OWN, "sides", 12),
    ],
)
def test_every_setting_that_differs_is_told(kind: str, knob: str, value: object) -> None:
    """A list of settings missed those that a kind of engine has alone."""
    rows = told(one={"kind": kind, knob: value}, two={"kind": kind})
    assert rows.keys() == {knob}
    assert rows[knob]["values"]["one"] == value
    assert told(one={"kind": kind, knob: value}, two={"kind": kind, knob: value}) == {}


def test_the_aim_of_an_adaptive_cap_is_a_setting() -> None:
    adaptive = {"kind": "scripted", "adaptive": True}
    rows = told(one={**adaptive, "slo_seconds": 2.0}, two=adaptive)
    assert rows["slo_seconds"]["values"] == {"one": 2.0, "two": 1.0}
    fixed = {"kind": "scripted"}
    assert told(one={**fixed, "slo_seconds": 2.0}, two=fixed) == {}


def test_what_changes_no_work_is_no_inequality() -> None:
    looked_at = {"kind": "llama_server", "scrape_seconds": 9.0, "start_seconds": 9.0}
    assert told(one=looked_at, two={"kind": "llama_server"}) == {}


def test_engines_of_two_kinds_left_alone_differ_in_what_they_compute_with() -> None:
    kinds = {kind: {"kind": kind} for kind in ("vllm", "vllm_server", "sglang")}
    assert told(**kinds) == {}
    assert told(**kinds, llama_server={"kind": "llama_server"}).keys() == {"weights", "dtype"}


@pytest.mark.usefixtures("bfloat16_cpu")
def test_what_a_running_server_was_started_with_is_not_known() -> None:
    """It was told with the defaults of one that is launched."""
    rows = told(
        launched={"kind": "sglang"},
        served={"kind": "sglang", "url": URL},
        chat={"kind": "openai", "url": URL},
        llama={"kind": "llama_server", "url": URL},
    )
    for knob in ("dtype", "threads", "kv_dtype", "prefix_cache", "max_batched_tokens"):
        assert rows[knob]["values"]["served"] == AS_SERVED
        assert rows[knob]["values"]["chat"] == AS_SERVED
    assert rows["dtype"]["values"]["launched"].startswith("bfloat16 on a CPU")
    assert rows["dtype"]["values"]["llama"].startswith("computes in the type of the GGUF file")
    assert rows["binary"]["values"]["llama"] == AS_SERVED
    assert rows["prefix_cache"]["values"]["llama"] is None
    assert "start_seconds" not in rows


def test_replicas_are_what_they_host_and_how_many_they_are() -> None:
    """Their table was one knob, and their dtype the advice where to write it."""
    hosted = {"kind": "vllm", "max_concurrent": 8, "max_queued": 8, "threads": 1}
    rows = told(
        alone=hosted, replicas={"kind": "ray", "engine": hosted, "replicas": 3, "address": "auto"}
    )
    assert {knob: row["values"]["replicas"] for knob, row in rows.items()} == {
        "max_concurrent": 24,
        "max_queued": 24,
        "replicas": 3,
    }


def test_servers_side_by_side_are_not_taken_for_launched_ones() -> None:
    urls = [URL, "http://127.0.0.1:2"]
    rows = told(launched={"kind": "vllm_server"}, served={"kind": "vllm_server", "urls": urls})
    assert rows["dtype"]["values"]["served"] == AS_SERVED
    assert rows["weights"]["values"]["served"].endswith(AS_SERVED)


def test_what_is_not_known_is_equal_to_nothing() -> None:
    served = {"kind": "sglang", "url": URL}
    rows = told(one=served, two=served)
    assert rows["dtype"]["values"] == {"one": AS_SERVED, "two": AS_SERVED}
    assert rows["weights"]["values"]["one"].endswith(AS_SERVED)
    assert told(one=served) == {}


def test_a_user_s_own_engine_is_said_to_compute_with_nothing_it_did_not_say() -> None:
    knobs = compare.knobs_of(parse_engine_config("own", {"kind": OWN}))
    assert (knobs["weights"], knobs["dtype"]) == (None, None)


# slots


def test_slots_that_a_closed_loop_shares_are_told_with_the_cells() -> None:
    """Only the open loop's matches were looked at."""
    few = {"kind": "llama_server", "max_concurrent": 8}
    cells = [closed("many", 4), closed("many", 16)]
    rows = told_of({"many": {**few, "max_concurrent": 16}, "few": few}, cells)
    assert rows["slots"]["values"] == {"many": 16, "few": 8}
    assert rows["slots"]["note"].endswith("cached transcripts: few in closed 16")
    rows = told_of({"few": few}, cells, 9)
    assert rows["slots"]["note"].endswith(": few in open of 9 matches, closed 16")
    assert told_of({"few": few}, cells[:1], 8) == {}


# prompts


def closed(engine: str, number: int, tokens: float | None = None) -> Row:
    return {
        "engine": engine,
        "loop": "closed",
        "concurrency": number,
        "prompt_tokens_per_move": tokens,
    }


def opened(engine: str, tokens: float, **more: Any) -> Row:
    row = {**closed(engine, 0, tokens), "loop": "open", "concurrency": None, "errors": {}}
    return {**row, "repeats": [{}, {}], **more}


def notes(*cells: Row) -> dict[str, str]:
    engines = {row["engine"]: {"kind": "scripted"} for row in cells}
    return {knob: row["note"] for knob, row in told_of(engines, cells).items()}


LATER = "a faster engine gets to later plies, whose prompts are longer"
OPEN, CLOSED = "prompt tokens a move, open", "prompt tokens a move, closed 4"


def test_prompts_that_differ_in_the_open_loop_are_other_prompts() -> None:
    """All engines are asked the same there, however few tokens they differ by."""
    cells = [opened("one", 200.0), opened("two", 203.0)]
    assert notes(*cells) == {OPEN: "the same questions: other templates or tokenizers"}
    assert notes(opened("one", 200.0), opened("two", 200.0)) == {}


@pytest.mark.parametrize("more", [{"errors": {"overloaded": 3}}, {"repeats": [{}, None]}])
def test_an_engine_that_did_not_answer_all_proves_no_other_prompts(more: Row) -> None:
    cells = [opened("one", 200.0), opened("two", 203.0, **more)]
    assert notes(*cells) == {}
    # nor that they are the same
    cells += [closed("one", 4, 200.0), closed("two", 4, 300.0)]
    assert notes(*cells) == {CLOSED: ""}


def test_later_plies_are_the_cause_only_where_the_same_questions_are_as_long() -> None:
    """Another template was told as a faster engine."""
    uneven = [closed("one", 4, 200.0), closed("two", 4, 300.0)]
    assert notes(opened("one", 200.0), opened("two", 200.0), *uneven) == {CLOSED: LATER}
    other = notes(opened("one", 200.0), opened("two", 290.0), *uneven)
    assert other.keys() == {OPEN, CLOSED}
    assert other[CLOSED] == ""
    assert notes(*uneven) == {CLOSED: ""}


@pytest.mark.parametrize("where", [{"url": URL}, {"urls": [URL, "http://127.0.0.1:2"]}])
def test_weights_of_a_running_server_are_as_it_was_started_with(where: Row) -> None:
    settings = parse_engine_config("main", {"kind": "vllm_server", **where})
    assert compare.knobs_of(settings)["weights"] == f"{PACKAGED_MODEL}, {AS_SERVED}"
    assert not compare.knobs_of(settings).keys() & {"url", "urls"}


# in words


def test_an_engine_s_weights_and_their_type_are_told() -> None:
    row = {
        "name": "main",
        "kind": "vllm",
        "version": "0.32.0",
        "weights": "a.gguf, dequantised",
        "dtype": "bfloat16",
        "start_s": [2.0],
        "restarts": 0,
    }
    assert engine_text(row) == (
        "main: vllm 0.32.0; weights: a.gguf, dequantised; dtype: bfloat16; ready in 2.0 s"
    )
    own = {**row, "weights": None, "dtype": None, "version": None, "start_s": []}
    assert engine_text(own) == "main: vllm; never started"


def test_command_lines_can_be_copied() -> None:
    rows = [{"name": "a", "flags": ["A=1", "server", "--text", "two words"]}]
    rows.append({"name": "b", "flags": []})
    assert list(flags_texts(rows)) == ["a: A=1 server --text 'two words'"]


def test_knobs_of_the_same_values_share_a_line() -> None:
    rows = told(launched={"kind": "sglang"}, served={"kind": "sglang", "url": URL})
    assert len(rows) > 8
    lines = unequal_texts(list(rows.values()))
    assert len(lines) == 3
    (line,) = [line for line in lines if "threads" in line]
    assert line.endswith(f": launched its own choice, served {AS_SERVED}")
    assert "kv_dtype" in line


def test_an_interrupted_comparison_says_so() -> None:
    result = {
        "workload": {
            "digest": "d",
            "source": "s",
            "items": 1,
            "matches": 1,
            "parallel_matches": 1,
            "move_period_seconds": 1.0,
        },
        "options": {"seconds": 1.0, "repeats": 3, "slo_seconds": 1.0},
    }
    assert "interrupted" not in summary_text({**result, "interrupted": False})
    told = summary_text({**result, "interrupted": True})
    assert told.endswith("interrupted, so only what was measured by then")


# on the page


def test_a_latency_that_too_many_questions_never_had_is_drawn_as_far_as_it_is_known() -> None:
    row = {
        **opened("one", 200.0),
        "moves_per_s": [None],
        "latency_ms": {"p50": 10.0, "p95": None, "p99": None},
        "occupancy": {"mean": None},
        "slo_attainment": 0.9,
    }
    drawn = {figure["id"]: figure for figure in compare_page.figures([row])}
    (median,) = drawn["latency"]["data"]
    assert (median["y"], median["error_y"]["array"]) == ([10.0], [0])


# an engine whose context is too small is known once it has started


def test_an_engine_that_started_and_cannot_be_asked_is_not_started_again(tmp_path: Path) -> None:
    """It failed alike in every repeat, after loading its model for each."""
    config = configs.parse(
        {
            "name": "c",
            "seed": 3,
            "engines": {"small": {"kind": OWN, "context_tokens": 64}},
            "agents": [{"name": name, "kind": "llm", "engine": "small"} for name in "ab"],
            "tournament": {"games": ["chess"], "parallel_matches": 2, "max_plies": 60},
        }
    )
    chosen = compare.CompareOptions(tmp_path, seconds=0.2, concurrencies=(1,))
    result = asyncio.run(compare.run(config, (), chosen))
    (engine,) = result["engines"]
    assert len(engine["start_s"]) == 1
    (failure,) = engine["failures"]
    assert failure.startswith("repeat 1 of 3, small: engines.small.context_tokens: is 64")
    assert [row["moves_per_s"] for row in result["cells"]] == [[None] * 3] * 2
