import json

import pytest

from benchmarks import runtime_state


@pytest.mark.parametrize("ids", ["int64", "int32"])
def test_the_benchmark_checks_every_codec_and_says_its_figures_in_both_forms(
    ids: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runtime_state.main(["--small", "--ids", ids]) == 0
    assert "| pickle 5 + zstd-3 |" in capsys.readouterr().out
    assert runtime_state.main(["--small", "--ids", ids, "--json"]) == 0
    codecs = json.loads(capsys.readouterr().out)["codecs"]
    assert len(codecs) == 5
    assert all(figure > 0 for row in codecs.values() for figure in row.values())


def test_a_codec_that_loses_a_bit_is_found() -> None:
    arrays = runtime_state.rollouts(2, 3, "int64")
    wrong = {name: array.copy() for name, array in arrays.items()}
    runtime_state._check(wrong, arrays)
    wrong["response_ids"][1, 1] ^= 1
    with pytest.raises(AssertionError):
        runtime_state._check(wrong, arrays)


def test_smaller_than_the_peers_on_what_a_step_holds() -> None:
    arrays = runtime_state.rollouts(64, 1000, "int64")
    sizes = {name: len(encode()) for name, (encode, _) in runtime_state.codecs(arrays, False).items()}
    ours = sizes.pop("verl-slurm (byte shuffle + zstd-1)")
    assert ours < min(sizes.values())
