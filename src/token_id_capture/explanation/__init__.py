"""Why a rollout is masked, in sentences, from what is stored of it. Pure: nothing is read or written.

Read it in this order: ``call_tree`` (where each call stands), ``divergences`` (where a prompt does
not continue the history, as facts), ``causes`` (what that looks like), ``wording`` (both in sentences),
``remedies`` (what to do about each recorded reason), ``explain`` (all of it together, from what
``stored`` holds).
"""

from token_id_capture.builder.causes import Cause, Span
from token_id_capture.explanation.call_tree import CallTree, PlacedCall, Role, call_tree, numbers
from token_id_capture.explanation.causes import Suspicion, suspect
from token_id_capture.explanation.divergences import Decode, ExplainedDivergence, explain_divergence
from token_id_capture.explanation.explain import Explanation, Finding, explain
from token_id_capture.explanation.stored import OpenCall, StoredRollout, stored_rollout

__all__ = [
    "CallTree",
    "Cause",
    "Decode",
    "ExplainedDivergence",
    "Explanation",
    "Finding",
    "OpenCall",
    "PlacedCall",
    "Role",
    "Span",
    "StoredRollout",
    "Suspicion",
    "call_tree",
    "explain",
    "explain_divergence",
    "numbers",
    "stored_rollout",
    "suspect",
]
