"""Turns seconds and counts of a step into cost columns for people. Pure.

No column is a number of the training: they go to the curves, the daemon and `steps.jsonl`, never into the history.
"""

from collections.abc import Mapping

__all__ = ["step_costs"]


def step_costs(
    phases: Mapping[str, float],
    parts: Mapping[str, float],
    *,
    step_s: float,
    waited_s: float,
    trained_tokens: int,
    memory: int,
) -> dict[str, float]:
    """Returns all timings of a whole step of this rank.

    Args:
        phases: `generate_s`, `score_s`, `update_s`, `eval_s` if the step was evaluated, `tokens_per_second` (sampled
            over all ranks, divided by the seconds of sampling).
        parts: `actor_update_s`, `critic_update_s`, `communication_s` (`trainer.measures.stopwatch`).
        step_s: from the end of the previous step, with saves and all waiting.
        waited_s: in small collectives between the ranks (`Collective.waited_s`).
        trained_tokens: that the actor was updated on, over all ranks and epochs.
        memory: `memory_bytes`.

    Returns:
        phases and parts, and `step_s`; `communication_share` of the step; `actor_tokens_per_second` of the actor's
        updates; `memory_bytes`.
    """
    communication_s = parts.get("communication_s", 0.0) + waited_s
    actor_s = parts.get("actor_update_s", 0.0)
    return {
        **phases,
        **parts,
        "communication_s": communication_s,
        "step_s": step_s,
        "communication_share": min(communication_s / step_s, 1.0) if step_s > 0.0 else 0.0,
        "actor_tokens_per_second": trained_tokens / actor_s if actor_s > 0.0 else 0.0,
        "memory_bytes": float(memory),
    }
