import json

import pytest

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import INT8
from disagg.errors import LayoutMismatch, ProtocolError
from tests.kv.kv_parts import WINDOW, groups_layout, mixed_layout


def test_a_full_layer_keeps_every_row_from_the_start_on() -> None:
    layer = LayerLayout("full", 1, 2, 2)
    assert layer.rows(5) == range(5)
    assert layer.rows(5, 3) == range(3, 5)


@pytest.mark.parametrize("tokens", [0, WINDOW - 1, WINDOW, WINDOW + 1, 100])
def test_a_sliding_layer_keeps_the_last_window_of_rows(tokens: int) -> None:
    layer = mixed_layout().layers[1]
    assert list(layer.rows(tokens)) == list(range(tokens))[-WINDOW:]


def test_a_state_layer_has_no_rows() -> None:
    assert len(mixed_layout().layers[2].rows(5)) == 0


def test_nbytes_counts_rows_and_states_and_is_zero_where_there_are_no_tokens() -> None:
    layout = mixed_layout("float32")
    full, sliding, state, latent = 3 * 12 * 4, 2 * 8 * 4, 30 * 4 + 4 * 2, 6 * 4
    assert layout.nbytes(10) == full * 10 + sliding * WINDOW + state + latent * 10
    assert layout.nbytes(10, 8) == full * 2 + sliding * 2 + state + latent * 2
    assert layout.nbytes(0) == layout.nbytes(4, 4) == 0


def test_int8_halves_what_divides_into_groups_and_nothing_else() -> None:
    coder = Layout((LayerLayout("full", 4, 128, 128),) * 48, "bfloat16")
    assert (coder.nbytes(1), coder.nbytes(1, wire=INT8)) == (98304, 52224)
    assert mixed_layout().nbytes(10, wire=INT8) == mixed_layout().nbytes(10)
    keys_and_values, state = 2 * (64 + 2 * 2) + 2 * 80, 24
    assert groups_layout().nbytes(3, 2, INT8) == keys_and_values + (128 + 8) + (64 + 4) + (192 + 12) + state


def test_a_layout_survives_json() -> None:
    layout = mixed_layout()
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_a_mismatch_names_the_field_and_both_values() -> None:
    other = Layout(
        (*mixed_layout().layers[:1], LayerLayout("sliding", 2, 4, 4, window=8), *mixed_layout().layers[2:]), "bfloat16"
    )
    with pytest.raises(LayoutMismatch, match=r"layers\[1\]\.window: decode has 7, prefill has 8"):
        mixed_layout().require_same(other, mine="decode", theirs="prefill")


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "int3"},
        {"layers": []},
        {"layers": None},
        {"layers": [{}]},
        {"layers": [{"kind": "full", "kv_heads": 1e400, "key_dim": 1, "value_dim": 1, "window": None, "states": []}]},
        {"layers": [{"kind": "odd", "kv_heads": 1, "key_dim": 1, "value_dim": 1, "window": None, "states": []}]},
    ],
)
def test_a_malformed_layout_is_a_protocol_error(damage: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_json({**mixed_layout().to_json(), **damage})
