"""A server of objects that rank 0 has, and all ranks read from and write to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py

from tests.mpi.support import on_root
from tests.servers import ObjectServer, Request


class SharedServer:
    """The files in a folder, on a server of rank 0. Requests say which rank sent them.

    `write`, on rank 0, makes the first files, or returns objects that are kept in memory in place of the folder. `storage` is
    for ``s3://``, `of_http` for URLs that begin with `url`.
    """

    def __init__(self, comm: Any, folder: Path, write: Callable[[], Mapping[str, bytes] | None] = lambda: None) -> None:
        self.comm, self.folder, self.server = comm, folder, None
        self.url, storage = on_root(comm, partial(self._start, write))
        self.of_http = {"user_agent": f"rank {comm.rank}"}
        self.storage = {**storage, **self.of_http}

    def _start(self, write: Callable[[], Mapping[str, bytes] | None]) -> tuple[str, dict[str, Any]]:
        objects = write()
        self.server: Any = ObjectServer(self.folder if objects is None else dict(objects))
        self.server.__enter__()
        return self.server.url, self.server.storage

    def on_server(self, do: Callable[[Any], Any]) -> Any:
        """What `do` returns of the server on rank 0, when all ranks are here, on all ranks."""
        self.comm.barrier()
        found = on_root(self.comm, lambda: do(self.server))
        self.comm.barrier()
        return found

    def fails(self, **faults: Any) -> None:
        """Set `Faults`."""
        self.on_server(lambda server: vars(server.faults).update(faults))

    def asked(self) -> list[Request]:
        """What was asked for since the last call."""

        def take(server: ObjectServer) -> list[Request]:
            found = list(server.log)
            server.clear()
            return found

        return list(self.on_server(take))

    def end(self) -> None:
        """End the server."""
        self.comm.barrier()
        if self.server is not None:
            self.server.__exit__()


class Shared(SharedServer):
    """A server of new HDF5 files: fixture `shared`."""

    def write(self, name: str, make: Any, **how: Any) -> tuple[str, str]:
        """The URL and the path of a new file."""
        path = self.folder / "b" / name

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            with h5py.File(path, "w", **how) as file:
                make(file)

        on_root(self.comm, write)
        return f"{self.url}/b/{name}", str(path)
