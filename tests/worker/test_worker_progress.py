"""What the log of a worker says while its model loads."""

from worker.front.progress_log import PERIOD_S, ProgressLog


def lines(*reports: tuple[float, str, int, int]) -> list[str]:
    log = ProgressLog()
    return [line for at_s, stage, done, total in reports if (line := log.line(stage, done, total, at_s))]


def test_a_long_stage_is_told_by_its_share_and_not_too_often():
    """60 layers of 1.4 s, as a Q4_K_M file was widened on a busy machine."""
    found = lines(*((1.4 * layer, "load", layer, 60) for layer in range(61)))
    assert found[0] == "load: 0 of 60 (0 %)" and found[-1] == "load: 60 of 60 (100 %)"
    assert 60 * 1.4 / (PERIOD_S + 1.4) - 1 <= len(found) <= 60 * 1.4 / PERIOD_S + 1


def test_each_stage_is_told_as_it_begins_and_a_quick_one_once():
    found = lines(
        (0.0, "resolve", 0, 1), (0.1, "resolve", 1, 1), (0.1, "probe", 0, 1), (0.2, "load", 0, 2), (0.3, "load", 1, 2),
        (0.4, "load", 2, 2),
    )  # fmt: skip
    assert found == ["resolve", "probe", "load: 0 of 2 (0 %)"]


def test_a_stage_of_unknown_length_is_named():
    assert lines((0.0, "download", 0, 0), (1.0, "download", 0, 0), (9.0, "download", 0, 0)) == ["download"] * 2
