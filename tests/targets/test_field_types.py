"""The types of a manifest's fields: what is looked at once only."""

from hypothesis import given
from hypothesis import strategies as st

from k8sjob.targets.field_types import ANY, Message, Quantity, Seconds, fit, fits

SHAPES = st.recursive(
    st.sampled_from([None, str, int, bool, Seconds, Quantity, Message]),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=1)
        | st.dictionaries(st.sampled_from(["a", "b", ANY]), inner)
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.sampled_from([None, True, 1, 2**40, 2**70, 0.5, "x", "1Gi", "x" * 5000]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.dictionaries(st.just("a"), SHAPES))
def test_what_fits_is_what_stays_as_it_is(value, shape):
    assert fits(value, shape) == (fit(value, shape) == (value, []))
