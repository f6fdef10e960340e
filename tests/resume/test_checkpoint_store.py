"""The checkpoint store: killed, damaged, full or foreign, it gives a whole checkpoint or says why not."""

import errno
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.overwriting import overwrite

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.training.checkpoint_store import CheckpointStore
from holdfast.training.state_files import load_state, save_state

FINGERPRINT = {"config": {"tau": 0.1, "alpha": 0.05}, "data": "a" * 64}
DAMAGED_FILES = ["adapter/weights.bin", "trainer.json", "trainer.safetensors", "manifest.json"]


def put(store: CheckpointStore, step: int, payload: str, fingerprint=FINGERPRINT) -> Path:
    """Commit a checkpoint of four files, one of them in a subfolder."""
    with store.disk_guard(step):
        fill(store.stage(step), payload)
        return store.commit(step, fingerprint=fingerprint)


def fill(folder: Path, payload: str) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights.bin").write_text(payload * 50)
    save_state(folder / "trainer", {"payload": payload, "moment": torch.full((8,), float(len(payload)))})


def payload_of(path: Path) -> str:
    """The payload, after checking that all files are of one and the same checkpoint."""
    state = load_state(path / "trainer")
    assert (path / "adapter" / "weights.bin").read_text() == state["payload"] * 50
    assert torch.equal(state["moment"], torch.full((8,), float(len(state["payload"]))))
    return state["payload"]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def silent(line: str) -> None:
    raise AssertionError(f"unexpected log line: {line}")


def in_child(work) -> int:
    """Run `work` in a forked process; its exit status (0: it returned)."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch):
    """No waiting for the disk: what a dead process wrote is in the page cache whether flushed or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def test_a_committed_checkpoint_verifies_and_is_the_latest(store):
    assert store.latest(log=silent) is None
    put(store, 2, "two")
    path = put(store, 10, "ten")
    assert names(store.root) == ["checkpoint-10", "checkpoint-2"]
    store.verify(path)
    assert store.latest(log=silent) == path  # by number, not by name
    assert payload_of(path) == "ten"
    assert store.fingerprint(path) == FINGERPRINT


def test_nothing_is_visible_before_the_commit(store):
    put(store, 1, "one")
    fill(store.stage(2), "two")
    assert [path.name for path in store.checkpoints()] == ["checkpoint-1"]
    assert store.staging(2).is_dir()


def test_staging_again_starts_from_an_empty_folder(store):
    (store.stage(1) / "stale.txt").write_text("old")
    assert list(store.stage(1).iterdir()) == []


def test_files_reach_the_disk_before_the_name_and_the_name_before_the_return(store, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    real = os.path.realpath
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(real(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (events.append("RENAME"), rename(a, b, **k))[1])
    fill(store.stage(3), "x")
    staged = {str(path) for path in store.staging(3).rglob("*")} | {str(store.staging(3))}
    events.clear()
    store.commit(3, fingerprint=FINGERPRINT)
    flushed = {real(path) for path in events[: events.index("RENAME")]}
    assert {real(path) for path in staged} <= flushed
    assert any("manifest.json" in path for path in flushed)
    assert events[events.index("RENAME") + 1 :] == [real(store.root)]


# Killed at every point


class KillAtOperation:
    """Audit hook that ends the process, as SIGKILL would, before its n-th operation on the file system."""

    EVENTS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.listdir"})

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, event: str, arguments: tuple) -> None:
        if event in self.EVENTS:
            self.left -= 1
            if self.left == 0:
                os._exit(9)


def sweep(tmp_path, prepare, work):
    """Kill `work` before each of its file-system operations in turn; yields the store after each death."""
    for number in range(1, 400):
        store = CheckpointStore(tmp_path / f"kill-{number}")
        prepare(store)

        def killed(store=store, number=number):
            sys.addaudithook(KillAtOperation(number))
            work(store)

        status = in_child(killed)
        assert status in (0, 9)
        yield store, status
        if status == 0:
            assert number > 10
            return
    raise AssertionError("the work never finished")


@pytest.mark.parametrize("cleaned", [True, False], ids=["clean first", "latest alone"])
def test_killed_while_a_new_checkpoint_is_written(tmp_path, cleaned):
    seen = []
    for store, status in sweep(tmp_path, lambda s: put(s, 1, "old"), lambda s: put(s, 2, "new!")):
        if cleaned:
            store.clean()
        found = store.latest(log=silent)
        seen.append(payload_of(found))
        assert found.name == {"old": "checkpoint-1", "new!": "checkpoint-2"}[seen[-1]]
        if cleaned:
            assert names(store.root) == sorted(path.name for path in store.checkpoints())
        assert status == 9 or seen[-1] == "new!"
    assert seen == sorted(seen, reverse=True)  # "old" up to the rename, "new!" from there on
    assert set(seen) == {"old", "new!"}


@pytest.mark.parametrize("cleaned", [True, False], ids=["clean first", "latest alone"])
def test_killed_while_the_only_checkpoint_is_replaced(tmp_path, cleaned):
    seen = []
    between = 0
    for store, status in sweep(tmp_path, lambda s: put(s, 1, "old"), lambda s: put(s, 1, "new!")):
        between += not (store.root / "checkpoint-1").exists()
        if cleaned:
            store.clean()
        seen.append(payload_of(store.latest(log=silent)))
        if cleaned:
            assert names(store.root) == ["checkpoint-1"]
        assert status == 9 or seen[-1] == "new!"
        put(store, 1, "again")  # leftovers do not stand in the way
        assert payload_of(store.latest(log=silent)) == "again"
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new!"}
    assert between == 1  # the moment between the two renames was hit


def test_killed_while_rotating(tmp_path):
    def prepare(store):
        for step in (1, 2, 3):
            put(store, step, f"step {step}")

    for store, _ in sweep(tmp_path, prepare, lambda s: s.rotate(1, set())):
        store.clean()
        for path in store.checkpoints():
            store.verify(path)
        assert payload_of(store.latest(log=silent)) == "step 3"
        assert names(store.root) == sorted(path.name for path in store.checkpoints())


def test_killed_while_cleaning(tmp_path):
    def prepare(store):
        put(store, 1, "old")
        (store.root / "checkpoint-1").rename(store.root / ".old-checkpoint-1")
        fill(store.stage(1), "torn")
        fill(store.stage(7), "torn")

    for store, _ in sweep(tmp_path, prepare, lambda s: s.clean()):
        store.clean()
        assert names(store.root) == ["checkpoint-1"]
        assert payload_of(store.latest(log=silent)) == "old"


def test_sigkill_at_random_times(tmp_path):
    store = CheckpointStore(tmp_path)
    put(store, 0, "0")
    chance = random.Random(7)

    def work():
        step = int(payload_of(store.latest(log=silent)))
        while True:
            step += 1
            put(store, step, str(step))
            put(store, step, str(step))  # a resumed run reaches the same step again
            store.rotate(2, set())

    reached = 0
    for attempt in range(1000):
        if attempt >= 12 and reached:  # on a busy machine a child may be killed before it has written anything
            break
        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(70)
        time.sleep(chance.uniform(0.005, 0.12))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        store.clean()
        step = int(payload_of(store.latest(log=silent)))
        assert step >= reached
        reached = step
    assert reached > 0


# Damage


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x04
    path.write_bytes(data)


DAMAGE = {
    "flip first": lambda path: flip(path, 0.0),
    "flip middle": lambda path: flip(path, 0.5),
    "flip last": lambda path: flip(path, 1.0),
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "append": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "zero length": lambda path: path.write_bytes(b""),
    "zero content": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "folder instead": lambda path: (path.unlink(), path.mkdir()),
    "link instead": lambda path: (path.rename(path.parents[3] / "moved"), path.symlink_to("/etc/hostname")),
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_to_each_file_is_found_named_and_set_aside(store, name, damage):
    good = put(store, 1, "good")
    bad = put(store, 2, "bad")
    DAMAGE[damage](bad / name)
    with pytest.raises(CheckpointError) as caught:
        store.verify(bad)
    assert name in caught.value.what
    lines = []
    assert store.latest(log=lines.append) == good
    assert names(store.root) == ["checkpoint-1", "quarantine-checkpoint-2-1"]
    assert len(lines) == 1
    assert "quarantine-checkpoint-2-1" in lines[0]
    assert name in lines[0]


def test_every_single_byte_of_the_manifest_counts(store):
    path = put(store, 1, "x") / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for mask in (0x01, 0x20, 0x2A):  # 0x2A turns a newline into a space: the JSON stays the same
            overwrite(path, whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            with pytest.raises(CheckpointError):
                store.fingerprint(path.parent)
    path.write_bytes(whole)
    store.verify(path.parent)


def test_an_extra_file_is_named(store):
    path = put(store, 1, "x")
    (path / "adapter" / "intruder.bin").write_text("x")
    with pytest.raises(CheckpointError, match=r"adapter/intruder\.bin .*extra"):
        store.verify(path)


def test_a_renamed_checkpoint_is_not_believed(store):
    put(store, 1, "x").rename(store.root / "checkpoint-9")
    with pytest.raises(CheckpointError, match="step 1"):
        store.verify(store.root / "checkpoint-9")


def test_a_folder_without_a_manifest_is_set_aside(store):
    good = put(store, 1, "good")
    (store.root / "checkpoint-5").mkdir()
    lines = []
    assert store.latest(log=lines.append) == good
    assert "manifest.json is missing" in lines[0]


def test_all_damaged_is_an_error_now_and_on_the_next_attempt(store):
    for step in (1, 2):
        flip(put(store, step, "x") / "trainer.json", 0.5)
    lines = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            store.latest(log=lines.append)
        assert caught.value.exit_code == 6
        assert caught.value.remedy
    assert len(lines) == 2
    assert names(store.root) == ["quarantine-checkpoint-1-1", "quarantine-checkpoint-2-1"]


def test_quarantine_never_overwrites(store):
    for _ in range(3):
        flip(put(store, 4, "x") / "trainer.json", 0.5)
        with pytest.raises(CheckpointError):
            store.latest(log=lambda line: None)
    assert names(store.root) == [f"quarantine-checkpoint-4-{n}" for n in (1, 2, 3)]


# Fingerprints


def test_the_same_fingerprint_is_accepted(store):
    path = put(store, 1, "x", {"a": (1, 2), "n": {"b": None, "empty": {}}})
    store.require_same_fingerprint(path, {"n": {"empty": {}, "b": None}, "a": [1, 2]})


def test_every_difference_is_listed(store):
    path = put(store, 1, "x", {"config": {"tau": 0.1, "unit": "nll_token"}, "data": "a" * 64, "gone": 1})
    with pytest.raises(CheckpointError) as caught:
        store.require_same_fingerprint(
            path, {"config": {"tau": 0.2, "unit": "nll_token"}, "data": "b" * 64, "added": True}
        )
    what = caught.value.what
    assert caught.value.exit_code == 6
    assert "config.tau: stored 0.1, current 0.2" in what
    assert "gone: stored 1, current absent" in what
    assert "added: stored absent, current true" in what
    assert "data: stored" in what
    assert "a" * 64 not in what
    assert "unit" not in what


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}], ids=["object", "nan", "set"])
def test_a_fingerprint_that_is_not_json_is_refused_before_anything_is_published(store, value):
    store.stage(1)
    with pytest.raises(ConfigError, match="fingerprint"):
        store.commit(1, fingerprint={"x": value})
    assert store.checkpoints() == []


# Rotation and cleaning


@pytest.mark.parametrize(
    ("keep", "protect", "left"),
    [
        (None, [], [1, 2, 3, 4]),
        (4, [], [1, 2, 3, 4]),
        (2, [], [3, 4]),
        (2, [1], [1, 4]),
        (1, [2], [2, 4]),
        (1, [], [4]),
        (0, [], [4]),
        (1, [1, 2, 3], [1, 2, 3, 4]),
    ],
)
def test_rotation(store, keep, protect, left):
    for step in (1, 2, 3, 4):
        put(store, step, "x")
    store.rotate(keep, {store.root / f"checkpoint-{step}" for step in protect})
    assert names(store.root) == [f"checkpoint-{step}" for step in left]


def test_rotation_knows_a_protected_folder_by_another_spelling(store):
    for step in (1, 2):
        put(store, step, "x")
    store.rotate(1, {store.root / "checkpoint-2" / ".." / "checkpoint-1"})
    assert len(store.checkpoints()) == 2


def test_clean_keeps_what_is_not_its_own(store):
    put(store, 1, "x")
    (store.root / "quarantine-checkpoint-0-1").mkdir()
    (store.root / "notes.txt").write_text("keep")
    (store.root / ".tmp-checkpoint-9").mkdir()
    shutil.copytree(store.root / "checkpoint-1", store.root / ".old-checkpoint-1")
    store.clean()
    assert names(store.root) == ["checkpoint-1", "notes.txt", "quarantine-checkpoint-0-1"]


def test_clean_and_latest_on_a_folder_that_does_not_exist(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    store.clean()
    assert store.latest(log=silent) is None
    assert not store.root.exists()


# Disk full


def write_tensors(folder: Path) -> None:
    save_state(folder / "trainer", {"moment": torch.zeros(2000)})


def write_many_small_files(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number}.txt").write_text("x")


@pytest.mark.parametrize("write", [write_tensors, write_many_small_files], ids=["tensors", "manifest"])
def test_a_file_size_limit_leaves_the_previous_checkpoint(store, write):
    put(store, 1, "old")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            with store.disk_guard(2):
                write(store.stage(2))
                store.commit(2, fingerprint=FINGERPRINT)
        except ResourceError as error:
            os._exit(error.exit_code)

    assert in_child(work) == 7
    assert names(store.root) == ["checkpoint-1"]
    assert payload_of(store.latest(log=silent)) == "old"


def full_at(function: str, call: int, monkeypatch) -> list:
    """Let the given call of an `os` function fail with ENOSPC; the list of calls made."""
    real, calls = getattr(os, function), []

    def failing(*arguments, **options):
        if function == "mkdir" and Path(arguments[0]).exists():
            return real(*arguments, **options)
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)

    monkeypatch.setattr(os, function, failing)
    return calls


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
@pytest.mark.parametrize("function", ["fsync", "rename", "replace", "mkdir"])
def test_a_full_disk_at_any_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, function, step):
    for call in range(1, 100):
        store = CheckpointStore(tmp_path / f"full-{call}")
        put(store, 1, "old")
        with monkeypatch.context() as patch:
            calls = full_at(function, call, patch)
            if outcome := attempt(lambda store=store: put(store, step, "new!")):
                assert "No space left" in outcome.what
        assert not store.staging(step).exists()
        store.clean()
        for path in store.checkpoints():
            store.verify(path)
        found = payload_of(store.latest(log=silent))
        if len(calls) < call:
            assert outcome is None
            assert found == "new!"
            assert call > 1
            return
        assert outcome is not None
        assert found == "old" or function == "fsync"  # the root is flushed after the new name
    raise AssertionError("the work never finished")


def attempt(work) -> ResourceError | None:
    try:
        work()
    except ResourceError as error:
        return error
    return None


def test_a_failed_second_rename_puts_the_old_one_back_at_once(store, monkeypatch):
    put(store, 1, "old")
    real = os.rename

    def failing(source, target, **options):
        if str(target).endswith("/checkpoint-1") and ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(source, target, **options)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ResourceError):
        put(store, 1, "new!")
    assert names(store.root) == ["checkpoint-1"]
    assert payload_of(store.root / "checkpoint-1") == "old"


def test_a_bug_in_the_writer_is_not_reported_as_a_full_disk(store):
    def write():
        with store.disk_guard(1):
            raise KeyError("x")

    with pytest.raises(KeyError):
        write()


# Links


def test_a_stale_link_is_removed_and_its_target_left_alone(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("keep")
    put(store, 1, "x")
    store.staging(2).symlink_to(outside)
    (store.root / ".old-checkpoint-1").symlink_to(outside)
    put(store, 2, "two")
    store.staging(3).symlink_to(outside)
    store.clean()
    assert names(outside) == ["precious.txt"]
    assert names(store.root) == ["checkpoint-1", "checkpoint-2"]


def test_a_staging_folder_swapped_for_a_link_is_refused(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    store.stage(1).rmdir()
    store.staging(1).symlink_to(outside)
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.commit(1, fingerprint=FINGERPRINT)
    assert names(outside) == []


def test_a_link_among_the_staged_files_is_refused(store, tmp_path):
    (tmp_path / "outside.bin").write_text("x")
    (store.stage(1) / "weights.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match=r"weights\.bin is a link"):
        store.commit(1, fingerprint=FINGERPRINT)
    assert store.checkpoints() == []


def test_a_linked_checkpoint_is_not_followed(store, tmp_path):
    put(store, 1, "x")
    put(CheckpointStore(tmp_path / "other"), 5, "foreign")
    (store.root / "checkpoint-5").symlink_to(tmp_path / "other" / "checkpoint-5")
    lines = []
    assert store.latest(log=lines.append) == store.root / "checkpoint-1"
    assert "symbolic link" in lines[0]
    store.verify(tmp_path / "other" / "checkpoint-5")


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "big-disk")
    store = CheckpointStore(tmp_path / "checkpoints")
    put(store, 1, "x")
    assert payload_of(store.latest(log=silent)) == "x"


def test_commit_without_stage_says_so(store):
    with pytest.raises(CheckpointError, match="does not exist"):
        store.commit(1, fingerprint=FINGERPRINT)
