"""Speculative decoding in `tandem top`: drafts a second and what a step with one gives, and nothing where it is off."""

from tandem.commands.top_snapshot import Page, parse
from tests.tandem.test_top_tiers import shown

METRICS = """\
# TYPE tandem_worker_drafts counter
tandem_worker_drafts_total {drafts}
# TYPE tandem_worker_accepted_tokens counter
tandem_worker_accepted_tokens_total{{position="0"}} {first}
tandem_worker_accepted_tokens_total{{position="1"}} {second}
"""


def test_drafts_have_a_line_with_their_rate_and_the_tokens_of_a_step() -> None:
    before, after = METRICS.format(drafts=2, first=1, second=0), METRICS.format(drafts=6, first=4, second=2)
    line = ["drafts", "2.0/s", "2.25", "tokens", "a", "step", "with", "one"]
    assert line in shown(parse(before), parse(after))


def test_where_nothing_was_drafted_there_is_no_line() -> None:
    page = parse(METRICS.format(drafts=0, first=0, second=0))
    assert not any(line[:1] == ["drafts"] for line in shown(page, page) + shown(Page(), Page()))
