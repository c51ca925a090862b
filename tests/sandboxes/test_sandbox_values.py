"""Values survive the encoding in which sandboxes and their host exchange them."""

import json
from typing import Any, NoReturn

from hypothesis import given
from hypothesis import strategies as st

from agentfly_kit.sandboxes.inside import values

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN |= st.decimals(allow_nan=False) | st.dates() | st.times() | st.datetimes() | st.timedeltas() | st.uuids()
KEYS = st.text() | st.integers()


def unknown(value: Any) -> NoReturn:
    raise ValueError(value)


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner)))
def test_values_are_decoded_as_they_were_encoded(value: Any) -> None:
    assert values.decode(json.loads(json.dumps(values.encode(value, unknown))), unknown) == value
