# SPDX-License-Identifier: Apache-2.0
"""Ids, chats and texts are those of transformers; every broken file is named with its fix."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from detjax.models import chat_template, tokenizer_files
from detjax.models import tokenizer as tokenizer_module
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared" / "data"
GOLDEN = REPOSITORY / "tests" / "golden"
SPECIAL = ["<unk>", "<s>", "</s>"]


def shared_folder(name: str) -> Path:
    """A folder of the shared data, or a skip."""
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"the shared data has no {name} beside this checkout")
    return folder


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte, and a few of several bytes that cut characters in two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "¶"), ("ä", "½"), ("ð", "Ł"), ("Ġ", "a"), ("Ġa", "b")]
    vocab = [*letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<think>", "a b"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """A sentencepiece-style tokenizer with a few words and all bytes."""
    words = ["▁", "a", "b", "n", "▁a", "▁b", "ab", "▁ab", "ö", "▁▁"]
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(vocab)},
            [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return backend


BACKENDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def write_folder(folder: Path, backend: tokenizers.Tokenizer, config: dict | None) -> Path:
    """Write the files that a model folder has."""
    folder.mkdir(exist_ok=True, parents=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=list(BACKENDS))
def pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Each kind of tokenizer, ours and the library's."""
    backend = BACKENDS[request.param]()
    folder = write_folder(tmp_path_factory.mktemp(request.param), backend, CONFIG)
    return Tokenizer.from_folder(folder), backend


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab nö你😀e\u0301<s>/\n"), max_size=12))
def test_text_encodes_and_decodes_as_the_library_does(pair, text):
    ours, backend = pair
    ids = ours.encode(text, has_control=True)
    assert ids == backend.encode(text).ids
    assert ours.decode(ids) == backend.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_any_byte_level_ids_decode_as_the_library_does(tmp_path_factory, data):
    backend = byte_level()
    folder = write_folder(tmp_path_factory.getbasetemp() / "any_ids", backend, CONFIG)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=20))
    assert Tokenizer.from_folder(folder).decode(ids) == backend.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_any_fallback_ids_without_broken_characters_decode_as_the_library_does(pair, data):
    ours, backend = pair
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=20))
    text = backend.decode(ids)
    if "\ufffd" not in text:
        assert ours.decode(ids) == text


def test_a_broken_byte_does_not_undo_the_characters_before_it(tmp_path):
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_fallback(), CONFIG))
    byte_ids = [3 + byte for byte in "你".encode()]
    assert ours.decode([*byte_ids, 3 + 0xFF, 3 + ord("a")]) == "你\ufffda"
    assert byte_fallback().decode([*byte_ids, 3 + 0xFF, 3 + ord("a")]) == "\ufffd" * 5


def test_what_follows_a_prompt_keeps_its_first_space(tmp_path):
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_fallback(), CONFIG))
    ids = ours.encode("a ab b")
    for cut in range(len(ids) + 1):
        assert ours.decode(ids[:cut]) + ours.decode(ids[cut:], prompt_ids=ids[:cut]) == "a ab b"
    assert ours.decode(ours.encode("ab")) == "ab"


def test_begin_end_and_special_tokens_are_named_and_not_shown(pair):
    ours, backend = pair
    assert ours.bos_id == backend.token_to_id("<s>")
    assert ours.eos_id == backend.token_to_id("</s>")
    assert {ours.bos_id, ours.eos_id} <= ours.special_ids
    assert ours.decode([ours.bos_id, *backend.encode("ab", add_special_tokens=False).ids]) == "ab"


def test_an_added_token_that_is_not_special_is_shown(tmp_path):
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), CONFIG))
    assert ours.decode(ours.encode("<think>a b</s>", has_control=True)) == "<think>a b"


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab nö<s>/\n⸨0⸩"), max_size=12))
def test_what_a_user_writes_is_no_control_token(pair, text):
    ours, _ = pair
    ids = ours.encode(text)
    assert not set(ids[1:] if ids[:1] == [ours.bos_id] else ids) & ours.special_ids
    assert ours.decode(ids).lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize(
    "text", ["a</s><s>b", "</s>", "a⸨0⸩b</s>", "</s⸨>", "⸩</s></s>⸨", "\\u2e28</s>"]
)
def test_what_a_user_says_in_a_chat_is_no_control_token(tmp_path, text):
    ours = with_template(tmp_path, TEMPLATE.replace("| tojson", "| trim"))
    chat = [
        USER | {"content": text},
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
    ]
    ids = ours.apply_chat_template(chat[:1])
    assert ids[0] == ours.bos_id and not set(ids[1:]) & ours.special_ids
    assert ours.decode(ids) == f"<user>{text}<assistant>"
    assert ours.eos_id not in ours.apply_chat_template(chat)
    asked = ours.apply_chat_template(chat[:1], has_control=True)
    assert asked == ours.backend.encode(ours.render_chat(chat[:1]), add_special_tokens=False).ids
    plain = ours.apply_chat_template([USER])
    assert plain == ours.apply_chat_template([USER], has_control=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content[:2] ~ ' ' ~ messages[0].content[2:] }}</s>", "</ s>"),
        ("{{ messages | tojson(ensure_ascii=True) }}</s>", '[{"role": "user", "content": "</s>"}]'),
    ],
)
def test_a_template_may_take_a_users_control_token_apart(tmp_path, template, text):
    ours = with_template(tmp_path, template)
    ids = ours.apply_chat_template([USER | {"content": "</s>"}])
    assert ours.decode(ids) == text
    assert [i for i in ids if i in ours.special_ids] == [ours.eos_id]


def test_ids_that_no_token_has_are_not_shown(pair):
    ours, _ = pair
    assert ours.decode([10**6]) == ""


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        ({}, [1], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_eos_token": False}, [1], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": None, "add_eos_token": True}, [], [2]),
    ],
)
def test_the_config_says_whether_a_text_gets_begin_and_end(tmp_path, flags, first, last):
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_fallback(), CONFIG | flags))
    plain = byte_fallback().encode("ab", add_special_tokens=False).ids
    assert ours.encode("ab") == [*first, *plain, *last]


LLAMA_LIKE = ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast"]
FLAGS_UNREAD = ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "TokenizersBackend"]


@pytest.mark.parametrize("has_processor", [True, False])
@pytest.mark.parametrize(
    "flags",
    [
        {"add_bos_token": not has_bos, "add_eos_token": has_eos}
        for has_bos in (True, False)
        for has_eos in (True, False)
    ]
    + [{"add_eos_token": True}, {"add_bos_token": False}],
)
@pytest.mark.parametrize("name", FLAGS_UNREAD)
def test_flags_that_a_class_of_transformers_ignores_change_nothing(
    tmp_path, name, flags, has_processor
):
    """Both 4.57 and 5.24 put around a text what tokenizer.json says."""
    backend = byte_fallback()
    if not has_processor:
        backend.post_processor = None
    ours = Tokenizer.from_folder(
        write_folder(tmp_path, backend, {**CONFIG, "tokenizer_class": name, **flags})
    )
    plain = byte_fallback().encode("ab", add_special_tokens=False).ids
    assert ours.encode("ab") == [*([1] if has_processor else []), *plain]


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_without_add_bos_token_the_class_adds_it(tmp_path, name):
    """With `add_eos_token` of false both 4.57 and 5.24 begin a text; with true 4.57 ends it too."""
    for eos, last in ((False, []), (True, [2])):
        config = {**CONFIG, "tokenizer_class": name, "add_eos_token": eos}
        ours = Tokenizer.from_folder(write_folder(tmp_path / str(eos), byte_fallback(), config))
        plain = byte_fallback().encode("ab", add_special_tokens=False).ids
        assert ours.encode("ab") == [1, *plain, *last]


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ({"model_type": "llama"}, []),
        ({"model_type": "gemma3_text"}, []),
        ({"model_type": "qwen3"}, [1]),
        ({"model_type": "qwen3", "tokenizer_class": "LlamaTokenizer"}, []),
        ({"model_type": "llama", "tokenizer_class": "PreTrainedTokenizerFast"}, [1]),
    ],
)
def test_the_model_says_the_class_of_a_tokenizer_without_one(tmp_path, model, first):
    folder = write_folder(tmp_path, byte_fallback(), {**CONFIG, "add_bos_token": False})
    (folder / "config.json").write_text(json.dumps(model))
    plain = byte_fallback().encode("ab", add_special_tokens=False).ids
    assert Tokenizer.from_folder(folder).encode("ab") == [*first, *plain]


def test_saved_truncation_and_padding_are_not_applied(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend, CONFIG))
    assert len(ours.encode("bbb")) == 3


def test_a_folder_without_a_config_has_no_begin_and_no_template(tmp_path):
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), None))
    assert ours.bos_id is None and ours.eos_id is None and ours.chat_template is None


# ----------------------------------------------------------------------------------- chat templates

TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
<{{ message.role }}>{% generation %}{{ message.content | tojson }}{% endgeneration %}

{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
USER = {"role": "user", "content": "ö & <b>"}


def with_template(tmp_path: Path, template: object) -> Tokenizer:
    """A tokenizer with this chat template."""
    config = {**CONFIG, "chat_template": template}
    return Tokenizer.from_folder(write_folder(tmp_path, byte_level(), config))


def test_a_chat_is_rendered_as_transformers_does(tmp_path):
    ours = with_template(tmp_path, TEMPLATE)
    text = ours.render_chat([{"role": "tool", "content": " "}, USER])
    assert text == '<s><user>"ö & <b>"<assistant>'
    assert ours.apply_chat_template([USER]) == byte_level().encode(text).ids


SAID, HI = "{{ messages[0].content }}", {"role": "user", "content": "hi"}


def test_a_template_file_wins_over_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(f"{{{{ eos_token }}}}{SAID}", encoding="utf-8")
    assert with_template(tmp_path, TEMPLATE).render_chat([HI]) == "</s>hi"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d" + SAID}]
    assert with_template(tmp_path, named).render_chat([HI]) == "dhi"


def test_without_a_default_template_the_names_are_told(tmp_path):
    named = [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t{{ tools }}"}]
    ours = with_template(tmp_path, named)
    with pytest.raises(ValueError, match="no chat template named 'default', only 'rag', 'tool_u"):
        ours.render_chat([HI])


def test_further_template_files_are_taken_by_their_names(tmp_path):
    """As in transformers, files count instead of what the config has."""
    (tmp_path / "additional_chat_templates").mkdir()
    path = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    path.write_text("t{{ tools | length }}" + SAID, encoding="utf-8")
    with pytest.raises(ValueError, match="no chat template named 'default', only 'tool_use'"):
        with_template(tmp_path, TEMPLATE).render_chat([HI])
    (tmp_path / "chat_template.jinja").write_text("d" + SAID, encoding="utf-8")
    ours = with_template(tmp_path, TEMPLATE)
    assert ours.render_chat([HI]) == "dhi"
    assert ours.render_chat([HI], variables={"tools": []}) == "t0hi"


def test_the_template_of_a_processor_is_taken_where_there_is_no_other(tmp_path):
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "j" + SAID}), encoding="utf-8-sig")
    assert with_template(tmp_path, None).render_chat([HI]) == "jhi"
    assert with_template(tmp_path, "c" + SAID).render_chat([HI]) == "chi"
    path.write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(ValueError, match=r"chat_template\.json is malformed .*'template'"):
        with_template(tmp_path, None)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools is defined }} {{ tools is none }} {{ tools | tojson }}", "True True null"),
        ("{{ documents is defined }} {{ documents is none }}", "True True"),
        ("{% if tools is not none %}Tools:{% endif %}", ""),
        ("{% if documents is not none %}Documents:{% endif %}", ""),
        ("{% if tools %}Tools:{% endif %}{{ tools }}", "None"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ continue_final_message is defined }}", "False"),
        ("{{ bos_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}", "<s></s><s><none>"),
        ("{{ image_token }} {{ pad_token is defined }}", "<think> False"),
        ("{{ additional_special_tokens }}", "['a b']"),
    ],
)
def test_a_template_without_tools_sees_what_transformers_gives_it(tmp_path, template, text):
    config = {
        **CONFIG, "chat_template": template + "|" + SAID, "sep_token": "</s>", "cls_token": "<s>",
        "mask_token": "<none>", "extra_special_tokens": {"image_token": "<think>"},
        "additional_special_tokens": ["a b"],
    }  # fmt: skip
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), config))
    for variables in ({}, {"tools": None, "documents": None}):
        assert ours.render_chat([HI], variables=variables) == f"{text}|hi"
        ids = ours.apply_chat_template([HI], variables=variables, has_control=True)
        assert ids == ours.encode_raw(f"{text}|hi")


def test_an_older_config_has_the_tokens_of_the_special_tokens_map(tmp_path):
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "junk": 7}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    template = {"chat_template": "{{ bos_token }}" + SAID, "bos_token": "a b"}
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template))
    assert ours.render_chat([HI]) == "<s>hi"
    assert [ours.bos_id, ours.eos_id] == ours.encode_raw("<s></s>")
    assert tokenizer_files.read_eos_id(tmp_path) == ours.eos_id
    newer = {**template, "added_tokens_decoder": {}}
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), newer))
    assert ours.render_chat([HI]) == "a bhi" and ours.eos_id is None


def test_variables_reach_the_template(tmp_path):
    ours = with_template(tmp_path, "{{ enable_thinking }}" + SAID)
    assert ours.render_chat([HI], variables={"enable_thinking": False}) == "Falsehi"


def test_a_template_may_print_the_date(tmp_path):
    text = with_template(tmp_path, '{{ strftime_now("%Y") }}' + SAID).render_chat([HI])
    assert text.endswith("hi") and text.removesuffix("hi").isdigit()


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (None, [USER], "has no chat template"),
        ("x", [], "is empty"),
        ("x", [{"content": "x"}], r"messages\[0\].role is missing"),
        ("{{ raise_exception('roles must alternate') }}", [USER], "roles must alternate"),
        ("{{ messages[0].content + 1 }}", [USER], "refuses the messages"),
        ("{{ messages.append(1) }}", [USER], "refuses the messages"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", [USER], "refuses the messages"),
    ],
)
def test_a_chat_that_cannot_be_rendered_says_why(tmp_path, template, messages, says):
    with pytest.raises(ValueError, match=says):
        with_template(tmp_path, template).apply_chat_template(messages)


def test_a_template_that_gives_too_much_is_refused(tmp_path):
    says = "gave 67108864 characters, more than 33554432"
    with pytest.raises(ValueError, match=says):
        with_template(tmp_path, "{{ 'x' * 2 ** 26 }}").apply_chat_template([USER])


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 1.0)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 10 ** 100000000 % 7 }}", "took more than 1 s"),  # folded when it is compiled
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ 'x' * 10 ** 10 }}", "refuses the messages"),
        ("{{ [0] * 10 ** 9 }}", "refuses the messages"),
        ("{{ 'x' | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ cycler.__init__.__globals__.os.environ }}", "refuses the messages"),
    ],
)
def test_a_template_that_would_take_for_ever_is_stopped(tmp_path, template, says, short_limits):
    ours = with_template(tmp_path, template)
    since_s = time.monotonic()
    with pytest.raises(ValueError, match=says):
        ours.apply_chat_template([USER])
    assert time.monotonic() - since_s < 20
    # The next one is another process, or the same one, and works.
    assert with_template(tmp_path, "{{ messages[0].content }}").render_chat([USER]) == "ö & <b>"


def test_a_process_of_a_template_is_used_again_and_bounded():
    template = "{{ messages | length }}"
    texts = [chat_template.render_template(template, {"messages": [USER] * i}) for i in range(9)]
    assert [rendered.text for rendered in texts] == [str(i) for i in range(9)]
    (process,) = chat_template._renderer(template)._processes
    assert process.poll() is None
    limits = Path(f"/proc/{process.pid}/limits")
    if limits.exists():
        (line,) = [row for row in limits.read_text().splitlines() if "address space" in row]
        assert str(chat_template.MEMORY_BYTES) in line
        environ = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        names = {entry.partition("=")[0] for entry in environ if entry}
        assert names <= set(chat_template._KEPT_VARIABLES)
    process.kill()  # as the system may do where memory is short
    with pytest.raises(ValueError, match="its process ended with -9"):
        chat_template.render_template(template, {"messages": []})
    assert chat_template.render_template(template, {"messages": []}).text == "0"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "syntax error"),
        ("{{ " + "(" * 20_000 + " }}", "nested too deeply"),
        ("x" * (2**20 + 1), "has 1048577 characters, more than 1048576"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_with_the_folder(tmp_path, template, says):
    with pytest.raises(ValueError, match=f"tokenizer_config.json: .*{says}"):
        with_template(tmp_path, template)


# ------------------------------------------------------------------------------------- broken files


def grown(part: str, value: object) -> tokenizers.Tokenizer:
    values = json.loads(byte_fallback().to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(values | {part: value}))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 17}),
        ("normalizer", {"type": "Prepend", "prepend": "b" * 17}),
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaa"},
                ]
                * 2,
            },
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 17,
                "pair": [],
                "special_tokens": {},
            },
        ),
    ],
)
def test_a_tokenizer_that_makes_a_text_many_times_as_long_is_refused(tmp_path, part, value):
    with pytest.raises(ValueError, match="makes a text (17|25) times as long"):
        Tokenizer.from_folder(write_folder(tmp_path, grown(part, value), CONFIG))


def test_files_that_are_too_long_are_not_read(tmp_path, monkeypatch):
    write_folder(tmp_path, byte_level(), CONFIG)
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="tokenizer.json has more than 10 bytes"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_names_the_file_and_the_fix(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist, nor .*; copy tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    says = r"tokenizer\.json does not exist, but tokenizer\.model does.*save_pretrained"
    with pytest.raises(ValueError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_files_may_begin_with_the_mark_that_windows_writes(tmp_path):
    write_folder(tmp_path, byte_level(), CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert Tokenizer.from_folder(tmp_path).encode("ab") == byte_level().encode("ab").ids


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is not a tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"bos_token": "<none>"}', "'<none>'"),
        ("tokenizer_config.json", '{"bos_token": 7}', "7 is not a token"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "syntax error"),
        ("tokenizer_config.json", '{"chat_template": 7}', "must be text"),
        ("tokenizer_config.json", '{"chat_template": [7]}', r"tokenizer_config\.json is malformed"),
        ("tokenizer_config.json", '{"chat_template": [{"a": 7}]}', r"config\.json is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 7}', r"config\.json is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}', r"json is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "<s>"}}', r"'x'"),
        ("tokenizer_config.json", '{"extra_special_tokens": 7}', r"config\.json is malformed"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', r"ud800"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"900": {"content": "<x>"}}}',
            "token 900 as '<x>'",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, says):
    write_folder(tmp_path, byte_level(), CONFIG)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Strip(" ", 2, 0),
        decoders.Replace(tokenizers.Regex("a"), "b"),
    ],
    ids=str,
)
def test_an_unknown_decoder_is_refused(tmp_path, decoder):
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(ValueError, match="is not known; known are"):
        Tokenizer.from_folder(write_folder(tmp_path, backend, CONFIG))


# ---------------------------------------------------------------------------- the published ones


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_published_tokenizers_give_their_golden_ids_and_texts(name, tmp_path):
    source = shared_folder(f"tokenizers/{name}")
    ours = Tokenizer.from_folder(source)
    texts = json.loads((GOLDEN / f"tokens_{name}.json").read_text(encoding="utf-8"))["texts"]
    for row in texts.values():
        assert ours.encode(row["text"], has_control=True) == row["ids"]
        if name == "qwen3":  # of llama3 there is no config, which names its special tokens
            assert ours.decode(row["ids"]) == row["decoded_skipping_special_tokens"]


def test_the_chat_template_of_qwen3_gives_its_golden_texts_and_ids():
    ours = Tokenizer.from_folder(shared_folder("tokenizers/qwen3"))
    chats = json.loads((GOLDEN / "chat_qwen3.json").read_text(encoding="utf-8"))["chats"]
    for row in chats.values():
        options = {"messages": row["messages"], "variables": row["arguments"]}
        assert ours.render_chat(**options) == row["text"]
        assert ours.apply_chat_template(**options, has_control=True) == row["ids"]
        is_plain = not ours.control.search(json.dumps(options))
        assert (ours.apply_chat_template(**options) == row["ids"]) == is_plain


def test_a_copy_of_the_stories_tokenizer_round_trips(tmp_path):
    source = shared_folder("weights/stories260K")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    for text in ("Once upon a time", "wörld 你好 😀", "two  spaces\n"):
        assert ours.encode(text)[0] == ours.bos_id
        assert ours.decode(ours.encode(text)) == text


# ------------------------------------------------------------------------------------- identity


def bundled_copy(folder: Path) -> Path:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        shutil.copy(bundled_model_path() / name, folder / name)
    return folder


def test_a_tokenizer_keeps_the_hash_of_the_files_that_it_was_read_from(tmp_path):
    folder = bundled_copy(tmp_path)
    made = Tokenizer.from_folder(folder)
    # That of every receipt of the bundled model.
    assert made.files_sha256[:8] == "78e17e94"
    written = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(written, indent=3))
    assert made.files_sha256[:8] == "78e17e94"
    assert Tokenizer.from_folder(folder).files_sha256 != made.files_sha256


def test_a_map_of_special_tokens_is_hashed_where_it_is_read(tmp_path):
    """It hides tokens from the text: another tokenizer."""
    folder = bundled_copy(tmp_path)
    plain = Tokenizer.from_folder(folder)
    hidden = plain.decode(plain.encode(" man")[-1:])
    assert hidden == " man"
    token = plain.backend.id_to_token(plain.encode(" man")[-1])
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"additional_special_tokens": [token]})
    )
    other = Tokenizer.from_folder(folder)
    assert other.special_ids > plain.special_ids and other.files_sha256 != plain.files_sha256
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    unread = Tokenizer.from_folder(folder)
    (folder / "special_tokens_map.json").unlink()
    assert Tokenizer.from_folder(folder).files_sha256 == unread.files_sha256


def test_every_template_is_in_the_hash_and_one_alone_is_its_text(tmp_path):
    folder = bundled_copy(tmp_path)
    one = Tokenizer.from_folder(folder)
    text = (folder / "chat_template.jinja").read_text()
    assert one.templates_sha256 == hashlib.sha256(text.encode()).hexdigest()
    (folder / "additional_chat_templates").mkdir()
    tools = folder / "additional_chat_templates" / "tool_use.jinja"
    hashes = {one.templates_sha256}
    for body in ("a", "b"):
        tools.write_text(body)
        hashes.add(Tokenizer.from_folder(folder).templates_sha256)
    assert len(hashes) == 3
    assert one.with_template(tools).templates_sha256 == hashlib.sha256(b"b").hexdigest()


def test_files_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    folder = bundled_copy(tmp_path)
    read = tokenizer_module.read_config

    def read_and_change(path):
        found = read(path)
        (path / "tokenizer_config.json").write_text("{}")
        return found

    monkeypatch.setattr(tokenizer_module, "read_config", read_and_change)
    with pytest.raises(ValueError, match="was changed while it was read"):
        Tokenizer.from_folder(folder)
