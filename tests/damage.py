"""JSON documents with one value that is wrong."""

import json


def changed(data, path, value):
    """A copy of JSON-ready data with one value replaced (or removed: `...`)."""
    copy = json.loads(json.dumps(data))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy


def paths(data, before=()):
    """The way to every value in JSON-ready data."""
    items = data.items() if isinstance(data, dict) else ()
    items = enumerate(data) if isinstance(data, list) else items
    for key, value in items:
        yield (*before, key)
        yield from paths(value, (*before, key))
