"""Signed commits: who signed is found out, what was changed is refused, mirrors and gc keep in
step."""

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.core.ids import signature_key
from ckptstore.errors import Corrupt, InvalidInput, Unavailable, Untrusted
from ckptstore.plugins.signing import signatures
from ckptstore.store import internals_of
from tests.cli.running import call

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name in ("ours", "theirs"):
        found[name] = tmp_path / name
        signatures.new_key(found[name])
    return found


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "store")
    for step in range(4):
        store.commit({"w": torch.arange(3000.0) + step}, step=step)
    return store


def pub(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def sign(store: ckptstore.Store, key: Path, step: int = 3) -> str:
    storage, commit = internals_of(store).handle.storage, store.checkout(step).id
    return signature_key(commit, signatures.sign(storage, commit, key))


def test_a_signed_commit_is_checked_out_by_those_who_trust_the_key(
    store: ckptstore.Store, keys: dict[str, Path]
) -> None:
    sign(store, keys["ours"])
    sign(store, keys["ours"])
    both = [pub(keys["theirs"]), pub(keys["ours"])]
    snap = store.checkout(3, require_signature=both)
    assert torch.equal(snap.read("w"), torch.arange(3000.0) + 3)
    with pytest.raises(Untrusted, match=r"no valid signature by .*; it is signed by"):
        store.checkout(3, require_signature=pub(keys["theirs"]))
    with pytest.raises(Untrusted, match="it is signed by nobody"):
        store.checkout(2, require_signature=pub(keys["ours"]))


def test_a_signature_of_another_commit_or_key_is_none(
    store: ckptstore.Store, keys: dict[str, Path], tmp_path: Path
) -> None:
    key = sign(store, keys["ours"])
    place = tmp_path / "store"
    other = place / key.replace(store.checkout(3).id, store.checkout(2).id)
    shutil.copy(place / key, other)
    with pytest.raises(Untrusted):
        store.checkout(2, require_signature=pub(keys["ours"]))
    notes = [finding.what for finding in store.fsck().findings]
    assert notes == [f"signatures/{other.name}: it does not verify"]
    forged = (place / sign(store, keys["theirs"], 1)).read_bytes()
    ours = place / sign(store, keys["ours"], 1)
    ours.chmod(0o644)
    ours.write_bytes(forged)
    with pytest.raises(Corrupt, match="is no signature by the key that it names"):
        store.checkout(1, require_signature=pub(keys["ours"]))


def test_what_a_signature_stands_for_is_verified_by_ids(
    store: ckptstore.Store, keys: dict[str, Path]
) -> None:
    """Other bytes can be given a fitting checksum, and no fitting id."""
    sign(store, keys["ours"])
    assert store.checkout(3, require_signature=pub(keys["ours"]))._contents.reader.verify_ids


def test_mirrors_have_signatures_also_later_ones(
    store: ckptstore.Store, keys: dict[str, Path], tmp_path: Path
) -> None:
    ckptstore.open(tmp_path / "mirror").close()
    first = sign(store, keys["ours"], 3)
    store.push(tmp_path / "mirror")
    later = sign(store, keys["ours"], 2)
    store.push(tmp_path / "mirror")
    assert {(tmp_path / "mirror" / key).is_file() for key in (first, later)} == {True}
    with ckptstore.open(tmp_path / "mirror", read_only=True) as mirror:
        assert mirror.checkout(2, require_signature=pub(keys["ours"])).step == 2


def test_a_signature_that_cannot_be_read_keeps_no_mirror_from_the_tags(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    commit = store.log()[0].id
    rotten = tmp_path / "store" / signature_key(commit, signatures.KeyId("0" * 32))
    rotten.parent.mkdir(exist_ok=True)
    rotten.write_bytes(bytes(5000))
    store.tag("good", commit)
    store.mirror(tmp_path / "there")
    with ckptstore.open(tmp_path / "there") as there:
        assert there.tags() == {"good": commit}
    assert [finding.kind for finding in store.fsck().findings] == ["signature"]


def test_gc_deletes_the_signatures_of_purged_commits_alone(
    store: ckptstore.Store, keys: dict[str, Path], tmp_path: Path
) -> None:
    gone, stays = sign(store, keys["ours"], 0), sign(store, keys["ours"], 3)
    store.forget(0)
    store.gc()
    assert (tmp_path / "store" / gone).is_file(), "a forgotten commit may come back"
    store.gc(grace_s=0)
    assert not (tmp_path / "store" / gone).exists()
    assert (tmp_path / "store" / stays).is_file()


def test_keys_are_those_of_openssh(
    store: ckptstore.Store, keys: dict[str, Path], tmp_path: Path
) -> None:
    assert os.stat(keys["ours"]).st_mode & 0o777 == 0o600
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    made = tmp_path / "made"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made)]
    subprocess.run(words, check=True)
    sign(store, made)
    assert store.checkout(3, require_signature=pub(made)).step == 3


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an ssh-agent that runs, with its socket."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("ssh-agent is not installed (openssh-client)")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has at most 107 bytes
        place = Path(folder, "agent")
        process = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL)
        try:
            while not place.exists():
                assert process.poll() is None
                time.sleep(0.01)
            monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
            yield place
        finally:
            process.kill()
            process.wait()


def test_an_agent_signs_with_a_key_whose_file_has_a_passphrase(
    store: ckptstore.Store, agent: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    made = tmp_path / "made"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-C", "at home", "-N", "secret", "-f", str(made)]
    subprocess.run(words, check=True)
    with pytest.raises(InvalidInput, match="give it to an agent with `ssh-add`"):
        sign(store, made)
    with pytest.raises(InvalidInput, match="does not sign with this key; `ssh-add FILE`"):
        sign(store, pub(made))
    asked = tmp_path / "ask"
    asked.write_text("#!/bin/sh\necho secret\n")
    asked.chmod(0o700)
    asking = {**os.environ, "SSH_ASKPASS": str(asked), "SSH_ASKPASS_REQUIRE": "force"}
    for key in (made, keys["theirs"]):
        subprocess.run(["ssh-add", "-q", str(key)], check=True, env=asking)
    made.unlink()
    named = sign(store, pub(made))
    assert store.checkout(3, require_signature=pub(made)).step == 3
    assert sign(store, pub(made)) == named
    result = call("sign", "2", "--key", str(pub(made)), "-s", str(tmp_path / "store"))
    assert "is signed by" in result.out
    assert call("verify", "2", "--keys", str(pub(made)), "-s", str(tmp_path / "store")).code == 0
    with pytest.raises(Untrusted):
        store.checkout(3, require_signature=pub(keys["theirs"]))
    both = tmp_path / "both.pub"
    both.write_bytes(pub(made).read_bytes() + pub(keys["ours"]).read_bytes())
    with pytest.raises(InvalidInput, match="has 2 public keys"):
        sign(store, both)


def test_an_agent_that_is_not_there_or_answers_nonsense_is_named(
    store: ckptstore.Store, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(InvalidInput, match=r"no ssh-agent: \$SSH_AUTH_SOCK is not set"):
        sign(store, pub(keys["ours"]))
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setenv("SSH_AUTH_SOCK", f"{folder}/agent")
        with pytest.raises(Unavailable, match=r"does not answer: .*No such file"):
            sign(store, pub(keys["ours"]))
        listener.bind(f"{folder}/agent")
        listener.listen()
        kind = b"\0\0\0\x0bssh-ed25519"
        wrong = b"\x0e\0\0\0\x53" + kind + b"\0\0\0\x40" + bytes(64)
        for answer, error, says in (
            (b"", Unavailable, "ends early"),
            (b"\0\0\0\x09abc", Unavailable, "ends early"),
            (b"\xff\xff\xff\xff", Unavailable, "too long"),
            (b"\0\0\0\x01\x05", InvalidInput, "does not sign with this key"),
            (len(wrong).to_bytes(4) + wrong, InvalidInput, "is wrong"),
        ):
            thread = threading.Thread(target=answer_once, args=(listener, answer))
            thread.start()
            with pytest.raises(error, match=says):
                sign(store, pub(keys["ours"]))
            thread.join()
    assert signatures.signatures_of(internals_of(store).handle.storage, store.checkout(3).id) == []


def answer_once(listener: socket.socket, answer: bytes) -> None:
    """Say `answer` to whoever asks first, once the question is here."""
    asks, _ = listener.accept()
    with asks:
        asks.recv(1 << 16)
        asks.sendall(answer)


def test_files_that_are_no_keys_are_refused(
    store: ckptstore.Store, keys: dict[str, Path], tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    odd.write_text("nothing\n")
    with pytest.raises(InvalidInput, match="no private key without a passphrase"):
        sign(store, odd)
    with pytest.raises(InvalidInput, match="has a line that is no public key"):
        store.checkout(3, require_signature=odd)
    with pytest.raises(InvalidInput, match="has a line that is no public key"):
        store.checkout(3, require_signature=keys["ours"])  # the private one
    odd.write_text(f'command="x" {pub(keys["ours"]).read_text()}')
    with pytest.raises(InvalidInput, match="has a line that is no public key"):
        store.checkout(3, require_signature=odd)
    odd.write_text("ssh-other AAAA\n")
    with pytest.raises(InvalidInput, match="has a line that is no public key"):
        sign(store, odd)
    with pytest.raises(InvalidInput, match="no public key was given"):
        store.checkout(3, require_signature=[])
    with pytest.raises(InvalidInput, match="cannot be read"):
        store.checkout(3, require_signature=tmp_path / "absent")
    with pytest.raises(InvalidInput, match="is there; name a new file"):
        signatures.new_key(keys["ours"])


def test_a_pair_of_keys_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "key.pub").touch()
    with pytest.raises(InvalidInput, match=r"key\.pub is there; name a new file"):
        signatures.new_key(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_the_commands_make_keys_sign_and_verify(store: ckptstore.Store, tmp_path: Path) -> None:
    key, place = str(tmp_path / "key"), str(tmp_path / "store")
    made = call("sign", "--new-key", key, "--json").document
    assert call("sign", "latest", "--key", key, "-s", place).code == 0
    found = call("verify", "latest", "--keys", f"{key}.pub", "-s", place, "--json").document
    assert found["keys"] == [made["key"]]
    assert found["commit"] == store.checkout().id
    refused = call("verify", "1", "--keys", f"{key}.pub", "-s", place)
    assert refused.code == 1
    assert "it is signed by nobody" in refused.err
    assert call("sign", "latest", "-s", place).code == 2
    assert call("verify", "latest", "-s", place).code == 2
