"""The run lock: one live process per run folder, and none that is dead."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.file_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from holdfast.core.file_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another live process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def silent(line):
    raise AssertionError(f"unexpected log line: {line}")


def test_the_lock_names_its_holder_and_goes_away_at_exit(tmp_path):
    with RunLock(tmp_path / "run", log=silent) as lock:
        assert json.loads(lock.path.read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}
        assert lock.made
    assert not (tmp_path / "run").exists()  # which the lock had made
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run", log=silent):
        pass


def test_the_lock_is_released_when_the_run_fails(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError("x")
    with RunLock(tmp_path, log=silent):
        pass


def test_a_second_lock_in_one_process_is_refused(tmp_path):
    with RunLock(tmp_path):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).exists()


def test_a_live_process_is_named_and_keeps_its_lock(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught, RunLock(tmp_path):
            pass
        assert f"process {holder.pid} on {socket.gethostname()}" in caught.value.what
        assert caught.value.exit_code == 6
        assert caught.value.remedy
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == holder.pid


def test_the_lock_of_a_killed_process_is_taken_over_with_a_log_line(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lines = []
    with RunLock(tmp_path, log=lines.append):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert len(lines) == 1
    assert str(holder.pid) in lines[0]
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_lock_file_does_not_stand_in_the_way(tmp_path, content):
    (tmp_path / LOCK_FILE).write_text(content)
    with RunLock(tmp_path, log=silent):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_the_lock_of_another_host_is_refused_and_left(tmp_path):
    content = json.dumps({"pid": 77, "host": "elsewhere"})
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="process 77 on elsewhere") as caught, RunLock(tmp_path):
        pass
    assert str(tmp_path / LOCK_FILE) in caught.value.remedy
    assert (tmp_path / LOCK_FILE).read_text() == content


def test_a_forked_worker_that_outlives_the_run_does_not_keep_the_lock(tmp_path):
    read_end, write_end = os.pipe()
    with RunLock(tmp_path):
        worker = os.fork()
        if worker == 0:
            os.close(write_end)
            os.read(read_end, 1)  # lives until the test closes its end
            os._exit(0)
    try:
        with RunLock(tmp_path, log=silent):
            pass
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(worker, 0)


def test_a_forked_child_that_unwinds_leaves_the_parents_lock(tmp_path):
    with RunLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert lock.path.exists()
        with pytest.raises(CheckpointError), RunLock(tmp_path):
            pass


def test_a_file_unlinked_between_open_and_lock_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def after_a_release(descriptor, operation):
        if not calls:
            (tmp_path / LOCK_FILE).unlink()  # what the former holder does when it ends just now
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_a_release)
    with RunLock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(CheckpointError), RunLock(tmp_path):
            pass


def test_many_processes_at_once_one_wins(tmp_path):
    """Each contender counts up in a file that only the holder may touch; lost updates would show."""
    code = """
import sys, time
from pathlib import Path
from holdfast.core.errors import CheckpointError
from holdfast.core.file_lock import RunLock
folder, counter = Path(sys.argv[1]), Path(sys.argv[2])
done = 0
while done < 25:
    try:
        with RunLock(folder):
            value = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(value + 1))
            done += 1
    except CheckpointError:
        time.sleep(0.0005)
"""
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(counter)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 0
    assert counter.read_text() == "75"


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written") as caught, RunLock(tmp_path / "file"):
        pass
    assert caught.value.exit_code == 2


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "precious.txt"
    target.write_text("keep")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(target)
    with pytest.raises(ConfigError), RunLock(tmp_path / "run"):
        pass
    assert target.read_text() == "keep"


def test_a_folder_that_was_there_or_holds_something_stays(tmp_path):
    (tmp_path / "old").mkdir()
    with RunLock(tmp_path / "old") as lock:
        assert not lock.made
    assert (tmp_path / "old").is_dir()
    with RunLock(tmp_path / "new"):
        (tmp_path / "new" / "config.yaml").touch()
    assert (tmp_path / "new" / "config.yaml").exists()


def test_the_next_process_keeps_the_folder_that_the_last_one_was_about_to_remove(tmp_path, monkeypatch):
    """The next one takes the lock after the last one's file is gone, before its folder is."""
    folder, second = tmp_path / "run", RunLock(tmp_path / "run")
    remove = Path.rmdir

    def rmdir(path):
        monkeypatch.setattr(Path, "rmdir", remove)
        second.__enter__()
        remove(path)

    with RunLock(folder, log=silent):
        monkeypatch.setattr(Path, "rmdir", rmdir)
    assert second.path.exists()
    with pytest.raises(CheckpointError, match="in use"), RunLock(folder):
        pass
    second.__exit__(None, None, None)


def test_a_folder_removed_before_the_lock_was_opened_is_made_again(tmp_path, monkeypatch):
    folder, opened = tmp_path / "run", os.open
    folder.mkdir()

    def removing(path, *arguments):
        if folder.exists() and not any(folder.iterdir()):
            monkeypatch.setattr(os, "open", opened)
            folder.rmdir()
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", removing)
    with RunLock(folder, log=silent) as lock:
        assert lock.made
        assert lock.path.exists()


def test_a_place_in_which_no_folder_can_be_made_is_refused_at_once():
    with pytest.raises(ConfigError, match="cannot be written"), RunLock(Path("/proc/no-such-place/run")):
        pass


def test_a_folder_removed_between_two_looks_is_made_again(tmp_path, monkeypatch):
    """It was there when it was to be made, and is gone when it is looked at: another process released it."""
    folder, made, calls = tmp_path / "run", Path.mkdir, []

    def mkdir(self: Path, *arguments: object, **options: object) -> None:
        if self == folder and not calls:
            calls.append(self)
            raise FileExistsError(17, "File exists", str(self))
        made(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with RunLock(folder):
        assert (folder / LOCK_FILE).exists()
    assert calls == [folder]
    assert not folder.exists(), "this lock made it"
