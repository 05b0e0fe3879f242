"""The journal of a run: what happened (`events.jsonl`), where it stands (`status.json`), numbers (`steps.jsonl`)."""
