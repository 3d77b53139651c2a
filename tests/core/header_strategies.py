"""Strategies for header values, and the time at which tests parse them."""

from __future__ import annotations

from hypothesis import strategies as st

NOW = 784_111_777.0  # 6 November 1994, 08:49:37, the example date of RFC 9110

texts = st.one_of(
    st.text(),
    st.text(alphabet="0123456789.-+_eE \t", max_size=20),
    st.text(alphabet='"\\;=,rt0123456789. \t?:@%a*', max_size=30),
    st.text(alphabet="SunayNovGMT0123456789:-, ", max_size=32),
)
