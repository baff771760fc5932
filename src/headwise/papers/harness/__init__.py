"""From claims to findings: trials are run anywhere, kept on disk, judged, and drawn.

Claims come in as values; nothing here knows which claims there are.
"""
