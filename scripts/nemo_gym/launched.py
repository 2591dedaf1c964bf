"""Run by ``tokcap gym`` in ``end_to_end.py``: what a collector finds in its process. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from nemo_gym import rollout_collection
from nemo_gym.token_id_capture import protocols


def main() -> None:
    """Clear rollout 1-0 as the collector does before it dispatches it."""
    block: dict[str, Any] = {"enabled": True, "sink": "a:B", "lineage_store": "a:C"}
    directories = rollout_collection.token_id_capture_dirs_from_config({"token_id_capture": block})
    record = {"_ng_task_index": 1, "_ng_rollout_index": 0}
    rollout_collection.clear_token_captures_for_rollouts([record], directories)
    installed = (
        protocols.installed_token_sink(),
        protocols.installed_lineage_store(),
        protocols.installed_token_source(),
    )
    json.dump({"installed": [type(one).__name__ for one in installed], "arguments": sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
