"""What is said of something that fails again and again."""

import logging

from service.outage_log import OutageLog

log = logging.getLogger("outage")


def test_its_begin_and_its_end_are_said_once_each(caplog):
    outage = OutageLog(log, "it is there again")
    outage.worked()
    for attempt in ("first", "second"):
        outage.failed(f"it is gone, says the {attempt}")
    assert outage.is_on
    for _ in range(2):
        outage.worked()
    outage.failed("gone once more")
    said = ["it is gone, says the first", "it is there again", "gone once more"]
    assert [record.getMessage() for record in caplog.records] == said


def test_what_fails_in_another_way_is_said_though_nothing_worked_between(caplog):
    outage = OutageLog(log, "it is there again")
    for words, kind in (
        ("it is gone", ""),
        ("it is read-only", "refuses"),
        ("still read-only", "refuses"),
        ("gone", ""),
    ):
        outage.failed(words, kind)
    outage.worked()
    assert [record.getMessage() for record in caplog.records] == ["it is gone", "it is read-only", "it is there again"]


def test_an_end_that_is_no_news_is_not_said(caplog):
    outage = OutageLog(log)
    outage.failed("it is gone")
    outage.worked()
    assert not outage.is_on and len(caplog.records) == 1
