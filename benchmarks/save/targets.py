"""The figures that this project holds itself to, each against what was measured in the same run. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.save.figures import Figures
from benchmarks.save.records import Mode, Run
from benchmarks.save.registry import PEERS

_LAZY, _EAGER, _COPY = "ours", "ours_eager", "copy"
_DCP_ASYNC = ("dcp_async", "dcp_process")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target.

    Attributes:
        figure: what is measured.
        target: the bound in words.
        found: what there was, in words; says what is missing where nothing was.
        met: None where it could not be measured.
    """

    figure: str
    target: str
    found: str
    met: bool | None


def verdicts(run: Run) -> list[Verdict]:
    """All targets that `run.what` asked about.

    Called by: tables.
    """
    figures = Figures(run.samples)
    peers = [name for name in run.peers if run.kinds[name] == "peer"]
    plain = [name for name in peers if not (name in PEERS and PEERS[name].hashes)]
    found: list[Verdict] = []
    if "stall" in run.what:
        stall = "stall of the training thread, fence included"
        found += [
            _against(figures, f"{stall}, lazy staging", _LAZY, peers, "loop", "stall", 0.2, "the best peer"),
            _against(
                figures, f"{stall}, eager staging", _EAGER, peers, "loop", "stall", 0.8, "the best peer"
            ),
            _against(
                figures, f"{stall}, eager staging", _EAGER, [_COPY], "loop", "stall", 1.4, "a plain copy"
            ),
        ]
    if "busy" in run.what:
        found.append(_lost(figures, plain))
    if "durable" in run.what:
        durable = "time to durable, SHA-256 included"
        asynchronous = [name for name in _DCP_ASYNC if name in peers]
        found += [
            _against(figures, durable, _LAZY, asynchronous, "direct", "durable", 0.4, "the faster DCP async"),
            _against(
                figures, durable, _LAZY, plain, "direct", "durable", 0.9, "the fastest peer, none hashes"
            ),
        ]
    found.append(_dual(figures))
    if "verify" in run.what:
        found.append(
            _within(figures, "verify, full re-read, cold", "verify", "verify", "verify", "plain_read", 1.25)
        )
    if "load" in run.what:
        found.append(
            _within(figures, "load, cold, fresh process", "load", "load", "load", "plain_read", 1.25)
        )
        dcp = ["dcp"] if "dcp" in peers else []
        found.append(_against(figures, "load, cold, fresh process", _LAZY, dcp, "load", "load", 1.0, "DCP"))
    if "memory" in run.what:
        found.append(_memory(figures, run.state_bytes))
    found.append(_exact(figures, run.peers))
    return found


def _against(
    figures: Figures,
    what: str,
    ours: str,
    peers: Iterable[str],
    mode: Mode,
    figure: str,
    bound: float,
    whom: str,
) -> Verdict:
    """Ours over each peer, each in the processes where both were measured: the greatest ratio counts."""
    ratios = {peer: ratio for peer in peers if (ratio := figures.ratio(ours, peer, mode, figure)) is not None}
    target = f"at most {bound:g} × {whom}"
    if not ratios:
        return _unknown(figures, what, target, ours)
    worst = max(ratios, key=lambda peer: ratios[peer])
    return Verdict(
        figure=what, target=target, found=f"{ratios[worst]:.2f} × {worst}", met=ratios[worst] <= bound
    )


def _within(
    figures: Figures, what: str, group: str, mode: Mode, figure: str, reference: str, bound: float
) -> Verdict:
    """One of our figures over another of the same samples."""
    target = f"at most {bound:g} × a plain read of the same files"
    measured, plain = (figures.of(group, _LAZY, mode, name) for name in (figure, reference))
    if measured is None or plain is None:
        return _unknown(figures, what, target, _LAZY)
    ratio = measured.median / plain.median
    return Verdict(figure=what, target=target, found=f"{ratio:.2f} ×", met=ratio <= bound)


def _lost(figures: Figures, plain: list[str]) -> Verdict:
    what = "training seconds lost per save, both cores busy"
    target = "at most the best peer (none hashes) + SHA-256 of the bytes on one core"
    best = figures.best(plain, "busy", "lost")
    digest = figures.best(["sha256"], "busy", "one_core")
    ours = figures.best([_LAZY], "busy", "lost")
    if best is None or digest is None or ours is None:
        return _unknown(figures, what, target, _LAZY)
    # Losses are differences and may be about nothing, so they are compared, not divided.
    bound = best[1].median + digest[1].median
    return Verdict(
        figure=what,
        target=target,
        found=f"{ours[1].median:.2f} s; {best[0]} {best[1].median:.2f} s + {digest[1].median:.2f} s",
        met=ours[1].median <= bound,
    )


def _dual(figures: Figures) -> Verdict:
    what, target = (
        "dual write, both durable and hashed",
        "at most 1.3 × the slower medium's raw write + fsync",
    )
    raw = [found for name in ("first", "second") if (found := figures.of("dual", "raw", "dual", name))]
    ours = figures.of("dual", _LAZY, "dual", "durable")
    if len(raw) < 2 or ours is None:
        return _unknown(figures, what, target, _LAZY)
    ratio = ours.median / max(medium.median for medium in raw)
    return Verdict(figure=what, target=target, found=f"{ratio:.2f} ×", met=ratio <= 1.3)


def _memory(figures: Figures, state_bytes: int) -> Verdict:
    what, target = "extra memory of a save", "at most 2 × the state"
    ours = figures.of("memory", _LAZY, "memory", "extra")
    if ours is None or not state_bytes:
        return _unknown(figures, what, target, _LAZY)
    ratio = ours.median / state_bytes
    return Verdict(figure=what, target=target, found=f"{ratio:.2f} ×", met=ratio <= 2.0)


def _exact(figures: Figures, peers: Iterable[str]) -> Verdict:
    what, target = "snapshots, the live state overwritten meanwhile", "every one bit-exact"
    ours = [figures.exact(name) for name in peers if name in (_LAZY, _EAGER)]
    compared, same = sum(found[0] for found in ours), sum(found[1] for found in ours)
    if not compared:
        return _unknown(figures, what, target, _LAZY)
    return Verdict(figure=what, target=target, found=f"{same} of {compared}", met=same == compared)


def _unknown(figures: Figures, what: str, target: str, ours: str) -> Verdict:
    return Verdict(figure=what, target=target, found=figures.errors.get(ours, "–"), met=None)
