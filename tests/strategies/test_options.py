"""What can be asked of parameter servers."""

import pytest

from toolkit.errors import StrategyError
from toolkit.strategies.options import ParameterServerOptions


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_staleness": -1}, "at least 0"),
        ({"max_staleness": 1.5}, "a whole number"),
        ({"max_staleness": True}, "a whole number"),
        ({"variables": "everywhere"}, "round_robin, balanced, sharded"),
        ({"shards": 0, "variables": "sharded"}, "at least 1"),
        ({"shards": 2}, "keeps variables whole"),
        ({"min_shard_bytes": 0}, "at least 1"),
        ({"steps_per_dispatch": 0}, "at least 1"),
        ({"synchronous": True, "max_staleness": 2}, "Leave one of the two out"),
        ({"synchronous": True, "steps_per_dispatch": 2}, "Leave one of the two out"),
    ],
)
def test_what_cannot_be_is_said(wrong, said):
    with pytest.raises(StrategyError, match=said):
        ParameterServerOptions(**wrong)
