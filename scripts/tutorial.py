"""Save the programs of a page and its commands, as ``scripts/tutorial`` runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def main() -> None:
    """Write each titled block under its title, and the commands into commands.sh."""
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    installed = "--installed" in sys.argv
    commands = []
    for language, title, text in _BLOCK.findall(page.read_text("utf-8")):
        if title:
            (folder / title).write_text(text, "utf-8")
        elif language == "sh" and not (installed and "pip install" in text):
            commands.append(text)
    (folder / "commands.sh").write_text("".join(commands), "utf-8")


if __name__ == "__main__":
    main()
