"""Payloads as files in a shared directory, for rollout workers in processes of their own.

    HEAD                          see `sync.transport`
    update_0000012/piece_000      pieces of the update that made version 12
    refresh_0000010/piece_000     pieces of whole weights at version 10

Every file is written under another name, flushed and renamed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_logra import distributed, whole_file
from megatron_logra.sync.payload import Kind, Piece
from megatron_logra.sync.transport import VERSION_DIRECTORY, Publisher, version_name


class FileSender(Publisher):
    """Publishes a trainer's updates as files.

    The refresh before the newest stays with its updates, for receivers that are reading them.
    """

    def close(self) -> None:
        """The files stay, for workers that are late."""

    def _put(self, kind: Kind, version: int, data: bytearray) -> None:
        place = self.directory / version_name(kind, version)
        whole_file.write(place / f"piece_{self.sender.piece:03d}", data)

    def _forget(self, refreshed: int) -> None:
        def prune() -> None:
            with self._explained():
                _prune(self.directory, refreshed)

        distributed.first(prune)


def read_pieces(directory: Path, kind: Kind, version: int) -> list[Piece]:
    """The pieces that there are of a version.

    Raises:
        OSError: one cannot be read.
    """
    place = directory / version_name(kind, version)
    return [path.read_bytes() for path in sorted(place.glob("piece_???"))]


def _prune(directory: Path, refreshed: int) -> None:
    found = sorted(
        (int(match[2]), path)
        for path in directory.iterdir()
        if (match := VERSION_DIRECTORY.fullmatch(path.name))
    )
    refreshes = [v for v, path in found if path.name.startswith("refresh") and v < refreshed]
    for version, path in found:
        if refreshes and version < refreshes[-1]:
            shutil.rmtree(path)
