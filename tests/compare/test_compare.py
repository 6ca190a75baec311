# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.compare`: what differs between two sets of answers, and what is chance."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import scipy.stats

from detjax.cli.errors import BAD_INPUT, BITS_DIFFER, OK
from detjax.compare.__main__ import main
from detjax.compare.comparison import flip_test, sign_test


def line(text: str, ids=(1, 2, 3), logprobs=(-0.5, -0.25, -1.0), **fields) -> dict:
    return {"text": text, "token_ids": list(ids), "logprobs": list(logprobs)} | fields


@pytest.fixture
def write(tmp_path):
    def make(name: str, *lines) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return str(path)

    return make


def compared(capsys, *argv: str) -> tuple[int, dict]:
    code = main([*argv, "--format", "json"])
    out, err = capsys.readouterr()
    assert not err
    return code, json.loads(out)


def test_nothing_differs(write, capsys):
    a = write("a", line("x"), line("y"))
    code, found = compared(capsys, a, a)
    assert (code, found["num_answers"]) == (OK, 2)
    assert (found["num_texts"], found["num_tokens"], found["num_bits"]) == (0, 0, 0)


def test_texts_tokens_and_bits_are_counted_apart(write, capsys):
    a = write("a", line("x"), line("x"), line("x"), line("x"))
    last = float(np.nextafter(np.float32(-1.0), np.float32(0)))
    b = write(
        "b",
        line("x"),
        line("x", logprobs=(-0.5, -0.25, last)),
        line("x", ids=(1, 2, 4)),
        line("z", ids=(9,), logprobs=(-2.0,)),
    )
    code, found = compared(capsys, a, b)
    assert code == BITS_DIFFER
    assert (found["num_texts"], found["num_tokens"], found["num_bits"]) == (1, 2, 3)
    assert found["first_tokens"] == [2, 0]
    assert 0 < found["largest_gap"] < 1e-6


def of_batch(name: str, body: dict, status: int = 200) -> dict:
    """A line of OpenAI's batches, as `detjax.run_batch` writes it."""
    return {"id": f"batch_req_{name}", "custom_id": name, "error": None,
            "response": {"status_code": status, "request_id": "r", "body": body}}  # fmt: skip


def test_answers_of_a_batch_are_paired_by_the_names_of_their_requests(write, capsys):
    def chat(text: str) -> dict:
        content = [{"token": text, "logprob": -0.5}]
        choice = {"index": 0, "message": {"content": text}, "logprobs": {"content": content}}
        return {"id": "chatcmpl-1", "choices": [choice]}

    told = {"tokens": ["x"], "token_logprobs": [-1.0]}
    two = {"choices": [{"index": i, "text": text, "logprobs": told} for i, text in enumerate("xy")]}
    a = write("a", of_batch("p", chat("b")), of_batch("q", two))
    b = write("b", of_batch("q", two), of_batch("p", chat("c")))
    code, found = compared(capsys, a, b)
    assert code == BITS_DIFFER
    assert (found["num_answers"], found["num_texts"], found["num_bits"]) == (3, 1, 1)
    assert compared(capsys, a, a)[0] == OK


def test_a_response_of_a_batch_has_the_text_of_its_items(write, capsys):
    def said(text: str) -> dict:
        parts = [{"type": "output_text", "text": text}]
        return of_batch("p", {"output": [{"type": "message", "content": parts}]})

    a = write("a", said("x"))
    assert compared(capsys, a, a)[0] == OK
    assert compared(capsys, a, write("b", said("y")))[1]["num_texts"] == 1


def calls(*arguments: str) -> list[dict]:
    """Calls of a function, each with an id that a server draws."""
    return [
        {"id": f"call_{id(text)}", "type": "function", "function": {"name": "f", "arguments": text}}
        for text in arguments
    ]


@pytest.mark.parametrize(
    ("said", "other"),
    [
        ({"content": None, "tool_calls": calls("1")}, {"content": None, "tool_calls": calls("2")}),
        ({"content": "", "tool_calls": calls("1")}, {"content": ""}),
        ({"content": "x", "reasoning_content": "a"}, {"content": "x", "reasoning_content": "b"}),
        ({"content": None, "refusal": "no"}, {"content": None, "refusal": "never"}),
    ],
)
@pytest.mark.parametrize("is_batch", [True, False])
def test_calls_reasoning_and_refusals_of_a_chat_are_what_it_says(
    write, capsys, said, other, is_batch
):
    def of(message: dict) -> dict:
        body = {"id": f"chatcmpl-{id(message)}", "choices": [{"message": message}]}
        return of_batch("p", body) if is_batch else body

    again = json.loads(json.dumps(said))
    for call in again.get("tool_calls", ()):
        call["id"] = "drawn anew"
    a = write("a", of(said))
    assert compared(capsys, a, write("same", of(again)))[0] == OK
    code, found = compared(capsys, a, write("b", of(other)))
    assert (code, found["num_texts"]) == (BITS_DIFFER, 1)


@pytest.mark.parametrize("is_batch", [True, False])
def test_items_of_a_response_are_what_it_says(write, capsys, is_batch):
    def of(arguments: str, thought: str, token: float = -0.5) -> dict:
        items = [
            {"type": "reasoning", "id": f"rs_{id(thought)}", "summary": [{"text": thought}]},
            {"type": "function_call", "id": "fc", "call_id": "c", "name": "f",
             "arguments": arguments},
            {"type": "message", "id": "msg", "content": [
                {"type": "output_text", "text": "x", "logprobs": [
                    {"token": "x", "logprob": token}]}]},
        ]  # fmt: skip
        body = {"id": f"resp_{id(items)}", "object": "response", "output": items}
        return of_batch("p", body) if is_batch else body

    a = write("a", of("1", "t"))
    assert compared(capsys, a, write("same", of("1", "t")))[0] == OK
    assert compared(capsys, a, write("b", of("2", "t")))[1]["num_texts"] == 1
    assert compared(capsys, a, write("c", of("1", "u")))[1]["num_texts"] == 1
    code, found = compared(capsys, a, write("d", of("1", "t", -0.25)))
    assert (code, found["num_texts"], found["num_bits"]) == (BITS_DIFFER, 0, 1)


def of_output(*items, **fields) -> dict:
    return {"object": "response", "output": list(items)} | fields


@pytest.mark.parametrize(
    ("said", "other"),
    [
        ({"content": "A"}, {"content": "B"}),
        ({"content": [{"text": "A"}]}, {"content": "B"}),
        ({"content": [{"type": "output_audio", "data": "A"}]}, {"content": [{"data": "B"}]}),
        ({"content": [{"text": 0}]}, {"content": [{"text": ""}]}),
    ],
)
def test_all_that_a_message_of_a_response_says_counts(write, capsys, said, other):
    a, b = (write(name, of_output(one)) for name, one in (("a", said), ("b", other)))
    assert compared(capsys, a, a)[0] == OK
    code, found = compared(capsys, a, b)
    assert (code, found["num_texts"]) == (BITS_DIFFER, 1)


def test_a_text_and_its_only_part_are_equal(write, capsys):
    a, b = of_output({"content": "A"}), of_output({"content": [{"text": "A"}]})
    assert compared(capsys, write("a", a), write("b", b))[0] == OK


@pytest.mark.parametrize(
    ("said", "other"),
    [
        (line("x", finish_reason="stop"), line("x", finish_reason="length")),
        (
            {"choices": [{"text": "x", "finish_reason": "stop"}]},
            {"choices": [{"text": "x", "finish_reason": "length"}]},
        ),
        (
            of_output({"content": "x"}, status="completed"),
            of_output(
                {"content": "x"},
                status="incomplete",
                incomplete_details={"reason": "max_output_tokens"},
            ),
        ),
    ],
    ids=["generate", "completions", "responses"],
)
def test_answers_that_ended_for_another_reason_differ(write, capsys, said, other):
    a, b = write("a", said, said), write("b", other, said)
    code, found = compared(capsys, a, b)
    assert code == BITS_DIFFER and not found["num_texts"] and not found["num_bits"]
    assert (found["num_finish_reasons"], found["num_with_finish_reasons"]) == (1, 2)
    assert compared(capsys, b, b)[0] == OK
    assert main([a, b]) == BITS_DIFFER
    assert "finish_reason" in capsys.readouterr().out


def test_a_reason_that_one_set_lacks_is_not_compared(write, capsys):
    code, found = compared(
        capsys, write("a", line("x", finish_reason="stop")), write("b", line("x"))
    )
    assert (code, found["num_finish_reasons"], found["num_with_finish_reasons"]) == (OK, None, 0)


def test_an_answer_without_logprobs_hides_no_other(write, capsys):
    bare = {"text": "z"}
    a = write("a", line("x"), line("y"), bare)
    b = write("b", line("x", ids=(1, 2, 4)), line("y", logprobs=(-0.5, -0.25, -2.0)), bare)
    code, found = compared(capsys, a, b)
    assert (code, found["num_tokens"], found["num_bits"]) == (BITS_DIFFER, 1, 2)
    assert (found["num_with_tokens"], found["num_with_bits"], found["num_answers"]) == (2, 2, 3)
    main([a, b])
    assert "1 of 3 answers lack tokens or logprobs in a set" in capsys.readouterr().out


def test_the_null_of_an_echoed_prompt_is_no_difference(write, capsys):
    a = write("a", line("x", logprobs=(None, -0.25, -1.0)))
    code, found = compared(capsys, a, a)
    assert (code, found["num_bits"], found["largest_gap"]) == (OK, 0, 0.0)
    b = write("b", line("x", logprobs=(None, -0.25, -1.5)))
    code, found = compared(capsys, a, b)
    assert (code, found["num_bits"], found["largest_gap"]) == (BITS_DIFFER, 1, 0.5)


def test_choices_are_paired_by_their_index(write, capsys):
    choices = [{"index": i, "text": text} for i, text in enumerate("xy")]
    a, b = write("a", {"choices": choices}), write("b", {"choices": choices[::-1]})
    assert compared(capsys, a, b)[0] == OK


def test_choices_of_one_response_and_sequences_of_one_id_are_apart(write, capsys):
    a = write("a", {"choices": [{"text": "x"}, {"text": "y"}]})
    assert (
        compared(capsys, a, write("b", {"choices": [{"text": "x"}, {"text": "z"}]}))[1]["num_texts"]
        == 1
    )
    several = [line(text, id="p", index=0, sequence=i) for i, text in enumerate("xy")]
    a = write("c", *several, line("z", id="q", index=1, sequence=0))
    b = write("d", line("z", id="q"), *reversed(several))
    assert compared(capsys, a, b) == (OK, compared(capsys, a, a)[1])


def test_a_float64_of_one_float32_is_the_same_bit(write, capsys):
    """JSON of another server may round the decimal that names a float32."""
    value = float(np.float32(-0.1))
    a = write("a", line("x", ids=(1,), logprobs=(value,)))
    b = write("b", line("x", ids=(1,), logprobs=(-0.1,)))
    assert compared(capsys, a, b)[0] == OK


def test_responses_of_openai_are_read_and_what_is_missing_is_not_counted(write, capsys):
    tokens = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}
    a = write("a", {"id": "cmpl-1", "choices": [{"text": "ab", "logprobs": tokens}]})
    b = write("b", {"id": "cmpl-2", "choices": [{"message": {"content": "ab"}}]})
    code, found = compared(capsys, a, b)
    assert code == OK
    assert (found["num_tokens"], found["num_bits"], found["largest_gap"]) == (None, None, None)
    content = [{"token": "a", "logprob": -1.0}, {"token": "c", "logprob": -2.0}]
    c = write("c", {"choices": [{"message": {"content": "ac"}, "logprobs": {"content": content}}]})
    code, found = compared(capsys, a, c)
    assert (code, found["first_tokens"]) == (BITS_DIFFER, [1])


def test_token_ids_and_texts_of_tokens_are_not_compared(write, capsys):
    told = {"tokens": ["a"], "token_logprobs": [-1.0]}
    a = write("a", line("a", ids=(5,), logprobs=(-1.0,)))
    b = write("b", {"choices": [{"text": "a", "logprobs": told}]})
    code, found = compared(capsys, a, b)
    assert (code, found["num_tokens"], found["num_bits"]) == (OK, None, None)


def test_answers_are_paired_by_id_and_by_prompt_and_sequence(write, capsys):
    a = write("a", line("x", id="p"), line("y", id="q"))
    assert compared(capsys, a, write("b", line("y", id="q"), line("x", id="p")))[0] == OK
    a = write("a", line("x", index=0, sequence=0), line("y", index=0, sequence=1))
    b = write("b", line("y", index=0, sequence=1), line("x", index=0, sequence=0))
    assert compared(capsys, a, b)[0] == OK


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 5, 1.0), (10, 0, 2 / 1024), (30, 10, 0.0022)],
)
def test_sign_test_is_exact(better, worse, p):
    assert sign_test(better, worse) == pytest.approx(p, rel=0.02)
    if better + worse:
        assert sign_test(better, worse) == pytest.approx(
            scipy.stats.binomtest(better, better + worse).pvalue, rel=1e-12
        )


def test_flip_test_tells_noise_from_effect():
    rng = np.random.default_rng(3)
    # Under chance alone a p-value is below 0.05 in 5 % of cases: 20 of 400, sd 4.4.
    null = [flip_test(rng.normal(size=12)) for _ in range(400)]
    assert 4 <= sum(p < 0.05 for p in null) <= 38
    assert flip_test(rng.normal(loc=1.0, size=40)) < 0.001
    assert flip_test(np.zeros(5)) == 1.0


def test_scores_are_told_with_their_probability(write, capsys):
    rows = [(True, True)] * 50 + [(False, True)] * 12 + [(True, False)] * 1
    a = write("a", *(line("x", correct=x) for x, _ in rows))
    b = write("b", *(line("x", correct=y) for _, y in rows))
    code, found = compared(capsys, a, b, "--score", "correct")
    assert code == BITS_DIFFER
    scores = found["scores"]
    assert (scores["num_better"], scores["num_worse"]) == (12, 1)
    assert scores["p_value"] == pytest.approx(14 * 2 / 2**13)
    assert main([a, b, "--score", "correct"]) == BITS_DIFFER
    assert "probability 0.00342: more than chance" in capsys.readouterr().out
    assert main([a, b, "--score", "correct", "--alpha", "0.001"]) == BITS_DIFFER
    assert "no more than chance" in capsys.readouterr().out
    assert main([a, a, "--score", "correct"]) == main([a, b]) == OK


def nested(depth: int) -> dict:
    value: list = []
    for _ in range(depth):
        value = [value]
    return line("x", prompt=value)


@pytest.mark.parametrize(
    ("a", "b", "argv", "said"),
    [
        ([line("x")], [line("x"), line("y")], [], "1 answers of B are not in the other set"),
        ([line("x", prompt="p")], [line("x", prompt="q")], [], "has another prompt in B"),
        ([line("x", id=1), line("y", id=1)], [line("x")], [], "lines 1 and 2 are both '1'"),
        ([{"txt": "x"}], [line("x")], [], "line 1 has no `text`"),
        ([line("x")], [line("x")], ["--score", "f1"], "`f1` is None, not a number"),
        ([line("x")], [line("x")], ["--alpha", "2"], "--alpha 2.0 must be between 0 and 1"),
        ([line("x")], [line("x")], ["--prompts-file", "p"], "is for two servers"),
        ([], [line("x")], [], "has no answers"),
        ([[1]], [line("x")], [], "is not a JSON object"),
        ([{"choices": ["x"]}], [line("x")], [], "answer 'line 1' has no `choices` of objects"),
        ([{"choices": []}], [line("x")], [], "answer 'line 1' has no `choices` of objects"),
        ([line("x", f=float("nan"))], [line("x", f=1)], ["--score", "f"], "`f` is nan, not a num"),
        ([line("x", f=1)], [line("x", f=float("inf"))], ["--score", "f"], "`f` is inf, not a num"),
        (
            [of_batch("p", {"error": {"message": "n=0"}}, 400)],
            [line("x")],
            [],
            "request 'p' was refused, so it has no answer to compare; leave it out",
        ),
        (
            [of_batch("p", {})],
            [line("x")],
            [],
            "answer 'p' has no `choices` of objects, nor `output`",
        ),
        (
            [line("x", logprobs=(-1, -int("9" * 400), -1))],
            [line("x")],
            [],
            "a, line 1: `logprobs` is -99999999",
        ),
        ([line("x", f=int("9" * 400))], [line("x", f=1)], ["--score", "f"], "a, line 1: `f` is 99"),
        (
            [{"text": "x", "logprobs": {"content": ["x"]}}],
            [line("x")],
            [],
            "a, line 1: `logprobs` has 'x', which is no object",
        ),
        (
            [of_output({"content": [{"text": "a", "logprobs": 5}]})],
            [line("x")],
            [],
            "a, line 1: `logprobs` is 5, not a list",
        ),
        ([of_output({"content": 5})], [line("x")], [], "a, line 1: `content` is 5, not a list"),
        ([of_output({"content": [5]})], [line("x")], [], "a, line 1: `content` has 5, which is no"),
        ([of_output({"text": "x"})], [line("x")], [], "a message of `output` has no `content`"),
        ([of_output("x")], [line("x")], [], "a, line 1: `output` has 'x', which is no object"),
        (
            [{"choices": [{"message": {"content": "x", "tool_calls": 5}}]}],
            [line("x")],
            [],
            "a, line 1: `tool_calls` is 5, not a list",
        ),
        ([nested(70)], [line("x")], [], "a, line 1 has objects or lists more than 64 deep"),
    ],
)
def test_what_cannot_be_compared_is_named(write, capsys, a, b, argv, said):
    assert main([write("a", *a), write("b", *b), *argv]) == BAD_INPUT
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1


def test_lists_that_python_cannot_read_are_named(tmp_path, capsys):
    path = tmp_path / "a"
    path.write_text('{"text":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert main([str(path), str(path)]) == BAD_INPUT
    assert f"{path}, line 1 has objects or lists more than 64 deep" in capsys.readouterr().err


CONTENT = {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": []}]}
KINDS = (
    line("x", id="p", prompt="q", finish_reason="stop", sequence=0, score=1),
    {"choices": [{"index": 0, "text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [-1]}}]},
    {"choices": [{"message": {"content": "x", "tool_calls": calls("1"), "refusal": "n"}}]},
    {"choices": [{"message": {"content": "x"}, "logprobs": CONTENT, "finish_reason": "stop"}]},
    of_output(
        {"type": "message", "content": [{"text": "x", "refusal": "n", "logprobs": [{}]}]},
        {"type": "function_call", "name": "f", "arguments": "1"},
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
    ),
    of_batch("p", {"choices": [{"index": 0, "text": "x"}]}),
)
"""A line of each kind."""
ODD = (
    None,
    True,
    5,
    -int("9" * 400),
    1e300,
    "x",
    "\x1b[2K",
    "\ud800",
    [],
    [None],
    ["x"],
    {},
    [[{}]],
)


def places(value, path=()):
    """The path of each part of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in items if isinstance(value, dict | list) else ():
        yield (*path, name)
        if isinstance(one, dict | list):
            yield from places(one, (*path, name))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_an_odd_value_at_any_place_of_a_line_is_no_fault_of_detjax(write, capsys, kind):
    count = 0
    right = write("right", KINDS[kind])
    for *parents, last in places(KINDS[kind]):
        for value in ODD:
            made = place = copy.deepcopy(KINDS[kind])
            for name in parents:
                place = place[name]
            place[last] = value
            a = write("a", made)
            for others in ((a, right), (a, a)):
                code = main([*others, "--score", "score"] if kind == 0 else [*others])
                out, err = capsys.readouterr()
                assert code in (OK, BAD_INPUT, BITS_DIFFER), (made, err)
                assert "\x1b" not in out + err and err.count("\n") <= 1, made
                count += 1
    assert count > 100


ODD_MODELS = ([], {"data": 5}, {"data": [5]}, {"data": [{}]}, 5)
ODD_ANSWERS = ([], 5, {}, {"choices": []}, {"choices": [{"text": "x"}, {"text": "y"}]})


class Answers(BaseHTTPRequestHandler):
    """A server whose second answer depends on its port."""

    def do_GET(self):
        self._send({"data": [{"id": "m"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "m" and asked["temperature"] == 0
        odd = asked["prompt"] == "two" and self.server.server_port % 2
        token = "odd" if odd else "even"
        told = {"tokens": [token], "token_logprobs": [-1.0]}
        self._send({"choices": [{"text": token, "logprobs": told}]})

    def _send(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_two_servers_are_asked_the_same_prompts(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    servers: dict[int, ThreadingHTTPServer] = {}
    spare = []
    while len(servers) < 2:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        if server.server_port % 2 in servers:
            spare.append(server)
        else:
            servers[server.server_port % 2] = server
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    even, odd = (f"http://127.0.0.1:{servers[i].server_port}" for i in (0, 1))
    prompts = ["--prompts-file", str(tmp_path / "prompts.txt")]
    try:
        assert compared(capsys, even, f"{even}/v1", *prompts)[0] == OK
        code, found = compared(capsys, even, odd, *prompts)
        assert (code, found["num_texts"], found["num_bits"]) == (BITS_DIFFER, 1, 1)
        assert main([even, odd]) == BAD_INPUT
        assert "--prompts-file FILE" in capsys.readouterr().err
        for name, value in (("sampling", {"seed": 1}), ("lora", "sql")):
            (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "one", name: value}) + "\n")
            assert main([even, odd, "--prompts-file", str(tmp_path / "p.jsonl")]) == BAD_INPUT
            assert f"has `{name}`, and both servers are asked" in capsys.readouterr().err
    finally:
        for server in servers.values():
            server.shutdown()
        for server in [*servers.values(), *spare]:
            server.server_close()
    assert main([even, odd, *prompts]) == BAD_INPUT
    told = capsys.readouterr().err
    assert "does not answer" in told and "start the server, or check its address" in told


class OddAnswers(Answers):
    """A server that answers as no server of OpenAI's API does."""

    models: object
    answer: object

    def do_GET(self):
        self._send(self.models)

    def do_POST(self):
        self._send(self.answer)


def test_a_server_that_answers_otherwise_is_named(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), OddAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    good = {"data": [{"id": "m"}]}
    try:
        for models, answer in (
            *((models, {}) for models in ODD_MODELS),
            *((good, answer) for answer in ODD_ANSWERS),
        ):
            OddAnswers.models, OddAnswers.answer = models, answer
            argv = [url, url, "--prompts-file", str(tmp_path / "prompts.txt")]
            assert main(argv) == BAD_INPUT, (models, answer)
            told = capsys.readouterr().err
            assert told.startswith("error: ") and url in told and told.count("\n") == 1
    finally:
        server.shutdown()
        server.server_close()
