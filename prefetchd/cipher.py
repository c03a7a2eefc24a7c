"""Encryption at rest: how pages are sealed and opened, and how names are veiled.

Decides keys, nonces and what a page is bound to; docs/decisions/0012 says why it holds. Refuses to
know where the key is kept, which pages are wanted and what becomes of one that does not open.

Pages are sealed one by one with AES-256-GCM (NIST SP 800-38D). Their key is derived (HKDF, RFC
5869) from the store's secret, the store, the namespace and a random number of the opening that
wrote them; the nonce is the number of the write in that opening and the page's layer. So no nonce
is used twice under a key, whatever becomes of the files. What is authenticated besides: store,
layout, page length, namespace, key and block index.

Only this module imports `cryptography`, and only `key_file` imports this module.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from prefetchd.format import Superblock
from prefetchd.model import Ids, Mask
from prefetchd.records import Records

TAG_BYTES = 16
_SALT_BYTES = _NAME_BYTES = 16
_CIPHERS_MAX = 4096  # one an opening that wrote something which is still there
_NONCE = np.dtype([("write", "<u8"), ("layer", "<u4")])

Bytes = NDArray[np.uint8]


class PageCipher:
    """Of one store, as one namespace sees it; `open` takes pages of every namespace.

    `secret`: 32 bytes. `gone`: why it is to be used no more, at this time (ns of the monotonic
    clock); empty if it may be. Safe in any thread.
    """

    def __init__(
        self,
        secret: bytes,
        superblock: Superblock,
        namespace: bytes,
        gone: Callable[[int], str] = lambda now_ns: "",
    ) -> None:
        self.gone = gone
        self._secret = secret
        self._store_id = superblock.store_id
        self._page_bytes = superblock.page_bytes
        self._namespace = namespace
        place = superblock.store_id + superblock.fingerprint
        self._place = np.frombuffer(place + self._page_bytes.to_bytes(8, "little"), np.uint8)
        self._counting = threading.Lock()
        self._writes = 0
        self._begin()
        self._ciphers: dict[bytes, AESGCM] = {}
        self._own = threading.local()
        self._veil = Cipher(algorithms.AES256(self._derived(b"names" + namespace)), modes.ECB())

    def _begin(self) -> None:
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._process = os.getpid()

    def _next_write(self) -> tuple[bytes, int]:
        """What no other write has: the random number of this opening, and one that rises."""
        with self._counting:
            if self._process != os.getpid():
                self._begin()  # a fork has the same numbers
            self._writes += 1
            return self._salt, self._writes

    def _derived(self, purpose: bytes) -> bytes:
        info = b"prefetchd " + purpose
        return HKDF(SHA256(), 32, self._store_id, info).derive(self._secret)

    def _cipher(self, name: bytes) -> AESGCM:
        """`name`: a namespace and the random number of an opening."""
        cipher = self._ciphers.get(name)
        if cipher is None:
            if len(self._ciphers) >= _CIPHERS_MAX:
                self._ciphers.clear()
            cipher = self._ciphers[name] = AESGCM(self._derived(b"pages" + name))
        return cipher

    def _scratch(self) -> Bytes:
        """Room for a sealed page and its tag, this thread's own."""
        scratch: Bytes | None = getattr(self._own, "scratch", None)
        if scratch is None:
            scratch = self._own.scratch = np.empty(self._page_bytes + TAG_BYTES, np.uint8)
        return scratch

    def forget(self) -> None:
        """From here on it opens nothing, and nobody opens what it seals. What Python has copied of
        the secret stays in this process's memory until that is used again."""
        self._secret = secrets.token_bytes(len(self._secret))
        self._ciphers.clear()

    def veil(self, keys: Sequence[bytes]) -> list[bytes]:
        """What the medium calls these keys: each is one block of AES, so no two become one."""
        text = self._veil.encryptor().update(b"".join(keys))
        return [text[at : at + _NAME_BYTES] for at in range(0, len(text), _NAME_BYTES)]

    def _bound(self, namespaces: Records, keys: Records, blocks: Ids) -> list[bytes]:
        """What is authenticated beside each page."""
        rows = np.empty((len(blocks), len(self._place) + 40), np.uint8)
        ends = np.cumsum([len(self._place), 16, 16]).tolist()
        rows[:, : ends[0]] = self._place
        rows[:, ends[0] : ends[1]] = _as_bytes(namespaces)
        rows[:, ends[1] : ends[2]] = _as_bytes(keys)
        rows[:, ends[2] :] = _as_bytes(blocks.astype("<i8"))
        return _as_texts(rows)

    def seal(self, payload: Bytes, pages: Bytes, key: bytes, block: int) -> NDArray[np.uint64]:
        """Write `pages` (layers, page_bytes) sealed into `payload` (layers, slot_bytes), padded
        with zeros; what goes into the block's record: 2 * layers + 3 words.

        A page is read once, so the tag is of the bytes that were written, should the caller write
        meanwhile.
        """
        layers, size = pages.shape
        slot_bytes, flat, scratch = payload.shape[1], payload.reshape(-1), self._scratch()
        nonces, (salt, number) = np.empty(layers, _NONCE), self._next_write()
        nonces["write"], nonces["layer"] = number, np.arange(layers)
        names = np.frombuffer(self._namespace + key, "V16")
        (bound,) = self._bound(names[:1], names[1:], np.array([block]))
        proof = np.empty(2 * layers + 3, np.uint64)
        tags = proof[: 2 * layers].view(np.uint8).reshape(layers, TAG_BYTES)
        proof[-3:-1] = np.frombuffer(salt, np.uint64)
        proof[-1] = number
        encrypt = self._cipher(self._namespace + salt).encrypt_into
        for layer, nonce in enumerate(_as_texts(nonces)):
            # The tag comes behind its page, where the next one is about to be written.
            place = flat[layer * slot_bytes :][: size + TAG_BYTES]
            sealed = place if len(place) == size + TAG_BYTES else scratch
            encrypt(nonce, np.ascontiguousarray(pages[layer]).data, bound, sealed.data)
            tags[layer] = sealed[size:]
            if sealed is scratch:
                place[:size] = scratch[:size]
        payload[:, size:] = 0
        return proof

    def open(self, records: Records, layers: Ids, memory: Bytes, rows: Sequence[int]) -> Mask:
        """Open sealed pages in place: those in these rows of `memory` (..., slot_bytes), each of
        the block that its record describes and of its layer. Which of them are what was written;
        the others' rows then hold anything. One call a page, as the library wants it.
        """
        if len(layers) == 0:
            return np.zeros(0, np.bool_)
        proofs = records["checksums"]
        nonces = np.empty(len(layers), _NONCE)
        nonces["write"], nonces["layer"] = proofs[:, -1], layers
        salts = np.ascontiguousarray(proofs[:, -3:-1])
        owners = [_as_bytes(records["namespace"]), _as_bytes(salts)]
        each = np.arange(len(layers))
        tags = np.stack([proofs[each, 2 * layers], proofs[each, 2 * layers + 1]], axis=1)
        size, scratch = self._page_bytes, self._scratch()
        sealed, whole = scratch[:size], scratch.data
        exact = memory[:, :size]
        good = np.ones(len(layers), np.bool_)
        steps = zip(
            rows,
            map(self._cipher, _as_texts(np.concatenate(owners, axis=1))),
            _as_texts(nonces),
            self._bound(records["namespace"], records["key"], records["block"]),
            _as_texts(tags),
            strict=True,
        )
        for number, (row, cipher, nonce, bound, own) in enumerate(steps):
            page = exact[row]
            sealed[:] = page
            whole[size:] = own
            try:
                cipher.decrypt_into(nonce, whole, bound, page.data)
            except InvalidTag:
                good[number] = False
        return good


def key_check(secret: bytes, store_id: bytes) -> bytes:
    """16 bytes that tell whether a secret is a store's, and nothing of the secret."""
    return HKDF(SHA256(), 16, store_id, b"prefetchd check").derive(secret)


def _as_bytes(rows: NDArray[np.generic]) -> Bytes:
    flat = np.ascontiguousarray(rows)
    return flat.view(np.uint8).reshape(len(rows), -1)


def _as_texts(rows: NDArray[np.generic]) -> list[bytes]:
    """The bytes of each row."""
    raw = _as_bytes(rows)
    size = raw.shape[1]
    texts: list[bytes] = raw.view(f"V{size}").reshape(-1).tolist()
    return texts
