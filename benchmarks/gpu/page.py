"""The figures as Markdown, for a terminal and for pages. docs/gpu.md tells what the columns mean."""

from benchmarks.gpu.records import Result


def page(result: Result) -> str:
    """Conditions and three tables."""
    where, machine = result.where, result.environment
    head = [
        f"**{result.label}**: `{result.command}`, {machine.started_utc}, commit {machine.commit or 'unknown'}",
        "",
        f"* {where.name}"
        + (f", {where.memory_gib:.0f} GiB, driver {where.driver}, CUDA {where.cuda}" if where.driver else ""),
        f"* {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB; load before and after: "
        + ", ".join(f"{load:.1f}" for load in (machine.load_before[0], machine.load_after[0])),
        "* " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"* a model of {result.parameters / 1e6:.1f} million parameters, GRPO, one rank",
        *(f"* left out: {text}" for text in result.left_out),
    ]
    runs = [
        (
            f"| {run.precision} | {run.step_s:.3f} | {run.generate_s:.3f} | {run.score_s:.3f} | {run.update_s:.3f} "
            f"| {run.state_gib:.2f} | {run.emergency_s:.2f} | {run.resume_s:.2f} | {'yes' if run.same_bits else 'NO'} |"
        )
        for run in result.runs
    ]
    saves = [
        (
            f"| {save.gib:.2f} | {'yes' if save.pinned else 'no'} | {save.begin_ms:.2f} | {save.fence_ms:.1f} "
            f"| {save.gib / (save.fence_ms / 1e3):.1f} | {save.durable_s:.2f} | {save.ready_s:.2f} "
            f"| {save.first_fence_ms:.1f} | {save.warm_s:.2f} |"
        )
        for save in result.saves
    ]
    sampling = [
        (
            f"| {each.dtype} | {each.rows} | {each.tokens} | {each.weight_gib:.2f} | {each.eager_ms:.2f} "
            f"| {'-' if each.graph_ms is None else f'{each.graph_ms:.2f}'} "
            f"| {'-' if each.first_graph_s is None else f'{each.first_graph_s:.2f}'} "
            f"| {'yes' if each.same_bits else 'NO'} | {each.same_tokens:.2f} |"
        )
        for each in result.sampling
    ]
    return "\n".join(
        [
            *head,
            "",
            "| precision | step s | generate | score | update | GiB | emergency s | resume s | same bits |",
            "| --- " + "| ---: " * 7 + "| --- |",
            *runs,
            "",
            "| state GiB | pinned | begin ms | fence ms | GiB/s | durable s | ready s | first fence ms | at once s |",
            "| ---: | --- " + "| ---: " * 7 + "|",
            *saves,
            "",
            "| sampled in | rows | tokens | GiB read | ms a token | by graph | first s | same bits | same tokens |",
            "| --- " + "| ---: " * 6 + "| --- | ---: |",
            *sampling,
            "",
        ]
    )
