"""The lock on a shared file: one holder at a time, and whoever waits says for what."""

from __future__ import annotations

import logging
import threading

from holdfast.core.file_lock import locked


def test_waiting_is_told_once_with_the_file(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="holdfast.core.file_lock")
    path, told, order = tmp_path / "book.json", threading.Event(), []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    def second() -> None:
        with locked(path):
            order.append("second")

    logger, heard = logging.getLogger("holdfast.core.file_lock"), Heard()
    logger.addHandler(heard)
    try:
        with locked(path):
            waiting = threading.Thread(target=second)
            waiting.start()
            assert told.wait(10), "nothing was said while waiting"
            order.append("first")
        waiting.join(10)
    finally:
        logger.removeHandler(heard)
    assert order == ["first", "second"]
    assert [record.getMessage() for record in caplog.records] == [f"waiting for {path}: another process works on it"]
    assert not list(tmp_path.iterdir()), "no lock is left"


def test_a_free_lock_is_taken_in_silence(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="holdfast.core.file_lock")
    for _ in range(2):
        with locked(tmp_path / "book.json"):
            pass
    assert not caplog.records
