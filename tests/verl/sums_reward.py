"""verl's custom reward function for the sums of `tests.verl.grpo`."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    said = solution_str.strip()
    digits = sum(letter.isdigit() for letter in said) / max(1, len(said))
    return 0.2 * digits + float(said.startswith(ground_truth))
