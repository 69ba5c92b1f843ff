"""Folders that exist whole or not at all, under every crash and damage that can be staged."""

import ast
import builtins
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.saving_child import parts_of

from hone.checkpoint import atomic
from hone.checkpoint import store as store_module
from hone.checkpoint.atomic import (
    MANIFEST_NAME,
    CheckpointError,
    FolderManifest,
    Publication,
    publish_folder,
    read_manifest,
    record_file,
    write_tensors,
)
from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import in_memory, split_tree, write_tree

ROOT = Path(__file__).parents[2]

PARTS = ("model", "optimizer")
METADATA = {"order": 3, "metric": None, "saved_at": 0.0, "mesh": {}}
"""Of a checkpoint, beside its step and its parts."""
NUM_BYTES = 64 * 4 + 5 * 8 + 64 * 4
"""Of the tensors of `parts_of`."""


def assert_loads(store: CheckpointStore, step: int) -> None:
    """The newest checkpoint is exactly that of `step`."""
    checkpoint = store.load("latest", required=PARTS)
    assert checkpoint.step == step == store.steps()[-1]
    wanted = parts_of(step)
    model, optimizer = (in_memory(checkpoint.parts[name]) for name in PARTS)
    assert all(torch.equal(model[name], wanted["model"][name]) for name in wanted["model"])
    assert optimizer["step"] == step
    assert torch.equal(optimizer["moments"][0], wanted["optimizer"]["moments"][0])


def test_whoever_may_read_a_folder_can_read_its_weights(tmp_path: Path) -> None:
    """The library that writes them lets their owner alone."""
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            (tmp_path / "config.json").write_text("{}")
            write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(2)}, {})
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes["model.safetensors"] == modes["config.json"] == 0o666 & ~umask
        for path in [*tmp_path.iterdir()]:
            path.unlink()


def test_no_error_of_a_disk_is_lost_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of an error once, at the flush that meets it; the last one is well."""
    flush, flushed = os.fdatasync, list[int]()

    def failing_once(descriptor: int) -> None:
        flushed.append(descriptor)
        if len(flushed) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fdatasync", failing_once)
    monkeypatch.setattr(atomic, "_FLUSH_BYTES", 1)
    monkeypatch.setattr(atomic, "_BLOCK_BYTES", 1 << 10)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_tensors(tmp_path / "state.safetensors", {"a": torch.zeros(1 << 18)}, {})


def no_leftovers(folder: Path) -> bool:
    return not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_is_published_with_its_manifest(tmp_path: Path) -> None:
    with publish_folder(tmp_path / "a", metadata={"x": [1, None]}) as publication:
        folder = publication.folder
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(b"12345")
        assert not (tmp_path / "a").exists()
    manifest = read_manifest(tmp_path / "a")
    assert manifest.metadata == {"x": [1, None]}
    assert manifest.files["sub/b.bin"].size == 5
    assert no_leftovers(tmp_path)


def test_only_own_folders_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not ours to replace"), publish_folder(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_an_error_in_the_writer_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with publish_folder(tmp_path / "a") as publication:
            (publication.folder / "b").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


# --- power cuts: what is published is on disk -----------------------------------------------


class Disk:
    """What has been flushed, and what had not been when a folder got its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.missed: list[str] = []
        self._flushed: dict[int, tuple[int, int]] = {}
        rename, fsync = Path.rename, os.fsync

        def flushing(descriptor: int) -> None:
            fsync(descriptor)
            found = os.fstat(descriptor)
            self._flushed[found.st_ino] = found.st_mtime_ns, found.st_size

        def publishing(path: Path, target: Path) -> Path:
            self.missed += [str(item.relative_to(path)) for item in self._unflushed(path)]
            return rename(path, target)

        patch.setattr(os, "fsync", flushing)
        patch.setattr(Path, "rename", publishing)

    def has(self, path: Path) -> bool:
        """Whether a file's content, or a folder's entries, are there as they are now."""
        found = path.stat()
        return self._flushed.get(found.st_ino) == (found.st_mtime_ns, found.st_size)

    def _unflushed(self, folder: Path) -> list[Path]:
        return [item for item in (folder, *sorted(folder.rglob("*"))) if not self.has(item)]


def test_R18_all_of_a_folder_is_on_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with publish_folder(tmp_path / "a") as publication:
        folder = publication.folder
        (folder / "sub").mkdir()
        for name in ("plain.bin", "sub/plain.bin", "sub/recorded.bin"):
            (folder / name).write_bytes(b"12345")
        publication.files["sub/recorded.bin"] = record_file(folder / "sub/recorded.bin")
    assert disk.missed == []
    assert {item.name for item in (tmp_path / "a").iterdir()} == {"sub", "plain.bin", MANIFEST_NAME}
    assert disk.has(tmp_path), "the new name itself"


def test_R18_all_of_a_checkpoint_is_on_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        store.save(step, parts_of(step))
        assert disk.missed == []
        assert disk.has(tmp_path)


# --- crashes: every file system call, and real kills ----------------------------------------


class Crash(BaseException):
    """The process dies here: nothing after it runs."""


CALLS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "open"),
    (os, "rename"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (builtins, "open"),
    (atomic, "_crc32_of_file"),
    (Path, "write_text"),
    (Path, "mkdir"),
    (Path, "rename"),
    (shutil, "rmtree"),
]


def crash_at(number: int, patch: pytest.MonkeyPatch, *, after: bool) -> Callable[[], int]:
    """Die before or after the n-th file system call; all later calls do nothing either."""
    count = 0

    def wrap(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > number or (count == number and not after):
                raise Crash
            result = call(*args, **kwargs)
            if count >= number:
                count = number  # inner calls of a composite one were part of it
                raise Crash
            return result

        return wrapped

    for owner, name in CALLS:
        patch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: count


def crashed_save(store: CheckpointStore, step: int, number: int, *, after: bool) -> bool:
    """Save and die at the n-th call. False when the save had fewer calls."""
    with pytest.MonkeyPatch.context() as patch:
        count = crash_at(number, patch, after=after)
        try:
            store.save(step, parts_of(step))
        except Crash:
            return True
        assert count() < number
        return False


def check_every_crash_point(folder: Path, step: int, *, after: bool) -> None:
    template = CheckpointStore(folder / "template", keep_last=2)
    for earlier in (1, 2):
        template.save(earlier, parts_of(earlier))
    crashed, number, outcomes = True, 0, set[int]()
    while crashed:
        number += 1
        store = CheckpointStore(folder / str(number), keep_last=2)
        shutil.copytree(template.folder, store.folder)
        crashed = crashed_save(store, step, number, after=after)
        latest = store.steps()[-1]
        assert latest in (2, step)
        assert_loads(store, latest)
        outcomes.add(latest)
        store.save(4, parts_of(4))
        assert_loads(store, 4)
        assert no_leftovers(store.folder)
    assert number > 20
    assert outcomes == {2, step}


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, so nothing has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [3, 2], ids=["new", "same step again"])
def test_R18_crash_at_every_call(tmp_path: Path, step: int, after: bool) -> None:
    check_every_crash_point(tmp_path, step, after=after)


def save_in_place(store: CheckpointStore, step: int, parts: dict[str, Any]) -> None:
    """The planted bug: the folder has its final name from the start."""
    path = store.folder / f"step_{step}"
    path.mkdir(parents=True)
    atomic._write_manifest(Publication(path), METADATA | {"step": step, "parts": [*parts]})
    for name, tree in parts.items():
        write_tree(path, name, split_tree(tree, name))


def skip_manifest(path: Path) -> FolderManifest:
    """The planted bug: any folder with the right name is trusted."""
    step = int(path.name.removeprefix("step_"))
    metadata = METADATA | {"step": step, "parts": PARTS}
    return FolderManifest(files={}, metadata=metadata)


def rename_early(partial: Path, path: Path) -> None:
    """The planted bug: the old folder goes before the new one is there."""
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


PLANTED = {
    "in place": (CheckpointStore, "save", save_in_place, 3),
    "in place, any folder": (store_module, "read_manifest", skip_manifest, 3),
    "rename early": (atomic, "_swap_in", rename_early, 2),
}


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("planted", PLANTED)
def test_R18_planted_crash_bugs_turn_red(
    tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, replacement, step = PLANTED[planted]
    monkeypatch.setattr(owner, name, replacement)
    if planted == "in place, any folder":
        monkeypatch.setattr(CheckpointStore, "save", save_in_place)
    with pytest.raises((AssertionError, OSError, ValueError)):
        check_every_crash_point(tmp_path, step, after=True)


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[str]]:
    """Forks processes that save; it has imported torch, which takes longer than all they do."""
    command = [sys.executable, "-m", "tests.checkpoint.saving_child"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as parent:
        yield parent
        assert parent.stdin
        parent.stdin.close()
    assert parent.returncode == 0


def test_R18_kill_9_at_random_points(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    """A process saves in a loop; it is killed 40 times, in the middle of one of the first saves
    of each life, and each time what is there loads, and is no older than what it said was saved."""
    kills, seen, save_s, rng = 40, list[int](), 0.02, random.Random(18)
    assert child.stdin
    assert child.stdout
    for _ in range(kills):
        child.stdin.write(f"loop {tmp_path}\n")
        pid = int(child.stdout.readline())
        said = seen[-1:]
        for _ in range(rng.randint(0, 3)):
            start = time.monotonic()
            said.append(int(child.stdout.readline()))
            save_s = time.monotonic() - start
        time.sleep(rng.uniform(0, save_s))  # any moment will do, early and late ones
        os.kill(pid, signal.SIGKILL)
        while (line := child.stdout.readline()) != "dead\n":
            said.append(int(line))
        store = CheckpointStore(tmp_path, keep_last=2)
        latest = max(store.steps(), default=0)
        if latest:
            assert_loads(store, latest)
            seen.append(latest)
        assert latest >= max(said, default=0)
    assert len(set(seen)) > 5  # the lives wait for 61 saves
    store.save(seen[-1] + 1, parts_of(seen[-1] + 1))
    assert no_leftovers(tmp_path)


# --- a disk that is full, files that are damaged -------------------------------------------


@pytest.mark.parametrize("number", range(1, 60, 4))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_R18_disk_error_at_any_call_leaves_the_last_good_one(
    tmp_path: Path, number: int, code: int
) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    store.save(1, parts_of(1))
    count, text = 0, ""

    def failing(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number and call.__name__ not in ("rmtree", "unlink", "rmdir"):
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(os, "fsync"), (Path, "mkdir"), (Path, "write_text")]:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        try:
            store.save(2, parts_of(2))
        except CheckpointError as error:
            text = str(error)
    if count >= number:
        assert str(tmp_path / "step_2") in text
        assert os.strerror(code) in text
        assert "(run.dir)" in text
        assert ("Free some space" in text) == (code == errno.ENOSPC)
        assert f"it needs {NUM_BYTES} bytes" in text
        assert re.search(r"[0-9,]+ bytes are free there", text)
    assert no_leftovers(tmp_path)
    latest = store.steps()[-1]
    assert latest in (1, 2)
    assert_loads(store, latest)


def test_R18_the_real_write_fails_in_the_middle(
    tmp_path: Path, child: subprocess.Popen[str]
) -> None:
    assert child.stdin
    assert child.stdout
    child.stdin.write(f"full {tmp_path}\n")
    said = ast.literal_eval(child.stdout.readline())
    assert child.stdout.readline() == "dead\n"
    assert said.startswith(f"CheckpointError Could not write {tmp_path / 'step_2'}")
    assert "File too large" in said
    assert no_leftovers(tmp_path)
    assert_loads(CheckpointStore(tmp_path), 1)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


DAMAGE = {"missing": Path.unlink, "truncated": truncate, "flipped": flip_byte}
FILES = [f"{name}.{kind}" for name in PARTS for kind in ("rank0.safetensors", "json")]


def check_damage_is_skipped(folder: Path, damage: str, file: str) -> None:
    store = CheckpointStore(folder, keep_last=3)
    for step in (1, 2, 3):
        store.save(step, parts_of(step))
    DAMAGE[damage](folder / "step_3" / file)
    checkpoint = store.load("latest", required=PARTS)
    assert checkpoint.step == 2
    assert len(checkpoint.skipped) == 1
    assert "step_3" in checkpoint.skipped[0]
    assert file in checkpoint.skipped[0]
    with pytest.raises(CheckpointError, match=file):
        store.load(3)
    store.save(3, parts_of(3))
    assert_loads(store, 3)


@pytest.mark.parametrize("file", [*FILES, MANIFEST_NAME])
@pytest.mark.parametrize("damage", DAMAGE)
def test_R18_damage_is_skipped_and_named(tmp_path: Path, damage: str, file: str) -> None:
    check_damage_is_skipped(tmp_path, damage, file)


@pytest.mark.parametrize(("planted", "damage"), [("no hashes", "flipped"), ("no sizes", "missing")])
def test_R18_unverified_reading_turns_red(
    tmp_path: Path, planted: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted == "no hashes":
        monkeypatch.setattr(store_module, "verify_file", lambda folder, name, manifest: None)
    else:
        monkeypatch.setattr(Path, "stat", lambda self, **_: os.stat(__file__))
    with pytest.raises((AssertionError, CheckpointError, OSError)):
        check_damage_is_skipped(tmp_path, damage, "model.rank0.safetensors")


@pytest.mark.parametrize("position", range(0, 400, 23))
def test_R18_any_flipped_byte_of_the_manifest_is_seen(tmp_path: Path, position: int) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, parts_of(1))
    file = tmp_path / "step_1" / MANIFEST_NAME
    data = bytearray(file.read_bytes())
    before = read_manifest(file.parent)
    data[position % len(data)] ^= 0x04
    file.write_bytes(data)
    try:
        after = read_manifest(file.parent)
    except CheckpointError:
        return
    assert after == before  # white space


def test_what_is_known_not_to_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a state of 240 GB would be written for minutes before its disk is full."""
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 9)
    with (
        pytest.raises(CheckpointError, match="No space left on device; it needs 10 bytes"),
        publish_folder(tmp_path / "a", num_bytes=10),
    ):
        pytest.fail("it was begun")
    assert not list(tmp_path.iterdir())
    with publish_folder(tmp_path / "a", num_bytes=9):
        pass
