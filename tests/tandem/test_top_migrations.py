"""Migrations in `tandem top`: how many a second and how long each paused, and nothing where none was."""

from tandem.commands.top_snapshot import Page, parse
from tests.tandem.test_top_tiers import shown

METRICS = """\
# TYPE tandem_worker_migrations_committed counter
tandem_worker_migrations_committed_total {moved}
# TYPE tandem_worker_migration_pause_seconds counter
tandem_worker_migration_pause_seconds_total {paused}
"""


def test_answers_that_moved_have_a_line_with_their_rate_and_pause() -> None:
    lines = shown(parse(METRICS.format(moved=2, paused=0.1)), parse(METRICS.format(moved=6, paused=0.15)))
    assert ["migrations", "2.0/s", "paused", "12.5", "ms", "each"] in lines


def test_where_none_moved_lately_there_is_no_pause_to_tell() -> None:
    page = parse(METRICS.format(moved=2, paused=0.1))
    assert ["migrations", "0.0/s", "paused", "-", "ms", "each"] in shown(page, page)


def test_where_none_has_moved_there_is_no_line() -> None:
    page = parse(METRICS.format(moved=0, paused=0))
    assert not any(line[:1] == ["migrations"] for line in shown(page, page) + shown(Page(), Page()))
