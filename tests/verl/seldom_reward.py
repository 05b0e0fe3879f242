"""verl's custom reward function of a run that filters groups: often the same for all responses to a prompt."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    del data_source, ground_truth
    return float(sum(map(ord, solution_str)) % 8 == 0)
