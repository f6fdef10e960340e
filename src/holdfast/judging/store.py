"""Replies on disk: made once, scored as often as wanted.

JSON lines: the header, which says what made the replies, then one reply a line. Lines are only ever appended, so that a
killed process costs its unfinished batch: a last line without its end is dropped, and missing replies are made. The
file is the owner's alone, since replies may be harmful.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.file_lock import locked
from holdfast.core.files import write_bytes
from holdfast.data.examples import Example
from holdfast.judging.engines import Engine
from holdfast.judging.reply import Progress, Reply

logger = logging.getLogger(__name__)

KIND, VERSION = "holdfast replies", 1
MODE = 0o600
_ELSEWHERE = "name another folder, or delete this file to make the replies again"


class ReplyStore(dict[str, Reply]):
    """The replies in one file, by id, whose header says what makes them; the file is made where there is none.

    Read it as a dict; `append` alone writes to the file.
    """

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        super().__init__()
        self.path = path
        self._header = {"kind": KIND, "version": VERSION, **json.loads(json.dumps(dict(header), allow_nan=False))}
        try:
            self._open()
        except OSError as error:
            what = f"replies {path} cannot be read or written: {error.strerror}"
            raise ConfigError(what, remedy="name a place that is writable") from error

    def __repr__(self) -> str:
        return f"ReplyStore({str(self.path)!r}, {len(self)} replies)"

    def append(self, replies: Sequence[Reply]) -> None:
        """Add replies and flush them to disk; an id that is there already keeps its first reply."""
        new: dict[str, Reply] = {}
        for reply in replies:
            if reply.id not in self:
                new.setdefault(reply.id, reply)
        if not new:
            return
        # ASCII with escapes: no line separator and no lone surrogate of a reply can break a line.
        data = "".join(json.dumps(asdict(reply)) + "\n" for reply in new.values()).encode("ascii")
        try:
            size = self.path.stat().st_size
            try:
                with self.path.open("ab") as handle:
                    handle.write(data)
                    handle.flush()
                    os.fsync(handle.fileno())
            except OSError:  # a write that fails half-way leaves nothing behind
                os.truncate(self.path, size)
                raise
        except OSError as error:
            what = f"replies {self.path} cannot be written: {error.strerror}"
            raise ResourceError(what, remedy="free disk space and start again") from error
        self.update(new)

    def _open(self) -> None:
        first = (json.dumps(self._header, sort_keys=True, allow_nan=False) + "\n").encode("ascii")
        data = self.path.read_bytes() if self.path.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        if not whole and first.startswith(data):
            write_bytes(self.path, first, mode=MODE)
            return
        lines = whole.split(b"\n")
        self._compare(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            if (reply := _reply(line)) is None:
                raise CheckpointError(f"replies {self.path}: line {number} is damaged", remedy=_ELSEWHERE)
            self.setdefault(reply.id, reply)
        self.path.chmod(MODE)
        if torn:
            logger.info("replies %s: dropped an unfinished last line", self.path)
            os.truncate(self.path, len(whole) + 1)

    def _compare(self, line: bytes) -> None:
        try:
            first = json.loads(line)
        except ValueError:
            first = None
        if not isinstance(first, dict) or first.get("kind") != KIND:
            raise CheckpointError(f"{self.path} is not a file of replies", remedy="name another file")
        for field in sorted({*first, *self._header}):
            if (then := first.get(field)) != (now := self._header.get(field)):
                what = f"replies {self.path} were made with {field} = {then!r}, now {now!r}"
                raise CheckpointError(what, remedy=_ELSEWHERE)


def replies(
    store_path: Path, header: Mapping[str, object], examples: Sequence[Example], engine: Engine, *, max_new_tokens: int,
    progress: Progress | None = None, seen: Callable[[Sequence[Reply]], None] | None = None,
) -> list[Reply]:  # fmt: skip
    """Replies to `examples`, in order: from the store where they are there, otherwise made and stored.

    `seen` gets those that are there, and then every batch once it is stored; what it raises ends the asking.
    """
    with locked(store_path):
        store = _opened(store_path, header, engine, max_new_tokens)
        new = _not_in(store, examples)
        there = [store[example.id] for example in examples if example.id in store]
        uses, done = Counter(example.id for example in examples), 0
        for batch in chain([there], engine.generate(new, max_new_tokens=max_new_tokens) if new else ()):
            store.append(batch)
            done += sum(uses.pop(reply.id, 0) for reply in batch)  # not counted anew: an endpoint gives one at a time
            if progress is not None:
                progress(done)
            if seen is not None:
                seen(batch)
    if without := sum(example.id not in store for example in examples):
        what = f"engine {engine.name!r} gave no reply to {without} of {len(examples)} prompts"
        raise ResourceError(what, remedy="start again: the replies that are there are kept")
    return [store[example.id] for example in examples]


def missing(
    store_path: Path, header: Mapping[str, object], examples: Sequence[Example], engine: Engine, *, max_new_tokens: int
) -> list[Example]:
    """The examples to which `replies` would have to make a reply, each once."""
    with locked(store_path):
        return _not_in(_opened(store_path, header, engine, max_new_tokens), examples)


def _opened(store_path: Path, header: Mapping[str, object], engine: Engine, max_new_tokens: int) -> ReplyStore:
    added = {"max_new_tokens": max_new_tokens, "engine": engine.name, "decoding": "greedy"}
    added |= getattr(engine, "identity", {})
    for field, value in added.items():
        if header.get(field, value) != value:
            what = f"the header says {field} = {header[field]!r}, the engine runs with {value!r}"
            raise ConfigError(f"replies {store_path}: {what}", remedy=f"leave {field} out of the header")
    return ReplyStore(store_path, {**header, **added})


def _not_in(store: ReplyStore, examples: Sequence[Example]) -> list[Example]:
    return list({example.id: example for example in examples if example.id not in store}.values())


def read_replies(path: Path) -> dict[str, Reply]:
    """The replies of a finished store by id, whatever made them."""
    try:
        first, *lines = path.read_bytes().splitlines()
        header = json.loads(first)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as replies", remedy=_ELSEWHERE) from error
    replies = [_reply(line) for line in lines]
    if not isinstance(header, dict) or header.get("kind") != KIND or None in replies:
        raise CheckpointError(f"{path} is no file of replies, or is damaged", remedy=_ELSEWHERE)
    return {reply.id: reply for reply in replies if reply is not None}


def _reply(line: bytes) -> Reply | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    kinds = {"id": str, "text": str, "truncated": bool, "tokens": int}
    if not isinstance(row, dict) or {key: type(value) for key, value in row.items()} != kinds:
        return None
    return Reply(**row)
