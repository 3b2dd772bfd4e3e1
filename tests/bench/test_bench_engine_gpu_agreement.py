"""What formats lose: perplexities of the same tokens, and how sure their ratio is."""

import math
from types import SimpleNamespace

import pytest
import torch

from bench.engine.gpu_agreement import agreement, parting_rows, perplexities


class Counting(torch.nn.Module):
    """A token's logit is itself times the number of tokens so far."""

    def __init__(self):
        super().__init__()
        self.factors = torch.nn.Parameter(torch.arange(10.0))

    def forward(self, token_ids, logits_to_keep):
        return SimpleNamespace(logits=(self.factors * token_ids.shape[1])[None, None])


def test_a_loss_is_told_by_token_with_its_error():
    rows = perplexities({"a": [-1.0, -2.0, -3.0, -2.0], "b": [-1.1, -2.1, -3.0, -2.2]})
    assert [row.params for row in rows] == [{"dtype": "b"}, *[{"dtype": "b", "above": "a"}] * 2]
    assert rows[0].value == pytest.approx(math.exp(2.1))
    assert rows[1].value == pytest.approx(100 * (math.exp(0.1) - 1))
    assert rows[2].value == pytest.approx(100 * math.sqrt(0.02 / 3 / 4))


def test_the_first_format_has_nothing_to_lose_against():
    assert [row.name for row in perplexities({"a": [-1.0, -1.0]})] == ["perplexity"]


def test_answers_agree_up_to_their_first_difference():
    same, until = agreement("x", [[1, 2, 3], [4, 5, 6]], "y", [[1, 2, 3], [4, 0, 6]])
    assert (same.value, same.unit) == (1, "of 2")
    assert until.value == 4


def test_where_answers_part_the_exact_model_says_how_near_the_two_tokens_were():
    prompts, one = [[0, 0], [0, 0], [0]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    median, largest = parting_rows(Counting(), prompts, "x", one, "y", [[1, 2, 5], [4, 5, 6], [6, 8, 9]])
    assert median.params == {"dtype": "x", "beside": "y", "answers": 2}
    assert (median.value, largest.value) == ((2 * 4 + 1 * 1) / 2, 2 * 4)


def test_of_equal_answers_nothing_is_told():
    assert not parting_rows(Counting(), [[0]], "x", [[1, 2]], "y", [[1, 2]])
