"""``tokcap export``: where its rows go, what is replaced, and what an interrupted one leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from support.commands import TOKCAP, RunTokcap, clean_environment
from support.fates import entry, fill, lines
from support.many_rollouts import database_with
from token_id_capture.cli.options import output_stream
from token_id_capture.outputs.compression import Compression, compressed
from token_id_capture.outputs.destination import Destination
from token_id_capture.outputs.whole_files import UnusableOutputError, whole_file
from token_id_capture.outputs.writer import row_writer
from token_id_capture.store import TokenCaptureStore


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rollout of each fate; their ids say which."""
    path = tmp_path_factory.mktemp("database") / "captures.db"
    asyncio.run(fill(path))
    return path


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text.strip()


def test_rows_can_go_to_a_url_and_replace_what_is_there_only_on_request(
    tokcap: RunTokcap, database: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/rows.jsonl.gz"
    assert tokcap("export", "-d", database, "-o", url).returncode == 0
    with gzip.open(tmp_path / "rows.jsonl.gz") as written:
        assert written.read().decode() == tokcap("export", "-d", database, "-o", "-").stdout
    refused = tokcap("export", "-d", database, "-o", url)
    assert (refused.returncode, one_line(refused.stderr).partition(" is there")[0]) == (2, f"tokcap: {url}")
    assert tokcap("export", "-d", database, "-o", url, "--overwrite").returncode == 0
    unknown = tokcap("export", "-d", database, "-o", "nosuch://bucket/rows.jsonl")
    assert (unknown.returncode, "cannot write nosuch://" in one_line(unknown.stderr)) == (2, True)


def test_a_url_that_can_only_be_read_is_one_line(tokcap: RunTokcap, database: Path) -> None:
    refused = tokcap("export", "-d", database, "-o", "http://127.0.0.1:1/rows.jsonl")
    assert refused.returncode == 2
    assert one_line(refused.stderr).startswith("tokcap: cannot write http://127.0.0.1:1/rows.jsonl: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", [["export", "-o", "-"], ["ls"], ["ls", "--json"], ["doctor"]])
def test_a_full_disk_behind_standard_output_is_one_line(database: Path, arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [str(TOKCAP), *arguments, "-d", str(database)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert (done.returncode, one_line(done.stderr)) == (
        2,
        "tokcap: the output cannot be written: No space left on device",
    )


@pytest.mark.parametrize("compression", Compression)
def test_a_compressed_file_that_is_given_up_is_not_written_to_any_more(
    compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    stream = io.BytesIO()
    block = compressed(stream, compression)
    block.__enter__().write(b"a row")
    stream.close()  # as a full disk ends it
    del block
    gc.collect()
    assert complaints == []


def test_a_file_behind_a_url_is_there_only_when_it_is_whole() -> None:
    system = fsspec.filesystem("memory")
    broken, whole = (Destination(f"memory://rows/{name}.jsonl") for name in ("broken", "whole"))
    with contextlib.suppress(KeyboardInterrupt), row_writer(broken, (), output_stream) as writer:
        writer.write(b"half a row")
        raise KeyboardInterrupt
    assert not system.exists("/rows/broken.jsonl")
    with row_writer(whole, (), output_stream) as writer:
        writer.write(b"a row\n")
        assert not system.exists("/rows/whole.jsonl")
    assert system.cat("/rows/whole.jsonl") == b"a row\n"


def test_what_is_there_is_replaced_only_on_request(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("mine")
    assert tokcap("export", "-d", database, "-o", out).returncode == 2
    assert out.read_text() == "mine"
    assert tokcap("export", "nobody", "-d", database, "-o", out, "--overwrite").returncode == 1
    assert out.read_text() == "mine"
    assert tokcap("export", "-d", database, "-o", out, "--overwrite").returncode == 0
    assert len(lines(out)) == 2


def test_rows_can_go_to_a_pipe(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("export", "-d", database, "-o", "-")
    assert [json.loads(line)["rollout_id"] for line in done.stdout.splitlines()] == ["delivered", "frozen"]


async def fill_with_long_rollouts(path: Path, rollouts: int) -> Path:
    first = entry("r", "only", [position * 31 % 150_000 for position in range(20_000)], [1, 2, 3])
    async with TokenCaptureStore(path) as store:
        for start in range(0, rollouts, 50):
            copies = (first.model_copy(update={"rollout_id": f"r{start + number:05}"}) for number in range(50))
            await asyncio.gather(*map(store.put, copies))
    return path


@pytest.fixture(scope="module")
def long_rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 open rollouts of 20,000 tokens each; rows of all of them take 78 MB as packed as can be."""
    return asyncio.run(fill_with_long_rollouts(tmp_path_factory.mktemp("long") / "captures.db", 300))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_memory_does_not_grow_with_the_number_of_rollouts(tmp_path: Path, long_rollouts: Path, name: str) -> None:
    some_rollouts = asyncio.run(fill_with_long_rollouts(tmp_path / "some.db", 50))
    some = peak_megabytes("export", "-d", some_rollouts, "-o", tmp_path / f"some-{name}", "--include-open")
    many = peak_megabytes("export", "-d", long_rollouts, "-o", tmp_path / f"many-{name}", "--include-open")
    assert many < some + 40


def peak_megabytes(*arguments: object) -> float:
    """The largest resident set of the command."""
    process = subprocess.Popen([TOKCAP, *map(str, arguments)], env=clean_environment(), stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024)


def test_a_reader_of_the_pipe_that_leaves_early_gets_no_complaint(long_rollouts: Path) -> None:
    process = start("export", "-d", long_rollouts, "-o", "-", "--include-open")
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b'{"rollout_id":"r00000"')
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(60)) == (b"", 1)
    process.stderr.close()


@pytest.mark.parametrize(("rows", "jobs"), [("long", 1), ("short", 1), ("long", 2)])
def test_an_interrupt_ends_the_export_at_once_in_one_line(
    long_rollouts: Path, tmp_path_factory: pytest.TempPathFactory, rows: str, jobs: int
) -> None:
    # Of short rows some wait in a buffer.
    database = long_rollouts if rows == "long" else database_with(4_000, tmp_path_factory)
    process = start("export", "-d", database, "-o", "-", "--include-open", "--jobs", jobs)
    assert process.stdout is not None
    assert process.stderr is not None
    # From here on nobody reads, so the command waits in a write.
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read() == b"tokcap: interrupted: no file was written\n"
    process.stdout.close()
    process.stderr.close()


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [TOKCAP, *map(str, arguments)], env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_file_gets_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with whole_file(tmp_path / "out") as stream:
        stream.write(b"all of it")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").read_bytes() == b"all of it"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_file_that_is_given_up_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def give_up() -> None:
        with whole_file(tmp_path / "out") as stream:
            stream.write(b"half of it")
            raise error

    with pytest.raises(error):
        give_up()
    assert os.listdir(tmp_path) == []


def test_a_file_that_somebody_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def be_second() -> None:
        with whole_file(tmp_path / "out") as stream:
            stream.write(b"ours")
            (tmp_path / "out").write_text("theirs")

    with pytest.raises(UnusableOutputError, match="there already"):
        be_second()
    assert (tmp_path / "out").read_text() == "theirs"
