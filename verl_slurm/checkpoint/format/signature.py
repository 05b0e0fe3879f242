"""The manifest's HMAC: a process that can write the directory but lacks the key cannot forge a checkpoint.

`hmac` is HMAC-SHA256 (hex) over the bytes that `digest` is the SHA-256 of, under HKDF(key, "verl-slurm manifest v1").
These bytes name the checkpoint, step, attempt, schema, data set and each file with size and digest.

The check fails closed: with a key configured, a manifest without an HMAC is refused, since a forger would simply leave
it out. To resume from a checkpoint made before the key, name its digest in
`checkpoint.encryption.accept_unsigned`: that admits this one checkpoint. The check does not find an old genuine
checkpoint in place of a newer one, nor a checkpoint of another run with the same key. So use one key per run, and see
docs/decisions/0003-encryption.md.
"""

import hmac

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.checkpoint.format.manifest import signed_bytes
from verl_slurm.checkpoint.format.specification import Manifest

_MANIFEST_KEY = b"verl-slurm manifest v1"


def sign(manifest: Manifest, key: MasterKey) -> Manifest:
    """Returns `manifest`, already sealed, with its HMAC."""
    record = manifest.encryption
    # A reader finds the key by this id: with another one nobody could check the HMAC.
    if isinstance(record, msgspec.UnsetType) or record.key_id != key.id:
        raise ValueError("a manifest is signed with the key that its files were encrypted with")
    return msgspec.structs.replace(manifest, hmac=key.derive(_MANIFEST_KEY).hmac(signed_bytes(manifest)))


def authenticate(manifest: Manifest, keys: Keyring, *, where: object) -> None:
    """Checks that the manifest was made with our key.

    Raises:
        KeyRefused: it has no HMAC and was not accepted by its digest, or its key is not ours.
        CheckpointCorrupt: its HMAC does not match.
    """
    record, mac = manifest.encryption, manifest.hmac
    # Whichever of the two a forger leaves out, the check does not pass.
    if isinstance(record, msgspec.UnsetType) or isinstance(mac, msgspec.UnsetType):
        accepted = keys.accept_unsigned
        # By the digest, which `manifest.parse` has compared with the content.
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
    # Constant time: how much of a guess is right must not show.
    if not hmac.compare_digest(mac, key.derive(_MANIFEST_KEY).hmac(signed_bytes(manifest))):
        raise CheckpointCorrupt(
            "the manifest was not made with our key",
            where=where,
            found="another HMAC",
            remedy="somebody else wrote it: resume from an older checkpoint, and see who may write there",
        )


def signature_problem(manifest: Manifest, keys: Keyring | None) -> str:
    """Returns why a resume with these keys would refuse this manifest; empty if it would not, or without keys."""
    if keys is None:
        return ""
    try:
        authenticate(manifest, keys, where=manifest.name)
    except (KeyRefused, CheckpointCorrupt) as error:
        return f"{error.what}: {error.found}"
    return ""
