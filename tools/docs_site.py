# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages of the repository's root join the site, and other links out become text.

`mkdocs.yml` names this file. A page of `docs/` links to files of the repository as GitHub resolves
them. On the site README and its neighbours are pages under `project/`. A link to any other file
outside of `docs/` goes to `repo_url`, or becomes the file's path where no `repo_url` is set.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config) -> Files:
    """Add the pages of the root."""
    for name in PROJECT:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"project/{name}", content=text))
    return files


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """Resolve the links that leave the folder of the pages."""
    uri = PurePosixPath(page.file.src_uri)
    # Where the page lies in the repository.
    folder = PurePosixPath() if uri.parts[0] == "project" else PurePosixPath("docs", uri.parent)

    def resolved(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        name, hash_sign, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match.group(0)
        path = PurePosixPath(os.path.normpath(folder / name))
        if str(path) in PROJECT:
            home = PurePosixPath("project", path)
        elif path.parts[0] == "docs":
            home = path.relative_to("docs")
        elif config.repo_url:
            return f"{mark}[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        else:
            return f"{text} (`{path}`)" if text.strip("`") != str(path) else f"`{path}`"
        if home == PurePosixPath("log") or home.suffix == "":
            return f"{text} (`{path}`)"
        relative = os.path.relpath(home, uri.parent)
        return f"{mark}[{text}]({relative}{hash_sign}{anchor})"

    return LINK.sub(resolved, markdown)
