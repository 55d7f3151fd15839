"""Names that tell a student from another, and nobody who.

Layer 6. Invariant: the same name and the same key give the same pseudonym; without the key, which only its owner can
read, no name can be tried against one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from dlojz.schema import LabError
from dlojz.text import say

KEY_BYTES = 32
DIGITS = 10
"""Hexadecimal digits of a pseudonym: of 2000 names, two are alike with a probability below 2e-6."""


def key_file() -> Path:
    """Where the key is kept by default: the user's configuration, not the folder of the class."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base, "dlojz", "board.key")


def pseudonyms(path: Path | None = None) -> Callable[[str], str]:
    """A function from names to pseudonyms.

    Args:
        path: file of the key, made on first use with mode 0600.

    Raises:
        LabError: if the file is not the user's own, can be read by others, holds no key, or cannot be made.

    Source: HMAC, RFC 2104, with SHA-256.
    """
    key = _key(path or key_file())
    return lambda name: f"P-{hmac.new(key, os.fsencode(name), 'sha256').hexdigest()[:DIGITS]}"


def _key(path: Path) -> bytes:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _read(path)
        key = secrets.token_bytes(KEY_BYTES)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
        return key
    except OSError as error:
        raise LabError(
            say(
                en=f"the key of the pseudonyms, {path}, cannot be used: {error.strerror}; give another with --key.",
                fr=f"la clé des pseudonymes, {path}, est inutilisable : {error.strerror} ; donnez-en une autre avec "
                "--key.",
            )
        ) from None


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        private = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
        text = file.read(4 * KEY_BYTES) if private else b""
    if not private:
        raise LabError(
            say(
                en=f"the key of the pseudonyms, {path}, can be read by others: chmod 600 it, or make a new one.",
                fr=f"la clé des pseudonymes, {path}, est lisible par d’autres : faites chmod 600, ou créez-en une "
                "autre.",
            )
        )
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise LabError(
            say(
                en=f"the file {path} holds no key of {KEY_BYTES} bytes: remove it, and a new one is made.",
                fr=f"le fichier {path} ne contient pas de clé de {KEY_BYTES} octets : supprimez-le, une autre sera "
                "créée.",
            )
        )
    return key
