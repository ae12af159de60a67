"""Facts: what arrives, and what an operator reads."""

from __future__ import annotations

import pytest
from pyinfra.api.exceptions import FactProcessError

from gpufleet.facts import NodeSnapshot


def test_words_of_the_node_before_the_document_do_no_harm():
    assert NodeSnapshot().process(["Authorized users only.", '{"schema": 1}']) == {"schema": 1}


@pytest.mark.parametrize("output", [["Killed"], ["one", "two", "42"], ["[]"], []])
def test_what_is_no_document_is_quoted(output):
    """As the one exception that pyinfra turns into a failed host instead of an aborted run."""
    with pytest.raises(FactProcessError, match="the snapshot of the node printed") as error:
        NodeSnapshot().process(output)

    assert (output[-1] if output else "nothing") in str(error.value)
