"""Each shape of request on real vLLM: its tokens, its constraint, and what of it is cached."""

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from arena import config as configs
from arena import shapes, workload
from arena.loops import Asker
from arena.shapes import CHAT_TOKENS, SHAPES
from arena.workload import Question, WorkItem
from serving import Limited, Reply, TokenPrompt
from serving.vllm_config import CPU_BLOCK_TOKENS
from tests.serving.contract import open_engine

pytestmark = [
    pytest.mark.live,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

ENGINE = {"kind": "vllm", "max_concurrent": 4, "context_tokens": 1024}
ENGINE["block_tokens"] = CPU_BLOCK_TOKENS
PLIES = 2


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Limited]:
    async with open_engine(ENGINE, tmp_path_factory.mktemp("vllm")) as opened:
        yield opened


class Asked:
    """The first plies of a match in one shape, one after the other from an empty cache."""

    def __init__(self, engine: Limited, name: str) -> None:
        told = configs.parse(
            {
                "name": "shapes",
                "seed": 3,
                "engines": {"main": ENGINE},
                "agents": [{"name": side, "kind": "llm", "engine": "main"} for side in "ab"],
                "tournament": {"games": ["chess"], "pairs": 1, "max_plies": 8},
            }
        )
        recorded = workload.record(told)
        self._fens = shapes.fens(told, recorded)
        self._shape = SHAPES[name]
        self._engine = engine
        self.items = recorded.matches[0][-PLIES:]
        self.questions = list(map(self.question, self.items))
        self.replies: list[Reply] = []

    def question(self, item: WorkItem) -> Question:
        return self._shape.question(item, self._fens[item.match_id, item.ply])

    async def ask(self) -> None:
        asker = Asker(self._engine, 120.0, self.question)
        assert await asker.forget()
        run = await asker.waves([self.items], 1, 240.0)
        assert [answer.fault for answer in run.answers] == [None] * PLIES
        self.replies = [answer.reply for answer in run.answers if answer.reply is not None]

    def cached(self) -> list[int | None]:
        return [reply.usage.cached for reply in self.replies]

    def written(self) -> list[int]:
        return [reply.usage.completion for reply in self.replies]

    def uncached(self) -> list[int]:
        return [(reply.usage.prompt or 0) - (reply.usage.cached or 0) for reply in self.replies]

    def in_whole_blocks(self) -> list[int]:
        """Tokens of each prompt that one before it began with too, as far as whole blocks reach."""
        prompts: list[list[int]] = []
        found = []
        for question in self.questions:
            prompt = self._engine.template.render(question.parts)
            assert isinstance(prompt, TokenPrompt)
            ids = list(prompt.ids)
            most = max((shared(before, ids) for before in prompts), default=0)
            found.append(most // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS)
            prompts.append(ids)
        return found


def shared(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


Ask = Callable[[str], Awaitable[Asked]]


@pytest.fixture(scope="module")
def asked(engine: Limited) -> Ask:
    """By a shape's name what came of it, asked once: a chat takes its time."""
    known: dict[str, Asked] = {}

    async def ask(name: str) -> Asked:
        if name not in known:
            made = Asked(engine, name)
            await made.ask()
            known[name] = made
        return known[name]

    return ask


async def test_a_writes_200_tokens_and_finds_nothing(asked: Ask) -> None:
    chat = await asked("A")
    assert chat.written() == [CHAT_TOKENS] * PLIES
    assert chat.cached() == [0] * PLIES
    assert chat.in_whole_blocks()[-1] > 0


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "A"])
async def test_what_was_told_before_is_found_in_whole_blocks(
    engine: Limited, asked: Ask, name: str
) -> None:
    told = await asked(name)
    assert told.cached() == told.in_whole_blocks()
    assert [reply.usage.prompt for reply in told.replies] == [
        engine.template.count_tokens(question.parts) for question in told.questions
    ]


async def test_answers_are_what_a_shape_allows(asked: Ask) -> None:
    by_name = {name: await asked(name) for name in SHAPES if name not in "AB"}
    for name in ("C", "F", "default"):
        told = by_name[name]
        for item, reply in zip(told.items, told.replies, strict=True):
            assert reply.text in item.choices
        at_most = [question.max_tokens for question in told.questions]
        assert all(n <= most for n, most in zip(told.written(), at_most, strict=True))
    for name in "DEG":
        told = by_name[name]
        assert told.written() == [1] * PLIES
        for question, reply in zip(told.questions, told.replies, strict=True):
            assert reply.text in (question.choices or ())
    mixed = by_name["mixed"]
    assert mixed.written() == [question.max_tokens for question in mixed.questions]
    # a move is found in the growing transcript's last block, a listing never
    assert by_name["default"].uncached()[-1] < by_name["E"].uncached()[-1]
    assert by_name["E"].uncached()[-1] < by_name["D"].uncached()[-1]


async def test_the_end_token_is_what_f_leaves_out(asked: Ask) -> None:
    """Where the longest move is as long as all are."""
    short, usual = await asked("F"), await asked("default")
    for item, without, having in zip(short.items, short.written(), usual.written(), strict=True):
        assert {len(choice) for choice in item.choices} == {4}
        assert (without, having) == (4, 5)


async def test_priming_brings_the_prompt_into_the_cache(engine: Limited) -> None:
    chat = Asked(engine, "B")
    asker = Asker(engine, 120.0, lambda item: shapes.priming(chat.question(item)))
    assert await asker.forget()
    for expected in (0, None):
        run = await asker.waves([chat.items[:1]], 1, 240.0)
        (answer,) = run.answers
        assert answer.reply is not None
        usage: Any = answer.reply.usage
        if expected is None:
            expected = (usage.prompt - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
        assert (usage.cached, usage.completion) == (expected, 1)
