"""JSON on a terminal: the same values, and nothing that steers the terminal."""

import json

from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.cli.options import escaped_json


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_an_escaped_document_says_the_same_and_steers_nothing(value: object) -> None:
    written = escaped_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(written) == value
    assert not {"\u202e", "\u200f", "\u2066", "\x9b"} & set(written)


def test_control_and_direction_characters_are_escaped_and_text_is_not() -> None:
    steering = "\x7f\x9b\u202e\u2066\u200f\u061c\ufeff\U000e0041"
    written = escaped_json(json.dumps(f"größer 🙂 {steering}", ensure_ascii=False))
    assert written == '"größer 🙂 \\u007f\\u009b\\u202e\\u2066\\u200f\\u061c\\ufeff\\udb40\\udc41"'
