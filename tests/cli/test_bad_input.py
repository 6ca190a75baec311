# SPDX-License-Identifier: Apache-2.0
"""Options and model folders that cannot be used: one line says which, and exit code 2."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax import generate, serve
from detjax.cli import errors


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "there is no prompt"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "a", "--prompt", ""), "--prompt number 2 is empty"),
        (
            ("--prompt", "x" * 64),
            "more than the model's context of 64; shorten the prompt (--truncate-prompt-tokens",
        ),
        (("--prompt", "\udcff"), "--prompt is not valid UTF-8 at character 1 (0xff); convert"),
        (("--prompt", "a\ud800"), r"--prompt has \ud800, one half of a surrogate pair"),
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
        (
            (
                "--prompt",
                "a",
                "--temperature",
                "1",
                "--coordinator",
                "a:1",
                "--num-processes",
                "2",
                "--process-id",
                "0",
            ),
            "--seed must be given where tokens are sampled in a job of 2 processes",
        ),
        (("--prompt", "a", "--n", "0"), "--n 0 must be"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens 0 must be"),
        (("--prompt", "a", "--logprobs", "65", "--format", "json"), "--logprobs 65 must be"),
        (("--prompt", "a", "--logprobs", "1"), "--logprobs has no place in text"),
        (("--prompt", "a", "--tp", "0"), "--tp 0 must be at least 1"),
        (
            ("--prompt", "a", "--dp", "3", "--batch-size", "8"),
            "--batch-size 8 must be a multiple of --dp 3",
        ),
        (("--prompt", "a", "--prefill-chunk", "0"), "--prefill-chunk 0 must be"),
        (("--prompt", "a", "--check"), "give it --repeat N"),
        (("--prompt", "a", "--repeat", "3"), "--check; add it"),
        (("--prompt", "a", "--draft-weights", "int8"), "--draft-weights int8 needs --mode dvr"),
        (("--prompt", "a", "--decode-steps", "0"), "--decode-steps 0 must be at least 1"),
        (
            ("--prompt", "a", "--decode-steps", "2", "--prompt-lookup"),
            "--decode-steps 2 does not go with --prompt-lookup",
        ),
        (
            ("--prompt", "a", "--mode", "dvr", "--decode-steps", "32"),
            "at most --verify-window - 1 = 31",
        ),
        (
            ("--prompt", "a", "--mode", "dvr", "--prompt-lookup"),
            "--prompt-lookup, which the speculative methods ngram and suffix set, needs "
            "--mode invariant, not 'dvr'",
        ),
        (("--prompt", "a", "--verify-window", "0"), "--verify-window 0 must be at least 1"),
        (
            ("--prompt", "a", "--speculative-config", "{"),
            "--speculative-config: { is no JSON object",
        ),
        (
            ("--prompt", "a", "--speculative-config", '{"method": "medusa"}'),
            "--speculative-config: method='medusa' must be one of ['ngram', 'suffix', "
            "'draft_model', 'eagle3', 'mtp']",
        ),
        (
            ("--prompt", "a", "--speculative-config", '{"model": "./none"}'),
            "--speculative-config: ",
        ),
        (
            ("--prompt", "a", "--mode", "fast", "--speculative-config", '{"model": "novels-6m"}'),
            "needs --mode dvr or 'invariant', not 'fast'",
        ),
        (
            ("--prompt", "a", "--mode", "dvr", "--enable-lora"),
            "adapters with --mode dvr are not supported; use --mode invariant",
        ),
        (
            ("--prompt", "a", "--dtype", "float32", "--kv-cache-dtype", "fp8"),
            "--kv-cache-dtype fp8_e4m3 does not go with activations of float32",
        ),
        (
            ("--prompt", "a", "--cache-pages", "3", "--dp", "2", "--batch-size", "2"),
            "--cache-pages 3 must be a multiple of --dp 2",
        ),
        (
            ("--prompt", "a", "--gpu-memory-utilization", "1.5"),
            "--gpu-memory-utilization 1.5 must be above 0 and at most 1",
        ),
        (
            ("--prompt", "a", "--gpu-memory-utilization", "0.5", "--cache-pages", "8"),
            "--gpu-memory-utilization 0.5 does not go with --cache-pages 8",
        ),
        (
            ("--prompt", "a", "--trace", "/no/such/file"),
            "--trace /no/such/file is in a folder that does not exist",
        ),
        (("--prompt", "a", "--trace", ""), "--trace '' is no file"),
        (("--prompt", "a", "--trace", "/"), "--trace '/' is no file"),
        (("--prompt", "a", "--batch-size", "65537"), "--batch-size 65537 must be at most 65536"),
        (("--prompt", "a", "--verify-window", "1025"), "--verify-window 1025 must be at most 1024"),
        (("--prompt", "a", "--n", "1025"), "--n 1025 must be at most 1024"),
        (("--prompt", "a", "--seed", "1" * 5000), "--seed: invalid int value"),
        (
            (*("--prompt", "a") * 1025, "--n", "1024"),
            "these are 1049600 completions, more than 1048576",
        ),
        (
            ("--prompt", "a" * 60, "--prompt", "b", "--cache-pages", "2", "--dp", "4"),
            "--cache-pages 2 must be a multiple of --dp 4",
        ),
        (("--prompt", "a", "--format", "xml"), "invalid choice: 'xml'"),
        (("--prompt", "a", "--max-token", "3"), "did you mean --max-tokens?"),
        (("--prompt", "a", "--temp", "3"), "did you mean --temperature?"),
        (("--prompt", "a", "--beam-width", "3"), "--beam-width 3; see --help"),
        (("--prompt", "a", "--device", "3"), "--device 3; see --help"),
        (("--prompt", "a", "--enforce-eager"), "--enforce-eager; see --help"),  # the server's hint
        (("--prompt", "a", "--json-schema", "{"), "error: --json-schema is not JSON: Expecting"),
        (("--prompt", "a", "--regex", "("), "error: --regex is refused: "),
        (("The sea",), "a prompt is an option: --prompt 'The sea'"),
        (("what --seed does",), "a prompt is an option: --prompt 'what --seed does'"),
        (("--prompt", "a", "--model", ""), "--model is empty; give a folder, or a Hugging Face id"),
        (("--prompt", "a", "--max-len", "65"), "context of 64 tokens; give at most 64"),
        (
            ("--prompt", "a" * 9, "--max-len", "9"),
            "10 tokens and its answer 1, more than --max-len of 9; raise --max-len, or "
            "shorten the prompt (--truncate-prompt-tokens keeps its end)",
        ),
        (("--prompt", "a", "--output", "/no/such/file"), "--output /no/such/file is in a folder"),
        (("--prompt", "a", "--revision", "main"), "has no meaning for the folder"),
        (("--prompt", "a", "--model", "/no/such"), "--model: '/no/such' is neither"),
        (("--prompts-file", "/no/such.txt"), "/no/such.txt cannot be read"),
        (("--prompts-file", "prompts.csv"), "must end in .txt or .jsonl"),
    ],
)
def test_bad_input_is_one_line_on_stderr(command, capsys, argv, says):
    assert command(*argv) == errors.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("--enforce-eager", "--tool-call-parser", "hermes"),
            "; use --no-compile in place of --enforce-eager, as programs are then compiled when "
            "first needed; leave --tool-call-parser out, as calls and reasoning are read",
        ),
        (
            ("--trust_remote_code", "--swap-space=4", "--swap-space", "4"),
            "; leave --trust-remote-code out, as no code of a checkpoint is run; leave "
            "--swap-space out, as keys and values stay in the memory of the GPU\n",
        ),
        (
            ("--generation-config", "vllm"),
            "--generation-config: invalid choice: 'vllm' (choose from 'auto', 'none'); use none, "
            "which is the same\n",
        ),
        (("--generation-config", "all"), "invalid choice: 'all' (choose from 'auto', 'none'); see"),
        (
            ("--logprobs-mode", "processed_logprobs"),
            "; use the field logprobs_mode in place of --logprobs-mode, as each request chooses",
        ),
        (("org/model", "--max-len", "64"), "; a model is an option: --model 'org/model'"),
        (("64", "--max-len", "64"), "unrecognized arguments: 64; it belongs to no option"),
    ],
)
def test_a_server_says_what_to_write_in_place_of_options_of_vllm(capsys, argv, says):
    assert serve.main(argv) == errors.BAD_INPUT
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", {"architectures": ["X"]}, "['X'] is not supported"),
        ("config.json", {"softcap": 3}, "softcap=3"),
        ("config.json", {"vocab_size": 100}, "vocab_size=100"),
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path, capsys, name, content, says, toy):
    folder = toy.write_model(tmp_path / "model")
    if content is None:
        (folder / name).unlink()
    else:
        text = json.dumps(toy.config | content) if isinstance(content, dict) else content
        (folder / name).write_text(text)
    assert generate.main(["--model", str(folder), "--prompt", "a"]) == errors.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--tp", "1048576"), "error: --tp 1048576 must divide num_heads=8"),
        (("--dp", "4096", "--batch-size", "4096"), "count=4096 devices must be in [1, 1024]"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_it_is_made(capsys, argv, says):
    assert generate.main(["--prompt", "a", "--cache-dir", "none", *argv]) == errors.BAD_INPUT
    assert says in capsys.readouterr().err


def test_a_completion_that_may_outgrow_the_pages_is_refused(tmp_path, capsys, toy):
    folder = toy.write_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(toy.config | {"max_position_embeddings": 999}))
    argv = ["--model", str(folder), "--prompt", "a", "--prompt", "b" * 200, "--dp", "2"]
    argv += ["--cache-pages", "4"]
    assert generate.main([*argv, "--max-tokens", "56"]) == errors.BAD_INPUT
    says = "--prompt number 2 and its completion may have 257 tokens, 3 pages of 128"
    assert says in (err := capsys.readouterr().err) and "give 6 or more" in err
    assert generate.main([*argv, "--max-tokens", "55"]) == errors.BAD_INPUT
    assert "has neither model.safetensors nor" in capsys.readouterr().err  # one step further


def test_a_cache_that_memory_cannot_hold_is_refused_before_it_is_made(capsys):
    argv = ["--prompt", "a", "--cache-dir", "none", "--cache-pages", "1000000000"]
    assert generate.main(argv) == errors.BAD_INPUT
    assert "a cache of 1000000000 pages takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--mode", "dvr", "--enable-lora"), "adapters with --mode dvr are not supported"),
        (
            ("--dtype", "float32", "--kv-cache-dtype", "fp8"),
            "--kv-cache-dtype fp8_e4m3 does not go with activations of float32; use "
            "--kv-cache-dtype auto, or --dtype bfloat16",
        ),
        (
            ("--speculative-config", '{"model": "OTHER"}'),
            "OTHER has a vocabulary of 300 and novels-6m one of 4096",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_before_a_model_is_read(
    capsys, monkeypatch, tmp_path, toy, argv, says
):
    """Reading weights takes a large model minutes."""

    def no_weights(*args, **options):
        raise AssertionError("weights are read")

    monkeypatch.setattr("detjax.opening.load_model", no_weights)
    monkeypatch.setattr("detjax.models.loading.load_model", no_weights)
    folder = toy.write_model(tmp_path / "other")
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    argv = [one.replace("OTHER", str(folder)) for one in argv]
    assert serve.main(["--cache-dir", "none", "--port", "0", *argv]) == errors.BAD_INPUT
    err = capsys.readouterr().err
    assert says.replace("OTHER", str(folder)) in err and err.count("\n") == 1


def test_a_tokenizer_of_another_model_is_refused(capsys, tmp_path, toy):
    folder = toy.write_model(tmp_path / "model")
    larger = toy.backend()
    larger.add_special_tokens([f"<{i}>" for i in range(60)])
    larger.save(str(folder / "tokenizer.json"))
    argv = ["--model", str(folder), "--prompt", "<59>", "--control-tokens"]
    assert generate.main(argv) == errors.BAD_INPUT
    assert "token id 317, outside the vocabulary of 300" in capsys.readouterr().err
