"""A simulation in words and rows of text, the same for the terminal and the page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

WAYS = {"batching": ("static", "continuous"), "overload": ("queue", "admission")}
"""The two things that a kind sets against each other."""

_LEVELS = " ▁▂▃▄▅▆▇█"


class Table(NamedTuple):
    """Rows of text; all but the first column are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def title(result: Row) -> str:
    """What it is."""
    return f"simulation: {result['kind']}"


def summary_text(result: Row) -> str:
    """What was simulated."""
    return _SUMMARIES[result["kind"]](result)


def tables(result: Row) -> tuple[Table, ...]:
    """Its figures."""
    return _TABLES[result["kind"]](result)


def lines(result: Row) -> list[str]:
    """What is to be said of the figures."""
    return _LINES[result["kind"]](result)


def step_text(step: Row) -> str:
    """What a step takes."""
    return (
        f"a step takes {step['base_ms']:.2f} ms + {step['per_token_us']:.1f} µs a token "
        f"+ {step['per_request_us']:.1f} µs a request"
    )


def counted(number: int, one: str) -> str:
    """So many of what is named in the singular."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.2f}"


def _number(value: float | None, digits: int = 0) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def sparkline(values: Sequence[float], most: float) -> str:
    """A character each, by its share of `most`."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(round(v / most * top), top) if most else 0] for v in values)


# batching


def _batching_summary(result: Row) -> str:
    told = (
        f"{counted(result['requests'], 'request')}, {_arrivals_text(result)}",
        "prompts and answers as in the run" if result["runs"] else f"lengths {result['lengths']}",
        _prompts_text(result),
        _engine_text(result),
        "" if result["max_queued"] is None else f"{result['max_queued']:,} may wait",
        f"seed {result['seed']}"
        + ("" if result["seeds"] == 1 else f" and {result['seeds'] - 1:,} more for the bands"),
    )
    return "; ".join(filter(None, told))


def _arrivals_text(result: Row) -> str:
    if result["arrivals"] == "closed":
        thinking = f", then thinking for {result['think_seconds']:g} s on the average"
        return (
            f"from {counted(result['clients'], 'client')} waiting for each answer"
            f"{thinking if result['think_seconds'] else ''}"
        )
    at_once = f" of {result['burst']:,}" if result["arrivals"] == "burst" else ""
    return f"{result['arrivals']} arrivals{at_once} at {result['rate']:g}/s"


def _prompts_text(result: Row) -> str:
    if result["prompt_tokens"] is None:
        return ""
    told = f"prompts of {counted(result['prompt_tokens'], 'token')}"
    if result["shared_tokens"] is None:
        return told
    blocks = result["block_tokens"]
    cache = "no prefix cache" if blocks is None else f"a prefix cache in blocks of {blocks:,}"
    return f"{told}, {result['shared_tokens']:,} of them shared; {cache}"


def _engine_text(result: Row) -> str:
    slots = counted(result["slots"], "slot")
    if not result["runs"]:
        return f"{slots}; {_given_step_text(result)}"
    most = result["step_tokens"]
    bound = "" if most is None else f", {most:,} tokens in a step at most"
    return (
        f"{result['engine']} of {', '.join(result['runs'])}: {slots}{bound}; "
        f"{step_text(result['step'])}, and what the run's steps took beyond that"
    )


def _given_step_text(result: Row) -> str:
    told = f"a step takes {result['token_ms']:g} ms"
    if result["growth"]:
        told += f", {result['growth'] * 100:g} % more for each further request in it"
    if result["prompt_token_ms"]:
        told += f", and {result['prompt_token_ms']:g} ms for each prompt token after the first"
    return told


_BATCH_COLUMNS = (
    "batching",
    "wait mean s",
    "p95 s",
    "max s",
    "makespan s",
    "requests/s",
    "idle slots",
    "in a step",
    "refused",
)


def _batching_tables(result: Row) -> tuple[Table, ...]:
    rows = []
    for way in WAYS["batching"]:
        row = result[way]
        waits = row["wait_s"]
        rows.append(
            (
                way,
                *(_seconds(waits[key]) for key in ("mean", "p95", "max")),
                _number(row["makespan_s"], 1),
                _number(row["requests_per_s"], 2),
                _share(row["idle_share"]),
                _number(row["step_requests"], 2),
                _number(row["refused"]),
            )
        )
        if row["band"] is not None:
            rows.append(_band_row(row["band"]))
    return (Table("Static against continuous batching", _BATCH_COLUMNS, tuple(rows)),)


def _band_row(band: Row) -> tuple[str, ...]:
    waits = band["wait_s"]
    return (
        "  95 % of seeds",
        *(_range(waits[key], 1) for key in ("mean", "p95", "max")),
        _range(band["makespan_s"], 1),
        _range(band["requests_per_s"], 2),
        _range(band["idle_share"], 3),
        "",
        "",
    )


def _range(band: Sequence[float] | None, digits: int) -> str:
    return "n/a" if band is None else f"{band[0]:.{digits}f}–{band[1]:.{digits}f}"


def _batching_lines(result: Row) -> list[str]:
    static, continuous = (result[way] for way in WAYS["batching"])
    told = []
    if static["requests_per_s"]:
        gain = continuous["requests_per_s"] / static["requests_per_s"]
        told.append(f"continuous batching answers {gain:.2f} × as many requests a second")
    for way in WAYS["batching"]:
        part = result[way]["timeline"]
        drawn = sparkline(part["busy_slots"], result["slots"])
        told.append(f"slots busy |{drawn}| {way}, {result[way]['makespan_s']:,.1f} s")
    return told


# paging


def _paging_summary(result: Row) -> str:
    return (
        f"{counted(result['requests'], 'request')} of "
        f"{counted(round(result['used'] / result['requests']), 'token')} on the average "
        f"({_lengths_text(result)}; limit {result['limit']:,}); a memory of "
        f"{counted(result['memory_tokens'], 'token')}, {result['kv_bytes_per_token']:,} B each; "
        f"seed {result['seed']}"
    )


def _lengths_text(result: Row) -> str:
    runs = result["runs"]
    return f"as {result['engine']} had them in {', '.join(runs)}" if runs else result["lengths"]


def _paging_tables(result: Row) -> tuple[Table, ...]:
    rows = tuple(
        (
            f"{row['unit']:,}" + (" (the limit)" if row["unit"] == result["limit"] else ""),
            _number(row["reserved"]),
            _share(row["wasted_share"]),
            _number(row["fit"]),
        )
        for row in result["units"]
    )
    columns = ("unit, tokens", "reserved tokens", "wasted", "fit at once")
    return (Table("Reserved for the same requests", columns, rows),)


def _paging_lines(result: Row) -> list[str]:
    whole = result["units"][0]
    best = min(result["units"], key=lambda row: row["reserved"])
    if not whole["fit"]:
        return ["the memory does not hold one request at the limit"]
    return [
        f"units of {best['unit']:,} tokens let {best['fit'] / whole['fit']:.1f} × as many in as "
        "reserving the limit"
    ]


# the arena's own workload


def calibration_text(row: Row) -> str:
    """Where an engine's figures come from."""
    asks = (
        f"{step_text(row['step'])}; a move computes {row['uncached_tokens']:.1f} prompt tokens "
        f"and writes {row['output_tokens']:.1f}"
    )
    if row["source"] == "assumed":
        return f"ASSUMED, not measured: {asks}"
    stalls = f" ({row['stalls_left_out']} stalls left out)" if row["stalls_left_out"] else ""
    left = row["matches"] - row["finished"]
    unfinished = (
        f" ({left:,} of {row['matches']:,} matches not played to their end)" if left else ""
    )
    return (
        f"{row['engine']} ({row['engine_kind']}), fitted to {row['steps']:,} steps{stalls} of "
        f"{', '.join(row['runs'])}{unfinished}: {asks}; {row['overhead_ms']:.1f} ms of it outside"
    )


def _overload_summary(result: Row) -> str:
    return (
        f"{result['load']:g} × the capacity of {result['capacity']:,.1f} moves/s for "
        f"{result['seconds']:g} s; {result['slots']} slots; in time is within "
        f"{result['slo_seconds']:g} s; seed {result['seed']}"
    )


def _overload_tables(result: Row) -> tuple[Table, ...]:
    columns = (
        "behind",
        "offered",
        "answered",
        "refused",
        "in time/s",
        "second half",
        "of capacity",
        "p50 ms",
        "p95 ms",
        "drained s",
    )
    rows = []
    for way in WAYS["overload"]:
        row = result[way]
        rows.append(
            (
                "a queue" if way == "queue" else "adaptive cap",
                _number(row["offered"]),
                _number(row["answered"]),
                _number(sum(row["errors"].values())),
                _number(row["in_time_per_s"], 1),
                _number(row["second_half_in_time_per_s"], 1),
                _share(row["second_half_of_capacity"]),
                _number(row["latency_ms"]["p50"]),
                _number(row["latency_ms"]["p95"]),
                _number(row["drained_s"], 1),
            )
        )
    return (Table("More than the engine can do", columns, tuple(rows)),)


def _overload_lines(result: Row) -> list[str]:
    told = [calibration_text(result["calibration"])]
    if result["gain"] is not None:
        told.append(f"the cap brings {result['gain']:.1f} × as many moves in time")
    if result["queue"]["second_half_of_capacity"] is None:
        wait_s = (result["load"] - 1) * result["seconds"]
        told.append(
            f"the queue grows to {wait_s:.3g} s, too little beside {result['slo_seconds']:g} s to "
            "tell what of the capacity is in time; more seconds do"
        )
    return told


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"


_ROUTED = {
    "hash": "routed by hash",
    "bounded": "routed by hash with bounded loads",
    "even": "spread evenly, as the arena places them",
}


def _fleet_summary(result: Row) -> str:
    each = result["matches_per_gpu"]
    sized = (
        " (about the fewest that keep 95 % of the moves in time, and 95 % of the pace)"
        if result["is_sized"]
        else ""
    )
    return (
        f"{result['seats']:,} seats, a move every {result['period_seconds']:g} s each, on "
        f"{_gpus(result['gpus'])}{sized}; matches {_ROUTED[result['routing']]}: "
        f"{each['mean']:,.1f} a GPU on the average, {each['max']:,} on the fullest; seed "
        f"{result['seed']}"
    )


def _fleet_tables(result: Row) -> tuple[Table, ...]:
    latency = result["latency_ms"]
    whole = (
        ("moves a second", _number(result["moves_per_s"], 1)),
        ("of what the pace allows", _share(result["pace_attainment"])),
        ("p50, p95, p99 ms", ", ".join(_number(latency[key]) for key in ("p50", "p95", "p99"))),
        (f"within {result['slo_seconds']:g} s", _share(result["slo_attainment"])),
        ("p95 ms on the fullest GPU", _number(result["fullest"]["p95_ms"])),
    )
    curve = tuple(
        (
            _number(row["matches"]),
            _number(row["moves_per_s"], 1),
            _number(row["step_requests"], 1),
            _number(row["p50_ms"]),
            _number(row["p95_ms"]),
        )
        for row in result["curve"]
    )
    columns = ("matches", "moves/s", "in a step", "p50 ms", "p95 ms")
    told = (
        Table("The fleet", ("all GPUs together", "simulated"), whole),
        Table("One GPU by its load", columns, curve),
    )
    return (*told, *_against_tables(result))


def _against_tables(result: Row) -> tuple[Table, ...]:
    held = tuple(map(_held_row, result["against"]))
    return (Table("Runs as forecast, and as they were", _HELD_COLUMNS, held),) if held else ()


_HELD_COLUMNS = (
    "run",
    "at once",
    "slots",
    "period s",
    "moves/s",
    "measured",
    "off",
    "p95 ms",
    "p95 measured",
    "p95 off",
)


def _held_row(row: Row) -> tuple[str, ...]:
    predicted, told, error = row["predicted"], row["measured"], row["error"]
    return (
        row["run"],
        f"{row['parallel_matches']} of {row['matches']}",
        str(row["max_concurrent"]),
        f"{row['period_seconds']:g}",
        _number(predicted["moves_per_s"], 1),
        _number(told["moves_per_s"], 1),
        f"{error['moves_per_s']:+.0%}",
        _number(predicted["p95_ms"]),
        _number(told["p95_ms"]),
        f"{error['p95_ms']:+.0%}",
    )


def _fleet_lines(result: Row) -> list[str]:
    told = [calibration_text(result["calibration"])]
    if result["is_sized"]:
        told.append("how many GPUs is found by steps of 2 %, and moves some % with the seed")
    if result["gpus_simulated"] < result["gpus"]:
        were = "was" if result["gpus_simulated"] == 1 else "were"
        told.append(
            f"{_gpus(result['gpus_simulated'])} {were} simulated for {result['seconds']:g} s or "
            "more; one between two of them in load counts as a part of each"
        )
    return [*told, *_verdict(result)]


def _against_summary(result: Row) -> str:
    runs = ", ".join(row["run"] for row in result["against"])
    return f"{runs}, forecast from other runs; seed {result['seed']}"


def _against_lines(result: Row) -> list[str]:
    return [calibration_text(result["calibration"]), *_verdict(result)]


def _verdict(result: Row) -> list[str]:
    if not (rows := result["against"]):
        return []
    near = sum(row["is_within"] for row in rows)
    return [f"{near} of {len(rows)} forecasts are within 30 % in both figures"]


_SUMMARIES = {
    "batching": _batching_summary,
    "paging": _paging_summary,
    "overload": _overload_summary,
    "fleet": _fleet_summary,
    "against": _against_summary,
}
_TABLES = {
    "batching": _batching_tables,
    "paging": _paging_tables,
    "overload": _overload_tables,
    "fleet": _fleet_tables,
    "against": _against_tables,
}
_LINES = {
    "batching": _batching_lines,
    "paging": _paging_lines,
    "overload": _overload_lines,
    "fleet": _fleet_lines,
    "against": _against_lines,
}
