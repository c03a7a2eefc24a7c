"""The key file of an encrypted store: made before its data, read to open it, destroyed to erase it.

Decides what lies in the file, what is wrong with one in words, and when it counts as destroyed.
Refuses to know what the key is used for.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prefetchd.format import Superblock
from prefetchd.hostinfo import errno_name
from prefetchd.store_place import MisfitError, StoreError

if TYPE_CHECKING:
    from prefetchd.cipher import PageCipher

log = logging.getLogger("prefetchd")

_SECRET_BYTES = 32
_FILE_BYTES_MAX = 4096
_SCHEMA = "prefetchd.key/1"
_LOOK_NS = 1_000_000_000


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    store_id: str
    key: str


def check_place(path: Path | None, folders: Sequence[Path]) -> None:
    """Raises StoreError for a key that would lie beside its data, or cannot be used."""
    if path is None:
        return
    _needed()
    if path.resolve().parent in [folder.resolve() for folder in folders]:
        raise StoreError(
            f"key file {path} would lie in the store's own folder, where it protects nothing; "
            "name a file elsewhere"
        )


def make(path: Path, store_id: bytes) -> bytes:
    """A new key, on the medium when this returns; what it is known by. Raises StoreError, also if a
    file is there."""
    from prefetchd.cipher import key_check

    secret = secrets.token_bytes(_SECRET_BYTES)
    text = msgspec.json.encode(_Contents(_SCHEMA, store_id.hex(), secret.hex())) + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, text)
            os.fsync(fd)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        _sync_folder(path)
    except FileExistsError:
        raise StoreError(
            f"key file {path} is there already; a new store gets a new key: name another file, or "
            "erase the store that this key is of"
        ) from None
    except OSError as error:
        raise StoreError(f"key file {path} cannot be made: {_reason(error)}") from error
    return key_check(secret, store_id)


def read(path: Path, shape: Superblock, where: str) -> bytes:
    """The secret of the store `where`. Raises StoreError: no such file, no key, or another's."""
    _needed()
    secret, store_id = _read(path, where)
    from prefetchd.cipher import key_check

    if store_id != shape.store_id:
        raise MisfitError(
            f"key file {path} is of another store than {where}; name the file that was made with it"
        )
    if key_check(secret, shape.store_id) != shape.key_check:
        raise MisfitError(
            f"key file {path} names store {where}, but its key is not the one this store was made "
            "with; put the right file back"
        )
    return secret


def _read(path: Path, where: str) -> tuple[bytes, bytes]:
    """Secret and store id."""
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES_MAX)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        raise StoreError(
            f"store {where} is encrypted and its key file {path} is not there: put it back; if it "
            "was destroyed, what the store held is erased and can only be cleared away"
        ) from None
    except OSError as error:
        raise StoreError(f"key file {path} cannot be read: {_reason(error)}") from error
    try:
        contents = msgspec.json.decode(text, type=_Contents)
        secret, store_id = bytes.fromhex(contents.key), bytes.fromhex(contents.store_id)
        if contents.schema != _SCHEMA or len(secret) != _SECRET_BYTES:
            raise ValueError
    except ValueError:  # msgspec's own are, too; none may show what is in the file
        raise StoreError(f"{path} is no key file of prefetchd, or is damaged") from None
    if mode & 0o077:
        log.warning("key file %s can be used by others (mode %o); chmod 600 it", path, mode)
    return secret, store_id


def belongs(path: Path, shape: Superblock, where: str) -> None:
    """Raises StoreError if this is not the key file of that store."""
    if not shape.key_check:
        raise StoreError(f"store {where} is not encrypted, it has no key file; leave it out")
    read(path, shape, where)


def destroy(path: Path) -> None:
    """Overwrite the file, then remove it, each on the medium before the next. Raises StoreError.

    A file system or drive that writes elsewhere than in place can still have the old bytes.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            for filler in (secrets.token_bytes(size), bytes(size)):
                os.pwrite(fd, filler, 0)
                os.fsync(fd)
        finally:
            os.close(fd)
        path.unlink()
        _sync_folder(path)
    except OSError as error:
        raise StoreError(f"key file {path} cannot be destroyed: {_reason(error)}") from error


def is_begun(path: Path, store_id: bytes) -> bool:
    """Whether the key of this store, which never came to be, lies there: or nothing yet, since its
    making ended before it was written."""
    try:
        return _read(path, "")[1] == store_id
    except StoreError:
        return path.is_file() and path.stat().st_size == 0


def cipher_of(
    shape: Superblock, where: str, key_file: str | Path | None, namespace: bytes
) -> PageCipher | None:
    """What opens a store's pages; None if it is not encrypted. Raises StoreError: a key is missing,
    wrong, or given for nothing."""
    if not shape.key_check:
        if key_file is not None:
            raise MisfitError(
                f"store {where} is not encrypted, yet key file {key_file} was given; leave it out, "
                "or make a store with it anew"
            )
        return None
    if key_file is None:
        raise MisfitError(f"store {where} is encrypted; give its key file (key_file, --key-file)")
    path = Path(key_file)
    watch = KeyWatch(path, shape)  # before it is read: what comes in its place is noticed
    secret = read(path, shape, where)
    from prefetchd.cipher import PageCipher

    return PageCipher(secret, shape, namespace, watch.gone)


class KeyWatch:
    """Whether the key file of a store that is open has been destroyed: removed, emptied, or another
    put in its place. One that cannot be looked at for another reason is believed to be there.
    """

    def __init__(self, path: Path, shape: Superblock) -> None:
        self._path = path.absolute()
        self._shape = shape
        self._looked_ns = 0
        self._known: tuple[int, ...] | None = None
        self._known = self._state()

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return self._known
        kind = stat.S_IFMT(found.st_mode)
        return kind, found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns

    def gone(self, now_ns: int) -> str:
        """Why it counts as destroyed, else empty. Looks at most once a second; a file that was
        touched is read again."""
        if now_ns - self._looked_ns < _LOOK_NS:
            return ""
        self._looked_ns = now_ns
        state = self._state()
        if state == self._known:
            return ""
        try:
            read(self._path, self._shape, "")
        except StoreError as why:
            if isinstance(why.__cause__, OSError) and _holds_something(state):
                return ""  # and is looked at again, since it is not known
            return f"its key file {self._path} was destroyed; nothing it held can be read any more"
        self._known = state
        return ""


def _holds_something(state: tuple[int, ...] | None) -> bool:
    return state is not None and state[0] == stat.S_IFREG and state[1] > 0


def _needed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise StoreError(
            "encrypted stores need the package cryptography; install prefetchd[encryption]"
        ) from None


def _sync_folder(path: Path) -> None:
    fd = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return errno_name(error.errno or 0)
