"""Drafters without weights: what they find in a text, and what they never do."""

from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.ngram import MAX_NGRAM, MIN_NGRAM, NgramProposer
from engine.speculative.proposer import Draft, Proposer
from engine.speculative.suffix import MAX_EARLIER_TOKENS, SuffixProposer
from engine.speculative.suffix_first import MIN_MATCH, SuffixFirstProposer
from tests.engine.speculative.drafting import sequence_of

TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def guess(proposer: Proposer, tokens: list[int], count: int = 4, **options) -> Draft:
    return proposer.propose([sequence_of(tokens, **options)], [count])[0]


def test_ngram_goes_on_as_the_text_went_on_where_it_ended_like_this():
    assert guess(NgramProposer(), [1, 2, 3, 4, 5, 6, 9, 1, 2]).token_ids == (3, 4, 5, 6)
    assert guess(NgramProposer(), [1, 2, 3, 4, 5, 6, 9, 1, 2], 2).token_ids == (3, 4)


def test_ngram_takes_the_longest_ending_and_of_equals_the_latest():
    longest = guess(NgramProposer(), [7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2])
    assert (longest.token_ids[0], longest.strength) == (5, 3)
    assert guess(NgramProposer(), [1, 2, 5, 1, 2, 6, 1, 2]).token_ids[0] == 6


def test_a_text_that_runs_out_is_taken_to_repeat():
    assert guess(NgramProposer(), [5, 1, 2, 1, 2], 5).token_ids == (1, 2, 1, 2, 1)
    assert guess(SuffixProposer(), [5, 1, 2, 1, 2], 5).token_ids == (1, 2, 1, 2, 1)


def test_one_token_alone_is_no_reason_to_guess():
    for proposer in (NgramProposer(), SuffixProposer()):
        assert guess(proposer, [1, 2, 3, 9, 1]).token_ids == ()
        assert guess(proposer, [1]).token_ids == ()


@given(TEXTS, st.integers(1, 6))
def test_ngram_is_what_a_plain_search_finds(tokens, count):
    expected: tuple[int, ...] = ()
    for length in range(min(MAX_NGRAM, len(tokens)), MIN_NGRAM - 1, -1):
        places = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if places:
            period = tokens[places[-1] :]
            expected = tuple((period * (count // len(period) + 1))[:count])
            break
    assert guess(NgramProposer(), tokens, count).token_ids == expected


def test_suffix_takes_what_followed_most_often():
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 9, 8, 1, 2]
    found = guess(SuffixProposer(), text, 1)
    assert found.token_ids == (3,) and found.likelihoods == (2 / 3,)


def test_suffix_prefers_a_long_ending_that_is_certain():
    text = [5, 6, 1, 2, 7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 6, 1, 2]
    assert guess(SuffixProposer(), text, 1).token_ids == (7,)


def test_suffix_remembers_answers_of_the_same_salt_alone():
    proposer = SuffixProposer()
    proposer.end_sequence(sequence_of([1, 2, 3, 4, 5], 1, cache_salt="a"))
    assert guess(proposer, [9, 2, 3], 2, cache_salt="a").token_ids == (4, 5)
    assert guess(proposer, [9, 2, 3], 2, cache_salt="b").token_ids == ()
    assert guess(proposer, [9, 8, 2, 3], 3, cache_salt="a").token_ids == (4, 5), "nothing is known behind its end"


def test_suffix_draws_no_line_from_one_answer_to_the_next():
    proposer = SuffixProposer()
    for answer in ([2, 3, 4], [5, 6, 7]):
        proposer.end_sequence(sequence_of([1, *answer], 1))
    assert guess(proposer, [9, 3, 4], 3).token_ids == ()


def test_suffix_keeps_a_bounded_text():
    proposer = SuffixProposer()
    for first in range(0, 3 * MAX_EARLIER_TOKENS, 1000):
        proposer.end_sequence(sequence_of(list(range(first, first + 1000)), 0))
    last = 3 * MAX_EARLIER_TOKENS // 1000 * 1000
    assert guess(proposer, [last + 1, last + 2], 1).token_ids == (last + 3,)
    assert guess(proposer, [1, 2], 1).token_ids == ()


@given(TEXTS, st.lists(TEXTS, max_size=3), st.integers(1, 6))
def test_every_guess_of_suffix_occurred_behind_such_an_ending(tokens, earlier, count):
    proposer = SuffixProposer()
    for text in earlier:
        proposer.end_sequence(sequence_of(text, 0))
    found = guess(proposer, tokens, count)
    assert len(found) <= count and len(found.likelihoods) == len(found)
    if found:
        run = [*tokens[-found.strength :], found.token_ids[0]]
        assert any(
            text[at : at + len(run)] == run
            for text in (*earlier, [*tokens, found.token_ids[0]])
            for at in range(len(text))
        )


class HeadOfNines(Proposer):
    """Guesses nines of every answer that it is asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, sequences, num_tokens) -> list[Draft]:
        self.num_asked += len(sequences)
        return [Draft((9,) * count, 1) for count in num_tokens]

    def end_sequence(self, sequence) -> None:
        """It keeps nothing."""


def test_a_head_is_asked_for_the_answers_alone_whose_text_says_little():
    head = HeadOfNines()
    copied = list(range(20, 20 + MIN_MATCH))
    texts = [[*copied, 7, 8, 9, *copied], [1, 2, 3, 4, 1, 2], [1, 2, 3]]
    drafts = SuffixFirstProposer(head).propose([sequence_of(text) for text in texts], [3, 2, 1])
    assert [draft.token_ids for draft in drafts] == [(7, 8, 9), (9, 9), (9,)]
    assert head.num_asked == 2
