"""``tokcap explain``: why a rollout is masked, in sentences."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from token_id_capture.cli.options import DatabaseOption, JsonOption
from token_id_capture.cli.output.evidence import rollout_argument, stored_evidence
from token_id_capture.cli.output.tokenizer import decoder


def explain(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="The rollout id, as tokcap ls shows it.")],
    database: DatabaseOption,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="The policy's tokenizer.json: also compare and show text."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain in sentences why a rollout is masked, and what to do about it.

    Names the rule that forbids training on it and the calls concerned. If a prompt does not continue an earlier
    call, it shows the closest call, the first token that differs, both sides of that place, and the likely cause.
    Works on open, frozen and retired rollouts, and changes nothing. An open rollout is explained as if it were
    frozen now.
    """
    from token_id_capture import explanation
    from token_id_capture.cli.output.explain_text import print_explanation, print_explanation_json

    decode = None if tokenizer is None else decoder(tokenizer)
    # What the build logs is part of what is explained.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    stored = explanation.stored_rollout(stored_evidence(database, rollout_argument(rollout)))
    explained = explanation.explain(stored, decode)
    if json:
        print_explanation_json(explained, decode)
    else:
        print_explanation(explained, decode)
