"""The manifest's HMAC: who can write the directory but has not the key cannot make a checkpoint.

`hmac` is HMAC-SHA256 (hex) over the bytes that `digest` is the SHA-256 of, under HKDF(key, "verl-slurm manifest
v1"). They name the checkpoint, step, epoch, schema, data set and each file with size and digest.

Fails closed: with a key configured a manifest without an HMAC is refused, or else whoever wants to forge one
would simply leave it out. To go on from a checkpoint of the time before the key, its digest is named in
`checkpoint.format.encryption.accept_unsigned`: that lets in this one checkpoint and no other.
What it does not find is an old genuine checkpoint in the place of a newer one, and one of another run
that has the same key: a key a run, and see docs/decisions/0003-encryption.md.
"""

import hmac

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.checkpoint.format.manifest import signed_bytes
from verl_slurm.checkpoint.format.specification import Manifest

__all__ = ["authenticate", "sign", "signature_problem"]

_MANIFEST_KEY = b"verl-slurm manifest v1"


def sign(manifest: Manifest, key: MasterKey) -> Manifest:
    """`manifest`, already sealed, with its HMAC."""
    record = manifest.encryption
    if isinstance(record, msgspec.UnsetType) or record.key_id != key.id:
        raise ValueError("a manifest is signed with the key that its files were encrypted with")
    return msgspec.structs.replace(manifest, hmac=key.derive(_MANIFEST_KEY).hmac(signed_bytes(manifest)))


def authenticate(manifest: Manifest, keys: Keyring, *, where: object) -> None:
    """Was this manifest made by somebody who has our key?

    Raises:
        KeyRefused: it has no HMAC and was not accepted by its digest, or is of a key that we have not.
        CheckpointCorrupt: its HMAC is another one.
    """
    record, mac = manifest.encryption, manifest.hmac
    if isinstance(record, msgspec.UnsetType) or isinstance(mac, msgspec.UnsetType):
        accepted = keys.accept_unsigned
        if accepted is not None and hmac.compare_digest(manifest.digest, accepted):
            return
        raise KeyRefused(
            "the checkpoint is not signed, and a key is configured",
            where=where,
            found=f"no HMAC in the manifest with digest {manifest.digest}",
            expected=f"one by key id {keys.current.id}",
            remedy="if you know it to be yours, set checkpoint.encryption.accept_unsigned to that digest",
        )
    key = keys.find(record.key_id, where=where)
    if not hmac.compare_digest(mac, key.derive(_MANIFEST_KEY).hmac(signed_bytes(manifest))):
        raise CheckpointCorrupt(
            "the manifest was not made with our key",
            where=where,
            found="another HMAC",
            remedy="somebody else wrote it: resume from an older checkpoint, and see who may write there",
        )


def signature_problem(manifest: Manifest, keys: Keyring | None) -> str:
    """Why a resume with these keys would not take this manifest; empty: it would, or there are no keys to ask."""
    if keys is None:
        return ""
    try:
        authenticate(manifest, keys, where=manifest.name)
    except (KeyRefused, CheckpointCorrupt) as error:
        return f"{error.what}: {error.found}"
    return ""
