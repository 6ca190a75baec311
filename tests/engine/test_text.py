# SPDX-License-Identifier: Apache-2.0
"""Streamed text is the decoded text, in whole characters, and never shows a stop string."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from detjax.engine.outputs.text import TextStream, find_stop
from detjax.engine.requests.sampling_params import SamplingParams, last_tokens
from detjax.models.tokenizer import Tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
STOPS = st.lists(st.text("ab ö你", min_size=1, max_size=4), max_size=3)


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Words that begin with a space, and all bytes."""
    words = ["▁", "a", "b", "▁a", "ab", "▁abab", "ö", "▁▁", "a▁b"]
    vocab = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, []))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return backend


def byte_level_backend() -> tokenizers.Tokenizer:
    """All bytes, and tokens that hold half a character."""
    words = ["Ġa", "ab", "abab", "Ã¶", "ä½", "Łĺ", "aä", "łb", "Ġ"]
    vocab = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return backend


BACKENDS = {"sentencepiece": sentencepiece_backend, "byte_level": byte_level_backend}


@pytest.fixture(scope="module", params=list(BACKENDS))
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Each kind of tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    BACKENDS[request.param]().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids that often make text, and sometimes broken bytes."""
    backend = tokenizer.backend
    size = backend.get_vocab_size()
    readable = [i for i in range(size) if b"a" <= tokenizer.token_bytes(i)[:1] <= b"b"]
    wide = [i for i in range(size) if set(tokenizer.token_bytes(i)) & set("ö你😀".encode())]
    one = st.one_of(st.sampled_from(readable), st.sampled_from(wide), st.integers(0, size))
    return st.lists(one, max_size=24)


def stream_all(stream: TextStream, ids: list[int]) -> tuple[list[str], bool]:
    """Push everything; return the pieces, the last one from `finish`."""
    deltas = [stream.push(i) for i in ids]
    stopped = bool(deltas) and deltas[-1].is_stopped
    return [*(delta.text for delta in deltas), stream.finish()], stopped


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_pieces_concatenate_to_the_decoded_text(tokenizer, data):
    ids = data.draw(any_ids(tokenizer))
    prompt = data.draw(any_ids(tokenizer))
    pieces, _ = stream_all(TextStream(tokenizer, prompt_ids=prompt), ids)
    assert "".join(pieces) == tokenizer.decode(ids, prompt_ids=prompt)


@settings(deadline=None, max_examples=120)
@given(data=st.data(), stops=STOPS)
def test_text_ends_before_the_stop_string_that_is_complete_first(tokenizer, data, stops):
    ids = data.draw(any_ids(tokenizer))
    whole = tokenizer.decode(ids)
    pieces, _ = stream_all(TextStream(tokenizer, stops), ids)
    found = find_stop(whole, stops)
    assert "".join(pieces) == (whole if found is None else whole[: found[0]])
    pieces, _ = stream_all(TextStream(tokenizer, stops, includes_stop=True), ids)
    assert "".join(pieces) == (whole if found is None else whole[: found[1]])


@settings(deadline=None, max_examples=100)
@given(data=st.data(), stops=STOPS)
def test_exactly_what_a_stop_string_could_still_begin_with_is_held_back(tokenizer, data, stops):
    stream, without_stops = TextStream(tokenizer, stops), TextStream(tokenizer)
    shown = so_far = ""
    for token_id in data.draw(any_ids(tokenizer)):
        so_far += without_stops.push(token_id).text
        delta = stream.push(token_id)
        shown += delta.text
        if delta.is_stopped:
            return
        could_begin = [
            any(stop.startswith(so_far[i:]) for stop in stops) for i in range(len(so_far))
        ]
        assert len(shown) == (could_begin.index(True) if any(could_begin) else len(so_far))


@settings(deadline=None)
@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4)))
def test_find_stop_does_not_depend_on_how_the_text_is_cut(text, stops):
    begins = [find_stop(text[:n], stops) for n in range(len(text) + 1)]
    first = next((begin for begin in begins if begin is not None), None)
    assert find_stop(text, stops) == first


def test_no_character_is_split(tokenizer):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    stream = TextStream(tokenizer)
    ids = [byte_id[bytes([byte])] for byte in "a你😀".encode()]
    assert [stream.push(i).text for i in ids] == ["a", "", "", "你", "", "", "", "😀"]
    assert stream.finish() == ""


def test_broken_bytes_come_out_as_soon_as_they_are_known_to_be_broken(tokenizer):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    stream = TextStream(tokenizer)
    pieces = [stream.push(byte_id[bytes([byte])]).text for byte in b"\xff\xe4\xbda\xf0\x9f"]
    assert pieces == ["\ufffd", "", "", "\ufffda", "", ""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_not_shown_and_do_not_break_a_character(tokenizer):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    special = tokenizer.backend.token_to_id("<s>")
    first, second = (byte_id[bytes([byte])] for byte in "ö".encode())
    stream = TextStream(tokenizer)
    assert [stream.push(i).text for i in (special, first, special, second)] == ["", "", "", "ö"]


SIGNS = st.lists(st.sampled_from(["<s>", "a", "b", " ", "ö"]), min_size=1, max_size=3)
WITH_SPECIAL = st.lists(SIGNS.map("".join), max_size=3)


def shown(text: str) -> str:
    return text.replace("<s>", "")


def ended(parts: list[str], stops: list[str], *, includes: bool) -> str:
    """The text of characters and special tokens up to the first stop string; the reference."""
    for count in range(1, len(parts) + 1):
        so_far, ends = "".join(parts[:count]), []
        for stop in stops:
            is_special = "<s>" in stop
            whole = so_far if is_special else shown(so_far)
            if whole.endswith(stop) and (is_special or parts[count - 1] != "<s>"):
                ends.append((shown(whole.removesuffix(stop)), stop if includes else ""))
        if ends:
            # Of stops that end together, the one that begins first.
            return "".join(min(ends, key=lambda end: (len(end[0]), -len(end[1]))))
    return shown("".join(parts))


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.sampled_from(["<s>", "a", "b", " ", "ö"]), max_size=16), stops=WITH_SPECIAL
)
def test_a_stop_string_may_have_special_tokens_in_it(tokenizer, parts, stops):
    """It ends the text where it would if they were shown; they are not, and others do not care."""
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    special, parts = tokenizer.backend.token_to_id("<s>"), ["a", *parts]
    ids = []
    for part in parts:
        ids += [special] if part == "<s>" else [byte_id[bytes([b])] for b in part.encode()]
    for includes in (False, True):
        stream = TextStream(tokenizer, stops, includes_stop=includes)
        told = "".join(stream_all(stream, ids)[0])
        assert told == ended(parts, stops, includes=includes)


@pytest.mark.parametrize("stop", ["<s>", "a<s>", "<s>a", "a<s>a", "<s><s>"])
def test_a_special_token_that_a_stop_string_names_ends_the_text_at_once(tokenizer, stop):
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.backend.get_vocab_size())}
    special = tokenizer.backend.token_to_id("<s>")
    stream = TextStream(tokenizer, ["zz", stop])
    pushed = [ids[b"b"], *(special if part == "<s>" else ids[part.encode()]
                           for part in stop.replace("<s>", " <s> ").split())]  # fmt: skip
    deltas = [stream.push(token_id) for token_id in pushed]
    assert [delta.is_stopped for delta in deltas] == [False] * (len(pushed) - 1) + [True]
    assert "".join(delta.text for delta in deltas) == "b"


def test_a_special_token_breaks_no_character_where_a_stop_string_names_it(tokenizer):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    special = tokenizer.backend.token_to_id("<s>")
    first, second = (byte_id[bytes([byte])] for byte in "ö".encode())
    stream = TextStream(tokenizer, ["<s>a"])
    pieces, _ = stream_all(stream, [first, special, second])
    assert "".join(pieces) == "ö"


@settings(deadline=None, max_examples=100)
@given(data=st.data(), stops=STOPS)
def test_a_tokens_own_text_does_not_depend_on_stop_strings(tokenizer, data, stops):
    ids = data.draw(any_ids(tokenizer))
    plain, stream = TextStream(tokenizer), TextStream(tokenizer, stops)
    for token_id in ids:
        delta = stream.push(token_id)
        assert delta.own == plain.push(token_id).text
        if delta.is_stopped:
            break


def test_the_start_of_a_stop_string_is_released_when_it_is_not_completed(tokenizer):
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.backend.get_vocab_size())}
    stream = TextStream(tokenizer, ["aba!"])
    assert [stream.push(ids[piece]).text for piece in (b"ab", b"ab", b"b")] == ["", "ab", "abb"]
    assert stream.push(ids[b"ab"]).text == ""
    assert stream.finish() == "ab"


def test_after_a_stop_string_nothing_is_released(tokenizer):
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.backend.get_vocab_size())}
    stream = TextStream(tokenizer, ["ba"])
    delta = stream.push(ids[b"ab"])
    assert (delta.text, delta.is_stopped) == ("a", False)
    delta = stream.push(ids[b"ab"])
    assert (delta.text, delta.is_stopped) == ("", True)
    assert stream.push(ids[b"a"]).is_stopped
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="stop string is empty"):
        TextStream(tokenizer, [""])


def test_the_first_space_is_dropped_only_at_the_start_of_all_text(tmp_path):
    sentencepiece_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    word = tokenizer.backend.token_to_id("▁a")
    begin = tokenizer.backend.token_to_id("<s>")
    assert "".join(stream_all(TextStream(tokenizer), [begin, word, word])[0]) == "a a"
    following = TextStream(tokenizer, prompt_ids=[begin, word])
    assert "".join(stream_all(following, [word, word])[0]) == " a a"
    first = TextStream(tokenizer, prompt_ids=[begin])
    assert "".join(stream_all(first, [word, word])[0]) == "a a"


@pytest.mark.parametrize("name", ["tokenizers/qwen3", "weights/stories260K"])
def test_published_tokenizers_stream_what_the_library_decodes(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"the shared data has no {name} beside this checkout")
    tokenizer = Tokenizer.from_folder(SHARED / name)
    text = "Once upon a time, 你好 wörld 😀👋🏽 — e\u0301\n\n  17+26=43"
    ids = tokenizer.encode(text)
    pieces, _ = stream_all(TextStream(tokenizer), ids)
    assert "".join(pieces) == tokenizer.backend.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    pieces, stopped = stream_all(TextStream(tokenizer, ["wörld"]), ids)
    assert "".join(pieces) == "Once upon a time, 你好 " and stopped


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(st.sampled_from(["<s>", "a", "b", " ", "ö"]), max_size=16), stops=WITH_SPECIAL
)
def test_special_tokens_that_are_shown_are_text_like_any_other(tokenizer, parts, stops):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    special, parts = tokenizer.backend.token_to_id("<s>"), ["a", *parts]
    ids = []
    for part in parts:
        ids += [special] if part == "<s>" else [byte_id[bytes([b])] for b in part.encode()]
    text = "".join(parts)
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    stream = TextStream(tokenizer, stops, shows_special=True)
    deltas = [stream.push(token_id) for token_id in ids]
    told = "".join(delta.text for delta in deltas) + stream.finish()
    found = find_stop(text, stops)
    assert told == (text[: found[0]] if found else text)
    if not found:
        assert "".join(delta.own for delta in deltas) == text


def test_a_character_that_is_not_whole_ends_before_a_special_token_that_is_shown(tokenizer):
    byte_id = {tokenizer.token_bytes(i): i for i in range(256 + 1)}
    special = tokenizer.backend.token_to_id("<s>")
    first, second = (byte_id[bytes([byte])] for byte in "ö".encode())
    stream = TextStream(tokenizer, shows_special=True)
    assert [stream.push(i).text for i in (special, first, special, second)] == [
        "<s>", "", "\ufffd<s>", "\ufffd",
    ]  # fmt: skip


@pytest.mark.parametrize("includes", [False, True])
def test_the_special_token_that_ends_a_text_is_shown_only_with_its_stop(tokenizer, includes):
    special = tokenizer.backend.token_to_id("<s>")
    sampling = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=includes)
    a = tokenizer.backend.token_to_id("a")
    texts = {}
    for ends in ((special,), ()):
        stream = TextStream.of(sampling, tokenizer, prompt_ids=[a], eos_ids=ends)
        texts[ends] = "".join(stream.push(i).text for i in (a, special)) + stream.finish()
    assert texts == {(special,): "a<s>" if includes else "a", (): "a<s>"}


@pytest.mark.parametrize(
    ("most", "kept"), [(None, (1, 2, 3, 4)), (2, (3, 4)), (9, (1, 2, 3, 4)), (-1, (2, 3, 4))]
)
def test_the_last_tokens_of_a_prompt_are_taken(most, kept):
    assert last_tokens((1, 2, 3, 4), most, max_tokens=7, max_len=10) == kept


def test_more_tokens_than_the_context_has_are_refused():
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens=11 .* 10; .* -1"):
        last_tokens((1, 2), 11, max_tokens=1, max_len=10)
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            SamplingParams(truncate_prompt_tokens=wrong)
