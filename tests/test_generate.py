# SPDX-License-Identifier: Apache-2.0
"""The command, with a fake engine: what it reads, asks, streams, writes, refuses and compares."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from detjax import generate
from detjax.serving.request import Completion, FinishReason, Request, TokenEvent

CONTEXT = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def backend() -> tokenizers.Tokenizer:
    """One token a byte, then begin and end."""
    made = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(BYTES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 256)]
    )
    return made


def ids_of(text: str) -> list[int]:
    """The tokens of a text, without the one that begins it."""
    return backend().encode(text, add_special_tokens=False).ids


END = 257


def write_model(folder: Path, *, chat_template: str | None = None) -> Path:
    """A folder with everything but weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# ---------------------------------------------------------------------------------- the fake engine

Answer = Callable[[Request, int], list[int]]


@dataclasses.dataclass
class FakeStats:
    """Where no time went."""

    compile_s: float = 0.5
    prefill_s: float = 0.25
    prefill_tokens: int = 10
    decode_s: float = 0.0
    decode_tokens: int = 0


class FakeEngine:
    """Says what `answer` says, a token of each sample in turn, as an engine would."""

    def __init__(self, answer: Answer, shape: generate.EngineShape, flip: tuple[int, int]):
        self._answer = answer
        self._shape = shape
        self._flip = flip  # (batch size, token position) of which a logprob's last bit is wrong
        self.stats = FakeStats()

    def generate(
        self, requests: Sequence[Request], *, on_token: Callable[[TokenEvent], bool]
    ) -> list[Completion]:
        keys = [(r, s) for r, request in enumerate(requests) for s in range(request.sampling.n)]
        made: dict[tuple[int, int], list[TokenEvent]] = {key: [] for key in keys}
        reasons: dict[tuple[int, int], FinishReason] = {}
        while len(reasons) < len(keys):
            for key in [key for key in keys if key not in reasons][: self._shape.batch_size]:
                event = self._event(requests[key[0]], key, len(made[key]))
                made[key].append(event)
                sampling = requests[key[0]].sampling
                if on_token(event) or event.token_id in sampling.stop_token_ids:
                    reasons[key] = FinishReason.STOP
                elif len(made[key]) == sampling.max_tokens:
                    reasons[key] = FinishReason.LENGTH
        return [self._completion(requests, key, made[key], reasons[key]) for key in keys]

    def _event(self, request: Request, key: tuple[int, int], position: int) -> TokenEvent:
        answer = self._answer(request, key[1])
        token_id = answer[position % len(answer)]
        logprob = np.float32(-0.1) * np.float32(1 + token_id + position)
        if self._flip == (self._shape.batch_size, position):
            logprob = np.nextafter(logprob, np.float32(0))
        top = [(token_id, logprob), (0, np.float32(-9))][: request.sampling.num_top_logprobs]
        return TokenEvent(
            request_idx=key[0],
            sample_idx=key[1],
            token_id=token_id,
            logprob=logprob,
            top_logprobs=tuple(top),
        )

    def _completion(self, requests, key, events, reason) -> Completion:
        return Completion(
            request_idx=key[0],
            sample_idx=key[1],
            prompt_token_ids=requests[key[0]].prompt_token_ids,
            token_ids=tuple(e.token_id for e in events),
            logprobs=tuple(e.logprob for e in events),
            top_logprobs=tuple(e.top_logprobs for e in events),
            finish_reason=reason,
        )


def echo(request: Request, sample: int) -> list[int]:
    """Answer with the prompt and the number of the sample, then end."""
    prompt = [i for i in request.prompt_token_ids if i < 256]
    return [*prompt, *ids_of(str(sample)), END]


@pytest.fixture
def command(tmp_path):
    """Run the command on a model folder: (options..., answer=, flip=, chat_template=) -> code."""

    def run(
        *argv: str,
        answer: Answer = echo,
        flip: tuple[int, int] = (0, 0),
        chat_template: str | None = None,
        shapes: list[generate.EngineShape] | None = None,
    ) -> int:
        folder = write_model(tmp_path / "model", chat_template=chat_template)

        def make_engine(shape: generate.EngineShape) -> FakeEngine:
            if shapes is not None:
                shapes.append(shape)
            return FakeEngine(answer, shape, flip)

        def open_model(args, where, display) -> generate.OpenModel:
            assert where == folder
            return generate.OpenModel(
                fingerprint="0123456789abcdef",
                backend="portable",
                backend_reason="a test",
                make_engine=make_engine,
            )

        return generate.main(["--model", str(folder), *argv], open_model=open_model)

    return run


def lines_of(text: str) -> list[dict]:
    """Read JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


# ------------------------------------------------------------------------------------------- output


def test_text_goes_to_stdout_and_everything_else_to_stderr(command, capsys):
    assert command("--prompt", "héllo") == generate.OK
    out, err = capsys.readouterr()
    assert out == "héllo0\n"
    for part in ("fingerprint 0123456789abcdef", "portable (a test)", "dp 1 x tp 1", "bfloat16"):
        assert part in err
    for part in ("load", "compile", "prefill", "decode", "first token", "digest", "8 tokens, stop"):
        assert part in err


def test_several_completions_are_written_one_after_the_other_under_headers(command, capsys):
    assert command("--prompt", "ab", "--prompt", "longer", "--n", "2") == generate.OK
    out, err = capsys.readouterr()
    assert out.split("=== ")[1:] == [
        "prompt 0, sample 0 ===\nab0\n",
        "prompt 0, sample 1 ===\nab1\n",
        "prompt 1, sample 0 ===\nlonger0\n",
        "prompt 1, sample 1 ===\nlonger1\n",
    ]
    assert err.count("digest ") == 5 and "of all 4" in err


class Pieces(io.StringIO):
    """A stream that remembers each write."""

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_text_streams_token_by_token_in_whole_characters(command, monkeypatch):
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    assert command("--prompt", "aö你", "--stop", "你0") == generate.OK
    assert out.pieces == ["a", "ö", "\n"]


def test_a_stop_string_is_not_shown_and_its_tokens_stay_in_the_digest(command, capsys):
    assert command("--prompt", "one two", "--stop", " t", "--format", "jsonl") == generate.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert entry["text"] == "one"
    assert entry["finish_reason"] == "stop"
    assert entry["token_ids"] == ids_of("one t")


def test_text_held_back_for_a_stop_string_is_released_at_the_end(command, capsys):
    assert command("--prompt", "abab", "--stop", "abX", "--max-tokens", "4") == generate.OK
    assert capsys.readouterr().out == "abab\n"


def test_json_lines_hold_what_the_help_says(command, capsys):
    assert command("--prompt", "ab", "--format", "jsonl", "--logprobs", "1") == generate.OK
    out, err = capsys.readouterr()
    (entry,) = lines_of(out)
    assert list(entry) == [
        "index",
        "sample",
        "prompt_token_ids",
        "token_ids",
        "text",
        "finish_reason",
        "logprobs",
        "top_logprobs",
        "digest",
        "fingerprint",
    ]
    assert entry["prompt_token_ids"] == [256, *ids_of("ab")]
    assert entry["token_ids"] == [*ids_of("ab0"), END]
    assert (entry["index"], entry["sample"], entry["text"]) == (0, 0, "ab0")
    assert entry["fingerprint"] == "0123456789abcdef"
    assert [top[0] for top in entry["top_logprobs"]] == [
        [token_id, logprob]
        for token_id, logprob in zip(entry["token_ids"], entry["logprobs"], strict=True)
    ]
    assert "digest" not in err


def test_logprobs_and_digest_survive_json_bit_for_bit(command, capsys):
    assert command("--prompt", "ab", "--format", "jsonl") == generate.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert "top_logprobs" not in entry
    logprobs = np.array(entry["logprobs"], np.float32)
    assert (logprobs.astype(np.float64) == np.array(entry["logprobs"])).all()
    completion = Completion(
        request_idx=0,
        sample_idx=0,
        prompt_token_ids=(),
        token_ids=tuple(entry["token_ids"]),
        logprobs=tuple(logprobs),
        top_logprobs=(),
        finish_reason=FinishReason.STOP,
    )
    assert completion.digest() == entry["digest"]


def test_json_is_one_document(command, capsys):
    argv = ("--prompt", "ab", "--prompt", "c", "--format", "json", "--top-k", "5", "--stop", "x")
    assert command(*argv) == generate.OK
    document = json.loads(capsys.readouterr().out)
    assert [entry["text"] for entry in document["completions"]] == ["ab0", "c0"]
    assert document["sampling"]["top_k"] == 5 and document["sampling"]["stop"] == ["x"]
    assert document["stats"]["prefill_tokens"] == 10
    assert len(document["digest"]) == 64 and "check" not in document


def test_json_lines_come_in_order_even_if_a_later_one_ends_first(command, capsys):
    argv = ("--prompt", "a long one", "--prompt", "b", "--format", "jsonl")
    assert command(*argv) == generate.OK
    assert [e["index"] for e in lines_of(capsys.readouterr().out)] == [0, 1]


def test_a_completion_ends_with_the_context(command, capsys):
    prompt = "x" * (CONTEXT - 4)
    argv = ("--prompt", prompt, "--format", "jsonl", "--max-tokens", "99")
    assert command(*argv) == generate.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert len(entry["prompt_token_ids"]) + len(entry["token_ids"]) == CONTEXT
    assert entry["finish_reason"] == "length"


# ------------------------------------------------------------------------------------------ prompts


def texts(command, capsys, *argv, **options) -> list[str]:
    """The texts of the prompts that were asked."""
    assert command(*argv, "--format", "jsonl", "--max-tokens", "1", **options) == generate.OK
    folder_backend = backend()
    return [folder_backend.decode(e["prompt_token_ids"]) for e in lines_of(capsys.readouterr().out)]


def test_prompts_come_from_the_command_line_then_from_the_file(command, capsys, tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbftwo\r\n\n  three \n")
    argv = ("--prompts-file", str(path), "--prompt", "one")
    assert texts(command, capsys, *argv) == ["one", "two", "  three "]


def test_json_lines_hold_prompts_or_messages(command, capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    message = {"role": "user", "content": "hi"}
    rows = [{"prompt": "a\nb", "id": 7}, {"messages": [message]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = ("--prompts-file", str(path))
    expected = ["a\nb", "[user]hi[assistant]"]
    assert texts(command, capsys, *argv, chat_template=TEMPLATE) == expected
    argv = (*argv, "--chat")
    expected = ["[user]a\nb[assistant]", "[user]hi[assistant]"]
    assert texts(command, capsys, *argv, chat_template=TEMPLATE) == expected


def set_stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_dash_reads_standard_input_without_its_last_line_end(command, capsys, monkeypatch):
    set_stdin(monkeypatch, "é\nb\r\n".encode())
    assert texts(command, capsys, "--prompt", "-") == ["é\nb"]


# ---------------------------------------------------------------------------------------- bad input

LONG = "x" * CONTEXT


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "there is no prompt"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "a", "--prompt", ""), "--prompt number 2 is empty"),
        (("--prompt", LONG), "has 65 tokens, but the model's context is 64"),
        (("--prompt", "\udcff"), "--prompt is not valid UTF-8 at character 1"),
        (("--prompt", "-", "--prompt", "-"), "standard input can be read once"),
        (("--prompt", "a", "--stop", ""), "--stop is empty"),
        (("--prompt", "a", "--chat"), "has no chat template"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature -1.0 must be"),
        (("--prompt", "a", "--temperature", "warm"), "invalid float value: 'warm'"),
        (("--prompt", "a", "--top-p", "0"), "--top-p 0.0 must be in (0, 1]"),
        (("--prompt", "a", "--top-p", "1.5"), "--top-p 1.5 must be in (0, 1]"),
        (("--prompt", "a", "--top-k", "-1"), "--top-k -1 must be"),
        (("--prompt", "a", "--min-p", "1"), "--min-p 1.0 must be"),
        (("--prompt", "a", "--seed", "-1"), "--seed -1 must be"),
        (("--prompt", "a", "--n", "0"), "--n 0 must be"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens 0 must be"),
        (("--prompt", "a", "--logprobs", "65", "--format", "json"), "--logprobs 65 must be"),
        (("--prompt", "a", "--logprobs", "1"), "--logprobs has no place in text"),
        (("--prompt", "a", "--tp", "0"), "--tp 0 must be at least 1"),
        (("--prompt", "a", "--dp", "3"), "--batch-size 8 must be a multiple of --dp 3"),
        (("--prompt", "a", "--prefill-chunk", "0"), "--prefill-chunk 0 must be"),
        (("--prompt", "a", "--check"), "give it --repeat N"),
        (("--prompt", "a", "--repeat", "3"), "--check; add it"),
        (("--prompt", "a", "--mode", "dvr"), "--mode dvr is not available yet"),
        (("--prompt", "a", "--mode", "fast"), "--mode fast is not available yet"),
        (("--prompt", "a", "--format", "xml"), "invalid choice: 'xml'"),
        (("--prompt", "a", "--max-token", "3"), "did you mean --max-tokens?"),
        (("--prompt", "a", "--revision", "main"), "has no meaning for the folder"),
        (("--prompt", "a", "--model", "/no/such"), "--model: '/no/such' is neither"),
        (("--prompts-file", "/no/such.txt"), "/no/such.txt cannot be read"),
        (("--prompts-file", "prompts.csv"), "must end in .txt or .jsonl"),
    ],
)
def test_bad_input_is_one_line_on_stderr(command, capsys, argv, says):
    assert command(*argv) == generate.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"ok\n\xff\n", "p.txt line 2 is not valid UTF-8 at byte 1 (0xff)"),
        ("p.txt", b"\n \n", "has no prompt in it"),
        ("p.txt", b"ok\n" + LONG.encode(), "p.txt line 2 has 65 tokens"),
        ("p.jsonl", b'{"prompt": "a"}\n{', "p.jsonl line 2 is not JSON"),
        ("p.jsonl", b"[1]", "p.jsonl line 1 must be an object"),
        ("p.jsonl", b'{"text": "a"}', "either `prompt` or `messages`"),
        ("p.jsonl", b'{"prompt": "a", "messages": []}', "either `prompt` or `messages`"),
        ("p.jsonl", b'{"prompt": 7}', "`prompt` must be text, not 7"),
        ("p.jsonl", b'{"prompt": ""}', "p.jsonl line 1 is empty"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1 is not valid UTF-8"),
        ("p.jsonl", b'{"prompt": "a", "seed": 3}', "has `seed`, but sampling is the same"),
        ("p.jsonl", b'{"messages": []}', "`messages` is empty"),
        ("p.jsonl", b'{"messages": "a"}', "must be a list of objects"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', "p.jsonl line 1: "),
    ],
)
def test_a_bad_line_of_a_prompts_file_is_named(command, capsys, tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    assert command("--prompts-file", str(path)) == generate.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a\xff", "standard input is not valid UTF-8 at byte 2"), (b"\n", "is empty")],
)
def test_bad_standard_input_is_refused(command, capsys, monkeypatch, content, says):
    set_stdin(monkeypatch, content)
    assert command("--prompt", "-") == generate.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and says in err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", json.dumps(CONFIG | {"architectures": ["X"]}), "['X'] is not supported"),
        ("config.json", json.dumps(CONFIG | {"softcap": 3}), "softcap=3"),
        ("config.json", json.dumps(CONFIG | {"vocab_size": 100}), "vocab_size=100"),
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path, capsys, name, content, says):
    folder = write_model(tmp_path / "model")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert generate.main(["--model", str(folder), "--prompt", "a"]) == generate.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_a_tokenizer_of_another_model_is_refused(capsys, tmp_path):
    folder = write_model(tmp_path / "model")
    larger = backend()
    larger.add_special_tokens([f"<{i}>" for i in range(60)])
    larger.save(str(folder / "tokenizer.json"))
    assert generate.main(["--model", str(folder), "--prompt", "<59>"]) == generate.BAD_INPUT
    assert "token id 317, but the model's vocabulary is 300" in capsys.readouterr().err


# --------------------------------------------------------------------------------- other exit codes


def failing(error: BaseException) -> Answer:
    def answer(request: Request, sample: int) -> list[int]:
        raise error

    return answer


def test_a_fault_of_ours_is_reported_with_its_lines(command, capsys):
    answer = failing(ZeroDivisionError("here"))
    assert command("--prompt", "a", answer=answer) == generate.INTERNAL_ERROR
    err = capsys.readouterr().err
    assert "ZeroDivisionError: here" in err and "please report" in err


def test_nan_in_the_weights_is_bad_input(command, capsys):
    answer = failing(FloatingPointError("request 0 has a NaN logit"))
    assert command("--prompt", "a", answer=answer) == generate.BAD_INPUT
    assert capsys.readouterr().err.endswith("error: request 0 has a NaN logit\n")


def test_an_interrupt_ends_with_130(command, capsys):
    answer = failing(KeyboardInterrupt())
    assert command("--prompt", "a", answer=answer) == generate.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_fault(command, tmp_path, monkeypatch):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        answer = failing(BrokenPipeError())
        assert command("--prompt", "a", answer=answer) == generate.READER_GONE


def test_help_explains_every_option_and_does_not_start_jax():
    script = (
        "import sys\n"
        "from detjax.generate import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert e.code == 0\n"
        "assert main(['--prompt', 'a', '--top-p', '2']) == 2\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in dataclasses.fields(generate.GenerateArgs):
        assert "--" + option.name.replace("_", "-") + " " in done.stdout
    assert "exit codes" in done.stdout and "examples" in done.stdout


# ------------------------------------------------------------------------------------------- check


def test_runs_that_agree_are_reported_with_their_digest(command, capsys):
    shapes: list[generate.EngineShape] = []
    argv = ("--prompt", "abcdefgh", "--prompt", "cd", "--repeat", "4", "--check")
    assert command(*argv, "--format", "json", shapes=shapes) == generate.OK
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["check"] == {"num_runs": 4, "differences": []}
    assert f"all 4 runs equal, digest {document['digest']}" in err
    assert [shape.batch_size for shape in shapes] == [8, 1, 3, 2]
    assert len({shape.prefill_chunk for shape in shapes}) == 4
    assert "runs to compare" in err and "reversed" in err


def test_one_bit_that_differs_fails_the_check_and_is_shown(command, capsys):
    argv = ("--prompt", "ab", "--prompt", "cd", "--n", "2", "--repeat", "4", "--check")
    assert command(*argv, flip=(3, 2)) == generate.BITS_DIFFER
    out, err = capsys.readouterr()
    assert out.count("===") == 8  # the first run is written all the same
    assert "run 2 of 4: equal to run 1" in err
    assert "run 3 of 4: 4 completions differ from run 1" in err
    assert "run 3 differs from run 1 at prompt 0, sample 0, token 2: logprob -" in err
    assert err.count("(0x") == 8 and "the 4 runs are not equal" in err


def test_a_single_prompt_gets_neighbours_whose_answers_nobody_sees(command, capsys):
    asked: list[int] = []

    def answer(request: Request, sample: int) -> list[int]:
        asked.append(len(request.prompt_token_ids))
        return echo(request, sample)

    argv = ("--prompt", "abcdefgh", "--repeat", "3", "--check")
    assert command(*argv, answer=answer) == generate.OK
    out, err = capsys.readouterr()
    assert out == "abcdefgh0\n" and len(set(asked)) > 1
    assert "all 3 runs equal" in err


def test_a_check_sees_a_row_that_depends_on_its_neighbours(command, capsys):
    lengths: set[int] = set()

    def answer(request: Request, sample: int) -> list[int]:
        lengths.add(len(request.prompt_token_ids))
        return [*echo(request, sample)[:-1], *ids_of(str(len(lengths))), END]

    argv = ("--prompt", "abcdefgh", "--repeat", "3", "--check")
    assert command(*argv, answer=answer) == generate.BITS_DIFFER
    assert "against" in capsys.readouterr().err


def test_the_first_run_of_a_check_is_the_one_that_was_asked_for(command, capsys):
    shapes: list[generate.EngineShape] = []
    argv = ("--prompt", "ab", "--batch-size", "6", "--prefill-chunk", "5", "--dp", "2")
    assert command(*argv, "--repeat", "2", "--check", shapes=shapes) == generate.OK
    assert (shapes[0].batch_size, shapes[0].prefill_chunk) == (6, 5)
    assert shapes[1].batch_size % 2 == 0


def completion(**changes) -> generate.Record:
    """A record of two tokens."""
    base = Completion(
        request_idx=1,
        sample_idx=0,
        prompt_token_ids=(1,),
        token_ids=(5, 6),
        logprobs=(np.float32(-0.5), np.float32(0.0)),
        top_logprobs=(((5, np.float32(-0.5)),), ((6, np.float32(0.0)),)),
        finish_reason=FinishReason.LENGTH,
    )
    return generate.Record(completion=dataclasses.replace(base, **changes), text="")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": (5, 7)}, "token 1: id 6 (0x00000006) against 7 (0x00000007)"),
        (
            {"logprobs": (np.float32(-0.5), np.float32(-0.0))},
            "token 1: logprob 0.0 (0x00000000) against -0.0 (0x80000000)",
        ),
        (
            {"top_logprobs": (((4, np.float32(-0.5)),), ((6, np.float32(0.0)),))},
            "token 0: top logprob 0: id 5 -0.5 (0xbf000000) against 4 -0.5 (0xbf000000)",
        ),
        (
            {"token_ids": (5,), "logprobs": (np.float32(-0.5),)},
            "length: 2 tokens against 1",
        ),
        ({"finish_reason": FinishReason.STOP}, "end: length against stop"),
    ],
)
def test_the_first_difference_is_described_in_bits(changes, says):
    assert generate.differences([completion()], [completion()]) == []
    (line,) = generate.differences([completion()], [completion(**changes)])
    assert line == f"prompt 1, sample 0, {says}"
