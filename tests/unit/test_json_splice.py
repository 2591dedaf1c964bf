"""Editing JSON text: the same as parsing and changing the values, with every other byte as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.text.json_splice import EVERY, Hidden, Splicer, set_members

NAMES = ("choices", "token_ids", "logprobs", "delta", "message", "a", 'x"token_ids":1', "é", "*")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(['"token_ids": [1]', '\\"token_ids\\":', "token_ids", "]}", '{"logprobs":null}']),
    st.lists(st.integers(), max_size=4),
)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)),
    max_leaves=25,
)
STEPS = st.sampled_from(("choices", "token_ids", "logprobs", "delta", "a", "é", EVERY))
RULES = st.lists(
    st.builds(
        Hidden,
        st.lists(STEPS, min_size=1, max_size=3).map(
            lambda steps: (*steps[:-1], steps[-1] if steps[-1] != EVERY else "a")
        ),
        st.booleans(),
        st.just("null"),
    ),
    max_size=5,
    # Of two rules for one place only one can hold.
    unique_by=lambda rule: rule.path,
)
WRITINGS = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"indent": 1},
        {"ensure_ascii": False},
        {"separators": (" ,\t", " :\n ")},
    ]
)


def hidden(value: Any, rules: list[Hidden], path: tuple[str, ...] = ()) -> Any:
    """The obvious way: walk the parsed value."""
    if isinstance(value, list):
        return [hidden(item, rules, (*path, EVERY)) for item in value]
    if not isinstance(value, dict):
        return value
    ends = {rule.path: rule.cut for rule in rules}
    changed: dict[str, Any] = {}
    for key, member in value.items():
        here = (*path, key)
        # The step for arrays is no name of a member.
        if key != EVERY and here in ends:
            if not ends[here]:
                changed[key] = None
        else:
            changed[key] = member if key == EVERY else hidden(member, rules, here)
    return changed


@given(document=DOCUMENTS, rules=RULES, writing=WRITINGS)
def test_hiding_in_the_text_is_hiding_in_the_value(document: Any, rules: list[Hidden], writing: dict[str, Any]) -> None:
    text = json.dumps(document, **writing).encode()
    assert json.loads(Splicer(rules).hide(text)) == hidden(document, rules)


@given(document=DOCUMENTS, writing=WRITINGS)
def test_text_in_which_nothing_is_hidden_stays_the_same_object(document: Any, writing: dict[str, Any]) -> None:
    text = json.dumps(document, **writing).encode()
    assert Splicer([Hidden.at("nowhere.*.at_all")]).hide(text) is text


def test_every_byte_beside_the_value_stays() -> None:
    text = b' { "n" : 1e2 , "choices":[ {"token_ids" : [1, 2 ,\n3], "t":"\\u00e9\\/ token_ids\\": [4]"} ] , "x":0.10 } '
    shown = Splicer([Hidden.at("choices.*.token_ids")]).hide(text)
    assert shown == text.replace(b"[1, 2 ,\n3]", b"null")


def test_a_key_is_found_however_it_is_escaped_and_however_often_it_is_there() -> None:
    text = b'{"token\\u005fids":[1],"a":2,"token_ids":[3]}'
    assert Splicer([Hidden.at("token_ids")]).hide(text) == b'{"token\\u005fids":null,"a":2,"token_ids":null}'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b'{"a":1,"b":2,"c":3}', b'{"b":2}'),
        (b'{"a":1}', b"{}"),
        (b'{ "a":1 , "c" : [2] }', b"{  }"),
        (b'{"b":1 , "c":2, "a":3 }', b'{"b":1 }'),
        (b'{"a":1, "b":{"a":1}}', b'{"b":{"a":1}}'),
    ],
)
def test_a_member_is_cut_with_one_comma(text: bytes, shown: bytes) -> None:
    assert Splicer([Hidden.at("a", cut=True), Hidden.at("c", cut=True)]).hide(text) == shown


@pytest.mark.parametrize(
    "text", [b'{"a" 1}', b'{"a":1', b'{"a":[1,}', b'{"a":1;"b":2}', b'{a:1,"a":2}', b'{"b":{"a":tru}}']
)
def test_text_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        Splicer([Hidden.at("a"), Hidden.at("b.a.x")]).hide(text)


def test_nesting_that_the_scanner_cannot_follow_is_refused_and_does_not_end_the_program() -> None:
    text = b'{"a":' + b'["",' * 100_000 + b"0" + b"]" * 100_000 + b"}"
    with pytest.raises(ValueError, match="cannot follow"):
        Splicer([Hidden.at("a")]).hide(text)


@given(
    document=st.dictionaries(st.sampled_from(NAMES), DOCUMENTS, max_size=5),
    members=st.dictionaries(st.sampled_from(NAMES), st.one_of(st.booleans(), st.integers(0, 9)), max_size=4),
    writing=WRITINGS,
)
def test_members_are_set_in_the_text_as_in_the_value(
    document: dict[str, Any], members: dict[str, Any], writing: dict[str, Any]
) -> None:
    text = json.dumps(document, **writing)
    assert json.loads(set_members(f" {text}\n", members)) == {**document, **members}


def test_setting_members_leaves_all_else_as_it_was() -> None:
    assert set_members('{ "a" : 1e2, "b":null }', {"b": 0, "c": True}) == '{ "a" : 1e2, "b":0 ,"c":true}'


@pytest.mark.parametrize("text", ["[1]", "", "{", "nope"])
def test_members_of_something_else_than_an_object_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        set_members(text, {"a": 1})
