"""Naps that end when they should: Linux lets the timers of a thread be 50 us late, unless the thread says otherwise."""

import ctypes

PR_SET_TIMERSLACK = 29  # linux/prctl.h
SLACK_NS = 1000


def set_timer_slack() -> None:
    """The calling thread, from now on."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS)
