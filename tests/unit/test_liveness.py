"""Whether a process still runs, told from its row: real processes, dead, undead and reborn."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from token_id_capture.store.maintain.liveness import Liveness, liveness_of
from token_id_capture.store.write.process import ProcessIdentity, boot_id


def of(identity: ProcessIdentity, **changes: object) -> Liveness:
    row = {"pid": identity.pid, "host": identity.host, "booted": identity.boot_id, "started_at": identity.started_at}
    return liveness_of(**{**row, **changes})  # type: ignore[arg-type]


def test_this_process_is_alive() -> None:
    assert of(ProcessIdentity.of_this_process()) is Liveness.ALIVE


def test_a_process_that_ended_is_dead_even_before_its_parent_has_noticed() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness_of(child.pid, socket.gethostname(), boot_id(), time.time()) is Liveness.DEAD
    finally:
        child.wait()
    assert liveness_of(child.pid, socket.gethostname(), boot_id(), time.time()) is Liveness.DEAD


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells when a process started")
def test_another_process_with_the_same_pid_is_not_the_one_of_the_row() -> None:
    # The row is of an hour before this process started.
    identity = ProcessIdentity.of_this_process()
    boot, namespace, tick = identity.boot_id.split("/")
    assert of(identity, booted=f"{boot}/{namespace}/{int(tick) - 1}") is Liveness.DEAD
    # A row of a release that kept no tick.
    earlier = {"booted": f"{boot}/{namespace}", "started_at": time.time() - time.monotonic() - 3600}
    assert of(identity, **earlier) is Liveness.DEAD


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_clock_that_was_set_makes_no_process_dead(seconds: int) -> None:
    identity = ProcessIdentity.of_this_process()
    assert of(identity, started_at=identity.started_at + seconds) is Liveness.ALIVE


def test_a_process_of_an_earlier_boot_is_dead() -> None:
    assert of(ProcessIdentity.of_this_process(), booted="2b6a0d8c-of-last-week/1") is Liveness.DEAD


def test_a_process_of_another_host_or_container_is_unknown() -> None:
    identity = ProcessIdentity.of_this_process()
    assert of(identity, host="elsewhere") is Liveness.UNKNOWN
    boot = identity.boot_id.partition("/")[0]
    assert of(identity, booted=f"{boot}/1") is Liveness.UNKNOWN


def test_a_pid_that_no_system_has_is_dead() -> None:
    assert of(ProcessIdentity.of_this_process(), pid=2**40) is Liveness.DEAD
