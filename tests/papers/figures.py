"""Figures of claims, drawn for every result that is judged."""

from tests import lanes

_drawn = set()


def assert_drawn(figure, results) -> None:
    """Whether a claim's figure is a chart of these results; in the fast lane of its first only."""
    if not lanes.is_fast or figure not in _drawn:
        _drawn.add(figure)
        assert figure(results).to_dict()
