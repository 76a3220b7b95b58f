"""Names of units in few words."""

import pytest

from actstore.display.naming import joined, layer_pattern, pattern_of, short


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["head"], "head"),
        (["wte", "wpe"], "wte, wpe"),
        (["blocks.0", "blocks.1", "blocks.2", "blocks.4"], "blocks.0-2, 4"),
        (["h.0.attn", "h.1.attn", "h.0.mlp"], "h.0-1.attn, h.0.mlp"),
        (["layer1.0", "layer1.1", "layer2.0"], "layer1.0-1, layer2.0"),
        (["b.3", "b.1", "b.2"], "b.3, 1-2"),
        (["b.07", "b.08"], "b.07, b.08"),
        ([f"blocks.{i}" for i in range(0, 64, 2)], "blocks.0, 2, 4, 6, 8, 10 and 26 more"),
        (["a" * 60], "a" * 60),
        (["a" * 60, "b"], "a" * 60 + " and 1 more"),
    ],
)
def test_runs_are_written_as_such(names: list[str], said: str) -> None:
    assert short(names, 36) == said


def test_names_that_differ_in_numbers_have_one_pattern() -> None:
    assert pattern_of("layer1.10.conv") == pattern_of("layer2.3.conv") == "layer#.#.conv"
    assert pattern_of("norm") == pattern_of("head") == ""


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["head"], "head"),
        ([f"blocks.{i}.attn" for i in range(32)], "blocks.0-31.attn"),
        (["b.0.mlp.2", "b.1.mlp.2"], "b.0-1.mlp.2"),
        (["b.1", "b.0", "b.2", "b.7"], "b.0-2,7"),
        (["0", "2", "3"], "0,2-3"),
    ],
)
def test_equal_layers_have_one_name(names: list[str], said: str) -> None:
    assert len({layer_pattern(name) for name in names}) == 1
    assert joined(names) == said


def test_numbers_inside_of_words_are_no_indices() -> None:
    assert layer_pattern("layer1.10.conv2") == "layer1.#.conv2"
    assert layer_pattern("b.07") == "b.07"
    assert layer_pattern("b.1.mlp.0") != layer_pattern("b.1.mlp.2")  # parts of one layer
