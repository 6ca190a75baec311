# SPDX-License-Identifier: Apache-2.0
"""Prompts of the command line, of standard input and of files, good and bad."""

import io
import json
import sys

import pytest

from detjax.cli import errors


@pytest.fixture
def texts(command, capsys, toy):
    """Run the command: (options..., chat_template=) -> the texts of the prompts that it asked."""

    def run(*argv: str, **options) -> list[str]:
        assert command(*argv, "--format", "jsonl", "--max-tokens", "1", **options) == errors.OK
        entries = map(json.loads, capsys.readouterr().out.splitlines())
        return [toy.backend().decode(entry["prompt_token_ids"]) for entry in entries]

    return run


def test_prompts_come_from_the_command_line_then_from_the_file(texts, tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbftwo\r\n\n  three \n")
    argv = ("--prompts-file", str(path), "--prompt", "one")
    assert texts(*argv) == ["one", "two", "  three "]


def test_json_lines_hold_prompts_or_messages(texts, toy, tmp_path):
    path = tmp_path / "p.jsonl"
    message = {"role": "user", "content": "hi"}
    rows = [{"prompt": "a\nb", "id": 7}, {"messages": [message]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = ("--prompts-file", str(path))
    expected = ["a\nb", "[user]hi[assistant]"]
    assert texts(*argv, chat_template=toy.template) == expected
    argv = (*argv, "--chat")
    expected = ["[user]a\nb[assistant]", "[user]hi[assistant]"]
    assert texts(*argv, chat_template=toy.template) == expected


def test_a_system_prompt_begins_conversations_that_have_none(texts, toy, tmp_path):
    path = tmp_path / "p.jsonl"
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    rows = [{"prompt": "a"}, {"messages": [user]}, {"messages": [system, user]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = ("-p", "b", "--prompts-file", str(path), "--system-prompt", "be")
    assert texts(*argv, chat_template=toy.template) == [
        "[system]be[user]b[assistant]",
        "[system]be[user]a[assistant]",
        "[system]be[user]hi[assistant]",
        "[system]own[user]hi[assistant]",
    ]


def test_json_lines_have_their_own_sampling_and_their_id_comes_back(command, capsys, toy, tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "abcd", "id": {"a": 1}, "sampling": {"max_tokens": 2}},
        {"prompt_token_ids": [256, *toy.ids_of("xy")], "id": "second"},
        {"prompt": "ab", "sampling": {"logit_bias": {"7": 1.5}, "stop": ["b"]}},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert command("--prompts-file", str(path), "--format", "jsonl") == errors.OK
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry.get("id") for entry in entries] == [{"a": 1}, "second", None]
    assert [entry["text"] for entry in entries] == ["ab", "xy0", "a"]
    assert [entry["sampling"]["max_tokens"] for entry in entries] == [2, 61, 61]  # as fits
    assert [entry["sampling"]["logit_bias"] for entry in entries] == [[], [], [[7, 1.5]]]
    assert [entry["sampling"]["stop"] for entry in entries] == [[], [], ["b"]]
    assert command("--prompts-file", str(path), "--format", "json") == errors.OK
    document = json.loads(capsys.readouterr().out)
    model = document["model"]
    assert [entry | {"model": model} for entry in document["completions"]] == entries


def test_templates_see_what_a_line_gives_them(texts, tmp_path):
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}{{ mood }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    message = {"role": "user", "content": "hi"}
    rows = [
        {"messages": [message], "tools": [{}, {}], "chat_template_kwargs": {"mood": "!"}},
        {"messages": [message], "tools": [], "add_generation_prompt": False},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert texts("--prompts-file", str(path), chat_template=template) == ["hi2!>", "hi0"]


def test_a_file_takes_the_place_of_the_models_template(texts, toy, tmp_path):
    path, prompts = tmp_path / "mine.jinja", tmp_path / "p.jsonl"
    path.write_text(
        "<{{ messages[0].content }}>{{ messages[1:] | map(attribute='content') | join }}"
    )
    argv = ("--chat-template", str(path))
    assert texts("--prompt", "a", "--chat", *argv, chat_template=toy.template) == ["<a>"]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Well, "}]
    prompts.write_text(json.dumps({"messages": messages, "continue_final_message": True}))
    assert texts("--prompts-file", str(prompts), *argv) == ["<hi>Well, "]


def test_the_best_of_several_are_written(command, capsys, toy):
    """The fake's logprobs fall with the token id, so the lower number has the greater sum."""
    argv = ("--prompt", "a", "--n", "2", "--best-of", "4", "--format", "jsonl")
    assert command(*argv) == errors.OK
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sums = [sum(entry["logprobs"]) for entry in entries]
    assert [entry["text"] for entry in entries] == ["a0", "a1"] and sums[0] > sums[1]


def test_what_is_written_out_is_a_control_token_only_if_asked_for(command, capsys, toy):
    ids = {}
    for option in ((), ("--control-tokens",)):
        argv = ("--prompt", "a</s>", "--format", "jsonl", "--max-tokens", "1", *option)
        assert command(*argv) == errors.OK
        ids[option] = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    assert ids[()] == [256, *(i for c in "a</s>" for i in toy.ids_of(c))]
    assert ids["--control-tokens",] == [256, *toy.ids_of("a"), toy.end]


def set_stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_dash_reads_standard_input_without_its_last_line_end(texts, monkeypatch):
    set_stdin(monkeypatch, "é\nb\r\n".encode())
    assert texts("--prompt", "-") == ["é\nb"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"ok\n\xff\n", "p.txt line 2 is not valid UTF-8 at byte 1 (0xff)"),
        ("p.txt", b"\n \n", "has no prompt in it"),
        ("p.txt", b"ok\n" + b"x" * 64, "p.txt line 2 has 65 tokens"),
        ("p.jsonl", b'{"prompt": "a"}\n{', "p.jsonl line 2 is not JSON"),
        ("p.jsonl", b"[1]", "p.jsonl line 1 must be an object"),
        ("p.jsonl", b'{"text": "a"}', "p.jsonl line 1 has the unknown key `text`"),
        ("p.jsonl", b'{"prompt": "a", "messages": []}', "must have exactly one of `prompt`"),
        ("p.jsonl", b'{"id": 3}', "must have exactly one of `prompt`, `prompt_token_ids`"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "guided_json": {}}', "line 2 has the unk"),
        ("p.jsonl", b'{"prompt": "a", "sampling": {"tempature": 1}}', "unknown key `tempature`"),
        ("p.jsonl", b'{"prompt": "a", "sampling": {"top_p": 7}}', "line 1: top_p=7.0 must be in"),
        ("p.jsonl", b'{"prompt": "a", "sampling": 7}', "`sampling` must be an object"),
        ("p.jsonl", b'{"prompt": "a", "tools": []}', "`tools`, which only a chat template reads"),
        ("p.jsonl", b'{"prompt_token_ids": ["a"]}', "`prompt_token_ids` must be integers"),
        ("p.jsonl", b'{"prompt_token_ids": [999]}', "p.jsonl line 1 has token id 999"),
        ("p.jsonl", b'{"prompt": 7}', "`prompt` must be text, not 7"),
        ("p.jsonl", b'{"prompt": ""}', "p.jsonl line 1 is empty"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1 has \\ud800, one half of"),
        ("p.jsonl", b'{"prompt": "a", "seed": 3}', 'has `seed`; write "sampling": {"seed": ...}'),
        ("p.jsonl", b"[" * 100_000, "p.jsonl line 1 is not JSON"),
        ("p.jsonl", b'{"prompt": ' + b"9" * 5000 + b"}", "p.jsonl line 1 is not JSON"),
        ("p.txt", b"a\n" + b"x" * (2**23 + 1), "p.txt line 2 has more than 8388608 bytes"),
        ("p.jsonl", b'{"messages": []}', "`messages` is empty"),
        ("p.jsonl", b'{"messages": "a"}', "must be a list of objects"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', "p.jsonl line 1: "),
    ],
)
def test_a_bad_line_of_a_prompts_file_is_named(command, capsys, tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    assert command("--prompts-file", str(path)) == errors.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_a_prompt_that_never_ends_is_given_up(command, capsys, monkeypatch, tmp_path):
    with open("/dev/zero", "rb") as endless:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        assert command("--prompt", "-") == errors.BAD_INPUT
    assert "standard input has more than 8388608 bytes" in capsys.readouterr().err
    (tmp_path / "p.txt").symlink_to("/dev/zero")
    assert command("--prompts-file", str(tmp_path / "p.txt")) == errors.BAD_INPUT
    assert "p.txt line 1 has more than 8388608 bytes" in capsys.readouterr().err


def test_closed_standard_input_is_named(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert command("--prompt", "-") == errors.BAD_INPUT
    assert "standard input, which is closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a\xff", "standard input is not valid UTF-8 at byte 2"), (b"\n", "is empty")],
)
def test_bad_standard_input_is_refused(command, capsys, monkeypatch, content, says):
    set_stdin(monkeypatch, content)
    assert command("--prompt", "-") == errors.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and says in err
