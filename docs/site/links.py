"""Links of the site to files that are not pages of it lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(([^)#:]+)((?:#[^)]*)?)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any, **_: Any) -> str:
    """Rewrite each relative link whose file the site does not have."""
    folder = Path(config["docs_dir"]) / Path(page.file.src_uri).parent
    root = Path(config["docs_dir"]).parent

    def rewritten(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        within = target.is_relative_to(config["docs_dir"]) and files.get_file_from_path(
            target.relative_to(config["docs_dir"]).as_posix()
        )
        if within or not target.exists():
            return match[0]  # a broken link stays one, and the build ends with it
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target.relative_to(root).as_posix()}{match[2]})"

    return _LINK.sub(rewritten, markdown)
