"""What staging may take of a device, whatever links come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import TransferError
from kv_transfer.transports.staging_budget import NUM_SLOTS, STAGING_NBYTES, Allowance

MIB = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200 * MIB)), max_size=40), st.integers(1, 16 * MIB))
def test_links_never_take_more_than_there_is(steps: list[tuple[bool, int]], unit_nbytes: int) -> None:
    allowance, taken = Allowance(), []
    for takes, most_nbytes in steps:
        try:
            if takes:
                taken.append(allowance.take(unit_nbytes, most_nbytes))
                assert taken[-1] % unit_nbytes == 0 and taken[-1] <= max(most_nbytes, unit_nbytes)
            elif taken:
                allowance.give_back(taken.pop())
        except TransferError:
            assert STAGING_NBYTES - NUM_SLOTS * sum(taken) < NUM_SLOTS * unit_nbytes
        assert NUM_SLOTS * sum(taken) <= STAGING_NBYTES


def test_eight_links_of_a_model_of_8b_fit_and_a_ninth_is_told_why_not() -> None:
    allowance = Allowance()
    assert [allowance.take(4 * MIB) // MIB for _ in range(8)] == [64, 64, 64, 32, 16, 8, 4, 4]
    with pytest.raises(TransferError, match="the links there are have left 0"):
        allowance.take(4 * MIB)
