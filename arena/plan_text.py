"""A plan in words and rows of text, the same for the terminal and the page. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

CONTEXT_HEADINGS = ("tokens each", "sharing the prefix", "each its own")
UNIT_HEADINGS = ("unit, tokens", "sharing the prefix", "each its own")
STEP_HEADINGS = ("batch", "step ms", "tokens/s", "tokens/s each", "bound by", "fits")
RENT_HEADINGS = ("rent an hour", "break-even hours", "months")


def title(plan: Row) -> str:
    engine = f", engine {plan['engine']}" if plan["engine"] else ""
    return f"{plan['name']}{engine}: what fits, for {plan['goal']}"


def facts(plan: Row) -> Iterator[tuple[str, str]]:
    """What the plan rests on and comes to, a line each."""
    model, memory, work = plan["model"], plan["memory"], plan["workload"]
    yield "model", f"{model['name']} ({model['source']}){_kind(model)}"
    yield "weights", f"{size(plan['weights_bytes'])}, parameters {count(model['parameters'])}"
    if plan["weights_bytes_by_dtype"] is not None:
        yield "weights by type", _by_type(plan["weights_bytes_by_dtype"], size)
    yield "KV cache a token", f"{plan['kv_bytes_per_token']:,} bytes ({plan['kv_dtype']})"
    yield "KV by type, bytes", _by_type(plan["kv_bytes_by_dtype"], count)
    endless = ", as if no window ended" if model["window_tokens"] else ""
    yield (
        "KV cache",
        f"{size(memory['kv_bytes'])}, {memory['kv_tokens']:,} tokens in units of "
        f"{memory['unit_tokens']:,}{endless} ({memory['source']}){_copies(memory)}",
    )
    yield (
        "a sequence",
        f"up to {work['context_tokens']:,} tokens, {work['shared_tokens']:,} of them shared "
        f"({work['source']})",
    )
    yield (
        "a request",
        f"about {work['uncached_tokens']:g} prompt tokens to compute, {work['output_tokens']:g} "
        f"to write; {_pace(work)} ({work['request_source']})",
    )
    fit = plan["agents_fit"]
    both = (work["agents"] or 0) > (work["sequences"] or 0)
    yield (
        "agents that fit",
        f"{fit['shared']:,} sharing the prefix, {fit['unshared']:,} each its own"
        f"{'; both sides of a match share a transcript' if both else ''}",
    )
    yield "computed in time", _compute(plan)
    yield "binds first", _binding(plan)


def _copies(memory: Row) -> str:
    copies = memory["kv_copies"]
    return "" if copies == 1 else f"; kept {copies:g} times, for GPUs that share no KV head"


def _pace(work: Row) -> str:
    period = work["period_s"]
    return f"one every {period:g} s of each agent" if period else "agents have no pace"


def _binding(plan: Row) -> str:
    if plan["binding"] is None:
        return "not known: how fast it computes is not given (--device or --bench)"
    if plan["compute"]["agents"] is None:
        return "the KV cache: agents have no pace, so any number gets its share of computing"
    return {"kv": "the KV cache", "compute": "computing"}[plan["binding"]]


def _by_type(sizes: Mapping[str, int], told: Callable[[int | None], str]) -> str:
    return ", ".join(f"{dtype} {told(number)}" for dtype, number in sizes.items())


def _kind(model: Row) -> str:
    kinds = []
    if model["is_latent"]:
        kinds.append("MLA")
    if model["is_hybrid"]:
        kinds.append("hybrid attention")
    if model["window_tokens"]:
        kinds.append(f"sliding window of {model['window_tokens']:,}")
    return f", {', '.join(kinds)}" if kinds else ""


def _compute(plan: Row) -> str:
    compute, period = plan["compute"], plan["workload"]["period_s"]
    rate = compute["requests_per_s"]
    if rate is None:
        return "n/a"
    agents = compute["agents"]
    each = "" if agents is None else f": {agents:,} agents that ask every {period:g} s"
    source = "measured" if compute["source"] == "measured" else "an estimate"
    about = "" if compute["source"] == "measured" else "about "
    told = "; ".join(compute["assumptions"])
    return f"{about}{rate:,.1f} requests/s, {source} ({told}){each}"


def context_rows(plan: Row) -> list[tuple[str, ...]]:
    return [_fits(row, "context_tokens") for row in plan["by_context"]]


def unit_rows(plan: Row) -> list[tuple[str, ...]]:
    own = plan["memory"]["unit_tokens"]
    return [
        (f"{cells[0]}{' (its own)' if row['unit_tokens'] == own else ''}", *cells[1:])
        for row in plan["by_unit"]
        for cells in [_fits(row, "unit_tokens")]
    ]


def _fits(row: Row, key: str) -> tuple[str, ...]:
    return tuple(count(row[name]) for name in (key, "shared", "unshared"))


def step_rows(plan: Row) -> list[tuple[str, ...]]:
    """Of the roofline; none where nothing is known of the device."""
    if plan["roofline"] is None:
        return []
    return [
        (
            f"{row['batch']:,}",
            f"{row['step_ms']:,.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['stream_tokens_per_s']:,.1f}",
            row["bound"],
            "yes" if row["fits"] else "no",
        )
        for row in plan["roofline"]["steps"]
    ]


def step_note(plan: Row) -> str:
    """What the roofline is."""
    roof = plan["roofline"]
    ridge = roof["ridge_batch"]
    told = (
        "reading the KV cache costs more than computing with it, so memory binds at every batch"
        if ridge is None
        else f"arithmetic binds from a batch of {ridge:,} on"
    )
    return f"an estimate for {roof['device']}: {told}"


def rent_rows(plan: Row) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['rent_per_hour']:,.2f}",
            "never" if row["break_even_hours"] is None else f"{row['break_even_hours']:,.0f}",
            "n/a" if row["months"] is None else f"{row['months']:,.1f}",
        )
        for row in plan["rent_or_buy"]["offers"]
    ]


def rent_lines(plan: Row) -> Iterator[str]:
    """What the table of rents rests on, and what else counts."""
    cost = plan["rent_or_buy"]
    yield (
        f"a card for {cost['price']:,.2f} that costs {cost['running_per_hour']:,.2f} an hour to run"
    )
    if cost["illustrations"]:
        yield f"illustrations, not quotations: {', '.join(cost['illustrations'])}; give your own"
    if any(row["break_even_hours"] is None for row in cost["offers"]):
        yield "never: there an hour of one's own costs as much as a rented one"
    yield _week(cost)
    yield from (f"not counted: {text}" for text in cost["runs_left_out"])
    yield f"renting wins by {'; '.join(cost['rent_wins'])}"
    yield f"owning wins by {'; '.join(cost['buy_wins'])}"


def _week(cost: Row) -> str:
    hours, days = cost["hours_per_week"], cost["measured_days"]
    if hours is None:
        return "months need the hours of use a week: measure a real week before deciding (--runs)"
    if days is None:
        return f"{hours:g} hours a week, as given: measure a real week before deciding (--runs)"
    if not cost["is_whole_week"]:
        return (
            f"{hours:.3g} hours of use in the {days:.2g} days that the runs reach back, too few to "
            "tell months by: measure a real week before deciding"
        )
    return f"{hours:.3g} hours of use in the last recorded week"


def advice(plan: Row) -> Iterator[str]:
    yield from plan["goal_advice"]
    engine = plan["engine_advice"]
    yield f"engine: {' or '.join(engine['kinds'])}: {engine['reason']}"


def size(number: int | None) -> str:
    """Bytes in GiB, or MiB."""
    if number is None:
        return "n/a"
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def count(number: int | None) -> str:
    return "n/a" if number is None else f"{number:,}"
