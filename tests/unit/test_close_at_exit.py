"""A store that is closed when the interpreter ends already: quietly, and nothing of it is lost."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, atexit, sys
from token_id_capture import TokenCaptureStore, TokenEntry
loop = asyncio.new_event_loop()
store = TokenCaptureStore(sys.argv[1])
entry = dict(prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[-0.5])
async def put():
    await store.put(TokenEntry(rollout_id="r", model_call_id="c", **entry))
    if "read" in sys.argv:
        await store.read_entries("r")
loop.run_until_complete(put())
close = {"same": lambda: loop.run_until_complete(store.close()), "another": lambda: asyncio.run(store.close())}
atexit.register(close[sys.argv[2]])
"""


@pytest.mark.parametrize("loop", ["same", "another"])
@pytest.mark.parametrize("read", ["read", "only written"])
def test_a_close_at_exit_is_quiet_and_loses_nothing(tmp_path: Path, loop: str, read: str) -> None:
    database = tmp_path / "captures.db"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(database), loop, read]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (1,)
