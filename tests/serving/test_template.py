"""Prompts grow only at the end, on the packaged model's real tokenizer."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from serving import ModelTemplate, PromptParts, TemplateError, load_template
from serving.template import TEMPLATE_DATE, ChatTemplate

pytestmark = pytest.mark.timeout(240)

SQUARES = [f"{file}{rank}" for file in "abcdefghi" for rank in range(1, 11)]
MOVES = st.builds(lambda a, b: a + b, st.sampled_from(SQUARES), st.sampled_from(SQUARES))
MOVES = st.one_of(MOVES, st.sampled_from(["pass", "e7e8q", "a7a8n"]))
LEADS = st.sampled_from(["Moves:", "Answer with MOVE: <move>.\n\nMoves so far:"])
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_chat(template: ModelTemplate, source: str, **tokens: str) -> ModelTemplate:
    """The packaged tokenizer under another chat template."""
    return ModelTemplate(template._tokenizer, ChatTemplate(source, tokens))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(MOVES, min_size=1, max_size=40),
    lead=LEADS,
    persona=st.sampled_from(["", "Be bold."]),
)
def test_each_prompt_is_the_last_one_plus_a_move_before_the_same_tail(
    template: ModelTemplate, moves: list[str], lead: str, persona: str
) -> None:
    prompts = [
        list(template.render(PromptParts("Rules of it.", persona, lead, tuple(moves[:k]))).ids)
        for k in range(len(moves) + 1)
    ]
    tail = list(template.encode("<|im_end|>\n<|im_start|>assistant\n"))
    for before, after in pairwise(prompts):
        assert before[-len(tail) :] == after[-len(tail) :] == tail
        kept = before[: -len(tail)]
        assert after[: len(kept)] == kept
        assert 1 <= len(after) - len(before) <= 7


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(MOVES, max_size=30), lead=LEADS)
def test_ids_are_those_of_the_whole_text(
    template: ModelTemplate, moves: list[str], lead: str
) -> None:
    parts = PromptParts("Rules of it.", "Be bold.", lead, tuple(moves))
    assert list(template.render(parts).ids) == template.encode(template.text(parts))
    assert template.check(parts) is None


def test_the_cache_of_bodies_changes_nothing(template: ModelTemplate) -> None:
    moves = tuple(f"e{k % 8 + 1}e{k % 7 + 1}" for k in range(50))
    parts = PromptParts("Rules.", "", "Moves:", moves)
    fresh = ModelTemplate(template._tokenizer, template._chat)
    grown = ModelTemplate(template._tokenizer, template._chat)
    for k in range(len(moves) + 1):
        grown.render(PromptParts("Rules.", "", "Moves:", moves[:k]))
    assert fresh.render(parts).ids == grown.render(parts).ids


def test_the_cache_of_bodies_is_bounded(
    template: ModelTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.template._BODY_TOKENS_KEPT", 500)
    bounded = ModelTemplate(template._tokenizer, template._chat)
    for k in range(1, 60):
        bounded.render(PromptParts("Rules.", "", "Moves:", ("e2e4",) * k))
    assert bounded._body_tokens <= 500
    assert bounded._body_tokens == sum(map(len, bounded._bodies.values()))


def test_a_note_stands_after_the_moves_and_leaves_with_the_next_ply(
    template: ModelTemplate,
) -> None:
    said = PromptParts("Rules.", "", "Moves:", ("e2e4",), tail_note="e9e9 is no move.")
    assert "Moves: e2e4\ne9e9 is no move.<|im_end|>" in template.text(said)
    assert list(template.render(said).ids) == template.encode(template.text(said))
    silent = PromptParts("Rules.", "", "Moves:", ("e2e4", "e7e5"))
    assert "no move" not in template.decode(template.render(silent).ids)


def test_prompts_of_one_game_share_the_rules_whatever_the_persona(template: ModelTemplate) -> None:
    plain = template.render(PromptParts("The rules. " * 20, "", "Moves:", ()))
    bold = template.render(PromptParts("The rules. " * 20, "Be bold.", "Moves:", ()))
    rules = len(template.encode("<|im_start|>system\n" + "The rules. " * 19))
    assert plain.ids[:rules] == bold.ids[:rules]


def test_a_template_without_a_system_role_gets_the_rules_in_the_user_message(
    template: ModelTemplate, parts: PromptParts
) -> None:
    refusing = CHATML.replace(
        "{% for",
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{% for",
        1,
    )
    text = with_chat(template, refusing).text(parts)
    assert text.startswith("<|im_start|>user\nYou play chess. Answer with a move.\n\nMoves so far:")
    assert with_chat(template, refusing).check(parts) is None
    dropping = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}")
    assert "You play chess." in with_chat(template, dropping).text(parts)


def test_an_open_think_is_closed(template: ModelTemplate, parts: PromptParts) -> None:
    opened = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    changed = with_chat(template, opened)
    assert changed.text(parts).endswith("assistant\n<think>\n\n</think>\n\n")
    assert changed.check(parts) is None
    assert changed.decode(changed.open_thought(parts).ids).endswith("assistant\n<think>\n")
    obedient = CHATML.replace(
        "assistant\n{% endif",
        "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif",
    )
    assert with_chat(template, obedient).text(parts).count("</think>") == 1


SOURCES = {
    "that knows no thoughts": CHATML,
    "that opens them": CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
    "that asks whether to": CHATML.replace(
        "assistant\n{% endif",
        "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif",
    ),
}
"""Of SmolLM2's, DeepSeek-R1's and Qwen3's kind."""


@pytest.mark.parametrize("source", SOURCES)
def test_a_thought_is_opened_and_closed_by_force_in_any_template(
    template: ModelTemplate, parts: PromptParts, source: str
) -> None:
    changed = with_chat(template, SOURCES[source])
    opened = list(changed.open_thought(parts).ids)
    assert changed.decode(opened).endswith("\nassistant\n<think>\n")
    assert changed.decode(opened).count("think>") == 1
    closed = list(changed.close_thought(parts, "Knights first.", 100).ids)
    assert closed[: len(opened)] == opened
    assert changed.decode(closed).endswith("<think>\nKnights first.\n</think>\n\n")
    assert changed.decode(list(changed.render(parts).ids)).count("<think>") in (0, 1)
    assert not changed.decode(list(changed.render(parts).ids)).endswith("<think>\n")


def test_a_thought_takes_no_more_tokens_than_it_may(
    template: ModelTemplate, parts: PromptParts
) -> None:
    none = len(template.close_thought(parts, "", 0).ids)
    assert len(template.close_thought(parts, "no end of it " * 50, 20).ids) == none + 20
    # a byte that is no character comes back as three
    assert len(template.close_thought(parts, "\ufffd" * 50, 20).ids) == none + 20


def test_a_thought_of_one_ply_is_not_in_the_next_ones_prompt(
    template: ModelTemplate, parts: PromptParts
) -> None:
    longer = PromptParts(parts.system, parts.persona, parts.lead, (*parts.moves, "a7a6"))
    before, after = template.open_thought(parts).ids, template.open_thought(longer).ids
    tail = len(template.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n"))
    assert list(after[: len(before) - tail]) == list(before[:-tail])
    template.close_thought(parts, "Knights first.", 100)
    assert template.open_thought(longer).ids == after


def test_a_date_is_the_same_every_day(template: ModelTemplate, parts: PromptParts) -> None:
    dated = "Today: {{ strftime_now('%d %b %Y') }}\n" + CHATML
    changed = with_chat(template, dated)
    assert TEMPLATE_DATE.strftime("Today: %d %b %Y") in changed.text(parts)
    assert changed.check(parts) is None


def test_a_template_that_counts_the_moves_is_named_with_the_first_differing_token(
    template: ModelTemplate, parts: PromptParts
) -> None:
    counting = "{{ messages[-1]['content'] | length }} " + CHATML
    sentence = with_chat(template, counting).check(parts)
    assert sentence is not None
    assert "\n" not in sentence
    assert "token 0 is" in sentence or "token 1 is" in sentence


def test_a_template_that_rewrites_the_message_is_refused(
    template: ModelTemplate, parts: PromptParts
) -> None:
    rewriting = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    sentence = with_chat(template, rewriting).check(parts)
    assert sentence == "the chat template does not keep the user's message as it is"
    with pytest.raises(TemplateError, match="does not keep"):
        with_chat(template, rewriting).render(parts)


def test_stripping_changes_nothing(template: ModelTemplate, parts: PromptParts) -> None:
    stripping = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    padded = PromptParts(" Rules.\n", "", " Moves:\n", parts.moves)
    assert with_chat(template, stripping).check(padded) is None


def test_special_tokens_reach_the_template(template: ModelTemplate, parts: PromptParts) -> None:
    changed = with_chat(template, "{{ bos_token }}" + CHATML, bos_token="<|endoftext|>")
    assert list(changed.render(parts).ids)[:2] == template.encode("<|endoftext|><|im_start|>")


def test_a_template_cannot_reach_the_machine(template: ModelTemplate, parts: PromptParts) -> None:
    sentence = with_chat(template, "{{ messages.__class__.__mro__ }}" + CHATML).check(parts)
    assert sentence is not None
    assert "refuses" in sentence


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json:"),
        ({"tokenizer.json": None}, "no chat template"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json:"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "cannot be read"),
    ],
)
def test_what_a_directory_lacks_is_named(
    tmp_path: Path, files: dict[str, str | None], said: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(tiny_tokenizer() if content is None else content)
    with pytest.raises(TemplateError, match=said):
        load_template(tmp_path)


def test_a_list_of_templates_gives_the_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    tokens = {"bos_token": {"content": "<s>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    text = load_template(tmp_path).text(PromptParts("S", "", "U", ()))
    assert text.startswith("<|im_start|>system\nS<|im_end|>")


def test_a_sentencepiece_style_tokenizer_keeps_its_old_ids(tmp_path: Path) -> None:
    """It puts a mark before the first word of a text, which must not come before every move."""
    vocabulary = {
        piece: n for n, piece in enumerate(["<unk>", "▁", "▁e", *"abcdefgh12345678:Mov▁sn.R"])
    }
    merges = [("▁", "e")]
    pieces = ["<unk>", "▁", "▁e", *sorted(set("abcdefgh12345678:MovsnR"))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    changed = ModelTemplate(tokenizer, ChatTemplate("{{ messages[-1]['content'] }}\n", {}))
    parts = PromptParts("R", "", "Moves:", ("e2e4", "e7e5"))
    move = changed._add_move("e2e4")
    assert [tokenizer.id_to_token(i) for i in move] == ["▁e", "2", "e", "4"]
    assert changed.check(parts) is None


def tiny_tokenizer() -> str:
    return Tokenizer(models.BPE({"a": 0}, [])).to_str()
