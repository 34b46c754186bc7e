"""What a prompt says, and that nothing that changes stands before what stays."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import PROMPT_VERSION, ContextNeed, system_prompt
from agents.prompt import (
    COMPLAINT_BYTES,
    base_ply,
    complaint,
    lead,
    longest_move_tokens,
    prefix_tokens,
    sample_game,
)
from serving import PromptParts
from tests.agents.fakes import CharTemplate, grid
from tests.examples.own_game import EMPTY, NoughtsAndCrosses

JANGGI_RULESETS = ("janggi", "janggimodern", "janggicasual", "janggitraditional")
TEXTS = {
    (game, ruleset): system_prompt(game, ruleset)
    for game, rulesets in (("chess", ("standard", "chess960")), ("janggi", JANGGI_RULESETS))
    for ruleset in rulesets
}


def test_a_changed_text_has_a_new_version() -> None:
    """Records name the version: change a text, add one to PROMPT_VERSION, then this digest."""
    texts = [*TEXTS.values(), system_prompt("go", ""), lead("constrained", "F"), lead("free", "F")]
    texts += [lead("constrained", None), lead("free", None), complaint("why", "what")]
    digest = blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()
    assert (PROMPT_VERSION, digest) == (1, "5388bd7434a36212")


def test_every_rule_set_has_its_own_text() -> None:
    assert len(set(TEXTS.values())) == len(TEXTS)
    assert not any("{" in text or "}" in text for text in TEXTS.values())


def test_janggi_is_told_what_models_get_wrong() -> None:
    text = TEXTS["janggi", "janggi"]
    for needed in ("pass", "Two passes", "Bikjang", "no river", "diagonal", "exactly one piece",
                   "two diagonally", "73.5 to 72", "never back", "swapped"):  # fmt: skip
        assert needed in text


@pytest.mark.parametrize("ruleset", JANGGI_RULESETS)
def test_janggi_rule_sets_differ_where_the_rules_do(ruleset: str) -> None:
    text = TEXTS["janggi", ruleset]
    assert ("Bikjang" in text) == (ruleset in ("janggi", "janggitraditional"))
    assert ("on points" in text) == (ruleset in ("janggi", "janggimodern"))
    assert ("to and fro" in text) == (ruleset == "janggimodern")


def test_chess960_is_told_its_castling() -> None:
    assert "e1h1" in TEXTS["chess", "chess960"]
    assert "e1g1" in TEXTS["chess", "standard"]


def test_an_unknown_game_is_named() -> None:
    assert "noughts-and-crosses" in system_prompt("noughts-and-crosses", "standard")


def test_the_position_is_told_only_where_it_is_not_the_usual_one() -> None:
    assert "FEN" not in lead("constrained", None)
    assert "x.o...... x" in lead("free", "x.o...... x")
    assert "MOVE: <move>" in lead("free", None)


@given(st.integers(0, 2000), st.integers(1, 300))
def test_a_rebased_transcript_fits_and_keeps_history(ply: int, window: int) -> None:
    base = base_ply(ply, window)
    assert 0 <= base <= ply
    assert ply - base <= window
    if base:
        assert ply - base > window - max(1, window // 2)


@given(st.integers(2, 300))
def test_rebasing_is_rare(window: int) -> None:
    bases = [base_ply(ply, window) for ply in range(10 * window)]
    assert bases == sorted(bases)
    assert len(set(bases)) <= 10 * window // (window // 2)


def test_no_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 moves"):
        base_ply(5, 0)


@given(st.text(), st.text())
def test_a_complaint_is_short_and_asks_for_the_form(detail: str, answer: str) -> None:
    note = complaint(detail, answer)
    assert len(note.encode()) <= COMPLAINT_BYTES
    assert note.endswith("MOVE: <move>")
    assert "<|" not in note


def test_a_complaint_says_what_was_wrong_and_how_the_answer_ended() -> None:
    note = complaint("e5 is illegal: it is taken", "I think\nMOVE: e5")
    assert "e5 is illegal: it is taken" in note
    assert "It ended: I think MOVE: e5" in note


def test_the_sample_game_is_always_the_same() -> None:
    assert sample_game(grid(), 12) == sample_game(grid(), 12)
    assert len(sample_game(grid(), 4)) == 4


def test_measures_on_the_template() -> None:
    game, template = NoughtsAndCrosses(), CharTemplate()
    start = game.openings("start", "standard")[0]
    parts = PromptParts("system", "persona", lead("constrained", None), ())
    assert longest_move_tokens(template, parts, game, start) == len(" a1")
    plain = template.count_tokens(parts)
    assert prefix_tokens(template, parts, "constrained", start) > plain + 2 * len(EMPTY)


def test_context_need_has_both_numbers() -> None:
    need = ContextNeed(prefix_tokens=100, move_tokens=6, answer_tokens=7, context_tokens=200)
    assert need.window == 15
    assert need.refusal(15) is None
    refusal = need.refusal(16)
    assert refusal is not None
    assert "203 tokens" in refusal
    assert "context_tokens is 200" in refusal
    assert "raise context_tokens to 203, or lower max_plies to 15" in refusal
    assert "\n" not in refusal


def test_a_game_without_a_cap_needs_room_to_rebase() -> None:
    assert ContextNeed(100, 6, 7, 200).refusal(None) is None
    assert ContextNeed(100, 6, 7, 120).refusal(None) is not None
