"""Pure parts by property: detokenizer, stop strings, sequencer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.gguf.tokenizer import build_tokenizer
from contracts.events import Failed, Finished, FinishReason, Prefilled, PromptScored, PromptToken, Token, Tokens
from contracts.ids import Epoch, RequestId
from gateway.generation.token_sequencer import MAX_GAP, Sequencer
from gateway.tokenization.detokenizer import Detokenizer
from gateway.tokenization.stop_strings import StopFinder

R = RequestId("r")
PIECES = st.lists(st.text("ab<|", max_size=4), max_size=20)
STOPS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], include: bool, least: int = 0) -> str:
    for end in range(least + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end if include else end - len(max(hits, key=len))]
    return text


@given(PIECES, STOPS, st.booleans(), st.integers(0, 4))
@settings(max_examples=500)
def test_joined_pieces_are_the_text_cut_at_the_stop(pieces, stops, include, num_first):
    """None is complete in the first pieces: it may begin there."""
    finder = StopFinder(stops, include)
    shown = [finder.push(piece, may_end=at >= num_first) for at, piece in enumerate(pieces)]
    least = len("".join(pieces[:num_first]))
    assert "".join([*shown, finder.flush()]) == cut("".join(pieces), stops, include, least)


@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 400), max_size=40), skip=st.booleans())
@settings(max_examples=300)
def test_joined_deltas_are_the_whole_decoding(tokenizer, ids, skip):
    text = Detokenizer(tokenizer, skip)
    assert "".join([text.push(i) for i in ids] + [text.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["a\ufffd", "\ufffd", "\ufffd\ufffd\ufffdx", "日本\ufffd\ufffd", "\ufffd日\ufffd本"])
def test_a_replacement_character_of_the_answers_own_is_shown(tokenizer, text):
    """The library's stream holds one back for as long as it may be half of a character, also at the end."""
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


PIECES_OF_TEXT = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "▁a", "ab", "▁ab", "▁ca"]
KINDS = {"<unk>": 2, "<s>": 3} | {piece: 6 for piece in PIECES_OF_TEXT[2:258]}


@pytest.fixture(scope="module")
def sentencepiece():
    ggml = {
        "model": "llama",
        "tokens": PIECES_OF_TEXT,
        "scores": [-float(at) for at in range(len(PIECES_OF_TEXT))],
        "token_type": [KINDS.get(piece, 1) for piece in PIECES_OF_TEXT],
        "bos_token_id": 1,
    }
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in ggml.items()})


def ids_of(*parts: str | bytes) -> list[int]:
    return [
        at
        for part in parts
        for at in ([PIECES_OF_TEXT.index(part)] if isinstance(part, str) else map((2).__add__, part))
    ]


def shown(tokenizer, ids: list[int], before: list[int]) -> str:
    text = Detokenizer(tokenizer, before=before)
    return "".join([text.push(token_id) for token_id in ids] + [text.flush()])


@given(text=st.text("ab c日é\n", max_size=12), at=st.integers(0, 20))
@settings(max_examples=300)
def test_a_text_goes_on_where_another_ends(sentencepiece, text, at):
    """SentencePiece begins a text without the space that its first token has."""
    whole = sentencepiece.encode(text).ids
    before, after = whole[: at + 1], whole[at + 1 :]
    said = sentencepiece.decode(before)
    if "\ufffd" not in said:
        assert said + shown(sentencepiece, after, before[-1:]) == text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (ids_of("日".encode(), b"\xe6", "a", "▁ab"), "日\ufffda ab"),
        (ids_of(b"\n\xe6", "▁a", b"\xff", "b"), "\n\ufffd a\ufffdb"),
        (ids_of("日".encode(), "日".encode()[:2]), "日\ufffd\ufffd"),
    ],
)
def test_bytes_that_are_no_character_change_nothing_that_was_shown(sentencepiece, ids, text):
    assert shown(sentencepiece, ids, []) == text


@given(
    ids=st.lists(st.integers(0, len(PIECES_OF_TEXT) - 1), max_size=30), before=st.integers(0, len(PIECES_OF_TEXT) - 1)
)
@settings(max_examples=300)
def test_any_tokens_are_text(sentencepiece, ids, before):
    text = shown(sentencepiece, ids, [before])
    assert isinstance(text, str) and not any("\ud800" <= character <= "\udfff" for character in text)


@st.composite
def deliveries(draw):
    """All events of an answer, shuffled, doubled, and mixed with those of a dead attempt and of one to come."""
    total = draw(st.integers(1, 12))
    events = [Tokens(R, Epoch(2), [Token(i, i)]) for i in range(total)]
    events += [Prefilled(R, Epoch(2), 0, {}), Finished(R, Epoch(2), total, FinishReason.LENGTH, {})]
    stale = [Tokens(R, Epoch(epoch), [Token(i, 99)]) for epoch in (1, 3) for i in range(3)]
    stale += [Failed(R, Epoch(1), "x", "old")]
    extra = draw(st.lists(st.sampled_from(events + stale), max_size=10))
    return total, draw(st.permutations(events + extra))


@given(deliveries())
@settings(max_examples=500)
def test_any_delivery_gives_each_token_once_in_order_and_one_end(delivery):
    total, events = delivery
    sequencer = Sequencer(Epoch(2))
    out = [item for event in events for item in sequencer.feed(event)]
    assert [item.token_id for item in out if isinstance(item, Token)] == list(range(total))
    assert [type(item) for item in out if isinstance(item, Finished | Failed)] == [Finished]
    assert isinstance([item for item in out if not isinstance(item, Prefilled)][-1], Finished)
    accepted = sum(isinstance(item, Token | Finished | Prefilled) for item in out)
    assert accepted + sequencer.num_stale + sequencer.num_duplicates == len(events)


@pytest.mark.parametrize("num_answered", [0, 3])
def test_the_first_token_may_come_after_all_others(num_answered):
    """Prefill's stream stood still for a second, decode's did not."""
    sequencer = Sequencer()
    sequencer.feed(Tokens(R, Epoch(1), [Token(i, i) for i in range(num_answered)]))
    sequencer.restart(Epoch(2))
    for index in range(num_answered + 1, 1000):
        assert sequencer.feed(Tokens(R, Epoch(2), [Token(index, index)])) == []
    assert sequencer.feed(Finished(R, Epoch(2), 1000, FinishReason.LENGTH, {})) == []
    *tokens, end = sequencer.feed(Tokens(R, Epoch(2), [Token(num_answered, num_answered)]))
    assert [token.index for token in tokens if isinstance(token, Token)] == list(range(num_answered, 1000))
    assert isinstance(end, Finished)


def test_a_token_that_is_missing_in_between_is_a_failure():
    sequencer = Sequencer()
    sequencer.feed(Tokens(R, Epoch(1), [Token(0, 0)]))
    (failed,) = sequencer.feed(Tokens(R, Epoch(1), [Token(2 + MAX_GAP, 0)]))
    assert isinstance(failed, Failed) and "token 1 is missing" in failed.message
    assert sequencer.feed(Tokens(R, Epoch(1), [Token(1, 0)])) == []


def finished(num_tokens: int, epoch: int = 1) -> Finished:
    return Finished(R, Epoch(epoch), num_tokens, FinishReason.LENGTH, {})


def test_nothing_is_shown_behind_the_end_that_was_told_before_it():
    sequencer = Sequencer()
    assert sequencer.feed(finished(2)) == []
    tokens = [Token(i, i) for i in range(3)]
    assert sequencer.feed(Tokens(R, Epoch(1), tokens)) == [*tokens[:2], finished(2)]


def test_an_end_before_what_was_shown_is_a_failure():
    sequencer = Sequencer()
    sequencer.feed(Tokens(R, Epoch(1), [Token(i, i) for i in range(3)]))
    (failed,) = sequencer.feed(finished(2))
    assert isinstance(failed, Failed) and "have 2 tokens, 3 came" in failed.message
    assert sequencer.ended


def test_the_end_of_a_former_attempt_is_not_that_of_the_next():
    sequencer = Sequencer()
    sequencer.feed(Tokens(R, Epoch(1), [Token(0, 0), Token(2, 2)]))
    sequencer.feed(finished(3))
    sequencer.restart(Epoch(2))
    tokens = [Token(i, i) for i in range(1, 5)]
    assert sequencer.feed(Tokens(R, Epoch(2), tokens)) == tokens
    assert sequencer.feed(finished(5, epoch=2)) == [finished(5, epoch=2)]


def scored(first: int, count: int, epoch: int = 1) -> PromptScored:
    return PromptScored(R, Epoch(epoch), first, [PromptToken(first + i, -1.0, 1, []) for i in range(count)])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_parts_of_a_scored_prompt_count_once_and_in_order(sizes, data):
    sequencer, firsts = Sequencer(), [1 + sum(sizes[:index]) for index in range(len(sizes))]
    parts = [scored(first, size) for first, size in zip(firsts, sizes, strict=True)]
    out = []
    for index, part in enumerate(parts):
        again = data.draw(st.lists(st.sampled_from(parts[: index + 1]), max_size=2))
        stale = scored(1, 3, epoch=7)
        out += [item for event in (part, *again, stale) for item in sequencer.feed(event)]
    assert out == parts


def test_a_part_of_a_scored_prompt_that_is_missing_is_a_failure():
    sequencer = Sequencer()
    sequencer.feed(scored(1, 4))
    (failed,) = sequencer.feed(scored(6, 1))
    assert isinstance(failed, Failed) and "6 of the prompt came, 5 is missing" in failed.message
    assert sequencer.feed(scored(5, 1)) == []


def test_a_new_attempt_scores_the_prompt_anew():
    sequencer = Sequencer()
    sequencer.feed(scored(1, 4))
    sequencer.restart(Epoch(2))
    assert sequencer.feed(scored(1, 2, epoch=2)) == [scored(1, 2, epoch=2)]
