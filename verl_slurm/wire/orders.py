"""Tells processes that stand by what to become: one msgpack map through a pipe, ended by the end of the pipe."""

import os

import msgspec


class Orders(msgspec.Struct, frozen=True):
    """What a rank, or the launcher of a node's ranks, is started with. As bytes, which need not be text."""

    argv: list[bytes]
    """The arguments of `verl_slurm.rendezvous` or of `verl_slurm_daemon.agent.ranks`."""
    environ: list[bytes]
    """`NAME=VALUE`, all of them."""

    @classmethod
    def of(cls, argv: list[str], environ: dict[str, str]) -> "Orders":
        """Takes what `subprocess` would take."""
        return cls(
            [os.fsencode(word) for word in argv], [os.fsencode(f"{k}={v}") for k, v in environ.items()]
        )

    @classmethod
    def read(cls, data: bytes) -> "Orders":
        """Raises msgspec.DecodeError: not written by `encode`."""
        return msgspec.msgpack.decode(data, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def words(self) -> list[str]:
        return [os.fsdecode(word) for word in self.argv]

    def variables(self) -> dict[str, str]:
        return dict(os.fsdecode(one).partition("=")[::2] for one in self.environ)
