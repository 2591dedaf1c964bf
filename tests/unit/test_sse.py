"""Server-sent events as bytes: whatever the chunks and the line ends are, the same events, and no byte is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_id_capture.server.text.sse import Event, EventParser

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def parsed(chunks: Sequence[bytes]) -> tuple[list[Event], bytes]:
    parser = EventParser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events, parser.rest


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def plain(data: bytes) -> list[bytes | None]:
    """The data of each event, by the rules of the standard, read slowly from the whole text."""
    lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found: list[bytes | None] = []
    values: list[bytes] = []
    for line in lines[:-1]:
        if not line:
            found.append(b"\n".join(values) if values else None)
            values = []
        elif line.partition(b":")[0] == b"data":
            values.append(line.partition(b":")[2].removeprefix(b" "))
    return found


@pytest.mark.parametrize("end", LINE_ENDS)
def test_each_of_the_three_line_ends_ends_lines_and_events(end: bytes) -> None:
    events, rest = parsed([b"data: one" + end + end + b"data:two" + end + end + b"data: th"])
    assert [event.data for event in events] == [b"one", b"two"]
    assert rest == b"data: th"


def test_only_one_space_after_the_colon_is_left_out() -> None:
    events, _ = parsed([b"data:  x\n\ndata\n\ndata:\n\n"])
    assert [event.data for event in events] == [b" x", b"", b""]


def test_several_data_lines_are_joined_and_other_fields_are_kept_in_the_raw_bytes() -> None:
    raw = b": hello\nevent: delta\nid: 7\ndata: {\ndata: }\nretry: 1\n\n"
    (event,), _ = parsed([raw])
    assert (event.data, event.name, event.raw) == (b"{\n}", b"delta", raw)


def test_a_comment_is_an_event_without_data() -> None:
    events, _ = parsed([b": ping\n\n"])
    assert [(event.data, event.raw) for event in events] == [(None, b": ping\n\n")]


def test_a_byte_order_mark_belongs_to_no_field() -> None:
    events, _ = parsed([b"\xef\xbb", b"\xbfdata: x\n\n"])
    assert [event.data for event in events] == [b"x"]


def test_an_event_is_there_with_the_first_byte_of_its_last_line_end() -> None:
    parser = EventParser()
    assert [event.data for event in parser.feed(b"data: x\r\n\r")] == [b"x"]
    assert parser.feed(b"\n") == []
    (event,) = parser.feed(b"data: y\r\n\r\n")
    assert (event.raw, event.data) == (b"\ndata: y\r\n\r\n", b"y")


def test_other_data_is_put_where_the_data_was() -> None:
    (event,), _ = parsed([b":c\r\ndata:old\r\nid: 1\r\n\r\n"])
    assert event.with_data(b"new") == b":c\r\ndata:new\r\nid: 1\r\n\r\n"
    (event,), _ = parsed([b"data: {\ndata: }\n\n"])
    assert event.with_data(b"{ \n}") == b"data: {  }\n\n"


@given(
    lines=st.lists(
        st.one_of(
            st.sampled_from([b"", b": note", b"data", b"event: x", b"id:1", b"\xef\xbb\xbfdata: x", b"database: x"]),
            st.binary(max_size=8).map(lambda value: b"data: " + value.replace(b"\r", b"").replace(b"\n", b"")),
            st.text(alphabet="aé字🙂 :", max_size=6).map(lambda text: b"data:" + text.encode()),
        ),
        max_size=12,
    ),
    ends=st.lists(st.sampled_from(LINE_ENDS), min_size=12, max_size=12),
    places=st.lists(st.integers(min_value=0, max_value=400), max_size=12),
)
def test_chunk_boundaries_change_nothing_and_no_byte_is_lost(
    lines: list[bytes], ends: list[bytes], places: list[int]
) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    whole, _ = parsed([data])
    assert [event.data for event in whole] == plain(data)
    for chunks in (cut(data, places), [data[index : index + 1] for index in range(len(data))]):
        events, rest = parsed(chunks)
        assert [event.data for event in events] == plain(data)
        assert b"".join(event.raw for event in events) + rest == data


@pytest.mark.alone
def test_an_event_that_comes_in_many_chunks_takes_time_in_proportion_to_its_length() -> None:
    def seconds(chunks: int) -> float:
        parser = EventParser()
        started = time.process_time()
        events = [event for _ in range(chunks) for event in parser.feed(b"x" * 16_384)] + parser.feed(b"\n\n")
        assert len(events) == 1
        return time.process_time() - started

    # The least of a few: a machine that others use too is slow for moments, never fast.
    short, long = (min(seconds(chunks) for _ in range(4)) for chunks in (1_000, 3_000))
    assert long < 8 * short  # nine times if each chunk was copied with all before it
