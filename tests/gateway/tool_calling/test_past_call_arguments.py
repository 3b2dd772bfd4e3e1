"""Arguments of calls that a client sends back: whole, cut anywhere, or no JSON at all."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tool_calling.past_call_arguments import arguments_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans(), st.data())
def test_what_was_cut_is_closed_where_it_was_cut(value: dict[str, Any], is_ascii: bool, data: st.DataObject):
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert arguments_of(text) == value
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    shown = arguments_of(cut)
    assert "raw" not in shown or "raw" in value
    assert list(shown)[:-1] == list(value)[: max(len(shown) - 1, 0)], "only the last name may be another"
    assert all(shown[name] == value[name] for name in list(shown)[:-1])


@pytest.mark.parametrize(
    ("cut", "shown"),
    [
        ("", {}),
        ("{", {}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Par\\u00e9\\ud83d', {"city": "Paré"}),
        ('{"city": "a\\\\', {"city": "a\\"}),
        ('{"city": "a\\', {"city": "a"}),
        ('{"city": "Paris", "da', {"city": "Paris", "da": None}),
        ('{"city": "Paris", "', {"city": "Paris"}),
        ('{"days": -', {"days": None}),
        ('{"days": [1.5e', {"days": [1.5]}),
        ('{"soon": tr', {"soon": True}),
        ('{"a": {"b": [{"c": "d', {"a": {"b": [{"c": "d"}]}}),
    ],
)
def test_a_cut(cut: str, shown: dict[str, Any]):
    assert arguments_of(cut) == shown
