"""Think mode on real vLLM: the quickstart's engine, thoughts of 48 tokens, two matches of six
plies."""

import importlib.util
from itertools import pairwise

import pytest

from arena import cli
from arena.store import AttemptRow, Records, read
from games import Start, load_game
from serving.vllm_config import CPU_BLOCK_TOKENS

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

THINK_TOKENS = 48
CONFIG = f"""
name = "think"
seed = 7
[engines.main]
kind = "vllm"
model = "smollm2-135m"
context_tokens = 1024
max_concurrent = 4
block_tokens = {CPU_BLOCK_TOKENS}
[[agents]]
name = "warm"
kind = "llm"
engine = "main"
mode = "think"
think_tokens = {THINK_TOKENS}
[[agents]]
name = "cool"
kind = "llm"
engine = "main"
mode = "think"
think_tokens = {THINK_TOKENS}
temperature = 0.3
[tournament]
games = ["chess"]
pairs = 1
parallel_matches = 2
max_plies = 6
[pace]
move_period_seconds = 0.3
move_limit_seconds = 60.0
"""
_TAIL_TOKENS = 16
"""Of a prompt after its last move, at most."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("think")
    (folder / "t.toml").write_text(CONFIG)
    out = folder / "run"
    assert cli.main(["run", str(folder / "t.toml"), "--out", str(out), "--view", "none"]) == 0
    return read(out)


def asked(records: Records) -> dict[str, list[tuple[AttemptRow, AttemptRow]]]:
    """Each match's thoughts with their answers, by ply."""
    found: dict[str, list[tuple[AttemptRow, AttemptRow]]] = {}
    rows = sorted(records.attempts, key=lambda row: (row.match_id, row.ply, row.reply_text or ""))
    for thought, answer in zip(rows[::2], rows[1::2], strict=True):
        assert thought.request_id == f"{answer.request_id}/think"
        found.setdefault(answer.match_id, []).append((thought, answer))
    return found


def whole(tokens: int) -> int:
    """Of so many tokens those in whole blocks."""
    return tokens // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS


def test_every_move_is_legal_and_every_match_ends(records: Records) -> None:
    assert {row.state for row in records.matches} == {"finished"}
    assert [row.fault for row in records.attempts if row.fault] == []
    assert len(records.plies) == 12
    chess = load_game("chess")
    for match in records.matches:
        position = chess.position(Start(match.start_fen, match.ruleset))
        for ply in (ply for ply in records.plies if ply.match_id == match.id):
            assert ply.move in position.legal_moves()
            position = position.play(ply.move)


def test_thoughts_are_bounded_and_kept(records: Records) -> None:
    thoughts = [thought for pairs in asked(records).values() for thought, _ in pairs]
    assert len(thoughts) == 12
    assert any(thought.reasoning for thought in thoughts)
    for thought in thoughts:
        assert "</think>" not in (thought.reasoning or "")
        assert 0 < (thought.completion_tokens or 0) <= THINK_TOKENS
        assert thought.decode_s is not None


def test_prefix_hits_do_not_fall(records: Records) -> None:
    """An answer finds the prompt of its thought, and the next ply's thought that of this one."""
    for pairs in asked(records).values():
        for thought, answer in pairs:
            assert thought.prompt_tokens is not None
            assert (answer.cached_tokens or 0) >= whole(thought.prompt_tokens)
        for (before, _), (after, _) in pairwise(pairs):
            assert (after.cached_tokens or 0) >= whole((before.prompt_tokens or 0) - _TAIL_TOKENS)
