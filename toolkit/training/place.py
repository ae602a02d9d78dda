"""A place of fsspec's where files are put, read and removed by name: a bucket, or a folder."""

import contextlib
import os
import pathlib
import shutil
from typing import Any

from toolkit.errors import RunDirectoryError
from toolkit.support import files, redaction
from toolkit.training.copying import shown


class Place:
    """Files at a URL, by their names there. Drivers raise errors of their own libraries.

    Args:
        url: Such as "s3://bucket/mine" or "file:///mnt/shared/mine".

    Attributes:
        shown: The URL without a password.
        folder: It on this machine, where it is a folder.

    Raises:
        RunDirectoryError: There is no such kind of place, or what reads and writes it isn't installed.
    """

    def __init__(self, url: str) -> None:
        self._url, self.shown = url, shown(url)
        self._store, self._root = self._opened()
        on_disk = "file" in (self._store.protocol, *self._store.protocol)
        self.folder = pathlib.Path(self._root) if on_disk else None

    def _opened(self) -> tuple[Any, str]:
        import fsspec
        from fsspec.registry import known_implementations

        scheme = self._url.partition("://")[0] if "://" in self._url else "file"
        more = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            # Of its own: what another user of the library has listed before may be old.
            return fsspec.url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True, **more)
        except ImportError as error:
            known = known_implementations.get(scheme, {})
            driver = str(known.get("class", "")).partition(".")[0]
            extra = {"s3fs": "s3", "gcsfs": "gcs"}.get(driver)
            wanted = f'"tf-strategy-toolkit[{extra}]"' if extra else driver
            found, remedy = f"what reads and writes {scheme}:// isn't installed", f"Install it: pip install {wanted}"
            if not wanted or driver == "fsspec":  # The library's own code needs another package, which it names.
                found, remedy = f"{found} ({known.get('err', error)})", "Install that package with pip"
            raise self.refused(found, remedy) from error
        except ValueError as error:
            raise self.refused(
                f"fsspec knows no {scheme}:// ({words(error)})",
                "Name a place such as s3://bucket/mine or file:///mnt/mine",
            ) from error
        except Exception as error:  # Google's driver looks for credentials at once.
            raise self.unusable(error) from error

    def _path(self, relative: str) -> str:
        return f"{self._root.rstrip('/')}/{relative}"

    def names(self) -> set[str]:
        """Returns the names of all files there."""
        self._store.invalidate_cache()
        prefix = self._path("")
        try:
            return {path[len(prefix) :] for path in self._store.find(self._root) if path.startswith(prefix)}
        except FileNotFoundError:
            return set()

    def read(self, relative: str) -> bytes | None:
        """Returns a file's content, or None if there is no such file."""
        try:
            return self._store.cat_file(self._path(relative))
        except FileNotFoundError:
            return None

    def create(self, relative: str, content: bytes) -> None:
        """Writes a file that isn't there.

        Raises:
            FileExistsError: It is there.
        """
        try:
            self._store.pipe_file(self._path(relative), content, mode="create")
        except (TypeError, NotImplementedError) as error:  # A driver that can't create what isn't there yet.
            if self._store.exists(self._path(relative)):
                raise FileExistsError from error
            self.write(relative, content)

    def write(self, relative: str, content: bytes) -> None:
        """Writes a file, which is seen whole or not at all."""
        if self.folder is not None:
            path = pathlib.Path(self._path(relative))
            files.make_directory(path.parent)
            with files.replacing(path) as aside:
                aside.write_bytes(content)
                files.sync(aside)
        else:
            self._store.pipe_file(self._path(relative), content)

    def get(self, relative: str, path: pathlib.Path) -> None:
        """Copies a file to this machine."""
        self._store.get_file(self._path(relative), str(path))

    def remove(self, relative: str) -> None:
        """Removes a file, and on a disk its folder where nothing is left in it; it may have been removed."""
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._path(relative))
        if self.folder is not None and "/" in relative:
            with contextlib.suppress(OSError):  # Other files are there.
                pathlib.Path(self._path(relative)).parent.rmdir()

    def put(self, path: pathlib.Path, relative: str) -> None:
        """Copies a file of this machine, which is seen whole or not at all."""
        if self.folder is not None:  # Where a file that is being written would be seen.
            target = pathlib.Path(self._path(relative))
            files.make_directory(target.parent)
            with files.replacing(target) as aside:
                shutil.copyfile(path, aside)
                files.sync(aside)
        else:
            self._store.put_file(str(path), self._path(relative))

    def masked(self, text: str) -> str:
        """Returns a text without the password of the URL, and without those of the environment."""
        return redaction.masked(text.replace(self._url, self.shown), os.environ)

    def refused(self, found: str, remedy: str) -> RunDirectoryError:
        """Returns what says that a run isn't copied here."""
        return RunDirectoryError(
            asked=f"copy_to={self.shown} is where this run is copied", found=self.masked(found), remedy=remedy
        )

    def unusable(self, error: Exception) -> RunDirectoryError:
        """Returns what says that the place can't be used, for a driver's error."""
        if isinstance(error, RunDirectoryError):
            return error
        return self.refused(
            f"it can't be used ({words(error)})",
            "Check its name, the network, and that this user may read and write there, or leave copy_to out",
        )


def words(error: BaseException) -> str:
    """Returns an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
