"""Published and random chat templates: the tail that is found is the template's own text, or none is found."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.chat_templates import ChatTemplate, TemplateError, Vocabulary, published
from token_id_capture.server.continuity.tail import RestatedAnswer, TailUnknownError, continue_answer
from token_id_capture.server.continuity.template import TemplateMemory
from token_id_capture.tokens import TokenIds

SENTINEL = "Zebra"
"""The last word of the real answer, or of its last argument."""

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find something.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}


class Turn(NamedTuple):
    """What ends a policy's turn: the token that it samples last, and where the template's own ending begins."""

    sampled: str
    written: str


def of(token: str) -> Turn:
    return Turn(token, token)


# By the beginning of a template's name: how an answer of words ends, and how one with a tool call does.
ENDS: dict[str, tuple[Turn, Turn]] = {
    "cohere2": (Turn("<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>"),) * 2,
    "cohere": (of("<|END_OF_TURN_TOKEN|>"),) * 2,
    "deepseek": (of("<\uff5cend▁of▁sentence\uff5c>"),) * 2,
    "diffusion_gemma": (of("<turn|>"), of("<|tool_response>")),
    "gemma4_v2": (of("<turn|>"),) * 2,
    "gemma4": (of("<turn|>"), of("<|tool_response>")),
    "gemma": (of("<end_of_turn>"),) * 2,
    "glm4moe": (of("<|user|>"), of("<|observation|>")),
    "gptoss": (Turn("<|return|>", "<|end|>"), of("<|call|>")),
    "idefics3": (of("<end_of_utterance>"),) * 2,
    "llama3": (of("<|eot_id|>"),) * 2,
    "llava_next": (of("</s>"),) * 2,
    "muse_glimmer": (of("<|eot|>"),) * 2,
    "phi3": (of("<|end|>"),) * 2,
    "smolvlm": (of("<end_of_utterance>"),) * 2,
    "": (of("<|im_end|>"),) * 2,
}


def ends_of(name: str) -> tuple[Turn, Turn]:
    return next(ends for start, ends in ENDS.items() if name.startswith(start))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(*whats: str, text: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "find", "arguments": f'{{"what": "{what}"}}'}}
        for n, what in enumerate(whats)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "find", "content": text}


class Case(NamedTuple):
    """A conversation; the answer at ``position`` is the real one."""

    messages: list[dict[str, Any]]
    position: int
    ended: bool = True


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = f"Yes, a {SENTINEL}"


def cases(end: str) -> dict[str, Case]:
    """``end`` is the text of the template's end-of-turn token, which users may write too."""
    words = [user("One?"), said(ANSWER), user("Two?")]
    return {
        "words": Case(words, 1),
        "system": Case([SYSTEM, *words], 2),
        "cut off": Case(words, 1, ended=False),
        "reasoning": Case([user("One?"), said(ANSWER, reasoning_content="Hm."), user("Two?")], 1),
        "second answer": Case([SYSTEM, user("One?"), said("No"), *words], 4),
        "one call": Case([user("One?"), called(SENTINEL), result(0, "found")], 1),
        "a call with words": Case([SYSTEM, user("One?"), called(SENTINEL, text=ANSWER), result(0, "found")], 2),
        "two calls": Case([user("One?"), called(SENTINEL, SENTINEL), result(0, "this"), result(1, "that")], 1),
        "a call cut off": Case([user("One?"), called(SENTINEL), result(0, "found")], 1, ended=False),
        "a result and a user": Case([user("One?"), called(SENTINEL), result(0, "found"), user("Two?")], 1),
        "after a call": Case([user("One?"), called("Yak"), result(0, "found"), said(ANSWER), user("Two?")], 3),
        "reasoning and a call": Case([user("One?"), called(SENTINEL, reasoning_content="Hm."), result(0, "found")], 1),
        "an end in the user's words": Case([user("One?"), said(ANSWER), user(f"What is {end}? Say {end}")], 1),
        "an end in an argument": Case([user("One?"), called(f"{end} {SENTINEL}"), result(0, f"{end} found")], 1),
        "an answer put in": Case([user("One?"), said(ANSWER), user("Two?"), said("Kept."), user("Three?")], 1),
    }


def tail_text(
    template: ChatTemplate, vocabulary: Vocabulary, case: Case, end: str, memory: TemplateMemory | None = None
) -> str:
    """The text of the tail that is found.

    Raises:
        TailUnknownError: none is certain.
    """
    prompt = vocabulary.encode(template.text(case.messages[: case.position], True))
    sampled = vocabulary.encode(f"<think>Hm, hm.</think> {SENTINEL}" + (end if case.ended else ""))
    answer = RestatedAnswer(case.messages, case.position, TokenIds.joined(prompt, sampled), case.ended)
    found = asyncio.run(continue_answer(answer, b"", template.render, memory or TemplateMemory()))
    assert found.tail is not None, "the sampled answer is in no rendering"
    return vocabulary.decode(found.tail.tolist())


def expected(template: ChatTemplate, case: Case, turn: Turn) -> str:
    """What the template itself writes from the end of the answer on. One that leaves calls out shows it with words."""
    shown = template.text(case.messages, True)
    if SENTINEL not in shown:
        spoken = {**case.messages[case.position], "content": ANSWER}
        shown = template.text([*case.messages[: case.position], spoken, *case.messages[case.position + 1 :]], True)
    following = shown.rpartition(SENTINEL)[2]
    if case.ended:
        return following.partition(turn.sampled)[2]
    _, end, rest = following.partition(turn.written)
    return end + rest


def variants(name: str, source: str, vocabulary: Vocabulary) -> ChatTemplate:
    parts = name.startswith(("idefics3", "llava_next", "smolvlm"))
    return ChatTemplate(source, vocabulary, parts=parts, tools=[TOOL])


def test_every_published_template_gets_its_own_text_after_the_answer_or_none() -> None:
    vocabulary = Vocabulary()
    outcomes: Counter[str] = Counter()
    unsure: Counter[str] = Counter()
    for name, source in published().items():
        template = variants(name, source, vocabulary)
        words, calls = ends_of(name)
        memory = TemplateMemory()  # what was found in one case has to serve the others
        for title, case in cases(words.sampled).items():
            turn = calls if case.messages[case.position].get("tool_calls") else words
            try:
                want = expected(template, case, turn)
                template.text(case.messages[: case.position], True)
            except TemplateError:
                outcomes["refused"] += 1
                continue
            try:
                found = tail_text(template, vocabulary, case, turn.sampled, memory)
            except TailUnknownError as error:
                outcomes["unsure"] += 1
                unsure[f"{name}, {title}: {error.reason}"] += 1
            else:
                assert found == want, f"{name}, {title}"
                outcomes["right"] += 1
    assert outcomes["right"] > 0.95 * (outcomes["right"] + outcomes["unsure"]), sorted(unsure)
    # The history of gpt-oss ends an answer with another token than the policy; Gemma 4 puts a result before the
    # words of the answer that called for it, and its calls end in a token that no answer of words has.
    doubtful = ("diffusion_gemma", "gemma4", "glm4moe_training", "gptoss")
    assert [case for case in unsure if not case.startswith(doubtful)] == []


MARK = "<@@>"
"""Where a random template says that the answer is over; it is shown only to the test."""

ENDINGS = ("<|e|>", "<|e|>\n", "\n", "\n\n", "", " ", "<|x|><|e|>", "[end]")


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template with habits that templates have, and some that none should have."""

    def often() -> bool:
        return draw(st.integers(0, 5)) > 0

    def seldom() -> bool:
        return draw(st.integers(0, 5)) == 0

    def pick(*texts: str) -> str:
        return draw(st.sampled_from(texts))

    opening = pick("<|s|>{{ m.role }}\n", "{{ m.role | upper }}: ", "<|{{ m.role }}|>", "\n### {{ m.role }}\n")
    content = pick("{{ m.content or '' }}", "{{ (m.content or '') | trim }}", "{{ (m.content or '').strip('\\n') }}")
    call = pick(
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>',
        "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})]",
        "{{ c.function.arguments | tojson }}",
    )
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{pick('', chr(10))}{{% endfor %}}" if often() else ""
    ending = pick(*ENDINGS)
    between = pick(*ENDINGS) if seldom() else ""
    note = pick("[{{ loop.index }}]", "{% if loop.index > 3 %}[long]{% endif %}", "{% if loop.last %}[last]{% endif %}")
    reasoning = pick(
        "",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
        "{% if loop.last %}<think></think>{% endif %}",
        "{% if not loop.last %}<think></think>{% endif %}",
    )
    answer = reasoning + (content + calls if often() else calls + content)
    if seldom():  # a result comes before the words of the answer
        answer = calls + "{% for n in messages if n.role == 'tool' %}({{ n.content }}){% endfor %}" + content
    if seldom():
        answer = pick("", "{% if loop.last %}" + answer + "{% endif %}")
    marked = "{% if m.marked %}" + MARK + "{% endif %}"
    other = content + (pick("", "{% if loop.last %}{{ tools | tojson }}{% endif %}"))
    order = pick(*["messages"] * 6, "messages | reverse", "messages[-3:]")
    return (
        f"{pick('<bos>', '')}{{% for m in {order} %}}"
        + (f"{{% if not loop.first %}}{between}{{% endif %}}" if between else "")
        + (note if seldom() else "")
        + opening
        + f"{{% if m.role == 'assistant' %}}{answer}{marked}{ending}{{% else %}}{other}"
        + f"{pick(ending, ending, '')}{{% endif %}}"
        + (note if seldom() else "")
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening.replace("m.role", "'assistant'")
        + pick("", "<think>", "<think>\n")
        + "{% endif %}"
    )


WORDS = ("Ant", "Bee", "Cat", "Dog", "Elk", "Fox")


@st.composite
def conversations(draw: st.DrawFn) -> Case:
    """A chat with an answer that says the sentinel, at a random place; the words after it are all different."""
    said_before = draw(st.lists(st.sampled_from(["words", "call"]), max_size=2))
    kind = draw(st.sampled_from(["words", "call", "both"]))
    messages: list[dict[str, Any]] = [SYSTEM] if draw(st.booleans()) else []
    messages.append(user("Ask"))
    for earlier in said_before:
        messages += [called("Yak"), result(0, "old")] if earlier == "call" else [said("Old"), user("Ask")]
    position = len(messages)
    messages.append(said(ANSWER) if kind == "words" else called(SENTINEL, text=ANSWER if kind == "both" else ""))
    following = [user(WORDS[0])] if kind == "words" else [result(0, WORDS[0])]
    if draw(st.booleans()):
        following += [said(WORDS[1]), user(WORDS[2])]
    return Case([*messages, *following], position, draw(st.booleans()))


# Says something before each message of a longer conversation, and nothing at the end of one.
LONG = (
    "{% for m in messages %}{% if loop.index > 3 %}[long]{% endif %}<|s|>{{ m.role }} {{ m.content }}"
    "{% if m.marked %}" + MARK + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|s|>assistant {% endif %}"
)


@settings(max_examples=200)
@example(LONG, Case([user("Ask"), said("Old"), user("Ask"), said(ANSWER), user("Ant")], 3, False), "<|e|>", False)
@given(templates(), conversations(), st.sampled_from(["<|e|>", "<|x|>", "<|other|>"]), st.booleans())
def test_a_random_template_gets_its_own_text_after_the_answer_or_none(
    source: str, case: Case, sampled: str, seen_before: bool
) -> None:
    vocabulary = Vocabulary()
    template = ChatTemplate(source, vocabulary, tools=[TOOL])
    memory = TemplateMemory()
    if seen_before:
        following = [{**message, "content": "Gnu"} for message in case.messages[case.position + 1 :]]
        other = case._replace(messages=[*case.messages[: case.position + 1], *following])
        with contextlib.suppress(TailUnknownError):
            tail_text(template, vocabulary, other, sampled, memory)
    try:
        found = tail_text(template, vocabulary, case, sampled, memory)
    except TailUnknownError:
        return
    marked = [{**message, "marked": place == case.position} for place, message in enumerate(case.messages)]
    before, mark, rest = template.text(marked, True).partition(MARK)
    assert mark
    # Nothing of what came after the answer is lost, wherever the template puts it.
    new = [word for word in WORDS if any(word in message["content"] for message in case.messages[case.position + 1 :])]
    assert [word for word in new if word in before + rest and word not in found] == []
    if not any(word in before for word in new):
        assert found == (rest.partition(sampled)[2] if case.ended else rest)
