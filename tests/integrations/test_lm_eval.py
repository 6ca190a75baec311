# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: one set of responses and scores at any batch and mesh, and over HTTP."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from jinja2 import UndefinedError

import detjax
from detjax import eval as detjax_eval

from ..server.conftest import make_service, served

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "evaluation"
NAMES = ("sums", "sums_choice", "word_problems", "word_problems_text")
GSM8K = Path(os.environ.get("DETJAX_GSM8K", ROOT.parent / "shared/data/prompts/gsm8k_test.jsonl"))
"""The published questions; without them the tests take those of `examples/evaluation`."""

# Of the harness and of what it imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@cache
def opened(**options) -> detjax.LLM:
    return detjax.LLM(max_len=256, show_progress=False, **options)


# WHY: imported where it is used, since the harness takes seconds to import.


def adapter(**options):
    from detjax.integrations.lm_eval import DetjaxLM

    return DetjaxLM(**options)


def instance(kind: str, *arguments, idx: int = 0):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=idx)


@pytest.fixture(scope="session", autouse=True)
def offline():
    """Nothing here is downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


def evaluated(lm, names=NAMES, *, count=6, **options):
    """Every response, and every score, of some tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    metadata = {"count": count} | ({"file": str(GSM8K)} if GSM8K.exists() else {})
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=[f"detjax_{name}" for name in names], task_manager=manager,
        bootstrap_iters=0, log_samples=True, **options,
    )  # fmt: skip
    responses = {
        task: [(one["doc_id"], one["resps"], one["filtered_resps"]) for one in samples]
        for task, samples in found["samples"].items()
    }
    return responses, found["results"], found["config"]


@cache
def expected():
    """Each request alone: the canonical responses."""
    return evaluated(adapter(llm=opened(batch_size=1)))


# ------------------------------------------------------------------------------------- the library


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("options", [{"batch_size": 64, "prefill_chunk": 48}, {"tp": 2}], ids=str)
def test_every_response_and_score_is_the_same_at_any_batch_size_and_mesh(options):
    responses, results, config = evaluated(adapter(llm=opened(**options)))
    want, scores, of = expected()
    assert responses == want and results == scores
    assert config["detjax_fingerprint"] == of["detjax_fingerprint"]
    # Something was answered, scored and sampled, and not always the same.
    assert len({str(answer) for task in want.values() for answer in task}) > 20
    assert scores["detjax_sums"]["exact_match,none"] > 0.3
    assert scores["detjax_sums_choice"]["acc,none"] > 0.3


@pytest.mark.slow
def test_a_loglikelihood_is_the_sum_of_the_engines_logprobs():
    llm = opened(batch_size=1)
    lm = adapter(llm=llm)
    pairs = [("52+31=", "83"), ("52+31=", "84"), ("", "The old house"), ("A word ", "follows")]
    asked = [instance("loglikelihood", *pair, idx=i) for i, pair in enumerate(pairs)]
    got = lm.loglikelihood(asked, disable_tqdm=True)
    assert got[0][1] and not got[1][1] and got[0][0] > got[1][0]
    for (context, continuation), (value, is_greedy) in zip(pairs, got, strict=True):
        ids = llm.tokenizer.encode(context + continuation)
        start = len(llm.tokenizer.encode(context.rstrip())) if context else 1
        (scores,) = llm.engine.score([ids], top=1)
        tail = scores[start - 1 :]
        assert len(tail) == len(ids) - start > 0
        total = 0.0
        for one in tail:
            total += float(one.logprob)
        assert value == total
        assert is_greedy == all(i == one.top_logprobs[0][0]
                                for i, one in zip(ids[start:], tail, strict=True))  # fmt: skip


@pytest.mark.slow
def test_a_text_longer_than_the_context_is_scored_in_windows():
    lm = adapter(llm=opened(batch_size=1))
    text = "The old house by the sea was empty. " * 60
    ids = lm.tok_encode(text, add_special_tokens=False)
    assert len(ids) > 2 * lm.max_length
    asked = instance("loglikelihood_rolling", text)
    (value,) = lm.loglikelihood_rolling([asked], disable_tqdm=True)
    # The first window by hand: the begin token, then as many as fit.
    first = [lm.prefix_token_id, *ids][: lm.max_length]
    (scores,) = lm.llm.engine.score([first], top=0)
    of_first = sum(float(one.logprob) for one in scores)
    assert -math.inf < value < of_first < 0


@pytest.mark.slow
def test_samples_of_one_request_are_different_and_the_same_again():
    llm = opened(batch_size=1)
    kwargs = {"until": ["."], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    asked = [instance("generate_until", "It was late", kwargs) for _ in range(3)]
    got = adapter(llm=llm).generate_until(asked, disable_tqdm=True)
    assert len(set(got)) == 3 and not any("." in text for text in got)
    assert adapter(llm=llm).generate_until(asked[:2], disable_tqdm=True) == got[:2]
    assert adapter(llm=llm, seed=1).generate_until(asked, disable_tqdm=True) != got


@pytest.mark.slow
def test_what_a_task_asks_and_detjax_has_not_is_refused_by_name(caplog):
    lm = adapter(llm=opened(batch_size=1))

    def ask(context="It was late", **kwargs):
        asked = instance("generate_until", context, {"max_gen_toks": 4} | kwargs)
        return lm.generate_until([asked], disable_tqdm=True)

    with pytest.raises(ValueError, match="asks for num_beams, which detjax would have to ignore"):
        ask(num_beams=4)
    with pytest.raises(ValueError, match="max_gen_toks=256 leaves no room"):
        ask(max_gen_toks=256)
    with pytest.raises(ValueError, match="device='cpu' has no meaning"):
        adapter(llm=lm.llm, device="cpu")
    with pytest.raises(TypeError, match="tp cannot be chosen for an LLM that is open already"):
        adapter(llm=lm.llm, tp=2)
    assert ask("word " * 400) and "is cut from the left" in caplog.text


def test_the_wrapper_names_the_model_where_nobody_else_does():
    with_defaults = detjax_eval.with_defaults
    auto = ["--batch_size", "auto"]
    assert with_defaults(["--tasks", "x"]) == ["run", "--model", "detjax", "--tasks", "x", *auto]
    assert with_defaults(["run", "--model=hf", "-b", "4"]) == ["run", "--model=hf", "-b", "4"]
    assert with_defaults(["ls", "tasks"]) == ["ls", "tasks"]
    assert with_defaults(["--config", "c.yaml"]) == ["run", "--config", "c.yaml"]


@pytest.mark.slow
def test_what_is_wrong_with_the_command_is_one_line(capsys):
    sums = ["--tasks", "detjax_sums", "--include_path", str(TASKS), "--limit", "1"]
    cases = {
        ("--tasks", "nope"): "Tasks not found: nope; `python -m detjax.eval ls tasks`",
        (*sums, "--model_args", "nope=3"): "LLM has no option 'nope'",
        (*sums, "--model_args", "model=a,pretrained=b"): "model=a and pretrained=b",
        (*sums, "--model_args", "pretrained=./nowhere"): "nowhere",
        (*sums, "--model_args", "max_len=64,max_model_len=65"): "max_len is given twice",
        (*sums, "--batch_size", "abc"): "batch_size='abc' must be an integer or 'auto'",
        (*sums, "--model_args", "max_gen_toks=many"): "max_gen_toks='many' must be an integer",
        (*sums, "--metadata", '{"count": 0}'): "there is no problem in count=0 sums; --metadata",
    }
    for args, says in cases.items():
        assert detjax_eval.main(args) == 2, args
        err = capsys.readouterr().err
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert says in line
    args = [*sums, "--model_args", "pretrained=novels-6m,max_model_len=256,seed=3"]
    assert detjax_eval.main(args) == 0
    assert "detjax_sums" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", ["--limit -1", "--limit=-1", "-L -1", "-L-1", "--lim -1", "--limit 0", "--limit nan"]
)
def test_a_limit_of_no_question_is_named_before_anything_is_opened(given, monkeypatch, capsys):
    monkeypatch.setattr(detjax_eval, "check_model", lambda *_, **__: pytest.fail("it was opened"))
    assert detjax_eval.main(["--tasks", "detjax_sums", *given.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --limit ") and "must be above 0" in err and err.count("\n") == 1


@pytest.mark.parametrize("given", ["", "--limit 0.5", "-L 3", "--limit many", "--limit"])
def test_a_limit_is_the_harnesss_to_read(given):
    """Also one that is no number: the harness names the option itself."""
    args = ["run", "--tasks", "detjax_sums", *given.split()]
    assert detjax_eval.check_limit(args) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"problem": "a", "solution": "b"}', "line 1: not a GSM8K problem: KeyError('question')"),
        ('{"question": "a", "answer": "b"}', "line 1: the answer has no final `#### number`"),
        ("", "there is no problem in the first 12 of"),
    ],
)
def test_a_file_of_other_problems_is_refused_in_one_line(text, says, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    args = ["--tasks", "detjax_word_problems", "--include_path", str(TASKS), "--limit", "1"]
    args += ["--metadata", json.dumps({"file": str(path)}), "--model_args", "max_len=256"]
    assert detjax_eval.main(args) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert says in line and str(path) in line


def test_what_the_harness_lacks_and_a_template_that_does_not_fit_are_the_users(monkeypatch, capsys):
    """A model of the harness needs torch; a task of the user's has keys of its own."""
    from lm_eval._cli import HarnessCLI

    for error, says in (
        (ModuleNotFoundError("No module named 'torch'"), "--model or --tasks needs; install it"),
        (UndefinedError("'q' is undefined"), "a template does not fit the task's data: 'q' is"),
    ):
        monkeypatch.setattr(HarnessCLI, "execute", Mock(side_effect=error))
        assert detjax_eval.main(["--tasks", "detjax_sums", "--model", "hf"]) == 2
        (line,) = [one for one in capsys.readouterr().err.splitlines() if "error: " in one]
        assert says in line


def test_a_module_that_detjax_lacks_is_a_fault_of_its_own(monkeypatch, capsys):
    from lm_eval._cli import HarnessCLI

    error = ModuleNotFoundError("No module named 'detjax.x'", name="detjax.x")
    monkeypatch.setattr(HarnessCLI, "execute", Mock(side_effect=error))
    assert detjax_eval.main(["--tasks", "detjax_sums", "--model", "hf"]) == 1
    err = capsys.readouterr().err
    assert "this copy of detjax lacks detjax.x" in err and "a fault of detjax" in err


def test_help_is_of_detjax_and_needs_no_harness():
    program = "import sys, runpy; sys.modules['lm_eval'] = None; "
    program += "runpy.run_module('detjax.eval', run_name='__main__')"

    def run(*args):
        return subprocess.run(
            [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False
        )

    told = run("--help")
    assert told.returncode == 0 and "pretrained=" in told.stdout
    without = run("--tasks", "x")
    assert without.returncode == 2 and not without.stdout
    assert without.stderr.startswith("error: ") and 'pip install "detjax[eval]"' in without.stderr


def test_vllms_top_k_of_all_tokens_is_taken():
    lm = adapter(llm=opened(batch_size=1))
    kwargs = {"max_gen_toks": 2, "do_sample": True, "temperature": 1.0}
    assert lm._sampling("a", kwargs | {"top_k": -1}) == lm._sampling("a", kwargs | {"top_k": 0})
    with pytest.raises(ValueError, match="top_k=-2 must be"):
        lm._sampling("a", kwargs | {"top_k": -2})


@pytest.mark.slow
def test_the_commands_of_the_page_run(monkeypatch, tmp_path, capsys):
    """Those that need no model but the bundled one, and no download."""
    page = (ROOT / "docs" / "evaluation.md").read_text()
    commands = re.findall(r"^python -m detjax\.eval (.*)$", page, re.M)
    assert len(commands) >= 2
    runnable = [command for command in commands if "model=novels-6m" in command]
    assert len(runnable) == 1
    monkeypatch.chdir(ROOT)
    args = shlex.split(runnable[0]) + ["--output_path", str(tmp_path), "--log_samples"]
    assert detjax_eval.main(args) == 0
    assert "detjax_sums" in capsys.readouterr().out
    (written,) = tmp_path.rglob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert config["detjax_fingerprint"] and config["model"] == "detjax"


@pytest.mark.slow
def test_the_python_of_the_page_runs(capsys):
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "evaluation.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 6  # words, each a token


# --------------------------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def server():
    llm = opened(batch_size=8, max_waiting=512)
    with served(make_service(llm), llm) as running:
        yield running


def over_http(server, kind, names, *, concurrency, **options):
    from lm_eval.api.registry import get_model

    path = {"local-completions": "completions", "local-chat-completions": "chat/completions"}[kind]
    lm = get_model(kind)(
        model="novels-6m", base_url=f"{server.url}/v1/{path}", num_concurrent=concurrency,
        max_length=256, max_retries=1, **options,
    )  # fmt: skip
    is_chat = kind == "local-chat-completions"
    return evaluated(lm, names, apply_chat_template=is_chat)


@pytest.mark.slow
@pytest.mark.invariance
def test_local_completions_get_the_same_answers_at_any_concurrency(server):
    """The server's tokenizer, token ids as prompts, echo with logprobs."""
    names = ("sums", "sums_choice", "word_problems_text")
    alone = over_http(server, "local-completions", names, concurrency=1)
    many = over_http(server, "local-completions", names, concurrency=64)
    assert many[:2] == alone[:2]
    assert alone[1]["detjax_sums_choice"]["acc,none"] > 0.3
    values = [float(v) for _, r, _ in alone[0]["detjax_sums_choice"] for v in np.ravel(r)[::2]]
    assert len(set(values)) > 10 and all(value < 0 for value in values)


@pytest.mark.slow
@pytest.mark.invariance
def test_local_chat_completions_get_the_same_answers_at_any_concurrency(server):
    names = ("sums", "word_problems")  # greedy, and sampled
    alone = over_http(server, "local-chat-completions", names, concurrency=1)
    many = over_http(server, "local-chat-completions", names, concurrency=64)
    assert many[:2] == alone[:2]
    assert len({str(r) for task in names for _, r, _ in alone[0][f"detjax_{task}"]}) > 4


@pytest.mark.slow
@pytest.mark.invariance
def test_local_completions_with_the_models_folder_score_as_the_command_does(server):
    """The command of docs/evaluation.md. The server's own tokenizer has no token to begin with."""
    pytest.importorskip("transformers")
    names = ("sums", "sums_choice")
    own = {
        "tokenizer": str(detjax.bundled_model_path()), "tokenizer_backend": "huggingface",
        "add_bos_token": True,
    }  # fmt: skip
    here = {f"detjax_{name}": expected()[0][f"detjax_{name}"] for name in names}
    assert over_http(server, "local-completions", names, concurrency=8, **own)[0] == here
    other = over_http(server, "local-completions", names, concurrency=8)[0]
    assert other != here, "the control"
