# SPDX-License-Identifier: Apache-2.0
"""The command as a whole: its help, and the exit codes that are not about bad input."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import detjax
from detjax import generate
from detjax.cli import errors, model
from detjax.cli.arguments import OPTIONS
from detjax.cli.parser import parse_args
from detjax.cli.verbs import VERBS
from detjax.engine.config import EngineConfig
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams


def failing(error: BaseException):
    def answer(request: Request, seq: int) -> list[int]:
        raise error

    return answer


def test_a_fault_of_ours_is_reported_with_its_lines(command, capsys):
    answer = failing(ZeroDivisionError("here"))
    assert command("--prompt", "a", answer=answer) == errors.INTERNAL_ERROR
    err = capsys.readouterr().err
    assert "ZeroDivisionError: here" in err and "please report" in err


def test_nan_in_the_weights_is_bad_input(command, capsys):
    answer = failing(FloatingPointError("request 0 has a NaN logit"))
    assert command("--prompt", "a", answer=answer) == errors.BAD_INPUT
    assert capsys.readouterr().err.endswith("error: request 0 has a NaN logit\n")


def test_an_interrupt_ends_with_130(command, capsys):
    answer = failing(KeyboardInterrupt())
    assert command("--prompt", "a", answer=answer) == errors.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


class JaxRuntimeError(RuntimeError):
    """As JAX names it."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "error: out of memory; there is not enough memory"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore"), "error: RESOURCE_EXHAUSTED: 9 by"),
        (
            OSError(28, "No space left on device"),
            "output or error cannot be written: No space left",
        ),
        (OSError(28, "No space left on device", "file"), "error: file cannot be written: No space"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(command, capsys, error, says):
    assert command("--prompt", "a", answer=failing(error)) == errors.BAD_INPUT
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (
            ">/dev/full",
            errors.BAD_INPUT,
            "output or error cannot be written: No space left on device",
        ),
        (">&-", errors.BAD_INPUT, "error: standard output is closed"),
        ("2>&-", errors.OK, ""),
        ("2>/dev/full", errors.BAD_INPUT, ""),
        ("<&-", errors.OK, ""),
    ],
)
def test_streams_that_are_full_or_closed(redirection, code, says, tmp_path):
    """In a process of its own, as Python flushes once more at its end."""
    script = tmp_path / "script.py"
    script.write_text(STREAMS)
    done = subprocess.run(
        f"{sys.executable} {script} {redirection}",
        shell=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(generate.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("error:")) == (code, bool(says)), done.stderr
    assert says in done.stderr and "Exception" not in done.stderr


STREAMS = """
import sys
from detjax import generate
from detjax.cli.display import Display

def run(args, *, open_model):
    Display().line("a fact")
    print("an answer")
    return 0

generate.run = run
sys.exit(generate.main(["--prompt", "a"]))
"""


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    model.keep_compiled_programs(str(tmp_path / "file" / "cache"))
    err = capsys.readouterr().err
    assert err.startswith("warning: --cache-dir ") and "programs are not kept" in err
    assert jax.config.jax_compilation_cache_dir == before


def test_a_reader_that_goes_away_is_no_fault(command, tmp_path, monkeypatch):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        answer = failing(BrokenPipeError())
        assert command("--prompt", "a", answer=answer) == errors.READER_GONE


@pytest.mark.parametrize(
    "name",
    [
        "audit",
        "certify",
        "compare",
        "convert_gguf",
        "diverge",
        "generate",
        "grpo",
        "quantize",
        "replay",
        "serve",
    ],
)
def test_every_command_says_its_version(name, capsys):
    module = f"{name}.__main__" if name in ("certify", "compare", "diverge") else name
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"detjax.{module}").main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"detjax {detjax.__version__}\n"


def test_an_engine_has_sizes_if_none_are_given():
    assert EngineConfig(batch_size=8, prefill_chunk=64, max_len=1024) == EngineConfig()


def test_options_have_the_names_of_vllm_too():
    args = parse_args(["--prompt", "a", "--tensor-parallel-size", "2", "--max-num-seqs", "7"])
    assert (args.tp, args.batch_size) == (2, 7)


def test_every_field_of_the_sampling_is_an_option():
    names = {option.name for option in OPTIONS.values() if option.sets is SamplingParams}
    fields = {f.name for f in dataclasses.fields(SamplingParams)} - {
        "bad_words_token_ids",  # --bad-word has texts
        "structured_output",  # five options
        "prompt_logprobs",  # Engine.score, and the server
        "noise_stream",  # --n; one of them alone is for receipts
        "spaces_between_special_tokens",  # changes nothing: taken where vLLM's fields are
    }
    assert names == fields


def test_what_is_on_by_default_has_an_option_that_turns_it_off():
    asked = ["--prompt", "x"]
    assert parse_args(asked).skip_special_tokens
    assert not parse_args([*asked, "--no-skip-special-tokens"]).skip_special_tokens
    assert parse_args([*asked, "--truncate-prompt-tokens", "-1"]).truncate_prompt_tokens == -1


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        generate.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"detjax {detjax.__version__}\n"
    assert (Path(detjax.__file__).parent / "py.typed").is_file()


@pytest.mark.nightly
def test_a_wheel_runs_without_the_source_tree(tmp_path):
    """Built, unpacked elsewhere and run there: the same digest, and all data files."""
    source, site = tmp_path / "source", tmp_path / "site"
    root = Path(detjax.__file__).parents[1]
    shutil.copytree(root / "detjax", source / "detjax")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    options = ["--no-deps", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    wheels = [*options, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([*pip, "wheel", *wheels], check=True)
    (wheel,) = tmp_path.glob(f"detjax-{detjax.__version__}-*.whl")
    subprocess.run([*pip, "install", *options, "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(source)

    def run(folder: Path) -> dict:
        script = (
            "import sys, detjax\n"
            f"assert detjax.__file__.startswith({str(folder)!r}), detjax.__file__\n"
            "from detjax.generate import main\n"
            "argv = ['--prompt', '17+26=', '--max-tokens', '4', '--format', 'jsonl']\n"
            "sys.exit(main([*argv, '--cache-dir', 'none']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(folder)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run(site) == run(root)
    assert (site / "detjax" / "py.typed").is_file()
    names = {str(path.relative_to(site)) for path in site.glob("detjax/**/*") if path.is_file()}
    mine = {str(path.relative_to(root)) for path in root.glob("detjax/**/*") if path.is_file()}
    assert {n for n in names ^ mine if "__pycache__" not in n} == set()


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
    for option in OPTIONS.values():
        assert re.search(f"{option.flag}[ ,]", done.stdout), option.name
    assert "exit codes" in done.stdout and "examples" in done.stdout


def test_an_interrupt_does_not_wait_for_a_thread_that_compiles():
    script = (
        "import concurrent.futures, signal, sys, time\n"
        "from detjax.cli.errors import exit_code\n"
        # A shell's background job, as these tests may be, begins with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def run():\n"
        "    with concurrent.futures.ThreadPoolExecutor() as pool:\n"
        "        compiling = pool.submit(time.sleep, 300)\n"
        "        print('begun', flush=True)\n"
        "        return compiling.result()\n"
        "sys.exit(exit_code(run))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == errors.INTERRUPTED
        assert process.stderr.read() == "\ninterrupted\n"


@pytest.mark.parametrize(
    "verb", ["audit", "certify", "compare", "convert_gguf", "diverge", "quantize", "replay"]
)
def test_exit_codes_are_the_same_in_all_commands(verb, capsys, monkeypatch):
    """A fault of ours is 1 with its lines, an interrupt 130, bad input 2."""
    module = f"{VERBS[verb].module}.__main__" if verb in OF_PACKAGES else VERBS[verb].module
    command = importlib.import_module(module)
    for error, code in (
        (ZeroDivisionError("here"), errors.INTERNAL_ERROR),
        (KeyboardInterrupt(), errors.INTERRUPTED),
        (errors.InputError("--x 1 must be 2"), errors.BAD_INPUT),
    ):

        def parser(error: BaseException = error):
            raise error

        monkeypatch.setattr(command, "make_parser", parser)
        assert command.main([]) == code
        assert str(error) in capsys.readouterr().err


OF_PACKAGES = ("certify", "compare", "diverge")
