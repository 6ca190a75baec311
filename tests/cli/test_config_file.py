# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: options from a file, which the command line overrides."""

import pytest

from detjax import serve
from detjax.cli import errors
from detjax.cli.errors import InputError
from detjax.cli.parser import parse_args


@pytest.fixture
def write(tmp_path):
    def make(text: str) -> str:
        path = tmp_path / "options.toml"
        path.write_text(text)
        return str(path)

    return make


def test_options_of_a_file_are_those_of_the_command_line(write):
    path = write(
        'prompt = ["a", "-"]\nmax-tokens = 7\ntemperature = 0.5\nchat = true\nwarm = false\n'
        'skip-special-tokens = false\nstop = "x"\nmax_num_seqs = 3\n'
    )
    args = parse_args(["--config", path])
    assert (args.prompt, args.max_tokens, args.temperature) == (("a", "-"), 7, 0.5)
    assert (args.chat, args.warm, args.skip_special_tokens) == (True, False, False)
    assert (args.stop, args.batch_size) == (("x",), 3)
    assert {"max_tokens", "batch_size"} <= args.given


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_len = 5\nmax-model-len = 6", "'max_len' and 'max-model-len', which are one option"),
        ("speculative-config = {method = 'ngram'}", "write JSON as text"),
    ],
)
def test_a_file_that_says_what_no_command_line_could_is_refused(write, text, says):
    with pytest.raises(InputError, match=says):
        serve.make_parser().parse(["--config", write(text)])


@pytest.mark.parametrize(
    "given", [["-p", "b"], ["-pb"], ["--prompt", "b"], ["--prompt=b"]], ids=" ".join
)
def test_the_command_line_wins(write, given):
    path = write('prompt = ["a", "c"]\nmax-tokens = 7\nskip-special-tokens = true')
    args = parse_args([*given, "--max-tokens=9", "--no-skip-special-tokens", "--config", path])
    assert (args.prompt, args.max_tokens, args.skip_special_tokens) == (("b",), 9, False)


def test_a_server_is_configured_by_a_file(write):
    path = write('port = 0\ndecode-batches = [2, 4]\nallowed-origins = ["a", "b"]\napi-key = "k"')
    args = serve.make_parser().parse(["--config", path])
    assert (args.port, args.decode_batches, args.api_key) == (0, [2, 4], ["k"])
    assert args.allowed_origins == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-token = 3", "has 'max-token', which is no option of python -m detjax.generate; did"),
        ("max-token = 3", "did you mean max-tokens?"),
        ("zzz = 3", "has 'zzz', which is no option"),
        ('config = "x"', "has 'config', which is given on the command line alone"),
        ("help = true", "has 'help', which is given on the command line alone"),
        ("chat = 1", "chat = 1 must be true or false"),
        ("max-tokens = true", "max-tokens = True must be text or a number"),
        ("max-tokens = [1, 2]", "max-tokens = [1, 2] must be one value, not a list"),
        ("[sampling]\nseed = 1", "has 'sampling', which is no option"),
        ("[model]\nname = 'x'", "model = {'name': 'x'} must be text or a number"),
        ('max-tokens = "many"', "--max-tokens: invalid int value: 'many'"),
        ('mode = "quick"', "--mode: invalid choice: 'quick'"),
        ("max-tokens = 0", "--max-tokens 0 must be at least 1"),
        ("max-tokens 3", "is not TOML: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(write, text, says):
    path = write(text)
    with pytest.raises(InputError) as found:
        parse_args(["-p", "a", "--config", path])
    assert says in str(found.value)
    assert path in str(found.value) or "must be at least 1" in says


def test_a_file_that_is_not_there_is_named(command, capsys, tmp_path):
    assert command("-p", "a", "--config", str(tmp_path / "no")) == errors.BAD_INPUT
    assert f"--config {tmp_path}/no cannot be read: No such file" in capsys.readouterr().err
    assert command("-p", "a", "--config", "a\0b") == errors.BAD_INPUT
    assert "cannot be read: embedded null byte" in capsys.readouterr().err
    assert command("-p", "a", "--config") == errors.BAD_INPUT
    assert "--config: expected one argument" in capsys.readouterr().err
