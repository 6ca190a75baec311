# SPDX-License-Identifier: Apache-2.0
"""The page at `/`, in headless Chromium: it asks, shows, and proves what it says."""

import re
import shutil

import pytest

import detjax
from detjax.server.served_model import Limits
from detjax.server.service import Service

from .conftest import make_service, served

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get: chromium)")


@pytest.fixture(scope="module")
def dvr():
    llm = detjax.LLM(
        mode="dvr", dtype="float32", max_len=384, batch_size=8, decode_batches=(1,),
        max_waiting=256, show_progress=False,
    )  # fmt: skip
    with served(make_service(llm), llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(120_000)
    told = []
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("console", lambda line: told.append(line.text) if line.type == "error" else None)
    yield page
    page.close()
    assert not told


def ask(page, **fields):
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.click("#ask")
    page.wait_for_selector("#facts .digest")
    return page.text_content("#facts .digest")


def test_everything_comes_from_the_server_and_needs_no_key(llm):
    with served(make_service(llm), llm, api_keys=["k"]) as running, running.client() as client:
        for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
            got = client.get(path)
            assert got.status_code == 200 and kind in got.headers["content-type"]
            assert "default-src 'self'" in got.headers["content-security-policy"]
            assert not re.search(r"https?://", got.text), path


@needs_chromium
def test_an_answer_streams_and_shows_its_proof(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    assert page.text_content("#fingerprint") == running.llm.config.fingerprint
    digest = ask(page, prompt="It was late", temperature=0.8, seed=7, max_tokens=12)
    sampling = detjax.SamplingParams(max_tokens=12, temperature=0.8, seed=7)
    (out,) = running.llm.generate(["It was late"], sampling)
    assert digest == out.outputs[0].digest()
    assert page.text_content("#answer") == "It was late" + out.outputs[0].text
    assert page.locator(".token").count() == 12
    page.hover(".token >> nth=3")
    assert page.locator("#tip .row").count() >= 5
    logprob = float(out.outputs[0].logprobs[3])
    assert page.text_content("#tip .note") == f"logprob {logprob}"


@needs_chromium
def test_a_conversation_goes_on(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    page.click("#tab-chat")
    first = ask(page, prompt="17+26=", max_tokens=5, temperature=0)
    assert page.locator("#conversation li").count() == 2
    page.fill("#prompt", "and?")
    page.click("#ask")
    page.locator("#conversation li").nth(3).wait_for()
    assert page.text_content("#facts .digest") != first


@needs_chromium
@pytest.mark.invariance
def test_under_load_the_digests_stay_and_those_of_fast_do_not(dvr, page):
    page.goto(dvr.url)
    page.wait_for_selector("#state.ready")
    digest = ask(page, prompt="The old house by the sea", max_tokens=24)
    page.click("#load")
    page.wait_for_selector("#verdict.same, #verdict.differs")
    rows = page.locator("#load-rows tr")
    assert rows.count() == 4
    canonical = [rows.nth(i).locator("td >> nth=0").locator(".digest") for i in range(4)]
    assert {cell.get_attribute("title") for cell in canonical} == {digest}
    fast = [rows.nth(i).locator("td >> nth=1").locator(".digest") for i in range(4)]
    assert len({cell.get_attribute("title") for cell in fast}) > 1
    text = page.text_content("#verdict")
    assert "canonical: the same bits under every load" in text and "fast: " in text
    assert "loads changed a bit" in text and page.is_hidden("#error")


@needs_chromium
def test_a_server_that_cannot_run_fast_says_so(running, page):
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    ask(page, max_tokens=4)
    page.click("#load")
    page.wait_for_selector("#load-text:has-text('Every step of this server is canonical')")
    page.click("#stop")
    page.wait_for_selector("#ask:enabled")


@needs_chromium
def test_the_other_requests_fit_a_short_context(page):
    """The page had asked for 200 tokens each, and a server of 256 refused some."""
    llm = detjax.LLM(max_len=64, batch_size=8, max_waiting=256, show_progress=False)
    with served(make_service(llm), llm) as running:
        page.goto(running.url)
        page.wait_for_selector("#state.ready")
        ask(page, prompt="It was late", max_tokens=4)
        page.click("#load")
        page.wait_for_selector("#verdict.same")
        assert page.is_hidden("#error")


@needs_chromium
def test_what_goes_wrong_is_said(llm, browser):
    page = browser.new_page()
    service = Service(None, Limits())
    with served(service, llm, api_keys=["secret"]) as running:
        page.goto(running.url)
        page.wait_for_selector("#state:has-text('starting')")
        service.open(make_service(llm).model)
        page.wait_for_selector("#error:has-text('wants an API key')")
        page.fill("#key", "secret")
        page.wait_for_selector("#model:has-text('novels-6m')")
        page.fill("#max-tokens", "5000")
        page.click("#ask")
        page.wait_for_selector('#error:has-text("this server\'s context of")')
    page.close()


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark")])
def test_it_fits_every_width_in_light_and_dark(running, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(running.url)
    page.wait_for_selector("#state.ready")
    ask(page, max_tokens=16)
    page.hover(".token >> nth=8")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == (scheme == "dark")
    page.close()
