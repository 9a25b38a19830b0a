"""Who stands behind a commit? Signatures of commit ids by Ed25519 keys, as objects beside the
store's others.

A commit's id is the hash of its document, which names everything below by its hash. So a signature
of the id is one of every byte. Keys are files of OpenSSH's format: `ssh-keygen -t ed25519` makes
such too. A private key may be in an ssh-agent instead: then its public key says which.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable, Untrusted
from ckptstore.plugin.files import check_path
from ckptstore.plugin.model import (
    CommitId,
    KeyId,
    digest,
    parse_signature_key,
    signature_key,
    signatures_prefix,
)
from ckptstore.plugin.storage import Storage, put_finished
from ckptstore.plugins.signing.ssh_agent import sign_by_agent

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

DOMAIN = b"ckptstore commit signature 1\0"
"""Begins what is signed, so that a signature for another purpose is none of a commit."""

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One file of public keys, or several."""


class Signature(NamedTuple):
    """A signature of a commit: the key's id, its public key, and 64 bytes."""

    key: KeyId
    public: bytes
    signature: bytes


def key_id(public: bytes) -> KeyId:
    """The id of a public key: the first 16 bytes of its BLAKE3."""
    return KeyId(digest(public)[:16].hex())


def new_key(path: str | os.PathLike[str]) -> KeyId:
    """Make a key pair: the private key at `path`, for its owner only, the public one at `path.pub`.

    Raises `InvalidInput` if one of the files is there.
    """
    serialization, keys = _cryptography()
    private = keys.Ed25519PrivateKey.generate()
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    place = Path(path)
    check_path(place)
    files = (
        (place, secret, 0o600),
        (place.with_name(f"{place.name}.pub"), public + b"\n", 0o644),
    )
    for file, _, _ in files:
        if os.path.lexists(file):
            raise InvalidInput(f"{file} is there; name a new file")
    for file, data, mode in files:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(data)
        except OSError as error:
            raise Unavailable(f"{file} cannot be written: {error.strerror}") from error
    return key_id(private.public_key().public_bytes_raw())


def sign(storage: Storage, commit: CommitId, key: str | os.PathLike[str]) -> KeyId:
    """Sign a commit with the private key in the file `key`, or by the ssh-agent that holds the
    private key of a public one in this file. Idempotent.

    Raises `InvalidInput` for another file, and as `ssh_agent.sign_by_agent`.
    """
    if _read(key).startswith(b"ssh-"):
        public = _one_public(key)
        signature = sign_by_agent(public, _message(commit))
    else:
        private = _private(key)
        public, signature = private.public_key().public_bytes_raw(), private.sign(_message(commit))
    made = Signature(key_id(public), public, signature)
    if not is_valid(commit, made):
        raise InvalidInput(f"the ssh-agent's signature by the key in {key} is wrong; try another")
    put_finished(storage, signature_key(commit, made.key), public + signature)
    return made.key


def signatures_of(storage: Storage, commit: CommitId) -> list[Signature]:
    """The signatures of a commit, by key id, which prove nothing until they are verified. Raises
    `Corrupt` for what is none."""
    found = []
    for key, _ in sorted(storage.list(signatures_prefix(commit))):
        named = parse_signature_key(key)
        if named is not None:
            found.append(_decoded(key, named[1], storage.read(key)))
    return found


def verify(storage: Storage, commit: CommitId, keys: Files) -> list[KeyId]:
    """Check that one of the public keys in files signed a commit; returns the ids of those that
    did.

    Raises:
        Untrusted: None of them did.
        InvalidInput: A file has no such key.
    """
    trusted = {key_id(key.public_bytes_raw()): key for key in _public(keys)}
    found = signatures_of(storage, commit)
    good = [each.key for each in found if each.key in trusted and is_valid(commit, each)]
    if not good:
        by = ", ".join(each.key[:12] for each in found) or "nobody"
        raise Untrusted(
            f"commit {commit[:12]} has no valid signature by {', '.join(k[:12] for k in trusted)}; "
            f"it is signed by {by}; get it from a place that you trust, or add the key"
        )
    return good


def is_valid(commit: CommitId, signature: Signature) -> bool:
    """Whether a signature is one of `commit` by the key that it names."""
    _, keys = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        public = keys.Ed25519PublicKey.from_public_bytes(signature.public)
        public.verify(signature.signature, _message(commit))
    except InvalidSignature:
        return False
    return True


def copy_signatures(source: Storage, target: Storage, commits: Collection[CommitId]) -> int:
    """Copy the signatures of `commits` that the target lacks, but for those that cannot be read, or
    that a gc of the source deletes meanwhile; returns their number."""
    there = {key for key, _ in target.list("signatures/")}
    copied = 0
    for key, _ in source.list("signatures/"):
        named = parse_signature_key(key)
        if named and named[0] in commits and key not in there:
            try:
                data = source.read(key)
            except (Corrupt, NotFound):  # fsck tells of it
                continue
            copied += put_finished(target, key, data)
    return copied


def damaged(storage: Storage, known: Mapping[CommitId, object]) -> Iterable[tuple[str, str]]:
    """The keys of objects in `signatures/` that are no valid signature of a known commit, and why.
    Without the extra `sign`, the bytes are compared with the key's id alone."""
    for key, _ in sorted(storage.list("signatures/")):
        named = parse_signature_key(key)
        if named is None or named[0] not in known:
            continue
        try:
            found = _decoded(key, named[1], storage.read(key))
            if not is_valid(named[0], found):
                yield key, "it does not verify"
        except Corrupt as error:
            yield key, str(error)
        except (InvalidInput, NotFound):
            continue


def _decoded(key: str, name: KeyId, data: bytes) -> Signature:
    public, signature = data[:PUBLIC_BYTES], data[PUBLIC_BYTES:]
    if len(signature) != SIGNATURE_BYTES or key_id(public) != name:
        raise Corrupt(
            f"{key} is no signature by the key that it names; delete it and sign the commit again"
        )
    return Signature(name, public, signature)


def _message(commit: CommitId) -> bytes:
    return DOMAIN + bytes.fromhex(commit)


def _private(path: str | os.PathLike[str]) -> "Ed25519PrivateKey":
    serialization, keys = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm

    data = _read(path)
    try:
        found = serialization.load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput(
            f"{path} has no private key without a passphrase ({error}); make one with "
            "`ckptstore sign --new-key FILE`, or give it to an agent with `ssh-add` and name the "
            ".pub file"
        ) from error
    if not isinstance(found, keys.Ed25519PrivateKey):
        raise InvalidInput(f"the key in {path} is not Ed25519; `ssh-keygen -t ed25519` makes one")
    key: Ed25519PrivateKey = found
    return key


def _one_public(path: str | os.PathLike[str]) -> bytes:
    """The raw bytes of the only public key in a file."""
    found = _public(path)
    if len(found) > 1:
        raise InvalidInput(f"{path} has {len(found)} public keys; name a file with the one to use")
    raw: bytes = found[0].public_bytes_raw()
    return raw


def _public(files: Files) -> "list[Ed25519PublicKey]":
    serialization, keys = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm

    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    found = []
    for path in paths:
        for line in _read(path).splitlines():
            if not line.strip() or line.lstrip().startswith(b"#"):
                continue
            try:
                key = serialization.load_ssh_public_key(line)
            except (ValueError, TypeError, UnsupportedAlgorithm) as error:
                raise InvalidInput(
                    f"{path} has a line that is no public key ({error}); wanted the .pub file of "
                    "a key"
                ) from error
            if not isinstance(key, keys.Ed25519PublicKey):
                raise InvalidInput(f"{path} has a key that is not of Ed25519")
            found.append(key)
    if not found:
        raise InvalidInput("no public key was given; name the .pub files of keys that you trust")
    return found


def _read(path: str | os.PathLike[str]) -> bytes:
    check_path(Path(path))
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise InvalidInput(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from error


def _cryptography() -> tuple[Any, Any]:
    """The modules that read keys, and that sign."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InvalidInput(f"signatures: {error}; install ckptstore[sign]") from error
    return serialization, ed25519
