"""What bench.handoff.kills makes of answers and pages that are not as they should be."""

import json
from typing import Any

import numpy as np

from bench.handoff.core import PageSums
from bench.handoff.kills import KillReport, lacking, others, pages_row, read_sums, rows_of, wrong_pages

WANTED = {0: 30, 1: 10, 2: 20}


class Checksums:
    def __init__(self, pages):
        self._pages = pages

    def wait(self):
        return np.array([[page, page + 1] for page in self._pages], np.uint32)


class Pool:
    """A page's checksums are its number and the next."""

    checksums = Checksums


class Layout:
    block_size = 64


class Engine:
    """What the sums of pages need of one."""

    transfer_pool, layout = Pool(), Layout()


def hand_over(folder, granted, computed=(7, 8, 9), num_tokens=150):
    """Pages 7, 8 and 9 of prefill, of which the prompt fills the first two."""
    engine: Any = Engine()
    prefill, decode = (PageSums(folder / name, engine) for name in ("prefill.jsonl", "decode.jsonl"))
    prefill.computed("r", 64, Checksums(computed[:1]).wait())
    prefill.computed("r", num_tokens - 64, Checksums(computed[1:]).wait())
    prefill.told("r")
    decode.granted("r", granted)
    decode.ended("r")
    decode.ended("another, of this worker alone")


def test_a_token_that_is_lacking_moves_no_other():
    assert lacking({1: 10, 2: 20}, 3) == [0]
    assert others({1: 10, 2: 20}, WANTED) == []


def test_a_token_that_differs_is_named():
    assert others({0: 30, 1: 11, 2: 20, 3: 5}, WANTED) == [1, 3]


def test_an_answer_that_was_cut_short_is_compared_as_far_as_it_came():
    toll = KillReport("prefill")
    toll.answer("struck", {0: 30}, WANTED)
    toll.answer("struck", {1: 10}, WANTED, is_in_order=False)
    toll.answer("new peer", {0: 30, 1: 99, 2: 98}, WANTED)
    assert (toll.answers["struck"], toll.equal["struck"], toll.lacking["struck"]) == (2, 2, 1)
    assert (toll.equal["new peer"], toll.unordered) == (0, {"struck": 1, "new peer": 0})
    assert toll.others == ["new peer: from token 1 on, 2 of 3"]


def test_pages_are_right_if_they_hold_what_was_computed(tmp_path):
    hand_over(tmp_path, granted=[7, 8, 1])  # decode has written behind the prompt's end
    row = pages_row({}, read_sums(tmp_path))
    assert (row.value, row.limit, row.params["pages"]) == (1, 1, 2)


def test_a_page_that_holds_something_else_is_named(tmp_path):
    hand_over(tmp_path, granted=[7, 5, 9])
    row = pages_row({}, read_sums(tmp_path))
    assert (row.value, row.limit, row.params["wrong"]) == (0, 1, [("r", [1])])


def test_one_plane_that_differs_makes_a_page_wrong():
    assert wrong_pages([[1, 2], [3, 4]], [[1, 2], [3, 5], [6, 7]]) == [1]


def test_a_line_that_a_killed_core_did_not_end_counts_for_nothing(tmp_path):
    whole = json.dumps(["r1", "computed", [[1]]])
    (tmp_path / "prefill-1.jsonl").write_text(f'{whole}\n["r2", "comp')
    assert read_sums(tmp_path) == {("r1", "computed"): [[1]]}


def test_pairs_that_lost_the_same_side_are_counted_together():
    total = KillReport("decode")
    for found in (WANTED, {0: 31}):
        toll = KillReport("decode", num_kills=1, num_good=1)
        toll.answer("new peer", found, WANTED)
        total.add(toll)
    survived, _, *answers = rows_of(total, {})
    assert (survived.value, survived.limit) == (2, 2)
    assert [(row.value, row.limit) for row in answers if row.params["when"] == "new peer"] == [(1, 2)]
