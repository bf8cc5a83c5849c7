"""The journal of a tracked run on the local disk: what happened, with its files, and how much of it is delivered."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from arbordraft.utils.files import write_text

OUTBOX = "mlflow-outbox"  # in the working folder, like MLflow's own data

Record = dict[str, Any]


@dataclass
class Progress:
    """How much of a journal is delivered, and what the server calls its parts."""

    offset: int = 0  # bytes of the records
    run: str = ""
    experiment: str = ""
    models: dict[str, str] = field(default_factory=dict)  # id of the record -> id of the logged model


class Journal:
    """The records of one run in a folder of its own; nothing is written before the first record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "records.jsonl"

    @classmethod
    def new(cls, outbox: Path) -> Journal:
        """A journal for a new run; names sort by time."""
        return cls(outbox / f"{datetime.now():%Y%m%d-%H%M%S-%f}-{uuid.uuid4().hex[:6]}")

    @property
    def key(self) -> str:
        """The name of the run while the server has given it none."""
        return self.folder.name

    def append(self, kind: str, attach: Callable[[Path], object] | None = None, **fields: Any) -> str:
        """Write one record, with the files that ``attach`` puts into the folder it is given; returns its id.

        Raises:
            OSError: if the disk does not take it; then nothing of the record stays.
        """
        record: Record = {"kind": kind, "id": uuid.uuid4().hex, "at": time.time_ns() // 1_000_000, **fields}
        line = json.dumps(record).encode() + b"\n"
        files = self.files(record)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if attach is not None:
                files.mkdir(parents=True)
                attach(files)
            with self.records.open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(line) != len(line):  # the disk is full: no torn line may stay
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.records))
        except BaseException:
            shutil.rmtree(files, ignore_errors=True)
            raise
        return record["id"]

    def files(self, record: Record) -> Path:
        """Where the files of a record lie until they are delivered."""
        return self.folder / "files" / record["id"]

    def pending(self, offset: int) -> Iterator[tuple[int, Record]]:
        """The complete records after an offset, each with the offset of its end."""
        if not self.records.exists():
            return
        with self.records.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # its writer is still at it, or died
                    return
                offset += len(line)
                yield offset, json.loads(line)

    def progress(self) -> Progress:
        """What was noted last; nothing counts as delivered where nothing was noted."""
        try:
            return Progress(**json.loads((self.folder / "delivered.json").read_text()))
        except FileNotFoundError:
            return Progress()

    def note(self, progress: Progress) -> None:
        """Replace the last note, at once or not at all."""
        write_text(self.folder / "delivered.json", json.dumps(asdict(progress)))

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[bool]:
        """Whether nobody else delivers this journal, which stays so inside the block.

        The lock is SQLite's: the only one of the standard library that works everywhere and ends with its holder.
        """
        lock = sqlite3.connect(self.folder / "lock", timeout=0, isolation_level=None)
        try:
            try:
                lock.execute("BEGIN EXCLUSIVE")
                free = True
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                free = False
            yield free
        finally:
            lock.close()
