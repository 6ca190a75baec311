# SPDX-License-Identifier: Apache-2.0
"""Links of pages lead to the right place on the site, too. Needs the extra `docs`."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("server.md", "[a](numerics.md#noise)", "[a](numerics.md#noise)"),
        ("server.md", "[a](#limits)", "[a](#limits)"),
        ("server.md", "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("index.md", "[a](../README.md#speed)", "[a](project/README.md#speed)"),
        ("log/index.md", "[a](../tried.md)", "[a](../tried.md)"),
        ("project/README.md", "![f](docs/figures/tree.svg)", "![f](../figures/tree.svg)"),
        ("project/README.md", "[a](docs/log/index.md)", "[a](../log/index.md)"),
        ("project/README.md", "[a](CHANGELOG.md)", "[a](CHANGELOG.md)"),
        ("parallel.md", "[e](../examples/slurm.sh)", "e (`examples/slurm.sh`)"),
        ("parallel.md", "[examples/slurm.sh](../examples/slurm.sh)", "`examples/slurm.sh`"),
    ],
)
def test_a_link_of_a_page_on_the_site(hooks, page, link, on_the_site):
    told = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    config = SimpleNamespace(repo_url=None)
    assert hooks.on_page_markdown(link, page=told, config=config, files=None) == on_the_site


def test_other_files_are_linked_where_the_repository_has_an_address(hooks):
    told = SimpleNamespace(file=SimpleNamespace(src_uri="parallel.md"))
    config = SimpleNamespace(repo_url="https://example.org/detjax/")
    got = hooks.on_page_markdown("[e](../examples/slurm.sh)", page=told, config=config, files=None)
    assert got == "[e](https://example.org/detjax/blob/main/examples/slurm.sh)"
