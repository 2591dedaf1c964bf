"""The lower bounds of ``pyproject.toml`` as exact versions, for ``scripts/versions``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def lowest(project: dict[str, object]) -> Iterator[str]:
    """A pin for each requirement of the package and its extras: its lower bound."""
    table = project["project"]
    assert isinstance(table, dict)
    for text in [
        *table["dependencies"],
        *(text for extra in table["optional-dependencies"].values() for text in extra),
    ]:
        requirement = Requirement(text)
        bounds = [spec.version for spec in requirement.specifier if spec.operator == ">="]
        if not bounds:
            raise SystemExit(f"{text} in {PROJECT.name} has no lower bound: add one that was tested")
        yield f"{requirement.name}=={bounds[0]}"


if __name__ == "__main__":
    print("\n".join(sorted(set(lowest(tomllib.loads(PROJECT.read_text("utf-8")))))))
