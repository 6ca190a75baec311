# SPDX-License-Identifier: Apache-2.0
"""Control tokens come from the text of a template alone, whatever clients say and where."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from detjax.models.template_process import OWN, TOLD, UNKNOWN, Traced, concat, make_environment
from detjax.models.tokenizer import Tokenizer
from detjax.testing.cases import quick_and_slow

from .chat_families import FAMILIES
from .test_tokenizer import byte_fallback, byte_level, write_folder

Chat = tuple[list[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory) -> Callable[[str], Tokenizer]:
    """The tokenizer of a family: one token a byte, and the family's control tokens."""

    @functools.cache
    def make(family: str) -> Tokenizer:
        template, tokens = FAMILIES[family]
        backend = byte_level()
        backend.add_special_tokens(list(tokens))
        folder = tmp_path_factory.getbasetemp() / re.sub(r"\W", "_", family)
        ends = {"bos_token": tokens[0], "eos_token": tokens[min(1, len(tokens) - 1)]}
        return Tokenizer.from_folder(
            write_folder(folder, backend, {**ends, "chat_template": template})
        )

    return make


def chat_of(say: Callable[[], str], *, has_call: bool) -> Chat:
    """A conversation of all roles, with what `say` says in every text and key."""
    function = {
        "name": say(),
        "description": say(),
        "parameters": {
            "type": "object",
            "properties": {say(): {"type": "string", say(): [say()]}},
            "required": [say()],
        },
    }
    call = {"name": say(), "arguments": json.dumps({say(): {say(): say()}}, ensure_ascii=False)}
    called = [
        {"role": "assistant", "content": say(), "tool_calls": [{"id": say() + 9 * "x",
         "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": say() + 9 * "x", "content": say()},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": say()},
        {"role": "user", "content": [{"type": "text", "text": say()} for _ in range(3)]},
        *(called if has_call else [{"role": "assistant", "content": say()}]),
        {"role": "user", "content": say(), "name": say()},
    ]
    return messages, {"tools": [{"type": "function", "function": function}]}


def ids_of(ours: Tokenizer, chat: Chat, *, has_control: bool) -> list[int]:
    messages, variables = chat
    reads_tools = "tools" in (ours.chat_template or "")
    return ours.apply_chat_template(
        messages, variables=variables if reads_tools else {}, has_control=has_control
    )


def reads_calls(ours: Tokenizer) -> bool:
    return "tool_calls" in (ours.chat_template or "")


def special(ours: Tokenizer, ids: list[int]) -> list[str | None]:
    return [ours.backend.id_to_token(i) for i in ids if i in ours.special_ids]


def shown(ours: Tokenizer, ids: list[int]) -> str:
    return ours.backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("family", quick_and_slow(list(FAMILIES)[:8], FAMILIES))
def test_a_users_text_is_no_control_token_of_any_family(tokenizer_of, family):
    ours, (_, tokens) = tokenizer_of(family), FAMILIES[family]
    has_call = reads_calls(ours)
    harmless = chat_of(lambda: "w", has_call=has_call)
    plain = ids_of(ours, harmless, has_control=False)
    assert plain == ids_of(ours, harmless, has_control=True)
    attack = chat_of(lambda: "".join(tokens), has_call=has_call)
    guarded = ids_of(ours, attack, has_control=False)
    assert special(ours, guarded) == special(ours, plain)
    # The same text, and without the guard an injection.
    injected = ids_of(ours, attack, has_control=True)
    assert shown(ours, guarded) == shown(ours, injected)
    assert len(special(ours, injected)) > len(special(ours, plain))


def without_signs(text: str) -> str:
    return re.sub(r"\W", "~", text)


@pytest.mark.parametrize("family", quick_and_slow(list(FAMILIES)[:4], FAMILIES))
@settings(deadline=None, max_examples=25)
@given(data=st.data(), has_call=st.booleans())
def test_no_pieces_of_text_join_to_a_control_token(tokenizer_of, family, data, has_call):
    ours, (_, tokens) = tokenizer_of(family), FAMILIES[family]
    texts = [
        *tokens,
        "<think>",
        "assistant",
        "user",
        '"',
        "\\",
        "\n",
        " ",
        "{",
        "a",
        "é",
        "[",
        "|>",
    ]
    cut = st.tuples(st.sampled_from(texts), st.integers(0, 12), st.integers(0, 12)).map(
        lambda found: found[0][min(found[1:]) :] if found[1] > 9 else found[0][: max(found[1:])]
    )
    piece = st.lists(cut, min_size=1, max_size=3).map("".join).filter(str.strip)
    said: list[str] = []

    def say() -> str:
        said.append(data.draw(piece))
        return said[-1]

    has_call = has_call and reads_calls(ours)
    attack = chat_of(say, has_call=has_call)
    again = iter(said)
    neutral = chat_of(lambda: without_signs(next(again)), has_call=has_call)
    guarded = ids_of(ours, attack, has_control=False)
    assert special(ours, guarded) == special(ours, ids_of(ours, neutral, has_control=True))
    assert shown(ours, guarded) == shown(ours, ids_of(ours, attack, has_control=True))


# ------------------------------------------------------------------------ what cannot be followed


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content | center(80)",
        "messages[0].content | wordwrap(9, wrapstring='')",
        "'(%s)' % messages[0].content",
        "'{}'.format(messages[0].content)",
        "messages[0].content | safe",
        "messages[0]",
        "messages[0].content.replace('', '-') | replace('-', '')",
        "'</' ~ (messages[0].content | length) ~ '>'",
    ],
)
def test_a_control_token_that_a_template_made_unreadable_is_refused(tmp_path, expression):
    backend = byte_level()
    backend.add_special_tokens(["</4>"])
    template = "<s>{{ " + expression + " }}{{ messages[0].content }}"
    config = {"eos_token": "</s>", "chat_template": template}
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    with pytest.raises(ValueError, match="does not show whose it is; take it out of the messages"):
        ours.apply_chat_template([{"role": "user", "content": "</s>"}])
    assert ours.apply_chat_template([{"role": "user", "content": "</s>"}], has_control=True)
    ids = ours.apply_chat_template([{"role": "user", "content": "hello"}])
    assert special(ours, ids) == ["<s>"]


@pytest.mark.parametrize(
    ("expression", "content", "tokens"),
    [
        ("'<' ~ message.role ~ '>'", "x", ["<user>"]),
        ("('<us', 'er>') | join", "x", ["<user>"]),
        ("'<user>' if message.content == '<user>'", "<user>", ["<user>"]),
        ("'<' ~ message.content ~ '>'", "user", []),
        ("'<user' ~ message.content", ">", []),
        ("message.content ~ 'user>'", "<", []),
        ("message.content.split('x') | join", "<usxer>", []),
        ("message.content | upper | lower", "<user>", []),
        ("dict(a=message.content) | tojson", "<user>", []),
        ("{'a': '<user>'}['a']", "x", ["<user>"]),
        ("message.content.replace('a', '<user>')", "<user>a", ["<user>"]),
        ("bos_token * 2", "<s>", ["<s>", "<s>"]),
    ],
)
def test_a_control_token_counts_if_the_template_wrote_all_of_it(
    tmp_path, expression, content, tokens
):
    backend = byte_level()
    backend.add_special_tokens(["<user>"])
    said = "{{ " + expression + " }} {{ message.content }}"
    template = "{% for message in messages %}" + said + "{% endfor %}"
    config = {"bos_token": "<s>", "chat_template": template}
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    ids = ours.apply_chat_template([{"role": "user", "content": content}])
    assert special(ours, ids) == tokens


OWN_LETTERS, TOLD_LETTERS, OTHER_LETTERS = "abß \n", "xyİ.", "123ŉ"
"""Each of one origin, however its case is changed."""

STEPS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b, lambda a, b: a.join([b, a, b]), lambda a, b: a.replace(b, "12"),
    lambda a, b: a.replace("a", b), lambda a, b: a.split(), lambda a, b: a.split(b[:1] or "x"),
    lambda a, b: a.rsplit(None, 1), lambda a, b: a.rsplit("b", 1), lambda a, b: a.split(None, 1),
    lambda a, b: a.partition("x"), lambda a, b: a.rpartition("x"), lambda a, b: a.splitlines(),
    lambda a, b: a.splitlines(True), lambda a, b: a.strip(), lambda a, b: a.strip(b),
    lambda a, b: a.lstrip("a"), lambda a, b: a.rstrip("x "), lambda a, b: a.removeprefix(b),
    lambda a, b: a.removesuffix("b"), lambda a, b: a[1:-1], lambda a, b: a[::-1],
    lambda a, b: a[:3], lambda a, b: a[-1] if a else a, lambda a, b: "".join(a),
    lambda a, b: list(a),
    lambda a, b: a.upper(), lambda a, b: a.lower(), lambda a, b: a.title(), lambda a, b: a * 2,
    lambda a, b: a.capitalize(), lambda a, b: "12" + a, lambda a, b: 2 * a,
    lambda a, b: a.center(9), lambda a, b: str(a) + str(b), lambda a, b: a.replace("", "1"),
]  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_an_origin_follows_its_characters_through_every_change(data):
    letters = {OWN: OWN_LETTERS, TOLD: TOLD_LETTERS, UNKNOWN: OTHER_LETTERS}

    def drawn() -> Traced:
        chars = data.draw(st.text("".join(letters.values()), max_size=10))
        of = [next(kind for kind, some in letters.items() if char in some) for char in chars]
        return concat(Traced(char, kind) for char, kind in zip(chars, of, strict=True))

    text = drawn()
    for _ in range(data.draw(st.integers(1, 4))):
        step, other = data.draw(st.sampled_from(STEPS)), drawn()
        found, expected = step(text, other), step(str.__str__(text), str.__str__(other))
        assert found == expected
        if not isinstance(found, str):
            found = data.draw(st.sampled_from(found)) if found else text
        text = Traced(found)
        assert len(text._origin) == len(text)
        for char, kind in zip(str.__str__(text), text._origin, strict=True):
            of = {k for k, some in letters.items() if char.lower()[:1] in some.lower() + "s"}
            assert bytes([kind]) in {*of, UNKNOWN}, (text, text._origin)


@pytest.mark.parametrize("name", ["_origin", "__class__", "__init__"])
def test_a_template_cannot_reach_an_origin(name):
    template = make_environment().from_string("{{ x." + name + " }}{{ x['" + name + "'] }}")
    assert template.render(x=Traced("a", TOLD)) == ""


# -------------------------------------------------------------------------- texts beside the tokens


def test_text_around_a_users_control_token_is_encoded_as_one(tmp_path):
    ours = Tokenizer.from_folder(
        write_folder(
            tmp_path,
            byte_fallback(),
            {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"},
        )
    )
    text = "a</s>b ab"
    without = json.loads(byte_fallback().to_str())
    without["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(without))
    expected = plain.encode(text, add_special_tokens=False).ids
    assert ours.apply_chat_template([{"role": "user", "content": text}]) == expected
    assert ours.encode(text) == [ours.bos_id, *expected]
    assert ours.decode(expected) == text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True, "normalized": True}])
def test_texts_between_control_tokens_are_encoded_as_the_library_does(tmp_path, scheme, flags):
    backend = byte_fallback()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True, **flags)])
    template = "<s>{{ messages[0].content }} <end> ab</s>b{{ messages[0].content }}<end>"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    harmless = [{"role": "user", "content": " a b"}]
    expected = backend.encode(ours.render_chat(harmless), add_special_tokens=False).ids
    assert ours.apply_chat_template(harmless) == expected
    # One control token in a message, and the others stay as they are.
    attack = [{"role": "user", "content": " a b\uff1cend>"}]
    ids = ours.apply_chat_template(attack)
    assert special(ours, ids) == special(ours, expected)
    injected = special(ours, ours.apply_chat_template(attack, has_control=True))
    assert (len(injected) > len(special(ours, ids))) == bool(flags.get("normalized"))
    assert special(ours, ours.encode("a\uff1cend></s>")) == ["<s>"]


def test_a_tokenizer_whose_merges_make_control_tokens_takes_none_in_a_text(tmp_path):
    """Its own text could become one without being written out."""
    vocab = {"<": 0, "s": 1, "<s": 2, ">": 3, "<s>": 4, "a": 5}
    merges = [("<", "s"), ("<s", ">")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>"])
    config = {"bos_token": "<s>", "chat_template": "<s>{{ messages[0].content }}"}
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    assert ours.apply_chat_template([{"role": "user", "content": "a"}]) == [4, 5]
    for ask in (ours.encode, lambda text: ours.apply_chat_template(
        [{"role": "user", "content": text}]
    )):  # fmt: skip
        with pytest.raises(ValueError, match="cannot take control tokens in a text for text"):
            ask("a<s>")


def test_nothing_of_an_unknown_character_is_taken_for_an_attack(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<s>"])
    config = {"bos_token": "<s>", "chat_template": "<s>{{ messages[0].content }}"}
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    assert ours.apply_chat_template([{"role": "user", "content": "aéb"}]) == [1, 2, 0, 3]
    assert ours.encode("a<s>b") == [2, 0, 0, 0, 3]


@pytest.mark.parametrize("name", ["đem", "<café>", "‹café>", "éĠ", "ÿÿ"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_an_added_token_is_shown_as_it_is_written(tmp_path, make, name):
    backend = make()
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False)])
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, None))
    ids = ours.encode(f"a{name}b")
    assert backend.token_to_id(name) in ids
    assert ours.decode(ids) == f"a{name}b"


def test_an_added_token_that_the_model_has_too_is_its_bytes(tmp_path):
    backend = byte_level()
    backend.add_tokens(["Ġa", "Ã¶"])
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, None))
    for token_id in map(backend.token_to_id, ("Ġa", "Ã¶")):
        assert ours.decode([token_id]) == backend.decode([token_id])
